"""The blocked CPU kernel computes the same values and gradients as the definition."""

import math
from functools import partial

import kernel_cases as kernels
import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

import semidice
from semidice.arrays import one_hot
from semidice.kernels import blocked, segmentation_sums
from semidice.overlap import SumsOptions, reference_sums

ACTIVATIONS = ["softmax", "sigmoid", "none"]
# one block, a block plus or minus one voxel, primes, several images per block, rows larger than a block,
# more classes than a block has elements, rows that end in a partial vector
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
    (2, 150, 5),
    (1, 3, 101),
]
EVERYTHING = {"form": "min", "activation": "softmax", "entropy": True}
assert_equal_to_the_definition = partial(kernels.assert_equal_to_the_definition, blocked.blocked_sums)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 64)


@pytest.fixture(params=["gathered", "one hot"])
def _both_kernels(request, monkeypatch):
    """Class indices use one kernel for few classes and another for many; run the test with each of them."""
    monkeypatch.setattr(blocked, "MIN_GATHERED_CLASSES", 2 if request.param == "gathered" else 1000)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_and_gradients_of_soft_targets_equal_the_definition(shape, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    for form in FORMS:
        for mask in (None, valid):
            options = {"form": form, "activation": activation, "entropy": True}
            assert_equal_to_the_definition(prediction, soft_label(*shape), mask, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("_both_kernels")
def test_sums_and_gradients_of_class_indices_equal_the_definition(shape):
    target = class_map((shape[0], *shape[2:]), shape[1]).byte()
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    # an ignored voxel may hold an index that is not a class
    ignored = target.masked_fill(~valid, 255)
    for form in FORMS:
        for index, mask in ((target, None), (target.long(), None), (ignored, valid)):
            assert_equal_to_the_definition(random_logits(*shape), index, mask, **EVERYTHING | {"form": form})


def test_class_indices_of_probabilities_equal_the_definition():
    prob, index = soft_label(2, 5, 40), class_map((2, 40), 5)
    # certain voxels, of which most are wrong: the logarithm of 0 has no gradient
    prob[..., :20] = one_hot(class_map((2, 20), 5, seed=9), 5)
    for form in FORMS:
        options = {"form": form, "activation": "none", "entropy": True}
        assert_equal_to_the_definition(prob, index, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("_both_kernels")
def test_probabilities_of_exactly_0_and_1_equal_the_definition(form):
    index = class_map((2, 60), 5)
    # one third of the voxels is certain and correct, one third is certain and wrong, the rest is uncertain
    logits = random_logits(2, 5, 60)
    encoded = one_hot(index, 5)
    logits[..., :20] = 300.0 * encoded[..., :20]
    logits[..., 20:40] = 300.0 * encoded.roll(1, 1)[..., 20:40]
    prob = logits.softmax(1)
    assert (prob == 0).any()
    assert (prob == 1).any()
    for target in (index, encoded.float()):
        assert_equal_to_the_definition(logits, target, **EVERYTHING | {"form": form})


@pytest.mark.parametrize("form", ["min", "product"])
@pytest.mark.parametrize("shape", [(2, 3, 401), (1, 14, 7, 19), (3, 2, 32)], ids=str)
def test_errors_and_gradient_are_zero_at_the_label(form, shape, monkeypatch):
    # Softmax rounds differently in full and partial vectors. Blocks of the real size have full vectors only.
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 512)
    logits = random_logits(*shape)
    # the label equals the network output bit for bit, and the incoming gradient is that of a Dice loss
    leaf, label = logits.requires_grad_(), logits.detach().softmax(1)
    sums = blocked.blocked_sums(leaf, label, None, SumsOptions("softmax", form, entropy=False)).overlap
    assert torch.count_nonzero(sums.fp) == 0
    assert torch.count_nonzero(sums.fn) == 0
    errors = 0.5 * sums.fp + 0.5 * sums.fn
    (errors / (sums.tp + errors)).sum().backward()
    assert torch.count_nonzero(leaf.grad) == 0


@pytest.mark.usefixtures("_both_kernels")
def test_small_errors_of_a_certain_class_are_accurate():
    index = class_map((1, 2000), 3)
    logits = random_logits(1, 3, 2000) + 9 * one_hot(index, 3)
    options = SumsOptions("softmax", "min", entropy=True)
    exact = reference_sums(logits.double(), index, None, options)
    for target in (index, one_hot(index, 3).float()):
        sums = blocked.blocked_sums(logits, target, None, options)
        for part in ("fp", "fn"):
            actual, expected = getattr(sums.overlap, part).double(), getattr(exact.overlap, part)
            assert (expected < 0.02 * exact.mass).all()
            # subtracting two sums as large as the mass would give a relative error of 1e-4
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
        torch.testing.assert_close(sums.entropy.double(), exact.entropy, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_ignored_voxel_may_hold_nan_and_an_invalid_class(soft, activation):
    if activation == "sigmoid" and not soft:
        pytest.skip("a sigmoid has masks, not class indices")
    prediction = soft_label(2, 4, 50, seed=4) if activation == "none" else random_logits(2, 4, 50)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[:, 10:30] = False
    target = soft_label(2, 4, 50) if soft else class_map((2, 50), 4)
    leaf = prediction.masked_fill(~valid.unsqueeze(1), math.nan).requires_grad_()
    corrupted = target.masked_fill(~valid.unsqueeze(1), math.nan) if soft else target.masked_fill(~valid, -1)
    for form in FORMS:
        options = EVERYTHING | {"activation": activation, "form": form}
        actual = kernels.sums_and_gradient(blocked.blocked_sums, leaf, corrupted, valid, **options)
        expected = kernels.sums_and_gradient(reference_sums, prediction, target, valid, **options)
        torch.testing.assert_close(actual, expected)
        assert torch.count_nonzero(actual[1][..., 10:30]) == 0


@pytest.mark.parametrize("num_classes", [3, 14])
def test_the_entropy_is_correct_where_the_probability_of_the_label_underflows(num_classes):
    logits, index = random_logits(1, num_classes, 40), class_map((1, 40), num_classes)
    logits[:, :, ::3] -= 150.0 * one_hot(index, num_classes)[:, :, ::3]
    assert (logits.softmax(1) == 0).any()
    assert_equal_to_the_definition(logits, index, **EVERYTHING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_other_precisions_equal_the_definition(dtype, activation):
    logits, target = random_logits(2, 3, 9, 10).to(dtype), soft_label(2, 3, 9, 10).to(dtype)
    valid = random_logits(2, 9, 10, seed=6) > 0
    assert_equal_to_the_definition(logits, target, valid, **EVERYTHING | {"activation": activation})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("asked", [("min", False), (None, True), ("product", True)], ids=str)
def test_overlap_alone_and_entropy_alone_equal_the_definition(asked, activation):
    form, entropy = asked
    prediction = soft_label(2, 3, 40, seed=4) if activation == "none" else random_logits(2, 3, 40)
    options = {"form": form, "activation": activation, "entropy": entropy}
    assert_equal_to_the_definition(prediction, soft_label(2, 3, 40), **options)


def test_second_derivatives_use_the_definition():
    logits, target = random_logits(2, 2, 3, dtype=torch.float64), soft_label(2, 2, 3, dtype=torch.float64)

    def entropy_and_overlap(x):
        sums = blocked.blocked_sums(x, target, None, SumsOptions("softmax", "product", entropy=True))
        return sums.entropy, *sums.overlap

    assert torch.autograd.gradgradcheck(entropy_and_overlap, (logits.requires_grad_(),))


def test_the_kernel_is_used_for_large_tensors_unless_kernels_are_disabled(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "semidice.kernels.blocked_sums", lambda *args: calls.append(args) or reference_sums(*args)
    )
    large, target = random_logits(1, 2, 600, 600), soft_label(1, 2, 600, 600)
    options = SumsOptions("softmax", "min", entropy=False)
    segmentation_sums(large, target, None, options)
    assert len(calls) == 1
    segmentation_sums(large[..., :9], target[..., :9], None, options)
    # only contiguous tensors are cut into blocks
    segmentation_sums(large.transpose(2, 3), target.transpose(2, 3), None, options)
    # only the definition computes the gradient of a target
    segmentation_sums(large, target.clone().requires_grad_(), None, options)
    try:
        semidice.use_kernels(False)
        segmentation_sums(large, target, None, options)
    finally:
        semidice.use_kernels(True)
    assert len(calls) == 1
