"""The script that measures mean of folds and flips must test on patients that no fold has seen."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared import make_prepared

from semidice.runs.predictions import read_prediction

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SETTINGS = ["data.num_folds=2", "schedule.epochs=3", "batch_size=4", "model.options.channels=[8,16]"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_prediction", BENCHMARKS / "bench_prediction.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=20, size=(32, 32))


@pytest.fixture(scope="module")
def measured(script, dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    overrides = [part for option in SETTINGS for part in ("--set", option)]
    script.main([str(dataset.folder.path), "quick", *overrides, "--accelerator", "cpu", "--out", str(out)])
    return out


def test_patients_of_the_test_set_are_in_no_fold(dataset, measured):
    patient_of = {case.name: case.patient for case in dataset.cases}
    trained = set(json.loads((measured / "run" / "folds.json").read_text())["fold_of_case"])
    tested = {path.stem for path in (measured / "test" / "mean_of_folds" / "predictions").iterdir()}
    assert len(tested) == 4
    assert trained | tested == set(patient_of)
    assert not {patient_of[case] for case in trained} & {patient_of[case] for case in tested}


def dice_of(dataset, folder):
    """Dice of every test case from the stored predictions, in percent."""
    scores = []
    for path in sorted((folder / "predictions").iterdir()):
        (number,) = dataset.numbers_of([path.stem])
        masks = dataset.masks(number)
        mask, target = read_prediction(path)[1] > 0.5, 2 * masks.sum(0) > len(masks)
        total = mask.sum() + target.sum()
        scores.append(200 * (mask & target).sum() / total if total else 100)
    return np.array(scores)


def test_means_and_gains_are_those_of_the_stored_predictions(dataset, measured):
    row = json.loads((measured / "prediction.json").read_text())
    assert (row["num_folds"], row["num_cases"], row["num_patients"]) == (2, 4, 2)
    scores = row["scores"]["dice_score"]
    assert scores["unit"] == "patient"
    test = measured / "test"
    for suffix, name in (("", ""), ("_flips", ", flips")):
        single = [dice_of(dataset, test / f"fold_{fold}{suffix}").mean() for fold in (0, 1)]
        assert scores["means"][f"single fold{name}"] == pytest.approx(np.mean(single), abs=1e-4)
        of_mean = dice_of(dataset, test / f"mean_of_folds{suffix}").mean()
        assert scores["means"][f"mean of folds{name}"] == pytest.approx(of_mean, abs=1e-4)
    means = scores["means"]
    for name, (better, worse) in {
        "flips, of a single fold": ("single fold, flips", "single fold"),
        "mean of folds": ("mean of folds", "single fold"),
        "flips, of the mean of folds": ("mean of folds, flips", "mean of folds"),
        "both": ("mean of folds, flips", "single fold"),
    }.items():
        gain = scores["gains"][name]
        assert gain["gain"] == pytest.approx(means[better] - means[worse], abs=1e-9)
        assert gain["low"] <= gain["gain"] <= gain["high"]


def test_the_mean_of_folds_is_the_mean_of_the_probabilities(measured):
    for suffix in ("", "_flips"):
        folders = [
            measured / "test" / f"{name}{suffix}" / "predictions"
            for name in ("fold_0", "fold_1", "mean_of_folds")
        ]
        for path in folders[0].iterdir():
            first, second, mean = (read_prediction(folder / path.name) for folder in folders)
            np.testing.assert_allclose(mean, (first + second) / 2, atol=2 / 65535)
            assert not np.allclose(first, second, atol=2 / 65535)


def test_the_table_has_a_row_per_prediction_and_gain(script, measured):
    lines = (measured / "prediction.md").read_text().splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert names == ["prediction", *script.KINDS, "change by", *script.GAINS]
