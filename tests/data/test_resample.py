"""Resizing: images, probabilities and class maps stay aligned and keep their mass."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from semidice.data.resample import resize_classes, resize_image, resize_probability, resize_soft_label

SIZES = [(23, 31), (24, 40), (48, 80), (47, 81), (64, 100), (40, 96), (90, 50), (1, 1)]
LENGTHS = st.integers(1, 40)


def area_by_hand(image, size):
    """Mean over the area of each new pixel: repeat pixels until both grids match, then average blocks."""
    for axis, length in zip((0, 1), size, strict=True):
        repeated = np.repeat(image.astype(np.float64), length, axis)
        blocks = np.moveaxis(repeated, axis, 0).reshape(length, -1, image.shape[1 - axis])
        image = np.moveaxis(blocks.mean(1), 0, axis)
    return image


def blob(size, *, centre, radius):
    """A disc with a soft edge, its centre and radius as fractions of the image's sides."""
    rows, columns = ((np.arange(length) + 0.5) / length for length in size)
    distance = np.hypot(rows[:, None] - centre[0], columns[None] - centre[1])
    return (1 / (1 + np.exp((distance - radius) / 0.02))).astype(np.float32)


def centroid(image):
    """The centroid as fractions of the image's sides."""
    return (np.array(ndimage.center_of_mass(image)) + 0.5) / image.shape


@given(st.tuples(LENGTHS, LENGTHS), st.data())
def test_downsampled_pixels_are_means_over_their_area(shape, data):
    size = tuple(data.draw(st.integers(1, length)) for length in shape)
    image = np.random.default_rng(shape).random(shape).astype(np.float32)
    np.testing.assert_allclose(resize_image(image, size), area_by_hand(image, size), rtol=1e-5)


@given(st.tuples(LENGTHS, LENGTHS), st.data())
def test_upsampled_pixels_are_interpolated_linearly_between_centres(shape, data):
    size = tuple(data.draw(st.integers(length, 90)) for length in shape)
    image = torch.rand(2, 3, *shape, dtype=torch.float64)
    expected = torch.nn.functional.interpolate(image, size, mode="bilinear", align_corners=False)
    # float32 against float64
    np.testing.assert_allclose(resize_image(image.numpy(), size), expected.numpy(), rtol=0, atol=1e-6)


def test_the_same_size_changes_no_bit():
    image = np.random.default_rng(0).normal(size=(2, 17, 19)).astype(np.float32)
    classes = np.random.default_rng(0).integers(0, 3, (2, 17, 19), dtype=np.uint8)
    assert np.array_equal(resize_image(image, (17, 19)), image)
    assert np.array_equal(resize_classes(classes, (17, 19), num_classes=3), classes)


@pytest.mark.parametrize("size", SIZES)
def test_a_constant_image_stays_constant_and_values_stay_in_the_range_of_the_input(size):
    image = np.random.default_rng(0).random((48, 80)).astype(np.float32)
    resized = resize_image(image, size)
    assert image.min() <= resized.min() <= resized.max() <= image.max()
    assert np.array_equal(resize_image(np.full_like(image, 0.1), size), np.full(size, np.float32(0.1)))


@pytest.mark.parametrize("size", SIZES[:-1])
@pytest.mark.parametrize("centre", [(0.3, 0.4), (0.62, 0.71)])
def test_a_marker_keeps_its_position_in_image_label_and_mask(size, centre):
    marker = blob((48, 80), centre=centre, radius=0.2)
    label = np.stack([1 - marker, marker])
    mask = (marker > 0.5).astype(np.uint8)
    # half a pixel of the coarser grid; image and label differ far less, because they use the same weights
    half = 0.5 / np.minimum(size, (48, 80))
    image_at = centroid(resize_image(marker, size))
    label_at = centroid(resize_probability(label, size)[1])
    mask_at = centroid(resize_classes(mask, size, num_classes=2))
    assert (np.abs(image_at - centroid(marker)) < half / 10).all()
    assert (np.abs(label_at - image_at) < 1e-4).all()
    assert (np.abs(mask_at - image_at) < half).all()


@pytest.mark.parametrize("size", SIZES)
def test_probabilities_stay_valid_and_keep_their_mass(size):
    seen = blob((48, 80), centre=(0.4, 0.45), radius=0.15)
    inner = 0.5 * blob((48, 80), centre=(0.42, 0.45), radius=0.07)
    prob = np.stack([1 - seen, seen - seen * inner, seen * inner])
    resized = resize_probability(prob, size)
    assert resized.min() >= 0
    assert resized.max() <= 1
    np.testing.assert_allclose(resized.sum(0), 1, rtol=0, atol=1e-6)
    scale = np.prod(size) / seen.size
    np.testing.assert_allclose(resized[1:].sum((1, 2)), prob[1:].sum((1, 2)) * scale, rtol=0.01)


def test_downsampling_keeps_the_mass_of_a_single_voxel_exactly():
    for row in range(0, 50, 7):
        prob = np.zeros((2, 50, 64), dtype=np.float32)
        prob[1, row, 13] = 0.75
        prob[0] = 1 - prob[1]
        resized = resize_probability(prob, (31, 20))
        assert resized[1].sum() == pytest.approx(0.75 * 31 * 20 / (50 * 64), rel=1e-5)


@given(st.tuples(LENGTHS, LENGTHS), st.tuples(LENGTHS, LENGTHS), st.integers(2, 5))
def test_each_pixel_gets_the_most_probable_class_and_at_a_tie_the_lowest(shape, size, num_classes):
    classes = np.random.default_rng([*shape, *size]).integers(0, num_classes, (2, *shape), dtype=np.uint8)
    votes = (classes[:, None] == np.arange(num_classes)[:, None, None]).astype(np.float64)
    prob = resize_image(votes, size).astype(np.float64)
    chosen = resize_classes(classes, size, num_classes=num_classes)
    highest = prob.max(1)
    taken = np.take_along_axis(prob, chosen[:, None].astype(np.intp), 1)[:, 0]
    # in float32, probabilities that differ by about 1e-7 may count as a tie
    np.testing.assert_allclose(taken, highest, rtol=0, atol=1e-6)
    lower = np.where(np.arange(num_classes)[:, None, None] < chosen[:, None], prob, 0).max(1)
    assert (lower <= taken + 1e-6).all()


@pytest.mark.parametrize("factor", [2, 6, 10, 14])
def test_a_class_that_covers_exactly_half_becomes_background_for_every_factor(factor):
    half = np.zeros((factor * 3, factor * 3), dtype=np.uint8)
    half[:, ::2] = 1
    assert not resize_classes(half, (3, 3), num_classes=2).any()
    # one voxel more than half of the last pixel
    half[-1, -1] = 1
    expected = np.zeros((3, 3), dtype=np.uint8)
    expected[2, 2] = 1
    assert np.array_equal(resize_classes(half, (3, 3), num_classes=2), expected)


def test_a_new_voxel_of_a_soft_label_is_valid_if_half_of_it_is():
    label, valid = np.full((1, 9), 0.25), np.arange(9) < 5
    for length in (2, 3, 5, 18, 27):
        new, inside = resize_soft_label(label, (length,), valid=valid)
        # the border is at 5/9, and a voxel whose centre is on it counts
        centre = (2 * np.arange(length) + 1) * 9
        assert inside.tolist() == (centre <= 2 * length * 5).tolist(), length
        np.testing.assert_allclose(new[0], np.where(inside, 0.25, 0), rtol=1e-6)
