"""The average calibration error against brute force and the bins of the metrics, and in the mixture."""

import math

import numpy as np
import pytest
import torch
from laws import BINNINGS, class_map, random_logits, soft_label
from torch._subclasses.fake_tensor import FakeTensorMode

import semidice.losses.calibration_error as module
from semidice import CalibrationErrorLoss, SegmentationLoss
from semidice.arrays import one_hot
from semidice.losses.calibration_error import calibration_error_of
from semidice.losses.options import LossOptions
from semidice.metrics.bins import calibration_bins

each_binning = pytest.mark.parametrize("binning", BINNINGS)


def brute_force(prob, label, num_bins, binning):
    """The error of the voxels of one image and class: every bin and every voxel in a loop."""
    errors, shares = [], []
    for number in range(num_bins):
        gap = mass = 0.0
        for x, y in zip(prob, label, strict=True):
            if binning == "hard":
                last = number == num_bins - 1 and x == 1
                weight = float(number / num_bins <= x < (number + 1) / num_bins or last)
            else:
                centres = (np.arange(num_bins) + 0.5) / num_bins
                # linear between the centres, constant beyond the first and the last
                weight = np.interp(x, centres, np.eye(num_bins)[number])
            gap, mass = gap + weight * (x - y), mass + weight
        share = min(1.0, mass)
        errors.append(share * abs(gap / mass) if mass > 0 else 0.0)
        shares.append(share)
    return sum(errors) / sum(shares)


def error(prob, target, valid=None, num_bins=20, binning="hard", **options):
    """The loss of probabilities."""
    options |= {"calibration_bins": num_bins, "calibration_binning": binning, "activation": "none"}
    return CalibrationErrorLoss(**options)(prob, target, valid)


@each_binning
@pytest.mark.parametrize("num_voxels", [1, 3, 200])
def test_it_equals_brute_force_for_each_image_and_class(binning, num_voxels):
    prob, label = (soft_label(2, 3, num_voxels, seed=seed, dtype=torch.float64) for seed in (0, 1))
    # the ends of [0, 1] and the edges of bins
    edges = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.125], dtype=torch.float64)[:num_voxels]
    prob[0, 0, : len(edges)] = edges
    of_images = zip(prob.numpy(), label.numpy(), strict=True)
    expected = np.array(
        [[brute_force(*pair, 8, binning) for pair in zip(*each, strict=True)] for each in of_images]
    )
    options = {"num_bins": 8, "binning": binning}
    assert float(error(prob, label, **options)) == pytest.approx(expected.mean(), abs=1e-12)
    weight = np.array([1.0, 2.0, 0.5])
    weighted = error(prob, label, class_weight=weight.tolist(), over="class", **options)
    assert float(weighted) == pytest.approx(expected.mean(0) @ weight / weight.sum(), abs=1e-12)
    without = error(prob, label, background=False, **options)
    assert float(without) == pytest.approx(expected[:, 1:].mean(), abs=1e-12)
    one_image = [part.transpose(0, 1).reshape(1, 3, -1) for part in (prob, label)]
    batch = error(prob, label, over="batch", **options)
    torch.testing.assert_close(batch, error(*one_image, **options))


def test_hard_bins_agree_with_the_bins_of_the_metrics():
    prob, index = random_logits(3, 4, 20, 20).softmax(1), class_map((3, 20, 20), 4)
    for target in (index, soft_label(3, 4, 20, 20)):
        means = calibration_bins(prob, target, confidence="classwise", num_bins=10).means()
        expected = (means.confidence - means.accuracy).abs().nanmean(-1).mean()
        loss = error(prob, target, num_bins=10)
        torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)


def test_absent_classes_leave_the_mean_if_only_present_ones_count():
    prob, index = random_logits(2, 3, 50).softmax(1), class_map((2, 50), 2)
    expected = error(prob, one_hot(index, 3).float(), class_weight=[1.0, 1.0, 0.0])
    torch.testing.assert_close(error(prob, index, classes="present"), expected)
    assert error(prob, index) != expected


@each_binning
def test_an_image_without_a_valid_voxel_leaves_the_mean(binning):
    prob, label = (soft_label(2, 3, 50, seed=seed) for seed in (0, 1))
    valid = torch.tensor([[True], [False]]).expand(2, 50)
    expected = error(prob[:1], label[:1], binning=binning)
    torch.testing.assert_close(error(prob, label, valid, binning=binning), expected)


