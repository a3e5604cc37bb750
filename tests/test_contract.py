"""The target contract: invalid inputs are refused, and the message states the input and the remedy."""

import jaxtyping
import numpy as np
import pytest
import torch
from laws import class_map, random_logits, soft_label

from semidice import (
    DiceLoss,
    DistillationLoss,
    SegmentationLoss,
    Teacher,
    TverskyLoss,
    arrays,
    calibration,
    dice_loss,
    metrics,
    overlap_stats,
    soft_cross_entropy,
)

PROB = soft_label(2, 3, 4, 5)
INDEX = class_map((2, 4, 5), 3)
ONE_HOT = torch.nn.functional.one_hot(INDEX, 3).movedim(-1, 1)
NAN = soft_label(2, 3, 4, 5)
NAN[0, 0, 0, 0] = torch.nan

REFUSED = {
    "integer masks that overlap": (
        PROB,
        (PROB > 0.2).long(),
        {},
        r"must be one-hot; got int64 \(2, 3, 4, 5\) where \d+ voxels hold no class or several.*\.float\(\)",
    ),
    "masks of 0 and 255": (
        PROB,
        255 * ONE_HOT,
        {},
        r"one-hot classes, 0 and 1; got int64 \(2, 3, 4, 5\) with values from 0 to 255",
    ),
    "one-hot integers and ignore_index": (PROB, ONE_HOT, {"ignore_index": 255}, "ignore_index=255.*valid="),
    "a bool mask in place of class indices": (PROB, INDEX > 0, {}, r"bool \(2, 4, 5\).*\.long\(\)"),
    "a bool mask with a channel": (PROB, INDEX[:, None] > 0, {}, r"bool \(2, 1, 4, 5\).*\.long\(\)"),
    "a float class map with a channel": (
        PROB,
        INDEX[:, None].float(),
        {},
        r"channels of the prediction; got target float32 \(2, 1, 4, 5\).*\.long\(\).*foreground",
    ),
    "class indices of two channels": (
        PROB,
        INDEX[:, None].repeat(1, 2, 1, 1),
        {},
        r"class indices must have shape \(N, \*space\).*int64 \(2, 2, 4, 5\)",
    ),
    "integers 0 to 2 for one channel": (
        PROB[:, :1],
        INDEX[:, None],
        {},
        r"one mask per channel, 0 and 1; got int64 \(2, 1, 4, 5\) with values from 0 to 2",
    ),
    "a float class map": (PROB, INDEX.float(), {}, r"needs a class axis.*float32 \(2, 4, 5\).*\.long\(\)"),
    "bool masks that overlap": (PROB, PROB > 0.2, {}, r"one-hot; got bool \(2, 3, 4, 5\).*\.float\(\)"),
    "a complex target": (PROB, PROB + 0j, {}, "complex64"),
    "a target above one": (PROB, PROB * 2, {}, r"target must lie in \[0, 1\]; got values from"),
    "a negative target": (PROB, -PROB, {}, r"target must lie in \[0, 1\]"),
    "NaN in the target": (PROB, NAN, {}, "target holds NaN in 1 of 120 values"),
    "NaN in the prediction": (NAN, PROB, {}, "prediction holds NaN in 1 of 120"),
    "logits in place of probabilities": (random_logits(2, 3, 4, 5), PROB, {}, "softmax.* or .*sigmoid"),
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
    "class indices for one channel": (PROB[:, :1], INDEX, {}, "one mask per channel, 0 and 1.* from 0 to 2"),
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
    for target in (INDEX, INDEX[:, None]):
        with pytest.raises(ValueError, match=r"needs one mask per channel, \(N, C, \*space\)"):
            DiceLoss(activation="sigmoid")(random_logits(2, 3, 4, 5), target)


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
        ({"beta": float("nan")}, "beta must be a finite number; got nan"),
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
    with pytest.raises(
        TypeError, match=r"^DiceLoss has no option 'gama'; it has form, gamma, .*ignore_index$"
    ):
        DiceLoss(gama=2.0)
    with pytest.raises(TypeError, match=r"^DiceLoss has no option 'alpha'"):
        DiceLoss(alpha=0.7)
    with pytest.raises(TypeError, match=r"^TverskyLoss has no option 'valid'; it has alpha, beta, form"):
        TverskyLoss(alpha=0.7, beta=0.3, valid=None)
    for loss in (SegmentationLoss, DistillationLoss):
        with pytest.raises(TypeError, match=rf"^{loss.__name__} has no option 'gama'; it has .*alpha, beta"):
            loss(gama=2.0)


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


LOGITS = random_logits(2, 3, 4, 5)
# other forms of the class indices INDEX
SAME_CLASSES = {
    "int64 with a channel": INDEX[:, None],
    "int16 with a channel": INDEX[:, None].short(),
    "uint8 with a channel": INDEX[:, None].byte(),
    "int64 one-hot": ONE_HOT,
    "uint8 one-hot": ONE_HOT.byte(),
    "bool one-hot": ONE_HOT.bool(),
}
TAKES_PROB = {
    "dice_loss": dice_loss,
    "soft_cross_entropy": soft_cross_entropy,
    "overlap_stats": overlap_stats,
    "soft_dice_score": metrics.soft_dice_score,
    "dice_score": metrics.dice_score,
    "calibration_error": metrics.calibration_error,
    "calibration_region": calibration.calibration_region,
}


@pytest.mark.parametrize("case", SAME_CLASSES)
@pytest.mark.parametrize("name", TAKES_PROB)
def test_class_indices_with_a_channel_and_one_hot_integers_are_class_indices(case, name):
    expected, actual = (TAKES_PROB[name](PROB, target) for target in (INDEX, SAME_CLASSES[case]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", SAME_CLASSES)
def test_modules_take_the_same_forms_with_the_same_gradient(case):
    valid = PROB[:, 0] > 0.2

    def value_and_gradient(loss, target, *more):
        logits = LOGITS.clone().requires_grad_()
        value = loss(logits, target, *more, valid)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    for loss, more in (
        (DiceLoss(), ()),
        (SegmentationLoss(form="product"), ()),
        (DistillationLoss(), (PROB,)),
    ):
        expected = value_and_gradient(loss, INDEX, *more)
        torch.testing.assert_close(value_and_gradient(loss, SAME_CLASSES[case], *more), expected)


@pytest.mark.parametrize("space", [(), (6,), (3, 4), (2, 3, 4)], ids=str)
def test_a_class_map_with_a_channel_is_never_taken_for_something_else(space):
    # as many classes as images and voxels along every axis: only the number of axes tells forms apart
    logits, index = random_logits(3, 3, *space), class_map((3, *space), 3)
    expected = torch.nn.functional.cross_entropy(logits, index)
    one_hot = torch.nn.functional.one_hot(index, 3).movedim(-1, 1)
    for target in (index, index[:, None], one_hot, one_hot.bool(), one_hot.float()):
        torch.testing.assert_close(soft_cross_entropy(logits, target, activation="softmax"), expected)


def test_a_sigmoid_network_takes_masks_of_any_type():
    logits, mask = random_logits(2, 3, 4, 5), PROB > 0.2
    expected = DiceLoss(activation="sigmoid")(logits, mask.float())
    for target in (mask, mask.byte(), mask.long()):
        torch.testing.assert_close(DiceLoss(activation="sigmoid")(logits, target), expected, rtol=0, atol=0)


def test_one_channel_takes_a_mask_without_a_channel():
    logits, mask = random_logits(2, 1, 4, 5), INDEX > 0
    loss = SegmentationLoss(activation="sigmoid")
    expected = loss(logits, mask[:, None].float())
    for target in (mask, mask.long(), mask.float(), mask[:, None], mask[:, None].byte()):
        torch.testing.assert_close(loss(logits, target), expected, rtol=0, atol=0)


def test_the_mask_of_one_channel_may_hold_the_ignored_index():
    logits, mask = random_logits(2, 1, 4, 5), (INDEX > 0).long()
    ignored = torch.where(INDEX == 2, 255, mask)
    expected = SegmentationLoss(activation="sigmoid")(logits, mask, INDEX != 2)
    for target in (ignored, ignored[:, None], ignored.byte()):
        actual = SegmentationLoss(activation="sigmoid", ignore_index=255)(logits, target)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_one_hot_voxels_that_do_not_count_may_hold_anything():
    valid = INDEX != 2
    damaged = torch.where(valid[:, None], ONE_HOT, 7)
    torch.testing.assert_close(
        SegmentationLoss()(LOGITS, damaged, valid), SegmentationLoss()(LOGITS, INDEX, valid)
    )


def test_the_usual_targets_are_returned_as_they_are():
    for target in (INDEX, PROB):
        assert arrays.read_target(LOGITS, target)[0] is target
    valid = torch.ones(2, 4, 5, dtype=torch.bool)
    assert arrays.read_target(LOGITS, INDEX, valid=valid)[1] is valid


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 2},
        {"activation": "sigmoid"},
        {"class_weight": [1, 2, 0.5]},
        {"background": False, "over": "image"},
        {"form": "relaxed", "smooth": 1.0},
        {"log": True, "gamma": 2.0},
    ],
    ids=str,
)
def test_options_of_the_region_loss_can_be_given_to_the_mixture(options):
    target = ONE_HOT.float() if "activation" in options else INDEX
    expected = SegmentationLoss(DiceLoss(**options))(LOGITS, target)
    torch.testing.assert_close(SegmentationLoss(**options)(LOGITS, target), expected, rtol=0, atol=0)
    teacher = soft_label(2, 3, 4, 5)
    expected = DistillationLoss(SegmentationLoss(DiceLoss(**options)))(LOGITS, target, teacher)
    torch.testing.assert_close(DistillationLoss(**options)(LOGITS, target, teacher), expected, rtol=0, atol=0)


