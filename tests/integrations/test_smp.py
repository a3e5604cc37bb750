"""Losses called as those of segmentation_models_pytorch: equal on hard labels; every difference is shown."""

import inspect
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import segmentation_models_pytorch as smp
import torch
from hypothesis import given, settings
from laws import class_map, random_logits, soft_label
from torch.testing import assert_close

from semidice import dice_loss
from semidice.integrations import smp as ours

NAMES = ["DiceLoss", "JaccardLoss", "TverskyLoss"]
each_loss = pytest.mark.parametrize("name", NAMES)
PAGE = (Path(__file__).parents[2] / "docs" / "smp.md").read_text()


def value_and_gradient(loss, prediction, target):
    prediction = prediction.clone().requires_grad_()
    value = loss(prediction, target)
    return value.detach(), torch.autograd.grad(value, prediction)[0]


def both(name, *args, **options):
    return getattr(smp.losses, name)(*args, **options), getattr(ours, name)(*args, **options)


def gradients(name, prediction, target, *args, **options):
    """The gradients of smp's loss and of ours."""
    return [value_and_gradient(loss, prediction, target)[1] for loss in both(name, *args, **options)]


@each_loss
def test_arguments_their_order_and_their_defaults_are_those_of_smp(name):
    theirs, mine = (
        [(each.name, each.default) for each in inspect.signature(loss).parameters.values()]
        for loss in (getattr(smp.losses, name), getattr(ours, name))
    )
    assert mine == [*theirs, ("unknown", inspect.Parameter.empty)]
    for loss in (getattr(smp.losses, name), getattr(ours, name)):
        assert [*inspect.signature(loss.forward).parameters] == ["self", "y_pred", "y_true"]


@st.composite
def hard_cases(draw):
    """A loss with options, probabilities or logits in float64, and a hard target as smp takes it."""
    name, mode = draw(st.sampled_from(NAMES)), draw(st.sampled_from(["binary", "multiclass", "multilabel"]))
    num_classes = 1 if mode == "binary" else draw(st.integers(2, 4))
    num_images, space = draw(st.integers(1, 3)), draw(st.sampled_from([(7,), (4, 5), (1, 1), (2, 3, 4)]))
    ignore_index = draw(st.sampled_from([None, 255, -1, 1]))
    options = {
        "log_loss": draw(st.booleans()),
        "from_logits": draw(st.booleans()),
        "smooth": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "ignore_index": ignore_index,
    }
    if name == "TverskyLoss":
        options |= {key: draw(st.sampled_from([0.25, 0.7, 1.5])) for key in ("alpha", "beta")}
        options["gamma"] = draw(st.sampled_from([1.0, 1.5, 2.0]))
    if mode != "binary" and draw(st.booleans()):
        options["classes"] = draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=4))
    if mode != "binary" and draw(st.booleans()):
        # sums of these are exact in float32, the type in which smp adds them
        options["class_weights"] = draw(
            st.lists(st.sampled_from([0.25, 1.0, 2.5]), min_size=num_classes, max_size=num_classes)
        )
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
    return name, mode, options, prediction, target


@settings(max_examples=300)
@given(hard_cases())
def test_value_and_gradient_equal_those_of_smp_on_hard_labels(case):
    name, mode, options, prediction, target = case
    (value, gradient), (expected, expected_gradient) = (
        value_and_gradient(loss, prediction, target) for loss in reversed(both(name, mode, **options))
    )
    assert_close(value, expected)
    assert_close(gradient, expected_gradient)


@settings(max_examples=50)
@given(hard_cases())
def test_single_precision_equals_that_of_smp(case):
    name, mode, options, prediction, target = case
    theirs, mine = both(name, mode, **options)
    # smp subtracts sums over all voxels, and loses some digits of the small numbers
    assert_close(mine(prediction.float(), target), theirs(prediction.float(), target), rtol=1e-4, atol=1e-5)


def columns(*names):
    """One column of probabilities or masks per text of 0 and 1, as one image (1, C, voxels)."""
    return torch.tensor([[[float(digit) for digit in name] for name in names]])


