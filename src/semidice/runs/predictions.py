"""Stored predictions: the probabilities of one case in a small file, to be scored without a network.

    foreground   uint16 (C - 1, *space): classes 1, 2, ... in units of 1/65535; the background is the rest

The 65535 units of each voxel are distributed by largest remainder: the probability of every class is rounded
down or up, and the units sum to exactly 65535. So each class, also the background, is within one unit of the
network's probability, and the probabilities that are read sum to one. A probability below half a unit (8e-6)
becomes 0. The file is a compressed .npz without pickles. Left out: sigmoid networks, whose channels do not
sum to one.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, UInt16
from torch import Tensor

# calibrators are fitted exactly to probabilities in these units
from ..calibration.curves import UNITS as UNITS
from ..data.dataset import Dataset
from ..limits import check_file, check_shape
from ..paths import FoldFolder, atomic_write

# what zipfile and numpy raise for a damaged archive
NPZ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
# the sum of a bfloat16 softmax over many classes differs from one by up to this
_SUM_TOLERANCE = 1e-2


def write_prediction(path: Path, prob: Float[np.ndarray, "C *space"] | Float[Tensor, "C *space"]) -> None:
    """Write the class probabilities of a case; reading returns them to within 1/65535."""
    if isinstance(prob, Tensor):
        prob = prob.float().cpu().numpy()
    total = prob.sum(axis=0, dtype=np.float64) if len(prob) > 1 else np.array(np.nan)
    # the condition is also false for NaN
    if not (prob.min() >= 0 and np.abs(total - 1).max() <= _SUM_TOLERANCE):
        raise ValueError(
            f"{path}: a stored prediction needs probabilities of two or more classes that sum to one; got "
            f"{prob.shape} with values from {prob.min():.4g} and sums from {total.min():.4g} to "
            f"{total.max():.4g}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path, temp_path.open("wb") as file:
        np.savez_compressed(file, foreground=_foreground_units(prob, total))


def read_prediction(path: Path, *, shape: tuple[int, ...] | None = None) -> Float32[np.ndarray, "C *space"]:
    """The stored class probabilities; a ValueError names a file that is missing or damaged.

    shape: (C, *space) of the case. A file that declares another shape is not expanded.
    """
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            declared, _ = array_header(archive, "foreground")
            check_shape(declared, "it")
            if len(declared) < 2:
                raise ValueError(f"it holds shape {declared}")
            is_expected = shape is None or declared == (shape[0] - 1, *shape[1:])
            with archive.open("foreground.npy") as file:
                foreground = np.lib.format.read_array(file, allow_pickle=False) if is_expected else None
    except FileNotFoundError:
        raise ValueError(f"there is no stored prediction {path}") from None
    except NPZ_ERRORS as error:
        raise ValueError(f"{path} is not a complete stored prediction: {error}") from error
    if foreground is None:
        raise ValueError(
            f"{path} has shape {(declared[0] + 1, *declared[1:])}, but the case has {shape}: the prediction "
            "was made from another dataset; predict again"
        )
    if foreground.dtype != np.uint16 or foreground.ndim < 2 or foreground.size == 0:
        raise ValueError(
            f"{path} must hold uint16 (C - 1, *space); it holds {foreground.dtype} {foreground.shape}"
        )
    background = UNITS - foreground.sum(axis=0, dtype=np.int64)
    if background.min() < 0:
        raise ValueError(f"{path} is damaged: classes sum to {1 - background.min() / UNITS:.4f} in a voxel")
    prob = np.concatenate([background[None].astype(np.float32), foreground.astype(np.float32)])
    prob /= np.float32(UNITS)
    return prob


def read_case(folder: FoldFolder, dataset: Dataset, number: int) -> Float32[np.ndarray, "C *space"]:
    """The stored probabilities of a dataset's case; a ValueError if their shape is not the case's."""
    case = dataset.cases[number]
    return read_prediction(folder.prediction(case.name), shape=(dataset.num_classes, *case.shape))


def array_header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array in an .npz file, without its values."""
    with archive.open(f"{key}.npy") as file:
        # 1.0 is what numpy writes unless the header is very long
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{key} is not a plain array")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, dtype


def _foreground_units(
    prob: Float[np.ndarray, "C *space"], total: Float[np.ndarray, "*space"]
) -> UInt16[np.ndarray, "foreground *space"]:
    """Units of the foreground classes, see the module; of equal remainders, the lowest class gains."""
    if len(prob) == 2:
        # the same result without slow sorting: round to nearest, and a tie in favour of the background
        return np.ceil(prob[1:] * (UNITS / total) - 0.5).astype(np.uint16)
    share = prob * (UNITS / total)
    units = np.floor(share)
    num_left = UNITS - units.sum(axis=0)
    # rank of each class in its voxel: the number of classes with a larger remainder
    order = np.argsort(units - share, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(len(prob)).reshape(-1, *[1] * (prob.ndim - 1)), axis=0)
    units += rank < num_left
    return units[1:].astype(np.uint16)