def test_the_mixture_takes_alpha_and_beta():
    expected = SegmentationLoss(TverskyLoss(alpha=0.7, beta=0.3, gamma=2.0))(LOGITS, INDEX)
    assert SegmentationLoss(alpha=0.7, beta=0.3, gamma=2.0)(LOGITS, INDEX) == expected


def test_options_are_given_to_the_region_loss_or_to_the_mixture():
    with pytest.raises(ValueError, match="got a region loss and options of a region loss: ignore_index"):
        SegmentationLoss(DiceLoss(), ignore_index=255)
    with pytest.raises(ValueError, match="got a mix and options of its region loss: ignore_index"):
        DistillationLoss(SegmentationLoss(), ignore_index=255)


WRONG_CLASS = INDEX + 1
ADVICE = {
    "overlap_stats of logits": lambda: overlap_stats(LOGITS, PROB),
    "soft_dice_score of logits": lambda: metrics.soft_dice_score(LOGITS, PROB),
    "calibration_region of a wrong class": lambda: calibration.calibration_region(PROB, WRONG_CLASS),
    "a calibrator of a wrong class": lambda: calibration.TemperatureScaling().fit(PROB, WRONG_CLASS),
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_message_names_no_option_that_the_function_does_not_have(case):
    wrong, option = ("must lie in", "activation") if "logits" in case else ("class indices", "ignore_index")
    with pytest.raises(ValueError, match=wrong) as error:
        ADVICE[case]()
    assert option not in str(error.value)


@pytest.mark.parametrize("loss", [SegmentationLoss, DistillationLoss, DiceLoss])
def test_what_a_message_advises_works(loss):
    more = (PROB,) if loss is DistillationLoss else ()
    with pytest.raises(ValueError, match="ignore_index or valid"):
        loss()(LOGITS, torch.where(INDEX == 2, 255, INDEX), *more)
    assert torch.isfinite(loss(ignore_index=255)(LOGITS, torch.where(INDEX == 2, 255, INDEX), *more))
    more = (PROB[:, :1],) if loss is DistillationLoss else ()
    with pytest.raises(ValueError, match="activation='sigmoid'"):
        loss()(LOGITS[:, :1], PROB[:, :1], *more)
    assert torch.isfinite(loss(activation="sigmoid")(LOGITS[:, :1], PROB[:, :1], *more))


def test_a_teacher_takes_class_indices_with_a_channel():
    image, network = torch.randn(2, 1, 4, 5), torch.nn.Conv2d(1, 3, 1)
    probs = []
    for target in (INDEX, INDEX[:, None]):
        generator = torch.Generator().manual_seed(0)
        probs.append(Teacher(network, calibration="kde", generator=generator)(image, target))
    torch.testing.assert_close(probs[0], probs[1], rtol=0, atol=0)


class TestAListOfTargets:
    OUTPUTS = (LOGITS, random_logits(2, 3, 2, 3))
    TARGETS = (INDEX, class_map((2, 2, 3), 3, seed=5))

    def test_each_output_has_its_own_target(self):
        loss = SegmentationLoss()
        expected = (2 * loss(self.OUTPUTS[0], self.TARGETS[0]) + loss(self.OUTPUTS[1], self.TARGETS[1])) / 3
        torch.testing.assert_close(loss(self.OUTPUTS, self.TARGETS), expected)
        with_channel = [target[:, None].short() for target in self.TARGETS]
        torch.testing.assert_close(loss(list(self.OUTPUTS), with_channel), expected)

    def test_ignored_voxels_and_valid_are_those_of_each_target(self):
        valid = [target != 1 for target in self.TARGETS]
        marked = [torch.where(keep, target, 255) for target, keep in zip(self.TARGETS, valid, strict=True)]
        expected = SegmentationLoss()(self.OUTPUTS, self.TARGETS, valid)
        torch.testing.assert_close(SegmentationLoss(ignore_index=255)(self.OUTPUTS, marked), expected)
        total, parts = SegmentationLoss(ignore_index=255)(self.OUTPUTS, marked, parts=True)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(0.25 * parts["cross_entropy"] + 0.75 * parts["region"], total)

    @pytest.mark.parametrize(
        ("logits", "target", "valid", "message"),
        [
            (OUTPUTS, TARGETS[:1], None, "one per output; got 1 for 2 outputs"),
            (LOGITS, TARGETS[:1], None, "target must be a tensor; got tuple"),
            (OUTPUTS, TARGETS, INDEX > 0, "valid must be a list of 2; got one tensor"),
            (OUTPUTS, INDEX, [INDEX > 0, None], "valid is a list, but target is one tensor"),
            (OUTPUTS, TARGETS[::-1], None, r"class indices must have shape \(N, \*space\)"),
            (OUTPUTS, INDEX.numpy(), None, "target must be a tensor, or a list.*got a numpy array"),
        ],
        ids=["too few", "one output", "one valid", "one target", "wrong order", "an array"],
    )
    def test_lists_must_match(self, logits, target, valid, message, monkeypatch):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        with pytest.raises(ValueError, match=message):
            SegmentationLoss()(logits, target, valid)


class TestSoftTargetsThatDoNotSumToOne:
    """Whether a soft target of a softmax sums to one is looked up at some voxels, or at all if asked to."""

    def test_padding_that_is_not_valid_may_have_any_sum(self):
        logits, target = random_logits(2, 3, 8), soft_label(2, 3, 8)
        target[:, :, 5:] = 0
        valid = torch.ones(2, 8, dtype=torch.bool)
        valid[:, 5:] = False
        with pytest.raises(ValueError, match="sums from 0 to 1"):
            SegmentationLoss()(logits, target)
        expected = SegmentationLoss()(logits[..., :5], target[..., :5])
        torch.testing.assert_close(SegmentationLoss()(logits, target, valid), expected)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_the_rounding_of_a_type_is_not_an_error(self, dtype):
        target = torch.full((1, 150, 64), 1 / 150, dtype=torch.float64).to(dtype)
        assert SegmentationLoss()(random_logits(1, 150, 64), target).isfinite()

    def test_separate_masks_of_a_sigmoid_need_not_sum_to_one(self):
        loss = DiceLoss(activation="sigmoid")
        assert loss(random_logits(2, 3, 8), torch.full((2, 3, 8), 0.9)).isfinite()

    @pytest.mark.usefixtures("_all_values")
    def test_one_wrong_voxel_of_a_large_target_is_found_with_check_all_values(self):
        logits, target = torch.zeros(1, 2, 300, 301), torch.full((1, 2, 300, 301), 0.5)
        target[0, :, 150, 151] = 0.25
        arrays.check_all_values(False)
        assert SegmentationLoss()(logits, target).isfinite()
        arrays.check_all_values(True)
        with pytest.raises(ValueError, match=r"sums from 0\.5 to 1"):
            SegmentationLoss()(logits, target)

    def test_a_large_target_that_is_wrong_everywhere_is_found_at_once(self):
        logits, target = torch.zeros(1, 2, 300, 301), torch.full((1, 2, 300, 301), 0.4)
        with pytest.raises(ValueError, match=r"sums from 0\.8 to 0\.8"):
            SegmentationLoss()(logits, target)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (torch.full((2, 3, 31, 17), 0.9), "must sum to one"),
            (torch.full((2, 3, 31, 17), 2.0), r"must lie in \[0, 1\]"),
            (torch.full((2, 31, 17), 3), "there are 3 classes"),
        ],
    )
    @pytest.mark.usefixtures("_all_values")
    def test_a_gpu_checks_values_if_asked_to(self, target, message):
        logits, target = random_logits(2, 3, 31, 17).cuda(), target.cuda()
        with pytest.raises(ValueError, match=message):
            SegmentationLoss()(logits, target)
        # also of a kind of tensors that has been seen before
        SegmentationLoss()(logits, soft_label(2, 3, 31, 17).cuda())
        with pytest.raises(ValueError, match=message):
            SegmentationLoss()(logits, target)


@pytest.fixture
def _all_values():
    arrays.check_all_values(True)
    yield
    arrays.check_all_values(False)


def test_an_index_to_ignore_may_be_a_numpy_integer(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    logits, index = random_logits(2, 3, 10), class_map((2, 10), 3)
    expected = DiceLoss(ignore_index=2)(logits, index)
    assert torch.equal(DiceLoss(ignore_index=np.int64(2))(logits, index), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_one_hot_integers_are_read_once_and_then_cost_no_synchronisation():
    loss, logits = SegmentationLoss(), random_logits(2, 3, 31, 17).cuda()
    index = class_map((2, 31, 17), 3).cuda()
    one_hot = torch.nn.functional.one_hot(index, 3).movedim(-1, 1).contiguous()
    expected = loss(logits, index)
    with pytest.raises(ValueError, match="must be one-hot"):
        loss(logits, torch.ones_like(one_hot).bool())
    for target in (index[:, None], one_hot, one_hot.bool()):
        loss(logits, target)
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = loss(logits, target)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(actual, expected)
