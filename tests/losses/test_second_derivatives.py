"""Second derivatives of the losses with the Triton kernels equal those of the definition.

Without a GPU the kernels run on the CPU, in Triton's interpreter.
"""

import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

import semidice
from semidice import DistillationLoss, SegmentationLoss, TverskyLoss, use_kernels

pytest.importorskip("triton")
from semidice.kernels import fused

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []

LOSSES = {
    **{form: SegmentationLoss(form=form) for form in FORMS},
    "weighted": SegmentationLoss(class_weight=[1.0, 2.0, 3.0]),
    "without cross entropy": SegmentationLoss(cross_entropy_weight=0.0),
    "focal, over images": TverskyLoss(alpha=0.7, beta=0.3, gamma=2.0, over="image", smooth=0.5),
    "log, over classes": TverskyLoss(alpha=0.7, beta=0.3, log=True, over="class", classes="present"),
    "sigmoid": SegmentationLoss(activation="sigmoid", background=False),
}


@pytest.fixture
def fused_calls(monkeypatch):
    """Records the calls of the fused mixture. Without a GPU, the kernels are also used for CPU tensors."""
    if not ON_GPU:
        monkeypatch.setattr(
            "semidice.kernels.fused_applies", lambda prediction, target: semidice.kernels._enabled
        )
    calls = []
    fused_total = fused.fused_total

    def recording_total(*args, **options):
        calls.append(args)
        return fused_total(*args, **options)

    monkeypatch.setattr(fused, "fused_total", recording_total)
    return calls


def derivatives(loss, logits, target, *args):
    """The loss, its gradient, and the gradient of a function of that gradient."""
    leaf = logits.to(DEVICE).requires_grad_()
    total = loss(leaf, target.to(DEVICE), *args)
    # the square gives the backward pass an incoming gradient that has a derivative as well
    (gradient,) = torch.autograd.grad(total.square(), leaf, create_graph=True)
    weights = random_logits(*gradient.shape, seed=5).to(gradient)
    (second,) = torch.autograd.grad((gradient * weights).sum() + gradient.square().sum(), leaf)
    return total.detach(), gradient.detach(), second


def assert_equal_derivatives(loss, *batch):
    actual = derivatives(loss, *batch)
    try:
        use_kernels(False)
        expected = derivatives(loss, *batch)
    finally:
        use_kernels(True)
    assert torch.count_nonzero(expected[2]) > 0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_of_the_kernels_equal_the_definition(name, fused_calls):
    logits, target = random_logits(2, 3, 21), soft_label(2, 3, 21)
    assert_equal_derivatives(LOSSES[name].to(DEVICE), logits, target)
    assert len(fused_calls) == 1


def test_masked_class_indices_strides_deep_supervision_and_distillation_equal_the_definition(fused_calls):
    logits, target = random_logits(2, 3, 5, 14)[..., ::2], class_map((2, 5, 7), 3)
    valid = (random_logits(2, 5, 7, seed=6) > -1).to(DEVICE)
    teacher = soft_label(2, 3, 5, 7).to(DEVICE)

    def loss(logits, target):
        return DistillationLoss()([logits, logits[..., ::2, ::2]], target, teacher, valid)

    assert_equal_derivatives(loss, logits, target)
    assert len(fused_calls) == 4


def test_a_plain_backward_pass_does_not_use_the_definition(fused_calls, monkeypatch):
    monkeypatch.delattr(fused, "terms_of")
    logits = random_logits(2, 3, 21).to(DEVICE).requires_grad_()
    SegmentationLoss()(logits, soft_label(2, 3, 21).to(DEVICE)).backward()
    assert torch.isfinite(logits.grad).all()
    assert len(fused_calls) == 1
