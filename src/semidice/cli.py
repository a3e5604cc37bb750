"""The command line. Each command reads a folder, writes a folder and can be rerun alone.

What a command needs is imported when it runs, so that --help and shell completion answer at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__

app = typer.Typer(
    help="Train, distil and judge image segmentation with soft labels.\n\n"
    "A first tour: semidice demo. With data of your own: prepare, check, train, predict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


@contextmanager
def _reported(command: str) -> Iterator[None]:
    """What went wrong in one message and exit code 1; 130 when interrupted."""
    try:
        yield
    except ModuleNotFoundError as error:
        _fail(command, f"needs {error.name}; run: pip install 'semidice[train]'")
    except (ValueError, RuntimeError) as error:
        _fail(command, str(error))
    except OSError as error:
        name = error.filename2 or error.filename
        _fail(command, f"{name}: {error.strerror}" if name else str(error))
    except KeyboardInterrupt:
        how = "the same command with --resume" if command == "train" else "the same command"
        typer.echo(f"semidice {command}: interrupted; {how} goes on from here", err=True)
        raise typer.Exit(130) from None


def _fail(command: str, message: str) -> None:
    typer.echo(f"semidice {command}: {message}", err=True)
    raise typer.Exit(1) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"semidice {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for data, runs and figures.")] = Path(
        "demo_out"
    ),
    cases: Annotated[int, typer.Option(min=10, help="Phantom slices.")] = 80,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 120,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 2,
) -> None:
    """The paper's point in minutes: four labels and losses, cross-validated on phantoms, compared by case.

    Raters of the phantoms disagree by a probability that is known. Prints the table with significance marks,
    and writes overlays and reliability curves. Interrupted, the same command goes on.

    Example: **semidice demo -o demo_out**
    """
    with _reported("demo"):
        from .demo import run_demo

        run_demo(out, Console(), num_cases=cases, epochs=epochs, num_folds=folds)


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="qubiq, lits, kits, lidc, decathlon, nnunet, folder or phantom.", metavar="SOURCE"
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(help="RAW_DIR OUT_DIR; OUT_DIR alone for phantom.", metavar="[RAW_DIR] OUT_DIR"),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(help="Of QUBIQ, such as prostate_task1; may be given again. All if none."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Rows x columns of every image, such as 256x256; raw keeps the scan's.")
    ] = None,
    window: Annotated[
        tuple[float, float] | None, typer.Option(help="Raw values that become 0 and 1, such as -60 140.")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(help="What becomes of volumes: none, all, or foreground slices.")
    ] = None,
    ignore_placement: Annotated[
        bool,
        typer.Option("--ignore-placement", help="Take masks by shape alone, wherever headers put them."),
    ] = False,
    skip_bad: Annotated[bool, typer.Option(help="Leave out scans that have problems.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes; one for each CPU if left out.")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Slices of a phantom.")] = 60,
    raters: Annotated[int, typer.Option(min=1, help="Raters of a phantom.")] = 4,
    classes: Annotated[int, typer.Option(min=2, help="Classes of a phantom.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a phantom.")] = 0,
) -> None:
    """Turn raw scans and raters' masks into a dataset: checked arrays and a manifest.

    A folder of your own holds images/CASE and raters/NAME/CASE, or masks/CASE, as PNG, TIFF or NIfTI, and if
    you like cases.csv with columns case and patient. A raw dataset of nnU-Net is taken as it is, with
    imagesTr/CASE_0000, a file a channel, and labelsTr/CASE. Interrupted, the same command goes on.

    Example: **semidice prepare folder my_scans data --size 256x256**
    """
    with _reported("prepare"):
        from .data.phantom import PhantomOptions
        from .data.prepare import PrepareRequest, run_prepare

        phantom = None
        if source == "phantom":
            side = _size(None if size == "raw" else size) or (64, 64)
            phantom = PhantomOptions(
                num_cases=cases, num_raters=raters, num_classes=classes, seed=seed, size=side
            )
            size = None
        if len(paths) != (expected := 1 if source == "phantom" else 2):
            names = "OUT_DIR" if expected == 1 else "RAW_DIR OUT_DIR"
            raise ValueError(f"{source} needs {names}; got {len(paths)} folders")
        request = PrepareRequest(
            tasks=task or (),
            size="raw" if size == "raw" else _size(size),
            window=window,
            slices=_choice("--slices", slices, ("none", "all", "foreground")),  # type: ignore[arg-type]
            ignore_placement=ignore_placement,
            skip_bad=skip_bad,
            workers=workers,
            phantom=phantom,
        )
        run_prepare(source, paths[0], paths[-1], request, console=Console())


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"--size must be ROWSxCOLUMNS, such as 256x256, or raw; got {text!r}")
    return int(sides[0]), int(sides[1])


def _choice(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}; got {value!r}")
    return value


@app.command()
def check(
    dataset: Annotated[Path, typer.Argument(help="Folder that `semidice prepare` wrote.")],
    sheet: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="PNG with outlines of all raters; beside the dataset if left out."),
    ] = None,
) -> None:
    """Verify a prepared dataset, say what is in it and how far raters agree, and draw a contact sheet.

    Hashes, shapes, ranges, empty masks, and images that occur under two patients. Exit code 1 if anything is
    wrong.

    Example: **semidice check data**
    """
    with _reported("check"):
        from .report.check_command import run_check

        run_check(dataset, sheet=sheet, console=Console())


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped recipe, such as quick.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder; runs/NAME of the recipe if left out.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE over the recipe; may be given again.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with a run that is there.")] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Devices of each machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, or ddp for several processes.")] = "auto",
) -> None:
    """Train and cross-validate a recipe: every case is scored by the model that never saw its patient.

    Writes recipe, folds, logs, checkpoints, predictions and the table of scores. Killed at any moment,
    --resume ends with the weights of a run that was never stopped.

    Example: **semidice train quick --set data.dataset=data --set schedule.epochs=30 -o runs/first**
    """
    with _reported("train"):
        from .recipes import read_recipe
        from .recipes.grid import folder_name
        from .training.command import run_train

        resolved = read_recipe(recipe, overrides or ())
        run_train(
            resolved,
            out or Path("runs") / folder_name(resolved.name),
            Console(),
            resume=resume,
            accelerator=accelerator,
            devices=devices,
            nodes=nodes,
            strategy=strategy,
        )


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="A score of docs/metrics.md; may be given again.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help=".parquet or .csv file for the table.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="Where the dataset is now, if it has moved.")] = None,
) -> None:
    """Score a run again from its stored predictions, with other metrics if you like.

    Example: **semidice evaluate runs/first --metric dice_score --metric hausdorff_error_mm -o scores.csv**
    """
    with _reported("evaluate"):
        from .runs.evaluate import run_evaluate

        run_evaluate(run, metrics=metrics, out=out, dataset_path=dataset, console=Console())


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    inputs: Annotated[list[Path], typer.Argument(help="Images, NIfTI volumes, or folders of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for probabilities, masks and volumes.")],
    fold: Annotated[
        int | None, typer.Option(min=0, help="One fold's network; the mean of all folds if left out.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the foreground; the likeliest class if left out.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=64, help="Larger images are predicted in overlapping windows of this side.")
    ] = 1024,
    overlap: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of a window that the next covers.")
    ] = 0.25,
    batch_size: Annotated[int, typer.Option(min=1, help="Slices at a time.")] = 8,
    slice_axis: Annotated[
        int | None,
        typer.Option(min=0, max=2, help="Axis that counts the slices, if not that of the dataset."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Make again what is there.")] = False,
) -> None:
    """Predict new images or volumes: probabilities and masks on their own grid, and volumes in ml.

    NIfTI gives NIfTI with the input's affine, PNG gives PNG. Several channels are in one file, or in files
    CASE_0000, CASE_0001, ..., of which one brings the others. The volumes are also expected ones, from the
    probabilities. What is there already is skipped.

    Example: **semidice predict runs/first scan.nii.gz more_scans -o predictions**
    """
    with _reported("predict"):
        from .prediction.command import PredictOptions, run_predict

        options = PredictOptions(
            fold=fold,
            threshold=threshold,
            window=window,
            overlap=overlap,
            batch_size=batch_size,
            slice_axis=slice_axis,
            device=device,
            overwrite=overwrite,
        )
        run_predict(run, inputs, out, options, console=Console())


@app.command()
def compare(
    dataset: Annotated[Path, typer.Argument(help="Folder that `semidice prepare` wrote.")],
    recipes: Annotated[
        list[str],
        typer.Argument(help="Grid or recipe files, or names of shipped ones: labels, distillation."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the runs and tables.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE over all recipes; may be given again.")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Compare by this score; may be given again. All if none."),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Which label and loss serve my data, by how much, and is it real?

    Runs every recipe over the same folds, skipping what is finished, then compares them case by case: the
    best set of each score, and every pair with its confidence interval and p-value. A recipe that fails is
    reported and the others finish.

    Example: **semidice compare data labels -o comparison --set schedule.epochs=50**
    """
    with _reported("compare"):
        from .compare import run_compare
        from .recipes.grid import read_variants

        variants = read_variants(recipes, dataset=dataset, out=out, overrides=overrides or ())
        run_compare(variants, out, Console(), metrics=metrics, accelerator=accelerator)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Run folders, or a folder that compare wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page.")] = Path("report.html"),
    dataset: Annotated[Path | None, typer.Option(help="Where the dataset is now, if it has moved.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    max_cases: Annotated[int, typer.Option(min=1, help="Cases with pictures, best and worst first.")] = 100,
) -> None:
    """One page that answers the question: scores, significance, calibration, curves, and all cases to see.

    The page needs no network. Figures as PNG and SVG, and tables as CSV, Markdown and LaTeX, are written
    beside it.

    Example: **semidice report comparison -o report.html**
    """
    with _reported("report"):
        from .report.page import run_report
        from .runs.predictions import read_prediction

        run_report(
            paths,
            out,
            Console(),
            read_prediction=read_prediction,
            dataset=dataset,
            title=title,
            max_cases=max_cases,
        )


@app.command()
def reproduce(
    table: Annotated[
        str, typer.Argument(help="A table of the paper, as --list shows them, or all.", metavar="[TABLE]")
    ] = "all",
    data: Annotated[
        Path, typer.Option(help="Folder of prepared datasets: prostate_task1, ..., lits, kits.")
    ] = Path("data"),
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for runs and tables.")] = Path(
        "reproduce_out"
    ),
    show: Annotated[
        bool, typer.Option("--list", help="Show tables, number of runs and time; start nothing.")
    ] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the paper's 150 or 60.")] = None,
    folds: Annotated[int | None, typer.Option(min=1, help="Run the first so many folds.")] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="A dataset, such as kidney; may be given again.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE over all recipes; may be given again.")
    ] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """The paper's tables: run what is missing, print ours beside theirs, and say which conclusions hold.

    Datasets are looked for in --data, as `semidice prepare qubiq RAW data` and `semidice prepare lits RAW
    data/lits` make them. Interrupted, the same command goes on.

    Example: **semidice reproduce qubiq_labels --data data --task kidney --epochs 20**
    """
    with _reported("reproduce"):
        from .reproduce import run_reproduce

        run_reproduce(
            table,
            data,
            out,
            console=Console(),
            epochs=epochs,
            folds=folds,
            tasks=tasks or (),
            overrides=overrides or (),
            list_only=show,
            accelerator=accelerator,
        )
