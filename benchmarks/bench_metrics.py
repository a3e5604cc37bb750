"""Time and memory of the metrics, and the level of the tests on simulated null data, as Markdown.

    python benchmarks/bench_metrics.py           seconds: calibration, overlap, statistics
    python benchmarks/bench_metrics.py --level   a minute: how often each test calls a true null significant

With --docs docs/metrics.md the tables are written into that page.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from pages import write_between_markers

from semidice.metrics import (
    binarized_dice_score,
    brier_error,
    calibration_bins,
    compare_scores,
    dice_score,
    kde_calibration_error,
    negative_log_likelihood,
    paired_bootstrap,
    permutation_test,
    soft_dice_score,
)
from semidice.metrics.cases import PairedScores
from semidice.metrics.resampling import Interval

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
    return PairedScores("dice_score", "mean", cases, patients, methods, values, 0)


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
    for interval in ("studentised", "percentile", "bca"):
        start = time.perf_counter()
        compare_scores(scores, interval=interval)
        yield f"| {interval}, over cases, with the permutation test | {time.perf_counter() - start:.2f} |"
    start = time.perf_counter()
    compare_scores(scores, unit="patient")
    yield f"| studentised, over 500 patients | {time.perf_counter() - start:.2f} |"


def null_differences(kind: str, num_cases: int, num_trials: int, rng: np.random.Generator) -> np.ndarray:
    """Differences of two equally good methods, one column per trial."""
    shape = (num_cases, num_trials)
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "skewed":
        return rng.exponential(1, shape) - 1
    # Dice of two exchangeable methods, each of which fails in a twentieth of the cases
    base = rng.beta(8, 2, shape)
    scores = [
        np.clip(
            base + 0.03 * rng.standard_normal(shape) - (rng.random(shape) < 0.05) * 0.3 * rng.random(shape),
            0,
            1,
        )
        for _ in range(2)
    ]
    return scores[0] - scores[1]


def level_table(num_trials: int = 4000, num_resamples: int = 2000) -> Iterator[str]:
    """Share of trials with p < 0.05 although there is no difference; it should be 5 % ± 0.7."""
    intervals: tuple[Interval, ...] = ("studentised", "percentile", "bca")
    yield f"| differences | cases | {' | '.join(intervals)} | permutation |\n|{' --- |' * 6}"
    rng = np.random.default_rng(1)
    for kind in ("normal", "Dice with failures", "skewed"):
        for num_cases in (12, 24, 60, 200):
            columns = null_differences(kind, num_cases, num_trials, rng)
            p_values = [
                paired_bootstrap(columns, interval=interval, num_resamples=num_resamples).p
                for interval in intervals
            ]
            p_values.append(permutation_test(columns, num_resamples=num_resamples))
            rates = " | ".join(f"{100 * (p < 0.05).mean():.1f} %" for p in p_values)
            yield f"| {kind} | {num_cases} | {rates} |"


def main() -> None:
    """Run the benchmarks that the command line selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", action="store_true", help="simulate the level of the tests")
    parser.add_argument("--volume", choices=list(OF_VOLUME), help="measure one metric and print two numbers")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    if chosen.volume:
        measure_volume(chosen.volume)
        return
    lines = []
    for line in level_table() if chosen.level else speed_table():
        print(line, flush=True)
        lines.append(line + "\n")
    if chosen.docs:
        write_between_markers(chosen.docs, "level" if chosen.level else "speed", "".join(lines))


if __name__ == "__main__":
    main()
