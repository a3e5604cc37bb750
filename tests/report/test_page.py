"""The report page: every number is traced to the case tables; the headline; runs that cannot be compared."""

import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from case_rows import CaseRow, rows_of, table_of
from pages import (
    CLASS_OF,
    NAMES,
    RESAMPLES,
    SHOWN_METRICS,
    Built,
    build,
    embedded,
    shown,
)
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from start import refused
from synthetic_runs import METRICS, write_runs

from semidice.report.page import PageOptions, run_report
from semidice.report.page.answer import compare_all, headline
from semidice.report.page.runs import find_runs
from semidice.runs.evaluate import run_evaluate
from semidice.runs.predictions import read_prediction, write_prediction
from semidice.statistics import compare_cases, read_cases, write_cases
from semidice.statistics.cases import in_order
from semidice.statistics.tables import p_text


class Tables(HTMLParser):
    """Read the rows of cells of every table of a page, with white space collapsed."""

    def __init__(self):
        super().__init__()
        self.tables, self.cell = [], None

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.cell = []

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.tables[-1][-1].append(" ".join("".join(self.cell).split()))
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell.append(data)


def tables_of(path):
    reader = Tables()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.tables


def test_every_mean_in_the_summary_equals_the_mean_of_the_case_tables(built):
    means = tables_of(built.out)[1]
    assert means[0] == [
        "method",
        *(f"{name} (%) {'↓' if name.endswith('error') else '↑'}" for name in SHOWN_METRICS),
    ]
    for row, method in zip(means[1:-1], NAMES, strict=True):
        assert row[0] == method
        for cell, metric in zip(row[1:], SHOWN_METRICS, strict=True):
            scores = [
                by_method[method] for by_method in built.values(metric, CLASS_OF.get(metric, "mean")).values()
            ]
            assert cell.split()[0].rstrip("★") == shown(math.fsum(scores) / 14, metric)


def test_every_interval_difference_and_p_value_equals_the_comparison(built):
    answers, means, *matrices = tables_of(built.out)[: 2 + len(SHOWN_METRICS)]
    for number, metric in enumerate(SHOWN_METRICS):
        comparison = compare_cases(built.table(), metric, num_resamples=RESAMPLES)
        for row, method in enumerate(NAMES):
            mean = comparison.means.loc[method]
            low, high = (shown(float(mean[end]), metric) for end in ("low", "high"))
            cell = means[1 + row][1 + number]
            assert cell.split(" ", 1)[1].removeprefix("★ ") == f"[{low}, {high}]"
            assert ("★" in cell) == mean.best
            for column in range(len(NAMES)):
                if column != row:
                    pair = comparison.pairs.loc[method, NAMES[column]]
                    is_worse = comparison.pairs.loc[NAMES[column], method].better
                    sign = "▲ " if pair.better else "▼ " if is_worse else ""
                    p = p_text(pair.p)
                    difference = shown(pair.difference, metric, signed=True)
                    expected = f"{sign}{difference} p {p if p.startswith('<') else '= ' + p}"
                    assert matrices[number][1 + row][1 + column] == expected
        means_of = comparison.means["mean"]
        ranked = means_of.sort_values(ascending=not comparison.key.higher_is_better).index
        first, *rivals = ranked[[0, 1, -1]]
        answer = answers[1 + number]
        assert answer[1].startswith(f"{first} {shown(float(means_of[first]), metric)} [")
        for cell, rival in zip(answer[2:], rivals, strict=True):
            pair = comparison.pairs.loc[first, rival]
            low, high = (shown(pair[end], metric, signed=True) for end in ("low", "high"))
            difference = shown(pair.difference, metric, signed=True)
            words = "significant" if pair.better else "may be chance"
            p = p_text(pair.p)
            equals = p if p.startswith("<") else f"= {p}"
            assert cell == f"{difference} [{low}, {high}] {rival} {words}: p {equals}"


def test_the_scores_in_the_page_equal_the_case_tables_exactly(built):
    for number, score in enumerate(built.data["scores"]):
        expected = built.values(score["name"], CLASS_OF.get(score["name"], "mean"))
        embedded_scores = {case["name"]: case["values"][number] for case in built.data["cases"]}
        assert embedded_scores == {case: [row[method] for method in NAMES] for case, row in expected.items()}


