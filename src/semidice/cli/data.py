"""Where to begin: `semidice demo`, `semidice prepare` and `semidice check`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..console import new_console
from ..errors import UserError
from .application import PreparedDataset, command, parsed_size

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Layout of the raw data: folder, nnunet, dicom, qubiq, lits, kits or phantom.",
    ),
]


@command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for data, runs and figures.")] = Path(
        "demo_out"
    ),
    cases: Annotated[int, typer.Option(min=10, help="Number of phantom images.")] = 80,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 120,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 2,
) -> None:
    """Compare four methods on simulated images in a few minutes.

    The methods differ in label and loss. They are cross-validated on phantoms, for which the true probability
    of each voxel is known. Prints tables of scores with significance marks, of the rules that make masks, and
    of intervals of volumes; writes a report page. After an interrupt, the
    same command continues.

    Example: **semidice demo -o demo_out**
    """
    from ..demo import run_demo

    run_demo(out, new_console(), num_cases=cases, epochs=epochs, num_folds=folds)


@command()
def prepare(
    source: Source,
    paths: Annotated[list[Path], typer.Argument(metavar="[RAW_DIR] OUT_DIR", help="phantom: only OUT_DIR.")],
    task: Annotated[
        list[str] | None, typer.Option(help="QUBIQ: only this task, such as prostate_task1. Repeatable.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Resize to ROWSxCOLUMNS, such as 256x256; raw: keep the size.")
    ] = None,
    window: Annotated[
        tuple[float, float] | None, typer.Option(help="Raw values that become 0 and 1, such as -60 140.")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(help="How to cut volumes: none, all slices, or foreground slices only.")
    ] = None,
    ignore_placement: Annotated[
        bool, typer.Option("--ignore-placement", help="Do not check that headers align masks and images.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option(help="Skip scans that have problems.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Number of threads or processes. Default: one per CPU where that pays."),
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="phantom: number of images.")] = 60,
    raters: Annotated[int, typer.Option(min=1, help="phantom: number of raters.")] = 4,
    classes: Annotated[int, typer.Option(min=2, help="phantom: number of classes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="phantom: random seed.")] = 0,
) -> None:
    """Check raw scans and raters' masks, and write them as a dataset: arrays and a manifest.

    Your own folder contains images/CASE and raters/NAME/CASE, or masks/CASE, as PNG, TIFF or NIfTI; several
    channels may be files images/CASE_0000, CASE_0001, ... A file cases.csv with columns case and patient is
    optional. A raw nnU-Net dataset needs no changes: one file imagesTr/CASE_0000 per channel, and
    labelsTr/CASE, or ratersTr/NAME/CASE of several raters; a task of the Decathlon is read in the same way.
    dicom finds CT or MR series, and a DICOM segmentation (SEG) of each rater, in any folders.
    After an interrupt, the same command continues.

    Example: **semidice prepare folder my_scans data --size 256x256**
    """
    from ..data.phantom import PhantomOptions
    from ..data.prepare import run_prepare

    image_size = _size(size)
    expected = ["OUT_DIR"] if source == "phantom" else ["RAW_DIR", "OUT_DIR"]
    if len(paths) != len(expected):
        raise UserError(
            f"{source} needs {' '.join(expected)}; got {len(paths)} folders: {' '.join(map(str, paths))}"
        )
    raw: Path | PhantomOptions = paths[0]
    if source == "phantom":
        phantom_size = image_size if isinstance(image_size, tuple) else (64, 64)
        raw, image_size = PhantomOptions(cases, phantom_size, raters, classes, seed), None
    if slices not in (None, "none", "all", "foreground"):
        raise UserError(f"--slices must be one of none, all, foreground; got {slices!r}")
    chosen: dict[str, Any] = {
        "size": image_size,
        "window": window,
        "slices": slices,
        "ignore_placement": ignore_placement,
    }
    overrides = {name: value for name, value in chosen.items() if value}
    if image_size == "raw":
        overrides["size"] = None
    run_prepare(
        source,
        raw,
        paths[-1],
        console=new_console(),
        tasks=task or (),
        overrides=overrides,
        skip_bad=skip_bad,
        workers=workers,
    )


def _size(text: str | None) -> tuple[int, int] | Literal["raw"] | None:
    if text is None or text == "raw":
        return text  # type: ignore[return-value]
    return parsed_size(text, others=", or raw")


@command()
def check(
    dataset: PreparedDataset,
    sheet: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="PNG with the outlines of all raters. Default: DATASET_check.png."),
    ] = None,
) -> None:
    """Verify a prepared dataset, show its content and the agreement of its raters, and draw an overview.

    Checks hashes, shapes, value ranges, empty masks, and images that two patients share. The exit code is 1
    if a problem is found.

    Example: **semidice check data**
    """
    from ..report.check_command import run_check

    run_check(dataset, sheet=sheet, console=new_console())
