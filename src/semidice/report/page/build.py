"""The page, and the figures and tables beside it.

    report.html              the page; everything on it is in it
    report_files/means.*     the summary table as .csv, .md and .tex, and so on for every pair of methods
                 cases.csv   the scores of all cases, from which all the rest is made
                 *.png, *.svg    the figures for print
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ...metrics.tables import Table, display_scale, means_table, p_text, pairs_table
from ...rundir import RunFolder, whole_file
from ..case_figures import draw_case_scores, draw_reliability, draw_significance
from ..curves import Curve, draw_curves, read_curves
from ..figures import COLOURS, save_figure
from ..images import BUDGET, PictureLayout, make_pictures
from .answer import LEVEL, Score, answer_of, compare_all, headline, number_text, resampled_unit
from .content import Predictions, ReadPrediction, choose_pictures, count_bins, page_data, with_predictions
from .meanings import MEANINGS
from .runs import check_comparable, differing_options, joined_cases

_SCRIPTS = ("dom.js", "charts.js", "cases.js", "pictures.js", "browser.js", "main.js")

Step = Callable[[str, int, int], object]


@dataclass(frozen=True)
class _Facts:
    """What the page is about, gathered from the runs."""

    table: CaseTable
    scores: Sequence[Score]
    bins: Mapping[str, CalibrationBins]
    curves: Mapping[str, Mapping[str, Curve]]
    options: Mapping[str, Sequence[str]]

    @property
    def main_scores(self) -> list[Score]:
        return [score for score in self.scores if score.is_main]


def build_page(
    runs: Mapping[str, RunFolder],
    dataset: Dataset,
    out: Path,
    *,
    read_prediction: ReadPrediction,
    title: str | None = None,
    max_cases: int = 100,
    budget: int = BUDGET,
    num_resamples: int = 10_000,
    figures: bool = True,
    notices: Sequence[str] = (),
    on_step: Step = lambda _, __, ___: None,
) -> list[Path]:
    """Write the report of finished runs on one dataset to `out`, an .html; the paths of all that was written.

    runs: by the name of their method; one is enough. read_prediction: from the path of a stored prediction to
    its probabilities (C, *space). max_cases: pictures of so many cases; the tables always have all of them.
    budget: characters of all pictures together, which are shrunk to fit. figures: whether to draw the figures
    beside the page, which takes longer than all the rest. on_step(what, done, total) is called as it goes.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the report is a page: give it a name that ends in .html; got {out}")
    if max_cases < 0:
        raise ValueError(f"max_cases must be 0 or more; got {max_cases}")
    check_comparable(runs, dataset)
    table = joined_cases(runs)
    on_step("comparing methods", 0, 1)
    scores, left_out = compare_all(
        table, list(runs), dataset.manifest.class_names, num_resamples=num_resamples
    )
    stored, without = with_predictions(runs)
    fold_of_case = dict(zip(table.columns["case"].tolist(), table.columns["fold"].tolist(), strict=True))
    predictions = Predictions(dataset, stored, fold_of_case, read_prediction)
    names = sorted(set(fold_of_case))
    numbers = dict(zip(names, dataset.numbers_of(names), strict=True)) if stored else {}
    bins = count_bins(
        predictions, list(numbers.values()), table, on_case=lambda *done: on_step("reading predictions", *done)
    )
    chosen = choose_pictures(scores, numbers, most=max_cases)
    layout = PictureLayout.of(dataset, len(stored)) if chosen else None
    pictures = (
        make_pictures(
            dataset,
            chosen,
            predictions.of,
            layout,
            budget=budget,
            on_case=lambda *done: on_step("making pictures", *done),
        )
        if layout is not None
        else []
    )
    facts = _Facts(table, scores, bins, read_curves(runs), differing_options(runs))
    data = page_data(
        table=table,
        scores=scores,
        bins=bins,
        curves=facts.curves,
        layout=layout,
        pictures=pictures,
        pictured_methods=list(stored),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{out.stem}_files")
    beside.mkdir(exist_ok=True)
    written = [*_write_tables(facts, beside)]
    if figures:
        drawings = dict(_figures(facts))
        for done, (name, draw) in enumerate(drawings.items(), start=1):
            figure = draw()
            for suffix in (".png", ".svg"):
                save_figure(figure, beside / f"{name}{suffix}")
                written.append(beside / f"{name}{suffix}")
            on_step("drawing figures", done, len(drawings))
    page = _render(
        facts,
        dataset,
        data,
        title=title or _default_title(runs, dataset),
        notices=[*notices, *left_out, *without],
        beside=beside.name,
    )
    with whole_file(out) as half_written:
        half_written.write_text(page, encoding="utf-8")
    return [out, *written]


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
    write_cases(facts.table, beside / "cases.csv")
    yield beside / "cases.csv"
    for name, table in _tables(facts):
        for suffix, text in ((".csv", table.csv()), (".md", table.markdown()), (".tex", table.latex())):
            path = beside / f"{name}{suffix}"
            with whole_file(path) as half_written:
                half_written.write_text(text, encoding="utf-8")
            yield path


def _figures(facts: _Facts) -> Iterator[tuple[str, Callable[[], Figure]]]:
    for score in facts.main_scores:
        yield f"cases_{score.file_name}", lambda score=score: draw_case_scores(score.paired)
        if len(score.comparison.methods) > 1:
            yield (
                f"significance_{score.file_name}",
                lambda score=score: draw_significance(score.comparison, level=LEVEL),
            )
    # a diagram has six lines at most
    methods = list(facts.bins)
    for first in range(0, len(methods), len(COLOURS)):
        part = {method: facts.bins[method] for method in methods[first : first + len(COLOURS)]}
        number = "" if len(methods) <= len(COLOURS) else f"_{first // len(COLOURS) + 1}"
        yield f"reliability{number}", lambda part=part: draw_reliability(part)
    if facts.curves:
        yield "curves", lambda: draw_curves(facts.curves)


def _render(
    facts: _Facts,
    dataset: Dataset,
    data: Mapping[str, Any],
    *,
    title: str,
    notices: Sequence[str],
    beside: str,
) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_asset("template.html"))
    tables = dict(_tables(facts))
    return template.render(
        title=title,
        version=__version__,
        style=Markup(_asset("page.css")),
        theme_script=Markup(_asset("theme.js")),
        scripts=Markup("\n".join(_asset(name) for name in _SCRIPTS)),
        data=Markup(_embedded(data)),
        methods=list(facts.scores[0].comparison.methods),
        num_cases=len(data["cases"]),
        num_patients=len({case["patient"] for case in data["cases"]}),
        folds=sorted({case["fold"] for case in data["cases"]}),
        num_pictures=len(data["pictures"]),
        unit=resampled_unit(facts.table),
        manifest=dataset.manifest,
        dataset_name=dataset.folder.path.resolve().name,
        headline=headline(facts.scores),
        answers=[answer_of(score) for score in facts.main_scores],
        means=tables["means"],
        means_by_class=tables.get("means_by_class"),
        scores=facts.scores,
        matrices=[_matrix(score) for score in facts.scores] if len(facts.scores[0].comparison.methods) > 1 else [],
        bins=facts.bins,
        curves=list(facts.curves),
        options=facts.options,
        meanings={score.metric: MEANINGS[score.metric] for score in facts.scores if score.metric in MEANINGS},
        notices=notices,
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
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
