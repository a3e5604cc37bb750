"""MRNet (Ji et al., CVPR 2021): a prediction for any weighting of the raters, refined where they differ.

    EIM   deepest features, and rater weights v as state of a ConvLSTM, one step --> decoder --> coarse
    MRM   image and coarse prediction --> what each rater would have drawn
    MPM   their standard deviation and the coarse probability attend to the decoder's features --> final

From the paper's description and the authors' released code: an image is trained on under three weightings,
equal, random (whole numbers 1 to 10, normalised) and one rater alone, which count 3 : 2 : 1; coarse and final
learn sum_r v_r (what rater r drew), MRM what each rater drew; a module learns from its own loss alone, what
it is given is detached; it predicts with equal weights.
Decided here: the recipe's network and a ConvLSTM of at most 512 channels; MRM is a small_unet with a head for
each rater; MPM blurs with a fixed Gaussian; one optimiser; the recipe's loss in place of cross entropy;
absent raters have weight 0. `label` of the recipe is not used. Reasons are in docs/systems.md.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32
from torch import Tensor, nn

from ...losses.segmentation import SegmentationLoss
from ..models import SmallUNet
from .system import System, TrainingLabels, rater_losses, sum_of
from .trunk import Trunk

# of the three weightings in `draw_weights`
_SHARES = (3 / 6, 2 / 6, 1 / 6)
_WIDEST_STATE = 512
_WIDTH = 64
# of the blur, in pixels; 31 taps hold three of them either side
_SIGMA, _REACH = 5.0, 15


class MRNetOutput(NamedTuple):
    """Logits under K weightings of the raters, those of a weighting side by side."""

    weight: Float32[Tensor, "K N R"]
    coarse: Float[Tensor, "images C H W"]
    raters: Float[Tensor, "images R C H W"]
    final: Float[Tensor, "images C H W"]


class MRNet(System):
    """network: gives the coarse prediction, with the weights of the raters in its deepest level."""

    needs_raters: ClassVar[bool] = True

    def __init__(self, network: nn.Module, *, num_channels: int, num_classes: int, num_raters: int) -> None:
        super().__init__()
        self.num_classes, self.num_raters = num_classes, num_raters
        self.trunk = Trunk(network)
        self.inference = ExpertiseInference(self.trunk.level_channels[-1], num_raters)
        self.reconstruction = SmallUNet(num_channels + num_classes - 1, num_raters * num_classes)
        self.perception = Perception(self.trunk.num_features, num_classes)

    def forward(
        self, image: Float[Tensor, "N channels H W"], present: Bool[Tensor, "N R"] | None = None
    ) -> MRNetOutput:
        """In training under the three weightings of `draw_weights`, else under equal weights."""
        if present is None:
            present = torch.ones(len(image), self.num_raters, dtype=torch.bool, device=image.device)
        weight = draw_weights(present) if self.training else _normalised(present.float()).unsqueeze(0)
        return self.weighted(image, weight)

    def weighted(
        self, image: Float[Tensor, "N channels H W"], weight: Float32[Tensor, "K N R"]
    ) -> MRNetOutput:
        """All outputs under given weights, which sum to one over the raters."""
        num_weightings = len(weight)
        # the encoder does not know the weights, so it runs once
        levels = [level.repeat(num_weightings, 1, 1, 1) for level in self.trunk.encode(image)]
        levels[-1] = self.inference(levels[-1], weight.flatten(0, 1))
        features = self.trunk.decode(levels)
        coarse = self.trunk.predict(features)
        prob = coarse.detach().float().softmax(1)
        images = torch.cat([image.repeat(num_weightings, 1, 1, 1), prob[:, 1:]], 1)
        raters = self.reconstruction(images).unflatten(1, (self.num_raters, -1))
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
            terms[name] = sum_of(
                [
                    share * loss(piece, fused_label(raters, weight), labels.valid)
                    for share, weight, piece in pieces
                ]
            )
        terms["raters"], _ = rater_losses(
            output.raters,
            raters.repeat(num_weightings, *[1] * (raters.ndim - 1)),
            present.repeat(num_weightings, 1),
            labels.valid.repeat(num_weightings, 1, 1),
            loss,
        )
        return sum_of(list(terms.values())), {name: term.detach() for name, term in terms.items()}

    def probability(
        self, image: Float[Tensor, "N channels H W"], weight: Float32[Tensor, "N R"] | None = None
    ) -> Float32[Tensor, "N C H W"]:
        """The final prediction; weight: of the raters, by default equal."""
        if weight is None:
            weight = torch.full((len(image), self.num_raters), 1 / self.num_raters, device=image.device)
        return self.weighted(image, weight.unsqueeze(0)).final.float().softmax(1)


class ExpertiseInference(nn.Module):
    """EIM: one step of a ConvLSTM from the embedded weights as its state, with the features as its input."""

    def __init__(self, channels: int, num_raters: int) -> None:
        super().__init__()
        width = min(channels, _WIDEST_STATE)
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
        hidden: Tensor = self.widen(leave.sigmoid() * cell.tanh())
        return hidden


class Perception(nn.Module):
    """MPM: features weighted by where raters would differ and by the coarse prediction, then a last layer."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.refine = nn.Sequential(_block(num_features, _WIDTH), _block(_WIDTH, _WIDTH))
        self.last = nn.Conv2d(2 * (num_classes - 1) * _WIDTH, num_classes, 3, padding=1)
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
        # a rater alone has no deviation; over all of them it is at most one half
        differ = raters[:, :, 1:].std(1, correction=0)
        attention = self._attention(torch.cat([prob[:, 1:], differ], 1)).to(features.dtype)
        weighted = features.unsqueeze(1) * (1 + attention.unsqueeze(2))
        logits: Tensor = self.last(weighted.flatten(1, 2))
        return logits

    def _attention(self, maps: Float32[Tensor, "N maps H W"]) -> Float[Tensor, "N maps H W"]:
        """The map or its blur scaled to [0, 1], whichever is more: what is near counts too."""
        taps: Tensor = self.get_buffer("taps")
        single = maps.flatten(0, 1).unsqueeze(1)
        blurred = F.conv2d(single, taps.view(1, 1, -1, 1), padding=(_REACH, 0))
        blurred = F.conv2d(blurred, taps.view(1, 1, 1, -1), padding=(0, _REACH)).view_as(maps).float()
        low, high = (extreme((2, 3), keepdim=True) for extreme in (blurred.amin, blurred.amax))
        return maps.maximum((blurred - low) / (high - low).clamp_min(1e-8))


def draw_weights(present: Bool[Tensor, "N R"]) -> Float32[Tensor, "3 N R"]:
    """Weights of the raters present in each image: equal, at random, and one of them alone.

    From the default generator of the device.
    """
    there = present.float()
    numbers = torch.rand(2, *present.shape, device=present.device)
    random = (1 + (10 * numbers[0]).floor()) * there
    # the highest number among those present; an absent one has less than all of them
    chosen = (numbers[1] + there).argmax(1, keepdim=True)
    alone = torch.zeros_like(there).scatter(1, chosen, 1.0)
    return torch.stack([_normalised(there), _normalised(random), alone])


def fused_label(
    raters: Float32[Tensor, "N R C H W"], weight: Float32[Tensor, "N R"]
) -> Float32[Tensor, "N C H W"]:
    """What the raters drew, averaged with weights."""
    drawn = zip(raters.unbind(1), weight.unbind(1), strict=True)
    fused = sum_of([mask * share.view(-1, 1, 1, 1) for mask, share in drawn])
    # weights may add up to one and a rounding
    return fused.clamp(max=1)


def _normalised(weight: Float32[Tensor, "N R"]) -> Float32[Tensor, "N R"]:
    return weight / weight.sum(1, keepdim=True)


def _block(before: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )
