"""Tables and figures of docs/labels.md: each label maker on phantoms with a known true probability p*.

The error of a label is the mean over all voxels of |label - p*| for the lesion, in percent, and the mean over
`NUM_PANELS` panels of raters with `CASES` cases each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from semidice import (
    boundary_smooth_label,
    dice_weighted_label,
    majority_label,
    mean_label,
    random_rater_label,
    smooth_label,
    spatially_smooth_label,
    staple_label,
)
from semidice.data.phantom import make_phantom
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.report.check import check_dataset
from semidice.report.figures import COLOURS, LINES, MARKERS, draw_outlines, new_axes, new_figure

Maker = Callable[[Tensor], Tensor]
Row = Sequence[str]

NUM_PANELS, CASES, MAX_RATERS = 10, 6, 12
RATER_COUNTS = (1, 2, 3, 4, 6, 9, 12)
LIDC = Path(__file__).parent.parent.parent / "shared" / "data" / "lidc"


def _smoothed(smoothing: Callable[..., Tensor], maker: Callable[..., Tensor], **options: float) -> Maker:
    def make(masks: Tensor) -> Tensor:
        return smoothing(maker(masks, batched=True), batched=True, **options)

    return make


MAKERS: Mapping[str, Maker] = {
    "random rater": partial(random_rater_label, generator=0, batched=True),
    "majority": partial(majority_label, batched=True),
    "mean": partial(mean_label, batched=True),
    "Dice-weighted": partial(dice_weighted_label, batched=True),
    "STAPLE": partial(staple_label, batched=True),
    "majority, smoothed, eps 0.1": _smoothed(smooth_label, majority_label, eps=0.1),
    "majority, boundary-smoothed": _smoothed(boundary_smooth_label, majority_label),
    "majority, spatially smoothed, σ 1": _smoothed(spatially_smooth_label, majority_label, sigma=1.0),
    "majority, spatially smoothed, σ 2": _smoothed(spatially_smooth_label, majority_label, sigma=2.0),
    "mean, spatially smoothed, σ 1": _smoothed(spatially_smooth_label, mean_label, sigma=1.0),
}
# A random rater has the error of one rater, and the error of label smoothing is too large for the axes.
DRAWN = (
    "majority",
    "mean",
    "Dice-weighted",
    "STAPLE",
    "majority, spatially smoothed, σ 1",
    "mean, spatially smoothed, σ 1",
)


def _alike(seed: int) -> tuple[Tensor, Tensor]:
    phantom = make_phantom(CASES, num_raters=MAX_RATERS, seed=seed, miss=0.0)
    return phantom.masks, phantom.prob


def _overlooking(seed: int) -> tuple[Tensor, Tensor]:
    phantom = make_phantom(CASES, num_raters=MAX_RATERS, seed=seed, miss=0.2)
    return phantom.masks, phantom.prob


def _overlooking_is_a_mistake(seed: int) -> tuple[Tensor, Tensor]:
    # a seed gives the same lesions for every `miss`
    return _overlooking(seed)[0], _alike(seed)[1]


def _careless(seed: int) -> tuple[Tensor, Tensor]:
    masks, prob = _alike(seed)
    careless = make_phantom(
        CASES, num_raters=MAX_RATERS, seed=seed, miss=0.0, bias=0.0, offset=3.0, wobble=3.0
    )
    chance = torch.rand(masks.shape[:2], generator=torch.Generator().manual_seed(seed))
    return torch.where((chance < 0.25)[:, :, None, None], careless.masks, masks), prob


# each model returns the raters' masks of one panel and the probability that a label should equal
RATER_MODELS: Mapping[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "raters alike": _alike,
    "20 % overlook it, p* counts that": _overlooking,
    "20 % overlook it, a mistake": _overlooking_is_a_mistake,
    "25 % of drawings careless": _careless,
}


@cache
def label_errors(model: str, num_raters: int) -> dict[str, float]:
    """Error in percent of every maker with `num_raters` raters."""
    total = dict.fromkeys(MAKERS, 0.0)
    for seed in range(NUM_PANELS):
        masks, prob = _panel(model, seed)
        for name, make in MAKERS.items():
            error = (make(masks[:, :num_raters]) - prob)[:, 1].abs().mean()
            total[name] += 100 * float(error) / NUM_PANELS
    return total


@cache
def _panel(model: str, seed: int) -> tuple[Tensor, Tensor]:
    return RATER_MODELS[model](seed)


def label_error_rows() -> list[Row]:
    """One row per maker, one column per rater model, for four raters; the lowest of a column is bold."""
    errors = {model: label_errors(model, 4) for model in RATER_MODELS}
    rows: list[Row] = [["label of 4 raters", *RATER_MODELS]]
    for name in MAKERS:
        cells = []
        for by_maker in errors.values():
            text = f"{by_maker[name]:.2f}"
            cells.append(f"**{text}**" if by_maker[name] == min(by_maker.values()) else text)
        rows.append([name, *cells])
    return rows


def lidc_rows() -> list[Row] | None:
    """The agreement that `semidice check` prints for the LIDC slices; None if the data are missing."""
    if not LIDC.is_dir():
        return None
    with TemporaryDirectory() as folder:
        prepared = Path(folder) / "lidc"
        (raw,) = find_datasets("folder", LIDC)
        prepare_dataset(raw, prepared, workers=1)
        found = check_dataset(prepared)
    majority, others = found.rater_agreement(), found.agreement_with_others().nanmean(0)
    rows: list[Row] = [["rater", "cases", "Dice to majority", "Dice to others"]]
    for number, rater in enumerate(found.dataset.manifest.raters):
        seen = int((~found.agreement[:, number].isnan()).sum())
        rows.append([rater, str(seen), f"{majority[number]:.3f}", f"{others[number]:.3f}"])
    rows.append(["mean", "", f"{majority.mean():.3f}", f"{others.mean():.3f}"])
    return rows


def draw_makers() -> Figure:
    """One phantom lesion: image, five raters, p*, and the label of each maker."""
    phantom = make_phantom(
        1, size=(96, 96), num_raters=5, seed=18, bias=1.2, offset=0.9, wobble=1.2, miss=0.0
    )
    titles = {
        "majority": "majority",
        "mean": "mean",
        "Dice-weighted": "Dice-weighted",
        "STAPLE": "STAPLE",
        "majority, smoothed, eps 0.1": "smoothed, eps 0.1",
        "majority, boundary-smoothed": "boundary-smoothed",
        "majority, spatially smoothed, σ 2": "spatially, σ 2",
    }
    labels = {"true probability p*": phantom.prob[0, 1]}
    labels |= {title: MAKERS[name](phantom.masks)[0, 1] for name, title in titles.items()}
    return draw_labels(phantom.image[0, 0], phantom.masks[0], labels)


def draw_labels(image: Tensor, masks: Tensor, labels: Mapping[str, Tensor], *, columns: int = 5) -> Figure:
    """The image (H, W), the outlines of the masks (R, H, W), and the foreground (H, W) of each label.

    All are cropped to the foreground. A rater who drew nothing has no outline.
    """
    window = _window(masks, labels)
    rows = -(-(2 + len(labels)) // columns)
    figure = new_figure(width=1.75 * columns + 0.6, height=1.98 * rows)
    panels: Sequence[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.set_axis_off()
    for axes, title in zip(panels, ("image", f"outlines of {len(masks)} raters"), strict=False):
        axes.imshow(image[window].numpy(), cmap="gray", interpolation="nearest")
        axes.set_title(title, fontsize=9)
    draw_outlines(panels[1], masks[:, window[0], window[1]].numpy())
    picture = None
    for axes, (title, label) in zip(panels[2:], labels.items(), strict=False):
        picture = axes.imshow(label[window].numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9)
    if picture is not None:
        bar = figure.colorbar(picture, ax=panels, shrink=0.7, aspect=30, pad=0.01)
        bar.set_label("probability of lesion", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    return figure


def _window(masks: Tensor, labels: Mapping[str, Tensor], margin: float = 0.25) -> tuple[slice, slice]:
    """Rows and columns of all voxels that a rater drew or whose label is above 0.5, with a margin."""
    drawn = masks.any(0)
    for label in labels.values():
        drawn = drawn | (label > 0.5)
    if not bool(drawn.any()):
        return slice(None), slice(None)
    bounds = []
    for other_axis, length in ((1, drawn.shape[0]), (0, drawn.shape[1])):
        numbers = drawn.any(other_axis).nonzero().flatten()
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        border = max(2, round(margin * (last - first)))
        bounds.append(slice(max(0, first - border), min(length, last + border)))
    return bounds[0], bounds[1]


def draw_label_errors() -> Figure:
    """Error of each maker's label against the number of raters, one panel per rater model."""
    figure, first = new_axes(width=6.8, height=5.6)
    first.remove()
    panels: Sequence[Axes] = list(figure.subplots(2, 2, sharex=True, sharey=True).flat)
    for axes, (title, model) in zip(panels, _TITLES.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        errors = [label_errors(model, count) for count in RATER_COUNTS]
        for name, colour, line, marker in zip(DRAWN, COLOURS, LINES, MARKERS, strict=True):
            axes.plot(
                RATER_COUNTS,
                [by_maker[name] for by_maker in errors],
                color=colour,
                linestyle=line,
                marker=marker,
                fillstyle="none",
                label=name,
            )
        axes.set_title(title, fontsize=10)
        axes.set(xticks=RATER_COUNTS, ylim=(0, 3.4))
    for axes in panels[2:]:
        axes.set_xlabel("raters")
    for axes in (panels[0], panels[2]):
        axes.set_ylabel("mean |label − p*| (%)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


_TITLES = {
    "Raters alike: they differ at the edge alone": "raters alike",
    "20 % overlook the lesion, and p* counts that": "20 % overlook it, p* counts that",
    "20 % overlook the lesion, by mistake": "20 % overlook it, a mistake",
    "25 % of the drawings are careless": "25 % of drawings careless",
}

FIGURES: Mapping[str, Callable[[], Figure]] = {"label_makers": draw_makers, "label_errors": draw_label_errors}
TABLES: Mapping[str, Callable[[], list[Row] | None]] = {
    "makers": label_error_rows,
    "lidc": lidc_rows,
}
