"""Grids of recipes: reading, running on the same folds, comparing; a failed recipe stops no other recipe."""

import io
import re
import shlex
import shutil

import numpy as np
import pytest
from case_rows import CaseRow, rows_of, select, table_of
from prepared import make_prepared
from rich.console import Console
from trained import finished_table
from typer.testing import CliRunner

from semidice.cli import app
from semidice.compare import comparisons_of, run_compare
from semidice.metrics import ScoreKey
from semidice.recipes import read_recipe
from semidice.recipes.grid import folder_name, read_variants, shipped_grids
from semidice.report.page import PageOptions, run_report
from semidice.runs.start import start_run
from semidice.statistics import paired
from semidice.statistics.cases import concatenate, read_cases, write_cases
from semidice.training.grid import GridError

QUICK = """
recipe: quick
set: {schedule.epochs: 2, data.num_folds: 2, batch_size: 4, "model.options.channels": [8, 16], log_every: 2}
variants:
  student: {teacher.run: uniform, teacher.calibration: kde, teacher.num_keys: 64, label.maker: majority}
  uniform: {label.maker: mean}
  majority: {label.maker: majority, loss.form: relaxed}
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=12, size=(32, 32), num_raters=3)
    return path


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(QUICK)
    return path


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_a_teacher_is_placed_before_its_student_and_is_found_by_name(grid, dataset, tmp_path):
    variants = read_variants([str(grid)], dataset=dataset, out=tmp_path / "out")
    assert [variant.name for variant in variants] == ["uniform", "student", "majority"]
    student = variants[1]
    assert student.teacher == "uniform"
    assert student.recipe.teacher.run == tmp_path / "out" / "uniform" / "seed_0"
    assert student.recipe.data.dataset == dataset
    assert variants[2].recipe.loss.form == "relaxed"


def test_a_list_of_recipes_is_a_grid(dataset, tmp_path):
    variants = read_variants(["quick", "qubiq_labels"], dataset=dataset, out=tmp_path)
    assert [variant.name for variant in variants] == [
        "quick",
        read_recipe("qubiq_labels", [f"data.dataset={dataset}"]).name,
    ]


def test_every_shipped_grid_can_be_read(dataset, tmp_path):
    for name in shipped_grids():
        assert len(read_variants([name], dataset=dataset, out=tmp_path)) >= 2


def test_the_folder_name_of_a_method_has_no_spaces():
    assert folder_name("uniform + DML1") == "uniform_DML1"


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    (folder / "grid.yaml").write_text(QUICK)
    variants = read_variants([str(folder / "grid.yaml")], dataset=dataset, out=folder / "out")
    console = Console(file=io.StringIO(), width=200)
    run_compare(variants, folder / "out", console, accelerator="cpu")
    return variants, folder / "out", console.file.getvalue()


def test_the_verdict_comes_first_then_the_means_and_pairs_only_on_request(
    compared, dataset, tmp_path, console
):
    _, out, printed = compared
    comparisons = comparisons_of(read_cases(out / "cases.parquet"))
    # of networks that learned nothing, a warning takes the place of the verdict
    first = "The best dice_score is"
    assert printed.index(first) < printed.index("Mean over cases")
    assert "Pairs of methods" not in printed
    # progress bars, the warning, the verdict, one line for each method and a few for the heading and note
    assert len(printed.split(first)[1].splitlines()) < 25
    assert all((out / f"pairs_{metric}.md").is_file() for metric in comparisons)
    shutil.copytree(out, tmp_path / "out")
    compare_again(tmp_path / "out", dataset, tmp_path, console, show_pairs=True)
    assert console.file.getvalue().count("Pairs of methods") == len(comparisons)


def test_a_comparison_of_networks_far_below_the_raters_begins_with_a_warning(compared):
    _, out, printed = compared
    assert printed.index("far below the raters' own agreement") < printed.index("Mean over cases")
    assert "| raters |" in (out / "means.md").read_text()


def test_all_methods_are_compared_on_the_same_cases_in_one_table(compared, dataset):
    _, out, printed = compared
    table = read_cases(out / "cases.parquet")
    assert set(table["method"]) == {"uniform", "student", "majority"}
    scores = table.pipe(paired, "dice_score")
    assert scores.num_dropped == 0
    assert len(scores.cases) == 12
    for name in ("means.md", "means.tex", "means.csv", "pairs_dice_score.csv"):
        assert (out / name).stat().st_size > 100
    assert "Marked: not significantly worse than any other" in " ".join(printed.split())


def copy_comparison(compared, path):
    """Copy the folder of the comparison to `path`, with the times of its files."""
    return shutil.copytree(compared[1], path)


def trained_files(out):
    """Modification times of the files that training writes."""
    files = [path for pattern in ("*.safetensors", "log.jsonl", "*.npz") for path in out.rglob(pattern)]
    return {path: path.stat().st_mtime_ns for path in files}


def compare_again(out, dataset, tmp_path, console, **options):
    grid = tmp_path / "grid.yaml"
    grid.write_text(QUICK)
    variants = read_variants([str(grid)], dataset=dataset, out=out)
    return run_compare(variants, out, console, accelerator="cpu", **options)


def set_teacher(out, old_run, new_run):
    """Replace the teacher's path in the student's recipe; older versions of semidice wrote absolute paths."""
    recipe = out / "student" / "seed_0" / "recipe.yaml"
    text = recipe.read_text()
    assert f"run: {old_run}\n" in text
    recipe.write_text(text.replace(f"run: {old_run}\n", f"run: {new_run}\n"))


def test_a_moved_comparison_trains_nothing_again_and_gives_the_same_result(
    compared, dataset, tmp_path, console
):
    _, out, _ = compared
    moved = copy_comparison(compared, tmp_path / "laptop" / "results")
    data = shutil.copytree(dataset, tmp_path / "laptop" / "data")
    assert str(out) not in (moved / "student" / "seed_0" / "recipe.yaml").read_text()
    before = trained_files(moved)
    assert len(before) > 12
    compare_again(moved, data, tmp_path, console)
    assert trained_files(moved) == before
    assert (moved / "means.csv").read_text() == (out / "means.csv").read_text()
    moved_cases, expected_cases = (read_cases(path / "cases.parquet") for path in (moved, out))
    assert list(moved_cases.pipe(rows_of)) == list(expected_cases.pipe(rows_of))
    student = read_recipe(moved / "student" / "seed_0" / "recipe.yaml")
    assert (student.teacher.run, student.data.dataset) == (moved / "uniform" / "seed_0", data)
    page = run_report([moved], tmp_path / "report.html", console, PageOptions(figures=False)).page
    assert "student" in page.read_text()


def test_a_moved_student_with_an_unfinished_fold_gives_the_same_result(compared, dataset, tmp_path, console):
    _, out, _ = compared
    moved = copy_comparison(compared, tmp_path / "moved")
    shutil.rmtree(moved / "student" / "seed_0" / "fold_1")
    compare_again(moved, dataset, tmp_path, console)
    weights = "student/seed_0/fold_1/last.safetensors"
    assert (moved / weights).read_bytes() == (out / weights).read_bytes()
    assert (moved / "means.csv").read_text() == (out / "means.csv").read_text()


@pytest.mark.parametrize("teacher_path", ["existing", "missing"])
def test_an_absolute_teacher_path_is_accepted_and_replaced_by_a_relative_one(
    teacher_path, compared, dataset, tmp_path, console
):
    out = copy_comparison(compared, tmp_path / "out")
    run = (
        out / "uniform" / "seed_0"
        if teacher_path == "existing"
        else tmp_path / "cluster" / "uniform" / "seed_0"
    )
    set_teacher(out, "../../uniform/seed_0", run)
    before = trained_files(out)
    compare_again(out, dataset, tmp_path, console)
    assert trained_files(out) == before
    assert "run: ../../uniform/seed_0\n" in (out / "student" / "seed_0" / "recipe.yaml").read_text()


@pytest.mark.parametrize("teacher_path", ["existing", "another name"])
def test_a_different_teacher_is_refused_with_its_path_and_no_file_changes(
    teacher_path, compared, dataset, tmp_path, console
):
    _, original, _ = compared
    out = copy_comparison(compared, tmp_path / "out")
    run = (
        original / "uniform" / "seed_0"
        if teacher_path == "existing"
        else tmp_path / "cluster" / "majority" / "seed_0"
    )
    set_teacher(out, "../../uniform/seed_0", run)
    before = trained_files(out)
    with pytest.raises(GridError, match=rf"student: .* teacher\.run; if {run}"):
        compare_again(out, dataset, tmp_path, console)
    assert trained_files(out) == before
    assert f"run: {run}\n" in (out / "student" / "seed_0" / "recipe.yaml").read_text()


def test_a_missing_teacher_is_named_by_its_path(compared, dataset, tmp_path):
    student = shutil.copytree(compared[1] / "student", tmp_path / "alone" / "student") / "seed_0"
    shutil.rmtree(student / "fold_1")
    recipe = read_recipe(student / "recipe.yaml")
    with pytest.raises(
        ValueError, match=rf"no teacher run in {tmp_path / 'alone' / 'uniform' / 'seed_0'}.*teacher\.run"
    ):
        finished_table(start_run(recipe, student, resume=True))
    # set the option that the message names
    corrected = read_recipe(student / "recipe.yaml", [f"teacher.run={compared[1] / 'uniform'}"])
    table = finished_table(start_run(corrected, student, resume=True))
    assert list(table.pipe(rows_of)) == list(
        read_cases(compared[1] / "student" / "seed_0" / "cases.parquet").pipe(rows_of)
    )


def test_a_recipe_that_fails_is_reported_with_its_error_and_the_others_finish(dataset, tmp_path, console):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        QUICK.replace("uniform: {label", "uniform: {model.architecture: unet, model.encoder: nothing, label")
    )
    variants = read_variants([str(grid)], dataset=dataset, out=tmp_path / "out")
    with pytest.raises(GridError, match="2 of 3 variants failed") as error:
        run_compare(variants, tmp_path / "out", console, accelerator="cpu")
    assert "uniform: " in str(error.value)
    assert "student: uniform/seed_0, which it needs, failed" in str(error.value)
    assert set(read_cases(tmp_path / "out" / "cases.parquet")["method"]) == {"majority"}


def test_only_scores_that_all_methods_have_are_compared(compared):
    _, out, _ = compared
    table = read_cases(out / "cases.parquet")
    dice = table.pipe(select, metric="dice_score")
    renamed = dice.assign(per="slice")
    extra = dice.pipe(select, method="uniform").assign(metric="iou_score")
    joined = concatenate([renamed, table.pipe(select, metric="calibration_error"), extra])
    assert "iou_score" in set(joined["metric"])
    per_slice = ScoreKey("dice_score", per="slice")
    assert set(comparisons_of(joined)) == {per_slice, ScoreKey("calibration_error")}
    assert list(comparisons_of(joined, ["dice_score"])) == [per_slice]
    with pytest.raises(ValueError, match="no iou_score of every method"):
        comparisons_of(joined, ["iou_score"])
    one = renamed.pipe(select, method="uniform")
    with pytest.raises(ValueError, match="common to uniform, majority"):
        comparisons_of(concatenate([one, dice.pipe(select, method="majority")]))


def test_cases_of_one_patient_are_resampled_together(compared):
    _, out, _ = compared
    table = read_cases(out / "cases.parquet")
    has_shared_patients = len(set(table["patient"].tolist())) < 12
    assert has_shared_patients
    assert comparisons_of(table, ["dice_score"])[ScoreKey("dice_score")].by_patient


def scores_of_tool(path, dataset, method, values, cases=None):
    names = cases or [scan.name for scan in dataset.manifest.scans]
    patients = [scan.patient for scan in dataset.manifest.scans]
    rows = [
        CaseRow(case, patient, -1, method, "mean", "dice_score", value)
        for case, patient, value in zip(names, patients, values, strict=True)
    ]
    write_cases(table_of(rows), path)
    return path


def test_tables_of_other_tools_are_compared_without_a_training(tmp_path):
    dataset = make_prepared(tmp_path / "data", cases_per_patient=1)
    low, high = [0.5, 0.55, 0.6, 0.52, 0.58, 0.61], [0.8, 0.84, 0.83, 0.9, 0.86, 0.87]
    first = scores_of_tool(tmp_path / "a.csv", dataset, "tool_a", low)
    second = scores_of_tool(tmp_path / "b.parquet", dataset, "tool_b", high)
    out = tmp_path / "out"
    arguments = [
        "compare",
        str(tmp_path / "data"),
        "--cases",
        str(first),
        "--cases",
        str(second),
        "-o",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert read_cases(out / "cases.parquet")["method"].unique().tolist() == ["tool_a", "tool_b"]
    means = (out / "means.md").read_text()
    assert f"{100 * sum(low) / 6:.2f}" in means
    assert f"{100 * sum(high) / 6:.2f}" in means
    dataset = shlex.quote(str(tmp_path / "data"))
    assert f"next: semidice report {shlex.quote(str(out))} --dataset {dataset} -o report.html" in done.output


def test_a_table_of_another_dataset_and_a_method_that_is_there_twice_are_errors(tmp_path):
    dataset = make_prepared(tmp_path / "data")
    values = [0.5] * 6
    table = scores_of_tool(tmp_path / "a.csv", dataset, "tool", values)
    foreign = scores_of_tool(tmp_path / "b.csv", dataset, "b", values, [f"x{number}" for number in range(6)])
    for paths, message in (
        ([table, table], "a.csv has scores of tool"),
        ([table, foreign], "b.csv has 6 cases (x0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_compare([], tmp_path / "out", Console(), dataset=tmp_path / "data", case_tables=paths)


def test_each_run_is_compared_by_each_rule_without_another_training(compared, dataset, tmp_path, console):
    out = copy_comparison(compared, tmp_path / "out")
    weights = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    own = {path: path.read_bytes() for path in out.glob("*/seed_0/cases.parquet")}
    comparisons = compare_again(
        out, dataset, tmp_path, console, rules=["dice", "threshold:0.4", "fitted"], interval=0.5
    )
    rules = ("argmax", "dice", "threshold:0.4", "fitted")
    methods = {f"{name}, {rule}" for name in ("uniform", "student", "majority") for rule in rules}
    assert list(comparisons) == [ScoreKey("dice_score")]
    assert set(comparisons[ScoreKey("dice_score")].methods) == methods
    assert set(read_cases(out / "cases.parquet")["method"]) == methods
    assert {path: path.read_bytes() for path in weights} == weights
    assert {path: path.read_bytes() for path in own} == own
    for name in ("uniform", "student", "majority"):
        table = read_cases(out / name / "seed_0" / "decisions.parquet")
        assert set(table["method"]) == set(rules)
        plain = read_cases(out / name / "seed_0" / "cases.parquet").pipe(select, metric="dice_score")
        argmax = table.pipe(select, method="argmax", metric="dice_score")
        np.testing.assert_array_equal(argmax["value"], plain["value"])
        assert (out / name / "seed_0" / "volumes.csv").is_file()
        assert (out / name / "seed_0" / "fits.json").is_file()