class TestKnownValues:
    """Hard predictions whose loss is a fraction, with smp and ours; the kinds of cases that smp tests."""

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
    def test_binary(self, predicted, target, dice, jaccard, dtype):
        predicted, target = columns(predicted), columns(target).to(dtype)
        for name, expected in (("DiceLoss", dice), ("JaccardLoss", jaccard), ("TverskyLoss", dice)):
            for loss in both(name, "binary", from_logits=False):
                assert loss(predicted, target).item() == pytest.approx(expected, abs=1e-6)
                assert loss(predicted, target.squeeze(1)).item() == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize(
        ("predicted", "target", "jaccard"),
        [
            (("1100", "0011"), [0, 0, 1, 1], 0),
            (("0011", "1100"), [0, 0, 1, 1], 1),
            (("1000", "0111"), [0, 0, 1, 1], 1 - (1 / 2 + 2 / 3) / 2),
            # the third class is absent, and counts as a loss of 0
            (("1000", "0110", "0001"), [0, 0, 1, 1], (1 / 2 + 2 / 3) / 3),
        ],
    )
    def test_multiclass(self, predicted, target, jaccard):
        for loss in both("JaccardLoss", "multiclass", from_logits=False):
            actual = loss(columns(*predicted), torch.tensor([target]))
            assert actual.item() == pytest.approx(jaccard, abs=1e-6)

    def test_multilabel(self):
        predicted, target = columns("1100", "1110"), columns("1000", "1111")
        for loss in both("DiceLoss", "multilabel", from_logits=False):
            assert loss(predicted, target).item() == pytest.approx(1 - (2 / 3 + 6 / 7) / 2, abs=1e-6)

    def test_ignored_voxels(self):
        predicted, target = columns("1111", "0000"), torch.tensor([[0, 0, 1, 255]])
        for loss in both("DiceLoss", "multiclass", from_logits=False, ignore_index=255):
            assert loss(predicted, target).item() == pytest.approx((1 / 5 + 1) / 2, abs=1e-6)

    def test_the_focal_loss_is_a_power_of_the_mean_over_the_classes(self):
        predicted, target = columns("1000", "0111"), torch.tensor([[0, 0, 1, 1]])
        expected = (1 - (2 / 3 + 4 / 5) / 2) ** 2
        for loss in both("TverskyLoss", "multiclass", from_logits=False, gamma=2.0):
            assert loss(predicted, target).item() == pytest.approx(expected, abs=1e-6)

    def test_soft_masks_have_the_value_of_smp_away_from_ties(self):
        logits, label = random_logits(2, 3, 6, 7).double(), soft_label(2, 3, 6, 7).double()
        for name in NAMES:
            theirs, mine = both(name, "multilabel")
            assert_close(mine(logits, label), theirs(logits, label))


