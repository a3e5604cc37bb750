"""Where the foreground of a dataset lies, how large it is, and which way round: what `auto` needs to know.

Positions are shares of the image: 0 is the centre, -0.5 and 0.5 are the borders. A voxel is foreground if any
rater marked it. Of a large dataset, evenly spaced cases are read.
"""

from dataclasses import dataclass
from itertools import combinations
from weakref import WeakKeyDictionary

import numpy as np

from .dataset import Dataset

_MAX_CASES = 600


@dataclass(frozen=True)
class ForegroundFacts:
    """num_cases: how many were read. share_empty: of the cases without foreground.

    spread: per axis, root mean square distance of a case's foreground from the centre of its image.
    offset, deviation: per axis, mean and standard deviation of this position.
    order: per axis, the share of cases in which two classes lie in their usual order, of the pair of classes
    whose order is most certain; 0.5 is no order, and is also the value of one foreground class.
    """

    num_cases: int
    share_empty: float
    spread: tuple[float, ...]
    offset: tuple[float, ...]
    deviation: tuple[float, ...]
    order: tuple[float, ...]


# all variants of a grid ask for the same facts
_FACTS: WeakKeyDictionary[Dataset, ForegroundFacts] = WeakKeyDictionary()


def foreground_facts(dataset: Dataset) -> ForegroundFacts:
    """Facts of up to 600 cases of the dataset, read once; positions are 0 if no case has foreground."""
    if dataset not in _FACTS:
        _FACTS[dataset] = _read_facts(dataset)
    return _FACTS[dataset]


def _read_facts(dataset: Dataset) -> ForegroundFacts:
    numbers = np.unique(np.linspace(0, len(dataset) - 1, min(_MAX_CASES, len(dataset))).round().astype(int))
    num_axes = dataset.num_axes
    centres, class_centres = [], []
    for number in numbers:
        masks = dataset.masks(int(number))
        centre = _centre(masks > 0)
        if centre is None:
            continue
        centres.append(centre)
        class_centres.append([_centre(masks == label) for label in range(1, dataset.num_classes)])
    positions = np.array(centres) if centres else np.zeros((1, num_axes))
    return ForegroundFacts(
        num_cases=len(numbers),
        share_empty=1 - len(centres) / len(numbers),
        spread=tuple(np.sqrt((positions**2).mean(0)).tolist()),
        offset=tuple(positions.mean(0).tolist()),
        deviation=tuple(positions.std(0).tolist()),
        order=tuple(_order(class_centres, axis) for axis in range(num_axes)),
    )


def _centre(marked: np.ndarray) -> np.ndarray | None:
    """The mean position of the voxels that some rater marked, in masks (R, *space); None without any."""
    voxels = np.argwhere(marked.any(0))
    if not len(voxels):
        return None
    centre: np.ndarray = (voxels.mean(0) + 0.5) / marked.shape[1:] - 0.5
    return centre


def _order(class_centres: list[list[np.ndarray | None]], axis: int) -> float:
    shares = [0.5]
    num_classes = len(class_centres[0]) if class_centres else 0
    for first, second in combinations(range(num_classes), 2):
        both = [(case[first], case[second]) for case in class_centres]
        gap = np.array([a[axis] - b[axis] for a, b in both if a is not None and b is not None])
        # with few cases, an order may be chance
        if len(gap) >= 5:
            shares += [float((gap < 0).mean()), float((gap > 0).mean())]
    return max(shares)
