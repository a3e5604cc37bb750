"""The tables of docs/results.md, from the stored scores of docs/results.

    means         over cases; bold: not significantly worse than any other (Holm over the pairs of a score)
    differences   of pairs of methods that were named beforehand; Holm over all cells of a table

All tests are paired by case and resample patients. Intervals of differences are at the level at which they
exclude 0 exactly where the corrected p is below 0.05. With several seeds they cover the draw of the seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from result_files import Record, read_record
from results_study import STUDIES

from semidice.metrics.registry import ScoreKey
from semidice.recipes.recipe import shipped_files
from semidice.recipes.text import parse_yaml
from semidice.statistics.cases import CaseTable, keys_of, methods_of, read_cases
from semidice.statistics.compare import Comparison, agreeing_level, compare_cases, holm
from semidice.statistics.tables import p_text

LEVEL = 0.05
NOT_RUN = "Not run."
Row = Sequence[str]


class Shown(NamedTuple):
    """The short name and the number of decimals of a score."""

    name: str
    decimals: int = 2


SCORES_SHOWN: Mapping[str, Shown] = {
    "dice_score": Shown("Dice"),
    "binarized_dice_score": Shown("BDice"),
    "soft_dice_score": Shown("soft Dice"),
    "calibration_error": Shown("ECE", 3),
    "rater_calibration_error": Shown("rater ECE", 3),
    "brier_error": Shown("Brier", 3),
    "negative_log_likelihood": Shown("NLL", 4),
    "generalised_energy_distance": Shown("GED", 3),
    "volume_error": Shown("volume error"),
    "volume_crps_error": Shown("volume CRPS"),
    "volume_coverage_score": Shown("coverage"),
}
# its aim is 90 %, so neither more nor less is better
NO_DIRECTION = "volume_coverage_score"
_LIDC = (
    "dice_score",
    "binarized_dice_score",
    "calibration_error",
    "rater_calibration_error",
    "generalised_energy_distance",
    "volume_error",
    "volume_crps_error",
)
_HIPPOCAMPUS = ("dice_score", "calibration_error", "negative_log_likelihood", "volume_error")
_MASKS = ("dice_score", "volume_error")
NETWORKS = ("small", "efficientnet")
BANDWIDTHS = ("5e-5", "1e-4", "5e-4", "1e-3", "5e-3", "1e-2")
_PARTS = ("smoothing", "ce", "dml", "temperature", "kde", "kde_paper_keys")


class Differences(NamedTuple):
    """A table of differences: the file, the pairs (method, baseline), and the scores."""

    file: str
    pairs: tuple[tuple[str, str], ...]
    metrics: tuple[str, ...] = _LIDC


def _against(baseline: str, *methods: str) -> tuple[tuple[str, str], ...]:
    return tuple((method, baseline) for method in methods)


DIFFERENCES: Mapping[str, Differences] = {
    "labels_differences": Differences(
        "labels",
        _against(
            "majority_sdl",
            *("random", "smoothing", "weighted", "uniform", "smoothing_sdl", "weighted_sdl"),
        ),
    ),
    "label_alone_differences": Differences(
        "labels",
        (
            *(("uniform", "majority"), ("uniform_sdl", "majority_sdl"), ("uniform_ce", "majority_ce")),
            *(("uniform", "smoothing"), ("uniform", "weighted")),
        ),
    ),
    "loss_alone_differences": Differences(
        "labels",
        (
            *((name, f"{name}_sdl") for name in ("majority", "smoothing", "weighted", "uniform")),
            ("uniform_dml2", "uniform_sdl"),
            ("uniform", "uniform_dml2"),
        ),
    ),
    "ce_differences": Differences("labels", (("majority", "majority_ce"), ("uniform", "uniform_ce"))),
    "decisions_differences": Differences(
        "labels_decisions",
        tuple(
            (f"{method}, {rule}", f"{method}, argmax")
            for method in STUDIES["labels"].decided
            for rule in ("dice", "fitted")
        ),
        _MASKS,
    ),
    "smoothing_differences": Differences("smoothing", (("smoothing_boundary", "majority"),)),
    "systems_differences": Differences(
        "systems",
        tuple(("uniform", name) for name in ("mc_dropout", "multi_head", "mrnet", "softseg")),
    ),
    "distillation_differences": Differences(
        "distillation",
        tuple((f"{net}_{part}", f"{net}_hard") for net in NETWORKS for part in _PARTS),
        _HIPPOCAMPUS,
    ),
    "distillation_losses": Differences(
        "distillation",
        (("small_dml", "small_sdl"), ("small_dml2", "small_sdl"), ("small_dml", "small_dml2")),
        _HIPPOCAMPUS,
    ),
    "distillation_steps": Differences(
        "distillation",
        tuple(
            (f"{net}_{better}", f"{net}_{worse}")
            for net in NETWORKS
            for better, worse in (
                *(("dml", "ce"), ("kde", "dml"), ("kde_paper_keys", "dml")),
                *(("kde", "temperature"), ("kde", "kde_paper_keys")),
            )
        ),
        _HIPPOCAMPUS,
    ),
    "bandwidth_differences": Differences(
        "bandwidth",
        _against("no_kde", *(f"h{width}" for width in BANDWIDTHS if width != "1e-3")),
        _HIPPOCAMPUS,
    ),
    "raters_differences": Differences(
        "raters",
        _against("raters_1", *(f"raters_{n}_{kind}" for kind in ("random", "mean") for n in (2, 3, 4))),
    ),
    "raters_mean_differences": Differences(
        "raters", tuple((f"raters_{number}_mean", f"raters_{number}_random") for number in (2, 3, 4))
    ),
}


class Cell(NamedTuple):
    """A difference that is asked for. metric: as in `SCORES`, whatever its unit in the file."""

    file: str
    method: str
    baseline: str
    metric: str


class Effect(NamedTuple):
    """A difference, method minus baseline. low, high, p: corrected for all cells of its table."""

    method: str
    baseline: str
    key: ScoreKey
    difference: float
    low: float
    high: float
    p: float

    @property
    def is_significant(self) -> bool:
        return self.p < LEVEL

    @property
    def is_better(self) -> bool:
        """Whether the method has the better mean."""
        return (self.difference > 0) == self.key.higher_is_better

    def text(self) -> str:
        """The difference with its interval and p-value.

        >>> Effect("a", "b", ScoreKey("dice_score"), 0.0124, 0.008, 0.0171, 0.0002).text()
        '+1.24 [+0.80, +1.71], p < 0.001'
        """
        value, low, high = (
            number(part, self.key, signed=True) for part in (self.difference, self.low, self.high)
        )
        return f"{value} [{low}, {high}], {p_words(self.p)}"


def p_words(p: float) -> str:
    """The p-value as part of a sentence.

    >>> p_words(0.0002), p_words(0.0312)
    ('p < 0.001', 'p = 0.031')
    """
    return f"p {'' if p < 0.001 else '= '}{p_text(p)}"


def number(value: float, key: ScoreKey, *, signed: bool = False) -> str:
    """The score as it is shown, with the decimals of the score.

    >>> number(-0.0123, ScoreKey("dice_score"), signed=True), number(0.00234, ScoreKey("calibration_error"))
    ('−1.23', '0.234')
    """
    decimals = SCORES_SHOWN[key.metric].decimals
    text = f"{value * key.scale:{'+' if signed else ''}.{decimals}f}"
    # a number that is rounded to 0 has no sign
    return (text.lstrip("+-") if not float(text) else text).replace("-", "−")


def heading(key: ScoreKey) -> str:
    """The short name with unit and direction.

    >>> heading(ScoreKey("dice_score")), heading(ScoreKey("volume_error", "voxels"))
    ('Dice (%) ↑', 'volume error (voxels) ↓')
    """
    name = SCORES_SHOWN[key.metric].name
    unit = "%" if key.scale == 100 else key.unit if key.unit in ("voxels", "ml") else ""
    if key.metric == NO_DIRECTION:
        return f"{name} ({unit}, aim 90)"
    return f"{name}{f' ({unit})' if unit else ''} {'↑' if key.higher_is_better else '↓'}"


class Results:
    """The stored results of a folder, and what was computed from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table: Callable[[str], CaseTable] = cache(self._table)
        self.comparison: Callable[..., Comparison] = cache(self._comparison)
        self.effects: Callable[[str], tuple[Effect, ...]] = cache(self._effects)

    def has(self, file: str) -> bool:
        return (self.folder / f"{file}.parquet").is_file()

    def pairs(self, table: str) -> list[tuple[str, str]]:
        """The pairs of a table of differences whose methods were both run."""
        file, pairs, _ = DIFFERENCES[table]
        known = set(methods_of(self.table(file))) if self.has(file) else set()
        return [pair for pair in pairs if known.issuperset(pair)]

    def record(self, study: str) -> Record:
        return read_record(self.folder / f"{study}.json")

    def key(self, file: str, metric: str) -> ScoreKey:
        """A score in a file: volumes may be in voxels."""
        return next(key for key in keys_of(self.table(file)) if key.metric == metric)

    def keys(self, file: str) -> list[ScoreKey]:
        """The scores in a file, in the order in which they are shown."""
        known = {key.metric: key for key in keys_of(self.table(file))}
        return [known[metric] for metric in SCORES_SHOWN if metric in known]

    def effect(self, table: str, method: str, baseline: str, metric: str) -> Effect:
        """One cell of a table of differences. metric: as in `SCORES`."""
        return next(
            each
            for each in self.effects(table)
            if (each.method, each.baseline, each.key.metric) == (method, baseline, metric)
        )

    def _table(self, file: str) -> CaseTable:
        return read_cases(self.folder / f"{file}.parquet")

    def _comparison(
        self, file: str, metric: str, level: float = LEVEL, methods: tuple[str, ...] = ()
    ) -> Comparison:
        return compare_cases(self.table(file), metric, alpha=level, methods=methods, drop=True)

    def _effects(self, name: str) -> tuple[Effect, ...]:
        file, _, metrics = DIFFERENCES[name]
        return self.corrected([Cell(file, *pair, metric) for pair in self.pairs(name) for metric in metrics])

    def corrected(self, cells: Sequence[Cell]) -> tuple[Effect, ...]:
        """The differences of these cells, corrected for their number."""

        def part(kind: str, level: float) -> np.ndarray:
            return np.array(
                [
                    self.comparison(cell.file, cell.metric, level).pairs.loc[
                        (cell.method, cell.baseline), kind
                    ]
                    for cell in cells
                ]
            )

        p = part("p_single", LEVEL)
        corrected = holm(p)
        level = agreeing_level(p, corrected, LEVEL)
        columns = *(part(name, level) for name in ("difference", "low_single", "high_single")), corrected
        return tuple(
            Effect(cell.method, cell.baseline, self.key(cell.file, cell.metric), *map(float, numbers))
            for cell, *numbers in zip(cells, *columns, strict=True)
        )


