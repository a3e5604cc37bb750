"""Conversion of a scan to stored arrays: intensities, slices, sizes and spacing, compared with numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from start import refused

from semidice.data.convert import convert_scan
from semidice.data.geometry import Grid
from semidice.data.intensities import levels_of
from semidice.data.manifest import PrepareOptions
from semidice.data.packing import unpack_classes
from semidice.data.sources.raw import RawDataset, ScanArrays

RATERS = ("a", "b", "c")
# float32 intensities are rounded once before they are rounded to a level
HALF_A_LEVEL = 0.5 / 32767 + 1e-6


def make_scan(image, masks=None, *, raters=RATERS, num_classes=2, truth=None, seed=0):
    space = image.shape[1:]
    if masks is None:
        masks = np.random.default_rng(seed).integers(0, num_classes, (len(raters), *space), dtype=np.uint8)
    spacing = (0.5, 0.75, 3.0)[: len(space)]
    return ScanArrays(image, masks, raters, Grid(space, spacing), truth=truth)


def noise(*shape, low=-1000.0, high=1000.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def convert(scan, *, num_classes=2, raters=RATERS, **options):
    facts = {"source": "test", "root": Path(), "read": None, "channels": ("CT",), "scans": ()}
    names, chosen = tuple(map(str, range(num_classes))), PrepareOptions(**options)
    return convert_scan(scan, RawDataset(class_names=names, raters=raters, options=chosen, **facts))


def classes_of(stored, *, num_classes=2):
    packed = torch.from_numpy(stored.masks)
    space = stored.images.shape[2:]
    return unpack_classes(packed, width=space[-1], num_classes=num_classes, num_space_axes=len(space)).numpy()


def test_a_window_is_scaled_to_0_to_1_within_half_a_level_and_clipped():
    image = noise(2, 31, 33)
    stored = convert(make_scan(image), window=(-60, 140))
    assert stored.images.dtype == np.int16
    assert stored.images.shape == (1, 2, 31, 33)
    expected = np.clip((image.astype(np.float64) + 60) / 200, 0, 1)
    assert np.abs(stored.images[0] / 32767 - expected).max() <= HALF_A_LEVEL
    assert stored.images.min() == 0
    assert stored.images.max() == 32767


def test_without_a_window_the_percentiles_of_each_channel_become_0_and_1():
    image = noise(2, 20, 21, 6) * np.array([1, 1000], dtype=np.float32).reshape(2, 1, 1, 1)
    stored = convert(make_scan(image), slices="all")
    for channel in range(2):
        low, high = np.percentile(image[channel].astype(np.float64), (0.5, 99.5))
        expected = np.clip((image[channel] - low) / (high - low), 0, 1)
        assert np.abs(stored.images[:, channel] / 32767 - np.moveaxis(expected, 2, 0)).max() <= HALF_A_LEVEL


def test_the_extremes_become_0_and_1_if_both_percentiles_are_equal():
    image = np.zeros((1, 40, 40), dtype=np.float32)
    image[0, 3, 4:6] = 20, 40
    stored = convert(make_scan(image))
    assert stored.images[0, 0, 3, 4:6].tolist() == [16384, 32767]
    assert stored.images.sum() == 16384 + 32767


def test_images_of_8_bits_are_kept_without_a_window_and_scaled_with_a_window():
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 18), dtype=np.uint8)
    kept = convert(make_scan(image), keep_bytes=True)
    assert kept.images.dtype == np.uint8
    assert levels_of(kept.images.dtype) == 255
    assert np.array_equal(kept.images[0], image)
    scaled = convert(make_scan(image), window=(50, 150))
    assert levels_of(scaled.images.dtype) == 32767
    assert np.abs(scaled.images[0] / 32767 - np.clip((image - 50.0) / 100, 0, 1)).max() <= HALF_A_LEVEL
    halved = convert(make_scan(image), size=(8, 9), keep_bytes=True).images
    means = image.reshape(8, 2, 9, 2).mean((1, 3))
    assert halved.dtype == np.uint8
    assert np.abs(halved[0, 0] - means).max() <= 0.5


def test_values_outside_the_window_are_clipped_before_resizing():
    image = np.array([[[3000.0, 0, 0, 0]] * 4], dtype=np.float32)
    stored = convert(make_scan(image), window=(0, 100), size=(2, 2))
    assert stored.images[0, 0].tolist() == [[16384, 0], [16384, 0]]


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_masks_without_resizing_are_exact_and_absent_raters_have_zeros(num_classes):
    scan = make_scan(noise(1, 13, 21), raters=("c", "a"), num_classes=num_classes)
    classes = classes_of(convert(scan, num_classes=num_classes), num_classes=num_classes)
    assert np.array_equal(classes[0, 2], scan.masks[0])
    assert np.array_equal(classes[0, 0], scan.masks[1])
    assert not classes[0, 1].any()


def test_the_mask_of_each_rater_is_resized_separately_by_majority():
    masks = np.random.default_rng(0).integers(0, 2, (3, 24, 36), dtype=np.uint8)
    stored = convert(make_scan(noise(1, 24, 36), masks), size=(8, 12))
    expected = masks.reshape(3, 8, 3, 12, 3).sum((2, 4)) > 4.5
    assert np.array_equal(classes_of(stored)[0], expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_cut_along_their_axis_and_the_other_two_keep_their_order(axis):
    image, masks = noise(2, 5, 6, 7), np.random.default_rng(0).integers(0, 2, (3, 5, 6, 7), dtype=np.uint8)
    stored = convert(make_scan(image, masks), slices="all", slice_axis=axis, window=(-1000, 1000))
    space = [length for number, length in enumerate((5, 6, 7)) if number != axis]
    spacing = [side for number, side in enumerate((0.5, 0.75, 3.0)) if number != axis]
    assert stored.slices == tuple(range((5, 6, 7)[axis]))
    assert stored.images.shape[2:] == tuple(space)
    assert (*stored.grid.spacing_mm, stored.thickness_mm) == (*spacing, (0.5, 0.75, 3.0)[axis])
    for number in stored.slices:
        expected = (image.take(number, axis + 1) + 1000) / 2000
        assert np.abs(stored.images[number] / 32767 - expected).max() <= HALF_A_LEVEL
        assert np.array_equal(classes_of(stored)[number], masks.take(number, axis + 1))


def test_foreground_slices_are_those_where_any_rater_drew_any_class():
    masks = np.zeros((3, 8, 8, 6), dtype=np.uint8)
    masks[2, 1, 1, 1] = 2
    masks[0, 1, 1, 4] = 1
    scan = make_scan(noise(1, 8, 8, 6), masks)
    assert convert(scan, slices="foreground", num_classes=3).slices == (1, 4)
    empty = make_scan(noise(1, 8, 8, 6), np.zeros_like(masks))
    assert convert(empty, slices="foreground") is None
    assert convert(empty, slices="all").slices == (0, 1, 2, 3, 4, 5)


def test_an_unsliced_volume_is_one_case_of_its_raw_size():
    stored = convert(make_scan(noise(1, 8, 9, 6)), size=(4, 4))
    assert stored.slices is None
    assert stored.images.shape == (1, 1, 8, 9, 6)
    assert stored.grid.spacing_mm == (0.5, 0.75, 3.0)


def test_an_image_of_two_axes_is_one_case_even_if_slices_are_requested():
    masks = np.zeros((3, 8, 9), dtype=np.uint8)
    stored = convert(make_scan(noise(1, 8, 9), masks), slices="foreground")
    assert stored.slices is None
    assert stored.images.shape[2:] == (8, 9)


def test_resizing_keeps_the_extent_in_mm():
    stored = convert(make_scan(noise(1, 40, 30)), size=(16, 48))
    assert stored.grid.spacing_mm == pytest.approx((40 * 0.5 / 16, 30 * 0.75 / 48))
    cut = convert(make_scan(noise(1, 40, 30, 4)), size=(16, 48), slices="all")
    assert (*cut.grid.spacing_mm, cut.thickness_mm) == pytest.approx((40 * 0.5 / 16, 30 * 0.75 / 48, 3.0))


def test_the_truth_is_kept_or_resized_with_the_same_probability_mass():
    chance = noise(1, 32, 32, low=0, high=0.9)
    truth = np.concatenate([1 - chance, chance])
    kept = convert(make_scan(noise(1, 32, 32), truth=truth))
    assert np.array_equal(kept.truth[0], truth)
    coarse = convert(make_scan(noise(1, 32, 32), truth=truth), size=(12, 20)).truth
    assert coarse.shape == (1, 2, 12, 20)
    assert coarse.dtype == np.float32
    np.testing.assert_allclose(coarse.sum(1), 1, rtol=0, atol=1e-6)
    assert coarse[0, 1].sum() == pytest.approx(chance.sum() * 240 / 1024, rel=1e-4)


@pytest.mark.parametrize(
    ("image", "options", "words"),
    [
        (np.full((1, 4, 4), 7, dtype=np.uint8), {}, ["channel 1", "7 everywhere"]),
        (np.stack([noise(4, 4), np.zeros((4, 4), np.float32)]), {}, ["channel 2", "0 everywhere"]),
        (noise(1, 4, 4, low=0, high=1), {"window": (50, 90)}, ["(50, 90)", "choose another --window"]),
        (noise(1, 4, 4, low=500, high=900), {"window": (50, 90)}, ["(50, 90)", "choose another --window"]),
        (noise(1, 4, 4), {"keep_bytes": True}, ["channel 1", "0 to 255", "8 bits"]),
        (np.array([[[0, 1, np.nan, 2]]], dtype=np.float32), {}, ["channel 1", "not finite"]),
        (np.array([[[0, 1, 3, np.inf]]], dtype=np.float32), {}, ["channel 1", "not finite"]),
    ],
)
def test_an_image_without_usable_intensities_is_refused(image, options, words):
    refused(lambda: convert(make_scan(image), **options), *words)
