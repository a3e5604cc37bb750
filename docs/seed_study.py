"""The table of docs/metrics.md on seeds: how often an interval contains the mean difference over all seeds.

Two methods are scored on the same patients, one case each, in the same folds. The difference of patient i in
fold f with seed k is

    0 + patient_i + training_kf + noise_ki

patient: one method suits a patient more than the other. training: every pair of seed and fold is a training
of its own. noise: of one patient in one training. The true difference, over all patients and seeds, is 0.
An effect of size 1 has the same standard error as the patients and the noise of one seed together.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from semidice.statistics.resampling import paired_test
from semidice.statistics.seeds import seed_variance, with_seed_variance

Row = Sequence[str]

NUM_PATIENTS, NUM_TRIALS, NUM_RESAMPLES, LEVEL = 40, 2000, 500, 0.05
# standard deviations of the patients' effects and of the noise
PATIENT, NOISE = 1.0, 1.0
# of the mean over patients, with one seed and without an effect of the training
ERROR = float(np.sqrt((PATIENT**2 + NOISE**2) / NUM_PATIENTS))
SEEDS = (1, 3, 5)


class Setting(NamedTuple):
    """How trainings differ: the size of their effect, the number of folds, and how often a training fails."""

    size: float
    num_folds: int = 5
    failures: float = 0.0


SETTINGS: Mapping[str, Setting] = {
    "none": Setting(0.0),
    "half": Setting(0.5),
    "1": Setting(1.0),
    "3": Setting(3.0),
    "3, without folds": Setting(3.0, num_folds=1),
    "3, from a tenth of the trainings, which fail": Setting(3.0, failures=0.1),
}


class Judged(NamedTuple):
    """Share of the trials whose interval contains 0, and the mean half width of the intervals."""

    coverage: float
    half_width: float


def simulated(setting: Setting, num_seeds: int, num_trials: int, rng: np.random.Generator) -> np.ndarray:
    """Differences of two methods, (seeds, patients, trials)."""
    effect = _effects(setting, rng, (num_seeds, setting.num_folds, num_trials))[:, folds_of(setting)]
    patient = PATIENT * rng.standard_normal((NUM_PATIENTS, num_trials))
    noise = NOISE * rng.standard_normal((num_seeds, NUM_PATIENTS, num_trials))
    differences: np.ndarray = patient + effect + noise
    return differences


def folds_of(setting: Setting) -> list[int]:
    """The fold of each patient."""
    return [number % setting.num_folds for number in range(NUM_PATIENTS)]


def _effects(setting: Setting, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of each seed and fold, with mean 0; the mean over the folds of one seed has the setting's size."""
    if setting.failures == 0:
        standard = rng.standard_normal(shape)
    else:
        share = setting.failures
        standard = ((rng.random(shape) < share) - share) / np.sqrt(share * (1 - share))
    effects: np.ndarray = setting.size * ERROR * np.sqrt(setting.num_folds) * standard
    return effects


@cache
def judged(name: str, num_seeds: int, cover_seeds: bool) -> Judged:
    """The intervals of a setting with a number of seeds; all trials share the draws of the patients."""
    setting, rng = SETTINGS[name], np.random.default_rng([list(SETTINGS).index(name), num_seeds])
    values = simulated(setting, num_seeds, NUM_TRIALS, rng)
    estimate = paired_test(values.mean(0), num_resamples=NUM_RESAMPLES, alpha=LEVEL)
    if cover_seeds:
        estimate = with_seed_variance(estimate, seed_variance(values, folds_of(setting)), LEVEL)
    covers = (estimate.low <= 0) & (estimate.high >= 0)
    return Judged(float(covers.mean()), float((estimate.high - estimate.low).mean() / 2))


def _rows() -> list[Row]:
    columns = [(seeds, cover) for seeds in SEEDS for cover in ((False, True) if seeds > 1 else (False,))]
    header = [
        f"{seeds} seed{'s' if seeds > 1 else ''}, patients {'and seeds' if cover else 'alone'}"
        for seeds, cover in columns
    ]
    rows: list[Row] = [["effect of the training", *header]]
    for name in SETTINGS:
        cells = [judged(name, *column) for column in columns]
        rows.append([name, *(f"{100 * each.coverage:.1f} % ({each.half_width:.2f})" for each in cells)])
    return rows


TABLES: Mapping[str, Callable[[], list[Row]]] = {"seed_coverage": _rows}
