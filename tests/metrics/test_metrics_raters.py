"""Scores against raters: the energy distance and its definition, and scores per rater."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import class_map, soft_label

from semidice.data.phantom import make_phantom
from semidice.labels.makers import majority_label
from semidice.metrics import (
    dice_score,
    generalised_energy_distance,
    level_masks,
    rater_dice_score,
)


def iou_distance(a, b):
    union = (a | b).sum()
    return 0.0 if union == 0 else 1 - ((a & b).sum() / union).item()


def energy_distance_by_definition(samples, masks):
    """Kohl et al. (2018), pair by pair."""
    pairs = ((samples, masks), (samples, samples), (masks, masks))
    cross, within, between = (np.mean([iou_distance(a, b) for a, b in product(x, y)]) for x, y in pairs)
    return 2 * cross - within - between


@pytest.mark.parametrize("space", [(40,), (7, 8), (3, 4, 5)])
def test_the_energy_distance_equals_its_definition(space):
    samples, masks = torch.rand(3, 5, *space) < 0.4, torch.rand(3, 4, *space) < 0.5
    distance = generalised_energy_distance(samples, masks)
    for case in range(3):
        assert distance[case] == pytest.approx(
            energy_distance_by_definition(samples[case], masks[case]), abs=1e-6
        )


@given(seed=st.integers(0, 10_000), shared=st.booleans())
def test_the_energy_distance_is_0_for_the_raters_themselves_and_never_negative(seed, shared):
    generator = torch.Generator().manual_seed(seed)
    masks = torch.rand(2, 3, 6, generator=generator) < 0.5
    samples = masks[:, [1, 2, 0]] if shared else torch.rand(2, 4, 6, generator=generator) < 0.5
    distance = generalised_energy_distance(samples, masks)
    assert (distance >= 0).all()
    if shared:
        assert distance.tolist() == [0, 0]


def test_empty_masks_have_distance_0_to_each_other_and_1_to_any_other_mask():
    nothing, something = torch.zeros(1, 1, 4, dtype=torch.bool), torch.ones(1, 1, 4, dtype=torch.bool)
    assert generalised_energy_distance(nothing, nothing).item() == 0
    assert generalised_energy_distance(nothing, something).item() == 2


def test_an_absent_rater_and_an_ignored_voxel_do_not_count():
    samples, masks = torch.rand(1, 3, 20) < 0.5, torch.rand(1, 4, 20) < 0.5
    present = torch.tensor([[True, False, True, True]])
    valid = torch.rand(1, 20) < 0.7
    expected = energy_distance_by_definition(samples[0][:, valid[0]], masks[0][present[0]][:, valid[0]])
    distance = generalised_energy_distance(samples, masks, present=present, valid=valid)
    assert distance.item() == pytest.approx(expected, abs=1e-6)


def test_the_distance_of_class_maps_is_the_mean_over_the_foreground_classes():
    samples, masks = class_map((1, 2, 30), 3), class_map((1, 3, 30), 3, seed=5)
    by_class = [energy_distance_by_definition(samples[0] == c, masks[0] == c) for c in (1, 2)]
    distance = generalised_energy_distance(samples, masks, num_classes=3)
    assert distance.item() == pytest.approx(np.mean(by_class), abs=1e-6)
    binary = generalised_energy_distance(samples == 1, masks == 1)
    as_integers = generalised_energy_distance((samples == 1).long(), (masks == 1).long(), num_classes=2)
    torch.testing.assert_close(binary, as_integers)


def test_level_masks_are_nested_and_their_mean_is_the_probability():
    prob = torch.rand(2, 1, 50)
    masks = level_masks(prob, num_samples=200)
    torch.testing.assert_close(masks.float().mean(1, keepdim=True), prob, rtol=0, atol=1 / 200)
    assert (masks[:, :-1] <= masks[:, 1:]).all()
    torch.testing.assert_close(level_masks(torch.cat([1 - prob, prob], 1), num_samples=200), masks)
    several = soft_label(1, 4, 30)
    maps = level_masks(several, num_samples=400)
    shares = torch.stack([(maps == c).float().mean(1) for c in range(4)], 1)
    torch.testing.assert_close(shares, several, rtol=0, atol=1 / 200)


def test_the_true_probability_is_closer_to_the_raters_than_the_majority():
    phantom = make_phantom(12, num_raters=6, seed=3)
    lesion = phantom.prob[:, 1:]
    distance = generalised_energy_distance(level_masks(lesion, num_samples=16), phantom.masks)
    majority = majority_label(phantom.masks, batched=True)[:, 1:].bool()
    assert distance.mean() < 0.8 * generalised_energy_distance(majority, phantom.masks).mean()


def test_the_score_of_each_rater_is_the_dice_with_their_mask():
    prob, masks = torch.rand(2, 1, 6, 6), torch.rand(2, 3, 6, 6) < 0.5
    present = torch.tensor([[True, True, False], [True, True, True]])
    scores = rater_dice_score(prob, masks, present=present)
    assert scores[0, 2].isnan()
    for case, rater in ((0, 0), (0, 1), (1, 2)):
        alone = dice_score(prob[case : case + 1], masks[case, rater][None, None].float())
        assert scores[case, rater] == alone.item()
    maps = class_map((2, 3, 30), 3)
    several = rater_dice_score(soft_label(2, 3, 30), maps)
    assert several[1, 2] == pytest.approx(dice_score(soft_label(2, 3, 30), maps[:, 2])[1, 1:].mean().item())
