"""What is decided from probabilities: the rules that make masks, and volumes with their intervals.

RUN/decisions.parquet, which `semidice evaluate RUN --decide RULE` writes, is a case table whose methods are
the rules. Each rule of a method is compared with argmax, the plain rule, and Holm's correction is over these
comparisons. The best set is that of all pairs of rules, as for methods, without rules that are significantly
worse than argmax, and without argmax if another rule is significantly better.

RUN/volumes.csv, which `semidice evaluate RUN --interval LEVEL` writes, has one row per scan and class: the
expected volume, the nested interval (low, high), the one corrected on other folds (conformal_low, ..._high,
may be empty), and the volume that each rater drew.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from ..data.dataset import Dataset
from ..errors import reading
from ..metrics.registry import ScoreKey
from ..paths import RunFolder
from ..runs.fits import current_fits
from ..runs.run import open_run
from ..statistics.cases import CaseTable, keys_of, methods_of, rows_of, unescaped_cell
from ..statistics.compare import Comparison, compare_scores
from ..statistics.pairing import paired
from ..statistics.resampling import ALPHA
from ..statistics.tables import Cell, Table, number_text, p_text
from .runs import check_cases, read_cases_of

PLAIN = "argmax"
FITTED = "fitted"
RULES_COMMAND = "semidice evaluate RUN --decide dice --decide fitted"
VOLUMES_COMMAND = "semidice evaluate RUN --interval 0.9"
_NUMBERS = ["expected", "low", "high", "conformal_low", "conformal_high"]
_RATER = "rater "
# columns of the interval from the probabilities, and of the one corrected on other folds
INTERVALS = {"nested": ("low", "high"), "conformal": ("conformal_low", "conformal_high")}


@dataclass(frozen=True)
class RuleScore:
    """One score of masks. rows: one per method and rule, with the columns of `compare_rules`."""

    key: ScoreKey
    rows: pd.DataFrame

    @property
    def rules(self) -> list[str]:
        """The rules of all methods: argmax, then fitted, then the others in order of appearance."""
        return sorted(dict.fromkeys(self.rows["rule"]), key=lambda rule: (rule != PLAIN, rule != FITTED))

    @property
    def heading(self) -> str:
        """Metric, unit and direction."""
        return self.key.heading()

    def table(self) -> Table:
        """Mean, difference from argmax and corrected p; the best set of each method is marked."""
        scale, rows = self.key.scale, []
        for each in self.rows.itertuples():
            mean = f"{number_text(each.mean * scale)} {_interval(each.mean_low, each.mean_high, scale)}"
            difference, p = Cell("–"), Cell("–")
            if each.rule != PLAIN:
                text = number_text(each.difference * scale, signed=True)
                ends = _interval(each.low, each.high, scale, signed=True)
                difference, p = Cell(f"{text} {ends}", each.significant), Cell(p_text(each.p))
            rows.append((Cell(each.method), Cell(each.rule), Cell(mean, each.best), difference, p))
        counts = sorted({*self.rows["num_cases"]})
        note = (
            "Marked means: not significantly worse than any other rule of the method; marked differences: "
            f"significant (p < {ALPHA:g}, Holm-corrected over the rules of a method, "
            f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} cases)."
        )
        header = ("method", "rule", f"{self.heading} [95 % interval]", f"minus {PLAIN}", "corrected p")
        records = self.rows.assign(**self.key._asdict()).to_dict("records")
        return Table(f"Rules of decision: {self.heading}", header, tuple(rows), note, tuple(records))


def _interval(low: float, high: float, scale: float, *, signed: bool = False) -> str:
    return f"[{', '.join(number_text(end * scale, signed=signed) for end in (low, high))}]"


def read_rules(runs: Mapping[str, RunFolder], dataset: Dataset) -> tuple[dict[str, CaseTable], list[str]]:
    """The scores of the rules of each run that has them, and a sentence on each run that is left out."""
    tables, notices = {}, []
    for method, folder in runs.items():
        if not folder.decisions.is_file():
            continue
        if current_fits(open_run(folder)) is None:
            notices.append(f"The decisions of {method} are left out: they are of other predictions.")
            continue
        table = read_cases_of(dataset, folder.decisions, RULES_COMMAND)
        rules = methods_of(table)
        if PLAIN in rules and len(rules) > 1:
            tables[method] = table
        else:
            notices.append(
                f"The decisions of {method} are left out: {folder.decisions.name} has the rules "
                f"{', '.join(rules) or 'none'}, but {PLAIN} and another one are needed."
            )
    return tables, notices


def compare_rules(tables: Mapping[str, CaseTable], *, num_resamples: int = 10_000) -> list[RuleScore]:
    """Every metric of masks, Dice first, with each rule of each method against argmax.

    Columns: method, rule, num_cases; mean with mean_low and mean_high; difference from argmax with low, high
    and p after Holm's correction; significant, better; best, whether the rule is in the best set.
    """
    keys = dict.fromkeys(key for table in tables.values() for key in keys_of(table))
    scores = []
    for key in sorted(keys, key=lambda each: each.metric != "dice_score"):
        rows: list[dict[str, object]] = []
        for method, table in tables.items():
            rules = methods_of(rows_of(table, key))
            if PLAIN not in rules or len(rules) < 2:
                continue
            found = paired(table, key, methods=rules, drop=True)
            if len(found.cases) > 1:
                against_plain = compare_scores(found, baseline=PLAIN, num_resamples=num_resamples)
                every = compare_scores(found, num_resamples=num_resamples)
                rows += [{"method": method, **row} for row in _rule_rows(against_plain, every.best)]
        if rows:
            scores.append(RuleScore(key, pd.DataFrame(rows)))
    return scores


def _rule_rows(comparison: Comparison, best: Sequence[str]) -> list[dict[str, object]]:
    rows = []
    for rule, mean in comparison.means.iterrows():
        row = {"rule": rule, "num_cases": comparison.num_cases, "mean": mean["mean"]}
        row |= {"mean_low": mean.low, "mean_high": mean.high}
        row |= {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "significant": False, "better": False}
        if rule != PLAIN:
            pair = comparison.pairs.loc[(rule, PLAIN)]
            is_worse = comparison.pairs.loc[(PLAIN, rule)].better
            ends = {end: _unbounded(pair[end], comparison.key) for end in ("low", "high")}
            row |= {"difference": pair.difference, **ends, "p": pair.p}
            row |= {"significant": bool(pair.better or is_worse), "better": bool(pair.better)}
        rows.append({**row, "best": rule in best and rule in comparison.best})
    return rows


def _unbounded(end: float, key: ScoreKey) -> float:
    """The end of an interval; infinite if only the range of a share limits it.

    That happens if a rule changes the masks of very few cases.
    """
    return math.copysign(math.inf, end) if key.scale == 100 and abs(end) >= 1 else float(end)


@dataclass(frozen=True)
class ClassVolumes:
    """Volumes of one class of one method, sorted by the expected volume.

    table: with the columns of volumes.csv. raters: NaN where a rater did not look. level: nominal share of
    raters in the interval.
    """

    method: str
    class_name: str
    unit: str
    level: float
    table: pd.DataFrame

    @property
    def raters(self) -> Float[np.ndarray, "N R"]:
        volumes: np.ndarray = self.table.filter(like=_RATER).to_numpy()
        return volumes

    @property
    def shown(self) -> tuple[str, str]:
        """The columns of the corrected interval, if there is one, else of the nested one."""
        is_corrected = self.table["conformal_low"].notna().any()
        return INTERVALS["conformal" if is_corrected else "nested"]

    def is_inside(self, interval: tuple[str, str]) -> Bool[np.ndarray, "N R"]:
        """Which raters lie in the interval, ends included."""
        low, high = (self.table[[end]].to_numpy() for end in interval)
        inside: np.ndarray = np.logical_and(self.raters >= low, self.raters <= high)
        return inside

    def coverage(self, interval: tuple[str, str]) -> float:
        """Mean over cases of the share of raters in the interval; NaN if no case has both."""
        num_raters = (~np.isnan(self.raters)).sum(1)
        counted = self.table[list(interval)].notna().all(axis=1).to_numpy() & (num_raters > 0)
        shares = self.is_inside(interval).sum(1)[counted] / num_raters[counted]
        return float(shares.mean()) if counted.any() else math.nan

    def width(self, interval: tuple[str, str]) -> float:
        """Mean over the cases with an interval; NaN if there is none."""
        low, high = interval
        return float((self.table[high] - self.table[low]).mean())


def read_volumes(runs: Mapping[str, RunFolder], dataset: Dataset) -> list[ClassVolumes]:
    """The volumes of each class of each run that has them."""
    found = []
    for method, folder in runs.items():
        path = folder.volumes
        # of other predictions if nothing is fitted to those that the run has
        if not path.is_file() or current_fits(open_run(folder)) is None:
            continue
        names = dict.fromkeys(("case", "patient", "class", "unit"), str)
        with reading(path, f"write it with `{VOLUMES_COMMAND}`"):
            # a class may be called NA; only a number may be missing
            table = pd.read_csv(path, dtype=names, keep_default_na=False)
            raters = [name for name in table if name.startswith(_RATER)]
            numbers = ["level", *_NUMBERS, *raters]
            table[numbers] = table[numbers].apply(pd.to_numeric).astype(float)
            table[list(names)] = table[list(names)].map(unescaped_cell)
        check_cases(dict(zip(table["case"], table["patient"], strict=True)), dataset, path, VOLUMES_COMMAND)
        for class_name in dataset.manifest.class_names[1:]:
            of_class = table[table["class"] == class_name].sort_values(["expected", "case"])
            if len(of_class):
                first = of_class.iloc[0]
                found.append(ClassVolumes(method, class_name, first["unit"], first["level"], of_class))
    return found


def level_text(level: float) -> str:
    """The level in percent.

    >>> level_text(0.9)
    '90 %'
    """
    return f"{100 * level:g} %"


def volumes_table(volumes: Sequence[ClassVolumes]) -> Table:
    """Coverage of the raters and mean width of each method and class, before and after the correction."""
    rows, records = [], []
    for each in volumes:
        record: dict[str, object] = {"method": each.method, "class": each.class_name, "unit": each.unit}
        record |= {"level": each.level, "num_cases": len(each.table)}
        shares = {name: each.coverage(ends) for name, ends in INTERVALS.items()}
        widths = {name: each.width(ends) for name, ends in INTERVALS.items()}
        record |= {f"coverage_{name}": share for name, share in shares.items()}
        record |= {f"width_{name}": width for name, width in widths.items()}
        volume = float(each.table["expected"].mean())
        records.append({**record, "mean_expected": volume})
        numbers = [*(100 * share for share in shares.values()), *widths.values(), volume]
        texts = ["–" if math.isnan(number) else number_text(number) for number in numbers]
        cells = (each.method, each.class_name, level_text(each.level), *texts, str(len(each.table)))
        rows.append(tuple(map(Cell, cells)))
    unit = volumes[0].unit
    header = (
        *("method", "class", "nominal", "covered (%)", "covered, corrected (%)"),
        *(f"mean width ({unit})", "mean width, corrected", f"mean volume ({unit})", "cases"),
    )
    note = (
        "Covered: mean over cases of the share of raters whose volume is in the interval. Nominal: the share "
        "that the interval is made for. Corrected: by conformal prediction on other folds."
    )
    return Table("Volume intervals", header, tuple(rows), note, tuple(records))
