"""Label makers: manual examples, properties for random raters, independent references, refused input."""

from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from semidice.data.phantom import make_phantom
from semidice.labels import (
    boundary_smooth_label,
    dice_weighted_label,
    dice_weights,
    majority_label,
    mean_label,
    random_rater_label,
    rater_agreement,
    smooth_label,
    spatially_smooth_label,
    staple,
    staple_label,
)

MAKERS = {
    "majority": majority_label,
    "mean": mean_label,
    "dice_weighted": dice_weighted_label,
    "staple": staple_label,
}
SMOOTHERS = {
    "smooth": lambda label, **options: smooth_label(label, eps=0.3, **options),
    "boundary": boundary_smooth_label,
    "spatial": spatially_smooth_label,
}


def seeded_random_label(masks, **options):
    return random_rater_label(masks, generator=0, **options)


every_maker = pytest.mark.parametrize(
    "maker", [*MAKERS.values(), seeded_random_label], ids=[*MAKERS, "random"]
)
every_smoother = pytest.mark.parametrize("smoother", SMOOTHERS.values(), ids=SMOOTHERS)


def masks_of(*rows):
    """Bool masks (R, voxels) written as strings of 0 and 1."""
    return np.array([[character == "1" for character in row] for row in rows])


def class_maps_of(*rows):
    return np.array([[int(character) for character in row] for row in rows])


def foreground(label):
    np.testing.assert_allclose(label.sum(0), 1, atol=1e-6)
    return label[1].tolist()


@st.composite
def raters(draw, min_raters=1):
    """Class maps (R, *space), the number of classes, and a seed for other random choices."""
    space = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    num_raters, num_classes = draw(st.integers(min_raters, 7)), draw(st.integers(2, 5))
    seed = draw(st.integers(0, 2**16))
    # some cases have few classes, so that empty classes and ties are common
    highest = draw(st.integers(1, num_classes))
    maps = np.random.default_rng(seed).integers(0, highest, (num_raters, *space))
    return maps, num_classes, seed


# Examples computed by hand.


def test_the_majority_is_more_than_half_and_exactly_half_is_background():
    assert foreground(majority_label(masks_of("1110", "1100", "1000", "1000"))) == [1, 0, 0, 0]
    assert foreground(majority_label(masks_of("111", "110", "000"))) == [1, 1, 0]


def test_the_most_frequent_class_wins_and_a_tie_goes_to_the_lowest_class():
    # voxel by voxel: 2 of 4 say 2; 1 and 2 tie; 0 and 2 tie; four classes tie
    maps = class_maps_of("0120", "1121", "2202", "2203")
    assert majority_label(maps, num_classes=4).argmax(0).tolist() == [2, 1, 0, 0]


def test_the_mean_is_the_share_of_raters():
    assert foreground(mean_label(masks_of("111", "110", "100", "100"))) == [1, 0.5, 0.25]
    label = mean_label(class_maps_of("01", "02", "12", "22"), num_classes=3)
    assert label.tolist() == [[0.5, 0], [0.25, 0.25], [0.25, 0.75]]


def test_the_dice_weight_of_a_rater_is_their_dice_with_the_majority():
    # majority 1100; Dice 2*2/(2+2), 2*2/(3+2), 2*1/(1+2)
    masks = masks_of("1100", "1110", "1000")
    np.testing.assert_allclose(dice_weights(masks), [1, 4 / 5, 2 / 3], rtol=1e-6)
    total = 1 + 4 / 5 + 2 / 3
    expected = [1, (1 + 4 / 5) / total, (4 / 5) / total, 0]
    np.testing.assert_allclose(foreground(dice_weighted_label(masks)), expected, rtol=1e-6)


def test_the_dice_weight_is_the_mean_over_the_foreground_classes():
    # majority 012; for rater 3, class 1 is correct (Dice 1), class 2 is missed (0), class 3 is absent (1)
    weights = dice_weights(class_maps_of("012", "012", "010"), num_classes=4)
    np.testing.assert_allclose(weights, [1, 1, 2 / 3], rtol=1e-6)


