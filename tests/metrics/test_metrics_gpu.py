"""Scores give the same results on a CUDA device as on the CPU."""

import pytest
import torch
from laws import class_map, soft_label
from start import refused

from semidice import metrics
from semidice.metrics import SCORES, ScoredBatch
from semidice.statistics import CaseScores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PARTS = {
    "target": class_map((2, 40, 50), 3),
    "soft_target": soft_label(2, 3, 40, 50, seed=1),
    "masks": class_map((2, 4, 40, 50), 3),
    "truth": soft_label(2, 3, 40, 50, seed=2),
}


def batch_on(device):
    valid = torch.rand(2, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.8
    parts = {name: part.to(device) for name, part in (PARTS | {"valid": valid}).items()}
    return ScoredBatch(soft_label(2, 3, 40, 50).to(device), **parts, spacing_mm=(1, 1, 2))


@pytest.mark.parametrize(("name", "score"), SCORES.items(), ids=list(SCORES))
def test_a_score_is_the_same_on_the_gpu(name, score):
    on_gpu, on_cpu = score(batch_on("cuda")).cpu(), score(batch_on("cpu"))
    # the generator of the GPU draws other points, so the values are close but not equal
    close = {"rtol": 0, "atol": 0.1} if name == "kde_calibration_error" else {}
    torch.testing.assert_close(on_gpu, on_cpu, **close)


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
    refused(lambda: metrics.dice_score(prob, prob), "needs a hard target")
    refused(lambda: metrics.dice_score(prob + 1, torch.zeros(1, 8, dtype=torch.long).cuda()), "[0, 1]")
    refused(lambda: metrics.soft_dice_score(prob, torch.full_like(prob, torch.nan)), "target holds NaN")
    refused(lambda: metrics.soft_dice_score(prob / 2, prob), "sum to one")


def test_collected_rows_are_the_same_on_the_gpu():
    tables = []
    for device in ("cpu", "cuda"):
        scores = CaseScores(["dice_score"], class_names="abc", method="x")
        scores.update(batch_on(device), ["a", "b"])
        tables.append(scores.table())
    assert tables[0].equals(tables[1])
