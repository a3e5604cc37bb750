"""`semidice calibrate`: honest scores of calibrators, and the one that is kept with the run."""

import io
import shutil

import numpy as np
import pytest
import torch
from case_rows import metrics_of, select
from prepared import make_prepared
from rich.console import Console
from safetensors.torch import load_file
from start import refused, semidice
from synthetic_runs import write_runs

from semidice.calibration import CALIBRATORS, load_calibrator
from semidice.data.folds import fold_cases, read_folds
from semidice.labels import mean_label
from semidice.runs.calibration import kept_calibrator, probability_map, run_calibrate
from semidice.runs.predictions import read_case, read_prediction, write_prediction
from semidice.runs.run import open_run
from semidice.statistics import paired, read_cases

# too confident, and the outline is too wide
METHOD = {"m": (2.0, 1.5, 0.2, "mean", "min")}


def calibrate(run, **options):
    console = Console(file=io.StringIO(), width=200)
    table = run_calibrate(run.path, console=console, **options)
    return table, console.file.getvalue()


def mean_of(table, metric, method):
    return float(np.mean(table.pipe(paired, metric, methods=[method]).values))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "dataset"
    return make_prepared(path, num_cases=12, size=(32, 24), cases_per_patient=1, absent=True)


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    return write_runs(dataset, tmp_path_factory.mktemp("runs"), methods=METHOD, num_folds=3)["m"]


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    return type(finished)(tmp_path / "run")


def stored(run, dataset, folds):
    """Stored probabilities and mean of the present raters of the cases of these folds."""
    fold_of_case = read_folds(run.folds, dataset)
    for fold in folds:
        for number in fold_cases(fold_of_case, fold)[1]:
            masks, present = dataset.masks(number), dataset.present[number]
            label = mean_label(torch.from_numpy(masks), present=present, num_classes=dataset.num_classes)
            yield torch.from_numpy(read_case(run.fold(fold), dataset, number))[None], label[None]


@pytest.mark.parametrize("name", CALIBRATORS)
def test_the_kept_calibrator_is_fitted_to_the_predictions_of_all_folds(name, run, dataset, tmp_path):
    _, printed = calibrate(run, by=[name])
    assert f"kept {name}, fitted to all 3 folds: {run.calibrator}" in printed
    expected = CALIBRATORS[name]()
    parts = list(stored(run, dataset, range(3)))
    for prob, label in parts:
        floored = prob.clamp(min=0.5 / 65535)
        expected.partial_fit(floored / floored.sum(1, keepdim=True), label)
    prob = torch.cat([prob for prob, _ in parts])
    if name == "kde":
        # a merged sample has other keys, which represent the same voxels
        expected.save(tmp_path / "expected.safetensors")
        kept, own = (load_file(path) for path in (run.calibrator, tmp_path / "expected.safetensors"))
        of_classes = (torch.zeros(2).index_add(0, x["label"].argmax(1), x["weight"]) for x in (kept, own))
        torch.testing.assert_close(*of_classes)
        assert kept["weight"].sum() == len(parts) * prob[0, 0].numel()
        return
    calibrated = load_calibrator(run.calibrator).calibrate(prob)
    torch.testing.assert_close(calibrated, expected.calibrate(prob), rtol=0, atol=1e-6)


def test_the_calibrator_of_a_fold_has_not_seen_its_cases(run, dataset):
    table, _ = calibrate(run, by=["beta"])
    fold_of_case = read_folds(run.folds, dataset)
    name = dataset.cases[fold_cases(fold_of_case, 1)[1][0]].name

    def score_of(table, case, method="beta"):
        part = table.pipe(select, metric="rater_brier_error")
        chosen = (part["case"] == case) & (part["method"] == method)
        return float(part["value"][chosen].item())

    by_hand = CALIBRATORS["beta"]()
    for prob, label in stored(run, dataset, [0, 2]):
        by_hand.partial_fit(prob, label)
    number = next(number for number, case in enumerate(dataset.cases) if case.name == name)
    (prob, label) = list(stored(run, dataset, [1]))[fold_cases(fold_of_case, 1)[1].index(number)]
    expected = (by_hand.calibrate(prob) - label).square().sum(1).mean() / 2
    assert score_of(table, name) == pytest.approx(float(expected), rel=1e-4)
    assert score_of(table, name, "uncalibrated") == pytest.approx(
        float((prob - label).square().sum(1).mean() / 2), rel=1e-5
    )


def test_a_distorted_run_is_improved_and_the_table_says_so(run):
    table, printed = calibrate(run, by=["all"], keep="isotonic")
    assert set(table["method"]) == {"uncalibrated", *CALIBRATORS}
    for metric in ("rater_negative_log_likelihood", "rater_brier_error", "truth_error"):
        before = mean_of(table, metric, "uncalibrated")
        for name in ("vector", "isotonic", "beta"):
            # an isotonic function of few cases has zeros, which cost likelihood
            if (metric, name) != ("rater_negative_log_likelihood", "isotonic"):
                assert mean_of(table, metric, name) < before
            assert f" {name} " in printed
    assert "rater_negative_log_likelihood (nats) ↓" in printed
    assert "★" in printed
    assert type(load_calibrator(run.calibrator)) is CALIBRATORS["isotonic"]


