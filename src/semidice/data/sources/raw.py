"""Raw scans: their records, how files are matched to cases, listing of folders, and names.

Every source lists its files as `CaseFiles`, and `match` makes scans of them. It collects the problem of each
case that is incomplete, so that one command reports all of them.
"""

import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from ...errors import UserError, reading
from ...paths import check_name, check_text
from ..geometry import Grid
from ..manifest import PrepareOptions

# the key of a file that holds all channels
ALL_CHANNELS = -1
# of one file: a CT of 512 x 512 x 4096
_MAX_VALUES = 2**30
_NUMBERED = re.compile(r"(.*?)[ _-]*[a-z]*[ _-]*\d+", re.IGNORECASE)


class Content(NamedTuple):
    """The content of one file, with its axes and dtype; colours are the last axis.

    sides_mm: along each axis, 0 for an axis without one; None for a picture. affine: the one that nibabel
    uses, in the unit of the file. affines_mm: those that the header sets, the one that nibabel uses first.
    """

    values: np.ndarray
    has_colours: bool = False
    sides_mm: tuple[float, ...] | None = None
    affine: np.ndarray | None = None
    affines_mm: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class RawScan:
    """One image and its raters' masks, not read yet.

    image: one file, or one file per channel. masks: the file of each rater who looked at the scan.
    """

    name: str
    patient: str
    image: tuple[Path, ...]
    masks: Mapping[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.image, *self.masks.values())


@dataclass(frozen=True, eq=False)
class ScanArrays:
    """A scan that was read: raw intensities, and one class map for each of `raters`.

    image: uint8 if the files hold uint8, else float32; `space` has two axes, or three for a volume.
    affine: 4 x 4 of the whole file, if the format has one. orientation: see `files.ImageFile`.
    truth: the true probability, if it is known.
    inputs: SHA-256 of each file, by its path in the raw folder.
    """

    image: UInt8[np.ndarray, "channels *space"] | Float32[np.ndarray, "channels *space"]
    masks: UInt8[np.ndarray, "R *space"]
    raters: tuple[str, ...]
    grid: Grid
    affine: np.ndarray | None = None
    orientation: str = ""
    truth: Float32[np.ndarray, "C *space"] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RawDataset:
    """Scans that become one prepared dataset.

    name: of its folder below the output folder; "" for the output folder itself.
    read: reads one scan; a UserError names the file that is wrong.
    class_of: the class of each value in the mask files, or of each label of a segment; others are errors.
    None: every value above 0 is class 1.
    problems: one message for each scan that was found but cannot be used; `prepare` reports them.
    num_unlabelled: scans without a mask; some public datasets have them.
    num_axes: number of spatial axes, 2 or 3. made_with: options of scans that are made and not read.
    notes: for the user.
    """

    name: str = ""
    source: str
    root: Path
    read: Callable[["RawDataset", RawScan], ScanArrays]
    class_names: tuple[str, ...]
    raters: tuple[str, ...] = ("reference",)
    channels: tuple[str, ...]
    scans: tuple[RawScan, ...]
    options: PrepareOptions = field(default_factory=PrepareOptions)
    class_of: Mapping[Any, int] | None = None
    problems: tuple[str, ...] = ()
    num_unlabelled: int = 0
    num_axes: int = 2
    made_with: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def relative(self, path: Path) -> str:
        """The path of a file in the raw folder."""
        return path.relative_to(self.root).as_posix()


@dataclass
class CaseFiles:
    """The files of one case as they were found: of each channel and of each rater, maybe several.

    channels: by number, or with the key ALL_CHANNELS for a file that holds all of them.
    image_at, mask_at: where a missing file is looked for, as messages say it. may_lack_mask: then it is
    counted, and is no problem.
    """

    name: str
    patient: str
    image_at: str
    mask_at: str
    channels: dict[int, list[Path]] = field(default_factory=dict)
    masks: dict[str, list[Path]] = field(default_factory=dict)
    may_lack_mask: bool = False


def match(
    cases: Iterable[CaseFiles], *, num_channels: int | None = None
) -> tuple[tuple[RawScan, ...], tuple[str, ...], int]:
    """The scans of complete cases in natural order, the problems of the others, and the number without masks.

    num_channels: of the files of a case; None takes what most cases have.
    """
    cases = list(cases)
    if num_channels is None:
        num_channels = usual_number([len(case.channels) for case in cases])
    by_name: dict[str, list[RawScan]] = {}
    problems, num_unlabelled = [], 0
    for case in sorted(cases, key=lambda case: natural_order(case.name)):
        problem = _problem(case, num_channels)
        if not problem and not case.masks:
            if case.may_lack_mask:
                num_unlabelled += 1
                continue
            first = next(iter(case.channels.values()))[0]
            problem = f"image {first} has no mask {case.mask_at}: add it, or remove the image"
        if problem:
            problems.append(problem)
            continue
        image = tuple(case.channels[number][0] for number in sorted(case.channels))
        masks = {rater: paths[0] for rater, paths in case.masks.items()}
        scan = RawScan(safe_name(case.name), case.patient, image, masks)
        # some file systems do not distinguish a from A, and would keep only one of the files
        by_name.setdefault(scan.name.casefold(), []).append(scan)
    for same in by_name.values():
        if len(same) > 1:
            files = ", ".join(str(scan.image[0]) for scan in same)
            problems.append(
                f"{len(same)} images would be case {same[0].name!r}: {files}; rename or remove all but one"
            )
    scans = (scan for same in by_name.values() if len(same) == 1 for scan in same)
    return tuple(sorted(scans, key=lambda scan: natural_order(scan.name))), tuple(problems), num_unlabelled


