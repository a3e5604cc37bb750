"""Overlap statistics of a few voxels, computed by hand, and the index computed from them."""

import pytest
import torch
from laws import FORMS, random_logits, soft_label

from semidice import OverlapStats, overlap_stats, tversky_index

# tp, fp and fn of prob 0.2, 0.9, 0.5 and target 0.6, 0.4, 0.5, computed by hand
BY_HAND = {
    "min": (0.2 + 0.4 + 0.5, 0.5, 0.4),
    "product": (0.12 + 0.36 + 0.25, 0.5, 0.4),
    "squared": (0.73, 0.04 + 0.81 + 0.25 - 0.73, 0.36 + 0.16 + 0.25 - 0.73),
    "relaxed": (0.73, 1.6 - 0.73, 1.5 - 0.73),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_statistics_of_three_voxels_equal_those_computed_by_hand(form):
    prob, target = torch.tensor([[[0.2, 0.9, 0.5]]]), torch.tensor([[[0.6, 0.4, 0.5]]])
    stats = overlap_stats(prob, target, form=form)
    torch.testing.assert_close(torch.stack(stats).flatten(), torch.tensor(BY_HAND[form]))


def test_the_gradient_equals_that_of_the_definition_and_is_zero_at_a_tie():
    prob = torch.tensor([[[0.2, 0.9, 0.5]]], requires_grad=True)
    target = torch.tensor([[[0.6, 0.4, 0.5]]])
    expected = {
        "min": [[1, 0, 0], [0, 1, 0], [-1, 0, 0]],
        "product": [[0.6, 0.4, 0.5], [0, 1, 0], [-1, 0, 0]],
        "squared": [[0.6, 0.4, 0.5], [-0.2, 1.4, 0.5], [-0.6, -0.4, -0.5]],
        "relaxed": [[0.6, 0.4, 0.5], [0.4, 0.6, 0.5], [-0.6, -0.4, -0.5]],
    }
    for form in FORMS:
        stats = overlap_stats(prob, target, form=form)
        gradients = [torch.autograd.grad(part.sum(), prob, retain_graph=True)[0].flatten() for part in stats]
        torch.testing.assert_close(torch.stack(gradients), torch.tensor(expected[form], dtype=torch.float32))


def test_sums_are_float32_for_half_precision():
    prob = torch.ones(1, 1, 100_000, dtype=torch.bfloat16)
    stats = overlap_stats(prob, prob)
    assert stats.tp.dtype == torch.float32
    assert stats.tp.item() == 100_000


def test_a_sum_over_many_voxels_loses_no_small_terms():
    # above 2^24 float32 cannot represent every integer, so adding voxels one by one would lose some of them
    prob = torch.full((1, 1, 2**25), 0.5)
    assert overlap_stats(prob, prob).tp.item() == 2**24


@pytest.mark.parametrize(("smooth", "expected"), [(0.0, 1.0), (1.0, 1.0)])
def test_an_empty_prediction_of_an_empty_target_has_index_one_and_a_finite_gradient(smooth, expected):
    prob = torch.zeros(1, 2, 6, requires_grad=True)
    index = tversky_index(overlap_stats(prob, torch.zeros(1, 2, 6)), alpha=0.5, beta=0.5, smooth=smooth)
    index.sum().backward()
    assert index.tolist() == [[expected, expected]]
    assert torch.isfinite(prob.grad).all()


def test_a_prediction_without_overlap_has_index_zero_unless_smoothed():
    stats = OverlapStats(*(torch.tensor([[value]]) for value in (0.0, 3.0, 0.0)))
    assert tversky_index(stats, alpha=0.5, beta=0.5).item() == 0
    assert tversky_index(stats, alpha=0.5, beta=0.5, smooth=0.5).item() == pytest.approx(0.5 / 2.0)


def test_alpha_weights_false_positives_and_beta_weights_false_negatives():
    stats = OverlapStats(*(torch.tensor([[value]]) for value in (4.0, 2.0, 1.0)))
    assert tversky_index(stats, alpha=0.7, beta=0.3).item() == pytest.approx(4 / (4 + 0.7 * 2 + 0.3 * 1))


def test_a_target_that_requires_a_gradient_gets_one():
    prob, target = random_logits(2, 3, 9).softmax(1).double(), soft_label(2, 3, 9).double().requires_grad_()
    for form in FORMS:
        assert torch.autograd.gradcheck(lambda y, form=form: overlap_stats(prob, y, form=form), (target,))
