"""The report page: every number is traced to the case tables; what cannot be compared is refused."""

import io
import math
import re

import numpy as np
import pytest
from case_rows import CaseRow, rows_of, table_of
from pages import CLASS_OF, NAMES, RESAMPLES, SHOWN_METRICS, Built, build, shown, tables_of
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from start import refused
from synthetic_runs import METRICS, write_runs

from semidice.paths import MethodFolder
from semidice.report.answer import compare_all, verdict
from semidice.report.page import PageOptions, run_report
from semidice.report.runs import find_runs
from semidice.runs.evaluate import EvaluateOptions, run_evaluate
from semidice.runs.predictions import read_prediction
from semidice.runs.run import open_run
from semidice.statistics import compare_cases, paired, read_cases, write_cases
from semidice.statistics.cases import in_order
from semidice.statistics.tables import p_text

SHORT = {"dice_score": "Dice", "binarized_dice_score": "BDice", "calibration_error": "ECE"}


def text_of(path):
    return path.read_text(encoding="utf-8")


def test_every_mean_on_the_page_equals_the_mean_of_the_case_tables(built):
    means = tables_of(built.out)["answer"][1]
    arrows = {metric: "↓" if metric.endswith("error") else "↑" for metric in SHOWN_METRICS}
    assert means[0] == ["method", *(f"{SHORT.get(name, name)} (%) {arrows[name]}" for name in SHOWN_METRICS)]
    for row, method in zip(means[1:-1], NAMES, strict=True):
        assert row[0] == method
        for cell, metric in zip(row[1:], SHOWN_METRICS, strict=True):
            of_case = built.values(metric, CLASS_OF.get(metric, "mean")).values()
            scores = [by_method[method] for by_method in of_case]
            assert cell.split()[0] == shown(math.fsum(scores) / 14, metric)


def test_every_interval_difference_and_p_value_equals_the_comparison(built):
    found = tables_of(built.out)
    answers, means = found["answer"]
    for number, metric in enumerate(SHOWN_METRICS):
        comparison = compare_cases(built.table(), metric, num_resamples=RESAMPLES)
        for row, method in enumerate(NAMES):
            mean = comparison.means.loc[method]
            low, high = (shown(float(mean[end]), metric) for end in ("low", "high"))
            cell = means[1 + row][1 + number]
            assert cell.split(" ", 1)[1].removesuffix(" ★") == f"[{low}, {high}]"
            assert ("★" in cell) == mean.best
        for row in found["pairs"][number][1:]:
            pair = comparison.pairs.loc[row[0], row[1]]
            assert row[2].startswith(shown(pair.difference, metric, signed=True))
            assert row[3] == p_text(pair.p)
        means_of = comparison.means["mean"]
        ranked = means_of.sort_values(ascending=not comparison.key.higher_is_better).index
        first, *rivals = ranked[[0, 1, -1]]
        answer = answers[1 + number]
        assert answer[1] == first
        assert answer[2].startswith(f"{shown(float(means_of[first]), metric)} [")
        for cell, rival in zip(answer[3:5], rivals, strict=True):
            pair = comparison.pairs.loc[first, rival]
            low, high = (shown(pair[end], metric, signed=True) for end in ("low", "high"))
            p = p_text(pair.p)
            words = f"{shown(pair.difference, metric, signed=True)} [{low}, {high}] over {rival}: p"
            sign = "★" if pair.better else ", may be chance"
            assert cell.replace(" ★", "★") == f"{words} {p if p.startswith('<') else f'= {p}'}{sign}"


def test_the_case_table_has_the_score_of_every_case_and_method(built):
    for rows, metric in zip(tables_of(built.out)["cases"], SHOWN_METRICS, strict=True):
        values = built.values(metric, CLASS_OF.get(metric, "mean"))
        assert rows[0] == ["case", "patient", "fold", *NAMES]
        found = {case: cells for case, _, _, *cells in rows[1:]}
        assert found == {case: [shown(row[name], metric) for name in NAMES] for case, row in values.items()}


def points_of(path, chart):
    """The titles of the points of a chart, in their order."""
    (svg,) = re.findall(rf'<svg role="group" aria-label="{chart}".*?</svg>', text_of(path), re.S)
    return re.findall(r"<title>(.*?)</title>", svg)


def test_a_point_has_the_name_and_value_of_its_case(built):
    values = built.values("dice_score")
    expected = [f"{case}: {shown(row[name], 'dice_score')}" for name in NAMES for case, row in values.items()]
    assert sorted(points_of(built.out, "cases_dice_score")) == sorted(expected)


