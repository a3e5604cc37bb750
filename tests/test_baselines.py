"""The baselines in benchmarks/: they train, use our folds, and score as `semidice evaluate` does."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared

from semidice.data.folds import split_folds
from semidice.metrics.accumulators import CaseScores

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    return importlib.import_module


def _run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    module.main()


def _majority_by_counting(dataset, number):
    """The class with the most votes of the raters who looked, the lowest at a tie."""
    masks = dataset.masks(number)[dataset.present[number]]
    return np.stack([(masks == c).sum(0) for c in range(dataset.num_classes)]).argmax(0)


def test_the_plain_loop_trains_and_scores_the_held_out_cases(script, monkeypatch, tmp_path, capsys):
    dataset = make_prepared(tmp_path / "data", num_cases=8, cases_per_patient=1, size=(32, 32))
    out = tmp_path / "plain.json"
    _run(
        script("plain_loop"),
        monkeypatch,
        *(dataset.folder.path, "--num-folds", 2, "--folds", 1, "--epochs", 1, "--batch-size", 2),
        *("--encoder", "resnet18", "--device", "cpu", "--out", out),
    )
    printed, written = json.loads(capsys.readouterr().out), json.loads(out.read_text())
    fold_of_case = split_folds([case.patient for case in dataset.cases], num_folds=2)
    held_out = {case.name for case, fold in zip(dataset.cases, fold_of_case, strict=True) if fold == 1}
    dice = written.pop("dice_of_case")
    assert dice.keys() == held_out
    assert all(0 <= value <= 1 for value in dice.values())
    assert written["dice"] == pytest.approx(np.mean(list(dice.values())))
    assert printed == written
    assert written["seconds"] > 0
    assert written["gpu_minutes"] is None


def test_augmented_labels_stay_hard_and_move_with_their_image(script):
    # an image that is its own label: after augmentation they may differ only at the boundary
    label = torch.zeros(64, 64, 64, dtype=torch.int64)
    label[:, 20:44, 12:36] = 1
    image, moved = script("plain_loop").augment(label[:, None].float(), label)
    assert set(moved.unique().tolist()) == {0, 1}
    assert not torch.equal(moved, label)
    # brightness keeps the order of intensities
    low, high = image.amin((1, 2, 3), keepdim=True), image.amax((1, 2, 3), keepdim=True)
    drawn = ((image - low) / (high - low) > 0.5)[:, 0]
    assert (drawn != moved.bool()).float().mean() < 0.01


def test_dice_of_a_baseline_is_the_dice_of_evaluate(script):
    predicted, target = torch.randint(0, 3, (2, 5, 8, 8))
    # class 2 is in neither map, then in one alone
    predicted[0] %= 2
    target[:2] %= 2
    scores = CaseScores(["dice_score"], class_names=["background", "a", "b"], method="baseline")
    prob = torch.nn.functional.one_hot(predicted, 3).movedim(-1, 1).float()
    scores.update(prob, target, case=list("vwxyz"))
    expected = scores.table().select(class_name="mean").columns["value"]
    assert script("baseline_scores").case_dice(predicted, target, 3) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_the_export_for_nnunet_keeps_intensities_and_majority(script, tmp_path, dtype):
    dataset = make_prepared(
        tmp_path / "data", num_classes=3, num_channels=2, slices_per_scan=2, absent=True, dtype=dtype
    )
    raw = tmp_path / "raw"
    script("baseline_nnunet").export_raw(dataset, raw)
    for number, case in enumerate(dataset.cases):
        for channel, stored in enumerate(dataset.stored("images", number)):
            image = np.array(Image.open(raw / "imagesTr" / f"{case.name}_{channel:04d}.png"))
            np.testing.assert_array_equal(image, stored)
        label = np.array(Image.open(raw / "labelsTr" / f"{case.name}.png"))
        np.testing.assert_array_equal(label, _majority_by_counting(dataset, number))
    assert len(list((raw / "imagesTr").iterdir())) == 2 * len(dataset)
    description = json.loads((raw / "dataset.json").read_text())
    assert description["labels"] == {"background": 0, "class1": 1, "class2": 2}
    assert len(description["channel_names"]) == 2
    assert description["numTraining"] == len(dataset)


def test_the_splits_of_nnunet_are_our_folds(script, tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=12, cases_per_patient=2)
    splits = script("baseline_nnunet").make_splits(dataset, 3)
    fold_of_case = split_folds([case.patient for case in dataset.cases], num_folds=3)
    for fold, split in enumerate(splits):
        assert set(split["val"]) == {
            case.name for case, number in zip(dataset.cases, fold_of_case, strict=True) if number == fold
        }
        assert sorted(split["train"] + split["val"]) == sorted(case.name for case in dataset.cases)


def test_a_volume_is_refused_with_the_way_out(script, tmp_path):
    dataset = make_prepared(tmp_path / "data", depth=3)
    with pytest.raises(ValueError, match="--slices"):
        script("baseline_nnunet").export_raw(dataset, tmp_path / "raw")


@pytest.mark.skipif(importlib.util.find_spec("nnunetv2") is not None, reason="nnunetv2 is installed")
def test_without_nnunet_the_script_says_how_to_install_it(script, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="pip install nnunetv2"):
        _run(script("baseline_nnunet"), monkeypatch, tmp_path / "work", "--stage", "train")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("nnunetv2") is None, reason="nnU-Net is not installed: pip install nnunetv2"
)
def test_nnunet_trains_in_two_stages_and_its_own_dice_agrees(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=10, cases_per_patient=1, size=(32, 32))
    command = [sys.executable, _BENCHMARKS / "baseline_nnunet.py", tmp_path / "work", "--num-folds", "2"]
    prepare = [*command, "--dataset", dataset.folder.path, "--stage", "prepare", "--workers", "1"]
    subprocess.run(prepare, check=True, capture_output=True)
    train = [*command, "--stage", "train", "--folds", "0", "--epochs", "1", "--iterations", "2"]
    subprocess.run(
        [*train, "--workers", "1", "--device", "cpu", "--out", tmp_path / "out.json"],
        check=True,
        capture_output=True,
    )
    dice = json.loads((tmp_path / "out.json").read_text())["dice"]
    (summary,) = (tmp_path / "work" / "results").rglob("summary.json")
    assert dice == pytest.approx(json.loads(summary.read_text())["foreground_mean"]["Dice"])
