"""Conversion of a scan to stored arrays: intensities, slices, sizes and spacing, compared with numpy."""

from pathlib import Path

import numpy as np
import pytest
from start import refused

from semidice.data.convert import convert_scan
from semidice.data.geometry import Grid
from semidice.data.manifest import PrepareOptions
from semidice.data.packing import unpack_case
from semidice.data.sources.raw import RawDataset, ScanArrays

RATERS = ("a", "b", "c")
# float32 intensities are rounded once before they are rounded to a level
HALF_A_LEVEL = 0.5 / 32767 + 1e-6


def make_scan(image, masks=None, *, raters=RATERS, num_classes=2, truth=None):
    space = image.shape[1:]
    if masks is None:
        masks = np.random.default_rng(0).integers(0, num_classes, (len(raters), *space), dtype=np.uint8)
    return ScanArrays(image, masks, raters, Grid(space, (0.5, 0.75, 3.0)[: len(space)]), truth=truth)


def noise(*shape, low=-1000.0, high=1000.0):
    return np.random.default_rng(0).uniform(low, high, shape).astype(np.float32)


def convert(scan, *, num_classes=2, **options):
    """The stored scan, its intensities and its class maps (S, R, *space)."""
    facts = {"source": "test", "root": Path(), "read": None, "channels": ("CT",), "scans": ()}
    names, chosen = tuple(map(str, range(num_classes))), PrepareOptions(**options)
    stored = convert_scan(scan, RawDataset(class_names=names, raters=RATERS, options=chosen, **facts))
    if not stored.arrays:
        return stored, None, None
    images, width = stored.arrays["images"], stored.grid.shape[-1]
    return (
        stored,
        images / np.iinfo(images.dtype).max,
        [unpack_case(packed, width=width) for packed in stored.arrays["masks"]],
    )


def test_a_window_is_scaled_to_0_to_1_within_half_a_level_and_clipped():
    image = noise(2, 31, 33)
    _, images, _ = convert(make_scan(image), window=(-60, 140))
    assert images.shape == (1, 2, 31, 33)
    expected = np.clip((image.astype(np.float64) + 60) / 200, 0, 1)
    assert np.abs(images[0] - expected).max() <= HALF_A_LEVEL
    assert (images.min(), images.max()) == (0, 1)


def test_without_a_window_the_percentiles_of_each_channel_become_0_and_1():
    image = noise(2, 20, 21, 6) * np.array([1, 1000], dtype=np.float32).reshape(2, 1, 1, 1)
    _, images, _ = convert(make_scan(image), slices="all")
    for channel in range(2):
        low, high = np.percentile(image[channel].astype(np.float64), (0.5, 99.5))
        expected = np.clip((image[channel] - low) / (high - low), 0, 1)
        assert np.abs(images[:, channel] - np.moveaxis(expected, 2, 0)).max() <= HALF_A_LEVEL


def test_the_extremes_become_0_and_1_if_both_percentiles_are_equal():
    image = np.zeros((1, 40, 40), dtype=np.float32)
    image[0, 3, 4:6] = 20, 40
    stored = convert(make_scan(image))[0].arrays["images"]
    assert stored[0, 0, 3, 4:6].tolist() == [16384, 32767]
    assert stored.sum() == 16384 + 32767


def test_8_bits_are_kept_or_rounded_after_resizing():
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 18), dtype=np.uint8)
    kept = convert(make_scan(image), keep_bytes=True)[0].arrays["images"]
    assert kept.dtype == np.uint8
    assert np.array_equal(kept[0], image)
    halved = convert(make_scan(image), size=(8, 9), keep_bytes=True)[0].arrays["images"]
    assert halved.dtype == np.uint8
    assert np.abs(halved[0, 0] - image.reshape(8, 2, 9, 2).mean((1, 3))).max() <= 0.5


def test_values_outside_the_window_are_clipped_before_resizing():
    image = np.array([[[3000.0, 0, 0, 0]] * 4], dtype=np.float32)
    stored = convert(make_scan(image), window=(0, 100), size=(2, 2))[0].arrays["images"]
    assert stored[0, 0].tolist() == [[16384, 0], [16384, 0]]


@pytest.mark.parametrize("num_classes", [2, 5])
def test_masks_without_resizing_are_exact_and_absent_raters_have_zeros(num_classes):
    scan = make_scan(noise(1, 13, 21), raters=("c", "a"), num_classes=num_classes)
    stored, _, (classes,) = convert(scan, num_classes=num_classes)
    assert np.array_equal(classes[[2, 0]], scan.masks)
    assert not classes[1].any()
    assert stored.drawn == tuple(range(num_classes))