class TestBinning:
    def loss_across_an_edge(self, binning):
        """Two voxels in the bin [0, 0.5); a third one moves over its edge."""
        losses = []
        for moved in (0.5 - 1e-9, 0.5 + 1e-9):
            prob = torch.tensor([[[0.1, 0.2, moved]]], dtype=torch.float64)
            label = torch.tensor([[[0.0, 0.0, 1.0]]], dtype=torch.float64)
            losses.append(error(prob, label, num_bins=2, binning=binning))
        return float((losses[0] - losses[1]).abs())

    def test_only_hard_bins_have_jumps(self):
        assert self.loss_across_an_edge("hard") > 0.1
        assert self.loss_across_an_edge("soft") < 1e-7

    @pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-7])
    def test_the_gradient_of_soft_bins_is_bounded_in_a_bin_that_is_nearly_empty(self, distance):
        # both voxels have the share `distance` in the last bin
        prob = torch.full((1, 1, 2), 0.25 + distance / 2, dtype=torch.float64, requires_grad=True)
        label = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
        error(prob, label, num_bins=2, binning="soft").backward()
        assert prob.grad.abs().max() <= 2

    def test_float32_sums_of_many_voxels_keep_their_digits(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        prob = 0.5 + 0.04 * torch.rand(1, 1, 1 << 22, generator=generator)
        label = torch.rand(prob.shape, generator=generator) * 0.3
        expected = float(error(prob.double(), label.double()))
        assert float(error(prob, label)) == pytest.approx(expected, rel=1e-6)
        monkeypatch.setattr(module, "_NUM_PARTIAL_SUMS", 1)
        assert float(error(prob, label)) != pytest.approx(expected, rel=1e-6)


@each_binning
@pytest.mark.parametrize("over", ["batch", "image", "class"])
def test_a_step_reads_no_value(binning, over):
    """Fake tensors have no values: reading one is an error, as it is during the capture of a CUDA graph."""
    options = LossOptions(calibration_binning=binning, over=over, classes="present")
    with FakeTensorMode():
        logits, valid = torch.randn(2, 3, 8, 8, requires_grad=True), torch.ones(2, 8, 8, dtype=torch.bool)
        label, weight = torch.rand(2, 3, 8, 8), torch.ones(3)
        loss = calibration_error_of(logits, label, valid, weight, options, "softmax", False)
        loss.backward()
        assert loss.shape == ()


class TestInTheMixture:
    logits, label = random_logits(2, 3, 12, 12), soft_label(2, 3, 12, 12)

    @each_binning
    def test_the_total_is_the_weighted_sum_of_the_terms(self, binning):
        options = {"class_weight": [1.0, 2.0, 0.5], "over": "image", "background": False}
        of_bins = {"calibration_bins": 6, "calibration_binning": binning}
        loss = SegmentationLoss(calibration_weight=0.5, **of_bins, **options)
        terms = loss.terms(self.logits, self.label)
        term = CalibrationErrorLoss(**of_bins, **options)(self.logits, self.label)
        torch.testing.assert_close(terms["calibration"], term)
        without = SegmentationLoss(**options)(self.logits, self.label)
        torch.testing.assert_close(loss(self.logits, self.label), without + 0.5 * term)
        torch.testing.assert_close(loss.total(terms), without + 0.5 * term)

    def test_every_output_of_deep_supervision_has_the_term(self):
        coarse = self.logits[..., ::2, ::2]
        loss = SegmentationLoss(calibration_weight=1.0)
        label = torch.nn.functional.avg_pool2d(self.label, 2)
        expected = (2 * loss(self.logits, self.label) + loss(coarse, label)) / 3
        torch.testing.assert_close(loss([self.logits, coarse], self.label), expected)
        terms = loss.terms([self.logits, coarse], self.label)
        torch.testing.assert_close(loss.total(terms), expected)


@each_binning
def test_a_network_that_diverged_gives_a_message_and_no_index_out_of_range(binning):
    loss = CalibrationErrorLoss(calibration_binning=binning)
    with pytest.raises(ValueError, match="the loss is NaN"):
        loss(torch.full((1, 2, 4), math.nan), soft_label(1, 2, 4))
