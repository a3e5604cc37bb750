"""Files to predict: found, read, and prepared as the dataset of the run was.

Intensities go through `data.convert` with the options of that dataset, rounding included, so that a network
meets what it was trained on. A volume is taken as slices along the dataset's slice axis, whatever became of
volumes there; its intensities are scaled as a whole. The axis of a NIfTI that has length 1 is the slice axis
of a single image, and that of a TIFF of several pages is its pages, unless the dataset was cut another way.
Where the dataset has several channels, files CASE_0000, CASE_0001, ... that do not hold all of them are one
input with a file for each, as nnU-Net names them. Left out: channels in files of other names.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..data.convert import convert_scan
from ..data.dataset import INTENSITY_UNITS
from ..data.nnunet import channel_file, channel_of
from ..data.raw import ScanArrays
from ..data.readers import NIFTI_SUFFIXES, SUFFIXES, file_shape, stem_of, suffix_of
from ..data.sources import joined, read_channels
from ..runs.run import DatasetFacts


@dataclass(frozen=True)
class InputCase:
    """What is predicted as one: the name of its results, and its file, or one for each channel."""

    name: str
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file whose grid and format the results have."""
        return self.files[0]


@dataclass(frozen=True)
class InputImage:
    """One input as slices that a network can take, and where they lie in its file.

    stored: (S, channels, h, w) as a prepared dataset has it; size: rows and columns of a slice in the file.
    slice_axis: which of the axes of `space` counts slices; None for a single 2D image.
    spacing_mm: along the axes of `space`; None for a picture, which has none.
    """

    case: InputCase
    stored: np.ndarray
    size: tuple[int, int]
    space: tuple[int, ...]
    slice_axis: int | None
    spacing_mm: tuple[float, ...] | None

    def normalised(self, slices: slice, facts: DatasetFacts) -> Float32[Tensor, "S channels h w"]:
        """Some of the slices with mean 0 and standard deviation 1 over the run's dataset."""
        unit = INTENSITY_UNITS[self.stored.dtype.name]
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (facts.mean, facts.std))
        # in the order in which `data.storage` multiplies and adds, so that the bits are those of training
        return torch.from_numpy(self.stored[slices].astype(np.float32)) * (unit / std) - mean / std

    def in_place(self, prob: Float32[np.ndarray, "S C H W"]) -> Float32[np.ndarray, "C *space"]:
        """Slices put back to where they are in the file."""
        if self.slice_axis is None:
            image: np.ndarray = prob[0]
            return image
        # first the class, then the slices where they were
        return np.ascontiguousarray(np.moveaxis(prob.swapaxes(0, 1), 1, 1 + self.slice_axis))


