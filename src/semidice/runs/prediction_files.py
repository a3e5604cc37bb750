"""Predictions of other tools: files of masks or probabilities, brought to the grid of a dataset's cases.

    CASE.nii.gz .nii .png .tif   class numbers 0 .. C - 1; with two classes also 0 and 255. A NIfTI may also
                                 hold probabilities: of the foreground, or of all classes on a last axis
    CASE.npz                     probabilities (C, *space), key `probabilities` or `softmax`, as in nnU-Net
    CASE_mask, CASE_prob         what `semidice predict` writes; a picture holds one foreground class

CASE is the name of a scan, or of each slice. A file has the shape of the raw image and is then cut and
resized as in `semidice prepare`, or it has the prepared shape. A NIfTI must be aligned with the image.
nnU-Net's .npz of a NIfTI has its axes in reverse order. If the shape does not tell the order, the mask next
to it does.
No file can run code, and voxels are read only if the header declares the expected shape.
Left out: several pictures with one class each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from ..data.dataset import Case, Dataset
from ..data.geometry import Grid, misalignment
from ..data.resample import resize_classes, resize_probability
from ..data.sources.files import (
    holds_fractions,
    read_header,
    read_mask,
    read_probability,
    stem_of,
    suffix_of,
)
from ..errors import UserError, listing, reading

_NPZ_KEYS = ("probabilities", "softmax")
# the sum of float16 probabilities over many classes differs from one by up to this
_SUM_TOLERANCE = 1e-2


@dataclass
class _Files:
    """The files of one scan or slice: at least one of the two."""

    mask: Path | None = None
    prob: Path | None = None


class PredictionFiles:
    """The predictions in a folder for the cases of a dataset.

    cases: numbers of the cases that have a prediction. missing: scans that lack it, wholly or in a slice.
    unused: names in the folder that belong to no case. are_masks: whether all are masks, without
    probabilities. A ValueError names files that cannot be used.
    """

    def __init__(self, folder: Path, dataset: Dataset, *, ignore_placement: bool = False) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder} with predictions")
        self.dataset = dataset
        self._ignore_placement = ignore_placement or dataset.manifest.options.ignore_placement
        self._files, self.unused = _find(folder, dataset)
        self.missing = [
            scan.name
            for scan in dataset.manifest.scans
            if scan.name not in self._files and not all(name in self._files for name in scan.case_names())
        ]
        self.cases = [
            number for number, case in enumerate(dataset.cases) if case.scan.name not in self.missing
        ]
        self.are_masks = self._check()
        # the slices of a scan are read one after the other
        self._values = lru_cache(maxsize=1)(self._read_file)

    def read(self, number: int) -> Float32[np.ndarray, "C *space"]:
        """Probabilities of a case on its grid; those of a mask are 0 and 1."""
        case = self.dataset.cases[number]
        name, slices = self._name(case), case.scan.slices
        values = self._values(name, number - case.row if name == case.scan.name else number)
        if slices is not None and name != case.name:
            values = np.take(values, slices[case.row], axis=values.ndim - 3 + self.dataset.slice_axis)
        num_classes = self.dataset.num_classes
        is_mask = values.dtype == np.uint8
        if values.shape[-len(case.shape) :] != case.shape:
            size = (case.shape[0], case.shape[1])
            values = (
                resize_classes(values, size, num_classes=num_classes)
                if is_mask
                else resize_probability(values, size)
            )
        if not is_mask:
            return values
        classes = np.arange(num_classes).reshape(-1, *[1] * len(case.shape))
        prob: np.ndarray = (values == classes).astype(np.float32)
        return prob

    def read_cases(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        """Probabilities of cases, as `scoring.score_cases` takes them."""
        return (torch.from_numpy(self.read(number)) for number in numbers)

    def _name(self, case: Case) -> str:
        return case.scan.name if case.scan.name in self._files else case.name

    def _check(self) -> bool:
        """Check the shapes in the headers; whether all files are masks."""
        kinds: dict[bool, list[str]] = {True: [], False: []}
        for number in self.cases:
            case = self.dataset.cases[number]
            name = self._name(case)
            if case.row and name != case.name:
                continue
            files = self._files[name]
            shapes = self._shapes(case, name)
            path = files.prob or files.mask
            assert path is not None
            if path.suffix.lower() != ".npz":
                has_classes = self._check_shape(path, shapes)
                if files.prob is None and (has_classes or holds_fractions(path)):
                    files.mask, files.prob = None, path
            kinds[files.prob is None].append(path.name)
        if kinds[True] and kinds[False]:
            raise UserError(
                f"the folder has {listing(kinds[True], 'mask')} and probabilities of "
                f"{listing(kinds[False], 'case')}: put them into two folders, and evaluate each"
            )
        return bool(kinds[True])

    def _shapes(self, case: Case, name: str) -> list[tuple[int, ...]]:
        """The shapes that a file may have: that of the raw image or slice first."""
        scan = case.scan
        if scan.slices is None:
            return [scan.raw_shape, scan.shape]
        if name != case.name:
            return [scan.raw_shape]
        axis = self.dataset.slice_axis
        return [(*scan.raw_shape[:axis], *scan.raw_shape[axis + 1 :]), scan.shape]

    def _check_shape(self, path: Path, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the header declares an axis of classes; a ValueError if the other axes are not `shapes`."""
        shape = read_header(path).space
        # the header is compared without axes of length 1
        allowed = [tuple(length for length in space if length != 1) for space in shapes]
        has_classes = shape in [(*space, self.dataset.num_classes) for space in allowed]
        if not has_classes and shape not in allowed:
            raise _wrong_shape(path, shape, shapes)
        return has_classes

    def _read_file(self, name: str, number: int) -> np.ndarray:
        """Classes (*space) as uint8, or probabilities (C, *space)."""
        case, files = self.dataset.cases[number], self._files[name]
        shapes, num_classes = self._shapes(case, name), self.dataset.num_classes
        num_axes = len(shapes[0])
        if files.prob is None:
            return self._read_mask(files.mask, case, shapes)
        if files.prob.suffix.lower() != ".npz":
            prob, grid = read_probability(files.prob, num_axes=num_axes, num_classes=num_classes)
            self._check_grid(files.prob, grid, case, shapes)
        else:
            prob = _read_npz(files.prob, num_classes=num_classes, shapes=shapes)
            # nnU-Net reads the axes of a NIfTI, and only of a NIfTI, in reverse order
            reverse = np.moveaxis(prob, range(1, prob.ndim), range(prob.ndim - 1, 0, -1))
            if case.scan.affine is not None and reverse.shape[1:] in shapes:
                prob = self._ordered(files, prob, reverse, case, shapes)
            if prob.shape[1:] not in shapes:
                raise _wrong_shape(files.prob, prob.shape[1:], shapes)
        return _checked(files.prob, prob)

    def _ordered(
        self, files: _Files, prob: np.ndarray, reverse: np.ndarray, case: Case, shapes: list[tuple[int, ...]]
    ) -> np.ndarray:
        """The probabilities in the order of the image's axes, where the reverse order has a right shape."""
        if prob.shape[1:] not in shapes:
            return reverse
        if files.mask is None:
            raise UserError(
                f"{files.prob} has shape {prob.shape}, which is right in the order of the image's axes and "
                "in nnU-Net's reverse order: put the mask of the case next to it, which tells the order"
            )
        mask = self._read_mask(files.mask, case, shapes)
        agrees = [float((each.argmax(0) == mask).mean()) for each in (prob, reverse)]
        return prob if agrees[0] >= agrees[1] else reverse

    def _read_mask(
        self, path: Path | None, case: Case, shapes: list[tuple[int, ...]]
    ) -> UInt8[np.ndarray, "*space"]:
        assert path is not None
        self._check_shape(path, shapes)
        num_classes = self.dataset.num_classes
        values = {0: 0, 1: 1, 255: 1} if num_classes == 2 else {n: n for n in range(num_classes)}
        mask = read_mask(path, num_axes=len(shapes[0]), class_of_value=values)
        self._check_grid(path, mask.grid, case, shapes)
        return mask.classes

    def _check_grid(self, path: Path, grid: Grid, case: Case, shapes: list[tuple[int, ...]]) -> None:
        """A ValueError if a file has not the shape of the image, or is not aligned with it."""
        space = grid.shape
        if space not in shapes:
            raise _wrong_shape(path, space, shapes)
        # an image with fewer axes does not tell which columns of the affine are its own
        if (
            self._ignore_placement
            or case.scan.affine is None
            or space != case.scan.raw_shape
            or len(space) < 3
        ):
            return
        image = np.array(case.scan.affine)[:3]
        apart = misalignment(Grid(space, affines=(image,)), grid)
        if apart:
            raise UserError(
                f"{path} is not aligned with the image of {case.scan.name}: {apart}; resample it to "
                "the image's grid, or use --ignore-placement if only the headers are wrong"
            )


