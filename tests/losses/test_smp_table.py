"""The rows of docs/peers.md for segmentation_models_pytorch, against smp itself: values and gradients."""

import inspect
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from laws import class_map, random_logits
from torch.testing import assert_close

from semidice import losses

smp = pytest.importorskip("segmentation_models_pytorch").losses
PAGE = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()
SECTION = PAGE.partition("## segmentation_models_pytorch\n")[2].partition("\n## ")[0]
NAMES = re.findall(r"^\| `(Dice|Jaccard|Tversky)Loss` \|", SECTION, flags=re.MULTILINE)

# an argument of smp, with the number of classes: the options of ours that the page names
ROWS = {
    "mode": lambda mode, _: {"activation": "softmax" if mode == "multiclass" else "sigmoid"},
    "classes": lambda classes, num: {"class_weight": [float(classes.count(n)) for n in range(num)]},
    "log_loss": lambda log, _: {"log": log},
    "from_logits": lambda from_logits, _: {} if from_logits else {"activation": "none"},
    "smooth": lambda smooth, _: {"smooth": smooth},
    "ignore_index": lambda index, _: {"ignore_index": index},
    "eps": lambda _, __: {},
    "class_weights": lambda weights, _: {"class_weight": weights},
    "alpha": lambda alpha, _: {"alpha": alpha},
    "beta": lambda beta, _: {"beta": beta},
    # the power of the mean, see `as_the_page_says`
    "gamma": lambda _, __: {},
}


def as_the_page_says(name, smp_options, prediction, target):
    """Our loss in place of smp's, with the options and the three steps that the page names."""
    num = prediction.shape[1]
    options = {"alpha": 0.5, "beta": 0.5} if name == "Tversky" else {}
    for argument, value in smp_options.items():
        # classes and class_weights are one weight
        if argument == "class_weights" and "class_weight" in options:
            value = [a * b for a, b in zip(value, options["class_weight"], strict=True)]
        options |= ROWS[argument](value, num) if value is not None else {}
    weight = torch.tensor(options.get("class_weight") or [1.0] * num, dtype=prediction.dtype)
    index, mode = options.get("ignore_index"), smp_options["mode"]
    ignored = torch.zeros_like(target, dtype=torch.bool) if index is None else target == index
    drawn = target.masked_fill(ignored, -1)
    if mode == "multiclass":
        present = torch.stack([(drawn == number).any() for number in range(num)])
    else:
        present = (drawn == 1).reshape(len(drawn), num, -1).any(2).any(0)
    if mode == "multilabel":
        # integers without an activation would have to be one-hot
        target = target.to(prediction.dtype)
    if mode == "multilabel" and index is not None:
        # some channels of a voxel are ignored: nothing predicted against nothing drawn
        nothing = -torch.inf if smp_options.get("from_logits", True) else 0.0
        prediction, target = prediction.masked_fill(ignored, nothing), target.masked_fill(ignored, 0)
        del options["ignore_index"]
    loss = getattr(losses, f"{name}Loss")(**options, classes="present")(prediction, target)
    if num > 1:
        # smp counts a class that is absent from the target as a loss of 0
        loss = loss * (weight * present).sum() / weight.sum()
    return loss ** smp_options.get("gamma", 1.0)


def value_and_gradient(loss, prediction):
    prediction = prediction.clone().requires_grad_()
    value = loss(prediction)
    return value.detach(), torch.autograd.grad(value, prediction)[0]


def test_every_argument_of_smp_has_a_row_and_is_tried():
    assert NAMES == ["Dice", "Jaccard", "Tversky"]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", SECTION, flags=re.MULTILINE))))
    for name in NAMES:
        arguments = inspect.signature(getattr(smp, f"{name}Loss")).parameters.keys()
        assert arguments <= ROWS.keys()
        assert arguments <= named


