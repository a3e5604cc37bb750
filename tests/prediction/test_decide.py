"""Masks by a rule, intervals of volumes and maps of uncertainty of new images."""

import csv
import io
import json
import shlex

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from trained import make_run

from semidice.decisions import decide
from semidice.decisions.conformal import ConformalInterval
from semidice.prediction.command import run_predict
from semidice.prediction.options import PredictOptions
from semidice.prediction.outputs import uncertainty_of
from semidice.runs.evaluate import EvaluateOptions, run_evaluate
from semidice.runs.fits import read_fits

SPACING = (0.7, 0.8, 2.5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=12, size=(32, 32))


@pytest.fixture
def run(dataset, tmp_path):
    """A run of two folds with stored predictions; its dataset was prepared with the window 0 to 1."""
    return make_run(tmp_path / "run", dataset, options={"window": [0.0, 1.0]}, metrics=["dice_score"])


@pytest.fixture
def scan(dataset, tmp_path):
    """A volume of three slices, each a phantom."""
    values = np.stack([dataset.image(number)[0] for number in range(3)], -1)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([*SPACING, 1])), tmp_path / "scan.nii.gz")
    return tmp_path / "scan.nii.gz"


def predict(run, scan, out, **options):
    console = Console(file=io.StringIO(), width=300)
    run_predict(run.path, [scan], out, PredictOptions(device="cpu", **options), console=console)
    return console.file.getvalue()


def evaluate(run, **options):
    run_evaluate(run.path, EvaluateOptions(**options), Console(file=io.StringIO()))


def prob_and_mask(out):
    return [np.asarray(nibabel.load(out / f"scan_{kind}.nii.gz").dataobj) for kind in ("prob", "mask")]


def row_of(out):
    with (out / "volumes.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def store(run, *, rule=None, correction=None):
    """Pretend that a rule or an interval was fitted."""
    evaluate(run, rules=["fitted"])
    fits = read_fits(run)
    if rule is not None:
        chosen = fits.rules["all"].model_copy(update={"decision": rule})
        fits = fits.model_copy(update={"rules": {**fits.rules, "all": chosen}})
    if correction is not None:
        fits = fits.model_copy(update={"intervals": {"0.8": {"all": correction}}})
    run.fits.write_text(fits.model_dump_json())


@pytest.mark.parametrize("rule", ["dice", "nested", "threshold:0.3"])
def test_a_rule_decides_the_whole_volume_on_the_grid_of_the_file(run, scan, tmp_path, rule):
    predict(run, scan, tmp_path / "out", decide=rule)
    prob, mask = prob_and_mask(tmp_path / "out")
    both = torch.from_numpy(np.stack([1 - prob, prob]))[None]
    np.testing.assert_array_equal(mask, decide(both, rule)[0, 1].numpy())
    row = row_of(tmp_path / "out")
    assert float(row["volume_voxels"]) == mask.sum()
    assert float(row["volume_ml"]) == pytest.approx(mask.sum() * np.prod(SPACING) / 1000, rel=1e-4)
    assert row["low_ml"] == row["high_ml"] == row["interval"] == ""


def test_three_classes_are_decided_without_overlap(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=4, num_classes=3)
    run = make_run(tmp_path / "run", dataset, options={"window": [0.0, 1.0]}, scored=False)
    image = nibabel.Nifti1Image(dataset.image(0)[0][..., None], np.diag([*SPACING, 1]))
    nibabel.save(image, tmp_path / "scan.nii.gz")
    predict(run, tmp_path / "scan.nii.gz", tmp_path / "out", decide="jaccard")
    prob, mask = prob_and_mask(tmp_path / "out")
    masks = decide(torch.from_numpy(np.moveaxis(prob, -1, 0))[None], "jaccard")[0]
    for number in range(3):
        np.testing.assert_array_equal(mask == number, masks[number].numpy())


def test_fitted_takes_the_rule_for_new_scans(run, scan, tmp_path):
    with pytest.raises(
        ValueError, match=f"run `semidice evaluate {shlex.quote(str(run.path))} --decide fitted`"
    ):
        predict(run, scan, tmp_path / "out", decide="fitted")
    assert not (tmp_path / "out").exists()
    store(run, rule="threshold:0.3")
    predict(run, scan, tmp_path / "out", decide="fitted")
    prob, mask = prob_and_mask(tmp_path / "out")
    np.testing.assert_array_equal(mask, prob > 0.3)
    assert (
        json.loads((tmp_path / "out" / "prediction.json").read_text())["settings"]["decision"]
        == "threshold:0.3"
    )


def test_a_rule_that_was_fitted_to_other_predictions_is_not_used(run, scan, tmp_path):
    store(run)
    first, second = sorted(run.fold(0).predictions.iterdir())[:2]
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="is not fitted to its predictions"):
        predict(run, scan, tmp_path / "out", decide="fitted")
    # a run that was moved without its predictions
    for fold in range(2):
        for path in run.fold(fold).predictions.iterdir():
            path.unlink()
    predict(run, scan, tmp_path / "out", decide="fitted")


