"""Folders with a dataset.json, imagesTr and labelsTr: raw datasets of nnU-Net, and tasks of the Decathlon.

    TASK/dataset.json                      nnU-Net: channel_names, labels by name, file_ending;
                                           Decathlon and nnU-Net version 1: modality, labels by value
         imagesTr/CASE_0000.nii.gz         nnU-Net: one file per channel, CASE_0001.nii.gz is the second
         imagesTr/CASE.nii.gz              Decathlon: all channels in one file, as the last axis
         labelsTr/CASE.nii.gz
         ratersTr/NAME/CASE.nii.gz         optional: one folder per rater, whose masks replace labelsTr; no
                                           file: the rater did not look at the case

nnU-Net may use any file format that is read here. It has the colours of a picture together in CASE_0000.
Left out: regions and ignored voxels, because a prepared mask has one class for each voxel; files that
dataset.json lists itself; imagesTs; the JSON files next to TIFFs in which nnU-Net looks for their spacing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UserError, read_json, reading
from ..manifest import MAX_CLASSES
from .files import SUFFIXES, channel_of, read_header, stem_of
from .folder import files_by_case, layout_of, rater_folders
from .raw import ALL_CHANNELS, CaseFiles, RawDataset, is_folder, match, patient_note, visible
from .scan import read_scan

_ADVICE = (
    'nnU-Net needs channel_names {"0": "T1", ...}, labels {"background": 0, "lesion": 1, ...} and '
    'file_ending ".nii.gz"; the Decathlon labels {"0": "background", "1": ...} and modality {"0": "MRI", ...}'
)


def find_nnunet(raw: Path) -> list[RawDataset]:
    """A raw dataset of nnU-Net, or a task of the Decathlon."""
    path = _header_path(raw)
    header = read_json(path, _ADVICE)
    with reading(path, _ADVICE):
        if "channel_names" in header:
            labels, channels = dict(header["labels"]), _by_number(header["channel_names"])
            ending = str(header["file_ending"]).lower()
        else:
            of_value, channels = _by_number(header["labels"]), _by_number(header["modality"])
            labels, ending = {name: value for value, name in of_value.items()}, ".nii.gz"
    if "dataset" in header:
        raise UserError(f"{path} lists its files under dataset: put them into imagesTr and labelsTr instead")
    if ending not in SUFFIXES:
        raise UserError(
            f"{path} has file_ending {ending!r}, which cannot be read: convert the files to one of "
            f"{', '.join(SUFFIXES)}"
        )
    if not channels or list(channels) != list(range(len(channels))):
        raise UserError(f"{path} has channels {channels}: channels must count from 0")
    value_of = _classes(path, labels)
    stems = {folder: {stem_of(file) for file in visible(raw / folder)} for folder in ("imagesTr", "labelsTr")}
    is_numbered = not stems["labelsTr"] & stems["imagesTr"] and any(map(channel_of, stems["imagesTr"]))
    has_raters = is_folder(raw / "ratersTr")
    folders = rater_folders(raw / "ratersTr") if has_raters else {"reference": raw / "labelsTr"}
    cases, file_problems = files_by_case(raw / "imagesTr", folders, (ending,), is_numbered=is_numbered)
    for case in cases:
        if list(case.channels) == [0] and _holds_all(case, len(channels)):
            case.channels = {ALL_CHANNELS: case.channels[0]}
    scans, problems, _ = match(cases, num_channels=len(channels))
    # in the Decathlon, the axis after those of space may have a length of 1
    is_task = "channel_names" not in header and not is_numbered
    num_axes, _, options = layout_of(scans, num_axes=3 if is_task else None)
    note = "the masks are those of ratersTr, and labelsTr is not read" if has_raters else ""
    return [
        RawDataset(
            source="nnunet",
            root=raw,
            read=read_scan,
            class_names=tuple(value_of),
            raters=tuple(folders),
            channels=tuple(channels.values()),
            scans=scans,
            options=options,
            class_of={value: index for index, value in enumerate(value_of.values())},
            problems=(*file_problems, *problems),
            num_axes=num_axes,
            notes=tuple(filter(None, [note, patient_note(scans)])),
        )
    ]


def _header_path(raw: Path) -> Path:
    """The dataset.json of a folder that also has imagesTr and labelsTr."""
    path = raw / "dataset.json"
    if not path.exists():
        tasks = [folder for folder in visible(raw) if (folder / "dataset.json").exists()]
        hint = f"; prepare one task at a time, such as {tasks[0]}" if tasks else ""
        raise UserError(f"{raw} has no dataset.json, imagesTr and labelsTr{hint}")
    for name in ("imagesTr", "labelsTr"):
        if not is_folder(raw / name):
            raise UserError(f"{raw} has no folder {name}")
    return path


def _by_number(names: Mapping[str, Any]) -> dict[int, str]:
    return dict(sorted((int(number), str(name)) for number, name in names.items()))


def _classes(path: Path, labels: Mapping[str, Any]) -> dict[str, int]:
    """The value of each class in the masks, ascending; a UserError for a label that is not a class."""
    for name, value in labels.items():
        if isinstance(value, list):
            raise UserError(
                f"{path}: label {name!r} is a region, {value}: regions overlap, but classes must exclude "
                "each other; give each value in the masks a name of its own in labels"
            )
        if name == "ignore":
            raise UserError(
                f"{path} has label 'ignore' (value {value}), but every voxel of a prepared mask counts: give "
                "these voxels a class; or remove the label, and leave out the cases with it by --skip-bad"
            )
        if type(value) is not int or not 0 <= value < 2**16:
            raise UserError(
                f"{path} has label {name!r} with value {value!r}; use whole numbers from 0 to 65535"
            )
    values = list(labels.values())
    repeated = [value for value in values if values.count(value) > 1]
    if repeated:
        raise UserError(f"{path} has value {repeated[0]} twice in labels {dict(labels)}: give it one name")
    if 0 not in values or not 2 <= len(values) <= MAX_CLASSES:
        raise UserError(f"{path} needs label 0 and 1 to 255 more; it has {dict(labels)}")
    return dict(sorted(labels.items(), key=lambda item: item[1]))


def _holds_all(case: CaseFiles, num_channels: int) -> bool:
    """Whether the only file of a case is a picture with all channels as colours."""
    try:
        return num_channels > 1 and read_header(case.channels[0][0]).colours == num_channels
    except UserError:
        # reported when the file is read
        return False
