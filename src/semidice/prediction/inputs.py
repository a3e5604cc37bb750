"""Files to predict: found, read, and prepared like the dataset of the run.

Intensities follow `data.intensities` with the options of that dataset, rounding included, so that a network
gets the same values as in training. A volume is cut into slices along the dataset's slice axis, even if the
dataset holds whole volumes; its intensities are scaled over the whole volume. If one axis of a NIfTI has
length 1, it is the slice axis. The slices of a TIFF are its pages, unless the dataset was cut along another
axis. An input whose axes lead elsewhere than those of the training is refused, unless a slice axis is named.
If the dataset has several channels, files CASE_0000, CASE_0001, ... with one channel each are one input, as
in nnU-Net. A folder without such files is searched for DICOM series; a DICOM file selects its series in its
folder. Not supported: channels in files with other names, several channels in DICOM.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..data.convert import convert_image
from ..data.geometry import Grid
from ..data.intensities import MeanStd, Normaliser
from ..data.sources.dicom import find_files
from ..data.sources.dicom_files import is_dicom, read_series
from ..data.sources.files import (
    NIFTI_SUFFIXES,
    SUFFIXES,
    FileHeader,
    ImageFile,
    channel_file,
    channel_of,
    read_header,
    stem_of,
    suffix_of,
)
from ..data.sources.raw import natural_order, walk
from ..data.sources.scan import read_channels
from ..errors import UserError
from ..extras import need
from ..paths import check_text
from ..runs.run import DatasetFacts


@dataclass(frozen=True)
class InputCase:
    """One input: the name of its results, and its file, or one file for each channel.

    modality: of a DICOM series, whose files are slices; "" for other inputs.
    """

    name: str
    files: tuple[Path, ...]
    modality: str = ""

    @property
    def path(self) -> Path:
        """The file that gives the results their grid and format."""
        return self.files[0]


@dataclass(frozen=True)
class InputImage:
    """One input as slices for a network, and the position of the slices in its file.

    stored: (S, channels, *space), like the arrays of a prepared dataset. grid: of the file.
    slice_axis: the axis of the file that counts slices; None if the file is a single image for the network.
    """

    case: InputCase
    stored: np.ndarray
    grid: Grid
    slice_axis: int | None

    @property
    def space(self) -> tuple[int, ...]:
        """Lengths of the axes of a slice in the file."""
        return tuple(side for axis, side in enumerate(self.grid.shape) if axis != self.slice_axis)

    def normalised(self, slices: slice, mean_std: MeanStd) -> Float32[Tensor, "S channels *space"]:
        """Some of the slices, normalised like training images, to the bit."""
        normalised = Normaliser(mean_std, self.stored.dtype, self.stored.ndim - 2, "cpu")
        return normalised(torch.from_numpy(self.stored[slices]))

    def on_file_grid(self, prob: Float32[np.ndarray, "S C *slice"]) -> Float32[np.ndarray, "C *space"]:
        """The slices, stacked along their axis in the file."""
        if self.slice_axis is None:
            image: np.ndarray = prob[0]
            return image
        # the class axis first, then the slice axis at its position in the file
        return np.ascontiguousarray(np.moveaxis(prob.swapaxes(0, 1), 1, 1 + self.slice_axis))


def find_inputs(inputs: Sequence[Path], out: Path, facts: DatasetFacts) -> list[InputCase]:
    """The inputs, files of a folder sorted by name; a UserError names a missing or ambiguous one.

    A file with one channel of several also selects the files of the other channels; they may be missing.
    """
    cases: list[InputCase] = []
    for path in inputs:
        if path.is_dir():
            if path.resolve() == out.resolve():
                raise UserError(f"{out} is both input and output: choose another folder with -o")
            cases += _cases_in(path, facts)
        elif not path.exists():
            raise UserError(f"there is no file or folder {path}: check the path")
        elif not suffix_of(path) and is_dicom(path):
            cases += _dicom_cases(path.parent, containing=path)
        elif not suffix_of(path) or not stem_of(path):
            raise UserError(
                f"{path} has an unknown format or no name: inputs are DICOM, or files with a name and "
                f"{', '.join(SUFFIXES)}"
            )
        else:
            cases.append(_case_of(path, facts))
    cases = list(dict.fromkeys(cases))
    for case in cases:
        check_text(case.path)
    if not cases:
        raise UserError("there is nothing to predict: name files, or folders with files")
    # results are named after their input, and some disks ignore the case of letters
    count = Counter(case.name.casefold() for case in cases)
    ambiguous = [str(case.path) for case in cases if count[case.name.casefold()] > 1]
    if ambiguous:
        raise UserError(
            f"these inputs have the same name, so their results would overwrite each other: "
            f"{', '.join(ambiguous[:4])}; predict them into different folders"
        )
    return cases


def _cases_in(folder: Path, facts: DatasetFacts) -> list[InputCase]:
    """The inputs in a folder: its NIfTI files and pictures, or the DICOM series below it."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    images = [file for file in files if suffix_of(file)]
    if not images:
        return _dicom_cases(folder)
    for file in files:
        is_slice = False
        # other files are ignored, even those that cannot be read
        with suppress(UserError):
            is_slice = not suffix_of(file) and is_dicom(file)
        if is_slice:
            raise UserError(
                f"{folder} has both DICOM files and {images[0].name}: put them into different folders"
            )
    return [_case_of(file, facts) for file in images]


