"""Everything on the page: scores of every case, comparisons, calibration bins, curves and pictures.

Scores are those of the case tables, to the last bit. Calibration bins are counted from the stored
predictions; a calibration error that differs from the one in the table is an error.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...data.dataset import Dataset, ScoredUnit
from ...errors import UserError
from ...labels.raters import read_raters
from ...metrics.bins import CalibrationBins, calibration_bins
from ...metrics.registry import ScoreKey
from ...runs.predictions import read_case
from ...runs.run import TrainedRun
from ...statistics.cases import MAIN_CLASSES, CaseTable, keys_of, rows_of
from ...statistics.pairing import mean_over_seeds, shared_seeds
from ..curves import Curve, read_curves
from ..images import MAX_CHARACTERS, Picture, PictureLayout, make_pictures, picture_of_scan, shown_case
from ..rules import RuleScore, compare_rules, read_rules
from ..verdict import listed, raters_of, raters_warning, seeds_sentences
from ..volumes import ClassVolumes, read_volumes
from .answer import Score, compare_all
from .runs import SeedRuns, differing_options, joined_cases

# in the smallest images, one voxel in another bin changes the error by less than this
_TOLERANCE = 1e-4

# called as on_step(name of the step, done, total)
OnStep = Callable[[str, int, int], object]


@dataclass(frozen=True)
class PageOptions:
    """Options of a page.

    max_cases: cases with pictures; the tables always have all cases. max_characters: of all pictures
    together, which are shrunk to fit. figures: whether to draw the figures next to the page, which takes
    longer than everything else.
    """

    title: str | None = None
    max_cases: int = 100
    max_characters: int = MAX_CHARACTERS
    num_resamples: int = 10_000
    figures: bool = True

    def __post_init__(self) -> None:
        if self.max_cases < 0:
            raise UserError(f"max_cases must be 0 or more; got {self.max_cases}")


DEFAULT_OPTIONS = PageOptions()


@dataclass(frozen=True)
class PageContent:
    """What the page shows.

    runs: names of the methods that are runs; the others have only scores.
    raters: their own scores by metric and class; empty if there is one rater. options: one row per option in
    which the recipes differ. bins: of the methods with stored predictions; the pictures show the same
    methods. rules, volumes: of the runs that have them. table: means over the seeds, if there are several;
    table_of_seeds: the scores of every seed.
    """

    dataset: Dataset
    table: CaseTable
    table_of_seeds: CaseTable
    runs: tuple[str, ...]
    scores: Sequence[Score]
    raters: Mapping[tuple[ScoreKey, str], float]
    bins: Mapping[str, CalibrationBins]
    curves: Mapping[str, Mapping[str, Curve]]
    options: Mapping[str, Sequence[str]]
    layout: PictureLayout | None
    pictures: Sequence[Picture]
    rules: Sequence[RuleScore]
    volumes: Mapping[str, Sequence[ClassVolumes]]
    notices: tuple[str, ...]

    @property
    def main_scores(self) -> list[Score]:
        return [score for score in self.scores if score.is_main]

    @property
    def methods(self) -> tuple[str, ...]:
        return self.scores[0].comparison.methods


@dataclass(frozen=True)
class StoredPredictions:
    """The stored predictions of several runs on the same folds."""

    dataset: Dataset
    runs: Mapping[str, TrainedRun]
    fold_of_case: Mapping[str, int]

    @classmethod
    def of_units(
        cls,
        dataset: Dataset,
        runs: Mapping[str, TrainedRun],
        units: Mapping[str, ScoredUnit],
        fold_of_unit: Mapping[str, int],
    ) -> "StoredPredictions":
        """Those of all cases of scans and slices."""
        pairs = [(number, name) for name, unit in units.items() for number in unit.cases]
        return cls(dataset, runs, {dataset.cases[number].name: fold_of_unit[name] for number, name in pairs})

    def of(self, number: int) -> list[np.ndarray]:
        """Probabilities (C, *space) of a case by each run; a ValueError if their shape is not the case's."""
        case = self.dataset.cases[number]
        folders = [run.folder.fold(self.fold_of_case[case.name]) for run in self.runs.values()]
        return [read_case(folder, self.dataset, number) for folder in folders]


