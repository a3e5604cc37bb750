"""Grids of recipes: read, run over the same folds, compared; one that fails does not stop the others."""

import io
import shutil

import pytest
import torch
from lightning_fabric import Fabric
from prepared import make_prepared
from rich.console import Console

from semidice.compare import CompareError, comparisons_of, run_compare, run_variants
from semidice.metrics import read_cases
from semidice.recipes import read_recipe
from semidice.recipes.grid import folder_name, read_variants, shipped_grids
from semidice.report.page import PageOptions, run_report
from semidice.training.command import RunBar

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


def test_a_teacher_comes_before_its_student_and_is_found_by_name(grid, dataset, tmp_path):
    variants = read_variants([str(grid)], dataset=dataset, out=tmp_path / "out")
    assert [variant.name for variant in variants] == ["uniform", "student", "majority"]
    student = variants[1]
    assert student.teacher == "uniform"
    assert student.recipe.teacher.run == tmp_path / "out" / "uniform"
    assert student.recipe.data.dataset == dataset
    assert variants[2].recipe.loss.form == "relaxed"


def test_recipes_of_their_own_make_a_grid(dataset, tmp_path):
    variants = read_variants(["quick", "uniform_dml1"], dataset=dataset, out=tmp_path)
    assert [variant.name for variant in variants] == [
        "quick",
        read_recipe("uniform_dml1", [f"data.dataset={dataset}"]).name,
    ]


def test_every_shipped_grid_can_be_read(dataset, tmp_path):
    for name in shipped_grids():
        assert len(read_variants([name], dataset=dataset, out=tmp_path)) > 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "recipe: quick\nvariants: {a: {loss.fom: min}}",
            r"variant a: --set loss\.fom=min: no such option; did you mean loss\.form",
        ),
        ("recipe: quick\nvariants: {}", "one variant or more"),
        ("recipe: quick\nvariant: {}\nvariants: {a: {}}", "got variant"),
        ("recipe: quick\nvariants: {a: 3}", "variant a must be a mapping"),
        (
            "recipe: quick\nvariants: {a: {teacher.run: b}, b: {teacher.run: a}}",
            "no variant of a, b can be trained first",
        ),
        ("recipe: quick\nvariants: {'a + b': {}, a_b: {}}", "two variants are called"),
    ],
)
def test_a_grid_that_is_wrong_is_refused_by_what_is_wrong(text, message, dataset, tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_variants([str(path)], dataset=dataset, out=tmp_path / "out")


def test_a_method_gets_a_folder_that_can_be_typed():
    assert folder_name("uniform + DML1") == "uniform_DML1"


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    (folder / "grid.yaml").write_text(QUICK)
    variants = read_variants([str(folder / "grid.yaml")], dataset=dataset, out=folder / "out")
    console = Console(file=io.StringIO(), width=200)
    run_compare(variants, folder / "out", console, accelerator="cpu")
    return variants, folder / "out", console.file.getvalue()


def test_all_methods_are_compared_on_the_same_cases_in_one_table(compared, dataset):
    _, out, printed = compared
    table = read_cases(out / "cases.parquet")
    assert set(table.methods) == {"uniform", "student", "majority"}
    paired = table.paired("dice_score")
    assert paired.num_dropped == 0
    assert len(paired.cases) == 12
    for name in ("means.md", "means.tex", "means.csv", "pairs_dice_score.csv"):
        assert (out / name).stat().st_size > 100
    assert "Marked: no other method is significantly superior" in " ".join(printed.split())


def test_interrupted_and_restarted_it_gives_the_same_result(
    compared, dataset, tmp_path, console, monkeypatch
):
    _, whole, _ = compared
    grid = tmp_path / "grid.yaml"
    grid.write_text(QUICK)
    again = read_variants([str(grid)], dataset=dataset, out=tmp_path / "out")
    fabric = Fabric(accelerator="cpu", devices=1)

    class Stopped(BaseException):
        pass

    def stop(bar):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(RunBar, "show_finished", stop)
        with pytest.raises(Stopped):
            run_variants(again, fabric, console)
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["uniform"]
    run_compare(again, tmp_path / "out", console, accelerator="cpu")
    assert (tmp_path / "out" / "means.csv").read_text() == (whole / "means.csv").read_text()
    one, other = (read_cases(path / "cases.parquet") for path in (tmp_path / "out", whole))
    assert list(one.rows()) == list(other.rows())


def copied(compared, place):
    """The whole comparison at another place, with the times of its files."""
    return shutil.copytree(compared[1], place)


def trained_files(out):
    """What training writes, and when it did."""
    files = [path for pattern in ("*.safetensors", "log.jsonl", "*.npz") for path in out.rglob(pattern)]
    return {path: path.stat().st_mtime_ns for path in files}


def compare_again(out, dataset, tmp_path, console):
    grid = tmp_path / "grid.yaml"
    grid.write_text(QUICK)
    variants = read_variants([str(grid)], dataset=dataset, out=out)
    return run_compare(variants, out, console, accelerator="cpu")


def set_teacher(out, was, run):
    """Edit the student's recipe, as a semidice that wrote absolute paths would have written it."""
    recipe = out / "student" / "recipe.yaml"
    text = recipe.read_text()
    assert f"run: {was}\n" in text
    recipe.write_text(text.replace(f"run: {was}\n", f"run: {run}\n"))


def test_moved_and_run_again_nothing_is_trained_and_the_result_is_the_same(
    compared, dataset, tmp_path, console
):
    _, out, _ = compared
    moved = copied(compared, tmp_path / "laptop" / "results")
    data = shutil.copytree(dataset, tmp_path / "laptop" / "data")
    assert str(out) not in (moved / "student" / "recipe.yaml").read_text()
    before = trained_files(moved)
    assert len(before) > 12
    compare_again(moved, data, tmp_path, console)
    assert trained_files(moved) == before
    assert (moved / "means.csv").read_text() == (out / "means.csv").read_text()
    one, other = (read_cases(path / "cases.parquet") for path in (moved, out))
    assert list(one.rows()) == list(other.rows())
    student = read_recipe(moved / "student" / "recipe.yaml")
    assert (student.teacher.run, student.data.dataset) == (moved / "uniform", data)
    page = run_report([moved], tmp_path / "report.html", console, PageOptions(figures=False)).page
    assert "student" in page.read_text()


def test_a_student_moved_with_a_fold_to_go_ends_as_one_that_stayed(compared, dataset, tmp_path, console):
    _, out, _ = compared
    moved = copied(compared, tmp_path / "moved")
    shutil.rmtree(moved / "student" / "fold_1")
    compare_again(moved, dataset, tmp_path, console)
    weights = "student/fold_1/last.safetensors"
    assert (moved / weights).read_bytes() == (out / weights).read_bytes()
    assert (moved / "means.csv").read_text() == (out / "means.csv").read_text()


@pytest.mark.parametrize("place", ["here", "gone"])
def test_an_absolute_path_of_an_older_semidice_goes_on_and_can_be_moved_from_then_on(
    place, compared, dataset, tmp_path, console
):
    out = copied(compared, tmp_path / "out")
    run = out / "uniform" if place == "here" else tmp_path / "cluster" / "uniform"
    set_teacher(out, "../uniform", run)
    before = trained_files(out)
    compare_again(out, dataset, tmp_path, console)
    assert trained_files(out) == before
    assert "run: ../uniform\n" in (out / "student" / "recipe.yaml").read_text()


@pytest.mark.parametrize("which", ["still there", "of another name"])
def test_another_teacher_is_refused_by_its_path_and_nothing_is_touched(
    which, compared, dataset, tmp_path, console
):
    _, original, _ = compared
    out = copied(compared, tmp_path / "out")
    run = original / "uniform" if which == "still there" else tmp_path / "cluster" / "majority"
    set_teacher(out, "../uniform", run)
    before = trained_files(out)
    with pytest.raises(CompareError, match=rf"student: .* differs in teacher\.run; if {run} is the same"):
        compare_again(out, dataset, tmp_path, console)
    assert trained_files(out) == before
    assert f"run: {run}\n" in (out / "student" / "recipe.yaml").read_text()


def test_a_missing_teacher_is_named_by_its_path(compared, dataset, tmp_path):
    from semidice.training.crossvalidation import cross_validate, start_run

    student = shutil.copytree(compared[1] / "student", tmp_path / "alone")
    shutil.rmtree(student / "fold_1")
    recipe = read_recipe(student / "recipe.yaml")
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=rf"no teacher run in {tmp_path / 'uniform'}.*teacher\.run"):
        cross_validate(start_run(recipe, student, resume=True), fabric)
    # as the message says
    told = read_recipe(student / "recipe.yaml", [f"teacher.run={compared[1] / 'uniform'}"])
    table = cross_validate(start_run(told, student, resume=True), fabric)
    assert list(table.rows()) == list(read_cases(compared[1] / "student" / "cases.parquet").rows())


