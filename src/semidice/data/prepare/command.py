"""`semidice prepare`: prepares every dataset of a source, with a progress bar and a summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ...console import counting_bar, say
from ..integrity import enumerated
from ..manifest import Slices
from ..phantom import PhantomOptions
from ..sources import find_datasets
from .dataset import Prepared, PrepareError, prepare_dataset
from .workers import Workers


@dataclass(frozen=True)
class PrepareRequest:
    """What a user chose; None stands for the value of the source.

    tasks: names of the QUBIQ datasets to prepare, all if empty. size "raw" keeps the size of the scans.
    workers: as in `prepare_dataset`. phantom: what to make, for the source phantom.
    """

    tasks: Sequence[str] = ()
    size: tuple[int, int] | Literal["raw"] | None = None
    window: tuple[float, float] | None = None
    slices: Slices | None = None
    ignore_placement: bool = False
    skip_bad: bool = False
    workers: int | None = None
    phantom: PhantomOptions | None = None

    def overrides(self) -> dict[str, Any]:
        """The options that replace those of the source."""
        chosen = {name: getattr(self, name) for name in ("size", "window", "slices", "ignore_placement")}
        overrides = {name: value for name, value in chosen.items() if value}
        return overrides | ({"size": None} if self.size == "raw" else {})


def run_prepare(
    source: str, raw_dir: Path, out_dir: Path, request: PrepareRequest, *, console: Console
) -> list[Prepared]:
    """Prepare every dataset that the source finds in `raw_dir`, and print a summary.

    A problem does not stop the other datasets: a PrepareError at the end holds all problems.
    """
    prepared: list[Prepared] = []
    problems: list[str] = []
    advice: list[str] = []
    with (
        Workers(request.workers) as pool,
        counting_bar(console, doing="preparing", unit="scans") as progress,
    ):
        bar = progress.add_task(f"{source}: looking through its files", total=None)
        datasets = find_datasets(
            source,
            raw_dir,
            tasks=request.tasks,
            phantom=request.phantom,
            on_file=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        progress.reset(bar, total=sum(len(raw.scans) for raw in datasets))
        num_before = 0
        for raw in datasets:
            progress.update(bar, description=raw.name or source, completed=num_before)
            try:
                dataset = prepare_dataset(
                    raw,
                    out_dir / raw.name,
                    overrides=request.overrides(),
                    skip_bad=request.skip_bad,
                    workers=pool,
                    on_scan=lambda _: progress.advance(bar),
                )
                prepared.append(dataset)
            except PrepareError as error:
                problems += [f"{raw.name}: {problem}" if raw.name else problem for problem in error.problems]
                advice.append(error.advice)
            except KeyboardInterrupt:
                say(progress.console, "stopped; the finished scans are kept: the same command continues")
                raise
            num_before += len(raw.scans)
    for dataset in prepared:
        _print_summary(dataset, console)
    if advice:
        raise PrepareError(problems, "\n".join(dict.fromkeys(advice)))
    return prepared


def _print_summary(prepared: Prepared, console: Console) -> None:
    manifest, path = prepared.manifest, prepared.path
    shapes = sorted({" x ".join(map(str, scan.shape)) for scan in manifest.scans})
    size = shapes[0] if len(shapes) == 1 else f"{len(shapes)} sizes"
    lines = [
        f"{path}: {_count(prepared.num_cases, 'case')} of {_count(prepared.num_patients, 'patient')}, "
        f"{_count(len(manifest.raters), 'rater')}, {size}, classes {', '.join(manifest.class_names)}"
    ]
    lines += prepared.notes
    cut = [scan for scan in manifest.scans if scan.slices is not None]
    if cut:
        num_slices = sum(len(scan.case_names()) for scan in cut)
        kept = ", those with foreground" if manifest.options.get("slices") == "foreground" else ""
        lines.append(
            f"{_count(len(cut), 'volume')} {'was' if len(cut) == 1 else 'were'} cut into "
            f"{_count(num_slices, 'slice')}{kept}: networks see slices, and scores are of whole volumes"
        )
    if prepared.already:
        lines.append("it was prepared already, with these options and from these files: nothing was changed")
    if prepared.num_continued:
        lines.append(f"{_count(prepared.num_continued, 'scan')} had been finished by an earlier run")
    if prepared.without_foreground:
        names = enumerated(prepared.without_foreground, "scan")
        lines.append(f"left out, because no slice has foreground: {names}")
    no_size = [scan.name for scan in manifest.scans if scan.affine is not None and scan.spacing_mm is None]
    if no_size:
        lines.append(
            f"warning: the header of {enumerated(no_size, 'scan')} has no voxel size: distances and volumes "
            "will be in voxels; to have mm and ml, write the size into the header and prepare again"
        )
    if manifest.options.get("size") and any(len(scan.shape) == 3 for scan in manifest.scans):
        lines.append("size was not applied: volumes keep their size unless --slices cuts them into slices")
    if prepared.num_unlabelled:
        lines.append(f"left out, because they have no mask: {_count(prepared.num_unlabelled, 'scan')}")
    lines += [f"left out: {problem}" for problem in prepared.left_out]
    lines.append(f"next: semidice check {path}")
    for line in lines:
        say(console, line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
