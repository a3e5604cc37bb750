"""Volumes with their intervals: how many raters an interval covers, and how wide it is.

RUN/volumes.csv, which `semidice evaluate RUN --interval LEVEL` writes, has one row per case and class:

    expected                       volume that the probabilities add up to
    low, high                      interval of raters who differ by one shared offset (nested)
    conformal_low, conformal_high  the same after a correction that was fitted on other folds; may be empty
    level                          optional, before expected: the nominal share of raters in the intervals
    rater NAME                     the volume that this rater drew; empty if the rater did not look

A rater is covered if the volume lies in the interval, ends included. Coverage is the mean over cases of the
share of covered raters.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from ..data.dataset import Dataset
from ..errors import UserError, read_json, reading
from ..paths import RunFolder
from ..statistics.cases import unescaped_cell
from ..statistics.tables import Cell, Table, number_text
from .other_methods import check_cases
from .verdict import listed

COMMAND = "semidice evaluate RUN --interval 0.9"
_NAMES = ("case", "patient", "fold", "class", "unit")
_NUMBERS = ("expected", "low", "high", "conformal_low", "conformal_high")
_RATER = "rater "
UNITS = ("ml", "voxels")


@dataclass(frozen=True)
class ClassVolumes:
    """Volumes of one class of one method, sorted by the expected volume. raters: NaN if one did not look.

    level: nominal share of raters in the interval; None if the run does not tell. The ends of a missing
    interval are NaN.
    """

    class_name: str
    unit: str
    level: float | None
    cases: tuple[str, ...]
    rater_names: tuple[str, ...]
    expected: Float[np.ndarray, " N"]
    nested: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]
    conformal: tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]
    raters: Float[np.ndarray, "N R"]

    @property
    def is_corrected(self) -> bool:
        return bool(np.isfinite(self.conformal[0]).any())

    @property
    def shown(self) -> tuple[np.ndarray, np.ndarray]:
        """The corrected interval, if there is one, else the nested one."""
        return self.conformal if self.is_corrected else self.nested


def coverage(interval: tuple[np.ndarray, np.ndarray], raters: np.ndarray) -> float:
    """Mean over cases of the share of raters in the interval; NaN if no case has both.

    >>> coverage((np.array([1.0, 1.0]), np.array([2.0, 2.0])), np.array([[1.0, 3.0], [2.0, np.nan]]))
    0.75
    """
    low, high = interval
    num_raters = (~np.isnan(raters)).sum(1)
    counted = np.isfinite(low) & np.isfinite(high) & (num_raters > 0)
    inside = (raters >= low[:, None]) & (raters <= high[:, None])
    return float((inside.sum(1)[counted] / num_raters[counted]).mean()) if counted.any() else math.nan


def mean_width(interval: tuple[np.ndarray, np.ndarray]) -> float:
    """Mean over the cases with an interval; NaN if there is none."""
    width = interval[1] - interval[0]
    width = width[np.isfinite(width)]
    return float(width.mean()) if len(width) else math.nan


def read_volumes(folder: RunFolder, dataset: Dataset) -> list[ClassVolumes]:
    """The volumes of a run, one record per class; empty if it has none. A ValueError names a wrong line."""
    path = folder.volumes
    if not path.is_file():
        return []
    rows, rater_names = _read_rows(path, dataset)
    check_cases({row.case: row.patient for row in rows}, dataset, path, COMMAND)
    levels = {row.level for row in rows}
    if len(levels) > 1:
        raise UserError(f"{path} has intervals of different levels: write it again with `{COMMAND}`")
    (level,) = levels
    level = _stored_level(folder) if level is None else level
    records = []
    for class_name in dataset.manifest.class_names[1:]:
        of_class = sorted((row for row in rows if row.class_name == class_name), key=lambda row: row.key)
        if not of_class:
            continue
        expected, low, high, conformal_low, conformal_high = np.array([row.numbers for row in of_class]).T
        records.append(
            ClassVolumes(
                class_name=class_name,
                unit=of_class[0].unit,
                level=level,
                cases=tuple(row.case for row in of_class),
                rater_names=rater_names,
                expected=expected,
                nested=(low, high),
                conformal=(conformal_low, conformal_high),
                raters=np.array([row.raters for row in of_class]).reshape(len(of_class), len(rater_names)),
            )
        )
    return records


@dataclass(frozen=True)
class _Row:
    case: str
    patient: str
    class_name: str
    unit: str
    level: float | None
    numbers: tuple[float, ...]
    raters: tuple[float, ...]

    @property
    def key(self) -> tuple[float, str]:
        return self.numbers[0], self.case


def _read_rows(path: Path, dataset: Dataset) -> tuple[list[_Row], tuple[str, ...]]:
    rows: dict[tuple[str, str], _Row] = {}
    with reading(path, f"write it with `{COMMAND}`"), path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file, strict=True)
        header = tuple(next(reader, ()))
        has_level = "level" in header
        fixed = (*_NAMES, *(["level"] if has_level else []), *_NUMBERS)
        raters = header[len(fixed) :]
        if header[: len(fixed)] != fixed or not all(name.startswith(_RATER) for name in raters):
            raise UserError(
                f"{path} must have the columns {', '.join(fixed)} and `{_RATER}NAME` of each rater; it "
                f"has {', '.join(header)[:200] or 'none'}: write it with `{COMMAND}`"
            )
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(header):
                raise UserError(f"{where}: expected {len(header)} cells, got {len(cells)}")
            row = _row(cells, len(fixed), dataset, where, has_level=has_level)
            if (row.case, row.class_name) in rows:
                raise UserError(f"{where}: a second row of case {row.case} and class {row.class_name}")
            if any(row.unit != other.unit for other in rows.values() if other.class_name == row.class_name):
                raise UserError(f"{where}: all volumes of a class must have one unit; got {row.unit}")
            rows[row.case, row.class_name] = row
    if not rows:
        raise UserError(f"{path} has no rows: write it with `{COMMAND}`")
    return list(rows.values()), tuple(name.removeprefix(_RATER) for name in raters)


def _row(cells: Sequence[str], num_fixed: int, dataset: Dataset, where: str, *, has_level: bool) -> _Row:
    case, patient, _, class_name, unit = map(unescaped_cell, cells[: len(_NAMES)])
    if class_name not in dataset.manifest.class_names[1:]:
        classes = ", ".join(dataset.manifest.class_names[1:])
        raise UserError(f"{where}: class must be one of {classes}; got {class_name!r}")
    if unit not in UNITS:
        raise UserError(f"{where}: unit must be {' or '.join(UNITS)}; got {unit!r}")
    level = _number(cells[len(_NAMES)], where) if has_level else None
    if level is not None and not 0 < level < 1:
        raise UserError(f"{where}: level must be between 0 and 1; got {cells[len(_NAMES)][:40]!r}")
    numbers = tuple(_number(cell, where) for cell in cells[len(_NAMES) + has_level : num_fixed])
    if math.isnan(numbers[0]):
        raise UserError(f"{where}: expected must be a volume; it is empty")
    for low, high in (numbers[1:3], numbers[3:5]):
        if low > high or math.isnan(low) != math.isnan(high):
            raise UserError(f"{where}: an interval must end above its start; got {low:g} to {high:g}")
    raters = tuple(_number(cell, where) for cell in cells[num_fixed:])
    return _Row(case, patient, class_name, unit, level, numbers, raters)


def _number(cell: str, where: str) -> float:
    """A volume; NaN for an empty cell."""
    if not cell:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"{where}: a volume must be a finite number, 0 or more, or empty; got {cell[:40]!r}")
    return value


def _stored_level(folder: RunFolder) -> float | None:
    """The nominal level of the intervals, from decision.json; None if it does not have exactly one."""
    if not folder.decision.is_file():
        return None
    with reading(folder.decision):
        levels = list(read_json(folder.decision)["intervals"])
        level = float(levels[0]) if len(levels) == 1 else math.nan
    return level if 0 < level < 1 else None


def level_text(level: float | None) -> str:
    """The level in percent, or a dash.

    >>> level_text(0.9), level_text(None)
    ('90 %', '–')
    """
    return "–" if level is None else f"{100 * level:g} %"


def volumes_table(volumes: Mapping[str, Sequence[ClassVolumes]]) -> Table:
    """Coverage of the raters and mean width of each method and class, before and after the correction."""
    rows: list[tuple[Cell, ...]] = []
    records: list[dict[str, object]] = []
    for method, classes in volumes.items():
        for each in classes:
            shares = [coverage(interval, each.raters) for interval in (each.nested, each.conformal)]
            widths = [mean_width(interval) for interval in (each.nested, each.conformal)]
            volume = float(each.expected.mean())
            rows.append(
                (
                    Cell(method),
                    Cell(each.class_name),
                    Cell(level_text(each.level)),
                    *(Cell(_text(100 * share)) for share in shares),
                    *(Cell(_text(width)) for width in widths),
                    Cell(f"{number_text(volume)} {each.unit}"),
                    Cell(str(len(each.cases))),
                )
            )
            records.append(
                {
                    "method": method,
                    "class": each.class_name,
                    "unit": each.unit,
                    "level": each.level,
                    "num_cases": len(each.cases),
                    "coverage_nested": shares[0],
                    "coverage_conformal": shares[1],
                    "width_nested": widths[0],
                    "width_conformal": widths[1],
                    "mean_expected": volume,
                }
            )
    header = (
        *("method", "class", "nominal", "covered (%)", "covered, corrected (%)"),
        *("mean width", "mean width, corrected", "mean volume", "cases"),
    )
    note = (
        "Covered: mean over cases of the share of raters whose volume is in the interval. Nominal: the share "
        "that the interval is made for. Corrected: by conformal prediction on other folds."
    )
    return Table("Volume intervals", header, tuple(rows), note, tuple(records))


def volumes_sentence(volumes: Mapping[str, Sequence[ClassVolumes]]) -> str:
    """What the intervals cover before and after the correction, in one or two sentences."""
    records = [each for classes in volumes.values() for each in classes]
    before = [coverage(each.nested, each.raters) for each in records]
    after = [coverage(each.conformal, each.raters) for each in records if each.is_corrected]
    levels = sorted({each.level for each in records if each.level is not None})
    name = (
        "The intervals" if not levels else f"The {listed([level_text(level) for level in levels])} intervals"
    )
    parts = [f"{name} cover {_range(before)} of the raters' volumes as they come from the probabilities"]
    if after:
        parts.append(f"and {_range(after)} after the correction")
    return " ".join(parts) + "."


def _range(shares: Sequence[float]) -> str:
    texts = dict.fromkeys(f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{' to '.join(texts)} %"


def _text(value: float) -> str:
    return "–" if math.isnan(value) else number_text(value)