def gather_content(
    runs: Mapping[str, TrainedRun],
    others: Mapping[str, CaseTable],
    dataset: Dataset,
    options: PageOptions,
    *,
    seeds: SeedRuns,
    notices: Sequence[str],
    on_step: OnStep,
) -> PageContent:
    """The content of the page from the files of the runs and the tables of other methods."""
    table_of_seeds = joined_cases(runs, others, dataset, seeds)
    table = mean_over_seeds(table_of_seeds)
    scores, left_out = compare_all(
        table_of_seeds,
        [*runs, *others],
        dataset.manifest.class_names,
        num_resamples=options.num_resamples,
        on_metric=partial(on_step, "comparing methods"),
    )
    stored = {method: run for method, run in runs.items() if run.folder.has_predictions()}
    folders = {method: run.folder for method, run in runs.items()}
    rule_tables, without_rules = read_rules(folders, dataset)
    shown_table, of_first_seed = _first_seed(table_of_seeds)
    raters = raters_of(dataset, set(table["case"]), keys_of(table))
    warning = raters_warning([score.comparison for score in scores if score.is_main], raters)
    units, predictions = _predicted_units(dataset, table, stored)
    cases = sorted({number for unit in units.values() for number in unit.cases})
    bins = count_bins(predictions, cases, shown_table, on_case=partial(on_step, "reading predictions"))
    shown = [name for name in main_cases(table) if name in units]
    chosen = [units[name] for name in choose_pictures(scores, shown, max_cases=options.max_cases)]
    layout = PictureLayout.of(dataset, len(stored)) if chosen else None
    pictures = _pictures(predictions, chosen, layout, options, partial(on_step, "making pictures"))
    return PageContent(
        dataset=dataset,
        table=table,
        table_of_seeds=table_of_seeds,
        runs=tuple(runs),
        scores=scores,
        raters=raters,
        bins=bins,
        curves=read_curves(folders),
        options=differing_options(runs),
        layout=layout,
        pictures=pictures,
        rules=compare_rules(rule_tables, num_resamples=options.num_resamples),
        volumes={name: found for name, each in folders.items() if (found := read_volumes(each, dataset))},
        notices=(
            *([warning] if warning else []),
            *notices,
            *seeds_sentences(table_of_seeds),
            *of_first_seed,
            *left_out,
            *_missing_parts(runs, stored, others),
            *without_rules,
        ),
    )


def _predicted_units(
    dataset: Dataset, table: CaseTable, stored: Mapping[str, TrainedRun]
) -> tuple[dict[str, ScoredUnit], StoredPredictions]:
    """The scans and slices of the table by their names, and the predictions that the runs stored for them."""
    predicted = table[table["method"].isin(list(stored))]
    fold_of_unit = dict(zip(predicted["case"], predicted["fold"].tolist(), strict=True))
    units = _units_of(dataset, fold_of_unit)
    return units, StoredPredictions.of_units(dataset, stored, units, fold_of_unit)


def _first_seed(table: CaseTable) -> tuple[CaseTable, list[str]]:
    """The scores of the trainings that the page shows in detail, without seeds, and a sentence on them."""
    seeds = shared_seeds(table).seeds
    if not seeds:
        return table, []
    sentence = (
        f"Scores are means over the seeds {listed([str(seed) for seed in seeds])}. Calibration, decisions, "
        f"volumes, curves and images are of seed {seeds[0]}."
    )
    shown = table[table["seed"].isin([-1, seeds[0]])]
    return shown, [sentence] if len(seeds) > 1 else []


def _missing_parts(runs: Collection[str], stored: Collection[str], others: Collection[str]) -> Iterator[str]:
    """What the page does not show of some methods."""
    for method in runs:
        if method not in stored:
            yield f"{method} has no stored predictions: its pictures and reliability are left out."
    if others:
        yield (
            f"Of {listed(list(others))}, only scores are known: no curves, options, images or calibration, "
            "and not which patients the training saw."
        )


def _pictures(
    predictions: StoredPredictions,
    units: Sequence[ScoredUnit],
    layout: PictureLayout | None,
    options: PageOptions,
    on_case: Callable[[int, int], object],
) -> list[Picture]:
    """One picture per scan or slice; of a volume, one of its slices. layout: None if there is none."""
    if layout is None:
        return []
    dataset = predictions.dataset
    pictures = make_pictures(
        dataset,
        [shown_case(dataset, unit) for unit in units],
        predictions.of,
        layout,
        max_characters=options.max_characters,
        on_case=on_case,
    )
    return [picture_of_scan(dataset, unit, picture) for unit, picture in zip(units, pictures, strict=True)]


