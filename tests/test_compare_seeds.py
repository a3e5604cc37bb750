"""`compare` with several seeds: runs NAME/seed_K on the same folds, means over seeds, the report."""

import io
import json
import shutil

import numpy as np
import pytest
from case_rows import CaseRow, rows_of, select, table_of
from pages import shown, tables_of
from prepared import make_prepared
from rich.console import Console

from semidice.compare import run_compare
from semidice.recipes import read_recipe
from semidice.recipes.grid import read_variants
from semidice.report.page import PageOptions, run_report
from semidice.statistics import compare_cases, paired, read_cases, write_cases
from semidice.training.grid import GridError

GRID = """
recipe: quick
seeds: 2
set: {schedule.epochs: 1, data.num_folds: 2, batch_size: 4, "model.options.channels": [8, 16], log_every: 2}
variants:
  student: {teacher.run: uniform, teacher.calibration: none, label.maker: majority}
  uniform: {label.maker: mean}
"""
NAMES = ["uniform/seed_0", "student/seed_0", "uniform/seed_1", "student/seed_1"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, size=(32, 32), num_raters=3)
    return path


def new_console():
    return Console(file=io.StringIO(), width=200)


def variants_of(folder, dataset, text=GRID, **options):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grid.yaml").write_text(text)
    return read_variants([str(folder / "grid.yaml")], dataset=dataset, out=folder / "out", **options)


