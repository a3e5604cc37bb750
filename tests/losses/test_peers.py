"""On hard labels, losses with equivalent options equal those of MONAI, smp, nnU-Net and scikit-learn."""

import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from laws import class_map, random_logits, soft_label
from sklearn.metrics import f1_score, jaccard_score

from semidice import (
    DiceLoss,
    JaccardLoss,
    SegmentationLoss,
    TverskyLoss,
    dice_loss,
    jaccard_loss,
    tversky_loss,
)
from semidice.arrays import one_hot

monai = pytest.importorskip("monai.losses")
smp = pytest.importorskip("segmentation_models_pytorch").losses

SHAPES = [(3, 4, 9), (2, 3, 7, 8), (2, 2, 4, 5, 6)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def hard_case(shape):
    logits, index = random_logits(*shape), class_map((shape[0], *shape[2:]), shape[1])
    return logits, index, one_hot(index, shape[1]).float()


@each_shape
@pytest.mark.parametrize("form", ["min", "product", "relaxed"])
@pytest.mark.parametrize(("over", "batch"), [("batch", True), ("image", False)])
@pytest.mark.parametrize("background", [True, False])
def test_dice_equals_monai_on_hard_labels(shape, form, over, batch, background):
    logits, index, encoded = hard_case(shape)
    expected = monai.DiceLoss(
        softmax=True, batch=batch, include_background=background, smooth_nr=1e-2, smooth_dr=1e-2
    )(logits, encoded)
    # MONAI computes (2 tp + s) / (2 tp + fp + fn + s); semidice divides numerator and denominator by two
    actual = DiceLoss(form=form, over=over, background=background, smooth=0.5e-2)(logits, index)
    torch.testing.assert_close(actual, expected)


@each_shape
@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.3), (0.2, 0.9)])
def test_tversky_equals_monai_on_hard_labels(shape, alpha, beta):
    logits, index, encoded = hard_case(shape)
    expected = monai.TverskyLoss(
        softmax=True, alpha=alpha, beta=beta, smooth_nr=1e-3, smooth_dr=1e-3, batch=True
    )(logits, encoded)
    torch.testing.assert_close(TverskyLoss(alpha=alpha, beta=beta, smooth=1e-3)(logits, index), expected)


@each_shape
def test_the_squared_form_equals_monai_with_squared_predictions(shape):
    logits, index, encoded = hard_case(shape)
    expected = monai.DiceLoss(softmax=True, squared_pred=True, batch=True, smooth_nr=1e-2, smooth_dr=1e-2)(
        logits, encoded
    )
    torch.testing.assert_close(DiceLoss(form="squared", smooth=0.5e-2)(logits, index), expected)


@each_shape
def test_jaccard_equals_monai_on_hard_labels(shape):
    logits, index, encoded = hard_case(shape)
    expected = monai.DiceLoss(softmax=True, jaccard=True, batch=True, smooth_nr=1e-2, smooth_dr=1e-2)(
        logits, encoded
    )
    # MONAI computes (2 tp + s) / (2 (tp + fp + fn) + s)
    torch.testing.assert_close(JaccardLoss(smooth=0.5e-2)(logits, index), expected)


