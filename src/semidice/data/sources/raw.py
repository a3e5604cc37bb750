"""Raw scans that are not read yet: their records, listing of folders in natural order, and safe names."""

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...paths import check_name
from ..manifest import PrepareOptions
from ..phantom import PhantomOptions


@dataclass(frozen=True)
class RawScan:
    """One image and its raters' masks, not read yet.

    image: one file, or one file per channel.
    masks: the file of each rater who looked at the scan.
    number: the case number of a phantom, which has no files.
    """

    name: str
    patient: str
    image: tuple[Path, ...]
    masks: Mapping[str, Path]
    number: int = -1


@dataclass(frozen=True, kw_only=True)
class RawDataset:
    """Scans that become one prepared dataset.

    name: of its folder below the output folder; "" for the output folder itself.
    class_of_value: the class of each value in the mask files; other values are errors. None: every value
    above 0 is class 1.
    problems: one message for each scan that was found but cannot be used; `prepare` reports them.
    num_skipped: scans without a mask; some public datasets have them.
    num_axes: number of spatial axes, 2 or 3. phantom: how to make the scans, if they are not read from files.
    """

    name: str = ""
    source: str
    root: Path
    class_names: tuple[str, ...]
    raters: tuple[str, ...] = ("reference",)
    channels: tuple[str, ...]
    scans: tuple[RawScan, ...]
    options: PrepareOptions = field(default_factory=PrepareOptions)
    class_of_value: Mapping[int, int] | None = None
    problems: tuple[str, ...] = ()
    num_skipped: int = 0
    num_axes: int = 2
    phantom: PhantomOptions | None = None
    class_of_label: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()


def natural_order(name: str) -> tuple[tuple[tuple[int, str], ...], str]:
    """A key for sorting that compares numbers by value, so that case10 comes after case9.

    >>> sorted(["case10", "case9", "case09"], key=natural_order)
    ['case09', 'case9', 'case10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts), name


def visible(folder: Path) -> list[Path]:
    """Paths in a folder, in natural order, without hidden ones: macOS writes files such as ._case1.png."""
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:
        raise ValueError(f"cannot list folder {folder}: {error.strerror}") from error
    return [folder / name for name in sorted(names, key=natural_order)]


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, or a link to one; a ValueError without the permission to look."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except PermissionError as error:
        raise ValueError(f"no permission to look at {path}: change its permissions") from error
    except OSError:
        return False


def walk(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """`root`, each folder below it, and their files, in natural order and without hidden ones.

    Links are followed. Each folder comes once, also if several links lead to it or links form a loop.
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
        folders: list[Path] = []
        files: list[Path] = []
        for entry in entries:
            (folders if is_folder(entry) else files).append(entry)
        yield folder, files
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


def two_spellings(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that differ only in upper and lower case or in how Unicode writes them; None if none do.

    >>> two_spellings(["Liver", "tumour", "liver"])
    ('Liver', 'liver')
    """
    spellings: dict[str, str] = {}
    for name in names:
        other = spellings.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)
        if other != name:
            return other, name
    return None


def distinct_scans(
    scans: Iterable[RawScan], problems: Iterable[str]
) -> tuple[tuple[RawScan, ...], tuple[str, ...]]:
    """Scans in natural order with safe names; the problems, and one for each name that occurs more than once.

    Names that differ only in upper and lower case count as the same, as they do on some file systems.
    """
    by_name: dict[str, list[RawScan]] = {}
    for scan in scans:
        by_name.setdefault(safe_name(scan.name).casefold(), []).append(scan)
    distinct, problems = [], list(problems)
    for same in by_name.values():
        name = safe_name(same[0].name)
        if len(same) == 1:
            distinct.append(replace(same[0], name=name))
        else:
            files = ", ".join(str(scan.image[0]) for scan in same)
            problems.append(
                f"{len(same)} images would be case {name!r}: {files}; rename or remove all but one"
            )
    return tuple(sorted(distinct, key=lambda scan: natural_order(scan.name))), tuple(problems)