def test_a_comparison_keeps_none_unless_one_is_named(run, tmp_path):
    _, printed = calibrate(run, by=["temperature", "beta"], out=tmp_path / "out" / "scores.csv")
    assert "no calibrator was kept" in printed
    assert not run.calibrator.exists()
    assert set(read_cases(tmp_path / "out" / "scores.csv")["method"]) == {
        "uncalibrated",
        "temperature",
        "beta",
    }


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_the_function_of_a_calibrator_is_the_calibrator_at_stored_probabilities(name, num_classes):
    generator = torch.Generator().manual_seed(0)
    units = torch.randint(1, 21_000, (500, num_classes - 1), generator=generator)
    prob = torch.cat([65535 - units.sum(1, keepdim=True), units], 1).float() / 65535
    target = torch.multinomial(prob**2, 1, generator=generator).squeeze(1)
    calibrator = CALIBRATORS[name]().fit(prob, target)
    calibrated = probability_map(calibrator, num_classes)(prob.t().reshape(1, num_classes, 20, 25))
    expected = calibrator.calibrate(prob).t().reshape(1, num_classes, 20, 25)
    torch.testing.assert_close(calibrated, expected, atol=2e-5, rtol=0)
    # a probability between two stored ones lies between their values
    between = probability_map(calibrator, num_classes)(torch.eye(num_classes))
    torch.testing.assert_close(between.sum(1), torch.ones(num_classes))


def test_three_classes_are_calibrated_and_kde_is_left_out_unless_named(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, size=(24, 24), num_classes=3, cases_per_patient=1)
    run = write_runs(dataset, tmp_path / "runs", methods=METHOD)["m"]
    table, printed = calibrate(run, keep="vector")
    assert "left out kde" in printed
    assert set(table["method"]) == {"uncalibrated", "temperature", "vector", "isotonic", "beta"}
    before = mean_of(table, "rater_negative_log_likelihood", "uncalibrated")
    for name in ("vector", "isotonic", "beta"):
        assert mean_of(table, "rater_negative_log_likelihood", name) < before
    assert type(load_calibrator(run.calibrator)) is CALIBRATORS["vector"]
    table, _ = calibrate(run, by=["all", "kde"])
    assert "kde" in table["method"].unique()


def test_slices_of_volumes_and_one_rater_are_scored(tmp_path):
    dataset = make_prepared(
        tmp_path / "data", num_cases=16, size=(24, 24), slices_per_scan=4, num_raters=1, cases_per_patient=1
    )
    run = write_runs(dataset, tmp_path / "runs", methods=METHOD)["m"]
    table, _ = calibrate(run, by=["beta"])
    assert len(set(table["case"].tolist())) == 4
    assert not any(metric.startswith("rater_") for metric in table.pipe(metrics_of))
    assert "negative_log_likelihood" in table.pipe(metrics_of)


def test_a_stored_zero_is_calibrated_as_half_a_unit(run, dataset):
    for fold in range(3):
        for path in run.fold(fold).predictions.glob("*.npz"):
            prob = read_prediction(path)
            write_prediction(path, np.where(prob[1:] < 0.5, [[[1.0]], [[0.0]]], prob).astype(np.float32))
        open_run(run).write_stamp(fold)
    calibrate(run, by=["temperature"])
    kept = kept_calibrator(open_run(run), Console(file=io.StringIO()))
    at_zero = float(kept.calibrate(torch.tensor([[1.0, 0.0]]))[0, 1])
    temperature = load_calibrator(run.calibrator).temperature
    half = 0.5 / 65535
    assert at_zero == pytest.approx(1 / (1 + (1 / half) ** (1 / temperature)), rel=1e-3)


def test_the_error_names_unknown_calibrators_and_unfinished_runs(run):
    refused(lambda: calibrate(run, by=["isotonik"]), "--by", "'isotonik'", "did you mean isotonic?")
    refused(lambda: calibrate(run, keep="all"), "--keep", "'all'")
    run.fold(1).cases.unlink()
    _, printed = calibrate(run, by=["beta"])
    assert "not finished, and not used to calibrate: fold 1" in printed
    assert "fitted to all 2 folds" in printed
    run.fold(2).cases.unlink()
    refused(lambda: calibrate(run, by=["beta"]), "one finished fold", "train --resume")
    run.fold(0).cases.unlink()
    refused(lambda: calibrate(run, by=["beta"]), "no finished fold", "train --resume")


def test_the_command_calibrates_and_reports_errors(run):
    assert semidice("calibrate", run.path, "--by", "vector").code == 0
    assert run.calibrator.is_file()
    refused(semidice("calibrate", run.path, "--by", "temprature"), "--by", "did you mean temperature?")


def test_a_damaged_calibrator_is_refused_with_the_command_that_fits_it(run):
    trained, console = open_run(run), Console(file=io.StringIO())
    assert kept_calibrator(trained, console) is None
    run.calibrator.write_bytes(b"damaged")
    refused(lambda: kept_calibrator(trained, console), str(run.calibrator), "fit it again")