def test_raters_without_overlap_have_weight_zero_and_count_equally():
    masks = masks_of("100", "010", "001")
    assert dice_weights(masks).tolist() == [0, 0, 0]
    np.testing.assert_allclose(foreground(dice_weighted_label(masks)), [1 / 3] * 3, rtol=1e-6)


def test_agreement_is_dice_with_the_majority_and_between_pairs():
    agreement = rater_agreement(masks_of("1100", "1110", "1000"), present=[True, True, True])
    np.testing.assert_allclose(agreement.majority, [1, 4 / 5, 2 / 3], rtol=1e-6)
    pairs = [[1, 4 / 5, 2 / 3], [4 / 5, 1, 1 / 2], [2 / 3, 1 / 2, 1]]
    np.testing.assert_allclose(agreement.pairwise, pairs, rtol=1e-6)


def test_the_agreement_of_an_absent_rater_is_nan_and_the_others_are_unchanged():
    masks = masks_of("1100", "1110", "1000")
    agreement = rater_agreement(masks, present=[True, False, True])
    kept = rater_agreement(masks[[0, 2]])
    np.testing.assert_array_equal(np.isnan(agreement.majority), [False, True, False])
    np.testing.assert_array_equal(agreement.pairwise[np.ix_([0, 2], [0, 2])], kept.pairwise)
    assert np.isnan(agreement.pairwise[1]).all()
    assert np.isnan(agreement.pairwise[:, 1]).all()


def test_the_random_rater_is_drawn_evenly_from_the_present_raters():
    masks = np.broadcast_to(np.eye(4, dtype=bool), (3000, 4, 4))
    present = np.broadcast_to([True, False, True, True], (3000, 4))
    label = random_rater_label(masks, generator=0, present=present, batched=True)
    counts = label[:, 1].sum(0)
    assert counts[1] == 0
    # each is expected 1000 times; 130 is five standard deviations of sqrt(3000 * 1/3 * 2/3) = 25.8
    assert (abs(counts[[0, 2, 3]] - 1000) < 130).all()


def test_a_seed_fixes_the_random_rater_and_a_generator_advances():
    masks = torch.eye(64, dtype=torch.bool)
    assert torch.equal(random_rater_label(masks, generator=5), random_rater_label(masks, generator=5))
    generator = torch.Generator().manual_seed(5)
    first, second = (random_rater_label(masks, generator=generator) for _ in range(2))
    assert torch.equal(first, random_rater_label(masks, generator=5))
    assert not torch.equal(first, second)


def test_staple_finds_a_fixed_point_computed_by_hand():
    # truth (1, 1/2, 0, 0), prior 3/8: sensitivities 1 and 1/1.5, specificities 2/2.5 and 1;
    # at voxel 2, 3/8 * 1 * 1/3 = 5/8 * 1/5 * 1, so its truth is 1/2 again
    estimate = staple(masks_of("1100", "1000"))
    np.testing.assert_allclose(foreground(estimate.label), [1, 0.5, 0, 0], atol=1e-7)
    np.testing.assert_allclose(estimate.confusion[0], [[4 / 5, 1 / 5], [0, 1]], rtol=1e-6)
    np.testing.assert_allclose(estimate.confusion[1], [[1, 0], [1 / 3, 2 / 3]], rtol=1e-6)


def test_label_smoothing_spreads_a_share_over_all_classes():
    label = np.array([[1.0, 0.5], [0.0, 0.25], [0.0, 0.25]])
    expected = [[0.8, 0.45], [0.1, 0.275], [0.1, 0.275]]
    np.testing.assert_allclose(smooth_label(label, eps=0.3), expected, rtol=1e-6)


