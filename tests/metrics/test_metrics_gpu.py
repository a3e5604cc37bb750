"""Metrics give the same results on a CUDA device as on the CPU."""

from functools import partial

import pytest
import torch
from laws import class_map, soft_label

from semidice import metrics
from semidice.statistics import CaseScores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCORES = {
    "dice_score": metrics.dice_score,
    "iou_score": metrics.iou_score,
    "binarized_dice_score": metrics.binarized_dice_score,
    "soft_dice_score": metrics.soft_dice_score,
    "brier_error": metrics.brier_error,
    "negative_log_likelihood": metrics.negative_log_likelihood,
    "calibration_error": metrics.calibration_error,
    "classwise_calibration_error": metrics.classwise_calibration_error,
    "volume_error_ml": lambda *a, **k: metrics.volume_error_ml(*a, spacing_mm=(1, 1, 1), **k),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_the_same_on_the_gpu(name):
    prob, target = soft_label(2, 3, 40, 50), class_map((2, 40, 50), 3)
    valid = torch.rand(2, 40, 50) < 0.8
    on_gpu = SCORES[name](prob.cuda(), target.cuda(), valid=valid.cuda())
    torch.testing.assert_close(on_gpu.cpu(), SCORES[name](prob, target, valid=valid))


@pytest.mark.parametrize("binning", ["equal_width", "equal_mass"])
@pytest.mark.parametrize("confidence", ["top_class", "classwise"])
def test_bins_are_the_same_to_the_last_bit_on_the_gpu(binning, confidence):
    prob, target = soft_label(3, 4, 60, 70), soft_label(3, 4, 60, 70, seed=4)
    options = {"binning": binning, "confidence": confidence}
    on_gpu = metrics.calibration_bins(prob.cuda(), target.cuda(), **options)
    on_cpu = metrics.calibration_bins(prob, target, **options)
    for part in ("count", "confidence", "accuracy"):
        assert torch.equal(getattr(on_gpu, part).cpu(), getattr(on_cpu, part))


def test_values_are_checked_on_the_gpu_too():
    prob = soft_label(1, 2, 8).cuda()
    with pytest.raises(ValueError, match="needs a hard target"):
        metrics.dice_score(prob, prob)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        metrics.dice_score(prob + 1, torch.zeros(1, 8, dtype=torch.long).cuda())
    with pytest.raises(ValueError, match=r"target holds NaN"):
        metrics.soft_dice_score(prob, torch.full_like(prob, float("nan")))


def test_raters_and_the_kernel_estimate_run_on_the_gpu():
    prob, masks = torch.rand(2, 1, 30, 30), torch.rand(2, 3, 30, 30) < 0.5
    samples = metrics.level_masks(prob, num_samples=4)
    distance = metrics.generalised_energy_distance(samples.cuda(), masks.cuda())
    torch.testing.assert_close(distance.cpu(), metrics.generalised_energy_distance(samples, masks))
    dice = metrics.rater_dice_score(prob.cuda(), masks.cuda())
    torch.testing.assert_close(dice.cpu(), metrics.rater_dice_score(prob, masks))
    crps = partial(metrics.volume_crps_error_ml, spacing_mm=(1, 1, 1))
    torch.testing.assert_close(crps(prob.cuda(), masks.cuda()).cpu(), crps(prob, masks))
    coverage = metrics.volume_coverage_score(prob.cuda(), masks.cuda())
    torch.testing.assert_close(coverage.cpu(), metrics.volume_coverage_score(prob, masks))
    # the generator of the GPU draws other points, so the values are close but not equal
    target = (torch.rand(2, 1, 30, 30) < prob).float()
    error = metrics.kde_calibration_error(prob.cuda(), target.cuda())
    torch.testing.assert_close(error.cpu(), metrics.kde_calibration_error(prob, target), rtol=0, atol=0.1)


def test_collected_rows_are_the_same_on_the_gpu():
    prob, target = soft_label(2, 3, 20, 20), class_map((2, 20, 20), 3)
    tables = []
    for device in ("cpu", "cuda"):
        scores = CaseScores(["dice_score"], class_names="abc", method="x")
        scores.update(metrics.ScoredBatch(prob.to(device), target.to(device)), ["a", "b"])
        tables.append(scores.table())
    assert tables[0].equals(tables[1])