def test_the_reliability_in_the_page_equals_a_count_over_the_predictions(built):
    for record, (_, run) in zip(built.data["reliability"], built.runs.items(), strict=True):
        confidence, correct = [], []
        for number, case in enumerate(built.dataset.cases):
            (path,) = run.path.glob(f"fold_*/predictions/{case.name}.npz")
            prob = read_prediction(path)
            masks = built.dataset.masks(number)[built.dataset.present[number]]
            majority = masks.sum(0) * 2 > len(masks)
            confidence.append(prob.max(0).ravel())
            correct.append((prob.argmax(0) == majority).ravel())
        confidence, correct = np.concatenate(confidence).astype(np.float64), np.concatenate(correct)
        cell = np.minimum((confidence * 10 + 1e-6).astype(int), 9)
        gaps = [abs(correct[cell == bin_].sum() - confidence[cell == bin_].sum()) for bin_ in range(10)]
        assert record["error"] == pytest.approx(sum(gaps) / len(confidence), abs=1e-6)
        assert record["share"] == pytest.approx(np.bincount(cell, minlength=10) / len(confidence))


def test_tables_next_to_the_page_have_all_digits_and_the_complete_case_table(built):
    files = built.out.parent / "report_files"
    table = read_cases(files / "cases.csv")
    assert list(map(repr, table.pipe(in_order).pipe(rows_of))) == list(
        map(repr, built.table().pipe(in_order).pipe(rows_of))
    )
    for stem in ("means", *(f"pairs_{metric}" for metric in SHOWN_METRICS)):
        assert {path.suffix for path in files.glob(f"{stem}.*")} == {".csv", ".md", ".tex"}
    assert "\\begin{tabular}" in (files / "means.tex").read_text()
    assert set(built.report.files) == {path for path in files.iterdir() if path.name != ".lock"}


