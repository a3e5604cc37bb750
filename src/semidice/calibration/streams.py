"""What calibrators keep of a stream of batches: a bounded number of values, whatever the number of voxels.

Histogram     number of voxels and sum of labels at 65536 probabilities: the exact likelihood of every curve
VoxelSample   some voxels of each class, drawn uniformly, with weights that restore the frequencies

Each takes more voxels (`add`), and those of another one (`merge`).

A prediction is split into binary problems: each channel of a sigmoid network; the foreground of two classes;
each of three or more classes against the rest. A histogram has the multiples of 1/65535, which are the
probabilities that a run stores; others are rounded to such a multiple when a curve is fitted, but not when it
is applied.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation

UNITS = 65535


class Histogram:
    """Number of voxels and sum of labels (B, 65536) of B binary problems, in float64."""

    def __init__(self, num_classes: int, activation: Activation) -> None:
        self.activation: Activation = activation
        (problems,) = binary_problems(torch.zeros(1, num_classes), activation)
        self.count = torch.zeros(len(problems), UNITS + 1, dtype=torch.float64)
        self.label = torch.zeros_like(self.count)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Count these voxels too; on the CPU, where the order of a sum is fixed."""
        prob, label = (binary_problems(part, self.activation).cpu() for part in (rows, label))
        units = (prob.double() * UNITS).round().long()
        for problem, of_problem in enumerate(units.t()):
            self.count[problem] += of_problem.bincount(minlength=UNITS + 1)
            weights = label[:, problem].double()
            self.label[problem] += of_problem.bincount(weights, minlength=UNITS + 1)

    def merge(self, other: "Histogram") -> None:
        self.count += other.count
        self.label += other.label


def binary_problems(
    channels: Float[Tensor, "N C *space"], activation: Activation
) -> Float[Tensor, "N B *space"]:
    """The probability, or label, of each binary problem; see the module docstring."""
    return channels[:, 1:] if channels.shape[1] == 2 and activation != "sigmoid" else channels


class VoxelSample:
    """ceil(size / classes seen) voxels of each class; their probabilities (n, C) and soft labels.

    Each voxel gets a random number, and the `share` smallest of a class are a uniform sample of it, without
    replacement. The class of a soft label is its largest. The same seed gives the same sample on every
    device. One channel is [1 - p, p].

    rows: prob, label, class_of (the class that a voxel was drawn from), draw (its random number). seen: the
    number of voxels of each class in the stream.
    """

    def __init__(self, size: int, *, seed: int = 0) -> None:
        self.size = size
        self.rows: dict[str, Tensor] = {}
        self.seen = torch.zeros(0)
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, rows: Float[Tensor, "n C"], label: Float[Tensor, "n C"]) -> None:
        """Draw from these voxels too. Needs the time and memory of one sort."""
        prob, label = with_background(rows), with_background(label)
        class_of = label.argmax(1)
        # drawn on the CPU, so that a seed gives the same sample on every device
        draw = torch.randint(2**32, (len(prob),), generator=self._generator).to(prob.device)
        seen = class_of.bincount(minlength=prob.shape[1])
        self._keep({"prob": prob, "label": label, "class_of": class_of, "draw": draw}, seen)

    def merge(self, other: "VoxelSample") -> None:
        """Draw from the voxels of the other sample's stream too."""
        self._keep(other.rows, other.seen)

    def _keep(self, rows: dict[str, Tensor], seen: Tensor) -> None:
        """Join more voxels to the sample, and drop those beyond the share of their class.

        The share only shrinks when new classes appear, so a voxel that was dropped is never needed again.
        """
        if self.rows:
            rows = {name: torch.cat([self.rows[name].to(part.device), part]) for name, part in rows.items()}
            seen = self.seen.to(seen.device) + seen
        share = -(-self.size // max(1, int((seen > 0).sum())))
        of_classes = ((rows["class_of"] == number).nonzero().flatten() for number in range(len(seen)))
        chosen = torch.cat([voxels[rows["draw"][voxels].argsort()[:share]] for voxels in of_classes])
        self.rows = {name: part[chosen] for name, part in rows.items()}
        self.seen = seen

    @property
    def weight(self) -> Float[Tensor, " n"]:
        """The number of voxels that each voxel of the sample represents."""
        class_of = self.rows["class_of"]
        return (self.seen / class_of.bincount(minlength=len(self.seen)))[class_of]


def with_background(channels: Float[Tensor, "n C *space"]) -> Float[Tensor, "n classes *space"]:
    """[1 - p, p] of one channel; several channels are returned as they are."""
    return torch.cat([1 - channels, channels], dim=1) if channels.shape[1] == 1 else channels
