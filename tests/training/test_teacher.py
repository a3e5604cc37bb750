"""The teacher of a fold: its temperature comes from cases that its networks were not trained on."""

import shutil

import numpy as np
import pytest
import torch
from prepared import make_prepared, rehash
from scipy.optimize import minimize_scalar
from start import refused
from trained import make_run, normalised, train_until, write_network

from semidice.data.batches.feed import Batches, BatchOptions
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.networks.checkpoint import Checkpoint
from semidice.recipes import Recipe
from semidice.runs.run import FoldRun, open_run
from semidice.runs.start import start_run
from semidice.training.context import Context
from semidice.training.engine import train_fold
from semidice.training.teacher import load_teacher

FOLD = 1


@pytest.fixture
def dataset(tmp_path):
    return make_prepared(tmp_path / "data", num_cases=9, size=(32, 32), cases_per_patient=1)


@pytest.fixture
def teacher(dataset, tmp_path):
    return make_run(tmp_path / "teacher", dataset, num_folds=3)


def student_of(teacher, dataset, out, epochs=1, **options):
    recipe = Recipe.model_validate(
        {
            "name": "student",
            "data": {"dataset": str(dataset.folder.path), "num_folds": 3},
            "model": {"architecture": "small_unet", "encoder": "none", "weights": "none"},
            "batch_size": 2,
            "log_every": 1,
            "schedule": {"epochs": epochs},
            "teacher": {"run": str(teacher.path), "calibration": "temperature", **options},
        }
    )
    run = start_run(recipe, out, resume=False)
    # opened again: a dataset keeps its cases in memory, and tests change the files
    dataset = Dataset(dataset.folder.path)
    return FoldRun(run, dataset, FOLD, read_folds(run.folder.folds, dataset))


def temperature_of(student):
    batches = Batches(
        student.storage("cpu"),
        student.training_cases,
        student.mean_std,
        BatchOptions(4, student.recipe.label),
    )
    return load_teacher(student, batches, torch.device("cpu")).temperature


def change_network(teacher, fold):
    network = open_run(teacher).network(fold, device="cpu")
    with torch.no_grad():
        network.segmentation_head[0].weight.mul_(3)
    write_network(teacher, fold, network)


def change_masks(dataset, folds, changed_fold):
    """Turn lesion into background, and background into lesion, in the validation cases of a fold."""
    for case, fold in zip(dataset.cases, folds, strict=True):
        if fold == changed_fold:
            path = dataset.folder.array("masks", case.scan.name)
            np.save(path, ~np.load(path))


def test_the_temperature_is_that_of_the_other_folds_on_their_held_out_cases(teacher, dataset, tmp_path):
    student = student_of(teacher, dataset, tmp_path / "student")
    folds = student.fold_of_case
    logits, labels = [], []
    for number in range(9):
        if folds[number] != FOLD:
            network = open_run(teacher).network(folds[number], device="cpu")
            difference = network(normalised(dataset, number, folds))[0].diff(dim=0)
            logits.append(difference.numpy().ravel())
            labels.append(dataset.masks(number).mean(0).ravel())
    logits, labels = np.concatenate(logits).astype(np.float64), np.concatenate(labels)

    def negative_log_likelihood(log_temperature):
        scaled = logits / np.exp(log_temperature)
        return np.mean(np.logaddexp(0, scaled) - labels * scaled)

    expected = np.exp(minimize_scalar(negative_log_likelihood, bounds=(-5, 5), options={"xatol": 1e-8}).x)
    assert temperature_of(student) == pytest.approx(expected, rel=1e-3)


def test_the_students_validation_cases_and_the_teacher_of_its_fold_do_not_change_the_temperature(
    teacher, dataset, tmp_path
):
    first = student_of(teacher, dataset, tmp_path / "first")
    expected = temperature_of(first)
    change_masks(dataset, first.fold_of_case, FOLD)
    change_network(teacher, FOLD)
    assert temperature_of(student_of(teacher, dataset, tmp_path / "second")) == expected
    change_network(teacher, 0)
    other_network = temperature_of(student_of(teacher, dataset, tmp_path / "third"))
    change_masks(dataset, first.fold_of_case, 2)
    other_labels = temperature_of(student_of(teacher, dataset, tmp_path / "fourth"))
    assert len({expected, other_network, other_labels}) == 3


def test_a_resumed_fold_keeps_the_temperature_that_it_began_with(teacher, dataset, tmp_path):
    student = student_of(teacher, dataset, tmp_path / "student", epochs=2)
    expected = temperature_of(student)

    train_until(student, 1)
    # without the other folds nothing could be fitted
    for fold in (0, 2):
        shutil.rmtree(teacher.fold(fold).path)
    train_fold(student, Context())
    assert Checkpoint(student.folder.last).progress["temperature"] == pytest.approx(expected, rel=1e-5)


def test_a_temperature_needs_another_finished_fold_of_the_teacher(teacher, dataset, tmp_path):
    for fold in (0, 2):
        teacher.fold(fold).cases.unlink()
    student = student_of(teacher, dataset, tmp_path / "student")
    refused(lambda: temperature_of(student), "no finished fold besides 1", "teacher.temperature=NUMBER")
    given = student_of(teacher, dataset, tmp_path / "given", temperature=2.5)
    assert temperature_of(given) == 2.5
    assert temperature_of(student_of(teacher, dataset, tmp_path / "kde", calibration="kde")) == 1


def test_a_teacher_of_another_dataset_is_refused(teacher, dataset, tmp_path):
    change_masks(dataset, [0] * 9, 0)
    rehash(dataset)
    student = student_of(teacher, dataset, tmp_path / "student", temperature=1.0)
    refused(lambda: temperature_of(student), "another dataset", "train the teacher again")
