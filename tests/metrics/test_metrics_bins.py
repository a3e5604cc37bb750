"""Calibration bins compared with scikit-learn and manual sums; merging, slabs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import class_map, soft_label
from sklearn.calibration import calibration_curve

from semidice.arrays import one_hot
from semidice.metrics import calibration_bins, calibration_error, classwise_calibration_error
from semidice.metrics.slabs import slabs

BINNINGS = ["equal_width", "equal_mass"]
each_binning = pytest.mark.parametrize("binning", BINNINGS)


def ece_by_hand(confidence, accuracy, bin_of):
    """The definition, bin by bin, in float64."""
    confidence, accuracy = confidence.double().flatten(), accuracy.double().flatten()
    total = 0.0
    for number in bin_of.unique():
        inside = bin_of.flatten() == number
        total += (accuracy[inside].mean() - confidence[inside].mean()).abs() * inside.sum() / len(confidence)
    return float(total)


def equal_mass_bin(confidence, num_bins):
    """The exact equal-mass bin of each voxel: equal values share the bin of their middle rank."""
    _, inverse, count = confidence.flatten().unique(return_inverse=True, return_counts=True)
    middle = count.cumsum(0) - count / 2
    return (middle * num_bins / count.sum()).long().clamp(max=num_bins - 1)[inverse]


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_top_class_error_equals_the_definition(channels):
    prob = torch.rand(1, 1, 500) if channels == 1 else soft_label(1, channels, 500)
    target = class_map((1, 500), max(2, channels))
    if channels == 1:
        confidence = torch.maximum(prob, 1 - prob)
        correct = (prob > 0.5) == (target.unsqueeze(1) == 1)
        target = target.unsqueeze(1).float()
    else:
        confidence, decided = prob.max(1)
        correct = decided == target
    by_hand = ece_by_hand(confidence, correct, (confidence * 10).long())
    assert calibration_error(prob, target).item() == pytest.approx(by_hand, abs=1e-7)


def test_the_classwise_error_of_a_channel_equals_the_curve_of_scikit_learn():
    prob, target = torch.rand(1, 1, 2000), None
    target = (torch.rand(1, 1, 2000) < prob**2).float()
    accuracy, confidence = calibration_curve(target.flatten().numpy(), prob.flatten().numpy(), n_bins=10)
    means = calibration_bins(prob, target, confidence="classwise").means()
    np.testing.assert_allclose(means.accuracy[0, 0], accuracy, atol=1e-6)
    np.testing.assert_allclose(means.confidence[0, 0], confidence, atol=1e-6)
    expected = (means.share[0, 0].numpy() * np.abs(accuracy - confidence)).sum()
    assert classwise_calibration_error(prob, target).item() == pytest.approx(expected, abs=1e-6)


def test_the_classwise_error_equals_the_error_of_each_channel_alone():
    prob, target = soft_label(2, 3, 200), class_map((2, 200), 3)
    together = classwise_calibration_error(prob, target)
    for channel in range(3):
        alone = classwise_calibration_error(
            prob[:, channel : channel + 1], (target == channel).unsqueeze(1).float()
        )
        torch.testing.assert_close(together[:, channel], alone[:, 0], rtol=0, atol=0)


def test_confidence_1_is_in_the_last_bin():
    prob, target = torch.tensor([[[0.95, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    bins = calibration_bins(prob, target, confidence="classwise")
    assert bins.count.flatten().tolist() == [0] * 9 + [2]
    # one bin: mean confidence 0.975 against an accuracy of 0.5
    assert bins.error().item() == pytest.approx(0.475)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_edge_belongs_to_the_bin_above_it_in_every_dtype(dtype):
    edges = torch.arange(11, dtype=torch.float64) / 10
    prob = edges.to(dtype).view(1, 1, -1)
    bins = calibration_bins(prob, torch.zeros_like(prob), confidence="classwise")
    assert bins.count.flatten().tolist() == [1] * 9 + [2]
    below = (edges[1:] - 1e-6).to(dtype).view(1, 1, -1)
    bins = calibration_bins(below, torch.zeros_like(below), confidence="classwise")
    assert bins.count.flatten().tolist() == [1] * 10


def test_one_channel_with_probability_one_half_is_background_with_confidence_one_half():
    prob = torch.full((1, 1, 2), 0.5)
    assert calibration_error(prob, torch.zeros(1, 1, 2)).item() == 0.5
    assert calibration_error(prob, torch.ones(1, 1, 2)).item() == 0.5
    assert calibration_error(prob, torch.tensor([[[0.0, 1.0]]])).item() == 0


# soft references


@each_binning
@pytest.mark.parametrize("confidence", ["top_class", "classwise"])
def test_the_bins_of_a_soft_reference_are_the_mean_of_the_bins_of_its_raters(binning, confidence):
    prob = soft_label(1, 3, 300)
    raters = [class_map((1, 300), 3, seed=seed) for seed in range(4)]
    mean = torch.stack([one_hot(rater, 3).float() for rater in raters]).mean(0)
    options = {"binning": binning, "confidence": confidence}
    soft = calibration_bins(prob, mean, **options)
    hard = [calibration_bins(prob, rater, **options) for rater in raters]
    assert torch.equal(soft.count, hard[0].count)
    assert torch.equal(4 * soft.accuracy, sum(bins.accuracy for bins in hard))


def test_the_soft_label_itself_is_calibrated_in_every_class():
    soft = soft_label(3, 3, 100)
    assert classwise_calibration_error(soft, soft).abs().max() < 1e-7
    assert calibration_error(soft, soft).abs().max() < 1e-7


@given(seed=st.integers(0, 10_000))
def test_the_error_lies_between_0_and_1(seed):
    generator = torch.Generator().manual_seed(seed)
    prob = torch.rand(1, 1, 50, generator=generator).round(decimals=1)
    target = torch.rand(1, 1, 50, generator=generator)
    for binning in BINNINGS:
        assert 0 <= calibration_error(prob, target, binning=binning).item() <= 1


# equal mass


def skewed_prob(size, seed=0):
    """Probabilities like those of a network: nearly all close to 0 or 1, and many exactly 0 or 1."""
    logits = 12 * torch.randn(size, generator=torch.Generator().manual_seed(seed)) - 6
    return logits.sigmoid()


@pytest.mark.parametrize("num_bins", [5, 10, 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_error_of_equal_mass_bins_is_close_to_the_exact_error(num_bins, seed):
    prob = skewed_prob((1, 1, 20_000), seed)
    target = (torch.rand(1, 1, 20_000) < prob.sqrt()).float()
    bins = calibration_bins(prob, target, confidence="classwise", binning="equal_mass", num_bins=num_bins)
    exact = ece_by_hand(prob, target, equal_mass_bin(prob, num_bins))
    # only edges of bins are rounded, to cells
    assert abs(bins.error().item() - exact) < 2e-3


def test_voxels_with_the_same_confidence_are_in_the_same_equal_mass_bin():
    prob = torch.tensor([[[0.2] * 90 + [0.9] * 10]])
    target = torch.tensor([[[1.0] * 45 + [0.0] * 45 + [1.0] * 10]])
    bins = calibration_bins(prob, target, confidence="classwise", binning="equal_mass")
    assert sorted(bins.means().share[0, 0].tolist())[-2:] == pytest.approx([0.1, 0.9])
    assert bins.error().item() == pytest.approx(0.9 * 0.3 + 0.1 * 0.1, abs=1e-6)


# merging


@each_binning
@pytest.mark.parametrize("confidence", ["top_class", "classwise"])
def test_cases_batches_and_slabs_merge_to_the_same_bits_in_any_order(binning, confidence):
    prob, target = soft_label(5, 3, 40, 30), soft_label(5, 3, 40, 30, seed=8)
    options = {"binning": binning, "confidence": confidence}
    expected_bins = calibration_bins(prob, target, per_case=False, **options)
    cases = calibration_bins(prob, target, **options).over_cases()
    single_cases = [
        calibration_bins(prob[i : i + 1], target[i : i + 1], per_case=False, **options)
        for i in (4, 2, 0, 1, 3)
    ]
    merged = single_cases[0] + single_cases[1] + single_cases[2] + single_cases[3] + single_cases[4]
    shuffled = torch.randperm(40 * 30)
    reordered = calibration_bins(
        prob.flatten(2)[..., shuffled], target.flatten(2)[..., shuffled], per_case=False, **options
    )
    for bins in (cases, merged, reordered):
        for name in ("count", "confidence", "accuracy"):
            assert torch.equal(getattr(bins, name), getattr(expected_bins, name))
    assert expected_bins.count.sum(-1).flatten()[0] == 5 * 40 * 30


def test_bins_of_different_kinds_cannot_be_merged():
    bins = calibration_bins(torch.rand(1, 1, 9), torch.rand(1, 1, 9))
    with pytest.raises(ValueError, match="cannot merge 10 equal_width bins"):
        _ = bins + calibration_bins(torch.rand(1, 1, 9), torch.rand(1, 1, 9), num_bins=5)


@pytest.mark.parametrize("shape", [(3, 2, 7), (2, 1, 5, 6, 7), (5, 3), (1, 1, 1), (2, 4, 33, 2)])
@pytest.mark.parametrize("size", [1, 8, 31, 1000])
def test_slabs_hold_every_voxel_once(shape, size):
    prob = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    valid = torch.rand(shape[0], *shape[2:]) < 0.5
    pieces = list(slabs(prob, prob, valid, size=size))
    assert sorted(torch.cat([piece.prob.flatten() for piece in pieces]).tolist()) == prob.flatten().tolist()
    assert sum(int(piece.valid.sum()) for piece in pieces) == int(valid.sum())
    for piece in pieces:
        assert piece.prob.numel() <= max(size, shape[1])
        assert torch.equal(piece.prob, piece.target)
        assert int(piece.prob.min()) // prob[0].numel() == piece.first_case
