"""The Triton kernels compute the same values and gradients as the definition.

Without a GPU they run on the CPU, in Triton's interpreter. On a GPU (`make test-gpu`) they are compiled.
"""

import itertools
import os
import subprocess
import sys
from unittest.mock import patch

import kernel_cases as kernels
import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

from semidice.overlap.mixture import cross_entropy_of, losses_of, region_loss_of
from semidice.overlap.options import MixtureOptions, RegionOptions, SumsOptions
from semidice.overlap.sums import reference_gradient, reference_sums

pytest.importorskip("triton")
from semidice.kernels import fused, index_sums, layout, plans, tiling_tables, tilings
from semidice.kernels.layout import NUM_SUMS, Layout, flat_inputs
from semidice.kernels.tilings import class_chunks

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []


def five_classes(target):
    """Voxels of a tile, and of one tile more than there are programs, on a GPU with one multiprocessor."""
    options = SumsOptions("softmax", "min", entropy=True)
    planned = flat_inputs(torch.zeros(1, 5, 4096), target, None, options).layout
    planned = planned._replace(num_multiprocessors=1)
    return planned.forward.voxel_block, planned.forward.voxel_block * planned.programs_at_once + 1


BLOCK, SOFT_PROGRAMS = five_classes(torch.zeros(1, 5, 4096))
_, HARD_PROGRAMS = five_classes(torch.zeros(1, 4096, dtype=torch.int64))
# 1 voxel, about one block, primes, no axes of space, many classes
SHAPES = [
    (1, 2, 1),
    (2, 5, BLOCK - 1),
    (1, 5, BLOCK),
    (2, 5, 13, 17),
    (9, 4),
    (1, 19, 3, 5, 7),
    (1, 150, 37),
]
# programs with several tiles; soft labels in blocks of classes, and very many classes in one block
SOFT_SHAPES = [*SHAPES, (1, 5, SOFT_PROGRAMS), (1, 321, 18)]
HARD_SHAPES = [*SHAPES, (1, 5, HARD_PROGRAMS), (1, 1000, 18)]
ACTIVATIONS = ["softmax", "sigmoid", "none"]
# the interpreter is slow, so without a GPU only these have every form; blocks of classes have a test below
SHAPES_OF_EVERY_FORM = SOFT_SHAPES if ON_GPU else [(2, 5, BLOCK - 1), (1, 19, 3, 5, 7)]


def soft_cases():
    """Shapes, forms and activations."""
    numbered = itertools.product(enumerate(SOFT_SHAPES), enumerate(ACTIVATIONS))
    for (row, shape), (column, activation) in numbered:
        for form in FORMS if shape in SHAPES_OF_EVERY_FORM else [FORMS[(row + column) % len(FORMS)]]:
            yield pytest.param(shape, form, activation, id=f"{shape}-{form}-{activation}")


num_multiprocessors = layout._num_multiprocessors


@pytest.fixture(autouse=True, scope="module")
def _one_multiprocessor():
    """Simulate a GPU with one multiprocessor, so that programs have several tiles of small tensors."""
    kernels.forget_plans()
    with patch.object(layout, "_num_multiprocessors", lambda device: 1):
        yield
    kernels.forget_plans()


def assert_equal_to_the_definition(prediction, target, valid=None, **options):
    on_device = [None if tensor is None else tensor.to(DEVICE) for tensor in (prediction, target, valid)]
    # sums of a few hundred float32 numbers, added in a different order
    kernels.assert_equal_to_the_definition(fused.fused_sums, *on_device, tolerance=1e-5, **options)


