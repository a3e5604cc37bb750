"""Augmentation: labels stay probabilities, image and label stay aligned, voxels outside are invalid."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from start import refused

from semidice.data.batches.augment import (
    AugmentOptions,
    augment_image,
    draw_augmentation,
    resample_label,
    sampling_grid,
)

UNIT = {"mean": torch.zeros(1), "std": torch.ones(1)}


def run_augment(image, label, sizes, params, options, out_size, *, hard=False, **intensities):
    params = torch.from_numpy(np.asarray(params, dtype=np.float32))
    space = image.shape[2:]
    grid, valid = sampling_grid(params, torch.tensor(sizes), options, space=space, out_size=out_size)
    image = augment_image(image, grid, valid, params, options, **(UNIT | intensities))
    return image, resample_label(label, grid, hard=hard), valid


def draw_params(options, sizes, out_size, seed=0):
    return draw_augmentation(options, np.random.default_rng(seed), np.array(sizes), out_size)


def identity(num_cases, dims):
    """Parameters of the identity: each case stays in the corner of a larger output."""
    return np.tile([*np.eye(dims).ravel(), *np.zeros(dims + 4)], (num_cases, 1))


def random_label(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).pow(4).softmax(1)


def blob(size, centre, width=2.5):
    """A Gaussian bump (*size) around a position in voxels."""
    axes = np.meshgrid(*map(np.arange, size), indexing="ij")
    square = sum((axis - middle) ** 2 for axis, middle in zip(axes, centre, strict=True))
    return torch.from_numpy(np.exp(-square / (2 * width**2))).float()


@st.composite
def settings(draw):
    """Options, sizes of cases inside a space, and an output size; 2D and 3D."""
    dims = draw(st.integers(2, 3))
    longest = 24 if dims == 2 else 9
    side = st.integers(2, longest)
    sizes = draw(st.lists(st.tuples(*[side] * dims), min_size=1, max_size=3))
    out_size = draw(st.tuples(*[side] * dims))
    low = draw(st.floats(0.3, 1.5))
    # not the record itself: its checker of types draws random numbers
    options = {
        "scale": (low, draw(st.floats(low, 2.5))),
        "flip": draw(st.one_of(st.booleans(), st.tuples(*[st.booleans()] * dims))),
        "shift": draw(st.sampled_from([0, 0.5, 1])),
        "rotate_degrees": draw(st.sampled_from([0, 0, 20, 180])),
        "gamma": draw(st.sampled_from([0, 0.5])),
        "noise": draw(st.sampled_from([0, 0.2])),
        "contrast": draw(st.sampled_from([0, 0.3])),
        "brightness": draw(st.sampled_from([0, 0.3])),
    }
    space = tuple(int(side) for side in np.max(sizes, axis=0) + draw(st.integers(0, 3)))
    return options, sizes, space, out_size, draw(st.integers(0, 2**16))


@given(settings())
def test_labels_stay_probabilities_and_invalid_voxels_are_background(setting):
    changes, sizes, space, out_size, seed = setting
    options = AugmentOptions(**changes)
    image, label = torch.rand(len(sizes), 1, *space), random_label(len(sizes), 3, *space, seed=seed)
    params = draw_params(options, sizes, out_size, seed)
    image, label, valid = run_augment(image, label, sizes, params, options, out_size)
    assert image.shape == (len(sizes), 1, *out_size)
    assert label.shape == (len(sizes), 3, *out_size)
    assert label.min() >= 0
    assert label.max() <= 1
    torch.testing.assert_close(label.sum(1), torch.ones(len(sizes), *out_size), atol=1e-5, rtol=0)
    outside = ~valid.unsqueeze(1)
    assert not image[outside].any()
    assert not label[:, 1:][outside.expand(-1, 2, *out_size)].any()


@given(settings())
def test_a_hard_label_stays_hard(setting):
    changes, sizes, space, out_size, seed = setting
    options = AugmentOptions(**changes)
    image = torch.zeros(len(sizes), 1, *space)
    classes = torch.randint(3, (len(sizes), *space), generator=torch.Generator().manual_seed(seed))
    label = torch.stack([classes == number for number in range(3)], 1).float()
    params = draw_params(options, sizes, out_size, seed)
    _, result, valid = run_augment(image, label, sizes, params, options, out_size, hard=True)
    assert torch.equal(result, (result == 1).float())
    assert torch.equal(result.sum(1), torch.ones_like(result[:, 0]))
    assert (result[:, 0] == 1)[~valid].all()


@given(settings())
def test_padding_around_a_case_does_not_change_the_result(setting):
    changes, sizes, space, out_size, seed = setting
    options = AugmentOptions(**changes)
    options = replace(options, noise=0.0)
    image, label = torch.rand(len(sizes), 1, *space), random_label(len(sizes), 2, *space, seed=seed)
    other_image, other_label = image.clone(), label.clone()
    for number, size in enumerate(sizes):
        case = (slice(None), *(slice(side) for side in size))
        padding = torch.ones(space, dtype=torch.bool)
        padding[case[1:]] = False
        other_image[number, :, padding] = -100
        other_label[number, 0, padding], other_label[number, 1, padding] = 0, 1
    params = draw_params(options, sizes, out_size, seed)
    result = run_augment(image, label, sizes, params, options, out_size)
    other_result = run_augment(other_image, other_label, sizes, params, options, out_size)
    for first, second in zip(result, other_result, strict=True):
        assert torch.equal(first, second)


@given(settings())
def test_sampling_equals_linear_interpolation_of_scipy_with_repeated_edges(setting):
    changes, sizes, space, out_size, seed = setting
    options = AugmentOptions(**changes)
    options = replace(options, noise=0.0, gamma=0.0, contrast=0.0, brightness=0.0)
    image, label = torch.rand(len(sizes), 1, *space), random_label(len(sizes), 2, *space)
    params = draw_params(options, sizes, out_size, seed)
    result = run_augment(image, label, sizes, params, options, out_size)
    dims = len(out_size)
    index = np.stack(np.meshgrid(*map(np.arange, out_size), indexing="ij"), -1)
    for number, size in enumerate(sizes):
        matrix = params[number, : dims * dims].reshape(dims, dims).astype(np.float64)
        position = index @ matrix.T + params[number, dims * dims : -4]
        # at the border, float32 rounding decides whether a position is inside
        at_border = np.isclose(position, -0.5, atol=1e-4) | np.isclose(
            position, np.array(size) - 0.5, atol=1e-4
        )
        away_from_border = ~at_border.any(-1)
        valid = ((position >= -0.5) & (position <= np.array(size) - 0.5)).all(-1)
        assert np.array_equal(result[2][number].numpy()[away_from_border], valid[away_from_border])
        case = tuple(slice(side) for side in size)
        expected = ndimage.map_coordinates(
            image[number, 0][case].double().numpy(), np.moveaxis(position, -1, 0), order=1, mode="nearest"
        )
        compared = away_from_border & valid
        # float32 positions of up to 60 voxels have errors of a few millionths
        np.testing.assert_allclose(result[0][number, 0].numpy()[compared], expected[compared], atol=3e-5)
        soft = ndimage.map_coordinates(
            label[number, 1][case].double().numpy(), np.moveaxis(position, -1, 0), order=1, mode="nearest"
        )
        np.testing.assert_allclose(result[1][number, 1].numpy()[compared], soft[compared], atol=3e-5)


def test_rounding_keeps_a_label_without_background_between_zero_and_one():
    options = AugmentOptions(rotate_degrees=180)
    label = torch.zeros(50, 4, 32, 32)
    label[:, 1:] = torch.tensor([0.7, 0.2, 0.1]).view(-1, 1, 1)
    sizes = [(32, 32)] * 50
    for foreground_label in (label, torch.stack([label[:, 0], torch.ones(50, 32, 32)], 1)):
        params = draw_params(options, sizes, (32, 32))
        _, result, valid = run_augment(
            torch.rand(50, 1, 32, 32), foreground_label, sizes, params, options, (32, 32)
        )
        assert result.min() >= 0
        assert result.max() <= 1
        inside = result[:, 1:].sum(1)[valid]
        torch.testing.assert_close(inside, torch.ones_like(inside), atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(20, 37), (32, 64), (7, 9, 11)])
def test_the_identity_returns_the_exact_input_with_invalid_voxels_around_it(size):
    image, label = torch.rand(2, 1, *size), random_label(2, 3, *size)
    out_size = tuple(side + 5 for side in size)
    options = AugmentOptions(rotate_degrees=10)
    result = run_augment(image, label, [size, size], identity(2, len(size)), options, out_size)
    case = (..., *(slice(side) for side in size))
    assert torch.equal(result[0][case], image)
    assert torch.equal(result[1][case][:, 1:], label[:, 1:])
    # the background is one minus the other classes, which rounds once more
    torch.testing.assert_close(result[1][case][:, 0], label[:, 0], atol=2e-7, rtol=0)
    assert result[2][case].all()
    assert int(result[2].sum()) == 2 * np.prod(size)


def test_flips_and_crops_without_scale_only_move_voxels():
    options = AugmentOptions(scale=(1, 1))
    image, label = torch.rand(40, 1, 20, 21), random_label(40, 2, 20, 21)
    params = draw_params(options, [(20, 21)] * 40, (16, 24))
    result, _, valid = run_augment(image, label, [(20, 21)] * 40, params, options, (16, 24))
    all_matches = set()
    for before, after, is_valid in zip(image[:, 0], result[:, 0], valid, strict=True):
        assert is_valid.sum() == 16 * 21
        matches = [
            (flip, top, left)
            for flip in ((), (0,), (1,), (0, 1))
            for top in range(5)
            for left in range(4)
            if torch.equal(before.flip(flip)[top : top + 16], after[:, left : left + 21])
        ]
        assert len(matches) == 1
        all_matches.update(matches)
    assert {match[0] for match in all_matches} == {(), (0,), (1,), (0, 1)}
    assert {match[1] for match in all_matches} == set(range(5))
    assert {match[2] for match in all_matches} == set(range(4))


def test_a_magnified_image_is_cropped_and_a_shrunk_image_is_placed_inside():
    sizes = [(32, 32)] * 50
    image, label = torch.ones(50, 1, 32, 32), random_label(50, 2, 32, 32)
    for scale, share in ((2.0, 1.0), (0.5, 0.25)):
        options = AugmentOptions(scale=(scale, scale))
        _, _, valid = run_augment(
            image, label, sizes, draw_params(options, sizes, (32, 32)), options, (32, 32)
        )
        assert (valid.float().mean((1, 2)) == share).all()
    corner = valid.flatten(1).int().argmax(1)
    assert len(corner.unique()) > 30


def test_a_case_scaled_by_two_fills_the_output_up_to_its_outermost_voxels():
    options = AugmentOptions(scale=(2, 2), flip=False)
    image = torch.arange(16.0).view(1, 1, 4, 4)
    params = draw_params(options, [(4, 4)], (8, 8))
    result, _, valid = run_augment(image, random_label(1, 2, 4, 4), [(4, 4)], params, options, (8, 8))
    assert valid.all()
    # the first output voxel is a quarter of a voxel before the first centre, where the edge value is repeated
    assert result[0, 0, 0, :3].tolist() == [0.0, 0.25, 0.75]


def test_gamma_raises_intensities_to_the_drawn_power():
    options = AugmentOptions(scale=(1, 1), flip=False, gamma=0.8)
    mean, std = torch.tensor([0.4, 0.2]), torch.tensor([0.2, 0.5])
    intensity = torch.rand(5, 2, 16, 16)
    image = (intensity - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    params = draw_params(options, [(16, 16)] * 5, (16, 16))
    power = np.exp(params[:, -4]).reshape(-1, 1, 1, 1)
    assert power.min() < 0.8
    assert power.max() > 1.25
    result, _, _ = run_augment(
        image, random_label(5, 2, 16, 16), [(16, 16)] * 5, params, options, (16, 16), mean=mean, std=std
    )
    result_intensity = result * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
    np.testing.assert_allclose(result_intensity.numpy(), intensity.numpy() ** power, atol=2e-6)


def test_noise_is_normal_and_depends_only_on_the_case():
    options = AugmentOptions(scale=(1, 1), flip=False, noise=0.25)
    sizes = [(128, 128)] * 6
    image, label = torch.zeros(6, 1, 128, 128), random_label(6, 2, 128, 128)
    params = draw_params(options, sizes, (128, 128))
    together, _, _ = run_augment(image, label, sizes, params, options, (128, 128))
    for case in (slice(0, 1), slice(2, 5)):
        alone, _, _ = run_augment(image[case], label[case], sizes[case], params[case], options, (128, 128))
        assert torch.equal(alone, together[case])
    # bounds are five standard errors
    rows = (together / 0.25).flatten(1).numpy()
    assert scipy.stats.kstest(rows.flatten(), "norm").pvalue > 0.001
    assert rows.std() == pytest.approx(1, abs=5 / math.sqrt(2 * rows.size))
    between_cases = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(between_cases).max() < 5 / math.sqrt(rows.shape[1])
    for lag in (1, 2, 3, 127, 128, 129):
        assert abs((rows[:, lag:] * rows[:, :-lag]).mean()) < 5 / math.sqrt(rows.size)


def test_the_drawn_scale_covers_its_range_and_is_the_same_along_all_axes():
    params = draw_params(AugmentOptions(flip=False), [(30, 30, 30)] * 2000, (32, 32, 32))
    scale = 1 / params[:, 0]
    np.testing.assert_allclose(1 / params[:, 4], scale, rtol=1e-6)
    np.testing.assert_allclose(1 / params[:, 8], scale, rtol=1e-6)
    assert scale.min() == pytest.approx(0.5, abs=0.01)
    assert scale.max() == pytest.approx(2.0, abs=0.01)
    # uniform: the standard error of the mean is 0.01
    assert scale.mean() == pytest.approx(1.25, abs=0.05)


def test_an_option_does_not_change_the_random_numbers_of_other_options():
    sizes = [(30, 40)] * 5
    plain = draw_params(AugmentOptions(flip=False), sizes, (32, 32))
    flipped = draw_params(AugmentOptions(gamma=0.5, noise=1), sizes, (32, 32))
    assert np.array_equal(np.abs(flipped[:, :4]), plain[:, :4])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": (2.0, 0.5)}, "the smaller one first"),
        ({"scale": (0.0, 1.0)}, "above 0"),
        ({"crop": (64,)}, "2 or 3 axes"),
        ({"crop": (0, 64)}, "1 or more"),
        ({"rotate_degrees": -1}, "rotate_degrees"),
        ({"noise": float("nan")}, "noise"),
        ({"flip": (True,)}, "flip"),
    ],
)
def test_invalid_options_are_refused(options, words):
    refused(lambda: AugmentOptions(**options), words)


def test_a_hard_label_is_that_of_the_nearest_voxel():
    options = AugmentOptions(rotate_degrees=30)
    size, out_size = (23, 31), (40, 27)
    params = draw_params(options, [size] * 6, out_size)
    label = (random_label(6, 2, *size) > 0.5).float()
    _, result, valid = run_augment(
        torch.zeros(6, 1, *size), label, [size] * 6, params, options, out_size, hard=True
    )
    index = np.stack(np.meshgrid(*map(np.arange, out_size), indexing="ij"), -1)
    for number in range(6):
        position = index @ params[number, :4].reshape(2, 2).T + params[number, 4:6]
        expected = ndimage.map_coordinates(
            label[number, 1].numpy(), np.moveaxis(position, -1, 0), order=0, mode="nearest"
        )
        # half way between two voxels, rounding decides
        sure = valid[number].numpy() & (np.abs(position % 1 - 0.5) > 1e-3).all(-1)
        assert np.array_equal(result[number, 1].numpy()[sure], expected[sure])


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_shift_limits_how_far_an_image_moves(scale):
    size, out_size, num_cases = (32, 32), (32, 32), 300
    far = {}
    for shift in (0.0, 0.5, 1.0):
        options = AugmentOptions(scale=(scale, scale), flip=False, shift=shift)
        params = draw_params(options, [size] * num_cases, out_size)
        # where the centre of the output lies in the image, from the image's centre, in output voxels
        centre = params[:, 4:6] + params[:, [0, 3]] * 15.5
        far[shift] = np.abs((centre - 15.5) * scale).max()
    room = abs(32 * scale - 32) / 2
    assert far[0.0] <= 0.5
    assert far[1.0] == pytest.approx(room, abs=0.5)
    assert far[0.5] == pytest.approx(room / 2, abs=1)


def test_a_window_is_centred_on_the_foreground_as_far_as_the_image_allows():
    size, out_size = (96, 96), (32, 32)
    options = AugmentOptions(scale=(0.8, 1.25), rotate_degrees=20, foreground=1.0)
    voxels = np.array([(48, 48), (30, 60), (2, 95)] * 30)
    rng = np.random.default_rng(0)
    params = draw_augmentation(options, rng, np.array([size] * len(voxels)), out_size, foreground=voxels)
    matrix = params[:, :4].reshape(-1, 2, 2)
    seen = np.einsum("nij,j->ni", matrix, [15.5, 15.5]) + params[:, 4:6]
    inner = np.arange(len(voxels)) % 3 < 2
    assert np.abs(seen - voxels)[inner].max() < 1.5
    # the window stays inside the image, so a voxel at the corner is not in the middle, but is seen
    at_voxel = np.linalg.solve(matrix, (voxels - params[:, 4:6])[..., None])[..., 0]
    assert np.abs(seen - voxels)[~inner].min() > 5
    plain = AugmentOptions(scale=(0.8, 1.25), foreground=1.0)
    params = draw_augmentation(
        plain, np.random.default_rng(0), np.array([size] * len(voxels)), out_size, foreground=voxels
    )
    at_voxel = (voxels - params[:, 4:6]) / params[:, [0, 3]]
    assert at_voxel.min() > -1.5
    assert at_voxel.max() < 32.5


def test_a_share_of_the_windows_looks_for_foreground_and_cases_without_it_are_placed_at_random():
    sizes = np.array([(96, 96)] * 400)
    voxels = np.tile([(48, 48), (-1, -1)], (200, 1))
    options = AugmentOptions(scale=(1, 1), foreground=0.5, flip=False)
    rng = np.random.default_rng(0)
    params = draw_augmentation(options, rng, sizes, (32, 32), foreground=voxels)
    centred = np.abs(params[:, 4:6] - 32.5).max(1) <= 0.5
    assert 0.35 < centred[::2].mean() < 0.65
    assert centred[1::2].mean() < 0.05


def test_flips_of_one_axis_leave_the_other_axis():
    params = draw_params(AugmentOptions(scale=(1, 1), flip=(False, True)), [(8, 8)] * 100, (8, 8))
    assert (params[:, 0] == 1).all()
    assert set(params[:, 3]) == {-1.0, 1.0}
    with pytest.raises(ValueError, match="2 answers, but the images have 3 spatial axes"):
        draw_params(AugmentOptions(flip=(False, True)), [(8, 8, 8)], (8, 8, 8))


def test_contrast_and_brightness_are_drawn_for_each_case():
    options = AugmentOptions(scale=(1, 1), flip=False, contrast=0.4, brightness=0.5)
    image, sizes = torch.randn(200, 1, 8, 8), [(8, 8)] * 200
    params = draw_params(options, sizes, (8, 8))
    result, _, _ = run_augment(image, random_label(200, 2, 8, 8), sizes, params, options, (8, 8))
    slope, offset = np.array(
        [
            np.polyfit(before.flatten(), after.flatten(), 1)
            for before, after in zip(image.numpy(), result.numpy(), strict=True)
        ]
    ).T
    assert np.abs(np.log(slope)).max() == pytest.approx(0.4, abs=0.02)
    assert np.abs(offset).max() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(slope, offset)[0, 1]) < 0.25
