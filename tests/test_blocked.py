"""The blocked kernel of the CPU gives the numbers and gradients of the definition."""

from functools import partial

import kernels
import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

import semidice
from semidice.kernels import blocked, segmentation_sums
from semidice.sums import reference_sums


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_sums_and_gradients_of_class_indices(shape, dtype):
    target = class_map((shape[0], *shape[2:]), shape[1]).to(dtype)
    for form in FORMS:
        assert_equal_to_the_definition(
            random_logits(*shape), target, form=form, activation="softmax", entropy=True
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    logits, target = random_logits(2, 3, 9, 10).to(dtype), soft_label(2, 3, 9, 10).to(dtype)
    assert_equal_to_the_definition(logits, target, form="min", activation="softmax", entropy=True)


@pytest.mark.parametrize("wanted", [("min", False), (None, True), ("product", True)], ids=str)
def test_what_is_not_asked_for_is_none(wanted):
    form, entropy = wanted
    logits, target = random_logits(2, 3, 40), soft_label(2, 3, 40)
    sums = blocked.blocked_sums(logits, target, activation="softmax", valid=None, form=form, entropy=entropy)
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
        sums = blocked.blocked_sums(x, target, activation="softmax", valid=None, form="product", entropy=True)
        return sums.entropy, *sums.overlap

    assert torch.autograd.gradgradcheck(entropy_and_overlap, (logits.requires_grad_(),))


def test_it_is_used_for_large_tensors_until_it_is_turned_off(monkeypatch):
    used = []
    monkeypatch.setattr(
        "semidice.kernels.blocked_sums", lambda *args, **_: used.append(args) or reference_sums(*args, **_)
    )
    large, small = random_logits(1, 2, 600, 600), random_logits(1, 2, 9)
    options = {"activation": "softmax", "valid": None, "form": "min", "entropy": False}
    segmentation_sums(small, soft_label(1, 2, 9), **options)
    assert not used
    target = soft_label(1, 2, 600, 600)
    segmentation_sums(large, target, **options)
    assert len(used) == 1
    # a target that asks for a gradient has one in the definition only
    segmentation_sums(large, target.clone().requires_grad_(), **options)
    assert len(used) == 1
    try:
        semidice.use_kernels(False)
        segmentation_sums(large, target, **options)
    finally:
        semidice.use_kernels(True)
    assert len(used) == 1
