"""The figure and the table of docs/decisions.md: what each rule decides, and which raters it suits."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from semidice.data.phantom import make_phantom
from semidice.decisions import decide
from semidice.decisions.expected import dice_of_first, nested_dice_of_likeliest
from semidice.labels import majority_label
from semidice.report.figures import COLOURS, LINES, new_figure, style_axes

Row = Sequence[str]
SHOWN = ("argmax", "dice", "nested")
RULES = ("argmax", "dice", "jaccard", "nested", "mix:0.5", "threshold:0.4", "threshold:0.6")
NUM_CASES, NUM_RATERS = 60, 12


@cache
def lesions() -> tuple[Float[Tensor, "N 2 H W"], Mapping[str, Bool[Tensor, "N R H W"]]]:
    """True probabilities of phantom lesions, and masks that follow them in four ways."""
    # without habits: 12 raters who share a habit by chance would favour large or small masks in every case
    phantom = make_phantom(NUM_CASES, num_raters=NUM_RATERS, seed=1, bias=0, offset=1.8, wobble=1.8)
    p = phantom.prob[:, 1:]
    generator = torch.Generator().manual_seed(0)
    voxels = torch.rand(NUM_CASES, NUM_RATERS, 64, 64, generator=generator)
    offsets = torch.rand(NUM_CASES, NUM_RATERS, 1, 1, generator=generator)
    return phantom.prob, {
        "independent voxels": voxels < p,
        "nested raters": offsets <= p,
        "raters of the phantom": phantom.masks.bool(),
        "their majority": majority_label(phantom.masks, batched=True)[:, 1:].bool(),
    }


def mean_dice(masks: Bool[Tensor, "N H W"], raters: Bool[Tensor, "N R H W"]) -> float:
    """Mean Dice of the masks against every rater, in percent."""
    common = (masks.unsqueeze(1) & raters).sum((2, 3))
    total = masks.sum((1, 2)).unsqueeze(1) + raters.sum((2, 3))
    return 100 * float(torch.where(total > 0, 2 * common / total.clamp_min(1), 1.0).double().mean())


@cache
def scores() -> dict[str, dict[str, float]]:
    """Mean Dice of each rule against the raters of each kind."""
    prob, raters = lesions()
    masks = {rule: decide(prob, rule)[:, 1] for rule in RULES}
    return {
        kind: {rule: mean_dice(mask, drawn) for rule, mask in masks.items()} for kind, drawn in raters.items()
    }


def best_rules(by_rule: Mapping[str, float]) -> set[str]:
    """The rules with the best score as the table shows it, to one decimal."""
    best = round(max(by_rule.values()), 1)
    return {rule for rule, score in by_rule.items() if round(score, 1) == best}


def scores_table() -> list[Row]:
    """One row per rule, one column per kind of raters, the best in bold."""
    table = scores()
    rows: list[Row] = [["rule", *table]]
    for rule in RULES:
        cells = [
            f"**{by_rule[rule]:.1f}**" if rule in best_rules(by_rule) else f"{by_rule[rule]:.1f}"
            for by_rule in table.values()
        ]
        rows.append([f"`{rule}`", *cells])
    return rows


def draw_decisions() -> Figure:
    """A lesion with the outlines of three rules, and the expected Dice against the threshold."""
    prob = lesions()[0][5:6]
    p = prob[0, 1]
    figure = new_figure(width=8.2, height=3.6)
    image, axes = figure.subplots(1, 2, width_ratios=(1, 1.5))
    shown = image.imshow(p.numpy(), cmap="gray", vmin=0, vmax=1)
    figure.colorbar(shown, ax=image, shrink=0.8, label="probability")
    ordered = p.flatten().double().sort(descending=True).values
    for (name, scores_of), colour, line in zip(
        (("independent voxels", dice_of_first), ("nested raters", nested_dice_of_likeliest)),
        COLOURS[3:],
        LINES,
        strict=False,
    ):
        axes.plot(
            ordered.numpy(), scores_of(ordered[None])[0, 1:].numpy(), color=colour, linestyle=line, label=name
        )
    for rule, colour, style in zip(SHOWN, COLOURS, LINES, strict=False):
        mask = decide(prob, rule)[0, 1]
        lowest = float(p[mask].min())
        image.contour(mask.double().numpy(), [0.5], colors=[colour], linestyles=[style], linewidths=1.5)
        axes.axvline(lowest, color=colour, linestyle=style, linewidth=1.2, label=f"{rule}: p ≥ {lowest:.2f}")
    image.set(xlim=(16, 52), ylim=(50, 14))
    image.set_axis_off()
    image.set_title("outlines of three rules")
    style_axes(axes)
    axes.set(
        xlabel="threshold", ylabel="expected Dice", xlim=(0, 1), ylim=(0, 1), title="which threshold is best"
    )
    axes.legend(loc="lower center", framealpha=1, fontsize=8)
    return figure


FIGURES: Mapping[str, Callable[[], Figure]] = {"decisions": draw_decisions}
TABLES: Mapping[str, Callable[[], list[Row]]] = {"rules_and_raters": scores_table}
