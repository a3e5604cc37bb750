"""A sample of the voxels of a stream: as many of each class, with weights that restore the frequencies.

Each voxel gets a random number, and the `share` smallest of a class are a uniform sample of it, without
replacement. The class of a soft label is its largest. The same seed gives the same sample on every device.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .calibrator import Statistics, StoredCalibrator


class VoxelSample(Statistics):
    """ceil(size / classes seen) voxels of each class; their probabilities (n, C) and soft labels.

    num_classes: two or more; one channel is [1 - p, p].

    rows: prob, label, class_of (the class that a voxel was drawn from), draw (its random number), and seen,
    the number of voxels of each class in the stream.
    """

    def __init__(self, size: int, num_classes: int, *, seed: int = 0) -> None:
        self.size, self.num_classes = size, num_classes
        self.rows: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Draw from these voxels too. Needs the time and memory of one sort."""
        prob, label = with_background(rows), with_background(label)
        class_of = label.argmax(1)
        # drawn on the CPU, so that a seed gives the same sample on every device
        draw = torch.randint(2**32, (len(prob),), generator=self._generator).to(prob.device)
        seen = class_of.bincount(minlength=prob.shape[1])
        self._keep({"prob": prob, "label": label, "class_of": class_of, "draw": draw, "seen": seen})

    def merge(self, other: "VoxelSample") -> None:
        """Draw from the voxels of the other sample's stream too."""
        self._keep(other.rows)

    def _keep(self, batch: dict[str, Tensor]) -> None:
        """Join the rows of a batch to the sample, and drop those beyond the share of their class.

        The share only shrinks when new classes appear, so a voxel that was dropped is never needed again.
        """
        device = batch["prob"].device
        old = {name: part.to(device) for name, part in self.rows.items()} or {
            name: part[:0] for name, part in batch.items()
        }
        seen = batch["seen"] + old["seen"] if self.rows else batch["seen"]
        share = -(-self.size // int((seen > 0).sum()))
        classes = torch.cat([old["class_of"], batch["class_of"]])
        order = ((classes << 32) + torch.cat([old["draw"], batch["draw"]])).argsort()
        run = classes[order]
        rank = torch.arange(len(run), device=run.device) - torch.searchsorted(run, run)
        chosen, num_old = order[rank < share], len(old["draw"])
        from_old, from_new = chosen[chosen < num_old], chosen[chosen >= num_old] - num_old
        names = ("prob", "label", "class_of", "draw")
        self.rows = {name: torch.cat([old[name][from_old], batch[name][from_new]]) for name in names}
        self.rows["seen"] = seen

    @property
    def weight(self) -> Float[Tensor, " n"]:
        """The number of voxels that each voxel of the sample represents."""
        seen, class_of = self.rows["seen"], self.rows["class_of"]
        return (seen / class_of.bincount(minlength=len(seen)))[class_of]

    def tensors(self) -> dict[str, Tensor]:
        """The sample and the random state, for a file."""
        return {**self.rows, "generator": self._generator.get_state()}

    @classmethod
    def from_stored(cls, stored: StoredCalibrator, size: int) -> "VoxelSample":
        """The sample in a file; a ValueError if its tensors do not fit each other."""
        prob = stored.tensors.get("prob")
        dtype = torch.float64 if prob is not None and prob.dtype == torch.float64 else torch.float32
        prob = stored.tensor("prob", dtype, (None, None))
        length, width = prob.shape
        sample = cls(size, width)
        sample.rows = {
            "prob": prob,
            "label": stored.tensor("label", torch.float32, (length, width)),
            "class_of": stored.tensor("class_of", torch.int64, (length,)),
            "draw": stored.tensor("draw", torch.int64, (length,)),
            "seen": stored.tensor("seen", torch.int64, (width,)),
        }
        sample._check(stored)
        try:
            sample._generator.set_state(stored.tensor("generator", torch.uint8, (None,)))
        except RuntimeError as error:
            raise stored.error(f"generator is not the state of a random generator: {error}") from error
        return sample

    def _check(self, stored: StoredCalibrator) -> None:
        rows = self.rows
        if len(rows["draw"]) == 0 or self.num_classes < 2:
            raise stored.error("it must have one voxel or more, of two classes or more")
        bounds = {"prob": 1, "label": 1, "class_of": self.num_classes - 1, "draw": 2**32 - 1}
        for name, highest in bounds.items():
            low, high = rows[name].aminmax()
            if low < 0 or high > highest:
                raise stored.error(f"{name} must lie in 0 to {highest}; got {low:.6g} to {high:.6g}")
        kept = rows["class_of"].bincount(minlength=self.num_classes)
        if not bool((rows["seen"] >= kept).all()):
            raise stored.error("it has more voxels of a class than were seen")


def with_background(channels: Float[Tensor, "n C *space"]) -> Float[Tensor, "n classes *space"]:
    """[1 - p, p] of one channel; several channels are returned as they are."""
    return torch.cat([1 - channels, channels], dim=1) if channels.shape[1] == 1 else channels
