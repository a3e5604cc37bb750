"""Tables and figures of docs/calibration.md: teachers with known errors, on phantoms with known p*.

Each case has eight raters, drawn from p*. Calibrators see only the first rater, as a hard label; they are
fitted to 48 cases and judged on 16 others. Errors are means over all voxels, for the lesion, in percent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from semidice import (
    KDECalibrator,
    Teacher,
    TeacherCalibration,
    TemperatureScaling,
    choose_bandwidth,
    draw_keys,
    kde_calibration_error,
    kde_recalibrate,
    mean_label,
    spatially_smooth_label,
)
from semidice.calibration.keypoints import DEFAULT_BANDWIDTHS
from semidice.data.phantom import make_phantom
from semidice.losses.options import KeySource
from semidice.report.figures import COLOURS, new_axes

Row = Sequence[str]

NUM_FITTED, NUM_JUDGED = 48, 16
FIT, JUDGED = slice(0, NUM_FITTED), slice(NUM_FITTED, NUM_FITTED + NUM_JUDGED)
NUM_RATERS = 8
# keys of a calibrator; keys and cases of a batch for `Teacher`
NUM_KEYS, BATCH_KEYS, BATCH = 4096, 1024, 8


@dataclass(frozen=True)
class Cases:
    """True probability, one rater's label and the mean of all raters, each (N, 2, H, W)."""

    prob: Tensor
    label: Tensor
    mean: Tensor


@cache
def cases() -> Cases:
    # without habits, the raters of a case are independent draws from p*
    phantom = make_phantom(
        NUM_FITTED + NUM_JUDGED,
        size=(32, 32),
        num_raters=NUM_RATERS,
        seed=5,
        bias=0.0,
        offset=1.2,
        wobble=1.5,
        miss=0.0,
    )
    masks = phantom.masks
    return Cases(phantom.prob, mean_label(masks[:, :1], batched=True), mean_label(masks, batched=True))


def _both(lesion: Tensor) -> Tensor:
    return torch.stack([1 - lesion, lesion], dim=1)


def distorted(prob: Tensor, *, slope: float, shift: float) -> Tensor:
    """sigmoid(slope logit(p) + shift): overconfident above slope 1, over-segmenting above shift 0."""
    log_prob = prob.clamp(min=1e-6).log()
    return _both((slope * (log_prob[:, 1] - log_prob[:, 0]) + shift).sigmoid())


def dilated(prob: Tensor) -> Tensor:
    return _both(F.max_pool2d(prob[:, 1:], 3, stride=1, padding=1)[:, 0])


def eroded(prob: Tensor) -> Tensor:
    return _both(1 - F.max_pool2d(prob[:, :1], 3, stride=1, padding=1)[:, 0])


def blurred(prob: Tensor) -> Tensor:
    return spatially_smooth_label(prob, sigma=2.0, batched=True)


TEACHERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "overconfident": lambda prob: distorted(prob, slope=3.0, shift=0.0),
    "over-segmenting": lambda prob: distorted(prob, slope=1.0, shift=2.0),
    "over-segmenting and overconfident": lambda prob: distorted(prob, slope=2.0, shift=3.0),
    "under-segmenting and overconfident": lambda prob: distorted(prob, slope=2.0, shift=-3.0),
    "dilated": dilated,
    "blurred": blurred,
}


@cache
def teacher_prob(name: str) -> Tensor:
    return TEACHERS[name](cases().prob)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def error_to_truth(prob: Tensor) -> float:
    """Mean of |prob - p*| for the lesion over the test cases, in percent."""
    return 100 * float((prob - cases().prob[JUDGED])[:, 1].abs().mean())


@dataclass(frozen=True)
class Calibrated:
    """Probabilities in the test cases before and after calibration; by_both: temperature, then KDE."""

    before: Tensor
    by_temperature: Tensor
    by_kde: Tensor
    by_both: Tensor
    unweighted: Tensor
    temperature: float


