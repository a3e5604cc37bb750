"""Time and memory of the metrics, and the level of the tests on simulated null data, as Markdown.

    python benchmarks/bench_metrics.py              seconds: calibration, overlap, statistics
    python benchmarks/bench_metrics.py --level      a minute: how often each test finds a difference, if any
    python benchmarks/bench_metrics.py --distances  HD95 of volumes beside that of MONAI: seconds, difference
    python benchmarks/bench_metrics.py --table CHECKOUT
        a case table of 200 000 rows read, checked and compared, beside the semidice of another checkout

With --docs docs/metrics.md the first two tables are written into that page.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from doc_tables import write_between_markers
from scipy.ndimage import gaussian_filter

from semidice.metrics import (
    ScoreKey,
    binarized_dice_score,
    brier_error,
    calibration_bins,
    dice_score,
    hausdorff_error_mm,
    kde_calibration_error,
    negative_log_likelihood,
    soft_dice_score,
)
from semidice.statistics import PairedScores, case_table, compare_scores, paired_test

VOLUME = (1, 1, 512, 512, 100)
OF_VOLUME: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "calibration, 10 equal-width bins": lambda p, y: calibration_bins(p, y),
    "calibration, 10 equal-mass bins": lambda p, y: calibration_bins(p, y, binning="equal_mass"),
    "calibration, classwise": lambda p, y: calibration_bins(p, y, confidence="classwise"),
    "kde_calibration_error, 4096 points": kde_calibration_error,
    "dice_score": dice_score,
    "soft_dice_score": soft_dice_score,
    "binarized_dice_score, 9 thresholds": binarized_dice_score,
    "brier_error": brier_error,
    "negative_log_likelihood": negative_log_likelihood,
}


def resident_mb(field: str) -> float:
    """A field of Linux's /proc/self/status in MB: VmRSS is the size now, VmHWM the peak so far."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Reset VmHWM: creating the data needed more memory than it occupies now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_volume(name: str) -> None:
    """Print seconds and extra MB of one metric of a volume, in a separate process with its own peak."""
    prob = torch.rand(VOLUME).pow_(4)
    target = (torch.rand_like(prob) < prob).float()
    OF_VOLUME[name](prob[..., :1], target[..., :1])
    forget_peak()
    before, start = resident_mb("VmRSS"), time.perf_counter()
    OF_VOLUME[name](prob, target)
    print(time.perf_counter() - start, resident_mb("VmHWM") - before)


def paired_scores(num_cases: int, num_methods: int) -> PairedScores:
    """Scores of methods that differ a little on the same cases, two cases per patient."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 0.9, (num_cases, 1)) + 0.05 * rng.standard_normal((num_cases, num_methods))
    cases = tuple(f"case{number}" for number in range(num_cases))
    patients = tuple(f"patient{number // 2}" for number in range(num_cases))
    methods = tuple(f"method{number}" for number in range(num_methods))
    return PairedScores(ScoreKey("dice_score"), "mean", cases, patients, methods, values, 0)


def speed_table() -> Iterator[str]:
    """Each metric of a 512 x 512 x 100 volume, then the statistics of ten methods on a thousand cases."""
    yield f"{torch.get_num_threads()} threads, torch {torch.__version__}.\n"
    yield "| binary volume of 512 x 512 x 100 | seconds | extra MB |\n| --- | ---: | ---: |"
    for name in OF_VOLUME:
        done = subprocess.run(
            [sys.executable, __file__, "--volume", name], capture_output=True, text=True, check=True
        )
        seconds, megabytes = map(float, done.stdout.split())
        yield f"| {name} | {seconds:.2f} | {megabytes:.0f} |"
    yield ("\n| 10 000 resamples, 1 000 cases, 10 methods, 45 pairs | seconds |\n| --- | ---: |")
    scores = paired_scores(1000, 10)
    drawn = {"cases": replace(scores, patients=scores.cases), "500 patients": scores}
    for name, of_unit in drawn.items():
        start = time.perf_counter()
        compare_scores(of_unit)
        yield f"| over {name} | {time.perf_counter() - start:.2f} |"


def dice_with_failures(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Dice of two exchangeable methods, each of which fails in a twentieth of the cases."""
    base = rng.beta(8, 2, shape)
    failed = [(rng.random(shape) < 0.05) * 0.3 * rng.random(shape) for _ in range(2)]
    scores = [np.clip(base + 0.03 * rng.standard_normal(shape) - each, 0, 1) for each in failed]
    return scores[0] - scores[1]