def find_inputs(inputs: Sequence[Path], out: Path, facts: DatasetFacts) -> list[InputCase]:
    """What to predict, files of a folder by name; a ValueError names what is missing or ambiguous.

    A file that holds one channel of several brings those of the other channels, which may not be there.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            if path.resolve() == out.resolve():
                raise ValueError(f"{out} is both input and output: choose another folder with -o")
            files = [file for file in sorted(path.iterdir()) if suffix_of(file) and file.is_file()]
            found += [file for file in files if not file.name.startswith(".")]
            if not files:
                raise ValueError(f"{path} holds nothing to predict: looked for {', '.join(SUFFIXES)}")
        elif not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        elif not suffix_of(path):
            raise ValueError(f"{path} is not read: images and volumes are {', '.join(SUFFIXES)}")
        else:
            found.append(path)
    cases = list(dict.fromkeys(_case_of(path, facts) for path in found))
    if not cases:
        raise ValueError("there is nothing to predict: name files or folders of them")
    # results are named after their input, on some disks without regard to case
    count = Counter(case.name.casefold() for case in cases)
    twice = [str(case.path) for case in cases if count[case.name.casefold()] > 1]
    if twice:
        raise ValueError(f"results would overwrite each other, predict them apart: {', '.join(twice[:4])}")
    return cases


def read_input(case: InputCase, facts: DatasetFacts, *, slice_axis: int | None = None) -> InputImage:
    """The input, prepared; a ValueError names a file. slice_axis: of a volume, instead of the dataset's."""
    path, num_channels = case.path, len(facts.channels)
    if len(case.files) > 1:
        for file, channel in zip(case.files, facts.channels, strict=True):
            if not file.exists():
                raise ValueError(
                    f"case {case.name!r} has no file {file} ({channel}): add it, or put all channels into one"
                )
    is_nifti = suffix_of(path) in NIFTI_SUFFIXES
    inside = num_channels if len(case.files) == 1 else 1
    space = _nifti_space(path, inside) if is_nifti else file_shape(path)[0]
    num_axes = max(2, len(space))
    images = read_channels(
        case.files,
        num_axes=num_axes,
        num_channels=num_channels,
        ignore_placement=facts.prepare_options.ignore_placement,
        remedy="copy the header of the first",
    )
    image = images[0]
    space = image.values.shape[1:]
    axis = None if num_axes == 2 else _slice_axis(path, space, facts, slice_axis, is_nifti=is_nifti)
    options = facts.prepare_options
    if axis is not None:
        options = options.model_copy(update={"slices": "all", "slice_axis": axis})
    nobody = np.zeros((0, *space), dtype=np.uint8)
    scan = ScanArrays(image=joined(images), masks=nobody, raters=(), spacing_mm=image.spacing_mm)
    try:
        converted = convert_scan(scan, options=options, raters=(), num_classes=len(facts.class_names))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    assert converted is not None
    height, width = (length for number, length in enumerate(space) if number != axis)
    return InputImage(
        case=case,
        stored=converted.images,
        size=(height, width),
        space=space,
        slice_axis=axis,
        spacing_mm=image.spacing_mm if is_nifti else None,
    )


def _case_of(path: Path, facts: DatasetFacts) -> InputCase:
    """The input that a file is, or of which it is a channel."""
    num_channels = len(facts.channels)
    channel = channel_of(path) if num_channels > 1 else None
    if channel is None or channel[1] >= num_channels or _holds_all_channels(path, facts):
        return InputCase(stem_of(path), (path,))
    name, ending = channel[0], path.name[len(stem_of(path)) :]
    return InputCase(
        name, tuple(path.with_name(channel_file(name, number, ending)) for number in range(num_channels))
    )


def _holds_all_channels(path: Path, facts: DatasetFacts) -> bool:
    """Whether a file has the channels as colours, or as a last axis that does not count slices."""
    try:
        if suffix_of(path) not in NIFTI_SUFFIXES:
            return file_shape(path)[1] == len(facts.channels)
        shape = _nifti_shape(path)
    except ValueError:
        # whoever reads it says what is wrong with it
        return False
    # the third axis is that of channels only where single images had them there
    had_channels_third = facts.prepare_options.slices == "none" and facts.source != "nnunet"
    return shape[-1] == len(facts.channels) and (len(shape) > 3 or had_channels_third)


def _nifti_space(path: Path, num_channels: int) -> tuple[int, ...]:
    """Lengths of the axes of space, those of one voxel included as far as they are among the first three."""
    shape = _nifti_shape(path)
    space = shape[:-1] if num_channels > 1 else shape
    while len(space) > 3 and space[-1] == 1:
        space = space[:-1]
    return space


def _nifti_shape(path: Path) -> tuple[int, ...]:
    # names a file that cannot be read
    file_shape(path)
    header: Any = nibabel.load(path)
    return tuple(header.shape)


def _slice_axis(
    path: Path, space: tuple[int, ...], facts: DatasetFacts, asked: int | None, *, is_nifti: bool
) -> int:
    options = facts.prepare_options
    if asked is not None:
        if not 0 <= asked < len(space):
            raise ValueError(f"slice axis must be 0, 1 or 2; got {asked}")
        return asked
    if is_nifti and sum(length == 1 for length in space) == 1:
        return space.index(1)
    if not is_nifti and options.slices == "none":
        return 0
    return options.slice_axis