@pytest.mark.parametrize("space", [(31,), (7, 8)], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_dice_jaccard_and_tversky_equal_smp_on_hard_labels(space, log):
    logits, index, _ = hard_case((3, 4, *space))
    pairs = [
        (smp.DiceLoss("multiclass", log_loss=log), DiceLoss(log=log, classes="present")),
        (smp.JaccardLoss("multiclass", log_loss=log), JaccardLoss(log=log, classes="present")),
        (
            smp.TverskyLoss("multiclass", log_loss=log, alpha=0.7, beta=0.3),
            TverskyLoss(alpha=0.7, beta=0.3, log=log, classes="present"),
        ),
    ]
    for smp_loss, loss in pairs:
        # smp divides the sum over present classes by the number of all classes; here every class is present
        torch.testing.assert_close(loss(logits, index), smp_loss(logits, index))


def test_the_binary_losses_equal_smp_on_hard_masks():
    logits, mask = random_logits(3, 1, 6, 7), (random_logits(3, 1, 6, 7, seed=8) > 0).float()
    torch.testing.assert_close(
        DiceLoss(activation="sigmoid")(logits, mask), smp.DiceLoss("binary")(logits, mask)
    )
    torch.testing.assert_close(
        JaccardLoss(activation="sigmoid")(logits, mask), smp.JaccardLoss("binary")(logits, mask)
    )
    expected = smp.TverskyLoss("binary", alpha=0.3, beta=0.6, gamma=1.5)(logits, mask)
    actual = TverskyLoss(alpha=0.3, beta=0.6, gamma=1.5, activation="sigmoid")(logits, mask)
    torch.testing.assert_close(actual, expected)


@each_shape
def test_the_losses_of_hard_predictions_equal_scikit_learn(shape):
    logits, index, _ = hard_case(shape)
    hard_prediction = one_hot(logits.argmax(1), shape[1]).float()
    truth, predicted = index.flatten().numpy(), logits.argmax(1).flatten().numpy()
    labels = np.arange(shape[1])
    f1 = f1_score(truth, predicted, labels=labels, average="macro", zero_division=1.0)
    assert 1 - dice_loss(hard_prediction, index).item() == pytest.approx(f1, abs=1e-6)
    jaccard = jaccard_score(truth, predicted, labels=labels, average="macro", zero_division=1.0)
    assert 1 - jaccard_loss(hard_prediction, index).item() == pytest.approx(jaccard, abs=1e-6)


def test_the_min_form_has_zero_gradient_at_a_soft_label_but_monai_and_smp_do_not():
    """The reason for this library: at prob = label, the losses of MONAI and smp have a nonzero gradient."""
    label = soft_label(2, 3, 64)

    def largest_gradient(loss):
        prob = label.clone().requires_grad_()
        return torch.autograd.grad(loss(prob, label), prob)[0].abs().max().item()

    assert largest_gradient(TverskyLoss(alpha=0.7, beta=0.3, activation="none")) == 0
    assert largest_gradient(monai.TverskyLoss(alpha=0.7, beta=0.3, soft_label=True)) > 1e-3
    assert largest_gradient(monai.DiceLoss()) > 1e-3
    assert largest_gradient(smp.TverskyLoss("multilabel", from_logits=False, alpha=0.7, beta=0.3)) > 1e-3
    assert largest_gradient(DiceLoss(form="relaxed", activation="none")) > 1e-3


def test_monai_with_soft_label_equals_semidice_away_from_ties():
    logits, label = random_logits(2, 3, 50), soft_label(2, 3, 50)
    expected = monai.DiceLoss(softmax=True, soft_label=True, batch=True, smooth_nr=0.0, smooth_dr=0.0)(
        logits, label
    )
    torch.testing.assert_close(DiceLoss()(logits, label), expected)
    expected = monai.TverskyLoss(
        softmax=True, soft_label=True, alpha=0.7, beta=0.3, batch=True, smooth_nr=0.0, smooth_dr=0.0
    )(logits, label)
    actual = tversky_loss(logits, label, activation="softmax", alpha=0.7, beta=0.3)
    torch.testing.assert_close(actual, expected)


class TestTheirTargets:
    """A peer's usual target goes into the loss that docs/peers.md names, unchanged."""

    @each_shape
    def test_integers_with_a_channel_as_monai_takes_them(self, shape):
        logits, index, _ = hard_case(shape)
        smooth = {"smooth_nr": 1e-2, "smooth_dr": 1e-2}
        pairs = [
            (monai.DiceLoss(to_onehot_y=True, softmax=True, **smooth), DiceLoss(over="image", smooth=0.5e-2)),
            (
                monai.TverskyLoss(to_onehot_y=True, softmax=True, **smooth),
                TverskyLoss(alpha=0.5, beta=0.5, over="image", smooth=1e-2),
            ),
            (
                monai.DiceCELoss(
                    to_onehot_y=True, softmax=True, jaccard=True, include_background=False, **smooth
                ),
                SegmentationLoss(
                    alpha=1.0,
                    beta=1.0,
                    over="image",
                    background=False,
                    smooth=0.5e-2,
                    cross_entropy_weight=1,
                    region_weight=1,
                ),
            ),
        ]
        for peer, loss in pairs:
            torch.testing.assert_close(loss(logits, index[:, None]), peer(logits, index[:, None]))

    @each_shape
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
    def test_one_hot_integers_as_monai_takes_them(self, shape, dtype):
        logits, _, encoded = hard_case(shape)
        target = encoded.to(dtype)
        expected = monai.DiceCELoss(softmax=True, lambda_dice=0.75, lambda_ce=0.25)(logits, target)
        torch.testing.assert_close(SegmentationLoss(over="image", smooth=0.5e-5)(logits, target), expected)

    def test_a_tensor_with_metadata_of_monai(self):
        meta_tensor = pytest.importorskip("monai.data").MetaTensor
        logits, index, _ = hard_case((2, 3, 7, 8))
        actual = SegmentationLoss()(logits, meta_tensor(index[:, None]))
        torch.testing.assert_close(torch.as_tensor(actual), SegmentationLoss()(logits, index))

    def test_ignored_voxels_of_monai(self):
        logits, index, _ = hard_case((2, 3, 7, 8))
        target = torch.where(index == 1, 255, index)[:, None]
        smooth = {"smooth_nr": 1e-2, "smooth_dr": 1e-2}
        expected = monai.DiceLoss(to_onehot_y=True, softmax=True, ignore_index=255, **smooth)(logits, target)
        actual = DiceLoss(over="image", smooth=0.5e-2, ignore_index=255)(logits, target)
        torch.testing.assert_close(actual, expected)

    def test_the_masked_loss_of_monai(self):
        logits, index, _ = hard_case((2, 3, 7, 8))
        valid = random_logits(2, 7, 8, seed=3) > 0
        # softmax beforehand: MONAI masks its logits, and the softmax of a masked voxel is not zero
        prob = logits.softmax(1)
        # MONAI sets a masked voxel to class 0, so only the foreground can be compared
        peer = monai.MaskedDiceLoss(to_onehot_y=True, include_background=False, smooth_nr=0.0, smooth_dr=0.0)
        expected = peer(prob, index[:, None], valid[:, None])
        actual = dice_loss(prob, index[:, None], valid=valid, over="image", background=False)
        torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("ignore_index", [None, 1])
    def test_class_indices_and_masks_as_smp_takes_them(self, ignore_index):
        logits, index, _ = hard_case((3, 4, 7, 8))
        peer = smp.DiceLoss("multiclass", ignore_index=ignore_index, class_weights=[1.0, 0.0, 2.0, 0.5])
        # the weight of the ignored class is 0: smp counts it as a class without error
        loss = DiceLoss(ignore_index=ignore_index, class_weight=[1.0, 0.0, 2.0, 0.5], classes="present")
        expected = peer(logits, index)
        for target in (index, index[:, None]):
            torch.testing.assert_close(loss(logits, target), expected)

    @pytest.mark.parametrize("target_shape", [(3, 6, 7), (3, 1, 6, 7)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
    def test_binary_masks_as_smp_takes_them(self, target_shape, dtype):
        logits = random_logits(3, 1, 6, 7)
        target = (random_logits(*target_shape, seed=8) > 0).to(dtype)
        loss = DiceLoss(activation="sigmoid", classes="present")
        torch.testing.assert_close(loss(logits, target), smp.DiceLoss("binary")(logits, target))
        if dtype == torch.int64:
            target[0] = 255
            peer = smp.DiceLoss("binary", ignore_index=255)
            loss = DiceLoss(activation="sigmoid", classes="present", ignore_index=255)
            torch.testing.assert_close(loss(logits, target), peer(logits, target))

    def test_multilabel_masks_as_smp_takes_them(self):
        logits, masks = random_logits(3, 4, 6, 7), random_logits(3, 4, 6, 7, seed=8) > 0
        loss = JaccardLoss(activation="sigmoid", classes="present")
        torch.testing.assert_close(
            loss(logits, masks.long()), smp.JaccardLoss("multilabel")(logits, masks.long())
        )

    def test_the_cross_entropy_of_smp(self):
        logits, index, _ = hard_case((3, 4, 7, 8))
        loss = SegmentationLoss(cross_entropy_weight=1, region_weight=0)
        torch.testing.assert_close(
            loss(logits, index), smp.SoftCrossEntropyLoss(smooth_factor=0.0)(logits, index)
        )

    def test_outputs_and_targets_of_nnunets_deep_supervision(self):
        compound = pytest.importorskip("nnunetv2.training.loss.compound_losses")
        wrapper = importlib.import_module("nnunetv2.training.loss.deep_supervision").DeepSupervisionWrapper
        dice = importlib.import_module("nnunetv2.training.loss.dice").MemoryEfficientSoftDiceLoss
        options = {"batch_dice": False, "do_bg": False, "smooth": 1e-5, "ddp": False}
        peer = wrapper(compound.DC_and_CE_loss(options, {}, ignore_label=3, dice_class=dice), [0.75, 0.25])
        logits = [random_logits(2, 3, 8, 8), random_logits(2, 3, 4, 4, seed=4)]
        # every block of the finest target has one class: its mean is what nearest neighbours take
        coarse = class_map((2, 1, 4, 4), 4, seed=2).short()
        targets = [coarse.repeat_interleave(2, 2).repeat_interleave(2, 3), coarse]
        loss = SegmentationLoss(
            over="image",
            background=False,
            smooth=0.5e-5,
            ignore_index=3,
            cross_entropy_weight=1,
            region_weight=1,
            scale_weights=[0.75, 0.25],
        )
        torch.testing.assert_close(loss(logits, targets[0]) - 1, peer(logits, targets))


MODULES = {
    "MONAI": ("monai.losses",),
    "segmentation_models_pytorch": ("segmentation_models_pytorch.losses",),
    "nnU-Net": tuple(
        f"nnunetv2.training.loss.{part}" for part in ("compound_losses", "dice", "deep_supervision")
    ),
}


class TestTheTablesOfArguments:
    PAGE = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()

    def first_columns(self, peer):
        """Names in the first column of the table of losses, and of the table of arguments."""
        section = self.PAGE.partition(f"## {peer}\n")[2].partition("\n## ")[0]
        tables = [part for part in re.split(r"\n\n", section) if part.strip().startswith("|")]
        return [
            [
                name
                for row in table.strip().splitlines()[2:]
                for name in re.findall(r"`(\w+)`", row.split("|")[1])
            ]
            for table in tables
        ]

    @pytest.mark.parametrize("peer", MODULES)
    def test_they_name_every_argument_of_the_installed_version(self, peer):
        modules = [pytest.importorskip(name) for name in MODULES[peer]]
        losses, arguments = self.first_columns(peer)
        assert losses
        real = set()
        for name in losses:
            (loss,) = {getattr(module, name) for module in modules if hasattr(module, name)}
            real |= set(inspect.signature(loss).parameters)
        assert sorted(arguments) == sorted(real)

    def test_each_replacement_in_the_tables_can_be_built(self):
        calls = re.findall(r"`((?:Dice|Jaccard|Tversky|Segmentation)Loss\([^`]*\))`", self.PAGE)
        assert len(calls) >= 10
        for call in calls:
            eval(call)
