"""On hard labels our losses equal MONAI, smp and scikit-learn wherever their options mean the same."""

import numpy as np
import pytest
import torch
from laws import class_map, random_logits, soft_label
from sklearn.metrics import f1_score, jaccard_score

from semidice import DiceLoss, JaccardLoss, TverskyLoss, dice_loss, jaccard_loss, tversky_loss
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
    logits, index, hot = hard_case(shape)
    theirs = monai.DiceLoss(
        softmax=True, batch=batch, include_background=background, smooth_nr=1e-2, smooth_dr=1e-2
    )(logits, hot)
    # MONAI's Dice has 2 tp + s over 2 tp + fp + fn + s; ours divides both by two
    ours = DiceLoss(form=form, over=over, background=background, smooth=0.5e-2)(logits, index)
    torch.testing.assert_close(ours, theirs)


@each_shape
@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.3), (0.2, 0.9)])
def test_tversky_equals_monai_on_hard_labels(shape, alpha, beta):
    logits, index, hot = hard_case(shape)
    theirs = monai.TverskyLoss(
        softmax=True, alpha=alpha, beta=beta, smooth_nr=1e-3, smooth_dr=1e-3, batch=True
    )(logits, hot)
    torch.testing.assert_close(TverskyLoss(alpha=alpha, beta=beta, smooth=1e-3)(logits, index), theirs)


@each_shape
def test_the_squared_form_equals_monai_with_squared_predictions(shape):
    logits, index, hot = hard_case(shape)
    theirs = monai.DiceLoss(softmax=True, squared_pred=True, batch=True, smooth_nr=1e-2, smooth_dr=1e-2)(
        logits, hot
    )
    torch.testing.assert_close(DiceLoss(form="squared", smooth=0.5e-2)(logits, index), theirs)


@each_shape
def test_jaccard_equals_monai_on_hard_labels(shape):
    logits, index, hot = hard_case(shape)
    theirs = monai.DiceLoss(softmax=True, jaccard=True, batch=True, smooth_nr=1e-2, smooth_dr=1e-2)(
        logits, hot
    )
    # MONAI doubles the union as it does the sum: (2 tp + s) / (2 (tp + fp + fn) + s)
    torch.testing.assert_close(JaccardLoss(smooth=0.5e-2)(logits, index), theirs)


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
    for theirs, ours in pairs:
        # smp divides its sum over present classes by all of them; here every class is present
        torch.testing.assert_close(ours(logits, index), theirs(logits, index))


def test_the_binary_losses_equal_smp_on_hard_masks():
    logits, mask = random_logits(3, 1, 6, 7), (random_logits(3, 1, 6, 7, seed=8) > 0).float()
    torch.testing.assert_close(
        DiceLoss(activation="sigmoid")(logits, mask), smp.DiceLoss("binary")(logits, mask)
    )
    torch.testing.assert_close(
        JaccardLoss(activation="sigmoid")(logits, mask), smp.JaccardLoss("binary")(logits, mask)
    )
    theirs = smp.TverskyLoss("binary", alpha=0.3, beta=0.6, gamma=1.5)(logits, mask)
    ours = TverskyLoss(alpha=0.3, beta=0.6, gamma=1.5, activation="sigmoid")(logits, mask)
    torch.testing.assert_close(ours, theirs)


@each_shape
def test_the_scores_of_hardened_predictions_equal_scikit_learn(shape):
    logits, index, _ = hard_case(shape)
    hardened = one_hot(logits.argmax(1), shape[1]).float()
    truth, guess = index.flatten().numpy(), logits.argmax(1).flatten().numpy()
    labels = np.arange(shape[1])
    f1 = f1_score(truth, guess, labels=labels, average="macro", zero_division=1.0)
    assert 1 - dice_loss(hardened, index).item() == pytest.approx(f1, abs=1e-6)
    jaccard = jaccard_score(truth, guess, labels=labels, average="macro", zero_division=1.0)
    assert 1 - jaccard_loss(hardened, index).item() == pytest.approx(jaccard, abs=1e-6)


def test_monai_and_smp_move_away_from_a_soft_label_where_ours_stays():
    """Why this library: at prob = label their gradient is not zero, and ours is."""
    label = soft_label(2, 3, 64)

    def slope(loss):
        prob = label.clone().requires_grad_()
        return torch.autograd.grad(loss(prob, label), prob)[0].abs().max().item()

    assert slope(TverskyLoss(alpha=0.7, beta=0.3, activation="none")) == 0
    assert slope(monai.TverskyLoss(alpha=0.7, beta=0.3, soft_label=True)) > 1e-3
    assert slope(monai.DiceLoss()) > 1e-3
    assert slope(smp.TverskyLoss("multilabel", from_logits=False, alpha=0.7, beta=0.3)) > 1e-3
    assert slope(DiceLoss(form="relaxed", activation="none")) > 1e-3


def test_monai_with_its_soft_label_flag_equals_ours_away_from_ties():
    logits, label = random_logits(2, 3, 50), soft_label(2, 3, 50)
    theirs = monai.DiceLoss(softmax=True, soft_label=True, batch=True, smooth_nr=0.0, smooth_dr=0.0)(
        logits, label
    )
    torch.testing.assert_close(DiceLoss()(logits, label), theirs)
    theirs = monai.TverskyLoss(
        softmax=True, soft_label=True, alpha=0.7, beta=0.3, batch=True, smooth_nr=0.0, smooth_dr=0.0
    )(logits, label)
    ours = tversky_loss(logits, label, activation="softmax", alpha=0.7, beta=0.3)
    torch.testing.assert_close(ours, theirs)
