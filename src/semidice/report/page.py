"""`semidice report`: one page that says which method is best, by how much, and with what certainty.

report.html              the page; it contains everything that it shows, and loads nothing
report_files/means.*     the summary table as .csv, .md and .tex; the same for every pair of methods
             cases.csv   the scores of all cases, from which everything else is made
             *.png, *.svg    the charts of the page, for print
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console

from .. import __version__
from ..console import progress_bar, say
from ..data.dataset import Dataset, ScoredUnit
from ..errors import UserError
from ..labels.raters import read_raters
from ..locks import locked
from ..metrics.bins import CalibrationBins, calibration_bins
from ..paths import ReportFolder, write_text
from ..runs.predictions import read_case
from ..runs.run import TrainedRun
from ..statistics.cases import CaseTable, keys_of, write_cases
from ..statistics.compare import Comparison
from ..statistics.pairing import mean_over_seeds, shared_seeds
from ..statistics.tables import Table, means_table, number_text, pairs_table
from .answer import (
    RatersScores,
    abbreviations_in,
    answer_table,
    compare_all,
    file_name,
    is_main,
    listed,
    raters_of,
    raters_warning,
    seeds_sentences,
    spoken,
    verdict,
)
from .charts import (
    draw_case_scores,
    draw_curves,
    draw_reliability,
    draw_rules,
    draw_significance,
    draw_volumes,
)
from .curves import read_curves
from .decisions import (
    RULES_COMMAND,
    VOLUMES_COMMAND,
    ClassVolumes,
    RuleScore,
    compare_rules,
    read_rules,
    read_volumes,
    volumes_table,
)
from .figures import COLOURS, inline_svg, line_style, save_figure
from .pictures import LAYERS, Picture, make_pictures
from .runs import (
    SeedRuns,
    check_comparable,
    compared_methods,
    differing_options,
    find_runs,
    joined_cases,
    read_other_methods,
)

# called as on_step(name of the step, done, total)
OnStep = Callable[[str, int, int], object]


@dataclass(frozen=True)
class PageOptions:
    """max_cases: cases with images; the tables always have all cases. figures: also write them for print."""

    title: str | None = None
    max_cases: int = 100
    num_resamples: int = 10_000
    figures: bool = True


@dataclass(frozen=True)
class Report:
    """The files that were written, and what the page says about runs and scores that were left out."""

    page: Path
    files: tuple[Path, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """A chart of the page's section. choice: the score, class or part that it is of, of several."""

    section: str
    name: str
    figure: Figure
    choice: int = 0


@dataclass(frozen=True)
class _Content:
    """What the page shows. table: means over the seeds; of_seeds: the scores of every seed.

    raters: their own scores; empty if there is one rater. runs: names of the methods that are runs; of the
    others only scores are known. stored: the runs with stored predictions.
    """

    dataset: Dataset
    table: CaseTable
    of_seeds: CaseTable
    runs: Mapping[str, TrainedRun]
    comparisons: Sequence[Comparison]
    raters: RatersScores
    bins: Mapping[str, CalibrationBins] = field(default_factory=dict)
    rules: Sequence[RuleScore] = ()
    volumes: Sequence[ClassVolumes] = ()
    pictures: Sequence[Picture] = ()
    notices: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        return self.comparisons[0].methods


def run_report(
    paths: Sequence[Path],
    out: Path,
    console: Console,
    options: PageOptions = PageOptions(),  # noqa: B008
    *,
    case_tables: Sequence[Path] = (),
    dataset: Path | None = None,
) -> Report:
    """`build_page` of run folders, or of folders of run folders, behind a progress bar.

    case_tables: files of `semidice evaluate` with scores of other methods. dataset: where the dataset of the
    runs is now, if it was moved; needed without a run.
    """
    found = find_runs(paths)
    where = dataset or found.dataset
    if where is None:
        raise UserError(
            "there is no run that tells which dataset the scores are of: name it with --dataset"
            if paths or case_tables
            else "name a run folder, or tables of scores with --cases and their dataset with --dataset"
        )
    prepared = Dataset(where)
    prepared.check_files()
    others = read_other_methods(case_tables, prepared, found.runs)
    for table in found.tables:
        others |= compared_methods(table, prepared, [*found.runs, *others])
    with progress_bar(console, "report", "done") as bar:

        def show(step: str, done: int, total: int) -> None:
            bar.status = step
            bar.to(done, total)

        report = build_page(
            found.runs,
            prepared,
            out,
            options,
            others=others,
            seeds=found.seeds,
            notices=found.notices,
            on_step=show,
        )
    for notice in report.notices:
        console.print(notice, style="yellow", highlight=False, markup=False, soft_wrap=True)
    say(console, f"wrote {report.page} ({report.page.stat().st_size / 1e6:.1f} MB)")
    say(console, f"wrote {len(report.files)} tables and figures to {report.files[0].parent}")
    say(console, f"next: open {report.page} in a browser")
    return report