def run_text(results: Results, study: str) -> str:
    """The command of a study, and what it took."""
    if not results.has(study):
        return NOT_RUN
    record, table = results.record(study), results.table(study)
    cases, patients = (table[name].nunique() for name in ("case", "patient"))
    seeds = f"{record.seeds} seeds" if record.seeds > 1 else "one seed"
    folds = f"{record.folds} folds" if record.folds > 1 else "one fold"
    return (
        f"```\n{record.command}\n```\n\n{len(methods_of(table))} methods, {seeds}, {folds}, "
        f"{record.epochs} epochs; {cases} cases of {patients} patients; {record.seconds / 60:.1f} minutes on "
        f"{record.device}, torch {record.versions['torch']}.{record.note and f' {record.note}'}"
    )


def total_text(results: Results) -> str:
    """The minutes of all studies, by device."""
    minutes: dict[str, float] = {}
    for study in filter(results.has, STUDIES):
        record = results.record(study)
        minutes[record.device] = minutes.get(record.device, 0) + record.seconds / 60
    by_device = [f"{total:.0f} minutes on {device}" for device, total in minutes.items()]
    return f"The studies took together: {', '.join(by_device)}." if by_device else NOT_RUN


def _ordered(methods: Sequence[str], file: str) -> list[str]:
    """The methods in the order of their grids."""
    grids = STUDIES[file].grids if file in STUDIES else ()
    order = [name for grid in grids for name in parse_yaml(shipped_files()[grid], grid)["variants"]]
    return sorted(methods, key=lambda method: order.index(method) if method in order else len(order))


