"""Scores of each case compared with scikit-learn, closed forms and manual counts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import class_map, soft_label
from sklearn import metrics as sklearn_metrics
from start import refused

from semidice import metrics
from semidice.arrays import one_hot
from semidice.decisions import decide, volume_ml
from semidice.losses.segmentation import dice_loss
from semidice.metrics import (
    binarized_dice_score,
    brier_error,
    dice_score,
    foreground_mean,
    iou_score,
    negative_log_likelihood,
    soft_dice_score,
    volume_error_ml,
)
from semidice.metrics.scores import truth_error

SHAPES = [(3, 4, 9), (2, 3, 7, 5), (2, 2, 3, 4, 5), (2, 1, 6, 7)]
NAN = float("nan")


def hard_target(shape):
    """A class map if there are several channels, a mask if there is one."""
    if shape[1] == 1:
        return class_map(shape, 2).float()
    return class_map((shape[0], *shape[2:]), shape[1])


def channel_labels(prob, target, case, channel):
    """True and decided labels of one case and channel, flattened for scikit-learn."""
    if prob.shape[1] == 1:
        return (target[case, 0] > 0.5).flatten().numpy(), (prob[case, 0] > 0.5).flatten().numpy()
    return (target[case] == channel).flatten().numpy(), (prob[case].argmax(0) == channel).flatten().numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_dice_and_iou_equal_scikit_learn_in_every_case_and_class(shape):
    prob, target = soft_label(*shape) if shape[1] > 1 else torch.rand(shape), hard_target(shape)
    dice, iou = dice_score(prob, target), iou_score(prob, target)
    for case, channel in np.ndindex(*shape[:2]):
        labels = channel_labels(prob, target, case, channel)
        assert dice[case, channel] == pytest.approx(sklearn_metrics.f1_score(*labels), abs=1e-6)
        assert iou[case, channel] == pytest.approx(sklearn_metrics.jaccard_score(*labels), abs=1e-6)


def test_class_indices_and_their_one_hot_label_score_the_same():
    prob, target = soft_label(2, 3, 8, 8), class_map((2, 8, 8), 3)
    one_hot_target = one_hot(target, 3).float()
    for score in (dice_score, iou_score, soft_dice_score, binarized_dice_score, brier_error):
        torch.testing.assert_close(score(prob, target), score(prob, one_hot_target), rtol=0, atol=0)


def test_dice_and_iou_of_four_voxels_equal_manual_counts():
    prob = torch.tensor([[[0.9, 0.6, 0.5, 0.1]]])
    target = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])
    # decided 1 1 0 0 (0.5 is background): tp 1, fp 1, fn 1
    assert dice_score(prob, target).item() == 0.5
    assert iou_score(prob, target).item() == pytest.approx(1 / 3)
    # masks of another rule
    assert dice_score(prob > 0.4, target).item() == pytest.approx(0.8)


@pytest.mark.parametrize(("empty", "expected"), [(1.0, 1.0), (0.0, 0.0), (NAN, NAN)])
def test_a_class_that_is_in_neither_mask_scores_the_value_of_empty(empty, expected):
    nothing = torch.zeros(1, 1, 4)
    for score in (dice_score, iou_score, soft_dice_score, binarized_dice_score):
        assert score(nothing, nothing, empty=empty).item() == pytest.approx(expected, nan_ok=True)
    assert dice_score(nothing, nothing).item() == 1
    assert dice_score(nothing, torch.ones(1, 1, 4)).item() == 0


def test_the_foreground_mean_leaves_out_the_background_and_nan():
    scores = torch.tensor([[0.0, 0.5, 1.0], [0.0, NAN, 1.0], [0.0, NAN, NAN]])
    torch.testing.assert_close(foreground_mean(scores), torch.tensor([0.75, 1.0, NAN]), equal_nan=True)
    assert foreground_mean(torch.tensor([[0.3]])).item() == pytest.approx(0.3)


def test_masks_of_channels_that_may_overlap_are_scored_one_by_one():
    prob = torch.tensor([[[0.9, 0.6], [0.8, 0.7]]])
    overlapping = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    for score, expected in ((dice_score, 2 / 3), (iou_score, 0.5)):
        assert score(prob > 0.5, overlapping)[0].tolist() == pytest.approx([1.0, expected])
    volume = volume_error_ml(prob > 0.5, overlapping, spacing_mm=(10, 10, 10))
    assert volume.tolist() == [[0.0, 1.0]]
    refused(lambda: dice_score(prob / prob.sum(1, keepdim=True), overlapping), "one-hot", "prob > 0.5")
    # a soft label is not decided on behalf of the user
    refused(lambda: dice_score(prob[:, :1], prob[:, :1]), "hard target", "soft_dice_score", "majority_label")


# soft labels


@given(seed=st.integers(0, 1000), channels=st.sampled_from([1, 2, 5]))
def test_soft_dice_and_bdice_are_exactly_1_at_the_soft_label(seed, channels):
    first = slice(None) if channels > 1 else slice(1)
    soft = soft_label(2, max(2, channels), 5, 6, seed=seed)[:, first]
    assert (soft_dice_score(soft, soft) == 1).all()
    assert (binarized_dice_score(soft, soft) == 1).all()
    different = soft_label(2, max(2, channels), 5, 6, seed=seed + 1)[:, first]
    assert (soft_dice_score(different, soft) < 1).all()
    assert (binarized_dice_score(different, soft) < 1).all()


def test_bdice_is_1_only_if_no_threshold_separates_prediction_and_label():
    soft = torch.tensor([[[0.12, 0.38, 0.95]]])
    assert binarized_dice_score(torch.tensor([[[0.19, 0.31, 0.91]]]), soft).item() == 1
    assert binarized_dice_score(torch.tensor([[[0.21, 0.31, 0.91]]]), soft).item() < 1


def test_soft_dice_is_one_minus_the_loss_and_equals_dice_on_hard_masks():
    prob, soft = soft_label(1, 3, 40, seed=1), soft_label(1, 3, 40)
    for channel in range(3):
        selected = slice(channel, channel + 1)
        loss = dice_loss(prob[:, selected], soft[:, selected])
        assert soft_dice_score(prob, soft)[0, channel] == pytest.approx(1 - loss.item(), abs=1e-6)
    target = class_map((2, 30), 3)
    torch.testing.assert_close(
        soft_dice_score(decide(prob).float(), target[:1, :1].expand(1, 40)),
        dice_score(prob, target[:1, :1].expand(1, 40)),
    )


def test_bdice_equals_the_mean_of_hard_scores_and_a_manual_example():
    prob, soft = torch.rand(2, 1, 50), torch.rand(2, 1, 50)
    levels = [
        dice_score((prob > t).float(), (soft > t).float()) for t in torch.linspace(0.1, 0.9, 9).tolist()
    ]
    torch.testing.assert_close(binarized_dice_score(prob, soft), torch.stack(levels).mean(0))
    # label 0 1/3 2/3 1, prediction 0 0 1 1: three thresholds each score 4/5, 1 and 2/3
    label, mask = torch.tensor([[[0, 1 / 3, 2 / 3, 1]]]), torch.tensor([[[0.0, 0, 1, 1]]])
    assert binarized_dice_score(mask, label).item() == pytest.approx((0.8 + 1 + 2 / 3) / 3)


def test_rounding_of_rater_shares_does_not_move_them_across_a_threshold():
    exact = torch.tensor([[[0.3, 0.6, 0.9]]])
    # 0.1 + 0.1 + 0.1 and similar sums in float32
    summed = torch.stack([sum([torch.tensor(0.1)] * k, torch.tensor(0.0)) for k in (3, 6, 9)]).view(1, 1, 3)
    assert not torch.equal(exact, summed)
    assert binarized_dice_score(summed, exact).item() == 1


def test_a_soft_value_in_an_ignored_voxel_of_a_hard_target_is_allowed():
    target = torch.tensor([[[1.0, 0.0, 0.4]]])
    valid = torch.tensor([[True, True, False]])
    assert dice_score(torch.tensor([[[0.9, 0.2, 0.9]]]), target, valid=valid).item() == 1


# Brier and likelihood


@pytest.mark.parametrize("classes", [2, 4])
def test_brier_and_likelihood_equal_scikit_learn(classes):
    prob, target = soft_label(3, classes, 60), class_map((3, 60), classes)
    for case in range(3):
        truth, given_prob = target[case].numpy(), prob[case].T.double().numpy()
        # float32 rows sum to one within 1e-7; scikit-learn requires a closer sum
        given_prob = given_prob / given_prob.sum(1, keepdims=True)
        labels = list(range(classes))
        brier = sklearn_metrics.brier_score_loss(truth, given_prob, labels=labels, scale_by_half=True)
        nll = sklearn_metrics.log_loss(truth, given_prob, labels=labels)
        assert brier_error(prob, target)[case] == pytest.approx(brier, abs=1e-6)
        assert negative_log_likelihood(prob, target)[case] == pytest.approx(nll, abs=1e-5)


def test_one_sigmoid_channel_equals_its_two_class_softmax():
    prob, target = torch.rand(2, 1, 30), class_map((2, 1, 30), 2).float()
    both = torch.cat([1 - prob, prob], 1)
    index = target.squeeze(1).long()
    for score in (brier_error, negative_log_likelihood, metrics.calibration_error):
        torch.testing.assert_close(score(prob, target), score(both, index))
    sklearn_brier = sklearn_metrics.brier_score_loss(index[0].numpy(), prob[0, 0].numpy())
    assert brier_error(prob, target)[0] == pytest.approx(sklearn_brier, abs=1e-6)


def test_brier_is_0_and_the_likelihood_is_best_at_the_soft_label():
    soft = soft_label(2, 3, 20)
    assert brier_error(soft, soft).tolist() == [0, 0]
    at_label = negative_log_likelihood(soft, soft)
    assert (at_label < negative_log_likelihood(soft_label(2, 3, 20, seed=5), soft)).all()
    entropy = -(soft * soft.log()).sum(1).mean(1)
    torch.testing.assert_close(at_label, entropy)


def test_a_certain_wrong_prediction_costs_87_nats():
    prob, target = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[1]])
    cost = negative_log_likelihood(prob, target).item()
    assert cost == pytest.approx(-math.log(torch.finfo(torch.float32).tiny), abs=1e-3)


# volume


def test_the_volume_in_ml_is_computed_from_the_mask_or_from_probabilities():
    prob = torch.zeros(1, 1, 4, 5, 5)
    prob[:, :, 0], prob[:, :, 1] = 0.8, 0.25
    spacing = (2.0, 3.0, 5.0)  # 30 mm3 per voxel
    assert volume_ml(decide(prob), spacing_mm=spacing).item() == pytest.approx(25 * 0.03)
    assert volume_ml(prob, spacing_mm=spacing).item() == pytest.approx(25 * 1.05 * 0.03)
    target = torch.zeros(1, 1, 4, 5, 5)
    target[:, :, :2] = 1
    assert volume_error_ml(prob, target, spacing_mm=spacing).item() == pytest.approx(25 * 0.03)


def test_each_case_has_its_own_spacing_and_2d_needs_the_slice_thickness():
    prob = torch.ones(2, 1, 10, 10)
    both = volume_ml(prob, spacing_mm=torch.tensor([[1.0, 1, 1], [1, 1, 10]]))
    torch.testing.assert_close(both, torch.tensor([[0.1], [1.0]]))
    refused(lambda: volume_error_ml(prob, prob, spacing_mm=(1.0, 1.0)), "slice thickness")


def test_the_volume_from_calibrated_probabilities_is_unbiased_but_the_volume_of_the_mask_is_not():
    prob = torch.full((1, 1, 50_000), 0.3)
    target = (torch.rand(1, 1, 50_000) < 0.3).float()
    expected, drawn = (volume_ml(each, spacing_mm=(1, 1, 1)).item() for each in (prob, target))
    assert abs(expected - drawn) < 0.02 * 15 < volume_error_ml(prob, target, spacing_mm=(1, 1, 1)).item()


def test_the_truth_error_is_exactly_zero_at_the_truth_and_ignores_invalid_voxels():
    truth = soft_label(3, 2, 5, 7)
    assert torch.count_nonzero(truth_error(truth, truth)) == 0
    prob = truth.clone()
    prob[0, :, 0, 0] = 1 - truth[0, :, 0, 0]
    valid = torch.ones(3, 5, 7, dtype=torch.bool)
    valid[0, 0, 0] = False
    valid[2] = False
    error = truth_error(prob, truth, valid=valid)
    assert torch.count_nonzero(error[:2]) == 0
    assert error[2].isnan().all()
    shift = (1 - 2 * truth[0, :, 0, 0]).abs() / 35
    torch.testing.assert_close(truth_error(prob, truth)[0], shift)
