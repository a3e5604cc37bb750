"""Stored predictions: the probabilities of one case in a small file, to be scored without a network.

    foreground   uint16 (C - 1, *space): classes 1, 2, ... in units of 1/65535; the background is the rest

The units of a class are the difference of two rounded cumulative sums. So each class, also the background, is
within one unit of the network's probability, none is negative, and all sum to exactly 65535. A probability
below half a unit (8e-6) can become 0. The file is a compressed .npz without pickles. Left out: sigmoid
networks, whose channels do not sum to one.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt16
from torch import Tensor

# calibrators are fitted exactly to probabilities in these units
from ..calibration.streams import UNITS as UNITS
from ..data.dataset import Dataset
from ..errors import UserError, reading
from ..paths import FoldFolder, atomic_write

# the sum of a bfloat16 softmax over many classes differs from one by up to this
_SUM_TOLERANCE = 1e-2


def write_prediction(path: Path, prob: Float[np.ndarray, "C *space"] | Float[Tensor, "C *space"]) -> None:
    """Write the class probabilities of a case; reading returns them to within 1/65535."""
    if isinstance(prob, Tensor):
        prob = prob.float().cpu().numpy()
    total = prob.sum(axis=0, dtype=np.float64) if len(prob) > 1 else np.array(np.nan)
    # the condition is also false for NaN
    if not (prob.min() >= 0 and np.abs(total - 1).max() <= _SUM_TOLERANCE):
        raise UserError(
            f"{path}: a stored prediction needs probabilities of two or more classes that sum to one; got "
            f"{prob.shape} with values from {prob.min():.4g} and sums from {total.min():.4g} to "
            f"{total.max():.4g}"
        )
    with atomic_write(path) as temp_path, temp_path.open("wb") as file:
        np.savez_compressed(file, foreground=_foreground_units(prob, total))


def read_prediction(path: Path, *, shape: tuple[int, ...] | None = None) -> Float32[np.ndarray, "C *space"]:
    """The stored class probabilities; a ValueError names a file that is missing or damaged.

    shape: (C, *space) of the case. A file that declares another shape is not expanded.
    """
    with reading(path, "predict again"), np.load(path, allow_pickle=False) as archive:
        foreground = archive["foreground"]
    stored = (len(foreground) + 1, *foreground.shape[1:])
    if foreground.dtype != np.uint16 or foreground.ndim < 2:
        raise UserError(f"{path} holds {foreground.dtype} {stored} and no stored prediction: predict again")
    if stored != (shape or stored):
        raise UserError(
            f"{path} has shape {stored}, but the case has {shape}: the prediction was made from another "
            "dataset; predict again"
        )
    background = UNITS - foreground.sum(axis=0, dtype=np.int64)
    if background.min() < 0:
        raise UserError(f"{path} is damaged: classes sum to {1 - background.min() / UNITS:.4f} in a voxel")
    prob = np.concatenate([background[None].astype(np.float32), foreground.astype(np.float32)])
    prob /= np.float32(UNITS)
    return prob


def read_case(folder: FoldFolder, dataset: Dataset, number: int) -> Float32[np.ndarray, "C *space"]:
    """The stored probabilities of a dataset's case; a ValueError if their shape is not the case's."""
    case = dataset.cases[number]
    return read_prediction(folder.prediction(case.name), shape=(dataset.num_classes, *case.shape))


def stored_cases(folder: FoldFolder, dataset: Dataset) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    """A function that reads the stored probabilities of cases, as `scoring.score_cases` takes it."""
    return lambda numbers: (torch.from_numpy(read_case(folder, dataset, number)) for number in numbers)


def _foreground_units(
    prob: Float[np.ndarray, "C *space"], total: Float[np.ndarray, "*space"]
) -> UInt16[np.ndarray, "foreground *space"]:
    """Units of the foreground classes, see the module."""
    edges = np.rint(np.cumsum(prob[:-1], axis=0, dtype=np.float64) * (UNITS / total))
    return np.diff(edges, axis=0, append=UNITS).astype(np.uint16)