@cache
def calibrated(name: str) -> Calibrated:
    prob, label = teacher_prob(name), cases().label
    scaling = TemperatureScaling().fit(prob[FIT], label[FIT])
    scaled = scaling.calibrate(prob)
    kde = KDECalibrator(num_keys=NUM_KEYS).fit(prob[FIT], label[FIT])
    kde_of_scaled = KDECalibrator(num_keys=NUM_KEYS).fit(scaled[FIT], label[FIT])
    keys = draw_keys(prob[FIT], label[FIT], NUM_KEYS, generator=_seeded(0))
    unweighted = kde_recalibrate(prob[JUDGED], keys.unweighted(), bandwidth=kde.bandwidth)
    return Calibrated(
        before=prob[JUDGED],
        by_temperature=scaled[JUDGED],
        by_kde=kde.calibrate(prob[JUDGED]),
        by_both=kde_of_scaled.calibrate(scaled[JUDGED]),
        unweighted=unweighted,
        temperature=scaling.temperature,
    )


def calibrator_rows() -> list[Row]:
    """Error to p* of each teacher before and after calibration; the lowest error of each row is bold."""
    rows: list[Row] = [
        ["teacher", "uncalibrated", "temperature", "KDE", "temperature, then KDE", "KDE, keys unweighted"]
    ]
    for name in TEACHERS:
        result = calibrated(name)
        probs = (result.before, result.by_temperature, result.by_kde, result.by_both, result.unweighted)
        errors = [error_to_truth(prob) for prob in probs]
        rows.append([name, *(_bold(f"{error:.2f}", error == min(errors)) for error in errors)])
    return rows


def _bold(text: str, lowest: bool) -> str:
    return f"**{text}**" if lowest else text


@cache
def key_count_errors() -> dict[int, float]:
    """Error to p* of the over-segmenting teacher after KDE, for each number of keys."""
    prob, label = teacher_prob("over-segmenting"), cases().label
    found = {}
    for num_keys in (256, 512, 1024, 2048, 4096, 8192):
        kde = KDECalibrator(num_keys=num_keys).fit(prob[FIT], label[FIT])
        found[num_keys] = error_to_truth(kde.calibrate(prob[JUDGED]))
    return found


def key_count_rows() -> list[Row]:
    before = error_to_truth(teacher_prob("over-segmenting")[JUDGED])
    errors = key_count_errors()
    return [
        ["keys", "none", *map(str, errors)],
        ["error to p*", f"{before:.2f}", *(f"{error:.2f}" for error in errors.values())],
    ]


@cache
def batchwise_error(name: str, *, keys_from: KeySource, reweight_keys: bool = True) -> float:
    """Error to p* of `Teacher`, with keys from each batch, calibrated near boundaries and errors."""
    teacher = Teacher(
        nn.Identity(),
        TeacherCalibration(
            "kde", bandwidth=1e-2, num_keys=BATCH_KEYS, keys_from=keys_from, reweight_keys=reweight_keys
        ),
        activation="none",
        generator=_seeded(0),
    )
    prob, label = teacher_prob(name)[JUDGED], cases().label[JUDGED]
    batches = zip(prob.split(BATCH), label.split(BATCH), strict=True)
    return error_to_truth(torch.cat([teacher(*batch) for batch in batches]))


def batchwise_rows() -> list[Row]:
    header = [
        "uncalibrated",
        "keys of the region (default)",
        "keys of the batch",
        "the same, unweighted (paper)",
    ]
    rows: list[Row] = [["teacher", *header]]
    for name in TEACHERS:
        errors = (
            batchwise_error(name, keys_from="region"),
            batchwise_error(name, keys_from="batch"),
            batchwise_error(name, keys_from="batch", reweight_keys=False),
        )
        before = error_to_truth(teacher_prob(name)[JUDGED])
        rows.append([name, f"{before:.2f}", *(f"{error:.2f}" for error in errors)])
    return rows


