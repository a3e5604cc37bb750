"""The target contract: invalid inputs are refused, and the message states the input and the remedy."""

import jaxtyping
import pytest
import torch
from laws import class_map, random_logits, soft_label

from semidice import DiceLoss, SegmentationLoss, TverskyLoss, dice_loss, overlap_stats, soft_cross_entropy

PROB = soft_label(2, 3, 4, 5)
INDEX = class_map((2, 4, 5), 3)
NAN = soft_label(2, 3, 4, 5)
NAN[0, 0, 0, 0] = torch.nan

REFUSED = {
    "an integer soft label": (
        PROB,
        (PROB > 0.5).long(),
        {},
        r"class indices.*int64 \(2, 3, 4, 5\).*\.float\(\)",
    ),
    "a float class map": (PROB, INDEX.float(), {}, r"needs a class axis.*float32 \(2, 4, 5\).*\.long\(\)"),
    "a bool target": (PROB, PROB > 0.5, {}, r"bool \(2, 3, 4, 5\).*\.float\(\)"),
    "a complex target": (PROB, PROB + 0j, {}, "complex64"),
    "a target above one": (PROB, PROB * 2, {}, r"target must lie in \[0, 1\]; got values from"),
    "a negative target": (PROB, -PROB, {}, r"target must lie in \[0, 1\]"),
    "NaN in the target": (PROB, NAN, {}, "target holds NaN in 1 of 120 values"),
    "NaN in the prediction": (NAN, PROB, {}, "prediction holds NaN in 1 of 120"),
    "logits in place of probabilities": (
        random_logits(2, 3, 4, 5),
        PROB,
        {},
        "for logits, use activation='softmax'",
    ),
    "a different number of channels": (
        PROB,
        soft_label(2, 4, 4, 5),
        {},
        r"images or channels.*\(2, 4, 4, 5\).*\(2, 3, 4, 5\)",
    ),
    "a different batch size": (PROB, soft_label(1, 3, 4, 5), {}, r"images or channels.*\(1, 3, 4, 5\)"),
    "a different size": (PROB, soft_label(2, 3, 4, 6), {}, r"differ in shape.*\(2, 3, 4, 6\)"),
    "class indices of a different size": (PROB, INDEX[:, :3], {}, r"\(N, \*space\).*int64 \(2, 3, 5\)"),
    "a class that does not exist": (PROB, INDEX + 1, {}, r"indices 1 to 3, but there are 3.*ignore_index"),
    "a negative class": (PROB, INDEX - 1, {}, "indices -1 to 1"),
    "ignore_index with a soft label": (
        PROB,
        PROB,
        {"ignore_index": 0},
        "ignore_index=0 is for integer.*valid=",
    ),
    "a fractional valid mask": (PROB, INDEX, {"valid": torch.rand(2, 4, 5)}, r"valid must be bool.*float32"),
    "a valid mask with channels": (
        PROB,
        INDEX,
        {"valid": torch.ones(2, 1, 4, 5, dtype=torch.bool)},
        r"no channel axis; got bool \(2, 1, 4, 5\)",
    ),
    "an empty batch": (PROB[:0], PROB[:0], {}, r"prediction is empty: float32 \(0, 3, 4, 5\)"),
    "empty space": (PROB[..., :0], PROB[..., :0], {}, "prediction is empty"),
    "an integer prediction": (INDEX, INDEX, {}, r"prediction must be a float tensor.*int64"),
    "a prediction without classes": (PROB[0, 0, 0], PROB[0, 0, 0], {}, r"float tensor \(N, C, \*space\)"),
    "class indices for one channel": (PROB[:, :1], INDEX, {}, "one-channel prediction needs a float target"),
}


@pytest.mark.parametrize("function", [dice_loss, soft_cross_entropy, overlap_stats])
@pytest.mark.parametrize("case", REFUSED)
def test_functions_refuse_an_invalid_input_and_say_why(case, function):
    prediction, target, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        function(prediction, target, **options)