class TestDifferences:
    """One test for each row of the table in docs/smp.md."""

    def test_soft_labels_of_several_classes(self):
        logits, label = random_logits(2, 3, 6, 7), soft_label(2, 3, 6, 7)
        theirs, mine = both("DiceLoss", "multiclass")
        with pytest.raises((RuntimeError, AssertionError)):
            theirs(logits, label)
        assert_close(mine(logits, label), dice_loss(logits, label, activation="softmax"))
        ignored = label.clone()
        ignored[:, :, :2] = 255
        mine = ours.DiceLoss("multiclass", ignore_index=255)
        assert_close(mine(logits, ignored), ours.DiceLoss("multiclass")(logits[:, :, 2:], label[:, :, 2:]))
        ignored[:, 0] = 255
        with pytest.raises(ValueError, match=r"target must lie in \[0, 1\]; got values from .* to 255"):
            mine(logits, ignored)

    def test_gradient_at_the_label(self):
        label = soft_label(2, 3, 50)
        theirs, mine = gradients(
            "TverskyLoss", label, label, "multilabel", from_logits=False, alpha=0.7, beta=0.3
        )
        assert theirs.abs().max() > 1e-3
        assert mine.abs().max() == 0

    def test_focal_exponent_below_1(self):
        mask = torch.ones(1, 1, 4)
        theirs, mine = gradients("TverskyLoss", mask, mask, "binary", from_logits=False, gamma=0.5)
        assert not theirs.isfinite().all()
        assert mine.abs().max() == 0

    def test_eps(self):
        logits, target = torch.full((1, 1, 4), -5.0), torch.ones(1, 4)
        theirs, mine = both("DiceLoss", "binary", eps=0.5, log_loss=True)
        assert_close(theirs(logits, target), -torch.tensor(0.5).log())
        assert_close(mine(logits, target), ours.DiceLoss("binary", log_loss=True)(logits, target))

    def test_half_precision(self):
        # one voxel in 64 is foreground, and the prediction is 0.5 everywhere
        logits, target = torch.zeros(1, 1, 2**17), torch.zeros(1, 2**17)
        target[:, ::64] = 1
        theirs, mine = both("JaccardLoss", "binary")
        expected = theirs(logits.double(), target)
        half = logits.half()
        assert not theirs(half, target).isfinite() or abs(theirs(half, target) - expected) > 1e-3
        assert_close(mine(half, target).double(), expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("mode", ["binary", "multiclass", "multilabel"])
    def test_ignored_voxels_with_nan(self, mode):
        num_channels = 1 if mode == "binary" else 2
        logits, target = torch.zeros(1, num_channels, 4), torch.tensor([[0, 1, 1, 255]])
        target = target if mode == "multiclass" else target.expand(1, num_channels, 4)
        logits[:, :, 3] = torch.nan
        theirs, mine = both("DiceLoss", mode, ignore_index=255)
        assert theirs(logits, target).isnan()
        value, gradient = value_and_gradient(mine, logits, target)
        expected, expected_gradient = value_and_gradient(mine, logits[..., :3], target[..., :3])
        assert_close(value, expected)
        assert_close(gradient[..., :3], expected_gradient)
        assert gradient[..., 3].abs().max() == 0

    def test_class_indices(self):
        logits, index = random_logits(2, 3, 6, 7), class_map((2, 6, 7), 3)
        theirs, mine = both("DiceLoss", "multiclass", ignore_index=255)
        # smp: floats are rounded down to classes if there is an ignore_index, and bytes fail without one
        assert_close(theirs(logits, index + 0.9), theirs(logits, index))
        with pytest.raises(ValueError, match=r"a float target needs a class axis.*use \.long\(\)"):
            mine(logits, index + 0.9)
        theirs, mine = both("DiceLoss", "multiclass")
        with pytest.raises(RuntimeError, match="LongTensor"):
            theirs(logits, index.to(torch.uint8))
        assert_close(mine(logits, index.to(torch.uint8)), mine(logits, index))

    def test_values_outside_of_0_to_1(self):
        logits, mask = random_logits(2, 1, 6, 7), torch.full((2, 6, 7), 255)
        theirs, mine = both("DiceLoss", "binary")
        assert theirs(logits, mask).isfinite()
        with pytest.raises(ValueError, match=r"target must lie in \[0, 1\]; got values from 255 to 255"):
            mine(logits, mask)
        theirs, mine = both("DiceLoss", "binary", from_logits=False)
        assert theirs(logits, mask > 0).isfinite()
        with pytest.raises(ValueError, match=r"prediction must lie in \[0, 1\]"):
            mine(logits, mask > 0)

    def test_one_channel_of_several_classes(self):
        logits, index = random_logits(2, 1, 6, 7), torch.zeros(2, 6, 7, dtype=torch.long)
        theirs, mine = both("DiceLoss", "multiclass")
        assert theirs(logits, index) == 0
        with pytest.raises(ValueError, match="mode='multiclass' needs two or more channels"):
            mine(logits, index)

    def test_each_row_of_the_page_has_its_test(self):
        rows = re.findall(r"^\| ([^|]+?) \|", PAGE.partition("## Differences")[2], flags=re.MULTILINE)[1:]
        tests = [
            name.removeprefix("test_").replace("_", " ") for name in dir(self) if name.startswith("test_")
        ]
        tests.remove("each row of the page has its test")
        assert sorted(row.lower() for row in rows) == sorted(tests)


LOGITS, INDEX = random_logits(2, 3, 4, 5), class_map((2, 4, 5), 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ours.DiceLoss("multi-class"),
            ValueError,
            "mode must be one of 'binary', 'multiclass', 'multi",
        ),
        (
            lambda: ours.DiceLoss("binary", form="min"),
            TypeError,
            "DiceLoss has no option 'form'; it has mode,",
        ),
        (lambda: ours.JaccardLoss("binary", gamma=2), TypeError, "JaccardLoss has no option 'gamma'; it has"),
        (
            lambda: ours.TverskyLoss("binary", weight=2),
            TypeError,
            "no option 'weight'; it has .*, beta, gamma",
        ),
        (lambda: ours.TverskyLoss("binary", alpha=0, beta=0), ValueError, "alpha and beta are both 0"),
        (lambda: ours.DiceLoss("binary", classes=[0]), ValueError, "leave classes and class_weights out"),
        (
            lambda: ours.DiceLoss("binary", class_weights=[1]),
            ValueError,
            "leave classes and class_weights out",
        ),
        (lambda: ours.DiceLoss("binary", smooth=-1), ValueError, "smooth must be 0 or more; got -1"),
        (
            lambda: ours.DiceLoss("binary")(LOGITS, INDEX),
            ValueError,
            "'binary' needs one channel; got float32",
        ),
        (
            lambda: ours.DiceLoss("multilabel")(LOGITS, INDEX),
            ValueError,
            "needs a class axis|differ in shape",
        ),
        (
            lambda: ours.DiceLoss("multilabel", ignore_index=255)(LOGITS, INDEX),
            ValueError,
            "needs a class axis|differ in shape",
        ),
        (
            lambda: ours.DiceLoss("multiclass", classes=[3])(LOGITS, INDEX),
            ValueError,
            r"classes must be a list of numbers below 3; got \[3\]",
        ),
        (
            lambda: ours.DiceLoss("multiclass", class_weights=[1, 2])(LOGITS, INDEX),
            ValueError,
            "class_weight needs one number for each of the 3 classes",
        ),
        (
            lambda: ours.DiceLoss("multiclass", ignore_index=0)(LOGITS, soft_label(2, 3, 4, 5)),
            ValueError,
            "ignore_index=0 is a class, .*: set ignored voxels to 255",
        ),
        (
            lambda: ours.DiceLoss("multiclass")(LOGITS, INDEX + 9),
            ValueError,
            "class indices 9 to 11, but there",
        ),
        (lambda: ours.DiceLoss("multiclass")(LOGITS, INDEX.to_sparse()), ValueError, "y_true is sparse"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_to_do(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_module_does_not_import_smp():
    source = Path(ours.__file__).read_text()
    assert "import segmentation_models_pytorch" not in source


def test_class_weights_move_with_the_module():
    loss = ours.DiceLoss("multiclass", class_weights=[1.0, 2.0])
    assert loss.to("meta").class_weights.is_meta
    assert loss.state_dict() == {}