def test_the_calibration_error_on_the_page_equals_a_count_over_the_predictions(built):
    text = text_of(built.out)
    for name, run in built.runs.items():
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
        assert f"{name}: ECE {100 * sum(gaps) / len(confidence):.2f} %" in text


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
    assert steps[-1][0] == "writing figures"
    assert steps[-1][1] == steps[-1][2]


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
        ({"A": 0.9}, {"A": 0.1}, "One method, A"),
        ({"A": 0.9, "B": 0.8}, {"A": 0.1, "B": 0.2}, "A is best: .* by all scores, and behind by none"),
        ({"A": 0.9, "B": 0.8}, {"A": 0.1, "B": 0.1}, "A is best: .* by dice_score, and behind by none"),
        (
            {"A": 0.9, "B": 0.9, "C": 0.8},
            {"A": 0.1, "B": 0.2, "C": 0.1},
            "A is the only method that no other method beats",
        ),
        (
            {"A": 0.9, "B": 0.9, "C": 0.5},
            {"A": 0.1, "B": 0.1, "C": 0.2},
            "No other method is significantly better than A and B",
        ),
        ({"A": 0.9, "B": 0.9}, {"A": 0.1, "B": 0.1}, "No difference between the 2 methods"),
        ({"A": 0.9, "B": 0.8}, {"A": 0.2, "B": 0.1}, "It depends on the score"),
    ],
)
def test_the_verdict_follows_from_the_best_sets(dice, error, words):
    table = table_of([*scored_rows(dice), *scored_rows(error, metric="brier_error")])
    comparisons, notices = compare_all(table, list(dice), ["background", "lesion"], num_resamples=RESAMPLES)
    assert re.match(words, verdict(comparisons))
    assert notices == []


def test_a_difference_that_is_shown_as_zero_makes_nobody_best():
    rows = scored_rows({"A": 0.90001, "B": 0.9}, noise=0)
    comparisons, _ = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert comparisons[0].pairs.loc["A", "B"].better
    assert verdict(comparisons).startswith("No difference between the 2 methods")


def test_scores_that_cannot_be_compared_are_left_out_and_named():
    rows = [
        *scored_rows({"A": 0.9, "B": 0.8}),
        *scored_rows({"A": 0.1}, metric="brier_error"),
        *scored_rows({"A": 1.0, "B": 2.0}, metric="volume_ml"),
        *scored_rows({"A": math.nan, "B": 2.0}, metric="hausdorff_error"),
    ]
    comparisons, notices = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert [str(each.key) for each in comparisons] == ["dice_score"]
    words = [("brier_error", "B"), ("volume_ml", "higher is better"), ("hausdorff_error", "two cases")]
    for notice, (name, reason) in zip(notices, words, strict=True):
        assert notice.startswith(name)
        assert reason in notice


def test_cases_of_a_patient_are_resampled_together_if_there_are_several_patients():
    rows = [row._replace(patient=f"p{int(row.case[4:]) // 2}") for row in scored_rows({"A": 0.9, "B": 0.8})]
    (comparison,), _ = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert (comparison.by_patient, comparison.num_patients) == (True, 10)
    rows = [row._replace(patient="p") for row in rows]
    (comparison,), _ = compare_all(table_of(rows), ["A", "B"], ["background", "lesion"])
    assert not comparison.by_patient


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


@pytest.fixture
def sliced(tmp_path):
    """Two finished runs on six volumes of three slices."""
    dataset = make_prepared(tmp_path / "data", num_cases=18, slices_per_scan=3, cases_per_patient=1)
    return dataset, write_runs(dataset, tmp_path / "runs", methods=NAMES[:2], metrics=METRICS[:3])


def test_a_case_of_the_page_is_a_scan_and_shows_its_most_contested_and_its_central_slice(sliced, tmp_path):
    dataset, runs = sliced
    build(runs, dataset, tmp_path / "report.html")
    text, found = text_of(tmp_path / "report.html"), tables_of(tmp_path / "report.html")
    scans = [f"scan{number:03d}" for number in range(6)]
    assert [row[0] for row in found["cases"][0][1:]] == scans
    assert "the slices of a volume are put together before they are scored" in text
    for number, scan in enumerate(scans):
        masks = [dataset.masks(3 * number + row) for row in range(3)]
        contested = int(np.argmax([(mask != mask[:1]).any(0).sum() for mask in masks]))
        shown_slices = re.findall(rf"<p>{scan}_slice\d+, slice (\d+) of 8", text)
        assert list(map(int, shown_slices)) == list(dict.fromkeys([4 + contested, 5]))


