"""The phantom: raters follow the stated probability, and the same seed gives the same bits."""

import math

import pytest
import torch
from start import refused

from semidice.data.phantom import PhantomOptions, make_phantom


def within_monte_carlo_error(masks, prob, failure=1e-6):
    """Whether the raters' class frequencies are within Bernstein's bound around prob in all voxels.

    For R independent draws, P(|mean - p| > t) <= 2 exp(-L) with t = sqrt(2 p (1-p) L / R) + 2 L / (3 R).
    """
    num_raters, num_classes = masks.shape[1], prob.shape[1]
    frequency = torch.stack([(masks == k).double().mean(1) for k in range(num_classes)], 1)
    budget = math.log(2 * prob.numel() / failure)
    variance = (prob * (1 - prob)).double()
    bound = (2 * variance * budget / num_raters).sqrt() + 2 * budget / (3 * num_raters)
    return bool(((frequency - prob).abs() <= bound).all())


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_the_mean_of_many_raters_is_the_stated_probability(num_classes):
    phantom = make_phantom(2, size=(16, 20), num_raters=10_000, num_classes=num_classes, miss=0.3, seed=1)
    assert within_monte_carlo_error(phantom.masks, phantom.prob)


@pytest.mark.parametrize("part", ["bias", "offset", "wobble"])
def test_the_stated_probability_holds_for_each_single_source_of_disagreement(part):
    alone = {"bias": 0.0, "offset": 0.0, "wobble": 0.0, "miss": 0.0, part: 1.5}
    phantom = make_phantom(1, size=(24, 24), num_raters=5_000, **alone)
    assert within_monte_carlo_error(phantom.masks, phantom.prob)
    assert ((phantom.prob > 0.1) & (phantom.prob < 0.9)).any()


def test_raters_without_errors_agree_and_the_probability_is_0_or_1():
    phantom = make_phantom(3, num_raters=3, bias=0.0, offset=0.0, wobble=0.0, miss=0.0)
    assert torch.equal(phantom.masks, phantom.masks[:, :1].expand_as(phantom.masks))
    assert torch.equal(phantom.prob[:, 1], phantom.masks[:, 0].float())


def test_a_missed_lesion_is_an_empty_mask_and_the_peak_probability_is_the_chance_to_see_it():
    exact = {"bias": 0.0, "offset": 0.0, "wobble": 0.0}
    phantom = make_phantom(20, size=(16, 16), num_raters=200, miss=0.4, **exact)
    seen = phantom.masks.flatten(2).any(2)
    peak = phantom.prob[:, 1].flatten(1).amax(1)
    # five standard deviations of the mean of 200 draws
    assert ((seen.float().mean(1) - peak).abs() <= 5 * (peak * (1 - peak) / 200).sqrt() + 1e-6).all()
    assert 0.2 < 1 - peak.mean() < 0.6


def test_a_rater_who_draws_large_areas_in_some_cases_does_so_in_others():
    phantom = make_phantom(30, size=(32, 32), num_raters=8, bias=1.5, offset=0.3, wobble=0.3, miss=0.0)
    area = phantom.masks.flatten(2).sum(2).double()
    relative = area / area.mean(1, keepdim=True)
    odd, even = relative[::2].mean(0), relative[1::2].mean(0)
    assert torch.corrcoef(torch.stack([odd, even]))[0, 1] > 0.9


@pytest.mark.parametrize("num_classes", [2, 3, 4])
def test_shapes_dtypes_and_ranges_are_as_stated_for_a_non_square_size(num_classes):
    phantom = make_phantom(3, size=(24, 40), num_raters=5, num_classes=num_classes)
    assert phantom.image.shape == (3, 1, 24, 40)
    assert phantom.image.dtype == phantom.prob.dtype == torch.float32
    assert phantom.image.min() > -0.3
    assert phantom.image.max() < 1.3
    assert phantom.prob.shape == (3, num_classes, 24, 40)
    assert phantom.prob.min() >= 0
    torch.testing.assert_close(phantom.prob.sum(1), torch.ones(3, 24, 40))
    assert phantom.masks.shape == (3, 5, 24, 40)
    assert phantom.masks.dtype == (torch.bool if num_classes == 2 else torch.int64)
    assert phantom.masks.unique().tolist() == list(range(num_classes))


def test_without_noise_a_lesion_is_blurred_where_raters_disagree():
    phantom = make_phantom(6, noise=0.0, miss=0.0)
    prob = phantom.prob[:, 1]
    for image, chance in zip(phantom.image[:, 0], prob, strict=True):
        inside, edge = image[chance > 0.99], image[(chance > 0.4) & (chance < 0.6)]
        assert inside.std() < 0.02
        # half way between the lesion and the organ at 0.5
        assert abs(float(edge.mean() - (inside.mean() + 0.5) / 2)) < 0.03


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_case_has_the_same_bits_alone_and_among_others_and_other_bits_with_another_seed(num_classes):
    options = {"size": (16, 20), "num_raters": 3, "num_classes": num_classes, "noise": 0.1}
    all_cases, other_seed = make_phantom(4, seed=5, **options), make_phantom(4, seed=6, **options)
    alone = PhantomOptions(num_cases=4, seed=5, **options).make_case(2)
    for name in ("image", "prob", "masks"):
        assert torch.equal(getattr(all_cases, name)[2:3], getattr(alone, name))
        assert not torch.equal(getattr(all_cases, name), getattr(other_seed, name))
    more_raters = make_phantom(4, seed=5, **options | {"num_raters": 9})
    assert torch.equal(all_cases.image, more_raters.image)
    assert torch.equal(all_cases.prob, more_raters.prob)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_cases", 0), ("num_classes", 1), ("size", (4, 64)), ("miss", 0.6), ("noise", -1.0)],
)
def test_invalid_options_are_refused_with_their_values(name, value):
    refused(lambda: make_phantom(**{"num_cases": 1, "size": (16, 16), name: value}), name, str(value))
