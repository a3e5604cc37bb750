"""Label makers: manual examples, properties for random raters, independent references, refused input."""

import numpy as np
import pytest
import SimpleITK
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from start import refused

from semidice.data.phantom import make_phantom
from semidice.labels import (
    boundary_smooth_label,
    dice_weighted_label,
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


def parts(result):
    """The tensors of a result."""
    return [result] if isinstance(result, torch.Tensor) else list(vars(result).values())


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


def test_weights_and_agreement_are_the_dice_with_the_majority_and_between_pairs():
    # majority 1100; Dice 2*2/(2+2), 2*2/(3+2), 2*1/(1+2)
    masks = masks_of("1100", "1110", "1000")
    pairs = [[1, 4 / 5, 2 / 3], [4 / 5, 1, 1 / 2], [2 / 3, 1 / 2, 1]]
    np.testing.assert_allclose(rater_agreement(masks).majority, [1, 4 / 5, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(rater_agreement(masks).pairwise, pairs, rtol=1e-6)
    total = 1 + 4 / 5 + 2 / 3
    expected = [1, (1 + 4 / 5) / total, (4 / 5) / total, 0]
    np.testing.assert_allclose(foreground(dice_weighted_label(masks)), expected, rtol=1e-6)


def test_the_agreement_is_the_mean_over_the_foreground_classes():
    # majority 012; for rater 3, class 1 is correct (Dice 1), class 2 is missed (0), class 3 is absent (1)
    agreement = rater_agreement(class_maps_of("012", "012", "010"), num_classes=4)
    np.testing.assert_allclose(agreement.majority, [1, 1, 2 / 3], rtol=1e-6)


def test_raters_without_overlap_have_weight_zero_and_count_equally():
    masks = masks_of("100", "010", "001")
    assert rater_agreement(masks).majority.tolist() == [0, 0, 0]
    np.testing.assert_allclose(foreground(dice_weighted_label(masks)), [1 / 3] * 3, rtol=1e-6)


def test_an_absent_rater_has_no_agreement_and_the_others_are_unchanged():
    masks, present = masks_of("1100", "1110", "1000"), [True, False, True]
    agreement, kept = rater_agreement(masks, present=present), rater_agreement(masks[[0, 2]])
    assert agreement.majority.isnan().tolist() == [False, True, False]
    assert torch.equal(agreement.pairwise[[0, 2]][:, [0, 2]], kept.pairwise)
    assert agreement.pairwise[1].isnan().all()
    assert agreement.pairwise[:, 1].isnan().all()


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


@pytest.mark.parametrize("space", [(17,), (9, 14), (6, 9, 7)])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_boundary_smoothing_is_uniform_where_dilated_classes_overlap(space, width):
    maps = np.random.default_rng(0).integers(0, 3, (1, *[(n + 3) // 4 for n in space]))
    for axis, length in enumerate(space, 1):
        maps = maps.repeat(4, axis).take(range(length), axis)
    hard = mean_label(maps, num_classes=3)
    classes = [ndimage.binary_dilation(maps[0] == k, np.ones([width] * len(space))) for k in range(3)]
    band = torch.from_numpy(np.sum(classes, 0) > 1)
    expected = torch.where(band, smooth_label(hard, eps=0.2), hard)
    assert torch.equal(boundary_smooth_label(hard, eps=0.2, width=width), expected)
    assert width == 1 or 0 < band.sum() < band.numel()


@pytest.mark.parametrize("space", [(17,), (9, 14), (6, 9, 7)])
@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_spatial_smoothing_equals_the_gaussian_of_scipy_normalised_at_the_border(space, sigma):
    soft = mean_label(np.random.default_rng(0).integers(0, 3, (4, *space)), num_classes=3)

    def filtered(image):
        return ndimage.gaussian_filter(image.astype(np.float64), sigma, mode="constant")

    inside = filtered(np.ones(space))
    expected = np.stack([filtered(channel) / inside for channel in soft.numpy()])
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
    expected = smoother(label[corner])
    padded = smoother(label, valid=valid)
    np.testing.assert_array_equal(padded[corner], expected)
    np.testing.assert_array_equal(padded[:, ~valid], label[:, ~valid])
    assert not np.allclose(smoother(label)[corner], expected)
    batched = smoother(label[None], valid=torch.from_numpy(valid[None]), batched=True)
    np.testing.assert_array_equal(batched[0], padded)


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


def test_multi_class_staple_recovers_the_raters_and_agrees_with_simpleitk():
    truth, maps, confusion = raters_of_known_skill()
    estimate = staple(maps, num_classes=3)
    # a class has about 1365 voxels; 0.068 is five standard deviations of at most sqrt(0.25 / 1365)
    np.testing.assert_allclose(estimate.confusion, confusion, atol=0.068)
    majority = majority_label(maps, num_classes=3).argmax(0).numpy()
    assert (estimate.label.argmax(0).numpy() != truth).mean() < (majority != truth).mean()
    multi = SimpleITK.MultiLabelSTAPLEImageFilter()
    multi.SetTerminationUpdateThreshold(1e-7)
    combined = multi.Execute([SimpleITK.GetImageFromArray(m.reshape(64, 64).astype(np.uint8)) for m in maps])
    np.testing.assert_array_equal(estimate.label.argmax(0), SimpleITK.GetArrayFromImage(combined).ravel())
    for rater, found in enumerate(estimate.confusion):
        # SimpleITK has the class of the rater in rows, and a last row for undecided voxels
        itk_confusion = np.array(multi.GetConfusionMatrix(rater)).reshape(4, 3)[:3].T
        np.testing.assert_allclose(found, itk_confusion, atol=1e-4)


def test_staple_stops_at_the_iteration_limit_and_reports_it():
    masks = np.random.default_rng(0).random((4, 100)) < 0.3
    assert staple(masks, max_iterations=7).num_iterations == 7
    assert staple(masks[:1]).num_iterations < 7
    # a case that stops early is not changed by those that go on
    both = np.stack([masks, np.random.default_rng(1).random((4, 100)) < 0.9])
    together = staple(both, batched=True, tolerance=0.01)
    assert together.num_iterations[0] != together.num_iterations[1]
    for case in range(2):
        torch.testing.assert_close(together.label[case], staple(both[case], tolerance=0.01).label)


# Properties.


@every_maker
@given(raters())
def test_every_maker_and_smoother_returns_valid_probabilities_of_float32(maker, case):
    maps, num_classes, _ = case
    label = maker(maps, num_classes=num_classes)
    assert label.shape == (num_classes, *maps.shape[1:])
    assert torch.equal(label, maker(torch.from_numpy(maps), num_classes=num_classes))
    for each in (label, *(smoother(label) for smoother in SMOOTHERS.values())):
        assert each.dtype == torch.float32
        assert each.min() >= 0
        assert each.max() <= 1
        np.testing.assert_allclose(each.sum(0), 1, atol=1e-6)


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


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("function", [*MAKERS.values(), staple, rater_agreement])
def test_a_batch_equals_its_cases_one_by_one(function, num_classes):
    masks = make_phantom(4, size=(12, 10), num_classes=num_classes).masks
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]]).bool()
    together = parts(function(masks, num_classes=num_classes, present=present, batched=True))
    for case, (case_masks, case_present) in enumerate(zip(masks, present, strict=True)):
        alone = parts(function(case_masks, num_classes=num_classes, present=case_present))
        torch.testing.assert_close([part[case] for part in together], alone, equal_nan=True)


@every_smoother
def test_a_batch_of_smoothed_labels_equals_its_cases_one_by_one(smoother):
    soft = make_phantom(3, size=(12, 10)).prob
    label = smoother(soft, batched=True)
    for case_label, case in zip(label, soft, strict=True):
        torch.testing.assert_close(case_label, smoother(case))
        assert torch.equal(case_label, smoother(case.numpy()))


@every_maker
def test_the_label_of_one_rater_is_their_mask_also_an_empty_one(maker):
    assert foreground(maker(masks_of("01101"))) == [0, 1, 1, 0, 1]
    assert maker(class_maps_of("01203"), num_classes=5).argmax(0).tolist() == [0, 1, 2, 0, 3]
    assert foreground(maker(np.zeros((4, 5), dtype=bool))) == [0] * 5


def test_raters_with_empty_masks_agree_fully():
    agreement = rater_agreement(np.zeros((2, 5), dtype=bool))
    assert agreement.majority.tolist() == [1, 1]
    assert agreement.pairwise.tolist() == [[1, 1], [1, 1]]
    confusion = staple(np.zeros((2, 5), dtype=bool)).confusion
    np.testing.assert_array_equal(confusion, [[[1, 0], [np.nan, np.nan]]] * 2)


@pytest.mark.parametrize("num_raters", [3, 6, 7])
def test_a_mean_is_exactly_hard_where_all_raters_agree(num_raters):
    # the raters differ after the second voxel, so their weights differ and do not sum to one exactly
    masks = np.random.default_rng(num_raters).random((num_raters, 12)) < 0.6
    masks[:, :2] = [True, False]
    for maker in (mean_label, dice_weighted_label):
        assert maker(masks)[:, :2].tolist() == [[0, 1], [1, 0]]


@every_maker
def test_masks_can_be_bytes_class_maps_or_read_only_arrays(maker):
    masks = masks_of("1100", "1110", "1000")
    expected = maker(masks)
    frozen = masks.copy()
    frozen.flags.writeable = False
    for same in (masks.astype(np.uint8), frozen, masks.copy()[:, ::-1][:, ::-1], torch.from_numpy(masks)):
        assert torch.equal(maker(same), expected)
    assert torch.equal(maker(masks.astype(">i2"), num_classes=2), expected)
    flags = np.array([True, False, True])
    assert torch.equal(maker(torch.from_numpy(masks), present=flags), maker(masks, present=flags))


MASKS = np.zeros((3, 4, 5), dtype=bool)
BYTES = 255 * np.ones((3, 4, 5), dtype=np.uint8)
LABEL = np.full((2, 4, 5), 0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "probabilities": (lambda: mean_label(LABEL), "masks > 0.5"),
        "0 and 255": (lambda: mean_label(BYTES), "255 to 255"),
        "0 and 255 as classes": (lambda: majority_label(BYTES, num_classes=2), "masks > 0"),
        "a third class": (lambda: majority_label(np.eye(3, dtype=int) * 2, num_classes=2), "0 to 2"),
        "an ignored class": (lambda: mean_label(np.eye(3, dtype=int) * 300, num_classes=256), "0 to 300"),
        "class maps without a number": (lambda: mean_label(np.eye(3, dtype=int)), "num_classes="),
        "bool of three classes": (lambda: mean_label(MASKS, num_classes=3), "bool of two classes"),
        "several cases": (lambda: mean_label(np.zeros((2, 3, 4, 5, 6), dtype=bool)), "batched=True"),
        "two flags for three raters": (lambda: mean_label(MASKS, present=[True, False]), "(3,)"),
        "flags of one case": (lambda: mean_label(MASKS[None], present=[True] * 3, batched=True), "(1, 3)"),
        "nobody": (lambda: staple(MASKS, present=[False] * 3), "leave out"),
        "a class map as a label": (lambda: smooth_label(np.zeros((2, 4, 5), dtype=int), eps=0.1), "floats"),
        "one channel": (lambda: smooth_label(LABEL[:1], eps=0.1), "two or more classes"),
        "overlapping channels": (lambda: smooth_label(1.5 * LABEL, eps=0.1), "sum to one"),
        "cases as classes": (lambda: spatially_smooth_label(np.full((3, 2, 4, 5), 0.5)), "batched=True"),
        "an even width": (lambda: boundary_smooth_label(LABEL, width=4), "odd"),
        "valid with a class axis": (lambda: spatially_smooth_label(LABEL, valid=LABEL > 0), "(4, 5)"),
    }.values(),
)
def test_what_is_no_mask_or_no_label_is_refused_with_the_way_out(call, words):
    refused(call, words)


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
    # the first masks of a type are read
    refused(lambda: maker(255 * device_masks, present=device_present, **options), "masks > 0")
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
