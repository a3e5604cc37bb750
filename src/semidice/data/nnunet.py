"""nnU-Net's raw datasets: a file for each channel of a case, and one label.

    DatasetXXX_NAME/dataset.json                  channel_names, labels, file_ending; or, as in version 1,
                                                  modality and labels by value, with .nii.gz
                    imagesTr/CASE_0000.nii.gz     the first channel, CASE_0001.nii.gz the second, ...
                    labelsTr/CASE.nii.gz

The ending may be that of any file that is read. The colours of a picture are together in CASE_0000.
Left out: regions and ignored voxels, as a prepared mask has one class for each voxel; files that dataset.json
lists itself; imagesTs; the JSON files beside TIFFs in which nnU-Net looks for their spacing.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import OTHER_IMAGES, labels_by_value, space_and_channels, task_header
from .listing import distinct_scans, is_folder, natural_order, visible
from .options import PrepareOptions
from .raw import RawDataset, RawScan
from .readers import NIFTI_SUFFIXES, SUFFIXES, file_shape, stem_of, suffix_of

_CHANNEL = re.compile(r"(.+)_(\d{4})")
_WANTED = (
    'channel_names {"0": "T1", ...}, labels {"background": 0, "lesion": 1, ...} and file_ending ".nii.gz"'
)


@dataclass(frozen=True)
class _Header:
    """What dataset.json says: the values of the classes and their names, in order. is_old: in version 1."""

    labels: dict[int, str]
    channels: tuple[str, ...]
    ending: str
    is_old: bool = False


def channel_of(path: Path) -> tuple[str, int] | None:
    """The case and the number of the channel in a file name CASE_0000, or None if it has none.

    >>> channel_of(Path("brain_001_0002.nii.gz")), channel_of(Path("brain_001.nii.gz"))
    (('brain_001', 2), None)
    """
    match = _CHANNEL.fullmatch(stem_of(path))
    return None if match is None else (match[1], int(match[2]))


def channel_file(case: str, number: int, ending: str) -> str:
    """The name of the file that holds a channel."""
    return f"{case}_{number:04d}{ending}"


def find_nnunet(raw: Path) -> list[RawDataset]:
    """A raw dataset of nnU-Net, see the module; its masks are of one rater."""
    path = task_header(raw)
    header = _read_header(path)
    images, labels = raw / "imagesTr", raw / "labelsTr"
    pictures, problems = _files(images, header.ending)
    masks, wrong = _files(labels, header.ending)
    if header.is_old and masks and masks.keys() <= pictures.keys():
        case = next(iter(masks))
        raise ValueError(
            f"{raw} is a task of the Decathlon, with {pictures[case].name} for all channels instead of "
            f"{channel_file(case, 0, header.ending)} for the first: use source decathlon"
        )
    matched, unmatched = _matched(pictures, masks, header, images, labels)
    scans, same = distinct_scans(matched)
    num_axes, _ = space_and_channels(scans)
    options = PrepareOptions()
    if num_axes == 3:
        slice_axis = 2 if header.ending in NIFTI_SUFFIXES else 0
        options = PrepareOptions(slices="all", slice_axis=slice_axis)
    return [
        RawDataset(
            name="",
            source="nnunet",
            root=raw,
            class_names=tuple(header.labels.values()),
            raters=("reference",),
            channels=header.channels,
            scans=scans,
            options=options,
            class_of_value={value: index for index, value in enumerate(header.labels)},
            problems=(*problems, *wrong, *unmatched, *same),
            num_axes=num_axes,
        )
    ]


def _read_header(path: Path) -> _Header:
    try:
        header = json.loads(path.read_bytes())
        if "channel_names" not in header and "modality" in header:
            return _Header(*labels_by_value(path), ending=".nii.gz", is_old=True)
        labels, channels = dict(header["labels"]), _numbered(header["channel_names"])
        ending = str(header["file_ending"]).lower()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error!r}; it needs {_WANTED}") from error
    if "dataset" in header:
        raise ValueError(f"{path} lists its files under dataset: put them into imagesTr and labelsTr instead")
    if ending not in SUFFIXES:
        raise ValueError(
            f"{path} has file_ending {ending!r}, which is not read: convert the files to one of "
            f"{', '.join(SUFFIXES)}"
        )
    if not channels or sorted(channels) != list(range(len(channels))):
        raise ValueError(f"{path} has channel_names {header['channel_names']}: channels are counted from 0")
    return _Header(_classes(path, labels), tuple(channels[number] for number in sorted(channels)), ending)


def _numbered(names: Mapping[str, Any]) -> dict[int, str]:
    return {int(number): str(name) for number, name in names.items()}


def _classes(path: Path, labels: Mapping[str, Any]) -> dict[int, str]:
    """Names of the classes by value, ascending; a ValueError for what is no class of its own."""
    for name, value in labels.items():
        if isinstance(value, list):
            raise ValueError(
                f"{path}: label {name!r} is a region, {value}: regions overlap, but classes exclude each "
                "other; give each value in the masks a name of its own in labels"
            )
        if name == "ignore":
            raise ValueError(
                f"{path} has label 'ignore' (value {value}): every voxel of a prepared mask counts; give "
                "these voxels a class, or take the label out, and --skip-bad leaves out the cases with it"
            )
        if type(value) is not int or not 0 <= value < 2**16:
            raise ValueError(
                f"{path} cannot be read: label {name!r} has value {value!r}; whole numbers from 0 to 65535 "
                "are expected"
            )
    values = list(labels.values())
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(f"{path} has value {twice[0]} twice in labels {dict(labels)}: give it one name")
    if 0 not in values or not 2 <= len(values) <= 256:
        raise ValueError(f"{path} needs label 0 and 1 to 255 more; it has {dict(labels)}")
    return {value: name for name, value in sorted(labels.items(), key=lambda item: item[1])}


def _files(folder: Path, ending: str) -> tuple[dict[str, Path], list[str]]:
    """Files with the ending by the name before it, and what is wrong with other images."""
    files: dict[str, Path] = {}
    problems = []
    for path in visible(folder):
        if is_folder(path):
            problems.append(f"{path} is a folder: put its files into {folder} itself")
        elif suffix_of(path) == ending:
            name = unicodedata.normalize("NFC", stem_of(path))
            if files.setdefault(name, path) != path:
                problems.append(f"{files[name]} and {path} have one name: keep one")
        elif suffix_of(path) or path.suffix.lower() in OTHER_IMAGES:
            problems.append(
                f"{path} is not read: dataset.json has file_ending {ending!r}; convert or remove it"
            )
    return files, problems


def _matched(
    pictures: Mapping[str, Path], masks: Mapping[str, Path], header: _Header, images: Path, labels: Path
) -> tuple[list[RawScan], list[str]]:
    """A scan for each case that is whole, and what is wrong with the others."""
    num_channels, ending = len(header.channels), header.ending
    channels_of: dict[str, dict[int, Path]] = {}
    problems = []
    for name, path in pictures.items():
        match = _CHANNEL.fullmatch(name)
        if match is None:
            problems.append(f"image {path} has no channel in its name: {channel_file('CASE', 0, ending)}")
        else:
            channels_of.setdefault(match[1], {})[int(match[2])] = path
    scans = []
    for case in sorted(channels_of.keys() | masks.keys(), key=natural_order):
        files = channels_of.get(case, {})
        beyond = [path for number, path in files.items() if number >= num_channels]
        missing = [number for number in range(num_channels) if number not in files]
        if not files:
            problems.append(f"label {masks[case]} has no image {images / channel_file(case, 0, ending)}")
        elif beyond:
            last = f"{num_channels - 1:04d}"
            problems.append(f"image {beyond[0]} is one too many: dataset.json has channels 0000 to {last}")
        elif missing and not (list(files) == [0] and _is_coloured(files[0], num_channels)):
            file, channel = images / channel_file(case, missing[0], ending), header.channels[missing[0]]
            problems.append(f"case {case!r} has no {file} ({channel}): add it, or remove the case")
        elif case not in masks:
            label = labels / f"{case}{ending}"
            problems.append(f"image {files[0]} has no label {label}: add it, or remove the image")
        else:
            image = tuple(files[number] for number in sorted(files))
            scans.append(RawScan(case, case, image, {"reference": masks[case]}))
    return scans, problems


def _is_coloured(path: Path, num_channels: int) -> bool:
    """Whether a picture holds all channels as colours."""
    try:
        return file_shape(path)[1] == num_channels
    except ValueError:
        # whoever reads it says what is wrong with it; here it is at least not known to be whole
        return False
