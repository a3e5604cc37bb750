"""A small UNet without pretraining, for demonstrations: 0.3 million parameters, fast at 64 x 64 on a CPU."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import UserError

# a layer of this width has 38 million weights
MAX_CHANNELS = 2048


class SmallUNet(nn.Module):
    """Two convolutions per level on the way down, one per level on the way up.

    On the way up, the lower level is brought to the width and size of the current level and added to it.
    Adding costs half as much as concatenating.

    channels: of each level; height and width are halved from one level to the next. norm: "batch", or
    "group", which keeps the images of a batch independent and works with a batch of one.
    """

    def __init__(
        self,
        num_channels: int,
        num_classes: int,
        *,
        channels: Sequence[int] = (16, 32, 64, 128),
        norm: str = "batch",
    ) -> None:
        super().__init__()
        is_list = isinstance(channels, Sequence) and all(isinstance(width, int) for width in channels)
        if (
            not is_list
            or not channels
            or any(width % 8 or not 0 < width <= MAX_CHANNELS for width in channels)
        ):
            raise UserError(
                f"small_unet needs a list of channels, multiples of 8 up to {MAX_CHANNELS}, one for each "
                f"level; got {channels!r}"
            )
        if norm not in ("batch", "group"):
            raise UserError(f"small_unet needs norm 'batch' or 'group'; got {norm!r}")
        self.multiple = 2 ** (len(channels) - 1)
        self.level_channels = tuple(channels)
        in_channels = [num_channels, *channels[:-1]]
        self.down = nn.ModuleList(
            nn.Sequential(conv_block(before, width, norm), conv_block(width, width, norm))
            for before, width in zip(in_channels, channels, strict=True)
        )
        self.lift = nn.ModuleList(nn.Conv2d(below, width, 1) for width, below in pairwise(channels))
        self.up = nn.ModuleList(conv_block(width, width, norm) for width in channels[:-1])
        self.segmentation_head: nn.Module = nn.Sequential(nn.Conv2d(channels[0], num_classes, 1))

    def forward(self, image: Float[Tensor, "N channels H W"]) -> Float[Tensor, "N C H W"]:
        return self.segmentation_head(self.decoder(self.encoder(image)))  # type: ignore[no-any-return]

    # the parts have the names that they have in networks of smp
    def encoder(self, image: Float[Tensor, "N channels H W"]) -> list[Tensor]:
        """Features of every level, the finest first."""
        if image.shape[-1] % self.multiple or image.shape[-2] % self.multiple:
            raise UserError(
                f"height and width must be multiples of {self.multiple}; got {tuple(image.shape[-2:])}"
            )
        levels: list[Tensor] = []
        for number, down in enumerate(self.down):
            image = down(image if number == 0 else F.max_pool2d(image, 2))
            levels.append(image)
        return levels

    def decoder(self, levels: Sequence[Tensor]) -> Float[Tensor, "N width H W"]:
        """The input of the last layer, from the levels of `encoder`."""
        *finer, below = levels
        for level, lift, up in zip(reversed(finer), reversed(self.lift), reversed(self.up), strict=True):
            below = up(level + F.interpolate(lift(below), scale_factor=2.0))
        return below


def conv_block(before: int, width: int, norm: str = "batch") -> nn.Sequential:
    """Convolution, normalisation ("batch" or "group"), ReLU."""
    # no bias: the normalisation would remove it
    normalise = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)
    return nn.Sequential(nn.Conv2d(before, width, 3, padding=1, bias=False), normalise, nn.ReLU(inplace=True))
