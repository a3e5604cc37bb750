"""Laws that every public loss obeys in every form."""

import math
from typing import get_args

import pytest
import torch
from laws import (
    COMPATIBLE,
    ENTRIES,
    FORMS,
    NOT_UNIQUE,
    REGION_FUNCTIONS,
    REGION_MODULES,
    UNIQUE,
    ZERO_AT_LABEL,
    class_map,
    is_loss,
    random_logits,
    soft_label,
)

import semidice
from semidice.arrays import one_hot
from semidice.losses.options import Form

each_loss = pytest.mark.parametrize("entry", ENTRIES, ids=str)
SHAPES = [(6, 4), (2, 3, 7), (2, 3, 5, 6), (2, 2, 3, 4, 5)]
ALPHA_BETA = [(0.5, 0.5), (1.0, 1.0), (0.7, 0.3), (0.1, 2.0), (3.0, 0.0), (0.0, 0.4)]


def test_the_table_lists_every_public_loss_and_the_modules_in_every_form():
    assert {entry.public for entry in ENTRIES} == set(filter(is_loss, semidice.__all__))
    listed = {(entry.public, entry.form) for entry in ENTRIES}
    with_forms = {*REGION_MODULES, "SegmentationLoss", "DistillationLoss"}
    assert {(name, form) for name in with_forms for form in get_args(Form)} <= listed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("function", "module"), [*zip(REGION_FUNCTIONS, REGION_MODULES, strict=True)])
