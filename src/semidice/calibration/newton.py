"""Maximum likelihood of logistic models by Newton's method, in float64, from weighted points.

A penalty of 1e-8 / 2 times the squared distance from the identity, against the mean log-likelihood per voxel,
keeps parameters finite that the data do not determine (constant or separable predictions). The search starts
at the identity and never goes up: the fit is at least as likely as uncalibrated probabilities.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

PENALTY = 1e-8
_MAX_STEPS = 200


class Terms(NamedTuple):
    """Value, gradient and Hessian of a convex function at a point."""

    value: Tensor
    gradient: Float[Tensor, " k"]
    hessian: Float[Tensor, "k k"]


def minimise(function: Callable[[Tensor], Terms], start: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """The minimum of a strictly convex function; a step is halved until the function decreases."""
    point, terms = start, function(start)
    for _ in range(_MAX_STEPS):
        step = torch.linalg.solve(terms.hessian, terms.gradient)
        decrease = float(terms.gradient @ step)
        if decrease < 1e-20:
            break
        size, following = 1.0, function(point - step)
        # close to the minimum the values differ by less than their rounding, and the full step is right
        while decrease > 1e-12 and following.value > terms.value - 0.25 * size * decrease and size > 1e-9:
            size /= 2
            following = function(point - size * step)
        if following.value > terms.value + 1e-12:
            break
        point, terms = point - size * step, following
    return point


def fit_logistic(
    features: Float[Tensor, "n k"],
    label: Float[Tensor, " n"],
    weight: Float[Tensor, " n"],
    identity: Float[Tensor, " k"],
) -> tuple[Float[Tensor, " k"], float]:
    """θ with the most likely sigmoid(features · θ), and its minus mean log-likelihood with the penalty."""
    weight = weight / weight.sum()

    def terms(theta: Tensor) -> Terms:
        logits = features @ theta
        prob = logits.sigmoid()
        away = theta - identity
        value = (weight * (torch.nn.functional.softplus(logits) - label * logits)).sum()
        gradient = features.t() @ (weight * (prob - label)) + PENALTY * away
        hessian = features.t() @ (features * (weight * prob * (1 - prob)).unsqueeze(1))
        return Terms(value + PENALTY / 2 * away @ away, gradient, hessian + PENALTY * torch.eye(len(theta)))

    theta = minimise(terms, identity)
    return theta, float(terms(theta).value)


def fit_vector(
    logits: Float[Tensor, "n C"], label: Float[Tensor, "n C"], weight: Float[Tensor, " n"]
) -> Float[Tensor, "C 2"]:
    """Scale and bias of each class with the most likely softmax(scale · logits + bias)."""
    weight = (weight / weight.sum()).unsqueeze(1)
    num_classes = logits.shape[1]
    identity = torch.cat([torch.ones(num_classes), torch.zeros(num_classes)]).double()
    # derivative of the scaled logit of a class by its scale and by its bias
    slopes = torch.cat([logits, torch.ones_like(logits)], 1)

    def terms(theta: Tensor) -> Terms:
        scaled = logits * theta[:num_classes] + theta[num_classes:]
        log_prob = scaled.log_softmax(1)
        prob, away = log_prob.exp(), theta - identity
        gradient = (slopes * (weight * (prob - label)).repeat(1, 2)).sum(0) + PENALTY * away
        # covariance of the slopes under the probabilities of each voxel
        mean = slopes * prob.repeat(1, 2)
        hessian = PENALTY * torch.eye(len(theta)) - mean.t() @ (weight * mean)
        own = ((weight * prob).unsqueeze(-1) * _outer(logits)).sum(0)
        for row, column, number in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
            block = hessian[row * num_classes :, column * num_classes :]
            block.diagonal()[:num_classes] += own[:, number]
        value = -(weight * label * log_prob).sum() + PENALTY / 2 * away @ away
        return Terms(value, gradient, hessian)

    return minimise(terms, identity).view(2, num_classes).t()


def _outer(logits: Float[Tensor, "n C"]) -> Float[Tensor, "n C 3"]:
    """Products of the slopes of one class: of scale with scale, scale with bias, bias with bias."""
    return torch.stack([logits.square(), logits, torch.ones_like(logits)], -1)
