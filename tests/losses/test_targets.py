"""The forms of a target: which tensors mean the same label, with the same loss and gradient."""

import warnings

import jaxtyping
import numpy as np
import pytest
import torch
from laws import class_map, random_logits, soft_label
from start import refused

from semidice import (
    CalibrationErrorLoss,
    DiceLoss,
    DistillationLoss,
    SegmentationLoss,
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
LOGITS = random_logits(2, 3, 4, 5)
# other forms of the class indices INDEX
SAME_CLASSES = {
    "int16 with a channel": INDEX[:, None].short(),
    "uint8 with a channel": INDEX[:, None].byte(),
    "int64 one-hot": ONE_HOT,
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
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
        (SegmentationLoss(form="product", calibration_weight=0.1), ()),
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


def test_a_sigmoid_network_takes_masks_of_any_type_and_one_channel_without_its_axis():
    mask = PROB > 0.2
    losses = [DiceLoss(activation="sigmoid")(LOGITS, each) for each in (mask.float(), mask, mask.byte())]
    assert losses[0] == losses[1] == losses[2]
    logits, mask = LOGITS[:, :1], INDEX > 0
    targets = (mask[:, None].float(), mask, mask.long(), mask.float(), mask[:, None].byte())
    losses = [SegmentationLoss(activation="sigmoid")(logits, target) for target in targets]
    assert len(set(map(float, losses))) == 1


def test_the_mask_of_one_channel_may_hold_the_ignored_index():
    logits, mask = LOGITS[:, :1], (INDEX > 0).long()
    ignored = torch.where(INDEX == 2, 255, mask)
    expected = SegmentationLoss(activation="sigmoid")(logits, mask, INDEX != 2)
    for target in (ignored, ignored[:, None], ignored.byte()):
        assert SegmentationLoss(activation="sigmoid", ignore_index=255)(logits, target) == expected


def test_voxels_that_do_not_count_may_hold_anything():
    valid = INDEX != 2
    damaged = torch.where(valid[:, None], ONE_HOT, 7)
    torch.testing.assert_close(
        SegmentationLoss()(LOGITS, damaged, valid), SegmentationLoss()(LOGITS, INDEX, valid)
    )
    for target in (torch.where(valid, INDEX, 99), torch.where(valid[:, None], PROB, torch.nan)):
        assert torch.isfinite(dice_loss(PROB, target, valid=valid))


def test_the_usual_targets_are_returned_as_they_are():
    for target in (INDEX, PROB):
        assert arrays.read_target(LOGITS, target)[0] is target
    valid = torch.ones(2, 4, 5, dtype=torch.bool)
    assert arrays.read_target(LOGITS, INDEX, valid=valid)[1] is valid


# a class that is masked out of a softmax
INFINITE = LOGITS.index_fill(1, torch.tensor(1), -torch.inf)
REFUSED = {
    "0 and 255 in place of 0 and 1": (LOGITS, 255 * ONE_HOT, {}, "0 and 1"),
    "a voxel of two classes": (LOGITS, torch.ones_like(ONE_HOT).bool(), {}, "must be one-hot"),
    "0 and 255 of a sigmoid": (LOGITS, 255 * ONE_HOT, {"activation": "sigmoid"}, "0 and 1"),
    "a foreground as floats": (LOGITS, PROB[:, :1], {}, "torch.cat"),
    "another size": (LOGITS, INDEX[:, 1:], {}, "shape"),
    "an ignored index of one-hot integers": (LOGITS, ONE_HOT, {"ignore_index": 255}, "valid=..."),
    "probabilities that are logits": (LOGITS, INDEX, {"activation": "none"}, "apply softmax or sigmoid"),
    "-inf in place of a class": (INFINITE, torch.where(INDEX == 1, 0, INDEX), {}, "-1e4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_mean_two_things_is_refused_with_a_way_out(case, monkeypatch):
    # as for a user, without checked annotations
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    logits, target, options, way_out = REFUSED[case]
    refused(lambda: SegmentationLoss(**options)(logits, target), way_out)
    if options.get("activation") != "none":
        distil = DistillationLoss(SegmentationLoss(**options))
        refused(lambda: distil(logits, target, PROB[:, : logits.shape[1]]), way_out)


@pytest.mark.parametrize("loss", [DiceLoss, SegmentationLoss, CalibrationErrorLoss])
def test_an_unknown_option_is_named_with_those_that_there_are(loss):
    with pytest.raises(TypeError, match=rf"^{loss.__name__} has no option 'gama'; it has activation"):
        loss(gama=2.0)


def test_a_loss_refuses_options_that_it_does_not_use():
    for loss, name in ((DiceLoss, "alpha"), (DiceLoss, "calibration_bins"), (CalibrationErrorLoss, "gamma")):
        with pytest.raises(TypeError, match=f"has no option {name!r}"):
            loss(**{name: 1})
    for options in ({"sync": True, "over": "image"}, {"scale_weights": [0, 0]}, {"class_weight": [0, 0]}):
        refused(lambda options=options: SegmentationLoss(**options), next(iter(options)))


def test_padding_that_is_not_valid_may_have_any_sum():
    target, valid = PROB.clone(), INDEX >= 0
    target[..., 3:], valid[..., 3:] = 0, False
    refused(lambda: SegmentationLoss()(LOGITS, target), "sums from 0 to 1")
    expected = SegmentationLoss()(LOGITS[..., :3], target[..., :3])
    torch.testing.assert_close(SegmentationLoss()(LOGITS, target, valid), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_rounding_of_a_type_is_not_an_error(dtype):
    target = torch.full((1, 150, 64), 1 / 150, dtype=torch.float64).to(dtype)
    assert SegmentationLoss()(random_logits(1, 150, 64), target).isfinite()


def test_an_index_to_ignore_may_be_a_numpy_integer(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert DiceLoss(ignore_index=np.int64(2))(LOGITS, INDEX) == DiceLoss(ignore_index=2)(LOGITS, INDEX)


class TestTheFirstBatch:
    """A module looks at its first batch more closely, and warns of what would be learned from but badly."""

    @pytest.mark.parametrize("loss", [SegmentationLoss, DiceLoss, CalibrationErrorLoss])
    def test_probabilities_in_place_of_logits_are_named_once(self, loss):
        loss = loss()
        with pytest.warns(UserWarning, match=r"takes logits.*activation='none'"):
            loss(PROB, INDEX)
        loss(PROB, INDEX)

    def test_logits_zeros_and_probabilities_that_are_declared_are_not(self):
        for prediction, options in ((LOGITS, {}), (0 * LOGITS, {}), (PROB, {"activation": "none"})):
            SegmentationLoss(**options)(prediction, INDEX)
        # a function looks at nothing
        dice_loss(PROB, INDEX, activation="softmax")

    def test_many_masks_along_one_axis_are_named_as_images_without_the_axis_of_channels(self):
        images = random_logits(2, 40, 30)
        with pytest.warns(UserWarning, match=r"\.unsqueeze\(1\)"):
            DiceLoss(activation="sigmoid")(images, images > 0)
        DiceLoss(activation="sigmoid")(images[:, :32], images[:, :32] > 0)
        DiceLoss(activation="sigmoid")(images.unsqueeze(1), images > 0)

    def test_a_batch_whose_values_cannot_be_read_is_not_the_first(self):
        loss = SegmentationLoss()
        torch.func.vmap(loss)(PROB.unsqueeze(1), PROB.unsqueeze(1))
        with pytest.warns(UserWarning, match="takes logits"):
            loss(PROB, INDEX)

    @pytest.mark.gpu
    @needs_gpu
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_on_a_gpu_integers_are_read_in_the_first_batch_and_then_cost_no_synchronisation(self):
        logits, index, one_hot = LOGITS.cuda(), INDEX.cuda(), ONE_HOT.cuda().contiguous()
        expected = SegmentationLoss()(logits, index)
        for target in (index[:, None], one_hot, one_hot.bool()):
            loss = SegmentationLoss()
            refused(lambda loss=loss: loss(logits, 255 * one_hot), "0 and 1")
            loss(logits, target)
            torch.cuda.set_sync_debug_mode("error")
            try:
                with warnings.catch_warnings():
                    actual = loss(logits, target)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(actual, expected)