def test_scores_per_slice_are_named_so_on_the_page(sliced, tmp_path):
    dataset, runs = sliced
    for run in runs.values():
        run_evaluate(run.path, EvaluateOptions(["dice_score"], "slice"), Console(file=io.StringIO()))
    build(runs, dataset, tmp_path / "both.html")
    header = tables_of(tmp_path / "both.html")["answer"][1][0]
    assert header[1] == "Dice (%) ↑"
    assert "Dice per slice (%) ↑" in header
    # slices are neither counted nor shown where the page has scans
    assert "2 methods, 6 cases" in text_of(tmp_path / "both.html")
    for run in runs.values():
        table = read_cases(run.cases)
        write_cases(table[table["per"] == "slice"], run.cases)
    build(runs, dataset, tmp_path / "slices.html")
    assert len(tables_of(tmp_path / "slices.html")["cases"][0]) == 1 + 18
    assert "A case is one slice of a volume: all scores are per slice" in text_of(tmp_path / "slices.html")


def test_a_run_without_stored_predictions_still_has_its_scores_on_the_page(small, tmp_path):
    dataset, runs = small
    for name, has_images in zip(NAMES[:2], (True, False), strict=True):
        for path in runs[name].path.glob("fold_*/predictions/*.npz"):
            path.unlink()
        report = build(runs, dataset, tmp_path / "report.html")
        assert f"{name} has no stored predictions" in report.notices[-1]
        text = text_of(report.page)
        assert (f"probability of {NAMES[1]}" in text) == has_images
        assert f"probability of {NAMES[0]}" not in text
        assert tables_of(report.page)["cases"][0][0] == ["case", "patient", "fold", *NAMES[:2]]


def test_a_prediction_that_was_changed_is_refused(small, tmp_path):
    dataset, runs = small
    path = next(runs[NAMES[1]].path.glob("fold_0/predictions/*.npz"))
    np.savez_compressed(path, foreground=np.zeros((1, 8, 8), np.uint16))
    refused(lambda: build(runs, dataset, tmp_path / "report.html"), str(path), "changed")


def test_wrong_options_of_a_page_are_refused(small, tmp_path):
    dataset, runs = small
    refused(lambda: build(runs, dataset, tmp_path / "report.pdf"), "report.pdf", ".html")


def test_images_are_of_the_worst_the_best_and_the_most_different_cases(built, tmp_path):
    report = build(built.runs, built.dataset, tmp_path / "report.html", max_cases=3)
    cases = re.findall(r'<article class="case" id="case-\d+".*?<h3>(.*?)</h3>', text_of(report.page), re.S)
    dice = {case: list(row.values()) for case, row in built.values("dice_score").items()}
    worst, best = (extreme(dice, key=lambda case: np.mean(dice[case])) for extreme in (min, max))
    assert {worst, best, max(dice, key=lambda case: np.ptp(dice[case]))} <= set(cases)
    # the worst comes first
    assert cases == sorted(cases, key=lambda case: np.mean(dice[case]))
    assert len(re.findall('<a data-case="[^"]*" href', text_of(report.page))) == 3 * 3 * len(SHOWN_METRICS)


def test_seeds_are_averaged_and_their_means_are_marked(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    runs = {}
    for seed in range(3):
        out = tmp_path / f"written{seed}"
        for name, run in write_runs(dataset, out, methods=NAMES[:2], metrics=METRICS[:3], seed=seed).items():
            target = runs[name, seed] = MethodFolder(tmp_path / "runs" / run.path.name).seed(seed)
            target.path.parent.mkdir(parents=True, exist_ok=True)
            run.path.rename(target.path)
            target.recipe.write_text(target.recipe.read_text().replace("\nseed: 0\n", f"\nseed: {seed}\n"))
            for fold in (0, 1):
                open_run(target).write_stamp(fold)
    page = tmp_path / "report.html"
    options = PageOptions(figures=False, num_resamples=500)
    run_report([tmp_path / "runs"], page, Console(quiet=True), options)
    tables = [read_cases(runs[NAMES[1], seed].cases).pipe(paired, "dice_score") for seed in range(3)]
    means = np.mean([table.values[:, 0] for table in tables], 0)
    rows = tables_of(page)["cases"][0][1:]
    assert {row[0]: row[4] for row in rows} == {
        case: shown(value, "dice_score") for case, value in zip(tables[0].cases, means, strict=True)
    }
    assert "mean of a seed" in text_of(page)
    assert "are of seed 0" in text_of(page)


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


def test_the_estimated_page_of_a_hundred_cases_is_under_eight_megabytes(tmp_path):
    size = [report_of_large_images(tmp_path / f"{count}", count).out.stat().st_size for count in (2, 4)]
    assert size[0] + 49 * (size[1] - size[0]) < 8e6


@pytest.mark.slow
def test_the_page_of_a_hundred_cases_is_under_eight_megabytes(tmp_path):
    built = report_of_large_images(tmp_path, 100)
    assert text_of(built.out).count("256 x 256 pixels") == 100
    assert built.out.stat().st_size < 8e6
