"""`semidice predict` with a calibrator that was kept with the run."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from trained import make_run

from semidice.calibration import CALIBRATORS, load_calibrator
from semidice.prediction.command import run_predict
from semidice.prediction.options import PredictOptions
from semidice.runs.calibration import run_calibrate


def predict(run, image, out, **options):
    console = Console(file=io.StringIO(), width=200)
    run_predict(run.path, [image], out, PredictOptions(device="cpu", **options), console=console)
    return console.file.getvalue()


def probabilities(out, name="scan"):
    return np.asarray(Image.open(out / f"{name}_prob.png")).astype(np.float64) / 65535


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    dataset = make_prepared(path / "data", num_cases=4, size=(32, 32))
    run = make_run(path / "run", dataset, options={"window": [0.0, 255.0]})
    run_calibrate(run.path, by=["beta"], console=Console(file=io.StringIO()))
    return run


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "scan.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)).save(path)
    return path


def test_the_mean_of_the_folds_is_calibrated_and_the_output_says_so(run, image, tmp_path):
    printed = predict(run, image, tmp_path / "calibrated")
    assert "calibrating by beta" in printed
    assert "calibrating" not in predict(run, image, tmp_path / "plain", calibrate=False)
    plain, calibrated = (probabilities(tmp_path / name) for name in ("plain", "calibrated"))
    foreground = torch.from_numpy(plain)[None, None]
    expected = load_calibrator(run.calibrator).calibrate(torch.cat([1 - foreground, foreground], 1))[0, 1]
    # both are rounded to 1/65535, and the curve may be steep
    np.testing.assert_allclose(calibrated, expected.numpy(), atol=2e-4)
    assert np.abs(calibrated - plain).max() > 0.05
    mask = np.asarray(Image.open(tmp_path / "calibrated" / "scan_mask.png")) > 0
    assert np.array_equal(mask, calibrated > 0.5)


def test_the_settings_name_the_calibrator_and_another_one_is_refused(run, image, tmp_path):
    out = tmp_path / "out"
    predict(run, image, out, calibrate=False)
    assert json.loads((out / "prediction.json").read_text())["settings"]["calibrator"] is None
    with pytest.raises(ValueError, match=r"other settings \(calibrator\)"):
        predict(run, image, out)
    predict(run, image, out, overwrite=True)
    stored = json.loads((out / "prediction.json").read_text())["settings"]["calibrator"]
    assert stored["name"] == "beta"
    assert len(stored["sha256"]) == 64
    assert "are predicted already" in predict(run, image, out)


def test_a_calibrator_that_was_fitted_to_another_run_is_refused(run, image, tmp_path):
    kept = run.calibrator.read_bytes()
    try:
        prob = torch.full((6, 3), 1 / 3)
        CALIBRATORS["beta"]().fit(prob, torch.arange(6) % 3).save(run.calibrator)
        with pytest.raises(ValueError, match="was not fitted to the predictions"):
            predict(run, image, tmp_path / "out")
        predict(run, image, tmp_path / "out", calibrate=False)
    finally:
        run.calibrator.write_bytes(kept)