@pytest.fixture(scope="module")
def compared(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    console = new_console()
    run_compare(variants_of(folder, dataset), folder / "out", console, accelerator="cpu")
    return folder / "out", console.file.getvalue()


@pytest.fixture
def copied(compared, tmp_path):
    return shutil.copytree(compared[0], tmp_path / "out")


class TestVariants:
    def test_every_seed_is_a_variant_with_its_own_folder_and_all_methods_come_before_the_next_seed(
        self, dataset, tmp_path
    ):
        variants = variants_of(tmp_path, dataset)
        assert [variant.name for variant in variants] == NAMES
        assert [variant.folder for variant in variants] == [tmp_path / "out" / name for name in NAMES]
        assert [variant.recipe.seed for variant in variants] == [0, 0, 1, 1]
        assert {variant.recipe.data.fold_seed for variant in variants} == {0}
        assert {variant.method for variant in variants} == {"uniform", "student"}

    def test_a_student_learns_from_the_teacher_of_its_seed(self, dataset, tmp_path):
        students = [each for each in variants_of(tmp_path, dataset) if each.method == "student"]
        assert [each.teacher for each in students] == ["uniform/seed_0", "uniform/seed_1"]
        expected = [tmp_path / "out" / "uniform" / f"seed_{seed}" for seed in (0, 1)]
        assert [each.recipe.teacher.run for each in students] == expected

    def test_a_teacher_outside_of_the_grid_is_that_of_the_seed_or_the_same_for_all(
        self, compared, dataset, tmp_path
    ):
        text = "recipe: quick\nvariants: {a: {teacher.run: %s}}"
        out, _ = compared
        for teacher, expected in (
            (out / "uniform", [out / "uniform" / "seed_0", out / "uniform" / "seed_1"]),
            (out / "uniform" / "seed_0", [out / "uniform" / "seed_0"] * 2),
        ):
            variants = variants_of(tmp_path, dataset, text % teacher, seeds=2)
            assert [each.recipe.teacher.run for each in variants] == expected

    def test_the_option_of_the_command_wins_and_one_seed_is_a_plain_run(self, dataset, tmp_path):
        assert len(variants_of(tmp_path, dataset, seeds=3)) == 6
        plain = variants_of(tmp_path, dataset, seeds=1)
        assert plain == variants_of(tmp_path, dataset, GRID.replace("seeds: 2\n", ""))
        assert [each.folder for each in plain] == [tmp_path / "out" / name for name in NAMES[:2]]

    def test_seeds_start_with_that_of_the_recipe(self, dataset, tmp_path):
        variants = variants_of(tmp_path, dataset, overrides=["seed=5"])
        assert [each.name for each in variants][::2] == ["uniform/seed_5", "uniform/seed_6"]
        text = "recipe: quick\nseeds: 2\nvariants: {a: {}, b: {seed: 3}}"
        with pytest.raises(ValueError, match="different ones: a 0, b 3"):
            variants_of(tmp_path, dataset, text)

    def test_a_run_of_train_is_not_mixed_with_those_of_a_grid(self, dataset, tmp_path):
        run = tmp_path / "out" / "uniform"
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text("name: uniform\n")
        with pytest.raises(ValueError, match="uniform is a run of `semidice train`: choose another folder"):
            variants_of(tmp_path, dataset)


def test_all_seeds_have_the_same_folds_but_other_networks(compared):
    out, _ = compared
    assert len({(out / name / "folds.json").read_text() for name in NAMES}) == 1
    values = {name: read_cases(out / name / "cases.parquet")["value"] for name in NAMES}
    for method in ("uniform", "student"):
        assert not np.array_equal(values[f"{method}/seed_0"], values[f"{method}/seed_1"], equal_nan=True)


def test_the_first_seed_is_the_run_of_a_comparison_without_seeds(compared, dataset, tmp_path):
    variants = variants_of(tmp_path, dataset, seeds=1)
    run_compare(variants, tmp_path / "out", new_console(), accelerator="cpu")
    for method in ("uniform", "student"):
        plain, seeded = (root / method / "seed_0" for root in (tmp_path / "out", compared[0]))
        assert list(map(repr, read_cases(plain / "cases.parquet").pipe(rows_of))) == list(
            map(repr, read_cases(seeded / "cases.parquet").pipe(rows_of))
        )
    assert set(read_cases(tmp_path / "out" / "cases.parquet")["seed"]) == {-1}
    assert "seed" not in (tmp_path / "out" / "means.csv").read_text()


def test_the_table_has_every_seed_and_the_means_are_over_them(compared):
    out, printed = compared
    table = read_cases(out / "cases.parquet")
    assert set(table["method"]) == {"uniform", "student"}
    assert set(table["seed"]) == {0, 1}
    of_seeds = [
        read_cases(out / "uniform" / f"seed_{seed}" / "cases.parquet")
        .pipe(paired, "brier_error")
        .values.mean()
        for seed in (0, 1)
    ]
    comparison = compare_cases(table, "brier_error")
    of_uniform = comparison.means.loc["uniform"]
    assert of_uniform["mean"] == pytest.approx(np.mean(of_seeds), rel=1e-12)
    assert of_uniform.spread == pytest.approx(np.std(of_seeds, ddof=1), rel=1e-9)
    assert f"{100 * np.mean(of_seeds):.2f} ± {100 * np.std(of_seeds, ddof=1):.2f}" in printed
    assert "Scores are means over 2 seeds" in printed
    assert "uniform/seed_1" in printed


def test_a_seed_that_failed_is_named_and_the_others_are_compared(copied, dataset, tmp_path):
    # its folder holds other files, so that it cannot be trained
    shutil.rmtree(copied / "student" / "seed_1")
    (copied / "student" / "seed_1").mkdir()
    (copied / "student" / "seed_1" / "notes.txt").write_text("mine")
    console = new_console()
    with pytest.raises(GridError, match=r"1 of 4(.|\n)*student/seed_1: .*notes\.txt"):
        run_compare(variants_of(tmp_path, dataset), copied, console, accelerator="cpu")
    printed = console.file.getvalue()
    assert "Seed 1 is left out of every method: there are no scores of student with it." in printed
    means = (copied / "means.csv").read_text()
    table = read_cases(copied / "uniform" / "seed_0" / "cases.parquet")
    assert repr(float(compare_cases(table, "brier_error").means["mean"].iloc[0])) in means
    assert "±" not in (copied / "means.md").read_text()


def test_rules_are_compared_over_the_seeds_and_every_run_keeps_its_own(copied, dataset, tmp_path):
    variants = variants_of(tmp_path, dataset)
    run_compare(variants, copied, new_console(), rules=["dice"], interval=0.9, accelerator="cpu")
    table = read_cases(copied / "cases.parquet")
    expected = {f"{method}, {rule}" for method in ("uniform", "student") for rule in ("argmax", "dice")}
    assert set(table["method"]) == expected
    assert compare_cases(table, "dice_score", drop=True).seeds == (0, 1)
    for name in NAMES:
        assert set(read_cases(copied / name / "decisions.parquet")["method"]) == {"argmax", "dice"}
        assert (copied / name / "volumes.csv").is_file()


def test_another_tool_is_compared_with_the_means_and_the_output_says_what_is_not_known(
    copied, dataset, tmp_path
):
    rows = [
        CaseRow(row.case, row.patient, -1, "tool", row.class_name, row.metric, row.value)
        for row in read_cases(copied / "uniform" / "seed_0" / "cases.parquet").pipe(rows_of)
    ]
    write_cases(table_of(rows), tmp_path / "tool.csv")
    console, tool = new_console(), [tmp_path / "tool.csv"]
    run_compare(variants_of(tmp_path, dataset), copied, console, case_tables=tool, accelerator="cpu")
    assert "There is one training of tool: its spread over seeds is not known" in console.file.getvalue()


def marks(folder, name):
    """The cells of the answer on a page."""
    return " ".join(tables_of(folder / f"{name}.html")["answer"][0][1])


class TestReport:
    def report(self, *paths, out):
        console = new_console()
        run_report(paths, out, console, PageOptions(figures=False, num_resamples=1000))
        return console.file.getvalue()

    def test_the_folder_of_a_comparison_is_a_page_of_methods_not_of_seeds(self, compared, tmp_path):
        out, page = compared[0], tmp_path / "report.html"
        printed = self.report(out, out=page)
        assert "Scores are means over the seeds 0 and 1. Calibration, decisions, volumes, curves" in printed
        found, text = tables_of(page), page.read_text(encoding="utf-8")
        assert found["cases"][0][0][3:] == ["student", "uniform"]
        table = read_cases(out / "cases.parquet")
        comparison = compare_cases(table, "brier_error", methods=["student", "uniform"])
        best = comparison.means["mean"].idxmin()
        assert f"± {100 * comparison.means.loc[best, 'spread']:.2f}" in text
        answer = next(row for row in found["answer"][0] if row[0].startswith("brier_error"))
        assert answer[1] == best
        shown_scores = [row[0] for row in found["answer"][0][1:]]
        rows = found["cases"][shown_scores.index(answer[0])]
        case, _, _, *values = rows[1]
        of_case = table.pipe(select, metric="brier_error", method="uniform", case=case)
        assert values[1] == shown(of_case["value"].mean(), "brier_error")
        # the file next to the page has every seed
        assert set(read_cases(tmp_path / "report_files" / "cases.csv")["seed"]) == {0, 1}
        assert "Scores are means over 2 seeds" in text

    def test_the_folder_of_a_method_is_one_method_and_a_single_run_is_a_run(self, compared, tmp_path):
        out = compared[0]
        self.report(out / "uniform", out=tmp_path / "method.html")
        self.report(out / "uniform" / "seed_1", out=tmp_path / "run.html")
        both = [out / "uniform" / "seed_0", out / "uniform" / "seed_1"]
        self.report(*both, out=tmp_path / "runs.html")
        methods = {
            name: (tables_of(tmp_path / f"{name}.html")["cases"][0][0][3:], "±" in marks(tmp_path, name))
            for name in ("method", "run", "runs")
        }
        assert methods == {
            "method": (["uniform"], True),
            "run": (["uniform"], False),
            "runs": (["uniform/seed_0", "uniform/seed_1"], False),
        }

    def test_an_unfinished_seed_is_named_and_left_out_of_every_method(self, copied, tmp_path):
        (copied / "student" / "seed_1" / "cases.parquet").unlink()
        printed = self.report(copied, out=tmp_path / "report.html")
        assert "The run student/seed_1 is not finished and is left out." in printed
        assert "Seed 1 is left out of every method: there are no scores of student with it." in printed

    def test_seeds_with_different_folds_are_not_averaged(self, copied, tmp_path):
        path = copied / "student" / "seed_1" / "folds.json"
        folds = json.loads(path.read_text())
        folds["fold_of_case"] = {case: 1 - fold for case, fold in folds["fold_of_case"].items()}
        path.write_text(json.dumps(folds))
        with pytest.raises(ValueError, match=r"seed_1.* is fold 0 of another run"):
            self.report(copied, out=tmp_path / "report.html")


def test_the_runs_of_a_grid_can_be_moved_together(copied):
    recipe = read_recipe(copied / "student" / "seed_1" / "recipe.yaml", accelerator=None)
    assert recipe.teacher.run == copied / "uniform" / "seed_1"