@pytest.mark.parametrize(("width", "band"), [(1, 0), (3, 1), (5, 2)])
def test_boundary_smoothing_covers_half_the_width_on_each_side(width, band):
    hard = mean_label(masks_of("0000011111"))
    label = boundary_smooth_label(hard, eps=0.2, width=width)
    expected = hard[1].copy()
    expected[5 - band : 5], expected[5 : 5 + band] = 0.1, 0.9
    np.testing.assert_allclose(foreground(label), expected, rtol=1e-6)


def test_the_band_of_one_voxel_is_a_cube_clipped_at_the_border():
    mask = np.zeros((1, 4, 6), dtype=bool)
    mask[0, 0, 2] = True
    changed = boundary_smooth_label(mean_label(mask))[1] != mask[0]
    expected = np.zeros((4, 6), dtype=bool)
    expected[:2, 1:4] = True
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("space", [(17,), (9, 14), (6, 9, 7)])
def test_the_band_is_where_dilated_classes_overlap(space):
    maps = np.random.default_rng(0).integers(0, 3, (1, *[(n + 3) // 4 for n in space]))
    for axis, length in enumerate(space, 1):
        maps = maps.repeat(4, axis).take(range(length), axis)
    hard = mean_label(maps, num_classes=3)
    cube = np.ones([5] * len(space))
    classes = [ndimage.binary_dilation(maps[0] == k, cube) for k in range(3)]
    changed = (boundary_smooth_label(hard, width=5) != hard).any(0)
    np.testing.assert_array_equal(changed, np.sum(classes, 0) > 1)


@pytest.mark.parametrize("space", [(17,), (9, 14), (6, 9, 7)])
@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_spatial_smoothing_equals_the_gaussian_of_scipy_normalised_at_the_border(space, sigma):
    soft = mean_label(np.random.default_rng(0).integers(0, 3, (4, *space)), num_classes=3)

    def filtered(image):
        return ndimage.gaussian_filter(image.astype(np.float64), sigma, mode="constant")

    inside = filtered(np.ones(space))
    expected = np.stack([filtered(channel) / inside for channel in soft])
    np.testing.assert_allclose(spatially_smooth_label(soft, sigma=sigma), expected, atol=1e-6)


@pytest.mark.parametrize("smoother", [boundary_smooth_label, spatially_smooth_label])
@pytest.mark.parametrize(("case", "space"), [((9,), (14,)), ((9, 14), (16, 16)), ((6, 5, 7), (8, 8, 8))])
def test_smoothing_uses_only_valid_voxels(smoother, case, space):
    corner = (slice(None), *(slice(side) for side in case))
    valid = np.zeros(space, dtype=bool)
    valid[corner[1:]] = True
    # nearly all voxels inside have one class; all voxels outside have another
    masks = np.random.default_rng(0).random((2, *space)) < 0.05
    label = mean_label(np.where(valid, masks, 2), num_classes=3)
    expected = smoother(np.ascontiguousarray(label[corner]))
    padded = smoother(label, valid=valid)
    np.testing.assert_array_equal(padded[corner], expected)
    np.testing.assert_array_equal(padded[:, ~valid], label[:, ~valid])
    assert not np.allclose(smoother(label)[corner], expected)
    batched = smoother(torch.from_numpy(label[None]), valid=torch.from_numpy(valid[None]), batched=True)
    np.testing.assert_array_equal(batched[0].numpy(), padded)


# STAPLE: comparison with SimpleITK, and edge cases.


def itk_staple(masks):
    staple_filter = SimpleITK.STAPLEImageFilter()
    staple_filter.SetForegroundValue(1)
    truth = staple_filter.Execute([SimpleITK.GetImageFromArray(mask.astype(np.uint8)) for mask in masks])
    return SimpleITK.GetArrayFromImage(truth), staple_filter.GetSensitivity(), staple_filter.GetSpecificity()


@pytest.mark.parametrize("seed", range(4))
def test_binary_staple_agrees_with_simpleitk(seed):
    masks = make_phantom(1, size=(32, 40), num_raters=5, seed=seed).masks[0].numpy()
    estimate = staple(masks, tolerance=1e-9)
    truth, sensitivity, specificity = itk_staple(masks)
    # SimpleITK stops when the rates are stable to about seven digits, which moves a voxel by about 1e-6
    np.testing.assert_allclose(estimate.label[1], truth, atol=1e-5)
    np.testing.assert_allclose(estimate.confusion[:, 1, 1], sensitivity, atol=1e-5)
    np.testing.assert_allclose(estimate.confusion[:, 0, 0], specificity, atol=1e-5)


def raters_of_known_skill(num_raters=5, num_classes=3, num_voxels=4096):
    """A truth, raters with independent errors at each voxel, and the raters' confusion matrices."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, num_classes, num_voxels)
    skill = rng.uniform(0.6, 0.95, (num_raters, num_classes, 1))
    confusion = skill * np.eye(num_classes) + (1 - skill) * (1 - np.eye(num_classes)) / (num_classes - 1)
    draws = rng.random((num_raters, num_voxels, 1)) > confusion[:, truth].cumsum(-1)
    return truth, draws.sum(-1), confusion


def test_multi_class_staple_recovers_the_confusion_of_the_raters():
    truth, maps, confusion = raters_of_known_skill()
    estimate = staple(maps, num_classes=3)
    # a class has about 1365 voxels; 0.068 is five standard deviations of at most sqrt(0.25 / 1365)
    np.testing.assert_allclose(estimate.confusion, confusion, atol=0.068)
    staple_errors = (estimate.label.argmax(0) != truth).mean()
    majority_errors = (majority_label(maps, num_classes=3).argmax(0) != truth).mean()
    assert staple_errors < majority_errors


def test_multi_class_staple_agrees_with_simpleitk_for_reliable_raters():
    _, maps, _ = raters_of_known_skill()
    multi = SimpleITK.MultiLabelSTAPLEImageFilter()
    multi.SetTerminationUpdateThreshold(1e-7)
    combined = multi.Execute([SimpleITK.GetImageFromArray(m.reshape(64, 64).astype(np.uint8)) for m in maps])
    estimate = staple(maps, num_classes=3)
    np.testing.assert_array_equal(estimate.label.argmax(0), SimpleITK.GetArrayFromImage(combined).ravel())
    for rater, confusion in enumerate(estimate.confusion):
        # SimpleITK has the class of the rater in rows, and a last row for undecided voxels
        itk_confusion = np.array(multi.GetConfusionMatrix(rater)).reshape(4, 3)[:3].T
        np.testing.assert_allclose(confusion, itk_confusion, atol=1e-4)


def test_staple_stops_at_the_iteration_limit_and_reports_it():
    masks = np.random.default_rng(0).random((4, 100)) < 0.3
    assert staple(masks, max_iterations=7).num_iterations == 7
    assert staple(masks[:1]).num_iterations < 7


# Properties.


@every_maker
@given(raters())
def test_every_maker_returns_valid_probabilities_of_float32(maker, case):
    maps, num_classes, _ = case
    label = maker(maps, num_classes=num_classes)
    assert label.dtype == np.float32
    assert label.shape == (num_classes, *maps.shape[1:])
    assert label.min() >= 0
    assert label.max() <= 1
    np.testing.assert_allclose(label.sum(0), 1, atol=1e-6)


@every_smoother
@given(raters())
def test_every_smoother_returns_valid_probabilities_of_float32(smoother, case):
    maps, num_classes, _ = case
    label = smoother(mean_label(maps, num_classes=num_classes))
    assert label.dtype == np.float32
    assert label.min() >= 0
    assert label.max() <= 1
    np.testing.assert_allclose(label.sum(0), 1, atol=1e-6)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@given(raters(min_raters=2))
def test_the_order_of_the_raters_does_not_matter(maker, case):
    maps, num_classes, seed = case
    order = np.random.default_rng(seed).permutation(len(maps))
    label, shuffled = (maker(m, num_classes=num_classes) for m in (maps, maps[order]))
    # the order of float64 sums changes their rounding, which STAPLE may slightly amplify
    np.testing.assert_allclose(label, shuffled, atol=1e-5 if maker is staple_label else 1e-6)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@given(raters(min_raters=2))
def test_an_absent_rater_is_ignored_whatever_their_mask_holds(maker, case):
    maps, num_classes, seed = case
    present = np.random.default_rng(seed).random(len(maps)) < 0.6
    present[seed % len(maps)] = True
    garbage = maps.copy()
    garbage[~present] = 255
    label = maker(garbage, num_classes=num_classes, present=present)
    kept = maker(maps[present], num_classes=num_classes)
    np.testing.assert_allclose(label, kept, atol=1e-5 if maker is staple_label else 1e-6)


@every_maker
@given(raters())
def test_numpy_and_torch_agree_and_the_output_has_the_type_of_the_input(maker, case):
    maps, num_classes, _ = case
    from_numpy = maker(maps, num_classes=num_classes)
    from_torch = maker(torch.from_numpy(maps), num_classes=num_classes)
    assert isinstance(from_numpy, np.ndarray)
    assert isinstance(from_torch, torch.Tensor)
    assert from_torch.dtype == torch.float32
    np.testing.assert_array_equal(from_numpy, from_torch.numpy())


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_batch_equals_its_cases_one_by_one(maker, num_classes):
    masks = make_phantom(4, size=(12, 10), num_classes=num_classes).masks
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]]).bool()
    label = maker(masks, num_classes=num_classes, present=present, batched=True)
    for case_label, case_masks, case_present in zip(label, masks, present, strict=True):
        torch.testing.assert_close(
            case_label, maker(case_masks, num_classes=num_classes, present=case_present)
        )


def test_weights_agreement_and_staple_of_a_batch_equal_those_of_its_cases():
    masks = make_phantom(3, size=(12, 10)).masks
    weights, agreement, estimate = (f(masks, batched=True) for f in (dice_weights, rater_agreement, staple))
    for n, case in enumerate(masks):
        torch.testing.assert_close(weights[n], dice_weights(case))
        torch.testing.assert_close(agreement.majority[n], rater_agreement(case).majority)
        torch.testing.assert_close(agreement.pairwise[n], rater_agreement(case).pairwise)
        torch.testing.assert_close(estimate.confusion[n], staple(case).confusion, equal_nan=True)
        assert estimate.num_iterations[n] == staple(case).num_iterations


@every_smoother
def test_a_batch_of_smoothed_labels_equals_its_cases_one_by_one(smoother):
    soft = make_phantom(3, size=(12, 10)).prob
    label = smoother(soft, batched=True)
    assert isinstance(label, torch.Tensor)
    for case_label, case in zip(label, soft, strict=True):
        torch.testing.assert_close(case_label, smoother(case))
        np.testing.assert_array_equal(case_label.numpy(), smoother(case.numpy()))


@every_maker
def test_empty_masks_give_background_with_probability_one(maker):
    assert foreground(maker(np.zeros((4, 5), dtype=bool))) == [0] * 5


def test_raters_with_empty_masks_agree_fully():
    assert dice_weights(np.zeros((2, 5), dtype=bool)).tolist() == [1, 1]
    assert rater_agreement(np.zeros((2, 5), dtype=bool)).pairwise.tolist() == [[1, 1], [1, 1]]
    confusion = staple(np.zeros((2, 5), dtype=bool)).confusion
    np.testing.assert_array_equal(confusion, [[[1, 0], [np.nan, np.nan]]] * 2)


@every_maker
def test_the_label_of_one_rater_is_their_mask(maker):
    assert foreground(maker(masks_of("01101"))) == [0, 1, 1, 0, 1]
    assert maker(class_maps_of("01203"), num_classes=5).argmax(0).tolist() == [0, 1, 2, 0, 3]


@pytest.mark.parametrize("num_raters", [3, 6, 7])
def test_a_mean_is_exactly_hard_where_all_raters_agree(num_raters):
    # the raters differ after the second voxel, so their weights differ and do not sum to one exactly
    masks = np.random.default_rng(num_raters).random((num_raters, 12)) < 0.6
    masks[:, :2] = [True, False]
    for maker in (mean_label, dice_weighted_label):
        assert maker(masks)[:, :2].tolist() == [[0, 1], [1, 0]]


@every_maker
def test_masks_can_be_bytes_class_maps_lists_or_read_only_arrays(maker):
    masks = masks_of("1100", "1110", "1000")
    expected = maker(masks)
    frozen = masks.copy()
    frozen.flags.writeable = False
    big_endian = masks.astype(">i2")
    for same in (masks.astype(np.uint8), list(masks), frozen, masks.copy()[:, ::-1][:, ::-1]):
        np.testing.assert_array_equal(maker(same), expected)
    np.testing.assert_array_equal(maker(big_endian, num_classes=2), expected)
    np.testing.assert_array_equal(maker([torch.from_numpy(mask) for mask in masks]).numpy(), expected)
    flags = np.array([True, False, True])
    np.testing.assert_array_equal(maker(torch.from_numpy(masks), present=flags), maker(masks, present=flags))
    pair = maker([np.stack([mask, mask]) for mask in masks], batched=True)
    assert pair.shape == (2, *expected.shape)


# Refused input.


@pytest.mark.parametrize(
    ("masks", "options", "message"),
    [
        ([np.ones((4, 4), bool), np.ones((4, 5), bool)], {}, r"one shape; got shapes \(4, 4\), \(4, 5\)"),
        ([], {}, "one shape; got an empty list"),
        (np.array([[0, 255]], np.uint8), {}, "uint8.* with values 0, 255: use masks > 0 for binary masks"),
        (np.array([[0, 1]]), {}, r"must be bool.*got int64 \(1, 1, 2\).*num_classes="),
        (np.ones((2, 3)), {}, r"must be bool, or integers.*got .*float64 \(2, 3\): use masks > 0.5"),
        (torch.ones(2, 3), {}, r"must be bool, or integers.*got float32 \(2, 3\)"),
        (np.ones((2, 0), bool), {}, r"at least one rater and voxel; got bool \(2, 0\)"),
        (np.ones((0, 2), bool), {}, r"at least one rater and voxel; got bool \(0, 2\)"),
        (np.ones(3, bool), {"batched": True}, r"must be \(N, R, \*space\)"),
        (np.array([[0, 3]]), {"num_classes": 3}, "class indices 0 to 3, but there are 3 classes"),
        (np.array([[0, -1]]), {"num_classes": 3}, "class indices -1 to 0, but there are 3 classes"),
        (np.ones((2, 3), bool), {"num_classes": 3}, "2 for bool masks; got 3"),
        (np.array([[0, 0]]), {"num_classes": 1}, "num_classes must be 2 or more.*got 1"),
        (np.ones((2, 3), bool), {"present": [False, False]}, "present has no rater: leave out"),
        (np.ones((2, 1, 3), bool), {"present": [[True], [False]], "batched": True}, r"in cases \[1\]"),
        (np.ones((2, 3), bool), {"present": [True]}, r"present must be bool \(2,\).*got bool \(1,\)"),
        (np.ones((2, 3), bool), {"present": np.array([1, 0])}, r"present must be bool \(2,\).*got int64"),
    ],
)
def test_the_error_names_bad_masks(masks, options, message):
    with pytest.raises(ValueError, match=message):
        mean_label(masks, **options)


HARD = np.array([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("smoother", "label", "options", "message"),
    [
        (smooth_label, HARD, {"eps": 1.5}, r"eps must lie in \[0, 1\]; got 1.5"),
        (smooth_label, HARD, {"eps": -0.1}, r"eps must lie in \[0, 1\]; got -0.1"),
        (boundary_smooth_label, HARD, {"eps": float("nan")}, "eps must be a finite number; got nan"),
        (boundary_smooth_label, HARD, {"width": 4}, "width must be odd and 1 or more.*got 4"),
        (spatially_smooth_label, HARD, {"sigma": 0.0}, "sigma must be above 0.*got 0.0"),
        (spatially_smooth_label, HARD, {"sigma": float("inf")}, "sigma must be a finite number; got inf"),
        (spatially_smooth_label, HARD[:, 0], {}, r"one to three axes of space; got .*float64 \(2,\)"),
        (boundary_smooth_label, np.ones((2, 1, 1, 1, 1)) / 2, {}, "one to three axes of space"),
        (
            boundary_smooth_label,
            HARD,
            {"valid": np.ones(3, bool)},
            r"valid must be bool \(2,\).*got bool \(3,\)",
        ),
        (
            spatially_smooth_label,
            HARD,
            {"valid": np.ones(2)},
            r"valid must be bool \(2,\).*got float64 \(2,\)",
        ),
        (smooth_label, HARD.astype(int), {"eps": 0.1}, r"floats \(C, \*space\); got .*int64 \(2, 2\)"),
        (smooth_label, HARD[:, :0], {"eps": 0.1}, r"two or more classes and a voxel; got float32 \(2, 0\)"),
        (smooth_label, HARD * 2, {"eps": 0.1}, r"label must lie in \[0, 1\]; got values from 0 to 2"),
        (smooth_label, np.stack([HARD] * 3), {"eps": 0.1}, "sum to one.*sums from 0 to 3: use batched"),
    ],
)
def test_the_error_names_bad_labels_and_options(smoother, label, options, message):
    with pytest.raises(ValueError, match=message):
        smoother(label, **options)


def test_staple_refuses_zero_iterations():
    with pytest.raises(ValueError, match="max_iterations of 1 or more; got 1e-07 and 0"):
        staple(masks_of("10"), max_iterations=0)


# Tests that need a GPU or the shared data.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_maker
def test_a_maker_gives_the_same_label_on_the_gpu_and_does_not_synchronise(maker):
    # cuBLAS, in STAPLE, refuses deterministic mode without an environment variable
    torch.use_deterministic_algorithms(False)
    masks = make_phantom(3, size=(16, 24), num_classes=3).masks
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 1]]).bool()
    options = {"num_classes": 3, "batched": True}
    device_masks, device_present = masks.cuda(), present.cuda()
    maker(device_masks, present=device_present, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        label = maker(device_masks, present=device_present, **options)
        for smoother in SMOOTHERS.values():
            smoother(label, batched=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if maker is not seeded_random_label:
        torch.testing.assert_close(label.cpu(), maker(masks, present=present, **options))


LIDC = Path(__file__).parents[3] / "shared" / "data" / "lidc"


@pytest.mark.skipif(not LIDC.is_dir(), reason="needs the LIDC slices in ../shared/data/lidc")
def test_radiologists_agree_with_their_majority_to_the_known_degree():
    image = pytest.importorskip("PIL.Image", reason="needs pillow to read PNG")
    files = sorted((LIDC / "raters" / "1").glob("*.png"))
    masks = [[np.array(image.open(LIDC / "raters" / r / f.name)) > 0 for r in "1234"] for f in files]
    # in parts, to limit the memory
    parts = [dice_weights(np.array(masks[i : i + 48]), batched=True) for i in range(0, len(masks), 48)]
    agreement = np.concatenate(parts).mean(0)
    assert len(files) == 573
    assert ((agreement > 0.85) & (agreement < 0.95)).all(), agreement
