"""Folders with a dataset.json, imagesTr and labelsTr: raw datasets of nnU-Net, and tasks of the Decathlon.

    TASK/dataset.json                      nnU-Net: channel_names, labels by name, file_ending;
                                           Decathlon and nnU-Net version 1: modality, labels by value
         imagesTr/CASE_0000.nii.gz         nnU-Net: one file per channel, CASE_0001.nii.gz is the second
         imagesTr/CASE.nii.gz              Decathlon: all channels in one file, as the last axis
         labelsTr/CASE.nii.gz

nnU-Net may use any file format that is read here. It has the colours of a picture together in CASE_0000.
Left out: regions and ignored voxels, because a prepared mask has one class for each voxel; files that
dataset.json lists itself; imagesTs; the JSON files next to TIFFs in which nnU-Net looks for their spacing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...limits import read_json
from .folders import files_by_name, matched_scans, slicing_options, space_and_channels
from .raw import RawDataset, RawScan, distinct_scans, is_folder, natural_order, visible
from .readers import NIFTI_SUFFIXES, SUFFIXES, channel_file, channel_of, file_shape

_DECATHLON_ENTRIES = 'labels {"0": "background", "1": ...} and modality {"0": "MRI", ...}'
_NNUNET_ENTRIES = (
    'channel_names {"0": "T1", ...}, labels {"background": 0, "lesion": 1, ...} and file_ending ".nii.gz"'
)


@dataclass(frozen=True)
class _Header:
    """The content of dataset.json: class names by value, ascending, names of the channels, file suffix."""

    labels: dict[int, str]
    channels: tuple[str, ...]
    ending: str = ".nii.gz"
    is_version_1: bool = False


def find_decathlon(raw: Path) -> list[RawDataset]:
    """A task of the Medical Segmentation Decathlon."""
    header = _read_decathlon(_header_path(raw))
    matched, problems = matched_scans(raw / "imagesTr", {"reference": raw / "labelsTr"})
    return [_dataset("decathlon", raw, header, matched, problems, num_axes=3)]


def find_nnunet(raw: Path) -> list[RawDataset]:
    """A raw dataset of nnU-Net."""
    header = _read_nnunet(_header_path(raw))
    images, image_problems = files_by_name(raw / "imagesTr", [header.ending])
    labels, label_problems = files_by_name(raw / "labelsTr", [header.ending])
    if header.is_version_1 and labels and labels.keys() <= images.keys():
        case = next(iter(labels))
        raise ValueError(
            f"{raw} is a task of the Decathlon: it has {images[case][0].name} for all channels, not "
            f"{channel_file(case, 0, header.ending)} for the first; use source decathlon"
        )
    matched, problems = _matched(raw, images, labels, header)
    return [_dataset("nnunet", raw, header, matched, image_problems + label_problems + problems)]


def _dataset(
    source: str,
    raw: Path,
    header: _Header,
    matched: list[RawScan],
    matching_problems: list[str],
    *,
    num_axes: int | None = None,
) -> RawDataset:
    """The dataset of these scans; num_axes: None takes the number of axes of the files."""
    scans, problems = distinct_scans(matched, matching_problems)
    if num_axes is None:
        num_axes, _ = space_and_channels(scans)
    return RawDataset(
        source=source,
        root=raw,
        class_names=tuple(header.labels.values()),
        channels=header.channels,
        scans=scans,
        options=slicing_options(num_axes, is_nifti=header.ending in NIFTI_SUFFIXES),
        class_of_value={value: index for index, value in enumerate(header.labels)},
        problems=problems,
        num_axes=num_axes,
    )


def _header_path(raw: Path) -> Path:
    """The dataset.json of a folder that also has imagesTr and labelsTr."""
    path = raw / "dataset.json"
    if not path.exists():
        tasks = [folder for folder in visible(raw) if (folder / "dataset.json").exists()]
        hint = f"; prepare one task at a time, such as {tasks[0]}" if tasks else ""
        raise ValueError(f"{raw} has no dataset.json, imagesTr and labelsTr{hint}")
    for name in ("imagesTr", "labelsTr"):
        if not is_folder(raw / name):
            raise ValueError(f"{raw} has no folder {name}")
    return path


def _read_decathlon(path: Path) -> _Header:
    header = None
    try:
        header = read_json(path)
        labels, channels = _by_number(header["labels"]), _by_number(header["modality"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(header, dict) and "channel_names" in header:
            raise ValueError(f"{path} is a dataset of nnU-Net: use source nnunet") from error
        raise ValueError(f"{path} cannot be read: {error!r}; it needs {_DECATHLON_ENTRIES}") from error
    if 0 not in labels or len(labels) < 2 or not channels:
        raise ValueError(f"{path} needs label 0 and one more, and a modality; it has {labels} and {channels}")
    return _Header(labels, tuple(channels.values()))


def _read_nnunet(path: Path) -> _Header:
    try:
        header = read_json(path)
        is_version_1 = "channel_names" not in header and "modality" in header
        if not is_version_1:
            labels, channels = dict(header["labels"]), _by_number(header["channel_names"])
            ending = str(header["file_ending"]).lower()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; it needs {_NNUNET_ENTRIES}") from error
    if is_version_1:
        return replace(_read_decathlon(path), is_version_1=True)
    if "dataset" in header:
        raise ValueError(f"{path} lists its files under dataset: put them into imagesTr and labelsTr instead")
    if ending not in SUFFIXES:
        raise ValueError(
            f"{path} has file_ending {ending!r}, which cannot be read: convert the files to one of "
            f"{', '.join(SUFFIXES)}"
        )
    if not channels or list(channels) != list(range(len(channels))):
        raise ValueError(f"{path} has channel_names {header['channel_names']}: channels must count from 0")
    return _Header(_classes(path, labels), tuple(channels.values()), ending)


def _by_number(names: Mapping[str, Any]) -> dict[int, str]:
    return dict(sorted((int(number), str(name)) for number, name in names.items()))


def _classes(path: Path, labels: Mapping[str, Any]) -> dict[int, str]:
    """Class names by value, ascending; a ValueError for a label that is not a class."""
    for name, value in labels.items():
        if isinstance(value, list):
            raise ValueError(
                f"{path}: label {name!r} is a region, {value}: regions overlap, but classes must exclude "
                "each other; give each value in the masks a name of its own in labels"
            )
        if name == "ignore":
            raise ValueError(
                f"{path} has label 'ignore' (value {value}), but every voxel of a prepared mask counts: give "
                "these voxels a class; or remove the label, and leave out the cases with it by --skip-bad"
            )
        if type(value) is not int or not 0 <= value < 2**16:
            raise ValueError(
                f"{path} cannot be read: label {name!r} has value {value!r}; use whole numbers from 0 to "
                "65535"
            )
    values = list(labels.values())
    repeated = [value for value in values if values.count(value) > 1]
    if repeated:
        raise ValueError(f"{path} has value {repeated[0]} twice in labels {dict(labels)}: give it one name")
    if 0 not in values or not 2 <= len(values) <= 256:
        raise ValueError(f"{path} needs label 0 and 1 to 255 more; it has {dict(labels)}")
    return {value: name for name, value in sorted(labels.items(), key=lambda item: item[1])}


def _matched(
    raw: Path, images: Mapping[str, list[Path]], labels: Mapping[str, list[Path]], header: _Header
) -> tuple[list[RawScan], list[str]]:
    """One scan for each complete case, and the problems of the others."""
    num_channels, ending = len(header.channels), header.ending
    problems = [
        f"{' and '.join(map(str, paths))} have one name: keep one"
        for paths in (*images.values(), *labels.values())
        if len(paths) > 1
    ]
    channels_of: dict[str, dict[int, Path]] = {}
    for name, paths in images.items():
        case_and_number = channel_of(name)
        if case_and_number is None:
            problems.append(
                f"image {paths[0]} has no channel in its name: rename it to {channel_file('CASE', 0, ending)}"
            )
        else:
            case, number = case_and_number
            channels_of.setdefault(case, {})[number] = paths[0]
    scans = []
    for case in sorted(channels_of.keys() | labels.keys(), key=natural_order):
        files = channels_of.get(case, {})
        surplus = [path for number, path in files.items() if number >= num_channels]
        missing = [number for number in range(num_channels) if number not in files]
        if not files:
            first = raw / "imagesTr" / channel_file(case, 0, ending)
            problems.append(f"label {labels[case][0]} has no image {first}: add it, or remove the label")
        elif surplus:
            last = f"{num_channels - 1:04d}"
            problems.append(f"image {surplus[0]} is too many: dataset.json has channels 0000 to {last}")
        elif missing and not (list(files) == [0] and _is_coloured(files[0], num_channels)):
            file = raw / "imagesTr" / channel_file(case, missing[0], ending)
            channel = header.channels[missing[0]]
            problems.append(f"case {case!r} has no {file} ({channel}): add it, or remove the case")
        elif case not in labels:
            label = raw / "labelsTr" / f"{case}{ending}"
            problems.append(f"image {files[0]} has no label {label}: add it, or remove the image")
        else:
            image = tuple(files[number] for number in sorted(files))
            scans.append(RawScan(case, case, image, {"reference": labels[case][0]}))
    return scans, problems


def _is_coloured(path: Path, num_channels: int) -> bool:
    """Whether a picture holds all channels as colours."""
    try:
        return file_shape(path)[1] == num_channels
    except ValueError:
        # reported when the file is read
        return False
