"""Systems with a part for each rater: a head, or a confusion matrix. `label` of the recipe is not used.

Multi-head (after Guan et al., AAAI 2018): one network with one last layer per rater.

    loss = mean over raters of loss(head r, mask of rater r)      prob = mean over raters of softmax(head r)

Published: all layers but the last are shared. Each head learns from its own rater alone. A case that a rater
did not annotate does not change the head of this rater. The prediction is the mean of the heads. Decided
here: segmentation in place of classification, so the last layer has (raters x classes) channels; the recipe's
loss for each head; equal weights of the heads, which the authors also learn.

Learned reliability (after Tanno et al., CVPR 2019): a confusion matrix for each rater.

    q_r(given) = sum over true classes of p(true) A_r(true, given)       p = softmax of the network
    loss = mean over raters of loss(q_r, mask of rater r)  +  trace_weight * mean over raters of trace(A_r)

The network predicts the true class of a voxel, and A_r how rater r reports it: A_r(true, given) is the
probability that the rater draws `given` where `true` is right. Every row sums to one; A_r is the same for all
images and voxels. Many pairs of p and A_r explain the masks equally well. Of these, the smallest trace blames
the raters for as much as possible; it is that of the truth if raters, on average, are right more often than
wrong (Tanno et al., theorem 1). Published: matrices that are trained with the network and start near the
identity; the trace as regulariser; cross entropy. Decided here: segmentation; the recipe's loss of log q as
logits; rows as softmax of a constant plus parameters that start at 0, so weight decay pulls a matrix to its
start and not to guessing. The weight of a rater, also of the trace, is the number of annotated images.
"""

import math
from functools import reduce
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from ...errors import UserError
from ...losses.segmentation import SegmentationLoss
from ...overlap import sum_across_processes
from ..build import Task
from .system import System, TrainingLabels

# the diagonal of every confusion matrix at the start
_START = 0.9


class MultiHead(System):
    """network: with `num_raters * num_classes` output channels; the classes of a rater are adjacent."""

    needs_raters: ClassVar[bool] = True

    def __init__(self, network: nn.Module, *, num_raters: int) -> None:
        super().__init__()
        self.network, self.num_raters = network, num_raters

    def forward(
        self, image: Float[Tensor, "N channels *space"], present: Bool[Tensor, "N R"] | None = None
    ) -> Float[Tensor, "N R C *space"]:
        """Logits of each head; `present` is used by the loss alone."""
        return self.network(image).unflatten(1, (self.num_raters, -1))  # type: ignore[no-any-return]

    def losses(
        self, output: Tensor, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raters, present = labels.of_raters()
        return rater_losses(output, raters, present, labels.valid, loss)

    def probability(self, image: Float[Tensor, "N channels *space"]) -> Float32[Tensor, "N C *space"]:
        return self(image).float().softmax(2).mean(1)  # type: ignore[no-any-return]


class ReliabilityOutput(NamedTuple):
    """Logits of the true class, and the logarithm of the confusion matrices (raters, true, given)."""

    logits: Float[Tensor, "N C *space"]
    log_confusion: Float32[Tensor, "R C C"]


class LearnedReliability(System):
    """A network of the true class, and the confusion matrix of each rater."""

    needs_raters: ClassVar[bool] = True

    def __init__(self, network: nn.Module, task: Task, *, trace_weight: float) -> None:
        super().__init__()
        self.network, self.trace_weight = network, trace_weight
        self.confusion = nn.Parameter(torch.zeros(task.raters, task.classes, task.classes))
        start = math.log(_START / (1 - _START) * (task.classes - 1))
        # not in checkpoints: it is a constant
        self.register_buffer("start", start * torch.eye(task.classes), persistent=False)

    def forward(
        self, image: Float[Tensor, "N channels *space"], present: Bool[Tensor, "N R"] | None = None
    ) -> ReliabilityOutput:
        """`present` is used by the loss alone."""
        return ReliabilityOutput(self.network(image), self.log_confusion())

    def log_confusion(self) -> Float32[Tensor, "R C C"]:
        """The logarithm of the confusion matrices: raters, true class, given class."""
        return (self.confusion + self.get_buffer("start")).log_softmax(2)

    def losses(
        self, output: ReliabilityOutput, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raters, present = labels.of_raters()
        confusion = output.log_confusion.exp()
        prob = output.logits.float().softmax(1)
        given = torch.einsum("nc...,rcg->nrg...", prob, confusion)
        # the softmax of log q is q, so the loss of logits is the loss of q; no entry of a matrix is 0
        total, parts = rater_losses(given.log(), raters, present, labels.valid, loss)
        trace = (_rater_shares(present) * confusion.diagonal(dim1=1, dim2=2).sum(1)).sum()
        return total + self.trace_weight * trace, {**parts, "trace": trace.detach()}

    def probability(self, image: Float[Tensor, "N channels *space"]) -> Float32[Tensor, "N C *space"]:
        """Of the true class."""
        return self.network(image).float().softmax(1)  # type: ignore[no-any-return]


def rater_confusion(network: nn.Module) -> Float32[Tensor, "R C C"]:
    """The learned confusion matrix of each rater: row is the true class, column what the rater draws.

    network: of a run with `system.name: learned_reliability`. Raters in the order of the dataset.
    """
    if not isinstance(network, LearnedReliability):
        raise UserError(
            "only the system learned_reliability has confusion matrices of raters; "
            f"got a {type(network).__name__}: train with --set system.name=learned_reliability"
        )
    return network.log_confusion().detach().exp()


def rater_losses(
    logits: Float[Tensor, "N R C *space"],
    raters: Float32[Tensor, "N R C *space"],
    present: Bool[Tensor, "N R"],
    valid: Bool[Tensor, "N *space"],
    loss: SegmentationLoss,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The loss of each rater's prediction against the rater's mask, averaged over raters.

    The weight of a rater is the number of annotated images in the batch. An image that a rater did not
    annotate adds nothing to the loss or gradient of this rater.
    """
    share = _rater_shares(present)
    space = [1] * (valid.ndim - 1)
    totals, terms = [], []
    for rater in range(logits.shape[1]):
        annotated = valid & present[:, rater].view(-1, *space)
        parts = loss.terms(logits[:, rater], raters[:, rater], annotated)
        totals.append(share[rater] * loss.total(parts))
        terms.append({name: share[rater] * part.detach() for name, part in parts.items()})
    sums = {name: reduce(torch.add, [part[name] for part in terms]) for name in terms[0]}
    return reduce(torch.add, totals), sums


def _rater_shares(present: Bool[Tensor, "N R"]) -> Float32[Tensor, " R"]:
    """The share of each rater in the annotated images of the batch, over all processes; the sum is 1."""
    num_annotated = sum_across_processes(present.sum(0).float())
    # not 0 / 0: every case has at least one rater
    return num_annotated / num_annotated.sum()
