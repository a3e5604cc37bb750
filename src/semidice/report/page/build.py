"""`semidice report`: the page, and the figures and tables next to it.

report.html              the page; it contains everything that it shows
report_files/means.*     the summary table as .csv, .md and .tex; the same for every pair of methods
             cases.csv   the scores of all cases, from which everything else is made
             *.png, *.svg    the figures for print
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console

from ... import __version__
from ...console import progress_bar, say
from ...data.dataset import Dataset
from ...errors import UserError
from ...locks import locked
from ...paths import ReportFolder, write_text
from ...runs.run import TrainedRun
from ...statistics.cases import CaseTable, write_cases
from ...statistics.resampling import ALPHA
from ...statistics.tables import Table, means_table, number_text, p_text, pairs_table
from ..case_figures import draw_case_scores, draw_reliability, draw_significance
from ..curves import draw_curves
from ..decision_figures import draw_rules, draw_volumes
from ..figures import COLOURS, save_figure
from ..other_methods import compared_methods, read_other_methods
from ..rules import COMMAND as RULES_COMMAND
from ..rules import PLAIN, RuleDifference, RuleScore, differences, rules_sentences, rules_table
from ..volumes import COMMAND as VOLUMES_COMMAND
from ..volumes import volumes_sentence, volumes_table
from .answer import Score, abbreviations_in, answer_of, headline
from .content import DEFAULT_OPTIONS, OnStep, PageContent, PageOptions, gather_content, main_cases
from .records import embedded_json, page_records
from .runs import SeedRuns, check_comparable, find_runs

_MAX_NAME_LENGTH = 24
_SCRIPTS = ("dom.js", "charts.js", "cases.js", "volumes.js", "pictures.js", "browser.js", "main.js")


@dataclass(frozen=True)
class Report:
    """The files that were written, and what the page says about runs and scores that were left out."""

    page: Path
    files: tuple[Path, ...]
    notices: tuple[str, ...]


def run_report(
    paths: Sequence[Path],
    out: Path,
    console: Console,
    options: PageOptions = DEFAULT_OPTIONS,
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
    options: PageOptions = DEFAULT_OPTIONS,
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
    others = others or {}
    if not runs and not others:
        raise UserError("a report needs one method or more: a finished run or a case table; got none")
    seeds = seeds or {}
    check_comparable(runs, dataset, seeds)
    folder = ReportFolder.of(out)
    with locked(folder, "semidice report"):
        content = gather_content(
            runs, others, dataset, options, seeds=seeds, notices=notices, on_step=on_step
        )
        return _write_report(content, dataset, out, folder, options, on_step)


def _write_report(
    content: PageContent,
    dataset: Dataset,
    out: Path,
    folder: ReportFolder,
    options: PageOptions,
    on_step: OnStep,
) -> Report:
    write_cases(content.table_of_seeds, folder.cases)
    files = [folder.cases]
    tables = _tables(content)
    for name, table in tables.items():
        files += table.write(folder.path / name)
    if options.figures:
        files += _write_figures(content, folder.path, on_step)
    dataset_name = dataset.folder.path.resolve().name
    methods = content.methods
    subject = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    title = options.title or f"{subject} on {dataset_name}"
    page = _render(content, tables, title=title, dataset_name=dataset_name, files_folder=folder.path.name)
    write_text(out, page)
    return Report(out, tuple(files), content.notices)


def _tables(content: PageContent) -> dict[str, Table]:
    """All tables by the name of their files."""
    main = [score.comparison for score in content.main_scores]
    tables = {"means": means_table(main, raters=content.raters)}
    of_classes = [score.comparison for score in content.scores if not score.is_main]
    if of_classes:
        tables["means_by_class"] = means_table(
            of_classes, raters=content.raters, title="Mean over cases, each class"
        )
    if len(content.methods) > 1:
        for score in content.scores:
            tables[f"pairs_{score.file_name}"] = pairs_table(score.comparison)
    for rule_score in content.rules:
        tables[f"decisions_{rule_score.key.file_name}"] = rules_table(rule_score)
    if content.volumes:
        tables["volumes"] = volumes_table(content.volumes)
    return tables


def _write_figures(content: PageContent, folder: Path, on_step: OnStep) -> list[Path]:
    drawings: dict[str, Callable[[], Figure]] = {}
    label_of = _figure_labels(content.methods)
    labels = tuple(label_of.values())
    for score in content.main_scores:
        paired = replace(score.paired, methods=labels)
        drawings[f"cases_{score.file_name}"] = partial(draw_case_scores, paired)
        if len(labels) > 1:
            drawings[f"significance_{score.file_name}"] = partial(
                draw_significance, score.comparison, labels=labels
            )
    # a diagram has six lines at most
    methods = list(content.bins)
    for first in range(0, len(methods), len(COLOURS)):
        part = {label_of[method]: content.bins[method] for method in methods[first : first + len(COLOURS)]}
        number = "" if len(methods) <= len(COLOURS) else f"_{first // len(COLOURS) + 1}"
        drawings[f"reliability{number}"] = partial(draw_reliability, part)
    if content.curves:
        curves = {
            series: {label_of[method]: curve for method, curve in of_methods.items()}
            for series, of_methods in content.curves.items()
        }
        drawings["curves"] = partial(draw_curves, curves)
    drawings |= _decision_drawings(content, label_of)
    files = []
    for done, (name, draw) in enumerate(drawings.items(), start=1):
        figure = draw()
        for suffix in (".png", ".svg"):
            files.append(folder / f"{name}{suffix}")
            save_figure(figure, files[-1])
        on_step("drawing figures", done, len(drawings))
    return files


def _decision_drawings(content: PageContent, label_of: Mapping[str, str]) -> dict[str, Callable[[], Figure]]:
    drawings: dict[str, Callable[[], Figure]] = {}
    for score in content.rules:
        labelled = RuleScore(
            score.key,
            {label_of[method]: comparison for method, comparison in score.comparisons.items()},
            {label_of[method]: best for method, best in score.best.items()},
        )
        drawings[f"decisions_{score.key.file_name}"] = partial(draw_rules, labelled)
    classes = dict.fromkeys(each.class_name for of_method in content.volumes.values() for each in of_method)
    for number, class_name in enumerate(classes, start=1):
        of_class = {
            label_of[method]: each
            for method, of_method in content.volumes.items()
            for each in of_method
            if each.class_name == class_name
        }
        drawings["volumes" if len(classes) == 1 else f"volumes_{number}"] = partial(draw_volumes, of_class)
    return drawings


def _figure_labels(methods: Sequence[str]) -> dict[str, str]:
    """The labels of the methods in figures; of a long name, its start and its end.

    >>> _figure_labels(["DML1", "_a", "a uniform average of all the raters, DML1"])
    {'DML1': 'DML1', '_a': ' _a', 'a uniform average of all the raters, DML1': 'a uniform a…raters, DML1'}
    """
    labels: dict[str, str] = {}
    for number, method in enumerate(methods, start=1):
        short = method if len(method) <= _MAX_NAME_LENGTH else f"{method[:11]}…{method[-12:]}"
        # two long names may have the same start and end
        short = f"{number}. {short}" if short in labels.values() else short
        # matplotlib reads text between dollars as mathematics, and omits labels that start with an underscore
        labels[method] = f"{' ' if short.startswith('_') else ''}{short}".replace("$", r"\$")
    return labels


def _render(content: PageContent, tables: Mapping[str, Table], **names: str) -> str:
    """The page; names: title, dataset_name and files_folder of the template."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    records = page_records(content)
    keys = dict.fromkeys(score.key for score in content.scores)
    return environment.from_string(_asset("template.html")).render(
        **names,
        version=__version__,
        style=Markup(_asset("page.css")),
        theme_script=Markup(_asset("theme.js")),
        scripts=Markup("\n".join(_asset(name) for name in _SCRIPTS)),
        data=Markup(embedded_json(records)),
        methods=list(content.methods),
        num_cases=len(main_cases(content.table)),
        num_patients=len({case["patient"] for case in records["cases"]}),
        folds=sorted({case["fold"] for case in records["cases"]}),
        num_pictures=len(content.pictures),
        unit="patient" if content.scores[0].comparison.by_patient else "case",
        manifest=content.dataset.manifest,
        headline=headline(content.scores),
        abbreviations=abbreviations_in([*content.methods, *chain(*content.options.values())]),
        breakable=_breakable,
        answers=[answer_of(score, content.raters) for score in content.main_scores],
        means=tables["means"],
        means_by_class=tables.get("means_by_class"),
        scores=content.scores,
        matrices=[_matrix(score) for score in content.scores] if len(content.methods) > 1 else [],
        bins=content.bins,
        curves=list(content.curves),
        options=content.options,
        runs=content.runs,
        meanings={str(key): words for key in keys if (words := key.meaning)},
        units=_units_text(content),
        decisions=[_rules_of(score, content.methods) for score in content.rules],
        decisions_command=RULES_COMMAND,
        volumes=tables.get("volumes"),
        volumes_sentence=volumes_sentence(content.volumes) if content.volumes else "",
        volume_methods=[(content.methods.index(method), method) for method in content.volumes],
        volume_classes=_volume_classes(content),
        volumes_command=VOLUMES_COMMAND,
        notices=content.notices,
        raters=content.raters,
        level=ALPHA,
    )


