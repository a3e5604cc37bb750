"""The losses compile without a graph break. A separate process avoids the shape checks of pytest."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
# for the GPU kernels at the end; read when a kernel is defined
os.environ["TRITON_INTERPRET"] = "1"
import torch
import semidice.kernels
from semidice import CalibrationErrorLoss, DiceLoss, SegmentationLoss, TverskyLoss
from semidice import tversky_loss, use_kernels

logits = torch.randn(2, 3, 16, 16)
label, index = torch.randn(2, 3, 16, 16).softmax(1), torch.randint(0, 3, (2, 16, 16))
valid = torch.rand(2, 16, 16) > 0.2
ignored = torch.where(valid, index, 255)
weighted = SegmentationLoss(form="min", ignore_index=255, class_weight=[1.0, 2.0, 3.0])
focal = TverskyLoss(form="product", alpha=0.7, beta=0.3, gamma=1.5, over="image", classes="present")
log = SegmentationLoss(alpha=1, beta=1, form="squared", activation="sigmoid", log=True, over="class")
deep = SegmentationLoss(form="relaxed")


def function(logits, label):
    return tversky_loss(logits, label, alpha=0.7, beta=0.3, gamma=1.5, over="image", activation="softmax")


CASES = {
    "class indices, ignored, weighted": ("aot_eager", weighted, ignored),
    "valid, focal, present": ("aot_eager", focal, label, valid),
    "sigmoid, log": ("aot_eager", log, (label > 0.4).float()),
    "deep supervision": ("aot_eager", lambda x, y: deep([x, x[..., ::2, ::2]], y), label),
    "a function": ("aot_eager", function, label),
    "hard bins": ("aot_eager", CalibrationErrorLoss(), label, valid),
    "soft bins": ("inductor", SegmentationLoss(calibration_weight=1.0, calibration_binning="soft"), label),
    "generated code": ("inductor", SegmentationLoss(), label),
}
for name, (backend, loss, *args) in CASES.items():
    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        leaf = logits.clone().requires_grad_()
        value = call(leaf, *args)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.compiler.reset()
    print("equal:", name)

# runs the GPU kernels in Triton's interpreter; `fused_applies` is patched so that they are chosen
semidice.kernels.fused_applies = lambda prediction, target: semidice.kernels._enabled
logits, label = torch.randn(2, 3, 40), torch.randn(2, 3, 40).softmax(1)
for loss in (SegmentationLoss(class_weight=[1.0, 2.0, 3.0]), DiceLoss(over="image", gamma=2.0)):
    results = []
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for call, kernels in ((loss, False), (loss, True), (compiled, True)):
        use_kernels(kernels)
        leaf = logits.clone().requires_grad_()
        value = call(leaf, label)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    print("equal with kernels")
"""


@pytest.fixture(scope="module")
def printed():
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_losses_compile_into_one_graph_with_equal_results(printed):
    assert printed.count("equal:") == 8


def test_compiled_losses_call_the_gpu_kernels_as_operators(printed):
    assert printed.count("equal with kernels") == 2