@cache
def bandwidth_errors() -> list[tuple[float, float, float]]:
    """Bandwidth, leave-one-out log-likelihood and error to p* for the over-segmenting teacher."""
    prob, label = teacher_prob("over-segmenting"), cases().label
    tried = DEFAULT_BANDWIDTHS[::2]
    choice = choose_bandwidth(
        prob[FIT], label[FIT], bandwidths=tried, num_points=NUM_KEYS, generator=_seeded(0)
    )
    found = []
    for bandwidth, log_likelihood in zip(tried, choice.log_likelihood, strict=True):
        kde = KDECalibrator(num_keys=NUM_KEYS, bandwidth=bandwidth).fit(prob[FIT], label[FIT])
        found.append((bandwidth, log_likelihood, error_to_truth(kde.calibrate(prob[JUDGED]))))
    return found


def bandwidth_rows() -> list[Row]:
    table = bandwidth_errors()
    best = max(log_likelihood for _, log_likelihood, _ in table)
    rows: list[Row] = [["bandwidth", "log-likelihood, leave-one-out", "error to p*"]]
    for bandwidth, log_likelihood, error in table:
        cells = f"{bandwidth:.1e}", f"{log_likelihood:.4f}", f"{error:.2f}"
        rows.append([_bold(cell, log_likelihood == best) for cell in cells])
    return rows


@dataclass(frozen=True)
class Reliability:
    """Mean probability, mean label and share of voxels of each bin that is not empty."""

    prob: Tensor
    label: Tensor
    share: Tensor

    def error(self) -> float:
        """Mean over voxels of |mean label - mean probability| of the bin, in percent."""
        return 100 * float((self.share * (self.label - self.prob).abs()).sum())


def reliability(prob: Tensor, label: Tensor, num_bins: int) -> Reliability:
    """Lesion probabilities and labels in bins of equal width."""
    prob, label = (side[:, 1].flatten().double() for side in (prob, label))
    bin_of = (prob * num_bins).long().clamp(max=num_bins - 1)
    zeros = torch.zeros(num_bins, dtype=torch.float64)
    count, prob, label = (zeros.index_add(0, bin_of, side) for side in (torch.ones_like(prob), prob, label))
    kept = count > 0
    return Reliability(prob[kept] / count[kept], label[kept] / count[kept], count[kept] / count.sum())


@dataclass(frozen=True)
class BiasAndError:
    """|E[p* - f]|, and three estimates of E|E[y|f] - f|: with p* for y, from raters in bins, by KDE (%)."""

    bias: float
    from_truth: float
    from_raters: float
    by_kde: float = float("nan")


def bias_and_error(prob: Tensor, *, kde: bool = False) -> BiasAndError:
    truth, label = cases().prob, cases().mean
    from_truth, from_raters = (reliability(prob, side, 100).error() for side in (truth, label))
    bias = 100 * abs(float((truth.double() - prob.double())[:, 1].mean()))
    if not kde:
        return BiasAndError(bias, from_truth, from_raters)
    bandwidth = choose_bandwidth(prob, label, num_points=BATCH_KEYS, generator=_seeded(0)).bandwidth
    keys = draw_keys(prob, label, BATCH_KEYS, generator=_seeded(1))
    error = kde_calibration_error(prob, label, bandwidth=bandwidth, kind="marginal", keys=keys)
    return BiasAndError(bias, from_truth, from_raters, 100 * float(error))


def bias_rows() -> list[Row]:
    rows: list[Row] = [
        [
            "teacher",
            "bias, needs p*",
            "calibration error, p* for y",
            "from raters, 100 bins",
            "from raters, `kde_calibration_error`",
        ]
    ]
    for name in TEACHERS:
        found = bias_and_error(teacher_prob(name), kde=True)
        numbers = (found.bias, found.from_truth, found.from_raters, found.by_kde)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    return rows


def many_distortions() -> dict[str, list[BiasAndError]]:
    """Bias and calibration error for a grid of distorted logits, and for spatial distortions."""
    prob = cases().prob
    grid = [
        bias_and_error(distorted(prob, slope=slope, shift=shift))
        for slope in (0.5, 1.0, 2.0, 3.0)
        for shift in (-2.0, -1.0, 0.0, 1.0, 2.0)
    ]
    space = [bias_and_error(distort(prob)) for distort in (dilated, eroded, blurred)]
    return {"logit slope and shift": grid, "dilated, eroded, blurred": space}