def test_a_recipe_that_fails_is_reported_with_its_error_and_the_others_finish(dataset, tmp_path, console):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        QUICK.replace("uniform: {label", "uniform: {model.architecture: unet, model.encoder: nothing, label")
    )
    variants = read_variants([str(grid)], dataset=dataset, out=tmp_path / "out")
    with pytest.raises(CompareError, match="2 of 3 variants failed") as error:
        run_compare(variants, tmp_path / "out", console, accelerator="cpu")
    assert "uniform: " in str(error.value)
    assert "student: its teacher uniform failed" in str(error.value)
    assert read_cases(tmp_path / "out" / "cases.parquet").methods == ("majority",)


def test_cases_of_one_patient_are_resampled_together(compared):
    _, out, _ = compared
    table = read_cases(out / "cases.parquet")
    several = len(set(table.columns["patient"].tolist())) < 12
    assert several
    assert comparisons_of(table, ["dice_score"])["dice_score"].unit == "patient"


def test_the_teacher_must_have_split_the_cases_alike(compared, dataset, tmp_path, console):
    _, out, _ = compared
    recipe = read_recipe(
        "quick",
        [
            f"data.dataset={dataset}",
            "data.num_folds=2",
            "data.fold_seed=1",
            "schedule.epochs=1",
            f"teacher.run={out / 'uniform'}",
        ],
    )
    from semidice.training.crossvalidation import cross_validate, start_run

    run = start_run(recipe, tmp_path / "student", resume=False)
    with pytest.raises(ValueError, match="has other folds"):
        cross_validate(run, Fabric(accelerator="cpu", devices=1))


def test_a_temperature_is_fitted_and_kept(compared, dataset, tmp_path):
    _, out, _ = compared
    import json

    from semidice.training.crossvalidation import cross_validate, start_run

    options = ["data.num_folds=2", "schedule.epochs=1", "batch_size=4", "model.options.channels=[8,16]"]
    recipe = read_recipe(
        "quick",
        [
            f"data.dataset={dataset}",
            *options,
            f"teacher.run={out / 'uniform'}",
            "teacher.calibration=temperature",
        ],
    )
    run = start_run(recipe, tmp_path / "student", resume=False)
    cross_validate(run, Fabric(accelerator="cpu", devices=1))
    temperature = json.loads(run.folder.fold(0).teacher.read_text())["temperature"]
    assert 0.05 < temperature < 20
    assert temperature != 1
    assert torch.isfinite(torch.tensor(temperature))