def build_page(
    runs: Mapping[str, TrainedRun],
    dataset: Dataset,
    out: Path,
    options: PageOptions = PageOptions(),  # noqa: B008
    *,
    others: Mapping[str, CaseTable] | None = None,
    seeds: SeedRuns | None = None,
    notices: Sequence[str] = (),
    on_step: OnStep = lambda _, __, ___: None,
) -> Report:
    """Write the report of finished runs on one dataset to `out`, an .html file, and to a folder next to it.

    runs: by the name of their method. others: scores of methods without a run, by the same name as in their
    column `method`; there must be one method or more. seeds: all runs of the methods with several seeds, of
    which `runs` has one; the scores are means over the seeds. notices: more sentences for the page's top.
    on_step(name of the step, done, total) is called during the work.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"the report is a page: give it a name that ends in .html; got {out}")
    if not runs and not others:
        raise UserError("a report needs one method or more: a finished run or a case table; got none")
    check_comparable(runs, dataset, seeds or {})
    folder = ReportFolder.of(out)
    with locked(folder, "semidice report"):
        of_seeds = joined_cases(runs, others or {}, dataset, seeds or {})
        content = _gather(runs, others or {}, of_seeds, dataset, options, notices, on_step)
        charts = list(_charts(content))
        tables = _tables(content)
        write_cases(of_seeds, folder.cases)
        files = [folder.cases]
        for name, table in tables.items():
            files += table.write(folder.path / name)
        for done, chart in enumerate(charts if options.figures else (), start=1):
            for suffix in (".png", ".svg"):
                files.append(folder.path / f"{chart.name}{suffix}")
                save_figure(chart.figure, files[-1])
            on_step("writing figures", done, len(charts))
        write_text(out, _render(content, tables, charts, options.title, folder.path.name))
    return Report(out, tuple(files), content.notices)


def _gather(
    runs: Mapping[str, TrainedRun],
    others: Mapping[str, CaseTable],
    of_seeds: CaseTable,
    dataset: Dataset,
    options: PageOptions,
    notices: Sequence[str],
    on_step: OnStep,
) -> _Content:
    table = mean_over_seeds(of_seeds)
    comparisons, left_out = compare_all(
        of_seeds,
        [*runs, *others],
        dataset.manifest.class_names,
        num_resamples=options.num_resamples,
        on_metric=partial(on_step, "comparing methods"),
    )
    raters = raters_of(dataset, set(table["case"]), keys_of(table))
    folders = {method: run.folder for method, run in runs.items()}
    rule_tables, without_rules = read_rules(folders, dataset)
    predictions = StoredPredictions.of_table(dataset, runs, table)
    shown = _chosen(comparisons[0], predictions.units, max_cases=options.max_cases)
    warning = raters_warning(comparisons, raters)
    said = (
        *([warning] if warning else []),
        *notices,
        *seeds_sentences(of_seeds),
        *_first_seed(of_seeds),
        *left_out,
        *_missing_parts(runs, predictions.runs, others),
        *without_rules,
    )
    return _Content(
        dataset,
        table,
        of_seeds,
        runs,
        comparisons,
        raters,
        bins=predictions.count_bins(partial(on_step, "counting calibration bins")),
        rules=compare_rules(rule_tables, num_resamples=options.num_resamples),
        volumes=read_volumes(folders, dataset),
        pictures=make_pictures(
            dataset,
            [predictions.units[name] for name in shown],
            list(predictions.runs),
            predictions.of,
            on_case=partial(on_step, "making images"),
        ),
        notices=said,
    )


@dataclass(frozen=True)
class StoredPredictions:
    """The stored predictions of runs on the same folds. units: the scored scans and slices by their names."""

    dataset: Dataset
    runs: Mapping[str, TrainedRun]
    units: Mapping[str, ScoredUnit]
    fold_of_case: Mapping[int, int]

    @classmethod
    def of_table(
        cls, dataset: Dataset, runs: Mapping[str, TrainedRun], table: CaseTable
    ) -> "StoredPredictions":
        """Those of the runs that have predictions, of the scans and slices that the table scores."""
        stored = {method: run for method, run in runs.items() if run.folder.has_predictions()}
        scored = table[table["method"].isin(list(stored))]
        fold_of_unit = dict(zip(scored["case"], scored["fold"].tolist(), strict=True))
        numbers = range(len(dataset))
        every = (each for unit in ("slice", "scan") for each in dataset.units(numbers, unit))
        units = {each.name: each for each in every if each.name in fold_of_unit}
        folds = {number: fold_of_unit[name] for name, unit in units.items() for number in unit.cases}
        return cls(dataset, stored, units, folds)

    def of(self, number: int) -> list[np.ndarray]:
        """Probabilities (C, *space) of a case by each run."""
        folders = [run.folder.fold(self.fold_of_case[number]) for run in self.runs.values()]
        return [read_case(folder, self.dataset, number) for folder in folders]

    def count_bins(self, on_case: Callable[[int, int], object]) -> dict[str, CalibrationBins]:
        """Bins over all voxels by method, against the majority of the raters, as the paper's ECE."""
        total: dict[str, CalibrationBins] = {}
        for done, number in enumerate(self.fold_of_case, start=1):
            masks = torch.from_numpy(self.dataset.masks(number))[None]
            present = torch.from_numpy(self.dataset.present[number : number + 1])
            target = read_raters(masks, self.dataset.num_classes, present, batched=True).majority()
            for method, prob in zip(self.runs, self.of(number), strict=True):
                bins = calibration_bins(torch.from_numpy(prob)[None], target).over_cases()
                total[method] = total[method] + bins if method in total else bins
            on_case(done, len(self.fold_of_case))
        return total


