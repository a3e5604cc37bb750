"""The four forms of soft overlap as sums and gradients over voxels: the mathematics that all paths share.

For prob x and target y in [0, 1]:

    form      tp          fp           fn           on hard labels, and on soft ones
    min       min(x, y)   relu(x-y)    relu(y-x)    JML1, DML1, CTL, CFTL: best index exactly at x = y
    product   x y         relu(x-y)    relu(y-x)    JML2, DML2: best index exactly at x = y
    squared   x y         x (x-y)      y (y-x)      the squared L2 forms
    relaxed   x y         x (1-y)      y (1-x)      SDL, SJL, STL: right on hard labels only, kept to compare

Ties: where x = y, the derivatives of `min`'s three terms and of `product`'s fp and fn are taken as 0. In
`min` a voxel that equals its label then pulls nothing, whatever the others do: 0 lies between the
one-sided derivatives of the index there.
"""

from typing import Literal

import torch
from torch import Tensor

Form = Literal["min", "product", "squared", "relaxed"]


def form_sums(x: Tensor, y: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of tp, fp and fn over all axes behind the second, (N, C) each."""
    space = tuple(range(2, x.ndim))
    # One temporary of the size of x at a time: each is summed before the next is made.
    tp = (torch.minimum(x, y) if form == "min" else x * y).sum(space)
    if form == "relaxed":
        return tp, (x * (1 - y)).sum(space), (y * (1 - x)).sum(space)
    if form == "squared":
        return tp, (x * (x - y)).sum(space), (y * (y - x)).sum(space)
    return tp, (x - y).relu_().sum(space), (y - x).relu_().sum(space)


def form_gradient(
    x: Tensor, y: Tensor, form: Form, grad_tp: Tensor, grad_fp: Tensor, grad_fn: Tensor
) -> Tensor:
    """Gradient in x of grad_tp * tp + grad_fp * fp + grad_fn * fn, made of differentiable operations.

    Every form is symmetric: the gradient in y is this one with x and y, and grad_fp and grad_fn, exchanged.
    """
    if form in ("squared", "relaxed"):
        through_product = (grad_tp - grad_fp - grad_fn) * y
        return through_product + (grad_fp if form == "relaxed" else 2 * grad_fp * x)
    # Arithmetic on -1, 0 and 1 rather than torch.where, which is ten times slower on a CPU.
    # It is constant in x but for the ties, and so has no derivative of its own.
    side = (x.detach() - y.detach()).sign_()
    gradient = side.relu() * grad_fp
    below = side.neg_().relu_()
    if form == "min":
        return gradient.add_(below.mul_(grad_tp - grad_fn))
    return gradient.sub_(below.mul_(grad_fn)).add_(grad_tp * y)