def _problem(case: CaseFiles, num_channels: int) -> str:
    """Why the files of a case are not one image of all channels and one mask per rater; "" if they are."""
    repeated = [paths for paths in (*case.channels.values(), *case.masks.values()) if len(paths) > 1]
    if ALL_CHANNELS in case.channels and len(case.channels) > 1:
        repeated.append([paths[0] for paths in case.channels.values()])
    if repeated:
        return f"case {case.name!r} has two files, {' and '.join(map(str, repeated[0]))}: keep one"
    if not case.channels and case.masks:
        mask = next(iter(case.masks.values()))[0]
        return f"mask {mask} has no image {case.image_at}: add it, or remove the mask"
    expected = set(range(num_channels))
    if case.channels and ALL_CHANNELS not in case.channels and set(case.channels) != expected:
        files = ", ".join(str(paths[0]) for paths in case.channels.values())
        missing = ", ".join(f"{number:04d}" for number in sorted(expected - case.channels.keys()))
        return (
            f"case {case.name!r} has {files}, but {num_channels} channel files are expected"
            + (f", {missing} is missing" if missing else "")
            + ": add or remove files"
        )
    return ""


def usual_number(numbers: Sequence[int]) -> int:
    """The most frequent number; the largest of several; 0 if there is none."""
    return max(numbers, key=lambda number: (numbers.count(number), number), default=0)


def check_size(shape: Sequence[int]) -> None:
    """A ValueError if an array of this shape has too many values, before memory is reserved for it."""
    num_values = math.prod(map(int, shape))
    if num_values > _MAX_VALUES:
        axes = " x ".join(str(int(length)) for length in shape)
        raise ValueError(f"it declares {axes} = {num_values} values; at most {_MAX_VALUES} are read")


def natural_order(name: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """A key for sorting that compares numbers by value, so that case10 comes after case9.

    >>> sorted(["case10", "case9", "case09"], key=natural_order)
    ['case09', 'case9', 'case10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts), name


def visible(folder: Path) -> list[Path]:
    """Paths in a folder, in natural order, without hidden ones: macOS writes files such as ._case1.png."""
    with reading(folder):
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    for name in names:
        check_text(folder / name)
    return [folder / name for name in sorted(names, key=natural_order)]


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, or a link to one; a UserError without the permission to look."""
    with reading(path):
        return path.is_dir()


def walk(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """`root`, each folder below it, and their files, in natural order and without hidden ones.

    Links are followed. Each folder comes once, even if several links lead to it or links form a loop.
    """
    seen = set()
    pending = [root]
    while pending:
        folder = pending.pop()
        entries = visible(folder)
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders = [entry for entry in entries if is_folder(entry)]
        yield folder, [entry for entry in entries if entry not in folders]
        # links last: a folder gets its own path rather than that of a link to it
        folders.sort(key=lambda entry: entry.is_symlink())
        pending.extend(reversed(folders))


def safe_name(name: str) -> str:
    """A name that is safe as a file name: accents are dropped, other characters replaced by _.

    >>> safe_name("Müller: 2.Scan")
    'Muller_ 2.Scan'
    """
    plain = "".join(char for char in unicodedata.normalize("NFKD", name) if not unicodedata.combining(char))
    plain = re.sub(r"[^A-Za-z0-9_.+=,@ -]", "_", plain).lstrip(". ")
    return check_name(plain[:150].rstrip() or "_")


def check_spellings(names: Iterable[str], what: str) -> None:
    """A UserError if two of the names are spellings of one: upper and lower case, Unicode, 1, 01 and 1.0.

    >>> check_spellings(["Liver", "tumour", "liver"], "classes")
    Traceback (most recent call last):
    semidice.errors.UserError: classes 'Liver' and 'liver' differ only in their spelling: write one of them
    """
    spellings: dict[str, str] = {}
    for name in names:
        plain = unicodedata.normalize("NFKC", name).casefold().strip()
        number = re.fullmatch(r"0*(\d+)(\.0+)?", plain)
        other = spellings.setdefault(number[1] if number else plain, name)
        if other != name:
            raise UserError(f"{what} {other!r} and {name!r} differ only in their spelling: write one of them")


def patient_note(scans: Sequence[RawScan]) -> str:
    """A hint if names look like several scans of each patient, but each scan counts as a patient; or "".

    >>> scan = lambda name: RawScan(name, name, (), {})
    >>> bool(patient_note([scan(f"patient{n}_slice{m}") for n in range(2) for m in range(2)]))
    True
    >>> patient_note([scan(f"scan_{n}") for n in range(4)])
    ''
    """
    starts = [found[1] for scan in scans if (found := _NUMBERED.fullmatch(scan.name)) and found[1]]
    repeated = [start for start, number in Counter(starts).items() if number > 1]
    if len(repeated) < 2 or any(scan.patient != scan.name for scan in scans):
        return ""
    return (
        f"warning: each case counts as a patient of its own, but names such as {scans[0].name} and "
        f"{scans[1].name} look like several of one patient, who would then be in several folds: write "
        "cases.csv with columns case and patient"
    )