def means_rows(results: Results, file: str) -> list[Row] | str:
    """The mean of each method and score; bold: not significantly worse than any other."""
    if not results.has(file):
        return NOT_RUN
    keys = results.keys(file)
    comparisons = [results.comparison(file, key.metric) for key in keys]
    rows: list[Row] = [["method", *map(heading, keys)]]
    for method in _ordered(comparisons[0].methods, file):
        cells = []
        for each in comparisons:
            text = number(float(each.means.loc[method, "mean"]), each.key)
            has_best = each.key.metric != NO_DIRECTION
            cells.append(f"**{text}**" if has_best and method in each.best else text)
        rows.append([method, *cells])
    return rows


def difference_rows(results: Results, name: str) -> list[Row] | str:
    """One row per pair; bold: significant."""
    file, _, metrics = DIFFERENCES[name]
    pairs = results.pairs(name)
    if not pairs:
        return NOT_RUN
    keys = [results.key(file, metric) for metric in metrics]
    cells = [
        f"**{effect.text()}**" if effect.is_significant else effect.text() for effect in results.effects(name)
    ]
    rows: list[Row] = [["difference", *map(heading, keys)]]
    for index, (method, baseline) in enumerate(pairs):
        rows.append([f"{method} − {baseline}", *cells[index * len(metrics) : (index + 1) * len(metrics)]])
    return rows