@st.composite
def hard_cases(draw):
    """A loss with options, probabilities or logits in float64, and a hard target as smp takes it."""
    name, mode = draw(st.sampled_from(NAMES)), draw(st.sampled_from(["binary", "multiclass", "multilabel"]))
    num_classes = 1 if mode == "binary" else draw(st.integers(2, 4))
    num_images, space = draw(st.integers(1, 3)), draw(st.sampled_from([(7,), (4, 5), (1, 1), (2, 3, 4)]))
    ignore_index = draw(st.sampled_from([None, 255, -1, 1]))
    options = {
        "mode": mode,
        "log_loss": draw(st.booleans()),
        "from_logits": draw(st.booleans()),
        "smooth": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "ignore_index": ignore_index,
    }
    if name == "Tversky":
        options |= {key: draw(st.sampled_from([0.25, 0.7, 1.5])) for key in ("alpha", "beta")}
        options["gamma"] = draw(st.sampled_from([1.0, 1.5, 2.0]))
    if mode != "binary" and draw(st.booleans()):
        options["classes"] = draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=4))
    if mode != "binary" and draw(st.booleans()):
        # sums of these are exact in float32, the type in which smp adds them
        weights = st.lists(st.sampled_from([0.25, 1.0, 2.5]), min_size=num_classes, max_size=num_classes)
        options["class_weights"] = draw(weights)
    seed = draw(st.integers(0, 999))
    prediction = random_logits(num_images, num_classes, *space, seed=seed).double()
    if not options["from_logits"]:
        prediction = prediction.softmax(1) if mode == "multiclass" else prediction.sigmoid()
    # small targets, so that classes are often absent
    high = num_classes if mode == "multiclass" else 2
    shape = (num_images, *space) if mode == "multiclass" else (num_images, num_classes, *space)
    target = class_map(shape, draw(st.integers(1, high)), seed=seed + 1)
    if ignore_index is not None:
        target = torch.where(random_logits(*shape, seed=seed + 2) > 0.5, ignore_index, target)
    if mode == "binary" and draw(st.booleans()):
        target = target.squeeze(1)
    return name, options, prediction, target


@settings(max_examples=300)
@given(hard_cases())
def test_value_and_gradient_equal_those_of_smp_on_hard_labels(case):
    name, options, prediction, target = case
    theirs = getattr(smp, f"{name}Loss")(**options)
    expected, expected_gradient = value_and_gradient(lambda each: theirs(each, target), prediction)
    value, gradient = value_and_gradient(
        lambda each: as_the_page_says(name, options, each, target), prediction
    )
    assert_close(value, expected)
    assert_close(gradient, expected_gradient)


@settings(max_examples=50)
@given(hard_cases())
def test_single_precision_equals_that_of_smp(case):
    name, options, prediction, target = case
    expected = getattr(smp, f"{name}Loss")(**options)(prediction.float(), target)
    # smp subtracts sums over all voxels, and loses some digits of the small numbers
    assert_close(as_the_page_says(name, options, prediction.float(), target), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("predicted", "target", "dice", "jaccard"),
    [
        ("1110", "1110", 0, 0),
        ("1111", "1100", 1 - 2 / 3, 1 - 1 / 2),
        ("1100", "0011", 1, 1),
        ("0000", "0011", 1, 1),
        ("1000", "1110", 1 - 1 / 2, 1 - 1 / 3),
        # nothing to find: smp's loss is 0 whatever was predicted
        ("1111", "0000", 0, 0),
        ("0000", "0000", 0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_hard_masks_have_the_values_of_smp_and_by_hand(predicted, target, dice, jaccard, dtype):
    prediction, mask = (torch.tensor([[[float(digit) for digit in text]]]) for text in (predicted, target))
    options = {"mode": "binary", "from_logits": False}
    for name, expected in (("Dice", dice), ("Jaccard", jaccard), ("Tversky", dice)):
        for each in (mask.to(dtype), mask.to(dtype).squeeze(1)):
            theirs = getattr(smp, f"{name}Loss")(**options)(prediction, each)
            ours = as_the_page_says(name, options, prediction, each)
            assert theirs.item() == pytest.approx(expected, abs=1e-6)
            assert ours.item() == pytest.approx(expected, abs=1e-6)
