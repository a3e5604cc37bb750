"""The distribution of a volume: brute force over the raters' levels, laws, raters of phantoms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import class_map, soft_label
from start import refused

from semidice.data.phantom import make_phantom
from semidice.decisions import (
    decide,
    rater_volumes_ml,
    volume_interval,
    volume_ml,
    volume_quantiles,
)

VOXELS = (10.0, 10.0, 10.0)
# few values, so that ties are common; all are exact in binary
eighths = st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=12)


def levels_of_raters(num=1024):
    """Levels t in the middle of equal cells: none equals a multiple of 1/8."""
    return (np.arange(num) + 0.5) / num


def brute_force_volumes(p):
    """|{p >= t}| of many nested raters, sorted."""
    return np.sort([(np.asarray(p) >= t).sum() for t in levels_of_raters()])


def one_channel(p):
    return torch.tensor(p, dtype=torch.float32).view(1, 1, -1)


@given(p=eighths, level=st.integers(1, 16).map(lambda k: k / 16))
def test_a_quantile_is_that_of_nested_raters_by_brute_force(p, level):
    volumes = brute_force_volumes(p)
    # the smallest volume that a share `level` of the raters or more do not exceed
    expected = volumes[int(np.ceil(level * len(volumes))) - 1]
    assert volume_quantiles(one_channel(p), [level], spacing_mm=VOXELS).item() == expected


@given(p=eighths)
def test_the_quantiles_at_0_and_1_are_0_and_the_number_of_possible_voxels(p):
    ends = volume_quantiles(one_channel(p), [0, 1], spacing_mm=VOXELS)
    assert ends.flatten().tolist() == [0, np.count_nonzero(p)]


@given(p=eighths)
def test_the_mean_of_the_distribution_is_the_expected_volume(p):
    prob, num = one_channel(p), 64
    # the quantile function is constant between multiples of 1/8, so the mean of its middles is its integral
    middles = (np.arange(num) + 0.5) / num
    mean = volume_quantiles(prob, middles.tolist(), spacing_mm=VOXELS).mean().item()
    assert mean == pytest.approx(volume_ml(prob, spacing_mm=VOXELS).item())


@given(p=eighths, level=st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.95]))
def test_an_interval_has_at_least_its_level_of_nested_raters_and_no_tail_has_more_than_half_the_rest(
    p, level
):
    low, high = (end.item() for end in volume_interval(one_channel(p), level, spacing_mm=VOXELS))
    volumes = brute_force_volumes(p)
    cell = 1 / len(volumes)
    assert ((volumes >= low) & (volumes <= high)).mean() >= level - 2 * cell
    assert max((volumes < low).mean(), (volumes > high).mean()) <= (1 - level) / 2 + cell


@given(p=eighths, first=st.floats(0.01, 0.99), second=st.floats(0.01, 0.99))
def test_an_interval_of_a_higher_level_contains_that_of_a_lower_one(p, first, second):
    narrow, wide = (
        volume_interval(one_channel(p), level, spacing_mm=VOXELS) for level in sorted((first, second))
    )
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_of_a_level_does_not_count_a_voxel_whose_probability_ties_with_it(dtype):
    # 1 - 0.9 is less than 0.1 in floating point
    prob = torch.tensor([[[0.1, 0.1, 0.3]]], dtype=dtype)
    assert volume_quantiles(prob, [0.9], spacing_mm=VOXELS).item() == 1


def test_volumes_scale_with_the_voxel_and_each_case_has_its_own():
    prob, masks = torch.rand(2, 1, 4, 5), torch.rand(2, 3, 4, 5) < 0.5
    spacing = torch.tensor([[1.0, 1, 1], [2, 1, 5]])
    sizes = torch.tensor([0.001, 0.01], dtype=torch.float64)
    voxels = rater_volumes_ml(masks, num_channels=1, spacing_mm=VOXELS)
    in_ml = rater_volumes_ml(masks, num_channels=1, spacing_mm=spacing)
    torch.testing.assert_close(in_ml, voxels * sizes.view(2, 1, 1))
    torch.testing.assert_close(
        volume_quantiles(prob, [0.3, 0.7], spacing_mm=spacing),
        volume_quantiles(prob, [0.3, 0.7], spacing_mm=VOXELS) * sizes.view(2, 1, 1),
    )


def test_the_volume_of_a_rater_is_the_number_of_voxels_of_each_class():
    maps = class_map((2, 3, 4, 5), 3)
    volumes = rater_volumes_ml(maps, num_channels=3, spacing_mm=VOXELS)
    for case in range(2):
        for rater in range(3):
            expected = np.bincount(maps[case, rater].flatten(), minlength=3)
            assert volumes[case, :, rater].tolist() == expected.tolist()
    foreground = rater_volumes_ml(maps == 1, num_channels=1, spacing_mm=VOXELS)
    torch.testing.assert_close(foreground, volumes[:, 1:2])


def test_invalid_voxels_and_absent_raters_do_not_count():
    prob, masks = soft_label(2, 2, 30), torch.rand(2, 3, 30) < 0.5
    valid = torch.rand(2, 30) < 0.6
    present = torch.tensor([[True, False, True], [True, True, True]])
    volumes = rater_volumes_ml(masks, num_channels=2, spacing_mm=VOXELS, present=present, valid=valid)
    quantiles = volume_quantiles(prob, [0.5, 0.9], spacing_mm=VOXELS, valid=valid)
    assert volumes[0, :, 1].isnan().all()
    for case in range(2):
        kept, raters = prob[case : case + 1, :, valid[case]], masks[case : case + 1, present[case]]
        alone = rater_volumes_ml(raters[..., valid[case]], num_channels=2, spacing_mm=VOXELS)
        torch.testing.assert_close(volumes[case : case + 1, :, present[case]], alone)
        torch.testing.assert_close(
            volume_quantiles(kept, [0.5, 0.9], spacing_mm=VOXELS)[0], quantiles[case], rtol=0, atol=0
        )


def test_a_case_without_a_valid_voxel_is_nan():
    prob, masks = soft_label(2, 2, 6), torch.rand(2, 3, 6) < 0.5
    options = {"spacing_mm": VOXELS, "valid": torch.tensor([[False] * 6, [True] * 6])}
    volumes = rater_volumes_ml(masks, num_channels=2, **options)
    for found in (volumes, volume_quantiles(prob, [0.5], **options), volume_ml(prob, **options)):
        assert found[0].isnan().all()
        assert found[1].isfinite().all()


BYTES = torch.full((1, 2, 4, 5), 255, dtype=torch.uint8)
SIGMOIDS, IMAGES = torch.full((2, 3, 4, 5), 0.4), torch.full((2, 40, 48), 0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "overlapping channels": (lambda: volume_ml(SIGMOIDS, spacing_mm=VOXELS), "exclusive=False"),
        "their interval": (lambda: volume_interval(SIGMOIDS, spacing_mm=VOXELS), "must sum to one"),
        "images without a class axis": (lambda: volume_ml(IMAGES, spacing_mm=VOXELS), ".unsqueeze(1)"),
        "masks without a class axis": (lambda: volume_ml(IMAGES > 0, spacing_mm=VOXELS), ".unsqueeze(1)"),
        "logits": (lambda: volume_ml(4 * SIGMOIDS[:, :1], spacing_mm=VOXELS), "logits"),
        "a class map": (lambda: volume_ml(BYTES, spacing_mm=VOXELS), "bool masks"),
        "masks of 0 and 255": (
            lambda: rater_volumes_ml(BYTES, num_channels=1, spacing_mm=VOXELS),
            "masks > 0",
        ),
        "a third class": (
            lambda: rater_volumes_ml(BYTES // 127, num_channels=2, spacing_mm=VOXELS),
            "below 2",
        ),
        "a level in percent": (lambda: volume_interval(SIGMOIDS[:, :1], 90, spacing_mm=VOXELS), "level"),
        "two sides": (lambda: volume_ml(SIGMOIDS[:, :1], spacing_mm=(1, 1)), "slice thickness"),
    }.values(),
)
def test_what_would_give_a_wrong_volume_is_refused_with_the_way_out(call, words):
    refused(call, words)


def test_masks_of_overlapping_channels_are_counted_and_what_is_not_valid_may_hold_anything():
    both = decide(SIGMOIDS + 0.2, "threshold:0.5", exclusive=False)
    assert volume_ml(both, spacing_mm=VOXELS).tolist() == [[20.0] * 3] * 2
    valid = torch.tensor([[[True] * 5] * 3 + [[False] * 5]])
    masks = torch.where(valid.unsqueeze(1), BYTES // 255, BYTES)
    present = torch.tensor([[True, False]])
    masks[:, 1] = 7
    volumes = rater_volumes_ml(masks, num_channels=1, spacing_mm=VOXELS, present=present, valid=valid)
    assert volumes[0, 0, 0] == 15
    prob = torch.where(valid.unsqueeze(1), SIGMOIDS[:1, :1], torch.nan)
    assert volume_ml(prob, spacing_mm=VOXELS, valid=valid).item() == pytest.approx(6.0)


@pytest.fixture(scope="module")
def nested_phantom():
    """Raters who differ by an offset of the outline, which is a level of the true probability."""
    only_offset = {"bias": 0.0, "wobble": 0.0, "miss": 0.0, "offset": 1.5}
    return make_phantom(100, size=(96, 96), num_raters=40, seed=2, **only_offset)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_intervals_of_the_true_probability_cover_raters_who_differ_by_an_offset_at_the_nominal_level(
    nested_phantom, level
):
    low, high = volume_interval(nested_phantom.prob[:, 1:], level, spacing_mm=VOXELS)
    volumes = rater_volumes_ml(nested_phantom.masks, num_channels=1, spacing_mm=VOXELS)
    coverage = ((volumes >= low.unsqueeze(2)) & (volumes <= high.unsqueeze(2))).double().mean().item()
    # 4000 independent offsets: a standard deviation of 0.8 points or less
    assert coverage == pytest.approx(level, abs=0.02)
