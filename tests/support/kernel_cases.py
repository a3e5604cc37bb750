"""What the tests of every kernel share: it gives the sums and gradients of the definition."""

import torch
from laws import random_logits

from semidice.overlap.options import SumsOptions
from semidice.overlap.sums import reference_sums


def sums_and_gradient(function, prediction, target, valid, **options):
    """The sums asked for, and the gradient for incoming ones that differ in every sum, image and class."""
    free = prediction.detach().requires_grad_()
    sums = function(free, target, valid, SumsOptions(**options))
    parts = [part for part in (*(sums.overlap or ()), sums.entropy, sums.mass) if part is not None]
    # the mass, the last one, depends on the target alone
    differentiable = parts[:-1] if options["entropy"] else parts
    incoming = [
        random_logits(*part.shape, seed=seed).to(part.device, part.dtype)
        for seed, part in enumerate(differentiable)
    ]
    torch.autograd.backward(differentiable, incoming)
    return [part.detach() for part in parts], free.grad


def assert_equal_to_the_definition(kernel, prediction, target, valid=None, *, tolerance=None, **options):
    """The kernel's sums (within `tolerance`, if one is given) and gradients are those of `reference_sums`."""
    ours = sums_and_gradient(kernel, prediction, target, valid, **options)
    theirs = sums_and_gradient(reference_sums, prediction, target, valid, **options)
    for mine, defined in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, defined, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], theirs[1])


def forget_plans():
    """Make new plans for the next launches, so that they see what a test has changed."""
    from semidice.kernels import fused

    fused._plans.clear()