def test_a_fitted_correction_of_the_same_level_is_applied(run, scan, tmp_path):
    correction = ConformalInterval(level=0.8, correction=(0.5,), num_patients=9)
    store(run, correction=correction)
    assert "not corrected" not in predict(run, scan, tmp_path / "out", interval=0.8)
    prob, _ = prob_and_mask(tmp_path / "out")
    row = row_of(tmp_path / "out")
    assert row["interval"] == "conformal 0.8"
    low, high, middle = (prob > 0.9).sum(), (prob > 0.1).sum(), prob.sum(dtype=np.float64)
    # half of: the distance of an end from the expected volume, a tenth of that volume, and a voxel
    expected = (
        max(0, low - 0.5 * (middle - low + middle / 10 + 1)),
        high + 0.5 * (high - middle + middle / 10 + 1),
    )
    assert (float(row["low_voxels"]), float(row["high_voxels"])) == pytest.approx(expected, rel=1e-4)
    # at another level it is as without a correction
    printed = predict(run, scan, tmp_path / "other", interval=0.9)
    assert f"not corrected: `semidice evaluate {shlex.quote(str(run.path))} --interval 0.9` fits" in printed
    low, high = (prob > 0.95).sum(), (prob > 0.05).sum()
    row = row_of(tmp_path / "other")
    assert row["interval"] == "nested 0.9"
    assert (float(row["low_voxels"]), float(row["high_voxels"])) == (low, high)
    ends_ml = [float(row["low_ml"]), float(row["high_ml"])]
    assert ends_ml == pytest.approx([end * np.prod(SPACING) / 1000 for end in (low, high)], rel=1e-4)


def test_the_correction_of_evaluate_is_used_by_predict(run, scan, tmp_path):
    # three patients in the other folds: a level of 0.5 needs one
    evaluate(run, interval=0.5)
    predict(run, scan, tmp_path / "out", interval=0.5)
    assert row_of(tmp_path / "out")["interval"] == "conformal 0.5"
    settings = json.loads((tmp_path / "out" / "prediction.json").read_text())["settings"]
    assert settings["interval"] == {
        "level": 0.5,
        "correction": json.loads(run.fits.read_text())["intervals"]["0.5"]["all"],
    }


def test_uncertainty_is_entropy_in_bits_on_the_grid_of_the_file(run, dataset, scan, tmp_path):
    predict(run, scan, tmp_path / "out", uncertainty=True)
    prob, _ = prob_and_mask(tmp_path / "out")
    written = nibabel.load(tmp_path / "out" / "scan_uncertainty.nii.gz")
    assert written.get_data_dtype() == np.float32
    np.testing.assert_allclose(written.affine, nibabel.load(scan).affine)
    both = np.stack([1 - prob, prob]).astype(np.float64).clip(1e-30)
    np.testing.assert_allclose(written.dataobj, -(both * np.log2(both)).sum(0), atol=1e-5)

    run = make_run(tmp_path / "of_pictures", dataset, options={"window": [0.0, 255.0]}, scored=False)
    picture = tmp_path / "picture.png"
    Image.fromarray(np.rint(dataset.image(0)[0] * 255).astype(np.uint8)).save(picture)
    predict(run, picture, tmp_path / "pictures", uncertainty=True)
    prob = np.asarray(Image.open(tmp_path / "pictures" / "picture_prob.png")) / 65535
    uncertainty = tmp_path / "pictures" / "picture_uncertainty.png"
    # the bit depth in the header: Pillow before 10.3 reads 16 bits as int32
    assert uncertainty.read_bytes()[24] == 16
    bits = np.asarray(Image.open(uncertainty))
    both = np.stack([1 - prob, prob]).clip(1e-30)
    # a probability is stored to half a unit, and the slope of the entropy grows where it is small
    np.testing.assert_allclose(bits / 65535, -(both * np.log2(both)).sum(0), atol=2e-4)


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_uncertainty_is_0_where_a_class_is_certain_and_1_where_all_are_equal(num_classes):
    prob = np.stack([np.eye(num_classes)[0], np.full(num_classes, 1 / num_classes)], 1).astype(np.float32)
    np.testing.assert_allclose(uncertainty_of(prob), [0, 1], atol=1e-6)


def test_options_are_settings_and_a_missing_map_is_predicted_again(run, scan, tmp_path):
    out = tmp_path / "out"
    predict(run, scan, out)
    assert "1 of 1 inputs are predicted already" in predict(run, scan, out)
    for options, name in (
        ({"decide": "dice"}, "decision"),
        ({"interval": 0.8}, "interval"),
        ({"uncertainty": True}, "uncertainty"),
    ):
        with pytest.raises(ValueError, match=rf"other settings \({name}\)"):
            predict(run, scan, out, **options)
    predict(run, scan, out, uncertainty=True, overwrite=True)
    (out / "scan_uncertainty.nii.gz").unlink()
    assert "predicted 1 of 1" in predict(run, scan, out, uncertainty=True)