def count_bins(
    predictions: StoredPredictions,
    numbers: Sequence[int],
    table: CaseTable,
    *,
    on_case: Callable[[int, int], object] = lambda _, __: None,
) -> dict[str, CalibrationBins]:
    """Bins over all voxels of the cases by method, against the majority of the raters, as the paper's ECE.

    table: scores of the same predictions; a ValueError if one has another calibration error.
    """
    dataset = predictions.dataset
    names = set(table["case"])
    # a scan is compared as one, if the table has it, so that no voxel counts twice
    units = [
        each
        for scan in dataset.units(numbers, "scan")
        for each in ([scan] if scan.name in names else dataset.units(scan.cases, "slice"))
    ]
    per_slice, per_scan = (ScoreKey("calibration_error", per=per) for per in ("slice", "scan"))
    errors = {**case_values(table, per_slice, "all"), **case_values(table, per_scan, "all")}
    total: dict[str, CalibrationBins] = {}
    done = 0
    for unit in units:
        of_unit: dict[str, CalibrationBins] = {}
        for number in unit.cases:
            target = read_raters(
                torch.from_numpy(dataset.masks(number))[None],
                dataset.num_classes,
                torch.from_numpy(dataset.present[number : number + 1]),
                batched=True,
            ).majority()
            for method, prob in zip(predictions.runs, predictions.of(number), strict=True):
                bins = calibration_bins(torch.from_numpy(prob)[None], target).over_cases()
                of_unit[method] = of_unit[method] + bins if method in of_unit else bins
            done += 1
            on_case(done, len(numbers))
        for method, bins in of_unit.items():
            scored, stored = errors.get((unit.name, method)), float(bins.error())
            if scored is not None and abs(scored - stored) > _TOLERANCE:
                raise UserError(
                    f"{method} has calibration_error {scored:.6f} of case {unit.name} in its table, but its "
                    f"stored prediction has {stored:.6f}: the dataset or the prediction has changed since; "
                    f"run `semidice evaluate {predictions.runs[method].folder.path}`"
                )
            total[method] = total[method] + bins if method in total else bins
    return total


def main_cases(table: CaseTable) -> list[str]:
    """Names of the cases, sorted; without single slices if there are scores of scans."""
    of_scans = table[table["per"] == "scan"]
    return sorted((of_scans if len(of_scans) else table)["case"].unique())


def _units_of(dataset: Dataset, cases: Collection[str]) -> dict[str, ScoredUnit]:
    """The scans and slices of the dataset with these names, sorted."""
    numbers = range(len(dataset))
    units = {each.name: each for unit in ("slice", "scan") for each in dataset.units(numbers, unit)}
    names = sorted(cases)
    # an error that names cases which the dataset does not have
    dataset.numbers_of([name for name in names if name not in units])
    return {name: units[name] for name in names}


def choose_pictures(scores: Sequence[Score], names: Sequence[str], *, max_cases: int) -> list[str]:
    """Names of up to `max_cases` cases, in turn the worst, the best, and the most different one.

    All are ranked by the first score. names: of the cases with a prediction. Cases without a score come last.
    """
    first = scores[0]
    values = first.paired.values if first.key.higher_is_better else -first.paired.values
    cases = first.paired.cases
    mean, spread = values.mean(1), np.ptp(values, axis=1)
    rankings = [np.argsort(mean, kind="stable"), np.argsort(-mean, kind="stable")]
    if values.shape[1] > 1:
        rankings.append(np.argsort(-spread, kind="stable"))
    in_turn = [cases[row] for rows in zip(*rankings, strict=True) for row in rows]
    chosen = dict.fromkeys([*in_turn, *names])
    return [name for name in chosen if name in set(names)][:max_cases]


def case_values(table: CaseTable, key: ScoreKey, class_name: str) -> dict[tuple[str, str], float]:
    """The scores of one metric and class by case and method; all and mean stand for each other."""
    rows = rows_of(table, key)
    rows = rows[rows["class"].isin(MAIN_CLASSES if class_name in MAIN_CLASSES else [class_name])]
    return dict(zip(zip(rows["case"], rows["method"], strict=True), rows["value"].tolist(), strict=True))