def _dicom_cases(folder: Path, *, containing: Path | None = None) -> list[InputCase]:
    """The DICOM series below a folder, or the one with a file; a UserError if there is none."""
    if not any(is_dicom(file) for _, files in walk(folder) for file in files):
        raise UserError(
            f"{folder} has no file to predict: it needs DICOM, or files with {', '.join(SUFFIXES)}"
        )
    need("pydicom", "DICOM input")
    need("highdicom", "DICOM output")
    found = find_files(folder)
    if found.problems:
        # it may be a slice of a series
        raise UserError(f"{found.problems[0]}; or remove it ({len(found.problems)} such problems)")
    cases = [
        InputCase(series.name, series.files, series.modality)
        for series in sorted(found.series.values(), key=lambda series: natural_order(series.name))
        if containing is None or containing in series.files
    ]
    if not cases:
        raise UserError(f"{containing or folder} has no DICOM image to predict: only CT and MR can be")
    return cases


def _case_of(path: Path, facts: DatasetFacts) -> InputCase:
    """The input that a file belongs to: it is the whole input, or one channel of it."""
    num_channels = len(facts.channels)
    channel = channel_of(stem_of(path)) if num_channels > 1 else None
    if channel is None or channel[1] >= num_channels or _holds_all_channels(path, facts):
        return InputCase(stem_of(path), (path,))
    name, ending = channel[0], path.name[len(stem_of(path)) :]
    return InputCase(
        name, tuple(path.with_name(channel_file(name, number, ending)) for number in range(num_channels))
    )


def _holds_all_channels(path: Path, facts: DatasetFacts) -> bool:
    """Whether a file has all channels: as colours, or along a last axis that does not count slices."""
    try:
        header = read_header(path)
    except UserError:
        # `read_input` reports what is wrong with the file
        return False
    if not header.is_nifti:
        return header.colours == len(facts.channels)
    # the third axis holds channels only if the dataset has single images with channels on that axis
    has_channels_third = facts.options.slices == "none" and facts.source != "nnunet"
    return header.shape[-1] == len(facts.channels) and (len(header.shape) > 3 or has_channels_third)


def read_input(case: InputCase, facts: DatasetFacts, *, slice_axis: int | None = None) -> InputImage:
    """The prepared input; a UserError names the file. slice_axis: of a volume; None takes the dataset's."""
    image = _read_dicom(case, facts) if case.modality else _read_files(case, facts)
    known = {orientation for orientation in facts.orientations if orientation != "?"}
    if slice_axis is None and known and image.orientation not in {*known, "?"}:
        raise UserError(
            f"{case.path}: its axes lead to {image.orientation or 'nowhere (it is a picture)'}, but those of "
            f"the training to {', '.join(sorted(known)) or 'nowhere (pictures)'}: save it like the images "
            "of the training; or, if its rows and columns are like theirs, name the axis of its slices with "
            "--slice-axis"
        )
    axis, options, slices = _slice_axis(case, image, facts, slice_axis), facts.options, None
    if axis is not None:
        options = options.model_copy(update={"slice_axis": axis})
        slices = tuple(range(image.grid.shape[axis]))
    try:
        stored, _ = convert_image(image.values, options, slices=slices)
    except UserError as error:
        raise UserError(f"{case.path}: {error}") from error
    return InputImage(case, stored, image.grid, axis)


def _read_files(case: InputCase, facts: DatasetFacts) -> ImageFile:
    for file, channel in zip(case.files, facts.channels, strict=False):
        if len(case.files) > 1 and not file.exists():
            raise UserError(
                f"case {case.name!r} has no file {file} for channel {channel}: add the file, or put all "
                "channels into one file"
            )
    header, num_channels = read_header(case.path), len(facts.channels)
    space = _space(header, num_channels if len(case.files) == 1 else 1) if header.is_nifti else header.space
    if len(space) > 3:
        raise UserError(
            f"{case.path} has shape {header.shape}; expected a volume with {num_channels} channels: save "
            "each time point as a file of its own"
        )
    remedy = "" if facts.options.ignore_placement else "copy the header of the first"
    num_axes = max(2, len(space))
    return read_channels(case.files, num_axes=num_axes, num_channels=num_channels, remedy=remedy)


def _space(header: FileHeader, num_channels: int) -> tuple[int, ...]:
    """Lengths of the axes of space; an axis of one voxel is left out if it comes after the third."""
    space = header.shape[:-1] if num_channels > 1 else header.shape
    while len(space) > 3 and space[-1] == 1:
        space = space[:-1]
    return space


def _read_dicom(case: InputCase, facts: DatasetFacts) -> ImageFile:
    if len(facts.channels) > 1:
        raise UserError(
            f"{case.path}: a DICOM series has one channel, but the run has {len(facts.channels)}: convert "
            "the series to NIfTI files CASE_0000, CASE_0001, ..."
        )
    if facts.source == "dicom" and facts.channels != (case.modality,):
        raise UserError(f"{case.path} is {case.modality}, but the run was trained on {facts.channels[0]}")
    return read_series(case.files)


def _slice_axis(case: InputCase, image: ImageFile, facts: DatasetFacts, chosen: int | None) -> int | None:
    """The axis that counts slices; None if the file has as many axes as the network."""
    space = image.grid.shape
    if len(space) == facts.num_axes:
        return None
    if chosen is not None:
        return chosen
    is_nifti = bool(case.modality) or suffix_of(case.path) in NIFTI_SUFFIXES
    if is_nifti and sum(length == 1 for length in space) == 1:
        return space.index(1)
    if not is_nifti and facts.options.slices == "none":
        return 0
    return facts.options.slice_axis