@pytest.mark.parametrize(("shape", "form", "activation"), list(soft_cases()))
def test_sums_and_gradients_of_soft_targets_equal_the_definition(shape, form, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    # masks do not depend on the form
    for mask in (valid,) if form != "min" and shape in SHAPES_OF_EVERY_FORM and not ON_GPU else (None, valid):
        assert_equal_to_the_definition(
            prediction, soft_label(*shape), mask, form=form, activation=activation, entropy=True
        )


@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_sums_and_gradients_of_class_indices_equal_the_definition(shape, dtype):
    if shape[1] > 256:
        # a byte cannot hold these class indices
        dtype = torch.promote_types(dtype, torch.int16)
    target = class_map((shape[0], *shape[2:]), shape[1]).to(dtype)
    # the interpreter is slow, so without a GPU each shape is tested in one form only
    for form in FORMS if ON_GPU else [FORMS[HARD_SHAPES.index(shape) % len(FORMS)]]:
        assert_equal_to_the_definition(
            random_logits(*shape), target, form=form, activation="softmax", entropy=True
        )


def hard_cases():
    """Shapes, forms and activations."""
    # few classes; integer tables at addresses that are and are not multiples of 8 bytes
    shapes = [(2, 3, 70), (3, 53, 70), (2, 64, 257)]
    for shape, form, activation in itertools.product(shapes, FORMS, ACTIVATIONS):
        # of class indices and activations the kernel computes one form for three
        if ON_GPU or shape[1] == 3 or activation == "none" or form in ("relaxed", "squared"):
            yield pytest.param(shape, form, activation, id=f"{shape}-{form}-{activation}")


@pytest.mark.parametrize(("shape", "form", "activation"), list(hard_cases()))
def test_class_indices_with_a_mask_equal_the_definition(shape, form, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    target = class_map((shape[0], *shape[2:]), shape[1])
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    # an ignored voxel may hold any value, such as an index that is not a class
    target[~valid] = 255
    for entropy in (True, False) if shape[1] == 53 else (True,):
        assert_equal_to_the_definition(
            prediction, target, valid, form=form, activation=activation, entropy=entropy
        )


@pytest.mark.parametrize("shape", [(1, 3, 80), (1, 70, 40)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_certain_and_uncertain_class_indices_equal_the_definition(shape, form):
    logits, target = random_logits(*shape), class_map((shape[0], shape[2]), shape[1])
    encoded = torch.zeros(shape).scatter_(1, target[:, None], 1.0)
    # voxels that are certain and correct, certain and wrong, uncertain with very large logits, and others
    kind = torch.arange(shape[2]) % 4
    logits += torch.where(kind == 0, 60.0, torch.where(kind == 1, -60.0, 0.0)) * encoded
    logits += torch.where(kind == 2, 300.0, 0.0)
    assert_equal_to_the_definition(logits, target, form=form, activation="softmax", entropy=True)


@pytest.mark.parametrize("num_classes", [3, 60])
@pytest.mark.parametrize("region_weight", [0.75, 0.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_loss_is_not_finite_if_a_logit_is_not(num_classes, region_weight, value):
    """On a GPU the values of the inputs are not checked, so the loss must show the problem."""
    logits, target = random_logits(2, num_classes, 50), class_map((2, 50), num_classes)
    logits[1, 1, 7] = value
    options = DICE_AND_ENTROPY._replace(region_weight=region_weight)
    losses = fused.fused_mixture(logits.to(DEVICE), target.to(DEVICE), None, options, None, parts=False)
    assert not losses.total.isfinite()


@pytest.mark.parametrize("num_classes", [3, 60])
def test_an_index_above_the_number_of_classes_counts_as_no_class(num_classes):
    logits, target = random_logits(1, num_classes, 50), class_map((1, 50), num_classes)
    invalid = target.clone()
    invalid[:, ::7] = num_classes + 3
    one_hot = torch.nn.functional.one_hot(invalid, num_classes + 4)[..., :num_classes].movedim(-1, 1).float()
    options = SumsOptions("softmax", "relaxed", entropy=True)
    results = []
    for label in (invalid, one_hot):
        leaf = logits.to(DEVICE).requires_grad_()
        sums = fused.fused_sums(leaf, label.to(DEVICE), None, options)
        (sums.overlap.tp.sum() + 2 * sums.overlap.fp.square().sum() + sums.entropy.sum()).backward()
        results.append((*sums.overlap, sums.entropy, sums.mass, leaf.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


TABLES = ("FORWARD", "HARD_FORWARD", "BACKWARD", "HARD_BACKWARD")


@pytest.fixture(params=["few voxels", "many voxels"])
def class_blocks(request, monkeypatch):
    """Use the tiling of very many classes, which computes one block of classes at a time, for any number."""
    for name in TABLES:
        monkeypatch.setattr(tiling_tables, name, getattr(tiling_tables, name)[-1:])
    if request.param == "many voxels":
        monkeypatch.setattr(layout, "_MIN_PROGRAMS", 1)
    kernels.forget_plans()
    yield
    kernels.forget_plans()


NUM_BLOCKED = tilings.BLOCK_SUMS.class_block
BLOCKED_SHAPES = [
    (1, 1, 1),
    (2, NUM_BLOCKED - 1, 13, 17),
    (2, NUM_BLOCKED, tilings.BLOCK_SUMS.voxel_block + 1),
    (1, NUM_BLOCKED + 1, tilings.NORMS.voxel_block + 1),
    (2, 53, 19),
    (3, 37),
]


# few voxels have larger blocks of classes and, in a softmax, norms of their own
@pytest.mark.parametrize("shape", BLOCKED_SHAPES, ids=str)
@pytest.mark.parametrize(
    ("class_blocks", "activation"),
    [
        *(("few voxels", activation) for activation in (ACTIVATIONS if ON_GPU else ["softmax"])),
        *(("many voxels", activation) for activation in ACTIVATIONS),
    ],
    indirect=["class_blocks"],
)
def test_blocks_of_classes_equal_the_definition(class_blocks, shape, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    hard = class_map((shape[0], *shape[2:]), shape[1])
    # the interpreter is slow, so without a GPU each shape is tested in one form only
    for form in FORMS if ON_GPU else [FORMS[BLOCKED_SHAPES.index(shape) % len(FORMS)]]:
        for target, mask in ((soft_label(*shape), valid), (hard, None), (hard.to(torch.uint8), valid)):
            assert_equal_to_the_definition(
                prediction, target, mask, form=form, activation=activation, entropy=True
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_blocks_of_classes_equals_the_definition(class_blocks, dtype):
    logits, target = random_logits(2, 11, 9, 10).to(dtype), soft_label(2, 11, 9, 10).to(dtype)
    for label in (target, class_map((2, 9, 10), 11)):
        assert_equal_to_the_definition(logits, label, form="min", activation="softmax", entropy=True)


def test_any_strides_in_blocks_of_classes_equal_the_definition(class_blocks):
    logits, target = random_logits(2, 11, 8, 12), soft_label(2, 11, 8, 12)
    options = {"form": "min", "activation": "softmax", "entropy": True}
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    assert_equal_to_the_definition(channels_last, target, **options)
    assert_equal_to_the_definition(logits[..., ::2], target[..., ::2], **options)
    assert_equal_to_the_definition(logits.transpose(2, 3), target.transpose(2, 3), **options)


def assert_ignored_voxels_have_no_effect(num_classes, ignored_value, hard):
    logits, valid = random_logits(2, num_classes, 30), random_logits(2, 30, seed=6) > 0
    target = class_map((2, 30), num_classes) if hard else soft_label(2, num_classes, 30)
    results = []
    for fill in (0.0, ignored_value):
        leaf = torch.where(valid[:, None], logits, fill).to(DEVICE).requires_grad_()
        sums = fused.fused_sums(leaf, target.to(DEVICE), valid.to(DEVICE), ALL_SUMS)
        (sums.overlap.fp.square().sum() + sums.entropy.sum()).backward()
        results.append((*sums.overlap, sums.entropy, sums.mass, leaf.grad))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


each_ignored_value = pytest.mark.parametrize(
    ("ignored_value", "hard"), list(itertools.product([float("nan"), float("inf")], [False, True]))
)


@each_ignored_value
@pytest.mark.parametrize("num_classes", [3, 60, 170])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_ignored_voxels_may_hold_any_value(num_classes, ignored_value, hard):
    assert_ignored_voxels_have_no_effect(num_classes, ignored_value, hard)


@each_ignored_value
@pytest.mark.filterwarnings("ignore:invalid value")
def test_ignored_voxels_may_hold_any_value_in_blocks_of_classes(class_blocks, ignored_value, hard):
    assert_ignored_voxels_have_no_effect(11, ignored_value, hard)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_loss_is_not_finite_if_a_logit_is_not_in_blocks_of_classes(class_blocks, value):
    logits, target = random_logits(2, 11, 30), class_map((2, 30), 11)
    logits[1, 9, 7] = value
    assert not mixture_and_gradient(logits.to(DEVICE), target.to(DEVICE))[0].isfinite()


def test_a_certain_or_uncertain_softmax_in_blocks_of_classes_equals_the_definition(class_blocks):
    logits, target = random_logits(1, 37, 80), class_map((1, 80), 37)
    encoded = torch.zeros_like(logits).scatter_(1, target[:, None], 1.0)
    kind = torch.arange(80) % 5
    logits += torch.where(kind == 0, 60.0, torch.where(kind == 1, -60.0, 0.0)) * encoded
    logits += torch.where(kind == 2, 300.0, torch.where(kind == 3, -3000.0, 0.0))
    # logits that rise from class to class, so that the running maximum changes with every class
    logits[..., kind == 4] += torch.arange(37.0)[None, :, None]
    assert_equal_to_the_definition(logits, target, form="min", activation="softmax", entropy=True)


def test_few_voxels_use_small_blocks_and_many_voxels_use_the_tilings_of_the_table():
    options = torch.float32, torch.float32, False, "softmax", "min", True

    def chosen_tilings(num_voxels):
        stride = (2000 * num_voxels, num_voxels, 1)
        planned = Layout((1, 2000, num_voxels), stride, stride, *options)
        return planned.norms, planned.backward

    assert chosen_tilings(2**18) == (tilings.NORMS, tilings.BLOCK_GRADIENT)
    for few, many in zip(chosen_tilings(1000), chosen_tilings(2**18), strict=True):
        assert few.voxel_block == layout._MIN_VOXEL_BLOCK
        assert few.voxel_block * few.class_block == many.voxel_block * many.class_block


def test_small_batches_need_three_launches():
    """The loss kernel adds up their partial sums, and no program loops over tiles that do not exist."""
    for shape in ((8, 2, 256**2), (8, 2, 512**2), (8, 3, 512**2)):
        for dtype, target_dtype in itertools.product(
            (torch.float32, torch.bfloat16), (torch.float32, torch.uint8)
        ):
            stride = (shape[1] * shape[2], shape[2], 1)
            planned = Layout(shape, stride, stride, dtype, target_dtype, False, "softmax", "min", True)
            assert shape[0] * planned.num_programs * NUM_SUMS * shape[1] <= layout.MAX_LOSS_PARTIALS
            assert planned._replace(shape=(1, shape[1], 1)).num_programs == 1


@pytest.mark.parametrize("num_images", [1, 3, 8, 5000])
@pytest.mark.parametrize("num_classes", [2, 14, 64, 150, 2000])
def test_the_number_of_programs_fills_the_gpu_a_whole_number_of_times(num_images, num_classes):
    for num_voxels in (1, 1000, 2**15, 2**21):
        stride = (num_classes * num_voxels, num_voxels, 1)
        planned = Layout(
            (num_images, num_classes, num_voxels), stride, stride,
            torch.bfloat16, torch.uint8, False, "softmax", "min", True,
        )  # fmt: skip
        tiling, num_programs = planned.forward, planned.num_programs
        num_tiles = -(-num_voxels // tiling.voxel_block)
        assert -(-num_tiles // tiling.num_tiles) <= num_programs <= num_tiles
        at_once = planned.programs_at_once // planned.num_blocks
        if num_images * num_tiles >= tiling.num_tiles * at_once and num_images < at_once:
            # the unused program slots of the last round are fewer than the images
            assert -num_images * num_programs % at_once < num_images


# soft targets, the largest number of classes computed all at once, and the smallest computed in blocks
@pytest.mark.parametrize(("num_classes", "kind"), [(321, "soft"), (1024, "hard"), (1025, "hard")])
def test_the_mixture_of_many_classes_equals_the_definition(num_classes, kind):
    shape = (1, num_classes, 7)
    logits = random_logits(*shape).to(DEVICE)
    target = (soft_label(*shape) if kind == "soft" else class_map((1, 7), num_classes)).to(DEVICE)
    total, gradient = mixture_and_gradient(logits, target)
    defined = logits.clone().requires_grad_()
    sums = reference_sums(defined, target, None, ALL_SUMS)
    ones = torch.ones(num_classes, device=DEVICE)
    expected = losses_of(sums, ones, DICE_AND_ENTROPY, parts=False).total
    expected.backward()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(gradient, defined.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_logits_and_targets_equal_the_definition(dtype, target_dtype):
    logits, target = random_logits(2, 3, 9, 10).to(dtype), soft_label(2, 3, 9, 10).to(target_dtype)
    assert_equal_to_the_definition(logits, target, form="min", activation="softmax", entropy=True)


def test_overlap_alone_and_entropy_alone_equal_the_definition():
    logits, target = random_logits(2, 3, 40), soft_label(2, 3, 40)
    for form, entropy in (("min", False), (None, True)):
        assert_equal_to_the_definition(logits, target, form=form, activation="softmax", entropy=entropy)


def test_any_strides_equal_the_definition():
    logits, target = random_logits(2, 3, 8, 12), soft_label(2, 3, 8, 12)
    options = {"form": "min", "activation": "softmax", "entropy": True}
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    assert_equal_to_the_definition(channels_last, target, **options)
    assert_equal_to_the_definition(
        channels_last, target.contiguous(memory_format=torch.channels_last), **options
    )
    assert_equal_to_the_definition(logits[..., ::2], target[..., ::2], **options)
    assert_equal_to_the_definition(logits.transpose(2, 3), target.transpose(2, 3), **options)


def test_second_derivatives_use_the_definition():
    logits, target = random_logits(1, 2, 5).to(DEVICE).requires_grad_(), soft_label(1, 2, 5).to(DEVICE)

    def second_derivative(function):
        sums = function(logits, target, None, SumsOptions("softmax", "product", entropy=True))
        (slope,) = torch.autograd.grad(
            sums.entropy.sum() + sums.overlap.tp.square().sum(), logits, create_graph=True
        )
        return torch.autograd.grad(slope.square().sum(), logits)[0]

    torch.testing.assert_close(second_derivative(fused.fused_sums), second_derivative(reference_sums))


MIXTURES = {
    "default": {},
    "focal": {"gamma": 2.0},
    "root": {"gamma": 0.5},
    "log": {"log": True},
    "log and focal": {"log": True, "gamma": 1.5},
    "smooth": {"smooth": 0.7},
    "no background": {"background": False},
    "present": {"classes": "present"},
    "over image": {"over": "image"},
    "over class": {"over": "class"},
    "over image, present": {"over": "image", "classes": "present", "background": False},
    "over class, present": {"over": "class", "classes": "present", "gamma": 2.0},
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("kind", ["soft", "hard", "nothing valid"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_mixture_in_three_launches_equals_the_definition(name, kind, weighted):
    logits = random_logits(3, 4, 37).to(DEVICE)
    target = soft_label(3, 4, 37) if kind == "soft" else class_map((3, 37), 4)
    if kind == "hard":
        # class 3 is absent, class 2 is in one image only, and one image is all background
        target = torch.where(target == 3, 0, target)
        target[1:] = torch.where(target[1:] == 2, 1, target[1:])
        target[2] = 0
    target = target.to(DEVICE)
    valid = torch.zeros(3, 37, dtype=torch.bool, device=DEVICE) if kind == "nothing valid" else None
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], device=DEVICE) if weighted else None
    region_options = RegionOptions(alpha=0.7, beta=0.3, **MIXTURES[name])
    options = MixtureOptions("softmax", region_options)

    leaf = logits.clone().requires_grad_()
    total, (entropy, region) = fused.fused_mixture(leaf, target, valid, options, weight, parts=True)
    (2.5 * total).backward()

    defined = logits.clone().requires_grad_()
    sums = reference_sums(defined, target, valid, ALL_SUMS)
    ones = torch.ones(4, device=DEVICE) if weight is None else weight
    defined_entropy = cross_entropy_of(sums, ones, sync=False)
    defined_region = region_loss_of(sums, ones, region_options)
    (2.5 * (0.25 * defined_entropy + 0.75 * defined_region)).backward()

    torch.testing.assert_close(entropy, defined_entropy.detach())
    # the kernel computes a power as exp and log, which adds rounding errors
    torch.testing.assert_close(region, defined_region.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.detach(), (0.25 * entropy + 0.75 * region))
    torch.testing.assert_close(leaf.grad, defined.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("over", ["batch", "image"])
def test_many_partial_sums_are_added_up_before_the_loss(over, monkeypatch):
    logits, target = random_logits(2, 3, 5000).to(DEVICE), soft_label(2, 3, 5000).to(DEVICE)
    options = MixtureOptions("softmax", RegionOptions(alpha=0.7, beta=0.3, over=over))
    few = fused.fused_mixture(logits, target, None, options, None, parts=False).total
    for module in (layout, plans):
        monkeypatch.setattr(module, "MAX_LOSS_PARTIALS", 0)
    kernels.forget_plans()
    many = fused.fused_mixture(logits, target, None, options, None, parts=False).total
    kernels.forget_plans()
    torch.testing.assert_close(many, few)


@pytest.mark.parametrize("num_programs", [2, 1023, 1024, 2500])
def test_totals_are_the_sums_of_all_programs(num_programs):
    partials = torch.rand(3, num_programs, NUM_SUMS, 7).to(DEVICE)
    planned = flat_inputs(
        random_logits(3, 7, 16), torch.zeros(3, 16, dtype=torch.uint8), None, ALL_SUMS
    ).layout
    workspace = torch.full((11 + 3 * NUM_SUMS * 7 + 5,), -1.0, device=DEVICE)
    plans.totals_launch(planned, num_programs, 11)(partials, workspace)
    torch.testing.assert_close(
        workspace[11:-5].double(), partials.double().sum(1).flatten(), rtol=5e-6, atol=0.0
    )
    # the launch writes nothing before or after them
    assert (workspace[:11] == -1).all()
    assert (workspace[-5:] == -1).all()


@pytest.mark.parametrize(
    ("num_classes", "step", "rows"),
    [
        (1, 1, (1,)),
        (3, 1, (2, 1)),
        (14, 2, (8, 4, 2)),
        (15, 2, (16,)),
        (19, 2, (16, 4)),
        (150, 8, (128, 16, 8)),
        (150, 16, (128, 32)),
        (100, 1, (64, 32, 4)),
        (100, 16, (64, 32, 16)),
        (3, 16, (4,)),
    ],
)
def test_classes_are_split_into_chunks_with_little_padding(num_classes, step, rows):
    chunks = class_chunks(num_classes, step)
    assert tuple(num_rows for _, num_rows in chunks) == rows
    assert [first for first, _ in chunks] == [sum(rows[:i]) for i in range(len(rows))]


def test_padding_is_at_most_15_percent_or_one_step_for_any_number_of_classes():
    for num_classes, step in itertools.product(range(1, 1025), (1, 4, 32, 128)):
        rows = [num_rows for _, num_rows in class_chunks(num_classes, step)]
        assert num_classes <= sum(rows) <= max(1.15 * num_classes, num_classes + step)
        assert 1 <= len(rows) <= 3
        assert all(num_rows % min(step, rows[0]) == 0 for num_rows in rows)


def test_the_integers_of_a_table_can_count_all_voxels_of_a_program():
    for max_classes, *tilings_by_size in tiling_tables.HARD_FORWARD:
        without_blocks = [tiling for tiling in tilings_by_size if tiling.class_block is None]
        if max_classes >= plans.MIN_INDEX_SUMS and without_blocks:
            num_voxels = max(tiling.voxel_block * tiling.num_tiles for tiling in without_blocks)
            # the probabilities add up to less than the count of one voxel, and both sums fit in 63 bits
            assert num_voxels * index_sums.PROB_UNITS.value < index_sums.COUNT.value
            assert (num_voxels + 1) * index_sums.COUNT.value < 2**63
            assert num_voxels * index_sums.MAX_BIT_UNITS.value < 2**63


COMPILE = """
import re
import subprocess
import tempfile
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from semidice.kernels import plans
from semidice.kernels.class_blocks import norms_kernel
from semidice.kernels.layout import Layout
from semidice.kernels.mixture import loss_kernel
from semidice.kernels.sums import totals_kernel

POINTERS = (
    "partials", "grad_sums", "scale", "gradient", "logits", "target",
    "class_weight", "total", "terms", "workspace", "norms", "totals",
)
TYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*u8": torch.uint8}
FLOATS = dict.fromkeys(("alpha", "beta", "gamma", "smooth", "entropy_weight", "region_weight"), "fp32")

def pointers_of(**types):
    return dict.fromkeys([name + "_ptr" for name in POINTERS], "*fp32") | {
        name + "_ptr": kind for name, kind in types.items()
    }

def compile_for_hopper(kernel, pointers, constants, num_warps, registers=None):
    # Triton treats a tensor that is None as a constant
    constants = constants | {
        name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in pointers
    }
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    numbers = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # the strides of large tensors are multiples of 16, and so are their addresses
    addresses = {name for name, kind in pointers.items() if kind.startswith("*")}
    strides = ("_stride_n", "_stride_c")
    aligned = [name for name in kernel.arg_names if name in addresses or name.endswith(strides)]
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=numbers, attrs=divisible)
    options = {"num_warps": num_warps} | ({"maxnreg": registers} if registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def check_exponentials(compiled, constants, tile, extra):
    # the compiler may compute a tile twice, in two layouts, which is slow; only this count reveals it
    in_blocks = tile.class_block is not None
    rows = tile.class_block if in_blocks else sum(num_rows for _, num_rows in constants["SPEC"].chunks)
    # the gradient passes over the classes twice
    num_passes = 2 if in_blocks and "gradient" in compiled.name else 1
    elements = num_passes * rows * tile.voxel_block // (32 * tile.num_warps)
    count = compiled.asm["ptx"].count("ex2.approx")
    assert count < 1.5 * elements + extra, (compiled.name, constants["SPEC"], tile, elements, count)
    if in_blocks:
        # all values are kept in registers
        assert resources(compiled)["STACK"] == 0, (compiled.name, tile)

def resources(compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        process = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r" ([A-Z]+):(\\d+)", process.stdout)}

def check_programs_at_once(compiled, layout, tile):
    # the assumed number of programs fits on a multiprocessor: registers are allocated in groups of eight,
    # and each program needs an additional kilobyte of shared memory
    registers = 32 * tile.num_warps * -(-resources(compiled)["REG"] // 8) * 8
    fit = min(2**16 // registers, 228 * 1024 // (compiled.metadata.shared + 1024), 32)
    assert layout.programs_at_once <= 132 * fit, (compiled.name, tile, registers, compiled.metadata.shared)

# one number of classes for every tiling, in one to three chunks
CASES = (
    (3, "*fp32", "*fp32"), (14, "*fp32", "*fp32"), (14, "*bf16", "*u8"), (19, "*bf16", "*u8"),
    (27, "*fp32", "*u8"), (64, "*bf16", "*u8"), (100, "*fp32", "*fp32"), (150, "*bf16", "*u8"),
    (150, "*fp32", "*fp32"), (200, "*bf16", "*u8"), (300, "*fp32", "*u8"),
    (400, "*bf16", "*fp32"), (1000, "*fp32", "*u8"), (2000, "*fp32", "*fp32"), (2000, "*bf16", "*u8"),
)
for num_classes, logits, target in CASES:
    pointers = pointers_of(logits=logits, gradient=logits, target=target)
    shape, stride = (1, num_classes, 4096), (0, 4096, 1)
    types = TYPES[logits], TYPES[target]
    layout = Layout(shape, stride, stride, *types, False, "softmax", "min", True)
    tile = layout.forward
    kernel = plans.sums_launch(layout, 0)._kernel
    constants = dict(SPEC=layout.spec(tile), logits_stride_v=1, target_stride_v=1)
    compiled = compile_for_hopper(kernel, pointers, constants, tile.num_warps, tile.registers)
    check_exponentials(compiled, constants, tile, tile.vector)
    check_programs_at_once(compiled, layout, tile)
    tile = layout.backward
    kernel = plans.gradient_launch(layout, stride)._kernel
    constants = dict(SPEC=layout.spec(tile), logits_stride_v=1, target_stride_v=1, gradient_stride_v=1)
    compiled = compile_for_hopper(kernel, pointers, constants, tile.num_warps, tile.registers)
    check_exponentials(compiled, constants, tile, 2 * tile.vector)
    if tile.class_block is not None:
        tile = layout.norms
        constants = dict(SPEC=layout.spec(tile), logits_stride_v=1)
        compiled = compile_for_hopper(norms_kernel, pointers, constants, tile.num_warps)
        check_exponentials(compiled, constants, tile, 4 * tile.vector)
for over, added_up, num_classes in ((0, False, 4), (1, True, 8192), (2, False, 1000), (1, True, 19)):
    class_block = triton.next_power_of_2(num_classes)
    num_warps, image_block = plans.loss_tile(class_block, 8, adds_up=not added_up)
    constants = dict(
        FORM=0, ENTROPY=True, LOG=over == 1, FOCAL=over == 2, PRESENT=over == 1,
        OVER=over, BACKGROUND=over == 0, ADDED_UP=added_up,
        CLASS_BLOCK=class_block, IMAGE_BLOCK=image_block, COLUMN_BLOCK=128, PROGRAM_BLOCK=64,
    )
    pointers = pointers_of()
    if over > 0:
        del pointers["class_weight_ptr"]
    if not added_up:
        del pointers["terms_ptr"]
    compile_for_hopper(loss_kernel, pointers | FLOATS, constants, num_warps)
compile_for_hopper(totals_kernel, pointers_of(), dict(COLUMN_BLOCK=8, PROGRAM_BLOCK=256), 4)
print("compiled")
"""


def test_the_kernels_compile_for_hopper_without_a_gpu():
    """The interpreter accepts kernels that the compiler refuses, such as those with five warps."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=environment
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.strip() == "compiled"


def test_the_gradient_at_the_label_is_exactly_zero():
    options = MixtureOptions("none", RegionOptions(alpha=0.7, beta=0.3), 0.0, 1.0)
    prob = soft_label(1, 2, 64).to(DEVICE).requires_grad_()
    total = fused.fused_mixture(prob, prob.detach(), None, options, None, parts=False).total
    total.backward()
    assert total.item() == 0
    assert torch.count_nonzero(prob.grad) == 0


needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
DICE_AND_ENTROPY = MixtureOptions("softmax", RegionOptions(alpha=0.5, beta=0.5))
ALL_SUMS = SumsOptions("softmax", "min", entropy=True)


def mixture_and_gradient(logits, target):
    """The total and its gradient, both detached."""
    leaf = logits.detach().requires_grad_()
    total = fused.fused_mixture(leaf, target, None, DICE_AND_ENTROPY, None, parts=True).total
    total.backward()
    return total.detach(), leaf.grad


@needs_gpu
@pytest.mark.parametrize("shape", [(2, 3, 1000), (2, 14, 5000), (1, 150, 3000), (1, 2000, 500)], ids=str)
def test_a_captured_step_equals_the_eager_one_bit_for_bit(shape):
    logits, target = random_logits(*shape).to(DEVICE), soft_label(*shape).to(DEVICE)
    eager = mixture_and_gradient(logits, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture_and_gradient(logits, target)
    for result in captured:
        result.fill_(7)
    graph.replay()
    for actual, expected in zip(captured, eager, strict=True):
        assert torch.equal(actual, expected)


@needs_gpu
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("num_classes", [2, 14, 32, 50, 64, 100, 150, 200, 300])
def test_sums_that_occupy_the_whole_gpu_equal_the_definition(num_classes, kind, monkeypatch):
    """All multiprocessors have programs, and there are more tiles than programs."""
    monkeypatch.setattr(layout, "_num_multiprocessors", num_multiprocessors)
    kernels.forget_plans()
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (3, num_classes, 2**25 // num_classes // 3 + 1)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
        target = torch.randn(shape, device=DEVICE, generator=generator).softmax(1)
        if kind == "hard":
            target = target.argmax(1).to(torch.int16)
        planned = flat_inputs(logits, target, None, ALL_SUMS).layout
        num_tiles = -(-shape[2] // planned.forward.voxel_block)
        assert 1 < num_tiles / planned.num_programs <= planned.forward.num_tiles
        actual = fused.fused_sums(logits, target, None, ALL_SUMS)
        exact_target = target.double() if kind == "soft" else target
        expected = reference_sums(logits.double(), exact_target, None, ALL_SUMS)
        pairs = zip((*actual.overlap, *actual[1:]), (*expected.overlap, *expected[1:]), strict=True)
        for actual_sum, expected_sum in pairs:
            torch.testing.assert_close(actual_sum.double(), expected_sum.double(), rtol=1e-5, atol=0.0)
    kernels.forget_plans()


@needs_gpu
@pytest.mark.parametrize(
    "shape", [(8, 2, 512, 512), (2, 14, 64, 64, 64), (4, 150, 128, 128), (1, 2000, 160, 160)], ids=str
)
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_gradient_is_the_only_large_tensor(shape, kind):
    logits = torch.randn(shape, device=DEVICE)
    target = torch.randn(shape, device=DEVICE).softmax(1)
    if kind == "hard":
        target = torch.randint(shape[1], (shape[0], *shape[2:]), device=DEVICE, dtype=torch.int16)
    mixture_and_gradient(logits, target)
    planned = flat_inputs(logits, target, None, ALL_SUMS).layout
    num_partials = shape[0] * planned.num_programs * NUM_SUMS * shape[1]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _, gradient = mixture_and_gradient(logits, target)
    extra = torch.cuda.max_memory_allocated() - before - 4 * gradient.numel()
    assert extra <= 4 * num_partials + 1e6


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 2, 2**30 + 7), (3, 2, 400_000_001), (1, 70, 31_000_001), (1, 1100, 2_000_001)], ids=str
)
def test_more_than_two_to_the_31_elements_equal_the_definition(shape):
    """One such image, or several smaller ones; the definition is computed in parts."""
    logits = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()
    target = torch.randint(shape[1], (shape[0], shape[2]), device=DEVICE, dtype=torch.int16)
    logits.requires_grad_()
    sums = fused.fused_sums(logits, target, None, ALL_SUMS)
    parts = torch.stack([*sums.overlap, sums.entropy, sums.mass])
    incoming = torch.randn(4, *parts.shape[1:], device=DEVICE)
    (gradient,) = torch.autograd.grad(list(parts[:4]), logits, list(incoming))

    exact = torch.zeros_like(parts, dtype=torch.float64)
    step = 2**30 // (shape[0] * shape[1] * 8)
    for start in range(0, shape[2], step):
        part = slice(start, min(start + step, shape[2]))
        piece = logits.detach()[..., part].float().requires_grad_()
        piece_sums = reference_sums(piece, target[..., part], None, ALL_SUMS)
        exact += torch.stack([*piece_sums.overlap, piece_sums.entropy, piece_sums.mass]).detach()
        piece_gradient = reference_gradient(piece, target[..., part], None, ALL_SUMS, list(incoming))
        torch.testing.assert_close(gradient[..., part], piece_gradient.bfloat16().detach())
    # a billion float32 numbers, added in a different order
    torch.testing.assert_close(parts.double().detach(), exact, rtol=1e-4, atol=0)
