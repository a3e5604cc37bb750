"""Distillation on phantoms with a known truth: the effect of KDE on a teacher and on its student."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from semidice.compare import run_compare
from semidice.data.batches.feed import whole_cases
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.demo import PHANTOM
from semidice.labels.makers import majority_label
from semidice.losses import Teacher, TeacherCalibration
from semidice.metrics import ScoreKey, calibration_bins
from semidice.paths import MethodFolder
from semidice.recipes.grid import read_variants
from semidice.runs.run import FoldRun, open_run
from semidice.statistics import paired, read_cases

pytestmark = pytest.mark.slow
STUDENTS = [f"small_{name}" for name in ("hard", "ce", "dml", "temperature", "kde", "kde_paper_keys")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    options = replace(PHANTOM, num_cases=40)
    (raw,) = find_datasets("phantom", options)
    prepare_dataset(raw, path, workers=1)
    return path


def half_as_wide(variant):
    """The student with half of the teacher's channels; the grid gives it a quarter."""
    model = replace(variant.recipe.model, options={"channels": [16, 32, 64, 128]})
    return replace(variant, recipe=variant.recipe.model_copy(update={"model": model}))


@pytest.fixture(scope="module")
def ablation(dataset, tmp_path_factory):
    """The paper's ablation with the small student of the shipped grid, half as wide as its teacher."""
    out = tmp_path_factory.mktemp("ablation")
    overrides = ["data.num_folds=2", "schedule.epochs=150", "validation.every=150"]
    variants = read_variants(["distillation"], dataset=dataset, out=out, overrides=overrides, only=STUDENTS)
    variants = [half_as_wide(variant) if variant.name != "teacher" else variant for variant in variants]
    console = Console(file=io.StringIO(), width=160)
    comparisons = run_compare(variants, out, console, accelerator="cpu")
    print(console.file.getvalue())
    return out, comparisons


def test_the_distillation_grid_gives_the_ablation_table_of_the_paper(ablation):
    out, comparisons = ablation
    assert set(comparisons[ScoreKey("dice_score")].methods) == {"teacher", *STUDENTS}
    table = read_cases(out / "cases.parquet")
    assert len(table.pipe(paired, "dice_score").cases) == 40


class Overconfident(torch.nn.Module):
    """The logits of a network times four: a teacher of `auto` alone is calibrated to half a percent."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, image):
        return 4 * self.network(image)


def test_kde_lowers_the_calibration_error_of_an_overconfident_teacher(ablation, dataset):
    """Measured on validation cases in batches of eight; keys are labelled by majority vote."""
    out, _ = ablation
    opened = Dataset(dataset)
    run = MethodFolder(out / "teacher").seed(0)
    fold_of_case = read_folds(run.folds, opened)
    errors = {"none": [], "kde": []}
    for fold in range(2):
        network = Overconfident(open_run(run).network(fold, device="cpu"))
        cases = [case for case, case_fold in enumerate(fold_of_case) if case_fold == fold]
        trained = FoldRun(open_run(run), opened, fold, fold_of_case)
        (batch,) = whole_cases(trained.storage("cpu"), cases, trained.mean_std, batch_size=len(cases))
        target = majority_label(batch.masks.bool(), present=batch.present, batched=True)
        for calibration in errors:
            options = TeacherCalibration(calibration)
            teacher = Teacher(network, options, generator=torch.Generator().manual_seed(0))
            chunks = zip(batch.image.split(8), target.split(8), strict=True)
            prob = torch.cat([teacher(*chunk) for chunk in chunks])
            errors[calibration].append(float(calibration_bins(prob, target.argmax(1)).over_cases().error()))
    assert np.mean(errors["kde"]) < 0.7 * np.mean(errors["none"]), errors


@pytest.mark.parametrize("metric", ["dice_score", "calibration_error"])
def test_kde_gives_a_student_half_as_wide_no_worse_than_temperature_scaling(ablation, metric):
    _, comparisons = ablation
    pair = comparisons[ScoreKey(metric)].pairs.loc["small_kde", "small_temperature"]
    is_worse = (pair.difference < 0) == ScoreKey(metric).higher_is_better
    assert not (is_worse and pair.p_single < 0.05), pair.difference
