"""Helpers for the tests of all kernels: compare sums and gradients with those of the definition."""

import torch
from laws import random_logits

from semidice.overlap import SumsOptions, reference_sums


def sums_and_gradient(function, prediction, target, valid, **options):
    """The requested sums, and the gradient for incoming gradients that differ for each sum, image, class."""
    leaf = prediction.detach().requires_grad_()
    sums = function(leaf, target, valid, SumsOptions(**options))
    parts = [*(sums.overlap if options["form"] else ()), *(sums[3:] if options["entropy"] else ())]
    # the mass is the last sum; it depends only on the target and has no gradient
    differentiable = parts[:-1] if options["entropy"] else parts
    incoming = [
        random_logits(*part.shape, seed=seed).to(part.device, part.dtype)
        for seed, part in enumerate(differentiable)
    ]
    torch.autograd.backward(differentiable, incoming)
    return [part.detach() for part in parts], leaf.grad


def assert_equal_to_the_definition(kernel, prediction, target, valid=None, *, tolerance=None, **options):
    """Assert that the sums (within `tolerance`, if given) and gradients equal those of `reference_sums`."""
    kernel_sums, kernel_gradient = sums_and_gradient(kernel, prediction, target, valid, **options)
    expected_sums, expected_gradient = sums_and_gradient(reference_sums, prediction, target, valid, **options)
    for actual, expected in zip(kernel_sums, expected_sums, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kernel_gradient, expected_gradient)


def forget_plans():
    """Delete the cached plans, so that the next launches use what a test has patched."""
    from semidice.kernels import fused

    fused._plans.clear()
