"""The four forms of soft overlap, as sums over voxels and their gradients.

For prob x and target y in [0, 1]:

    form      tp          fp           fn           in the paper
    min       min(x, y)   relu(x-y)    relu(y-x)    JML1, DML1, CTL, CFTL: best index exactly at x = y
    product   x y         relu(x-y)    relu(y-x)    JML2, DML2: best index exactly at x = y
    squared   x y         x (x-y)      y (y-x)      the squared L2 forms
    relaxed   x y         x (1-y)      y (1-x)      SDL, SJL, STL: right only for hard labels, for comparison

Ties: at x = y, the derivatives of the three terms of `min` and of fp and fn of `product` are defined as 0.
So a voxel of `min` that equals its label has no gradient, whatever the other voxels are. This is a valid
choice: 0 lies between the one-sided derivatives of the index there.
"""

from typing import Literal

import torch
from torch import Tensor

Form = Literal["min", "product", "squared", "relaxed"]


def form_sums(x: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of tp, fp and fn over all axes after the second, (N, C) each."""
    space = tuple(range(2, x.ndim))
    # Each temporary of the size of x is summed before the next one is computed, to save memory.
    tp = (torch.minimum(x, y) if form == "min" else x * y).sum(space)
    if form == "relaxed":
        return tp, (x * (1 - y)).sum(space), (y * (1 - x)).sum(space)
    if form == "squared":
        return tp, (x * (x - y)).sum(space), (y * (y - x)).sum(space)
    return tp, (x - y).relu_().sum(space), (y - x).relu_().sum(space)


def form_gradient(
    x: Tensor, y: Tensor, form: Form, grad_tp: Tensor, grad_fp: Tensor, grad_fn: Tensor
) -> Tensor:
    """Gradient in x of grad_tp * tp + grad_fp * fp + grad_fn * fn, by differentiable operations.

    Every form is symmetric: for the gradient in y, exchange x with y, and grad_fp with grad_fn.
    """
    if form in ("squared", "relaxed"):
        through_product = (grad_tp - grad_fp - grad_fn) * y
        return through_product + (grad_fp if form == "relaxed" else 2 * grad_fp * x)
    # Arithmetic on -1, 0 and 1 rather than torch.where, which is ten times slower on a CPU.
    # The sign is constant in x except at ties, so it has no derivative.
    sign = (x.detach() - y.detach()).sign_()
    gradient = sign.relu() * grad_fp
    below = sign.neg_().relu_()
    if form == "min":
        return gradient.add_(below.mul_(grad_tp - grad_fn))
    return gradient.sub_(below.mul_(grad_fn)).add_(grad_tp * y)
