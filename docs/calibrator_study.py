"""The tables and the figure of docs/calibration.md about calibrators: which one is nearest to p*.

Teachers, cases and the error to p* are those of `calibration_study`, with more distortions. Calibrators see
one rater, as a hard label, in 48 cases; they are judged on 16 others. One table is of the networks of
`semidice demo -o demo_out`, run in the root of the repository.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import calibration_study as study
import torch
from calibration_study import FIT, JUDGED, Row, cases, distorted
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from semidice import CALIBRATORS
from semidice.calibration.calibrator import Calibrator
from semidice.metrics import calibration_error
from semidice.paths import DemoFolder
from semidice.report.figures import COLOURS, LINES, new_axes
from semidice.runs.calibration import UNCALIBRATED, run_calibrate
from semidice.runs.run import open_run
from semidice.statistics import paired

DEMO = DemoFolder(Path(__file__).parents[1] / "demo_out")


def asymmetric(prob: Tensor) -> Tensor:
    """sigmoid(0.6 log p - 2 log(1 - p)): too sure of the lesion, and not sure enough of the background."""
    log_prob = prob.clamp(min=1e-6).log()
    lesion = (0.6 * log_prob[:, 1] - 2 * log_prob[:, 0]).sigmoid()
    return torch.stack([1 - lesion, lesion], 1)


DISTORTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none: p* itself": lambda prob: prob,
    "overconfident": study.TEACHERS["overconfident"],
    "underconfident": lambda prob: distorted(prob, slope=0.5, shift=0.0),
    **{name: teacher for name, teacher in study.TEACHERS.items() if "segmenting" in name},
    "asymmetric": asymmetric,
    "dilated": study.dilated,
    "blurred": study.blurred,
}


@cache
def fitted(distortion: str, name: str) -> Calibrator:
    prob, label = DISTORTIONS[distortion](cases().prob), cases().label
    return CALIBRATORS[name]().fit(prob[FIT], label[FIT])


@cache
def judged(distortion: str) -> dict[str, Tensor]:
    """Probabilities of the test cases, uncalibrated and by each calibrator."""
    prob = DISTORTIONS[distortion](cases().prob)[JUDGED]
    calibrated = {name: fitted(distortion, name).calibrate(prob) for name in CALIBRATORS}
    return {"uncalibrated": prob, **calibrated}


def rater_error(prob: Tensor) -> float:
    """ECE of all test cases together, against the mean of eight raters, in percent."""
    together = (part.transpose(0, 1).flatten(1).unsqueeze(0) for part in (prob, cases().mean[JUDGED]))
    return 100 * float(calibration_error(*together))


def _rows(score: Callable[[Tensor], float]) -> list[Row]:
    """The score of each distortion before and after calibration; the lowest of each row is bold."""
    names = ["uncalibrated", *CALIBRATORS]
    rows: list[Row] = [["distortion", *names]]
    for distortion in DISTORTIONS:
        values = [f"{score(judged(distortion)[name]):.2f}" for name in names]
        rows.append([distortion, *_lowest_bold(values)])
    return rows


def demo_rows() -> list[Row] | None:
    """Error to p* of the demo's held-out cases after `semidice calibrate`; None if there is no demo_out."""
    if not DEMO.runs.is_dir():
        return None
    names = [UNCALIBRATED, *CALIBRATORS]
    rows: list[Row] = [["trained with", *names]]
    for run in sorted(DEMO.runs.iterdir()):
        table = run_calibrate(run, dataset=DEMO.dataset, console=Console(file=io.StringIO()))
        means = paired(table, "truth_error", methods=names).values.mean(0)
        values = [f"{100 * float(mean):.2f}" for mean in means]
        rows.append([open_run(run).recipe.name, *_lowest_bold(values)])
    return rows


def _lowest_bold(values: Sequence[str]) -> list[str]:
    lowest = min(values, key=float)
    return [f"**{value}**" if value == lowest else value for value in values]


def draw_curves() -> Figure:
    """Calibrated against predicted probability of the asymmetric teacher, and the curve that undoes it."""
    figure, axes = new_axes(width=5.0, height=4.4)
    truth = torch.linspace(1e-4, 1 - 1e-4, 2001, dtype=torch.float64)
    distorted_truth = asymmetric(torch.stack([1 - truth, truth], 1))[:, 1]
    axes.plot(distorted_truth, truth, color="0.2", linewidth=2.5, label="p*")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=":")
    prob = torch.linspace(0, 1, 2001)
    for name, colour, line in zip(CALIBRATORS, COLOURS, LINES * 2, strict=False):
        calibrated = fitted("asymmetric", name).calibrate(torch.stack([1 - prob, prob], 1))[:, 1]
        axes.plot(prob, calibrated, color=colour, linestyle=line, linewidth=1.2, label=name)
    axes.set(
        xlabel="predicted probability",
        ylabel="calibrated probability",
        title="Curves of five calibrators, one rater in 48 cases",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.legend(loc="upper left", framealpha=1)
    return figure


FIGURES: Mapping[str, Callable[[], Figure]] = {"calibrator_curves": draw_curves}
TABLES: Mapping[str, Callable[[], list[Row] | None]] = {
    "nearest_to_truth": lambda: _rows(study.error_to_truth),
    "calibrator_ece": lambda: _rows(rater_error),
    "calibrated_demo": demo_rows,
}
