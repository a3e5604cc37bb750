"""Time and memory of the metrics, and the level of the tests on simulated null data, as Markdown.

    python benchmarks/bench_metrics.py           seconds: calibration, overlap, statistics
    python benchmarks/bench_metrics.py --level   a minute: how often each test finds a difference, if any

With --docs docs/metrics.md the tables are written into that page.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from doc_tables import write_between_markers

from semidice.metrics import (
    ScoreKey,
    binarized_dice_score,
    brier_error,
    calibration_bins,
    dice_score,
    kde_calibration_error,
    negative_log_likelihood,
    soft_dice_score,
)
from semidice.statistics import PairedScores, compare_scores, paired_test

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