def _chosen(first: Comparison, names: Collection[str], *, max_cases: int) -> list[str]:
    """Names of the cases with images, the worst first by the first score; cases without a score come last.

    Of more than `max_cases`, in turn the worst, the best, and the most different one.
    """
    values = first.values if first.key.higher_is_better else -first.values
    mean, spread = values.mean(1), np.ptp(values, axis=1)
    rankings = [np.argsort(mean, kind="stable"), np.argsort(-mean, kind="stable")]
    if values.shape[1] > 1:
        rankings.append(np.argsort(-spread, kind="stable"))
    in_turn = [first.cases[row] for rows in zip(*rankings, strict=True) for row in rows]
    chosen = [name for name in dict.fromkeys([*in_turn, *names]) if name in names][:max_cases]
    place = {first.cases[row]: place for place, row in enumerate(rankings[0])}
    return sorted(chosen, key=lambda name: place.get(name, len(place)))


def _first_seed(table: CaseTable) -> Iterator[str]:
    """A sentence on the trainings that the page shows in detail."""
    seeds = shared_seeds(table).seeds
    if len(seeds) > 1:
        yield (
            f"Scores are means over the seeds {listed([str(seed) for seed in seeds])}. Calibration, "
            f"decisions, volumes, curves and images are of seed {seeds[0]}."
        )


def _missing_parts(runs: Collection[str], stored: Collection[str], others: Collection[str]) -> Iterator[str]:
    """What the page does not show of some methods."""
    for method in runs:
        if method not in stored:
            yield f"{method} has no stored predictions: its images and calibration are left out."
    if others:
        yield (
            f"Of {listed(list(others))}, only scores are known: no curves, options, images or calibration, "
            "and not which patients the training saw."
        )


def _tables(content: _Content) -> dict[str, Table]:
    """All tables by the name of their files."""
    main = [each for each in content.comparisons if is_main(each)]
    single = [each for each in content.comparisons if not is_main(each)]
    tables = {"means": means_table(main, raters=content.raters)}
    if single:
        title = "Mean over cases, each class"
        tables["means_by_class"] = means_table(single, raters=content.raters, title=title)
    if len(content.methods) > 1:
        tables |= {f"pairs_{file_name(each)}": pairs_table(each) for each in content.comparisons}
    tables |= {f"decisions_{score.key.file_name}": score.table() for score in content.rules}
    if content.volumes:
        tables["volumes"] = volumes_table(content.volumes)
    return tables


def _charts(content: _Content) -> Iterator[Chart]:
    for number, comparison in enumerate(content.comparisons):
        name = file_name(comparison)
        yield Chart("distributions", f"cases_{name}", draw_case_scores(comparison), number)
        if len(content.methods) > 1:
            yield Chart("significance", f"significance_{name}", draw_significance(comparison), number)
    # a diagram has six lines at most
    methods = list(content.bins)
    for number, first in enumerate(range(0, len(methods), len(COLOURS)), start=1):
        part = {method: content.bins[method] for method in methods[first : first + len(COLOURS)]}
        name = "reliability" if len(methods) <= len(COLOURS) else f"reliability_{number}"
        yield Chart("calibration", name, draw_reliability(part))
    for number, score in enumerate(content.rules):
        yield Chart("decisions", f"decisions_{score.key.file_name}", draw_rules(score), number)
    classes = dict.fromkeys(each.class_name for each in content.volumes)
    for number, class_name in enumerate(classes):
        of_class = [each for each in content.volumes if each.class_name == class_name]
        name = "volumes" if len(classes) == 1 else f"volumes_{number + 1}"
        yield Chart("volumes", name, draw_volumes(of_class))
    curves = read_curves({method: run.folder for method, run in content.runs.items()})
    if curves:
        yield Chart("curves", "curves", draw_curves(curves))


