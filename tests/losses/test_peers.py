"""On hard labels, losses with equivalent options equal those of MONAI, smp and scikit-learn."""

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