def one_sided_failures(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """One method is 3 points better, but loses 30 in a tenth of the cases."""
    failed = (rng.random(shape) < 0.1) * rng.uniform(0, 0.6, shape)
    return 0.03 - failed + 0.03 * rng.standard_normal(shape)


# differences with mean 0, one column per trial
NULLS: dict[str, Callable[[tuple[int, int], np.random.Generator], np.ndarray]] = {
    "normal": lambda shape, rng: rng.standard_normal(shape),
    "Dice with failures": dice_with_failures,
    "lognormal, σ 0.5": lambda shape, rng: rng.lognormal(0, 0.5, shape) - np.exp(0.125),
    "exponential": lambda shape, rng: rng.exponential(1, shape) - 1,
    "lognormal, σ 1": lambda shape, rng: rng.lognormal(0, 1, shape) - np.exp(0.5),
    "one-sided failures": one_sided_failures,
}


def significant_rates(columns: np.ndarray, num_resamples: int) -> str:
    """Percentage of columns with p < 0.05 by the test and by its permutation part, as cells of a table."""
    found = paired_test(columns, num_resamples=num_resamples)
    return " | ".join(f"{100 * (p < 0.05).mean():.1f} %" for p in (found.p, found.p_flips))


def level_table(num_trials: int = 3000, num_resamples: int = 1000) -> Iterator[str]:
    """Share of trials with p < 0.05: where there is no difference, then where there is one.

    The difference is 2.9 standard errors: the t-test on many normal differences finds 82 % of such.
    """
    rng = np.random.default_rng(1)
    yield f"| no difference | cases | the test | permutation test alone |\n|{' --- |' * 4}"
    for kind, draw in NULLS.items():
        for num_cases in (6, 12, 24, 48, 200):
            columns = draw((num_cases, num_trials), rng)
            yield f"| {kind} | {num_cases} | {significant_rates(columns, num_resamples)} |"
    yield f"\n| a difference | cases | the test | permutation test alone |\n|{' --- |' * 4}"
    for kind, sign, name in (
        ("normal", 1, "normal"),
        ("Dice with failures", 1, "Dice with failures"),
        ("exponential", 1, "exponential, on the side of the long tail"),
        ("exponential", -1, "exponential, on the other side"),
    ):
        for num_cases in (12, 24, 48):
            columns = NULLS[kind]((num_cases, num_trials), rng)
            shifted = columns + sign * 2.9 * columns.std() / np.sqrt(num_cases)
            yield f"| {name} | {num_cases} | {significant_rates(shifted, num_resamples)} |"


def blobs(shape: tuple[int, ...], scale: float, seed: int) -> torch.Tensor:
    """A ragged mask (1, 1, *shape) of about a fifth of the voxels, in parts whose size grows with `scale`."""
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(shape), scale)
    return torch.from_numpy(noise > 0.8 * noise.std())[None, None]