def _render(
    content: _Content, tables: Mapping[str, Table], charts: Sequence[Chart], title: str | None, files: str
) -> str:
    """The page. files: the folder of tables and figures."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    comparisons, dataset, methods = content.comparisons, content.dataset, content.methods
    pictures: dict[str, list[Picture]] = {}
    for picture in content.pictures:
        pictures.setdefault(picture.name, []).append(picture)
    number_of = {name: number for number, name in enumerate(pictures)}
    svgs = [
        {
            "section": chart.section,
            "name": chart.name,
            "choice": chart.choice,
            "svg": inline_svg(chart.figure, chart.name, number_of),
        }
        for chart in charts
    ]
    names = {each.heading: spoken(each) for each in comparisons}
    options = differing_options(content.runs)
    dataset_name = dataset.folder.path.resolve().name
    subject = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    cases = content.table.drop_duplicates("case")
    return environment.from_string(_asset("page.html")).render(
        title=title or f"{subject} on {dataset_name}",
        version=__version__,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        content=content,
        comparisons=comparisons,
        methods=methods,
        manifest=dataset.manifest,
        facts=_facts(content, dataset_name),
        verdict=raters_warning(comparisons, content.raters) or verdict(comparisons),
        abbreviations=abbreviations_in([*methods, *chain(*options.values())]),
        answers=answer_table(comparisons, content.raters),
        tables=tables,
        pairs=[tables.get(f"pairs_{file_name(each)}") for each in comparisons],
        charts=svgs,
        names=names,
        case_rows=[_case_rows(comparison, cases) for comparison in comparisons],
        options=options,
        pictures=pictures,
        number_of=number_of,
        layers=LAYERS,
        first_scores=_first_scores(comparisons[0]),
        class_colours=[line_style(number)[0] for number in range(dataset.num_classes - 1)],
        meanings={spoken(each): each.key.meaning for each in comparisons if each.key.meaning},
        rules=[spoken(score) for score in content.rules],
        commands=(RULES_COMMAND, VOLUMES_COMMAND),
        files=files,
    )


def _facts(content: _Content, dataset_name: str) -> str:
    """What was compared on what, in a line."""
    manifest, dataset = content.dataset.manifest, content.dataset
    per = {comparison.key.per for comparison in content.comparisons}
    main = content.table[content.table["per"] == ("scan" if "scan" in per else "slice")]
    counts = {
        "method": len(content.methods),
        "case": main["case"].nunique(),
        "patient": main["patient"].nunique(),
        "rater": len(manifest.raters),
    }
    parts = [f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items()]
    text = f"{', '.join(parts)}; dataset {dataset_name} ({manifest.source})."
    if content.runs:
        these = " of the runs" if len(content.runs) < len(content.methods) else ""
        text += f" Every case is predicted by a network{these} that never saw its patient."
    if dataset.has_slices and per == {"slice"}:
        text += " A case is one slice of a volume: all scores are per slice."
    elif dataset.has_slices:
        text += " A case is a scan: the slices of a volume are put together before they are scored."
    return text


def _case_rows(comparison: Comparison, cases: CaseTable) -> list[tuple[str, str, int, list[str]]]:
    """Name, patient, fold and scores of each case."""
    fold_of = dict(zip(cases["case"], cases["fold"], strict=True))
    shown = comparison.values * comparison.key.scale
    return [
        (case, patient, int(fold_of[case]), list(map(number_text, row)))
        for case, patient, row in zip(comparison.cases, comparison.patients, shown, strict=True)
    ]


def _first_scores(comparison: Comparison) -> dict[tuple[str, str], str]:
    """The first score of each case and method."""
    rows = zip(comparison.cases, comparison.values * comparison.key.scale, strict=True)
    return {
        (case, method): number_text(value)
        for case, values in rows
        for method, value in zip(comparison.methods, values, strict=True)
    }


def _asset(name: str) -> str:
    return (resources.files("semidice.report") / "assets" / name).read_text(encoding="utf-8")