def test_the_mask_of_each_rater_is_resized_separately_by_majority():
    masks = np.random.default_rng(0).integers(0, 2, (3, 24, 36), dtype=np.uint8)
    _, _, (classes,) = convert(make_scan(noise(1, 24, 36), masks), size=(8, 12))
    assert np.array_equal(classes, masks.reshape(3, 8, 3, 12, 3).sum((2, 4)) > 4.5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_cut_along_their_axis_and_the_other_two_keep_their_order(axis):
    image, sides = noise(2, 5, 6, 7), (0.5, 0.75, 3.0)
    scan = make_scan(image)
    stored, images, classes = convert(scan, slices="all", slice_axis=axis, window=(-1000, 1000))
    kept = [number for number in range(3) if number != axis]
    assert stored.slices == tuple(range((5, 6, 7)[axis]))
    assert stored.grid.shape == images.shape[2:] == tuple((5, 6, 7)[number] for number in kept)
    assert stored.grid.spacing_mm == tuple(sides[number] for number in kept)
    assert stored.thickness_mm == sides[axis]
    for number in stored.slices:
        assert np.abs(images[number] - (image.take(number, axis + 1) + 1000) / 2000).max() <= HALF_A_LEVEL
        assert np.array_equal(classes[number], scan.masks.take(number, axis + 1))


def test_foreground_slices_are_those_where_any_rater_drew_any_class():
    masks = np.zeros((3, 8, 8, 6), dtype=np.uint8)
    masks[2, 1, 1, 1] = 2
    masks[0, 1, 1, 4] = 1
    image = noise(1, 8, 8, 6)
    assert convert(make_scan(image, masks), slices="foreground", num_classes=3)[0].slices == (1, 4)
    empty, *_ = convert(make_scan(image, np.zeros_like(masks)), slices="foreground")
    assert (empty.slices, empty.arrays) == ((), {})


@pytest.mark.parametrize(("space", "options"), [((8, 9, 6), {"size": (4, 4)}), ((8, 9), {"slices": "all"})])
def test_a_whole_volume_and_a_single_image_are_one_case_of_their_own_size(space, options):
    stored, images, _ = convert(make_scan(noise(1, *space)), **options)
    assert (stored.slices, stored.thickness_mm, images.shape[2:]) == (None, None, space)
    assert stored.grid.spacing_mm == (0.5, 0.75, 3.0)[: len(space)]


def test_resizing_keeps_the_extent_in_mm():
    expected = pytest.approx((40 * 0.5 / 16, 30 * 0.75 / 48))
    assert convert(make_scan(noise(1, 40, 30)), size=(16, 48))[0].grid.spacing_mm == expected
    cut, *_ = convert(make_scan(noise(1, 40, 30, 4)), size=(16, 48), slices="all")
    assert (cut.grid.spacing_mm, cut.thickness_mm) == (expected, 3.0)


def test_the_truth_is_kept_or_resized_with_the_same_probability_mass():
    chance = noise(1, 32, 32, low=0, high=0.9)
    scan = make_scan(noise(1, 32, 32), truth=np.concatenate([1 - chance, chance]))
    assert np.array_equal(convert(scan)[0].arrays["truth"][0], scan.truth)
    coarse = convert(scan, size=(12, 20))[0].arrays["truth"]
    assert (coarse.shape, coarse.dtype) == ((1, 2, 12, 20), np.float32)
    np.testing.assert_allclose(coarse.sum(1), 1, rtol=0, atol=1e-6)
    assert coarse[0, 1].sum() == pytest.approx(chance.sum() * 240 / 1024, rel=1e-4)


@pytest.mark.parametrize(
    ("image", "options", "words"),
    [
        (np.stack([noise(4, 4), np.zeros((4, 4), np.float32)]), {}, ["channel 2", "0 everywhere"]),
        (noise(1, 4, 4, low=0, high=1), {"window": (50, 90)}, ["(50, 90)", "choose another --window"]),
        (noise(1, 4, 4, low=500, high=900), {"window": (50, 90)}, ["(50, 90)", "choose another --window"]),
        (noise(1, 4, 4), {"keep_bytes": True}, ["channel 1", "0 to 255", "8 bits"]),
        (np.array([[[0, 1, np.nan, 2]]], dtype=np.float32), {}, ["channel 1", "not finite"]),
    ],
)
def test_an_image_without_usable_intensities_is_refused(image, options, words):
    refused(lambda: convert(make_scan(image), **options), *words)