def distances_table(repeats: int = 3) -> Iterator[str]:
    """HD95 of volumes with spacing: seconds of both, the best of some turns, and the largest difference."""
    of_monai: Any = import_module("monai.metrics").compute_hausdorff_distance
    warnings.filterwarnings("ignore")
    spacing = (0.7, 0.8, 2.5)
    yield "| HD95 of 256 x 256 x 100 | semidice, s | MONAI, s | difference, mm |"
    yield "| --- | ---: | ---: | ---: |"
    for kind, scale, shift in (("one organ, 1 voxel off", 20.0, 1), ("many small parts", 3.0, 2)):
        mask = blobs((256, 256, 100), scale, 0)
        target = mask.roll(shift, 2).float()
        options: dict[str, Any] = {"include_background": True, "percentile": 95, "spacing": spacing}
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "semidice": lambda: hausdorff_error_mm(mask, target, spacing_mm=spacing),  # noqa: B023
            "MONAI": lambda: of_monai(mask, target, **options),  # noqa: B023
        }
        found, seconds = {}, dict.fromkeys(calls, float("inf"))
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                found[name] = float(call())
                seconds[name] = min(seconds[name], time.perf_counter() - start)
        difference = abs(found["semidice"] - found["MONAI"])
        yield f"| {kind} | {seconds['semidice']:.2f} | {seconds['MONAI']:.2f} | {difference:.1e} |"


# ten scores of ten methods on 2000 cases
_METRICS = [f"number_{number}_score" for number in range(10)]
# the same names in both packages
_READ_AND_COMPARE = """
import sys, time
from semidice.{package} import compare_cases, read_cases
start = time.perf_counter()
table = read_cases(sys.argv[1])
read = time.perf_counter() - start
for metric in {metrics}:
    compare_cases(table, metric)
print(read, time.perf_counter() - start)
"""


def against_table(checkout: Path, repeats: int = 3) -> Iterator[str]:
    """Seconds to read, check and compare 200 000 rows, in turns with a checkout of f55cdaf."""
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.5, 0.9, (len(_METRICS), 2000, 1)) + 0.05 * rng.standard_normal((10, 2000, 10))
    metric, case, method = (axis.ravel() for axis in np.indices(scores.shape))
    rows = {
        "case": [f"case{number}" for number in case],
        "patient": [f"patient{number // 2}" for number in case],
        "fold": case % 5,
        "method": [f"method{number}" for number in method],
        "class": "mean",
        "metric": [_METRICS[number] for number in metric],
        "value": scores.clip(0, 1).ravel(),
    }
    ours = Path(__file__).parents[1]
    sides = {"this checkout": (ours, "statistics"), "the other": (checkout, "metrics")}
    best = dict.fromkeys(sides, (float("inf"), float("inf")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.csv"
        table = case_table(pd.DataFrame(rows))
        table[list(rows)].to_csv(path, index=False)
        for _ in range(repeats):
            for name, (root, package) in sides.items():
                code = _READ_AND_COMPARE.format(package=package, metrics=_METRICS)
                environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "2"}
                command = [sys.executable, "-c", code, str(path)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                found = tuple(map(float, done.stdout.split()))
                best[name] = min(best[name][0], found[0]), min(best[name][1], found[1])
    yield "| 200 000 rows, 10 scores, 10 methods, 10 000 resamples | read, s | read and compared, s |"
    yield "| --- | ---: | ---: |"
    for name, (read, total) in best.items():
        yield f"| {name} | {read:.2f} | {total:.2f} |"
    yield f"\nThis checkout takes {best['this checkout'][1] / best['the other'][1]:.2f} times as long."


def main() -> None:
    """Run the benchmarks that the command line selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", action="store_true", help="simulate the level of the tests")
    parser.add_argument("--volume", choices=list(OF_VOLUME), help="measure one metric and print two numbers")
    parser.add_argument("--distances", action="store_true", help="HD95 of volumes beside that of MONAI")
    parser.add_argument("--table", type=Path, help="a checkout of f55cdaf to compare a large table with")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    if chosen.volume:
        measure_volume(chosen.volume)
        return
    lines = []
    if chosen.distances or chosen.table:
        print(*(distances_table() if chosen.distances else against_table(chosen.table)), sep="\n")
        return
    for line in level_table() if chosen.level else speed_table():
        print(line, flush=True)
        lines.append(line + "\n")
    if chosen.docs:
        write_between_markers(chosen.docs, "level" if chosen.level else "speed", "".join(lines))


if __name__ == "__main__":
    main()