def _find(folder: Path, dataset: Dataset) -> tuple[dict[str, _Files], list[str]]:
    """The files by name of the scan or slice, and the names of all others."""
    names = {case.name for case in dataset.cases} | {scan.name for scan in dataset.manifest.scans}
    found: dict[str, _Files] = {}
    unused = []
    for path in sorted(folder.iterdir()):
        is_npz = path.suffix.lower() == ".npz"
        stem = path.stem if is_npz else stem_of(path)
        name = stem if stem in names else stem.removesuffix("_prob").removesuffix("_mask")
        if name not in names or not path.is_file() or not (is_npz or suffix_of(path)):
            unused.append(path.name)
            continue
        kind = "prob" if is_npz or stem == f"{name}_prob" else "mask"
        files = found.setdefault(name, _Files())
        if getattr(files, kind) is not None:
            raise UserError(
                f"{name} has two predictions, {getattr(files, kind).name} and {path.name}, in {folder}: "
                "leave one of them"
            )
        setattr(files, kind, path)
    return found, unused


def _read_npz(
    path: Path, *, num_classes: int, shapes: Sequence[tuple[int, ...]]
) -> Float32[np.ndarray, "C *space"]:
    """The array of probabilities, without leading spatial axes of length 1 that the image does not have."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        key = next((key for key in _NPZ_KEYS if key in archive), None)
        if key is None:
            raise ValueError(f"it has no array {' or '.join(_NPZ_KEYS)}")
        values: np.ndarray = archive[key]
    if values.dtype.kind != "f":
        raise UserError(f"{path}: {key} holds {values.dtype}; expected floating-point numbers")
    space = list(values.shape[1:])
    while len(space) > len(shapes[0]) and space[0] == 1:
        del space[0]
    sizes = {tuple(sorted(each)) for each in shapes}
    if values.shape[:1] != (num_classes,) or tuple(sorted(space)) not in sizes:
        expected = " or ".join(str((num_classes, *each)) for each in dict.fromkeys(shapes))
        raise UserError(f"{path}: {key} has shape {values.shape}; expected {expected}")
    prob: np.ndarray = values.reshape(num_classes, *space).astype(np.float32)
    return prob


def _checked(path: Path, prob: Float32[np.ndarray, "C *space"]) -> Float32[np.ndarray, "C *space"]:
    """The probabilities, scaled to sum to one; a ValueError if they are something else, such as logits."""
    total = prob.sum(0)
    # the condition is also false for NaN
    if not (prob.min() >= 0 and np.abs(total - 1).max() <= _SUM_TOLERANCE):
        raise UserError(
            f"{path} does not hold probabilities that sum to one over the classes: values are from "
            f"{prob.min():.4g} to {prob.max():.4g}, sums from {total.min():.4g} to {total.max():.4g}; apply "
            "softmax to the output of a network"
        )
    return np.ascontiguousarray(prob / total)


def _wrong_shape(path: Path, shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> UserError:
    raw, *prepared = dict.fromkeys(shapes)
    return UserError(
        f"{path} has shape {shape}, but the image of the dataset has {raw}"
        + (f", prepared {prepared[0]}" if prepared else "")
        + ": resample it to the grid of the image"
    )