def _units_text(content: PageContent) -> str:
    """What a case is, if volumes were cut into slices."""
    if not content.dataset.has_slices:
        return ""
    per_slice = [score.key.per == "slice" for score in content.scores]
    if all(per_slice):
        return "A case is one slice of a volume: all scores are per slice."
    also = " Scores named per slice are of each slice on its own." if any(per_slice) else ""
    return f"A case is a scan: the slices of a volume are put together before they are scored.{also}"


def _matrix(score: Score) -> list[list[dict[str, Any] | None]]:
    """Row method minus column method; None on the diagonal."""
    pairs, methods = score.comparison.pairs, score.comparison.methods

    def cell(row: str, column: str) -> dict[str, Any]:
        pair, is_worse = pairs.loc[(row, column)], pairs.loc[(column, row)].better
        return {
            "difference": number_text(pair.difference * score.key.scale, signed=True),
            "p": p_text(pair.p),
            "kind": "better" if pair.better else "worse" if is_worse else "",
        }

    return [[None if row == column else cell(row, column) for column in methods] for row in methods]


def _rules_of(score: RuleScore, methods: Sequence[str]) -> dict[str, Any]:
    """The table "Which decision?" of one score: a row per method, a cell per rule, None if it is missing."""

    def cell(each: RuleDifference) -> dict[str, Any]:
        p = p_text(each.p)
        return {
            "mean": number_text(each.mean),
            "interval": f"[{number_text(each.mean_low)}, {number_text(each.mean_high)}]",
            "best": each.best,
            "difference": None if each.rule == PLAIN else number_text(each.difference, signed=True),
            "ends": f"[{number_text(each.low, signed=True)}, {number_text(each.high, signed=True)}]",
            "p": f"p {p}" if p.startswith("<") else f"p = {p}",
            "kind": "" if not each.significant else "better" if each.better else "worse",
        }

    rows = []
    for method in score.comparisons:
        of_rules = differences(score, method)
        cells = [cell(of_rules[rule]) if rule in of_rules else None for rule in score.rules]
        rows.append({"number": methods.index(method), "method": method, "cells": cells})
    first = next(iter(score.comparisons.values()))
    return {
        "heading": score.heading,
        "sentences": rules_sentences(score),
        "rules": score.rules,
        "rows": rows,
        "num_cases": first.num_cases,
    }


def _volume_classes(content: PageContent) -> list[str]:
    return list(dict.fromkeys(each.class_name for classes in content.volumes.values() for each in classes))


def _breakable(name: str) -> Markup:
    """A name that may be broken after its underscores."""
    return Markup("_<wbr>").join(name.split("_"))


def _asset(name: str) -> str:
    return (resources.files("semidice.report.page") / "assets" / name).read_text(encoding="utf-8")
