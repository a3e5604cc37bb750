"""Compiled without a graph break, in a process of its own: without the shape checks of pytest."""

import subprocess
import sys

PROGRAM = """
import torch
from semidice import DiceLoss, JaccardLoss, SegmentationLoss, TverskyLoss

logits = torch.randn(2, 3, 16, 16)
label, index = torch.randn(2, 3, 16, 16).softmax(1), torch.randint(0, 3, (2, 16, 16))
valid = torch.rand(2, 16, 16) > 0.2
ignored = torch.where(valid, index, 255)
weighted = DiceLoss(ignore_index=255, class_weight=[1.0, 2.0, 3.0])
focal = TverskyLoss(alpha=0.7, beta=0.3, gamma=1.5, over="image", classes="present")
log = JaccardLoss(activation="sigmoid", log=True, over="class")
deep = SegmentationLoss()

CASES = {
    **{form: ("aot_eager", DiceLoss(form=form), label) for form in ("min", "product", "squared", "relaxed")},
    "class indices, ignored, weighted": ("aot_eager", SegmentationLoss(weighted), ignored),
    "valid, focal, present": ("aot_eager", focal, label, valid),
    "sigmoid, log": ("aot_eager", SegmentationLoss(log), (label > 0.4).float()),
    "deep supervision": ("aot_eager", lambda x, y: deep([x, x[..., ::2, ::2]], y), label),
    "generated code": ("inductor", SegmentationLoss(), label),
}
for name, (backend, loss, *args) in CASES.items():
    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        free = logits.clone().requires_grad_()
        value = call(free, *args)
        value.backward()
        results.append((value.detach(), free.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.compiler.reset()
    print("equal:", name)
"""


def test_the_losses_compile_into_one_graph_with_equal_results():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal:") == 9
