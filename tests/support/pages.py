"""Reports of small synthetic runs for tests, and their numbers, read without semidice."""

from html.parser import HTMLParser

import pyarrow.parquet
from decision_files import write_decision_files
from prepared import make_prepared
from synthetic_runs import METRICS, write_runs

from semidice.metrics.registry import ScoreKey, default_unit
from semidice.report.page import PageOptions, build_page
from semidice.runs.run import open_run
from semidice.statistics import concatenate, read_cases

NAMES = ("majority + SDL", "uniform + SDL", "uniform + DML1")
RESAMPLES = 1000
SHOWN_METRICS = ("dice_score", "binarized_dice_score", "calibration_error", "brier_error", "truth_error")
CLASS_OF = {"calibration_error": "all", "brier_error": "all"}


def build(runs, dataset, out, *, on_step=lambda *_: None, **options):
    options = PageOptions(**{"figures": False, "num_resamples": RESAMPLES} | options)
    opened = {name: open_run(run) for name, run in runs.items()}
    return build_page(opened, dataset, out, options, on_step=on_step)


class Built:
    """A page, its dataset and runs."""

    def __init__(self, root, *, dataset_options, methods=NAMES, metrics=METRICS, decisions=False, **options):
        self.dataset = make_prepared(root / "lesions", **dataset_options)
        self.runs = write_runs(self.dataset, root / "runs", methods=methods, metrics=metrics)
        for run in self.runs.values() if decisions else ():
            write_decision_files(self.dataset, run)
        self.out = root / "out" / "report.html"
        self.report = build(self.runs, self.dataset, self.out, **options)

    def values(self, metric, class_name="mean"):
        """Scores by case and method, read without semidice."""
        scores = {}
        for method, run in self.runs.items():
            for row in pyarrow.parquet.read_table(run.cases).to_pylist():
                if (row["metric"], row["class"]) == (metric, class_name):
                    scores.setdefault(row["case"], {})[method] = row["value"]
        return scores

    def table(self):
        return concatenate([read_cases(run.cases) for run in self.runs.values()])


class _Sections(HTMLParser):
    """Reads the rows of cells of every table, by the id of its section, with white space collapsed."""

    def __init__(self):
        super().__init__()
        self.tables, self.section, self.cell = {}, "", None

    def handle_starttag(self, tag, attributes):
        if tag == "section":
            self.section = dict(attributes)["id"]
        elif tag == "table":
            self.tables.setdefault(self.section, []).append([])
        elif tag == "tr":
            self.tables[self.section][-1].append([])
        elif tag in ("th", "td"):
            self.cell = []

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.tables[self.section][-1][-1].append(" ".join("".join(self.cell).split()))
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell.append(data)


def tables_of(path):
    """The tables of each section of a page, as rows of cells."""
    reader = _Sections()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.tables


def shown(value, metric, *, signed=False):
    """Format a number as the tables do."""
    return f"{value * ScoreKey(metric, default_unit(metric)).scale:{'+' if signed else ''}.2f}".replace(
        "-", "−"
    )


def lesion_report(root):
    """Fourteen images of one patient each, three raters who skipped some images, three methods."""
    options = {"num_cases": 14, "size": (40, 48), "num_raters": 3, "absent": True, "cases_per_patient": 1}
    return Built(root, dataset_options=options, decisions=True)


def volume_report(root):
    """Volumes with three classes and two channels, two per patient, one method."""
    options = {"num_cases": 6, "size": (20, 28), "depth": 5, "num_classes": 3, "num_channels": 2}
    return Built(
        root,
        dataset_options=options,
        methods=NAMES[2:],
        metrics=("dice_score", "calibration_error"),
        decisions=True,
    )
