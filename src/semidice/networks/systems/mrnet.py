"""MRNet (Ji et al., CVPR 2021): a prediction for any weights of the raters, refined where the raters differ.

    EIM   image --> encoder --> ConvLSTM with rater weights v --> decoder --> coarse prediction
    MRM   image and coarse prediction --> encoder --> ConvLSTM with v --> decoder --> the mask of each rater
    MPM   their standard deviation and the coarse probability weight the decoder's features --> final

From the paper and the authors' released code: EIM and MRM each have a ConvLSTM whose state is v. Each image
is trained with three sets of rater weights: equal, random (whole numbers 1 to 10, normalised) and one rater
alone. Their losses count 3 : 2 : 1. The coarse and the final prediction learn sum_r v_r (mask of rater r);
MRM learns the mask of each rater. Each module learns from its own loss alone; its inputs are detached.
Prediction uses equal weights.
Decided here: the recipe's network for EIM; for MRM a small_unet, much smaller than the authors' VGG16, with a
head for each rater; at most 512 channels in a ConvLSTM; a fixed Gaussian as blur; one optimiser; the recipe's
loss; weight 0 for absent raters. `label` of the recipe is not used. Reasons are in docs/systems.md.
"""

from functools import reduce
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from ...losses.segmentation import SegmentationLoss
from ..build import Task
from ..small_unet import SmallUNet, conv_block
from .per_rater import rater_losses
from .system import System, TrainingLabels, Trunk

# how much the losses of the three sets of weights in `draw_weights` count
_SHARES = (3 / 6, 2 / 6, 1 / 6)
_MAX_STATE_CHANNELS = 512
_NUM_REFINED = 64
# of the blur, in pixels: 31 taps reach three standard deviations to each side
_SIGMA, _REACH = 5.0, 15


class MRNetOutput(NamedTuple):
    """Logits for K sets of rater weights; "images" is K x N, the N images of one set are adjacent."""

    weight: Float32[Tensor, "K N R"]
    coarse: Float[Tensor, "images C H W"]
    raters: Float[Tensor, "images R C H W"]
    final: Float[Tensor, "images C H W"]


