"""Options of `semidice prepare`. Each source has its own defaults; the manifest stores the values used."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Slices = Literal["none", "all", "foreground"]


class PrepareOptions(BaseModel):
    """How raw scans are converted into arrays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: tuple[int, int] | None = Field(
        default=None,
        description="rows and columns of every 2D image or slice; None keeps the size of the scan",
    )
    window: tuple[float, float] | None = Field(
        default=None,
        description="raw values that become 0 and 1, such as HU -60 and 140; values outside are clipped",
    )
    percentiles: tuple[float, float] = Field(
        default=(0.5, 99.5),
        description="of a scan's channel, which become 0 and 1 without a window; 8-bit images are kept",
    )
    slices: Slices = Field(
        default="none",
        description="whether a volume becomes slices: all slices, or those with foreground",
    )
    slice_axis: int = Field(
        default=2, ge=0, le=2, description="axis of the raw volume that counts its slices"
    )
    ignore_placement: bool = Field(
        default=False,
        description="accept a mask with the shape of its image, also if the headers are not aligned",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "PrepareOptions":
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size needs 1 or more rows and columns; got {self.size}")
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError(f"window needs the lower value first; got {self.window}")
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ValueError(f"percentiles need 0 <= low < high <= 100; got {self.percentiles}")
        return self
