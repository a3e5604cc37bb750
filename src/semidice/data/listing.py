"""Files and cases in folders: in natural order, each folder once, under names that can be file names."""

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..paths import check_name
from .raw import RawScan

NaturalKey = tuple[tuple[tuple[int, str], ...], str]


def natural_order(name: str) -> NaturalKey:
    """Sorting key that takes digits by their value, so that case10 comes after case9.

    >>> sorted(["case10", "case9", "case09"], key=natural_order)
    ['case09', 'case9', 'case10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts), name


def visible(folder: Path) -> list[Path]:
    """What is in a folder, in natural order, without hidden files: macOS leaves ._case1.png and the like."""
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError as error:
        raise ValueError(f"cannot list folder {folder}: {error.strerror}") from error
    return [folder / name for name in sorted(names, key=natural_order)]


def is_folder(path: Path) -> bool:
    """Whether the path is, or leads to, a folder; not for a broken link, an error where one may not know."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except PermissionError as error:
        raise ValueError(f"{path} may not be looked at: change its permissions") from error
    except OSError:
        return False


def walk(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Each folder at and below `root`, and its files, in natural order; none hidden.

    Links are followed, but a folder that several lead to, such as one that leads back to itself, comes once.
    """
    seen = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
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
        # links last: a folder is known by its own name rather than by a link to it
        folders.sort(key=lambda entry: entry.is_symlink())
        waiting.extend(reversed(folders))


def safe_name(name: str) -> str:
    """The name as a file can have it everywhere: accents dropped, other signs replaced by _.

    >>> safe_name("Müller: 2.Scan")
    'Muller_ 2.Scan'
    """
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", name) if not unicodedata.combining(sign))
    plain = re.sub(r"[^A-Za-z0-9_.+=,@ -]", "_", plain).lstrip(". ")
    return check_name(plain[:150].rstrip() or "_")


def distinct_scans(scans: Iterable[RawScan]) -> tuple[tuple[RawScan, ...], list[str]]:
    """Scans in natural order under safe names, without those whose name occurs twice, and a message for each.

    Two names that differ in case alone are the same: not every file system tells them apart.
    """
    by_name: dict[str, list[RawScan]] = {}
    for scan in scans:
        by_name.setdefault(safe_name(scan.name).casefold(), []).append(scan)
    kept, problems = [], []
    for same in by_name.values():
        if len(same) == 1:
            kept.append(same[0])
            continue
        files = ", ".join(str(scan.image[0]) for scan in same)
        name = safe_name(same[0].name)
        problems.append(f"{len(same)} images would be case {name!r}: {files}; rename or remove all but one")
    renamed = [replace(scan, name=safe_name(scan.name)) for scan in kept]
    return tuple(sorted(renamed, key=lambda scan: natural_order(scan.name))), problems


def rater_names(scans: Iterable[RawScan]) -> tuple[str, ...]:
    """All raters of any scan, in natural order."""
    return tuple(sorted({rater for scan in scans for rater in scan.masks}, key=natural_order))