class MRNet(System):
    """network: makes the coarse prediction; the rater weights enter its deepest level."""

    needs_raters: ClassVar[bool] = True

    def __init__(self, network: nn.Module, task: Task) -> None:
        super().__init__()
        self.num_raters = task.raters
        self.trunk = Trunk(network)
        self.inference = RaterConvLSTM(self.trunk.level_channels[-1], task.raters)
        self.reconstruction = Reconstruction(task)
        self.perception = Perception(self.trunk.num_features, task.classes)

    def forward(
        self, image: Float[Tensor, "N channels H W"], present: Bool[Tensor, "N R"] | None = None
    ) -> MRNetOutput:
        """Logits for the three sets of weights of `draw_weights`; in eval mode, for equal weights."""
        if present is None:
            present = torch.ones(len(image), self.num_raters, dtype=torch.bool, device=image.device)
        weight = draw_weights(present) if self.training else _normalised(present.float()).unsqueeze(0)
        return self.weighted(image, weight)

    def weighted(
        self, image: Float[Tensor, "N channels H W"], weight: Float32[Tensor, "K N R"]
    ) -> MRNetOutput:
        """Logits for the given weights, which sum to one over the raters."""
        num_weightings = len(weight)
        # the encoder does not depend on the weights, so it runs once
        levels = [level.repeat(num_weightings, 1, 1, 1) for level in self.trunk.encode(image)]
        levels[-1] = self.inference(levels[-1], weight.flatten(0, 1))
        features = self.trunk.decode(levels)
        coarse = self.trunk.predict(features)
        prob = coarse.detach().float().softmax(1)
        raters = self.reconstruction(image.repeat(num_weightings, 1, 1, 1), prob, weight.flatten(0, 1))
        drawn = raters.detach().float().softmax(2)
        return MRNetOutput(weight, coarse, raters, self.perception(features.detach(), prob, drawn))

    def losses(
        self, output: MRNetOutput, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raters, present = labels.of_raters()
        num_weightings = len(output.weight)
        terms = {}
        for name, logits in (("coarse", output.coarse), ("final", output.final)):
            pieces = zip(_SHARES, output.weight, logits.chunk(num_weightings), strict=True)
            weighted = [
                share * loss(piece, fused_label(raters, weight), labels.valid)
                for share, weight, piece in pieces
            ]
            terms[name] = reduce(torch.add, weighted)
        terms["raters"], _ = rater_losses(
            output.raters,
            raters.repeat(num_weightings, *[1] * (raters.ndim - 1)),
            present.repeat(num_weightings, 1),
            labels.valid.repeat(num_weightings, 1, 1),
            loss,
        )
        return reduce(torch.add, terms.values()), {name: term.detach() for name, term in terms.items()}

    def probability(
        self, image: Float[Tensor, "N channels H W"], weight: Float32[Tensor, "N R"] | None = None
    ) -> Float32[Tensor, "N C H W"]:
        """The final prediction; weight: of each rater, by default equal."""
        if weight is None:
            # not len: an exported network takes batches of any size
            weight = torch.full((image.shape[0], self.num_raters), 1 / self.num_raters, device=image.device)
        return self.weighted(image, weight.unsqueeze(0)).final.float().softmax(1)


class RaterConvLSTM(nn.Module):
    """One step of a ConvLSTM. Its input is the deepest features x, its state the embedded rater weights v.

        s = embed(v, repeated at every position)      i, f, o, g = gates(x, s)
        cell = sigmoid(f) s + sigmoid(i) tanh(g)      output = sigmoid(o) tanh(cell)

    s is the hidden state and also the cell state before the step, as in the authors' code.
    """

    def __init__(self, channels: int, num_raters: int) -> None:
        super().__init__()
        width = min(channels, _MAX_STATE_CHANNELS)
        self.embed = nn.Conv2d(num_raters, width, 3, padding=1)
        self.gates = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.narrow: nn.Module = nn.Conv2d(channels, width, 1) if width < channels else nn.Identity()
        self.widen: nn.Module = nn.Conv2d(width, channels, 1) if width < channels else nn.Identity()

    def forward(
        self, deepest: Float[Tensor, "N channels h w"], weight: Float[Tensor, "N R"]
    ) -> Float[Tensor, "N channels h w"]:
        state = self.embed(weight[:, :, None, None].expand(-1, -1, *deepest.shape[2:]))
        gates = self.gates(torch.cat([self.narrow(deepest), state.to(deepest.dtype)], 1))
        enter, keep, leave, new = gates.chunk(4, 1)
        cell = keep.sigmoid() * state + enter.sigmoid() * new.tanh()
        return self.widen(leave.sigmoid() * cell.tanh())  # type: ignore[no-any-return]


class Reconstruction(nn.Module):
    """MRM: the mask of each rater from image and coarse prediction; a small_unet with a ConvLSTM."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.num_raters = task.raters
        self.trunk = Trunk(SmallUNet(task.channels + task.classes - 1, task.raters * task.classes))
        self.inference = RaterConvLSTM(self.trunk.level_channels[-1], task.raters)

    def forward(
        self,
        image: Float[Tensor, "N channels H W"],
        prob: Float32[Tensor, "N C H W"],
        weight: Float[Tensor, "N R"],
    ) -> Float[Tensor, "N R C H W"]:
        *finer, deepest = self.trunk.encode(torch.cat([image, prob[:, 1:]], 1))
        features = self.trunk.decode([*finer, self.inference(deepest, weight)])
        logits = self.trunk.predict(features)
        return logits.unflatten(1, (self.num_raters, -1))  # type: ignore[no-any-return]


class Perception(nn.Module):
    """MPM: features weighted by the raters' differences and by the coarse prediction, then a last layer."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.refine = nn.Sequential(
            conv_block(num_features, _NUM_REFINED), conv_block(_NUM_REFINED, _NUM_REFINED)
        )
        self.last = nn.Conv2d(2 * (num_classes - 1) * _NUM_REFINED, num_classes, 3, padding=1)
        steps = torch.arange(-_REACH, _REACH + 1, dtype=torch.float32)
        taps = torch.exp(-0.5 * (steps / _SIGMA) ** 2)
        self.register_buffer("taps", taps / taps.sum(), persistent=False)

    def forward(
        self,
        features: Float[Tensor, "N features h w"],
        prob: Float32[Tensor, "N C H W"],
        raters: Float32[Tensor, "N R C H W"],
    ) -> Float[Tensor, "N C H W"]:
        size = prob.shape[2:]
        if features.shape[2:] != size:
            features = F.interpolate(features, size, mode="bilinear")
        features = self.refine(features)
        # correction=0: the deviation of a single rater is 0
        differ = raters[:, :, 1:].std(1, correction=0)
        attention = self._attention(torch.cat([prob[:, 1:], differ], 1)).to(features.dtype)
        weighted = features.unsqueeze(1) * (1 + attention.unsqueeze(2))
        return self.last(weighted.flatten(1, 2))  # type: ignore[no-any-return]

    def _attention(self, maps: Float32[Tensor, "N maps H W"]) -> Float[Tensor, "N maps H W"]:
        """The larger of each map and its blur scaled to [0, 1], so that pixels near it count too."""
        taps: Tensor = self.get_buffer("taps")
        single = maps.flatten(0, 1).unsqueeze(1)
        blurred = F.conv2d(single, taps.view(1, 1, -1, 1), padding=(_REACH, 0))
        blurred = F.conv2d(blurred, taps.view(1, 1, 1, -1), padding=(0, _REACH)).view_as(maps).float()
        low, high = (extreme((2, 3), keepdim=True) for extreme in (blurred.amin, blurred.amax))
        return maps.maximum((blurred - low) / (high - low).clamp_min(1e-8))


def draw_weights(present: Bool[Tensor, "N R"]) -> Float32[Tensor, "3 N R"]:
    """Three sets of weights of the raters present in each image: equal, random, and one rater alone.

    Random numbers come from the default generator of the device.
    """
    is_present = present.float()
    numbers = torch.rand(2, *present.shape, device=present.device)
    random = (1 + (10 * numbers[0]).floor()) * is_present
    # the highest number among the raters present; + 1 for them keeps absent raters below
    chosen = (numbers[1] + is_present).argmax(1, keepdim=True)
    alone = torch.zeros_like(is_present).scatter(1, chosen, 1.0)
    return torch.stack([_normalised(is_present), _normalised(random), alone])


def fused_label(
    raters: Float32[Tensor, "N R C H W"], weight: Float32[Tensor, "N R"]
) -> Float32[Tensor, "N C H W"]:
    """The weighted mean of the raters' masks."""
    pairs = zip(raters.unbind(1), weight.unbind(1), strict=True)
    fused = reduce(torch.add, [mask * share.view(-1, 1, 1, 1) for mask, share in pairs])
    # by rounding, the weights may sum to a little more than one
    return fused.clamp(max=1)


def _normalised(weight: Float32[Tensor, "N R"]) -> Float32[Tensor, "N R"]:
    return weight / weight.sum(1, keepdim=True)