def test_a_function_equals_its_module(function, module, form):
    # the squared form needs alpha = beta
    weights = (
        dict.fromkeys(REGION_FUNCTIONS[function], 0.8) if form == "squared" else REGION_FUNCTIONS[function]
    )
    options = {"form": form, "gamma": 2.0, "over": "image", **weights}
    prob, label = soft_label(2, 3, 40, seed=4), soft_label(2, 3, 40)
    value = getattr(semidice, function)(prob, label, **options)
    expected = getattr(semidice, module)(activation="none", **options)(prob, label)
    torch.testing.assert_close(value, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("entry", ZERO_AT_LABEL, ids=str)
def test_loss_and_gradient_are_zero_at_a_soft_label(entry, activation, shape):
    logits = random_logits(*shape).requires_grad_()
    # the label equals the network output bit for bit
    label = (logits.softmax(1) if activation == "softmax" else logits.sigmoid()).detach()
    loss = entry.build(activation=activation)(logits, label)
    loss.backward()
    assert loss.item() <= 1e-6
    assert torch.count_nonzero(logits.grad) == 0


@pytest.mark.parametrize(("alpha", "beta"), ALPHA_BETA)
@pytest.mark.parametrize(
    "options", [{}, {"gamma": 0.75}, {"gamma": 3.0}, {"log": True}, {"smooth": 1.0}], ids=str
)
@pytest.mark.parametrize("form", ["min", "product"])
def test_the_gradient_at_the_label_is_exactly_zero_for_any_alpha_and_beta(form, options, alpha, beta):
    label = soft_label(2, 3, 50)
    prob = label.clone().requires_grad_()
    loss = semidice.tversky_loss(prob, label, alpha=alpha, beta=beta, form=form, **options)
    loss.backward()
    assert loss.item() == 0
    assert torch.count_nonzero(prob.grad) == 0


@pytest.mark.parametrize("entry", COMPATIBLE, ids=str)
def test_no_prediction_has_a_smaller_loss_than_the_label(entry):
    label = soft_label(2, 3, 5, 6)
    loss = entry.build()
    at_label = loss(label, label)
    means = label.mean((2, 3), keepdim=True).expand_as(label)
    for prediction in (means, label.roll(1, 3), *(soft_label(2, 3, 5, 6, seed=seed) for seed in range(1, 4))):
        assert loss(prediction, label) >= at_label


@pytest.mark.parametrize("entry", NOT_UNIQUE, ids=str)
def test_the_mean_label_everywhere_is_calibrated_without_being_the_label(entry):
    label = soft_label(2, 3, 5, 6)
    means = label.mean((2, 3), keepdim=True).expand_as(label)
    assert entry.build()(means, label).item() < 1e-6
    assert entry.build()(label.roll(1, 3), label).item() > 1e-3


@pytest.mark.parametrize("entry", UNIQUE, ids=str)
def test_every_other_prediction_has_a_larger_loss_than_the_label(entry):
    label = soft_label(2, 3, 5, 6)
    loss = entry.build()
    at_label = loss(label, label)
    for step in (1e-3, 1e-1, 1.0):
        for seed in range(5):
            prediction = (label.log() + step * random_logits(2, 3, 5, 6, seed=seed)).softmax(1)
            assert loss(prediction, label) > at_label


@each_loss
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_first_and_second_derivatives_agree_with_finite_differences(entry, activation):
    logits = random_logits(2, 2, 2, dtype=torch.float64)
    prediction = (logits if activation != "none" else logits.softmax(1)).requires_grad_()
    target = soft_label(2, 2, 2, dtype=torch.float64).requires_grad_(entry.target_gradient)
    # on the CPU the loss checks its inputs: the steps of gradcheck must keep probabilities within [0, 1]
    loss = entry.build(activation=activation)
    assert torch.autograd.gradcheck(loss, (prediction, target))
    assert torch.autograd.gradgradcheck(loss, (prediction, target))


@each_loss
def test_class_indices_and_their_one_hot_label_have_the_same_loss(entry):
    logits, index = random_logits(2, 4, 5, 6), class_map((2, 5, 6), 4)
    loss = entry.build(activation="softmax", class_weight=[1.0, 2.0, 0.5, 3.0])
    encoded = one_hot(index, 4).float()
    torch.testing.assert_close(loss(logits, index), loss(logits, encoded))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        torch.testing.assert_close(loss(logits, index.to(dtype)), loss(logits, index), rtol=0, atol=0)


@each_loss
def test_the_order_of_voxels_and_images_and_the_shape_of_space_do_not_matter(entry):
    logits, label = random_logits(3, 3, 24), soft_label(3, 3, 24)
    loss = entry.build(activation="softmax")
    order = torch.randperm(24)
    expected = loss(logits, label)
    torch.testing.assert_close(loss(logits[..., order], label[..., order]), expected)
    for space in ((4, 6), (2, 3, 4)):
        torch.testing.assert_close(loss(logits.view(3, 3, *space), label.view(3, 3, *space)), expected)
    torch.testing.assert_close(loss(logits.flip(0), label.flip(0)), expected)


@each_loss
def test_strides_do_not_matter(entry):
    logits, label = random_logits(2, 3, 6, 8), soft_label(2, 3, 6, 8)
    loss = entry.build(activation="softmax")
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(loss(channels_last, label), loss(logits, label))
    torch.testing.assert_close(
        loss(logits[..., ::2], label[..., ::2]), loss(logits[..., ::2].contiguous(), label[..., ::2])
    )


@each_loss
@pytest.mark.parametrize(
    ("over", "activation", "value"),
    [
        ("batch", "softmax", math.nan),
        ("image", "softmax", math.inf),
        ("class", "softmax", -math.inf),
        ("batch", "sigmoid", math.nan),
    ],
)
def test_an_invalid_voxel_has_no_effect(entry, over, activation, value):
    logits, label = random_logits(2, 3, 10), soft_label(2, 3, 10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[:, 7:] = False
    corrupted_logits, corrupted_label = logits.clone(), label.clone()
    corrupted_logits[:, :, 7:], corrupted_label[:, :, 7:] = value, math.nan
    corrupted_logits.requires_grad_()
    options = {"over": over} if entry.has_over else {}
    loss = entry.build(activation=activation, **options)
    total = loss(corrupted_logits, corrupted_label, valid)
    torch.testing.assert_close(total, loss(logits[..., :7], label[..., :7]))
    total.backward()
    assert torch.count_nonzero(corrupted_logits.grad[..., 7:]) == 0
    assert torch.count_nonzero(corrupted_logits.grad[..., :7]) > 0


@each_loss
def test_ignore_index_has_the_same_effect_as_an_invalid_voxel(entry):
    logits, index = random_logits(2, 3, 10), class_map((2, 10), 3)
    ignored = index.clone()
    ignored[:, 4:6] = 255
    valid = random_logits(2, 10, seed=6) > -1
    for mask in (None, valid):
        counted = ignored != 255 if mask is None else valid & (ignored != 255)
        expected = entry.build(activation="softmax")(logits, index, counted)
        loss = entry.build(activation="softmax", ignore_index=255)
        torch.testing.assert_close(loss(logits, ignored, mask), expected)


@each_loss
def test_loss_and_gradient_are_zero_if_no_voxel_is_valid(entry):
    logits = random_logits(2, 3, 10).requires_grad_()
    loss = entry.build(activation="softmax")(
        logits, soft_label(2, 3, 10), torch.zeros(2, 10, dtype=torch.bool)
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.count_nonzero(logits.grad) == 0


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_half_precision_is_finite_and_within_a_thousandth_of_float32(entry, dtype, activation):
    logits, label = random_logits(1, 2, 512, 512), soft_label(1, 2, 512, 512)
    half = logits.to(dtype).requires_grad_()
    loss = entry.build(activation=activation)
    result = loss(half, label.to(dtype))
    result.backward()
    assert result.dtype == torch.float32
    assert abs(result.item() - loss(logits, label).item()) < 1e-3
    assert half.grad.dtype == dtype
    assert torch.isfinite(half.grad).all()


@each_loss
def test_loss_and_gradient_of_extreme_half_precision_logits_are_finite(entry):
    logits = torch.tensor([[-6e4, 6e4], [6e4, -6e4]], dtype=torch.float16).view(1, 2, 2).requires_grad_()
    loss = entry.build(activation="softmax")(logits, torch.tensor([[0, 1]]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


@each_loss
def test_float64_stays_float64_and_autocast_changes_nothing(entry):
    logits, label = random_logits(2, 3, 40), soft_label(2, 3, 40)
    loss = entry.build(activation="softmax")
    assert loss(logits.double(), label.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss(logits, label), loss(logits, label), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = loss(logits, label)
    torch.testing.assert_close(under_autocast, loss(logits, label), rtol=0, atol=0)


@each_loss
def test_per_sample_gradients_through_vmap_equal_a_loop(entry):
    logits, label = random_logits(3, 1, 3, 8), soft_label(3, 1, 3, 8).view(3, 1, 3, 8)
    loss = entry.build(activation="softmax")
    label = label.softmax(2)
    mapped = torch.func.vmap(torch.func.grad(lambda x, y: loss(x, y)))(logits, label)
    looped = torch.stack(
        [torch.func.grad(lambda x, y: loss(x, y))(x, y) for x, y in zip(logits, label, strict=True)]
    )
    torch.testing.assert_close(mapped, looped)