@pytest.mark.parametrize("case", [name for name in REFUSED if "predi" not in name and "logits" not in name])
def test_modules_refuse_the_same_invalid_inputs(case):
    _, target, options, message = REFUSED[case]
    logits = random_logits(*REFUSED[case][0].shape)
    activation = "sigmoid" if logits.shape[1] == 1 else "softmax"
    loss = SegmentationLoss(DiceLoss(activation=activation, ignore_index=options.get("ignore_index")))
    with pytest.raises(ValueError, match=message):
        loss(logits, target, options.get("valid"))


def test_softmax_over_one_channel_is_refused():
    with pytest.raises(ValueError, match=r"softmax over one channel.*\(2, 1, 4, 5\).*sigmoid"):
        DiceLoss()(random_logits(2, 1, 4, 5), torch.zeros(2, 1, 4, 5))


def test_a_sigmoid_network_refuses_class_indices():
    with pytest.raises(ValueError, match="needs a float target"):
        DiceLoss(activation="sigmoid")(random_logits(2, 3, 4, 5), INDEX)


def test_cross_entropy_of_one_probability_channel_recommends_sigmoid():
    with pytest.raises(ValueError, match="activation='sigmoid'"):
        soft_cross_entropy(PROB[:, :1], PROB[:, :1])


def test_the_message_counts_nan_logits():
    logits = random_logits(2, 3, 4, 5)
    logits[0, 0, 0, :2] = torch.nan
    for loss in (DiceLoss(), SegmentationLoss(), TverskyLoss(alpha=1.0, beta=1.0, form="product")):
        with pytest.raises(ValueError, match=r"the loss is NaN: prediction .* holds 2 NaN and 0 infinite"):
            loss(logits, INDEX)


def test_the_message_names_two_different_devices():
    with pytest.raises(ValueError, match="target is on meta but prediction on cpu"):
        dice_loss(PROB, PROB.to("meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "max"}, "form must be one of 'min', 'product', 'squared', 'relaxed'; got 'max'"),
        ({"over": "voxel"}, "over must be one of 'batch', 'image', 'class'; got 'voxel'"),
        ({"classes": "some"}, "classes must be one of 'all', 'present'"),
        ({"alpha": -0.1}, "alpha must be 0 or more; got -0.1"),
        ({"beta": float("nan")}, "beta must be 0 or more; got nan"),
        ({"alpha": 0.0, "beta": 0.0}, "both 0"),
        ({"smooth": -1.0}, "smooth must be 0 or more"),
        ({"gamma": 0.0}, "gamma must be greater than 0; got 0"),
        ({"form": "squared"}, "needs alpha = beta.*alpha=0.7, beta=0.3"),
        ({"sync": True, "over": "image"}, "needs over='batch'; got 'image'"),
    ],
    ids=str,
)
def test_creating_a_loss_refuses_an_option_out_of_range(options, message, monkeypatch):
    # type annotations are checked only in tests; users see the check of the loss itself
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        TverskyLoss(**{"alpha": 0.7, "beta": 0.3, **options})


def test_creating_a_loss_refuses_an_unknown_option():
    with pytest.raises(TypeError, match=r"no option 'gama'; it has alpha, beta, .*gamma"):
        DiceLoss(gama=2.0)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, 2.0], r"each of the 3 classes; got shape \(2,\)"),
        ([1.0, -1.0, 1.0], "0 or more"),
        ([0.0] * 3, "not all 0"),
    ],
)
def test_class_weights_are_checked(weight, message):
    with pytest.raises(ValueError, match=message):
        dice_loss(PROB, INDEX, class_weight=weight)


def test_excluding_the_background_of_one_channel_is_refused():
    with pytest.raises(ValueError, match="background=False leaves no class"):
        dice_loss(PROB[:, :1], PROB[:, :1], background=False)


def test_negative_mixture_weights_are_refused():
    with pytest.raises(ValueError, match="region_weight must be 0 or more"):
        SegmentationLoss(region_weight=-1.0)


def test_values_of_invalid_voxels_are_not_checked():
    valid = torch.ones(2, 4, 5, dtype=torch.bool)
    valid[0, 0, 0] = False
    assert torch.isfinite(dice_loss(PROB, NAN, valid=valid))
    index = INDEX.clone()
    index[0, 0, 0] = 99
    assert torch.isfinite(dice_loss(PROB, index, valid=valid))