def draw_bias_bound() -> Figure:
    """The bias of each distorted teacher against its calibration error; no point is above the diagonal."""
    figure, axes = new_axes(width=5.6, height=4.6)
    distortions = many_distortions()
    limit = 1.05 * max(point.from_truth for points in distortions.values() for point in points)
    axes.fill_between([0, limit], [0, limit], limit, color="0.88", zorder=0)
    axes.plot([0, limit], [0, limit], color="0.3", linewidth=1.2)
    axes.annotate("no teacher can be here", (0.35 * limit, 0.72 * limit), color="0.3", ha="center")
    styles = (("o", COLOURS[1]), ("s", COLOURS[0]))
    for (name, points), (marker, colour) in zip(distortions.items(), styles, strict=True):
        axes.plot(
            [point.from_truth for point in points],
            [point.bias for point in points],
            linestyle="",
            marker=marker,
            color=colour,
            fillstyle="none",
            clip_on=False,
            label=name,
        )
    axes.set(
        xlabel="calibration error E|E[y|f] − f| (%)",
        ylabel="bias |E[p* − f]| (%)",
        title="The bias never exceeds the calibration error",
        xlim=(0, limit),
        ylim=(0, limit),
        aspect="equal",
    )
    axes.legend(loc="lower right", framealpha=1)
    return figure


def draw_reliability() -> Figure:
    """An over-segmenting teacher before and after calibration: reliability (top) and error to p* (bottom)."""
    result = calibrated("over-segmenting")
    shown = {
        "before": result.before,
        f"temperature scaling, T = {result.temperature:.2f}": result.by_temperature,
        "kernel density": result.by_kde,
    }
    figure, first = new_axes(width=7.4, height=5.0)
    first.remove()
    rows = figure.subplots(2, 3, height_ratios=[1.1, 1])
    raters, truth = cases().mean[JUDGED], cases().prob[JUDGED]
    # a lesion of middle size
    case = int(truth[:, 1].sum((1, 2)).argsort()[len(truth) // 2])
    window = slice(6, 26), slice(6, 28)
    for number, (title, prob) in enumerate(shown.items()):
        axes: Axes = rows[0, number]
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=4, alpha=0.5, label="calibrated")
        bins = reliability(prob, raters, 10)
        axes.plot(bins.prob, bins.label, "o-", color=COLOURS[0], fillstyle="none", label="8 raters")
        bins = reliability(prob, truth, 10)
        axes.plot(bins.prob, bins.label, "--", color=COLOURS[1], label="p*")
        axes.set_title(f"{title}\nerror to p* {error_to_truth(prob):.2f} %", fontsize=9)
        axes.set_xlabel("predicted probability", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        below: Axes = rows[1, number]
        below.set_axis_off()
        picture = below.imshow(
            (prob - truth)[case, 1][window].numpy(),
            cmap="RdBu_r",
            vmin=-0.5,
            vmax=0.5,
            interpolation="nearest",
        )
        below.contour(truth[case, 1][window].numpy(), levels=[0.5], colors="0.2", linewidths=1)
    rows[0, 0].set_ylabel("share of lesion in the bin", fontsize=9)
    rows[0, 0].legend(loc="upper left", fontsize=7.5)
    bar = figure.colorbar(picture, ax=list(rows[1]), shrink=0.9, pad=0.01)
    bar.set_label("prediction − p*", fontsize=9)
    return figure


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "reliability": draw_reliability,
    "bias_bound": draw_bias_bound,
}
TABLES: Mapping[str, Callable[[], list[Row] | None]] = {
    "calibrators": calibrator_rows,
    "keys": batchwise_rows,
    "num_keys": key_count_rows,
    "bandwidths": bandwidth_rows,
    "bias": bias_rows,
}