def test_figures_next_to_the_page_are_png_and_svg(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    runs = write_runs(dataset, tmp_path / "runs", methods=NAMES[1:], metrics=["dice_score"])
    for path in (tmp_path / "data" / "truth").iterdir():
        path.unlink()
    steps = []
    build(
        runs, dataset, tmp_path / "report.html", figures=True, max_cases=0, on_step=lambda *s: steps.append(s)
    )
    names = {path.name for path in (tmp_path / "report_files").glob("*.[ps][nv]g")}
    stems = ("cases_dice_score", "significance_dice_score", "reliability", "curves")
    assert {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")} <= names
    for path in (tmp_path / "report_files").glob("*.png"):
        with Image.open(path) as figure:
            assert min(figure.size) > 200
    assert steps[-1][0] == "drawing figures"
    assert steps[-1][1] == steps[-1][2]


def test_the_page_has_the_words_of_the_field(built):
    text = built.out.read_text(encoding="utf-8")
    answers = tables_of(built.out)[0]
    assert answers[0][2:] == ["lead over second", "lead over worst"]
    assert '<h2 id="reliability-title">Calibration</h2>' in text
    assert "not significantly worse than any other" in text
    for old in ("minus the next", "minus the last", "significantly superior", "Does confidence"):
        assert old not in text


def test_a_page_built_twice_has_the_same_bytes(built, tmp_path):
    build(built.runs, built.dataset, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == built.out.read_bytes()


def scored_rows(means, *, metric="dice_score", noise=0.01, num_cases=20):
    rng = np.random.default_rng(0)
    return [
        CaseRow(f"case{number}", f"case{number}", 0, method, "mean", metric, value + rng.normal(0, noise))
        for method, value in means.items()
        for number in range(num_cases)
    ]


@pytest.mark.parametrize(
    ("dice", "error", "words"),
    [
        ({"A": 0.9}, {"A": 0.1}, "One method, A: there is nothing to compare it with."),
        (
            {"A": 0.9, "B": 0.8},
            {"A": 0.1, "B": 0.2},
            "A is best, significantly ahead of every other method by all 2 scores.",
        ),
        (
            {"A": 0.9, "B": 0.8},
            {"A": 0.1, "B": 0.1},
            "A is best: significantly ahead of every other method by dice_score, and no other method is "
            "significantly better by any score.",
        ),
        (
            {"A": 0.9, "B": 0.9, "C": 0.8},
            {"A": 0.1, "B": 0.2, "C": 0.1},
            "A is the only method that no other method beats significantly by any score.",
        ),
        (
            {"A": 0.9, "B": 0.9, "C": 0.5},
            {"A": 0.1, "B": 0.1, "C": 0.2},
            "No other method is significantly better than A and B by any score; these cases do not decide "
            "between them.",
        ),
        (
            {"A": 0.9, "B": 0.9},
            {"A": 0.1, "B": 0.1},
            "No difference between the 2 methods is significant by any score: with these cases, each of them "
            "may be the best.",
        ),
        (
            {"A": 0.9, "B": 0.8},
            {"A": 0.2, "B": 0.1},
            "It depends on the score: every method is significantly worse than another by some score. "
            "Significantly ahead of every other method: A by dice_score; B by brier_error.",
        ),
        (
            {"A": 0.9, "B": 0.9, "C": 0.8},
            {"A": 0.2, "B": 0.2, "C": 0.1},
            "It depends on the score: every method is significantly worse than another by some score. "
            "Significantly ahead of every other method: C by brier_error.",
        ),
        (
            {"A": 0.9, "B": 0.9, "C": 0.8, "D": 0.8},
            {"A": 0.2, "B": 0.2, "C": 0.1, "D": 0.1},
            "It depends on the score: every method is significantly worse than another by some score. Most "
            "often in the best set: A, B, C and D (by 1 of 2 scores).",
        ),
    ],
)
def test_the_headline_follows_from_the_best_sets(dice, error, words):
    table = table_of([*scored_rows(dice), *scored_rows(error, metric="brier_error")])
    scores, notices = compare_all(table, list(dice), ["background", "lesion"], num_resamples=RESAMPLES)
    assert headline(scores) == words
    assert notices == []


def test_scores_that_cannot_be_compared_are_left_out_and_named():
    rows = [
        *scored_rows({"A": 0.9, "B": 0.8}),
        *scored_rows({"A": 0.1}, metric="brier_error"),
        *scored_rows({"A": 1.0, "B": 2.0}, metric="volume_ml"),
        *scored_rows({"A": math.nan, "B": 2.0}, metric="hausdorff_error"),
    ]
    scores, notices = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert [score.name for score in scores] == ["dice_score"]
    assert notices == [
        "brier_error is left out: B was not scored by it.",
        "volume_ml is left out: its name does not say whether higher is better.",
        "hausdorff_error (mm) of mean is left out: fewer than two cases have it.",
    ]


def test_cases_of_a_patient_are_resampled_together_if_there_are_several_patients():
    rows = [row._replace(patient=f"p{int(row.case[4:]) // 2}") for row in scored_rows({"A": 0.9, "B": 0.8})]
    (score,), _ = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert (score.comparison.by_patient, score.comparison.num_patients) == (True, 10)
    rows = [row._replace(patient="p") for row in rows]
    (score,), _ = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert not score.comparison.by_patient


def test_a_report_of_one_case_is_refused():
    table = table_of(scored_rows({"A": 0.9}, num_cases=1))
    refused(lambda: compare_all(table, ["A"], ["background", "lesion"]), "nothing to report", "two cases")


@pytest.fixture
def small(tmp_path):
    """Two finished runs on six images."""
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    return dataset, write_runs(dataset, tmp_path / "runs", methods=NAMES[:2], metrics=METRICS[:3])


def test_a_run_several_runs_and_a_folder_of_runs_are_found(built):
    folder = built.runs[NAMES[0]].path.parent
    assert list(find_runs([folder]).runs) == list(NAMES)
    assert list(find_runs([run.path for run in reversed(built.runs.values())]).runs) == list(NAMES)[::-1]
    only = find_runs([built.runs[NAMES[1]].path])
    assert (list(only.runs), only.dataset) == ([NAMES[1]], built.dataset.folder.path)


def test_an_unfinished_run_is_left_out_of_a_comparison_and_refused_if_it_is_the_only_run(small, tmp_path):
    _, runs = small
    first, second = runs.values()
    second.cases.unlink()
    selection = find_runs([tmp_path / "runs"])
    assert list(selection.runs) == [NAMES[0]]
    assert selection.notices == ("The run method1 is not finished and is left out.",)
    refused(lambda: find_runs([second.path]), "method1 is not finished", "train --resume")
    first.cases.unlink()
    refused(lambda: find_runs([tmp_path / "runs"]), str(tmp_path / "runs"), "train --resume")


def test_runs_of_the_same_name_are_named_after_their_folders(small):
    _, runs = small
    for run in runs.values():
        run.recipe.write_text(re.sub("^name: .*", "name: same", run.recipe.read_text(), flags=re.M))
    assert list(find_runs([run.path for run in runs.values()]).runs) == ["method0", "method1"]
    refused(lambda: find_runs([runs[NAMES[0]].path] * 2), "two runs are called method0", "rename")


def test_runs_on_different_datasets_are_not_compared(small):
    _, runs = small
    recipe = runs[NAMES[1]].recipe
    recipe.write_text(re.sub("dataset: .*", "dataset: /elsewhere", recipe.read_text()))
    refused(lambda: find_runs([run.path for run in runs.values()]), "/elsewhere", "same dataset")


def test_runs_with_different_folds_are_not_compared(small, tmp_path):
    dataset, runs = small
    refolded = write_runs(dataset, tmp_path / "other", methods=NAMES[2:], metrics=METRICS[:1], fold_seed=1)
    both = {**runs, **refolded}
    refused(lambda: build(both, dataset, tmp_path / "report.html"), "different folds", "data.fold_seed")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_without_runs_is_named(small, tmp_path):
    refused(lambda: find_runs([tmp_path / "missing"]), str(tmp_path / "missing"), "name a run folder")
    refused(lambda: find_runs([tmp_path / "data"]), str(tmp_path / "data"), "recipe.yaml")


def test_a_prediction_that_differs_from_the_scored_one_is_refused(small, tmp_path):
    dataset, runs = small
    path = next(runs[NAMES[1]].path.glob("fold_0/predictions/*.npz"))
    write_prediction(path, read_prediction(path)[::-1])
    words = ("uniform + SDL", "calibration_error", path.stem, "semidice evaluate")
    refused(lambda: build(runs, dataset, tmp_path / "report.html"), *words)
    write_prediction(path, np.full((2, 8, 8), 0.5, np.float32))
    words = (str(path), "(2, 8, 8)", "(2, 32, 32)", "predict again")
    refused(lambda: build(runs, dataset, tmp_path / "report.html"), *words)


@pytest.fixture
def sliced(tmp_path):
    """Two finished runs on six volumes of three slices."""
    dataset = make_prepared(tmp_path / "data", num_cases=18, slices_per_scan=3, cases_per_patient=1)
    return dataset, write_runs(dataset, tmp_path / "runs", methods=NAMES[:2], metrics=METRICS[:3])


def test_a_case_of_the_page_is_a_scan_and_shows_the_slice_with_most_foreground(sliced, tmp_path):
    dataset, runs = sliced
    build(runs, dataset, tmp_path / "report.html")
    page, text = embedded(tmp_path / "report.html"), (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [case["name"] for case in page["cases"]] == [f"scan{number:03d}" for number in range(6)]
    assert {picture["case"] for picture in page["pictures"]} == set(range(6))
    for picture in page["pictures"]:
        drawn = [(dataset.masks(3 * picture["case"] + row) > 0).sum() for row in range(3)]
        assert picture["slice_number"] == 3 + int(np.argmax(drawn))
        assert picture["num_slices"] == 8
    assert "the slices of a volume are put together before they are scored" in text
    assert "per slice" not in text
    # the reliability diagram counts every voxel once
    shares = page["reliability"][0]["share"]
    assert sum(shares) == pytest.approx(1)


def test_scores_per_slice_are_named_so_on_the_page(sliced, tmp_path):
    dataset, runs = sliced
    for run in runs.values():
        run_evaluate(run.path, metrics=["dice_score"], unit="slice", console=Console(file=io.StringIO()))
    build(runs, dataset, tmp_path / "both.html")
    both = embedded(tmp_path / "both.html")
    names = [score["name"] for score in both["scores"]]
    assert names[0] == "dice_score"
    assert "dice_score per slice" in names
    assert "dice_score per slice (%) ↑" in [score["heading"] for score in both["scores"]]
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Scores named per slice are of each slice on its own" in text
    # slices are neither counted nor shown where the page has scans
    assert "2 methods, 6 cases" in text
    assert {both["cases"][picture["case"]]["name"] for picture in both["pictures"]} == {
        f"scan{number:03d}" for number in range(6)
    }
    for run in runs.values():
        table = read_cases(run.cases)
        write_cases(table[table["per"] == "slice"], run.cases)
    build(runs, dataset, tmp_path / "slices.html")
    slices = embedded(tmp_path / "slices.html")
    assert len(slices["cases"]) == len(slices["pictures"]) == 18
    assert (
        "A case is one slice of a volume: all scores are per slice" in (tmp_path / "slices.html").read_text()
    )


def test_a_changed_slice_of_a_scored_scan_is_refused(sliced, tmp_path):
    dataset, runs = sliced
    path = next(runs[NAMES[1]].path.glob("fold_0/predictions/*.npz"))
    write_prediction(path, read_prediction(path)[::-1])
    scan = path.stem.partition("_slice")[0]
    refused(lambda: build(runs, dataset, tmp_path / "report.html"), "calibration_error", f"case {scan}")


def test_a_run_without_stored_predictions_still_has_its_scores_on_the_page(small, tmp_path):
    dataset, runs = small
    for path in runs[NAMES[0]].path.glob("fold_*/predictions/*.npz"):
        path.unlink()
    report = build(runs, dataset, tmp_path / "report.html")
    words = "majority + SDL has no stored predictions: its pictures and reliability are left out."
    assert report.notices == (words,)
    data = embedded(tmp_path / "report.html")
    assert [record["method"] for record in data["reliability"]] == [1]
    assert (len(data["methods"]), data["layout"]["methods"]) == (2, [1])
    for path in runs[NAMES[1]].path.glob("fold_*/predictions/*.npz"):
        path.unlink()
    build(runs, dataset, tmp_path / "report.html")
    assert embedded(tmp_path / "report.html")["layout"] is None


def test_wrong_options_of_a_page_are_refused(small, tmp_path):
    dataset, runs = small
    refused(lambda: build(runs, dataset, tmp_path / "report.pdf"), "report.pdf", ".html")
    refused(lambda: build(runs, dataset, tmp_path / "a.html", max_cases=-1), "max_cases", "-1")


def test_the_command_prints_the_paths_it_wrote_and_accepts_a_moved_dataset(small, tmp_path):
    dataset, runs = small
    moved = dataset.folder.path.rename(tmp_path / "moved")
    console = Console(file=io.StringIO(), width=200)
    out = tmp_path / "new" / "report.html"
    options = PageOptions(title="Mine", figures=False)
    run_report([run.path for run in runs.values()], out, console, options, dataset=moved)
    text = console.file.getvalue()
    assert f"wrote {out} (0." in text
    assert f"tables and figures to {out.parent / 'report_files'}" in text
    assert "<title>Mine</title>" in out.read_text()


def report_of_large_images(root, num_cases):
    options = {"num_cases": num_cases, "size": (256, 256), "num_raters": 4, "cases_per_patient": 1}
    methods = {f"method {number}": (1 + number, 0.5, 0.9, "mean", "min") for number in range(4)}
    return Built(root, dataset_options=options, methods=methods, metrics=METRICS[:3])


def test_the_estimated_page_of_a_hundred_cases_is_under_ten_megabytes(tmp_path):
    built = report_of_large_images(tmp_path, 4)
    assert built.data["pictures"][0]["size"] == [256, 256]
    pictures = sum(len(picture["image"]) + len(picture["maps"]) for picture in built.data["pictures"])
    rest = built.out.stat().st_size - pictures
    assert 25 * pictures + rest + 100 * 4 * 4 * 25 < 9e6


@pytest.mark.slow
def test_the_page_of_a_hundred_cases_is_under_ten_megabytes(tmp_path):
    built = report_of_large_images(tmp_path, 100)
    assert len(built.data["pictures"]) == 100
    assert built.data["pictures"][0]["size"] == [256, 256]
    assert built.out.stat().st_size < 10e6
