"""The page, and the figures and tables beside it.

report.html              the page; everything on it is in it
report_files/means.*     the summary table as .csv, .md and .tex, and so on for every pair of methods
             cases.csv   the scores of all cases, from which all the rest is made
             *.png, *.svg    the figures for print
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from ... import __version__
from ...data.dataset import Dataset
from ...metrics.bins import CalibrationBins
from ...metrics.cases import CaseTable, write_cases
from ...metrics.registry import SCORES, display_scale
from ...metrics.statistics import resampling_unit
from ...metrics.tables import Table, means_table, number_text, p_text, pairs_table
from ...paths import ReportFolder, RunFolder, atomic_write
from ..case_figures import draw_case_scores, draw_reliability, draw_significance
from ..curves import Curve, draw_curves, read_curves
from ..figures import COLOURS, save_figure
from ..images import MAX_CHARACTERS, Picture, PictureLayout, make_pictures
from .answer import LEVEL, Score, answer_of, compare_all, headline
from .content import Predictions, ReadPrediction, choose_pictures, count_bins, page_data, with_predictions
from .runs import check_comparable, differing_options, joined_cases

_MAX_NAME_LENGTH = 24
_SCRIPTS = ("dom.js", "charts.js", "cases.js", "pictures.js", "browser.js", "main.js")

Step = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Report:
    """What was written, and what the page says of things left out."""

    page: Path
    beside: tuple[Path, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class _Facts:
    """What the page is about, gathered from the runs; `pictured` are the methods with stored predictions."""

    dataset: Dataset
    table: CaseTable
    scores: Sequence[Score]
    bins: Mapping[str, CalibrationBins]
    curves: Mapping[str, Mapping[str, Curve]]
    options: Mapping[str, Sequence[str]]
    pictured: Sequence[str]
    layout: PictureLayout | None
    pictures: Sequence[Picture]
    notices: tuple[str, ...]

    @property
    def main_scores(self) -> list[Score]:
        return [score for score in self.scores if score.is_main]

    @property
    def methods(self) -> tuple[str, ...]:
        return self.scores[0].comparison.methods


def build_page(
    runs: Mapping[str, RunFolder],
    dataset: Dataset,
    out: Path,
    *,
    read_prediction: ReadPrediction,
    title: str | None = None,
    max_cases: int = 100,
    max_characters: int = MAX_CHARACTERS,
    num_resamples: int = 10_000,
    figures: bool = True,
    notices: Sequence[str] = (),
    on_step: Step = lambda _, __, ___: None,
) -> Report:
    """Write the report of finished runs on one dataset to `out`, an .html file, and to a folder beside it.

    runs: by the name of their method; one is enough. read_prediction: from the path of a stored prediction to
    its probabilities (C, *space). max_cases: pictures of so many cases; the tables always have all of them.
    max_characters: of all pictures together, which are shrunk to fit. figures: whether to draw the figures
    beside the page, which takes longer than all the rest. notices: more to say at the top.
    on_step(what, done, total) is called as it goes.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the report is a page: give it a name that ends in .html; got {out}")
    if not runs or max_cases < 0:
        raise ValueError(f"a report needs a run, and max_cases of 0 or more; got {len(runs)} and {max_cases}")
    check_comparable(runs, dataset)
    facts = _gather(
        runs,
        dataset,
        read_prediction,
        max_cases=max_cases,
        max_characters=max_characters,
        num_resamples=num_resamples,
        notices=notices,
        on_step=on_step,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = ReportFolder.of(out).path
    beside.mkdir(exist_ok=True)
    written = [*_write_tables(facts, beside)]
    if figures:
        written += _write_figures(facts, beside, on_step)
    page = _render(facts, title=title or _default_title(runs, dataset), beside=beside.name)
    with atomic_write(out) as temp_path:
        temp_path.write_text(page, encoding="utf-8")
    return Report(out, tuple(written), facts.notices)


def _gather(
    runs: Mapping[str, RunFolder],
    dataset: Dataset,
    read_prediction: ReadPrediction,
    *,
    max_cases: int,
    max_characters: int,
    num_resamples: int,
    notices: Sequence[str],
    on_step: Step,
) -> _Facts:
    table = joined_cases(runs)
    scores, left_out = compare_all(
        table,
        list(runs),
        dataset.manifest.class_names,
        num_resamples=num_resamples,
        on_metric=lambda *done: on_step("comparing methods", *done),
    )
    stored, without = with_predictions(runs)
    fold_of_case = dict(zip(table.columns["case"].tolist(), table.columns["fold"].tolist(), strict=True))
    predictions = Predictions(dataset, stored, fold_of_case, read_prediction)
    names = sorted(fold_of_case) if stored else []
    numbers = dict(zip(names, dataset.numbers_of(names), strict=True))
    bins = count_bins(
        predictions,
        list(numbers.values()),
        table,
        on_case=lambda *done: on_step("reading predictions", *done),
    )
    chosen = choose_pictures(scores, numbers, most=max_cases)
    layout = PictureLayout.of(dataset, len(stored)) if chosen else None
    pictures = (
        []
        if layout is None
        else make_pictures(
            dataset,
            chosen,
            predictions.of,
            layout,
            max_characters=max_characters,
            on_case=lambda *done: on_step("making pictures", *done),
        )
    )
    return _Facts(
        dataset=dataset,
        table=table,
        scores=scores,
        bins=bins,
        curves=read_curves(runs),
        options=differing_options(runs),
        pictured=list(stored),
        layout=layout,
        pictures=pictures,
        notices=(*notices, *left_out, *without),
    )


def _default_title(runs: Mapping[str, RunFolder], dataset: Dataset) -> str:
    where = dataset.folder.path.resolve().name
    return f"{next(iter(runs))} on {where}" if len(runs) == 1 else f"{len(runs)} methods on {where}"


def _tables(facts: _Facts) -> Iterator[tuple[str, Table]]:
    yield "means", means_table([score.comparison for score in facts.main_scores], level=LEVEL)
    of_classes = [score.comparison for score in facts.scores if not score.is_main]
    if of_classes:
        yield "means_by_class", means_table(of_classes, level=LEVEL, title="Mean over cases, each class")
    for score in facts.scores:
        if len(score.comparison.methods) > 1:
            yield f"pairs_{score.file_name}", pairs_table(score.comparison, level=LEVEL)


def _write_tables(facts: _Facts, beside: Path) -> Iterator[Path]:
    cases = ReportFolder(beside).cases
    write_cases(facts.table, cases)
    yield cases
    for name, table in _tables(facts):
        for suffix, text in ((".csv", table.csv()), (".md", table.markdown()), (".tex", table.latex())):
            path = beside / f"{name}{suffix}"
            with atomic_write(path) as temp_path:
                temp_path.write_text(text, encoding="utf-8")
            yield path


def _figures(facts: _Facts) -> Iterator[tuple[str, Callable[[], Figure]]]:
    name_of = _figure_names(facts.methods)
    names = tuple(name_of.values())
    for score in facts.main_scores:
        paired, comparison = score.paired._replace(methods=names), replace(score.comparison, methods=names)
        yield f"cases_{score.file_name}", partial(draw_case_scores, paired)
        if len(names) > 1:
            yield f"significance_{score.file_name}", partial(draw_significance, comparison, level=LEVEL)
    # a diagram has six lines at most
    methods = list(facts.bins)
    for first in range(0, len(methods), len(COLOURS)):
        part = {name_of[method]: facts.bins[method] for method in methods[first : first + len(COLOURS)]}
        number = "" if len(methods) <= len(COLOURS) else f"_{first // len(COLOURS) + 1}"
        yield f"reliability{number}", partial(draw_reliability, part)
    if facts.curves:
        curves = {
            series: {name_of[method]: curve for method, curve in of_methods.items()}
            for series, of_methods in facts.curves.items()
        }
        yield "curves", partial(draw_curves, curves)


def _figure_names(methods: Sequence[str]) -> dict[str, str]:
    """What the methods are called in figures: their two ends where they are long, which leave room to draw.

    >>> _figure_names(["DML1", "_a", "a uniform average of all the raters, DML1"])
    {'DML1': 'DML1', '_a': ' _a', 'a uniform average of all the raters, DML1': 'a uniform a…raters, DML1'}
    """
    names: dict[str, str] = {}
    for number, method in enumerate(methods, start=1):
        short = method if len(method) <= _MAX_NAME_LENGTH else f"{method[:11]}…{method[-12:]}"
        # two long ones may have the same ends
        short = f"{number}. {short}" if short in names.values() else short
        # matplotlib takes dollars for mathematics, and leaves out labels with an underscore in front
        names[method] = f"{' ' if short.startswith('_') else ''}{short}".replace("$", r"\$")
    return names


def _write_figures(facts: _Facts, beside: Path, on_step: Step) -> Iterator[Path]:
    drawings = dict(_figures(facts))
    for done, (name, draw) in enumerate(drawings.items(), start=1):
        figure = draw()
        for suffix in (".png", ".svg"):
            save_figure(figure, beside / f"{name}{suffix}")
            yield beside / f"{name}{suffix}"
        on_step("drawing figures", done, len(drawings))


def _render(facts: _Facts, *, title: str, beside: str) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    data = page_data(
        table=facts.table,
        scores=facts.scores,
        bins=facts.bins,
        curves=facts.curves,
        layout=facts.layout,
        pictures=facts.pictures,
        pictured_methods=facts.pictured,
    )
    tables = dict(_tables(facts))
    metrics = dict.fromkeys(score.metric for score in facts.scores)
    return environment.from_string(_asset("template.html")).render(
        title=title,
        version=__version__,
        style=Markup(_asset("page.css")),
        theme_script=Markup(_asset("theme.js")),
        scripts=Markup("\n".join(_asset(name) for name in _SCRIPTS)),
        data=Markup(_embedded(data)),
        methods=list(facts.methods),
        num_cases=len(data["cases"]),
        num_patients=len({case["patient"] for case in data["cases"]}),
        folds=sorted({case["fold"] for case in data["cases"]}),
        num_pictures=len(facts.pictures),
        unit=resampling_unit(facts.table.columns["patient"], facts.table.columns["case"]),
        manifest=facts.dataset.manifest,
        dataset_name=facts.dataset.folder.path.resolve().name,
        headline=headline(facts.scores),
        answers=[answer_of(score) for score in facts.main_scores],
        means=tables["means"],
        means_by_class=tables.get("means_by_class"),
        scores=facts.scores,
        matrices=[_matrix(score) for score in facts.scores] if len(facts.methods) > 1 else [],
        bins=facts.bins,
        curves=list(facts.curves),
        options=facts.options,
        meanings={metric: SCORES[metric].meaning for metric in metrics if metric in SCORES},
        notices=facts.notices,
        beside=beside,
        level=LEVEL,
    )


def _matrix(score: Score) -> list[list[dict[str, Any] | None]]:
    """Row method minus column method; None on the diagonal."""
    comparison = score.comparison
    superior = comparison.superior(level=LEVEL)
    scale = display_scale(score.metric)
    count = range(len(comparison.methods))
    return [
        [
            None
            if row == column
            else {
                "difference": number_text(float(comparison.difference[row, column]) * scale, signed=True),
                "p": p_text(float(comparison.p_holm[row, column])),
                "kind": "better" if superior[row, column] else "worse" if superior[column, row] else "",
            }
            for column in count
        ]
        for row in count
    ]


def _asset(name: str) -> str:
    return (resources.files("semidice.report.page") / "assets" / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON for a script element, which ends at the first `</`, wherever that stands."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace(
        "<", "\\u003c"
    )
