"""How far raters agree, from a folder of what they drew: FOLDER/raters/NAME/CASE.png.

A mask is a PNG in which any pixel above 0 is lesion (in colour: any channel; transparency is not looked at).
Cases are matched by file name; a rater who has no file for a case did not look at it, which is not the same
as an empty mask. A case that one rater alone looked at says nothing about agreement and is left out.
Dice of each mask against the majority of its case and against the other raters: `labels.rater_agreement`.
Left out: class maps, volumes, and the majority without the rater who is compared with it.
"""

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float32
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .data.listing import natural_order, visible
from .metrics.agreement import BATCH_SIZE, AgreementBatches, drawn_voxels
from .progress import counting_bar
from .rundir import whole_file

_BATCH = BATCH_SIZE


@dataclass(frozen=True)
class FolderAgreement:
    """Dice scores of the cases that two raters or more looked at; NaN where a rater did not.

    majority: against the majority of the case, to which the rater belongs. pairwise: against each rater.
    num_alone: how many further cases one rater alone looked at.
    """

    cases: tuple[str, ...]
    raters: tuple[str, ...]
    majority: Float32[Tensor, "N R"]
    pairwise: Float32[Tensor, "N R R"]
    num_alone: int

    def others(self) -> Float32[Tensor, "N R"]:
        """Mean Dice of each rater against the others of the case; NaN for an absent rater."""
        return self._pairs().nanmean(2)

    def mean_pairwise(self) -> float:
        """Mean Dice over all pairs of masks of one case, in all cases."""
        return float(self._pairs().nanmean())

    def _pairs(self) -> Float32[Tensor, "N R R"]:
        oneself = torch.eye(len(self.raters), dtype=torch.bool)
        return self.pairwise.masked_fill(oneself, torch.nan)


def folder_agreement(
    folder: Path, *, on_case: Callable[[int, int], object] = lambda _, __: None
) -> FolderAgreement:
    """Agreement of the raters in `folder`/raters; a ValueError that names the file, case or folder if not.

    on_case(done, total) is called after each case that was read. Memory is that of a batch of masks.
    """
    raters, paths = find_masks(folder)
    shared = {case: by_rater for case, by_rater in paths.items() if len(by_rater) > 1}
    if not shared:
        raise ValueError(
            f"no case in {folder / 'raters'} was looked at by two raters: "
            f"cases are matched by file name, and {len(paths)} names occur once"
        )
    num_cases, num_raters = len(shared), len(raters)
    batches = AgreementBatches(num_cases, num_raters, batch_size=_BATCH)
    for row, (case, by_rater) in enumerate(shared.items()):
        read = _read_case(case, by_rater)
        nothing = np.zeros_like(next(iter(read.values())))
        masks = np.stack([read.get(rater, nothing) for rater in raters])
        batches.add(row, drawn_voxels(masks), present=np.array([rater in read for rater in raters]))
        on_case(row + 1, num_cases)
    scores = batches.finish()
    return FolderAgreement(
        tuple(shared), raters, scores.majority, scores.pairwise, num_alone=len(paths) - num_cases
    )


def find_masks(folder: Path) -> tuple[tuple[str, ...], dict[str, dict[str, Path]]]:
    """Names of the raters in `folder`/raters, and of each case the PNG of every rater who looked at it."""
    home = folder / "raters"
    if not home.is_dir():
        missing = f"it has no folder {home}" if folder.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"{missing}: raters' masks are looked for in {home}/NAME/CASE.png")
    names = [path.name for path in visible(home) if path.is_dir()]
    if len(names) < 2:
        found = f"found {names[0]!r} alone" if names else "found no folder"
        raise ValueError(f"agreement needs two raters or more, each a folder in {home}; {found}")
    paths: dict[str, dict[str, Path]] = {}
    for name in names:
        masks = [path for path in visible(home / name) if path.suffix.lower() == ".png"]
        if not masks:
            raise ValueError(f"rater {name!r} has no mask: looked for {home / name}/CASE.png")
        for path in masks:
            paths.setdefault(path.stem, {})[name] = path
    return tuple(names), {case: paths[case] for case in sorted(paths, key=natural_order)}


def read_mask(path: Path) -> Bool[np.ndarray, "H W"]:
    """True where a pixel of the PNG is above 0 in any channel but the alpha one."""
    try:
        with Image.open(path) as image:
            channels = len(image.getbands()) - (image.mode in ("LA", "PA", "RGBA", "La", "RGBa"))
            pixels = np.asarray(image)
    # Pillow has no common error for what it cannot read; a damaged PNG is a SyntaxError
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read {path} as a PNG: {error}") from error
    drawn: np.ndarray = pixels.reshape(*pixels.shape[:2], -1)[..., :channels].max(axis=2) > 0
    return drawn


def write_agreement(agreement: FolderAgreement, path: Path) -> None:
    """Write a row for each case and rater who looked at it; under its final name only once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    majority, others = agreement.majority.tolist(), agreement.others().tolist()
    with whole_file(path) as half_written, half_written.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["case", "rater", "majority_dice_score", "others_dice_score"])
        for number, case in enumerate(agreement.cases):
            for rater, ours, theirs in zip(agreement.raters, majority[number], others[number], strict=True):
                if not math.isnan(ours):
                    rows.writerow([case, rater, f"{ours:.6f}", f"{theirs:.6f}"])


def run_agreement(folder: Path, csv_path: Path | None, console: Console) -> None:
    """Read the masks behind a progress bar, print the table, and write the CSV if one is asked for."""
    with counting_bar(console, doing="reading masks", unit="cases") as progress:
        bar = progress.add_task("", total=None)
        agreement = folder_agreement(
            folder, on_case=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    console.print(agreement_table(agreement))
    if agreement.num_alone:
        words = f"left out, as one rater alone looked at it: {agreement.num_alone} of "
        console.print(f"{words}{len(agreement.cases) + agreement.num_alone} cases", highlight=False)
    if csv_path is not None:
        write_agreement(agreement, csv_path)
        console.print(f"wrote {csv_path}", highlight=False, soft_wrap=True)


def agreement_table(agreement: FolderAgreement) -> Table:
    """A row a rater: cases looked at, mean Dice against the majority and against the other raters."""
    table = Table(title=f"Agreement of {len(agreement.raters)} raters on {len(agreement.cases)} cases")
    table.add_column("rater")
    table.add_column("cases", justify="right")
    table.add_column("Dice to majority", justify="right")
    table.add_column("Dice to others", justify="right")
    seen = (~agreement.majority.isnan()).sum(0).tolist()
    majority, others = agreement.majority.nanmean(0), agreement.others().nanmean(0)
    for row, rater in enumerate(agreement.raters):
        table.add_row(rater, str(seen[row]), _shown(float(majority[row])), _shown(float(others[row])))
    table.add_section()
    table.add_row("mean over raters", "", _shown(float(majority.nanmean())), "")
    table.add_row("mean over pairs of masks", "", "", _shown(agreement.mean_pairwise()))
    return table


def _shown(score: float) -> str:
    return "-" if math.isnan(score) else f"{score:.3f}"


def _read_case(case: str, by_rater: Mapping[str, Path]) -> dict[str, np.ndarray]:
    masks = {rater: read_mask(path) for rater, path in by_rater.items()}
    if len({mask.shape for mask in masks.values()}) > 1:
        sizes = ", ".join(f"{rater} {mask.shape[1]} x {mask.shape[0]}" for rater, mask in masks.items())
        raise ValueError(f"case {case!r} has masks of different sizes: {sizes}; resample them to one grid")
    return masks
