"""The blocked kernel of the CPU gives the numbers and gradients of the definition."""

import math
from functools import partial

import kernel_cases as kernels
import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

import semidice
from semidice.arrays import one_hot
from semidice.kernels import blocked, segmentation_sums
from semidice.overlap.options import SumsOptions
from semidice.overlap.sums import reference_sums


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 64)


# one block, one block more or less a voxel, primes, several small images in a block, rows larger than a block
SHAPES = [
    (1, 2, 1),
    (1, 2, 31),
    (1, 2, 32),
    (1, 2, 33),
    (3, 3, 7, 11),
    (50, 3),
    (9, 2, 5),
    (2, 5, 13, 17),
    (2, 3, 3, 5, 7),
]


assert_equal_to_the_definition = partial(kernels.assert_equal_to_the_definition, blocked.blocked_sums)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_sums_and_gradients_of_soft_targets(shape, form, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    for mask in (None, valid):
        assert_equal_to_the_definition(
            prediction, soft_label(*shape), mask, form=form, activation=activation, entropy=True
        )


@pytest.fixture(params=["gathered", "one hot"])
def _both_kernels(request, monkeypatch):
    """Class indices of few and of many classes use different kernels; here all use each of them."""
    monkeypatch.setattr(blocked, "MIN_GATHERED_CLASSES", 2 if request.param == "gathered" else 1000)


# the last: many images in a block, more classes than a block has elements, rows of whole vectors and a rest
@pytest.mark.parametrize("shape", [*SHAPES, (7, 5, 3), (2, 150, 5), (1, 3, 101)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.usefixtures("_both_kernels")
def test_sums_and_gradients_of_class_indices(shape, dtype):
    target = class_map((shape[0], *shape[2:]), shape[1]).to(dtype)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    # what is ignored may be no class
    ignored = target.masked_fill(~valid, 255)
    for form in FORMS:
        for index, mask in ((target, None), (ignored, valid)):
            assert_equal_to_the_definition(
                random_logits(*shape), index, mask, form=form, activation="softmax", entropy=True
            )


@pytest.mark.parametrize("num_classes", [2, 3, 11, 12, 13, 31, 64, 65, 150])
def test_any_number_of_classes(num_classes):
    logits, index = random_logits(2, num_classes, 37), class_map((2, 37), num_classes)
    soft = soft_label(2, num_classes, 37)
    for target in (index, index.to(torch.int32), soft):
        assert_equal_to_the_definition(logits, target, form="min", activation="softmax", entropy=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("_both_kernels")
def test_probabilities_of_exactly_0_and_1(form):
    index = class_map((2, 60), 5)
    # a third of the voxels certain and right, a third certain and wrong, and the others between
    logits = random_logits(2, 5, 60)
    hot = one_hot(index, 5)
    logits[..., :20] = 300.0 * hot[..., :20]
    logits[..., 20:40] = 300.0 * hot.roll(1, 1)[..., 20:40]
    prob = logits.softmax(1)
    assert (prob == 0).any()
    assert (prob == 1).any()
    for target in (index, hot.float()):
        assert_equal_to_the_definition(logits, target, form=form, activation="softmax", entropy=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("_both_kernels")
def test_a_tie_at_1_beside_probabilities_that_are_not_0(form):
    index = class_map((2, 40), 4)
    logits = random_logits(2, 4, 40) + 30 * one_hot(index, 4)
    prob = logits.softmax(1)
    assert (prob.amax(1) == 1).any()
    assert (prob > 0).all()
    options = {"form": form, "activation": "softmax", "entropy": False}
    _, ours = kernels.sums_and_gradient(blocked.blocked_sums, logits, index, None, **options)
    _, theirs = kernels.sums_and_gradient(reference_sums, logits, index, None, **options)
    off_label = one_hot(index, 4) == 0
    # all of these are far below the usual absolute tolerance
    torch.testing.assert_close(ours[off_label], theirs[off_label], rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", ["min", "product"])
@pytest.mark.parametrize("shape", [(2, 3, 401), (1, 14, 7, 19), (3, 2, 32)], ids=str)
def test_at_the_label_there_is_no_error_and_no_gradient(form, shape, monkeypatch):
    # The bits of a softmax depend on whether it is made in whole vectors: so they are in every real block.
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 512)
    logits = random_logits(*shape)
    # the label is what the network outputs, to the bit, and the incoming gradient that of a Dice loss
    free, label = logits.requires_grad_(), logits.detach().softmax(1)
    sums = blocked.blocked_sums(free, label, None, SumsOptions("softmax", form, entropy=False)).overlap
    assert torch.count_nonzero(sums.fp) == 0
    assert torch.count_nonzero(sums.fn) == 0
    errors = 0.5 * sums.fp + 0.5 * sums.fn
    (errors / (sums.tp + errors)).sum().backward()
    assert torch.count_nonzero(free.grad) == 0


@pytest.mark.usefixtures("_both_kernels")
def test_a_certain_class_keeps_the_digits_of_its_few_errors():
    index = class_map((1, 2000), 3)
    logits = random_logits(1, 3, 2000) + 9 * one_hot(index, 3)
    options = SumsOptions("softmax", "min", entropy=True)
    exact = reference_sums(logits.double(), index, None, options)
    for target in (index, one_hot(index, 3).float()):
        ours = blocked.blocked_sums(logits, target, None, options)
        for part in ("fp", "fn"):
            mine, true = getattr(ours.overlap, part).double(), getattr(exact.overlap, part)
            assert (true < 0.02 * exact.mass).all()
            # a difference of two sums as large as the mass would be wrong by a part in ten thousand
            torch.testing.assert_close(mine, true, rtol=2e-6, atol=0)
        torch.testing.assert_close(ours.entropy.double(), exact.entropy, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("soft", [False, True])
def test_an_ignored_voxel_may_hold_nan_and_no_class(soft):
    logits, index = random_logits(2, 4, 50), class_map((2, 50), 4)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[:, 10:30] = False
    target = soft_label(2, 4, 50) if soft else index
    free = logits.masked_fill(~valid.unsqueeze(1), math.nan).requires_grad_()
    poisoned = target.masked_fill(~valid.unsqueeze(1), math.nan) if soft else index.masked_fill(~valid, -1)
    options = {"activation": "softmax", "form": "min", "entropy": True}
    ours = kernels.sums_and_gradient(blocked.blocked_sums, free, poisoned, valid, **options)
    theirs = kernels.sums_and_gradient(reference_sums, logits, target, valid, **options)
    torch.testing.assert_close(ours, theirs)
    assert torch.count_nonzero(ours[1][..., 10:30]) == 0


@pytest.mark.parametrize("num_classes", [3, 14])
def test_a_label_whose_probability_is_lost_still_has_its_entropy(num_classes):
    logits, index = random_logits(1, num_classes, 40), class_map((1, 40), num_classes)
    logits[:, :, ::3] -= 150.0 * one_hot(index, num_classes)[:, :, ::3]
    assert (logits.softmax(1) == 0).any()
    assert_equal_to_the_definition(logits, index, form="min", activation="softmax", entropy=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    logits, target = random_logits(2, 3, 9, 10).to(dtype), soft_label(2, 3, 9, 10).to(dtype)
    assert_equal_to_the_definition(logits, target, form="min", activation="softmax", entropy=True)


@pytest.mark.parametrize("wanted", [("min", False), (None, True), ("product", True)], ids=str)
def test_what_is_not_asked_for_is_none(wanted):
    form, entropy = wanted
    logits, target = random_logits(2, 3, 40), soft_label(2, 3, 40)
    sums = blocked.blocked_sums(logits, target, None, SumsOptions("softmax", form, entropy))
    assert (sums.overlap is None) == (form is None)
    assert (sums.entropy is None) == (not entropy)
    assert_equal_to_the_definition(logits, target, form=form, activation="softmax", entropy=entropy)


def test_any_strides():
    logits, target = random_logits(2, 3, 8, 12), soft_label(2, 3, 8, 12)
    options = {"form": "min", "activation": "softmax", "entropy": True}
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    assert_equal_to_the_definition(channels_last, target, **options)
    assert_equal_to_the_definition(logits[..., ::2], target[..., ::2], **options)
    assert_equal_to_the_definition(logits.transpose(2, 3), target.transpose(2, 3), **options)
    assert_equal_to_the_definition(logits[:, :, 0, 0].expand(2, 3), target[:, :, 0, 0], **options)


def test_a_second_derivative_goes_through_the_definition():
    logits, target = random_logits(2, 2, 3, dtype=torch.float64), soft_label(2, 2, 3, dtype=torch.float64)

    def entropy_and_overlap(x):
        sums = blocked.blocked_sums(x, target, None, SumsOptions("softmax", "product", entropy=True))
        return sums.entropy, *sums.overlap

    assert torch.autograd.gradgradcheck(entropy_and_overlap, (logits.requires_grad_(),))


def test_it_is_used_for_large_tensors_until_it_is_turned_off(monkeypatch):
    used = []
    monkeypatch.setattr(
        "semidice.kernels.blocked_sums", lambda *args: used.append(args) or reference_sums(*args)
    )
    large, small = random_logits(1, 2, 600, 600), random_logits(1, 2, 9)
    options = SumsOptions("softmax", "min", entropy=False)
    segmentation_sums(small, soft_label(1, 2, 9), None, options)
    assert not used
    target = soft_label(1, 2, 600, 600)
    segmentation_sums(large, target, None, options)
    assert len(used) == 1
    # a target that asks for a gradient has one in the definition only
    segmentation_sums(large, target.clone().requires_grad_(), None, options)
    assert len(used) == 1
    try:
        semidice.use_kernels(False)
        segmentation_sums(large, target, None, options)
    finally:
        semidice.use_kernels(True)
    assert len(used) == 1
