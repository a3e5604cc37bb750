"""The command line. Each command reads a folder and writes a folder, and can be run again on its own.

A command imports what it needs when it runs, so that --help and shell completion answer without delay.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import __version__
from .console import new_console

app = typer.Typer(
    help="Train, distil and evaluate image segmentation with soft labels.\n\n"
    "For a first try: semidice demo. With your own data: prepare, check, train, predict.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)

# arguments and options that several commands share, or that are long
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE: change an option of the recipe. Repeatable.")
]
Accelerator = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Layout of the raw data: qubiq, lits, kits, lidc, decathlon, nnunet, folder or phantom.",
    ),
]
PreparedDataset = Annotated[Path, typer.Argument(help="Folder written by `semidice prepare`.")]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--decide",
        metavar="RULE",
        help="Rule that makes masks: argmax, threshold:T, dice, jaccard, nested, mix:W, fitted. Repeatable.",
    ),
]
Interval = Annotated[
    float | None,
    typer.Option(
        metavar="LEVEL", help="Volumes with intervals that cover this share of raters, such as 0.9."
    ),
]
MovedDataset = Annotated[Path | None, typer.Option(help="Folder of the dataset, if it was moved.")]


@contextmanager
def _reported(command: str) -> Iterator[None]:
    """Print an error as one message and exit with code 1; with code 130 after an interrupt."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        extra = "monai" if package == "monai" else "train"
        _fail(command, f"needs {package}; run: pip install 'semidice[{extra}]'")
    except MemoryError as error:
        _fail(
            command, f"there is not enough memory: {error or 'close other programs, or use a smaller size'}"
        )
    except (ValueError, RuntimeError) as error:
        _fail(command, _said(error))
    except OSError as error:
        name = error.filename2 or error.filename
        if name and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            from .paths import write_error

            _fail(command, str(write_error(Path(name), error)))
        _fail(command, f"{name}: {error.strerror}" if name else str(error))
    except KeyboardInterrupt:
        again = "the same command with --resume" if command == "train" else "the same command"
        typer.echo(f"semidice {command}: interrupted; {again} continues from here", err=True)
        raise typer.Exit(130) from None


def _fail(command: str, message: str) -> None:
    typer.echo(f"semidice {command}: {message}", err=True)
    raise typer.Exit(1) from None


def _said(error: Exception) -> str:
    """The message of an error; what to do, if memory could not be had."""
    text = str(error)
    # PyTorch has a type of error for a GPU, but not for the CPU
    if "can't allocate memory" in text or type(error).__name__ == "OutOfMemoryError":
        text = "there is not enough memory: lower batch_size, augment.crop or the size of the images"
    return text


def _print_version(requested: bool) -> None:
    if requested:
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
    cases: Annotated[int, typer.Option(min=10, help="Number of phantom images.")] = 80,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 120,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation.")] = 2,
) -> None:
    """Compare four methods on simulated images in a few minutes.

    The methods differ in label and loss. They are cross-validated on phantoms, for which the true probability
    of each voxel is known. Prints tables of scores with significance marks, of the rules that make masks, and
    of intervals of volumes; writes overlays, reliability curves and a report page. After an interrupt, the
    same command continues.

    Example: **semidice demo -o demo_out**
    """
    with _reported("demo"):
        from .demo import run_demo

        run_demo(out, new_console(), num_cases=cases, epochs=epochs, num_folds=folds)


@app.command()
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
        int | None, typer.Option(min=0, help="Number of processes. Default: one per CPU.")
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
    labelsTr/CASE. After an interrupt, the same command continues.

    Example: **semidice prepare folder my_scans data --size 256x256**
    """
    with _reported("prepare"):
        from .data.phantom import PhantomOptions
        from .data.prepare import PrepareRequest, run_prepare

        phantom = None
        image_size = _size(size)
        if source == "phantom":
            phantom_size = image_size if isinstance(image_size, tuple) else (64, 64)
            phantom = PhantomOptions(cases, phantom_size, raters, classes, seed)
            image_size = None
        raw, out = _folders(source, paths)
        if slices not in (None, "none", "all", "foreground"):
            raise ValueError(f"--slices must be one of none, all, foreground; got {slices!r}")
        request = PrepareRequest(
            tasks=task or (),
            size=image_size,
            window=window,
            slices=slices,  # type: ignore[arg-type]
            ignore_placement=ignore_placement,
            skip_bad=skip_bad,
            workers=workers,
            phantom=phantom,
        )
        run_prepare(source, raw, out, request, console=new_console())


def _folders(source: str, paths: list[Path]) -> tuple[Path, Path]:
    """RAW_DIR and OUT_DIR; they are the same for phantoms."""
    expected = ["OUT_DIR"] if source == "phantom" else ["RAW_DIR", "OUT_DIR"]
    if len(paths) != len(expected):
        raise ValueError(
            f"{source} needs {' '.join(expected)}; got {len(paths)} folders: {' '.join(map(str, paths))}"
        )
    return paths[0], paths[-1]


def _size(text: str | None) -> tuple[int, int] | Literal["raw"] | None:
    if text is None or text == "raw":
        return text  # type: ignore[return-value]
    lengths = text.lower().split("x")
    if len(lengths) != 2 or not all(length.isdecimal() and int(length) > 0 for length in lengths):
        raise ValueError(f"--size must be ROWSxCOLUMNS, such as 256x256, or raw; got {text!r}")
    return int(lengths[0]), int(lengths[1])


@app.command()
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
    with _reported("check"):
        from .report.check_command import run_check

        run_check(dataset, sheet=sheet, console=new_console())


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="YAML file or name of a shipped recipe, such as auto or quick.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder. Default: runs/NAME, NAME from the recipe.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue an existing run.")] = False,
    accelerator: Accelerator = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Devices per machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, or ddp for several devices.")] = "auto",
) -> None:
    """Train and cross-validate a recipe. Each case is scored by a network that never saw its patient.

    Writes the recipe, folds, logs, checkpoints, predictions and a table of scores. A run can be stopped at
    any time; with --resume it ends with the same weights as a run that was never stopped.

    Example: **semidice train auto --set data.dataset=data --set schedule.epochs=30 -o runs/first**
    """
    with _reported("train"):
        from .recipes import read_recipe
        from .recipes.grid import folder_name
        from .training.command import run_train

        resolved = read_recipe(recipe, overrides or (), accelerator=accelerator)
        run_train(
            resolved,
            out or Path("runs") / folder_name(resolved.name),
            new_console(),
            resume=resume,
            accelerator=accelerator,
            devices=devices,
            nodes=nodes,
            strategy=strategy,
        )


@app.command()
def evaluate(
    run: Annotated[Path | None, typer.Argument(help="Run folder; none with --predictions.")] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(help="Folder of masks or probabilities that another tool made; needs --dataset."),
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="Name of a score, see docs/metrics.md. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write to this .parquet or .csv file, not to the run's table."),
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="scan, or slice: each slice on its own. Default: as in the recipe.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Of surface_dice_score, in mm; in voxels without spacing. Default: 1."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset that --predictions are of; of a run, if it was moved."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Method of --predictions in tables. Default: name of the folder.")
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Score --predictions although some scans have none.")
    ] = False,
    ignore_placement: Annotated[
        bool, typer.Option("--ignore-placement", help="Do not check that headers align --predictions.")
    ] = False,
    decide: Rules = None,
    interval: Interval = None,
) -> None:
    """Score the stored predictions of a run again, also with other metrics, or files of another tool.

    The scores are added to the table of the run. The slices of a volume are put together before they are
    scored. Files of --predictions, which need --dataset, have the names and shapes of the raw images:
    CASE.nii.gz or CASE.png with class numbers, or CASE.npz with probabilities (C, *space), as nnU-Net writes
    them.

    With --decide, only scores of masks are computed, by each rule and by argmax, and compared; fitted chooses
    the rule of each fold on the other folds. They are written to decisions.parquet of the run. With
    --interval, volumes.csv of the run gets the volume of every case, an interval, and the raters' volumes.

    Example: **semidice evaluate runs/first --metric dice_score --metric hausdorff_error_mm -o scores.csv**
    """
    with _reported("evaluate"):
        from .runs.decide import run_decide
        from .runs.evaluate import run_evaluate, run_evaluate_files

        _check_evaluated(run, predictions, dataset, unit, interval)
        options: Any = {"metrics": metrics, "out": out, "unit": unit, "tolerance": tolerance}
        options["console"] = new_console()
        if predictions is not None and dataset is not None:
            options |= {"name": name, "skip_missing": skip_missing, "ignore_placement": ignore_placement}
            run_evaluate_files(predictions, dataset, rules=decide or (), **options)
        elif run is not None and (decide or interval is not None):
            run_decide(run, rules=decide or (), interval=interval, dataset_path=dataset, **options)
        elif run is not None:
            run_evaluate(run, dataset_path=dataset, **options)


def _check_evaluated(
    run: Path | None, predictions: Path | None, dataset: Path | None, unit: str | None, interval: float | None
) -> None:
    """A ValueError if options of `evaluate` exclude each other, or one of them needs another."""
    if unit not in (None, "scan", "slice"):
        raise ValueError(f"--unit must be scan or slice; got {unit!r}")
    if (run is None) == (predictions is None):
        raise ValueError("name a run folder, or --predictions DIR --dataset DATA, and not both")
    if predictions is not None and dataset is None:
        raise ValueError("--predictions needs --dataset DATA, which has the raters' masks")
    if predictions is not None and interval is not None:
        raise ValueError("--interval needs a run: its folds tell how far intervals must be corrected")


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    by: Annotated[
        list[str] | None,
        typer.Option(help="temperature, vector, isotonic, beta, kde or all. Repeatable. Default: all."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Calibrator to save with the run, for predict. Default: the only one of --by."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the scores of each case to this .parquet or .csv file."),
    ] = None,
    dataset: MovedDataset = None,
) -> None:
    """Correct the probabilities of a trained run, and find out which calibrator does it best.

    Calibrators are fitted to the stored predictions, against the mean of the raters. Each fold is scored with
    the calibrators of the other folds. The one that is kept is fitted to all folds, and `semidice predict`
    uses it. With more than two classes kde takes long, and all leaves it out.

    Example: **semidice calibrate runs/first --keep isotonic**
    """
    with _reported("calibrate"):
        from .runs.calibration import run_calibrate

        run_calibrate(run, by=by or ("all",), keep=keep, out=out, dataset_path=dataset, console=new_console())


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    inputs: Annotated[list[Path], typer.Argument(help="Images, NIfTI volumes, or folders of them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for probabilities, masks and volumes.")],
    fold: Annotated[
        int | None, typer.Option(min=0, help="Use the network of one fold. Default: mean of all folds.")
    ] = None,
    flips: Annotated[
        bool | None,
        typer.Option("--flips/--no-flips", help="Mean over mirrored images. Default: as in the recipe."),
    ] = None,
    decide: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Rule that makes masks: argmax, threshold:T, dice, jaccard, nested, mix:W or fitted. "
            "Default: as in the recipe.",
        ),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="LEVEL", help="Add intervals that cover this share of raters, such as 0.9."),
    ] = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Also write a map of uncertainty, from 0 to 1.")
    ] = False,
    window: Annotated[
        int, typer.Option(min=64, help="Larger images are predicted in overlapping windows of this size.")
    ] = 1024,
    overlap: Annotated[
        float, typer.Option(min=0, max=0.9, help="Fraction of a window that the next window covers.")
    ] = 0.25,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of slices predicted at once.")] = 8,
    slice_axis: Annotated[
        int | None,
        typer.Option(min=0, max=2, help="Axis along which volumes are cut. Default: as in the dataset."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Use the calibrator of the run, if it has one.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Predict again where output files exist.")] = False,
) -> None:
    """Predict new images or volumes: probabilities and masks in the grid of the input, and volumes in ml.

    NIfTI input gives NIfTI output with the same affine; PNG input gives PNG output. Several channels are in
    one file, or in files CASE_0000, CASE_0001, ...: name any one of them. volumes.csv also has the expected
    volumes, computed from the probabilities, and with --interval where the volume of a rater would lie.
    Existing output is kept. `semidice evaluate RUN --decide fitted --interval 0.9` fits rule and intervals.

    Example: **semidice predict runs/first new_scans -o predictions**
    """
    with _reported("predict"):
        from .prediction.command import PredictOptions, run_predict

        options = PredictOptions(
            fold=fold,
            flips=flips,
            decide=decide,
            interval=interval,
            uncertainty=uncertainty,
            window=window,
            overlap=overlap,
            batch_size=batch_size,
            slice_axis=slice_axis,
            calibrate=calibrate,
            device=device,
            overwrite=overwrite,
        )
        run_predict(run, inputs, out, options, console=new_console())


@app.command()
def compare(
    dataset: PreparedDataset,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the runs and tables.")],
    recipes: Annotated[
        list[str] | None,
        typer.Argument(help="Grids and recipes: YAML files or shipped names, such as labels, distillation."),
    ] = None,
    overrides: Overrides = None,
    cases: Annotated[
        list[Path] | None,
        typer.Option(help="Also compare this table of `evaluate --predictions -o`. Repeatable."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Score to compare. Repeatable. Default: all scores."),
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also print the difference of every pair of methods.")
    ] = False,
    decide: Rules = None,
    interval: Interval = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Find out which label and loss are best on your data, by how much, and whether it is significant.

    Trains every recipe on the same folds; finished folds are kept. Then compares the recipes case by case,
    and prints the verdict and the mean of each method and score. Files in OUT also have the difference of
    each pair with confidence interval and p-value. If a recipe fails, the others continue.

    With --decide, every run is scored by each rule and by argmax, without another training, and the methods
    are NAME, RULE. With --interval, volumes.csv of each run gets the volumes of its cases.

    Example: **semidice compare data labels -o comparison --set schedule.epochs=50**
    """
    with _reported("compare"):
        from .compare import run_compare
        from .recipes.grid import read_variants

        if not recipes and not cases:
            raise ValueError("name a grid or recipe, such as labels, or tables of scores with --cases")
        variants = read_variants(
            recipes or (), dataset=dataset, out=out, overrides=overrides or (), accelerator=accelerator
        )
        run_compare(
            variants,
            out,
            new_console(),
            dataset=dataset,
            case_tables=cases or (),
            metrics=metrics,
            rules=decide or (),
            interval=interval,
            show_pairs=pairs,
            accelerator=accelerator,
        )


@app.command()
def report(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or a folder written by `semidice compare`.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write.")] = Path("report.html"),
    cases: Annotated[
        list[Path] | None,
        typer.Option(help="Also report this table of `evaluate --predictions -o`. Repeatable."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prepared dataset: without a run, or if it was moved since the training."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    max_cases: Annotated[
        int, typer.Option(min=1, help="Number of cases with images; best and worst first.")
    ] = 100,
) -> None:
    """Write one HTML page about runs: scores, significance, calibration, curves, and images of the cases.

    The page works offline. Figures (PNG, SVG) and tables (CSV, Markdown, LaTeX) are written next to it.
    Methods of other tools are shown with their scores.

    Example: **semidice report comparison -o report.html**
    """
    with _reported("report"):
        from .report.page import PageOptions, run_report

        options = PageOptions(title=title, max_cases=max_cases)
        run_report(paths or (), out, new_console(), options, case_tables=cases or (), dataset=dataset)


@app.command()
def reproduce(
    table: Annotated[
        str,
        typer.Argument(help="A table of the paper (--list shows their names), or all.", metavar="[TABLE]"),
    ] = "all",
    data: Annotated[
        Path, typer.Option(help="Folder with the prepared datasets: prostate_task1, ..., lits, kits.")
    ] = Path("data"),
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for runs and tables.")] = Path(
        "reproduce_out"
    ),
    show: Annotated[
        bool, typer.Option("--list", help="Show tables, number of trainings and time, and stop.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs, instead of the paper's 150 or 60.")
    ] = None,
    folds: Annotated[int | None, typer.Option(min=1, help="Run only the first N folds.")] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="A dataset, such as kidney. Repeatable.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="text: options of the paper's text. authors: of its released configuration.")
    ] = "text",
    overrides: Overrides = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Run the paper's tables again: print our numbers next to the paper's, and which conclusions hold.

    Expects prepared datasets in --data, made with `semidice prepare qubiq RAW data` and `semidice prepare
    lits RAW data/lits`. Only missing trainings are run. After an interrupt, the same command continues.

    Example: **semidice reproduce qubiq_labels --data data --task kidney --epochs 20**
    """
    with _reported("reproduce"):
        from .reproduce import run_reproduce

        run_reproduce(
            table,
            data,
            out,
            console=new_console(),
            epochs=epochs,
            folds=folds,
            tasks=tasks or (),
            overrides=overrides or (),
            protocol=protocol,
            list_only=show,
            accelerator=accelerator,
        )


nnunet_app = typer.Typer(
    help="nnU-Net with several raters: export, preprocess, train, collect; see docs/nnunet.md.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(nnunet_app, name="nnunet")

NnunetName = Annotated[
    str, typer.Argument(metavar="DATASET", help="nnU-Net's name, such as Dataset101_Nodules.")
]
Configuration = Annotated[
    str, typer.Argument(metavar="CONFIGURATION", help="2d, 3d_fullres, 3d_lowres or 3d_cascade_fullres.")
]
Work = Annotated[
    Path | None,
    typer.Option(
        help="Folder for nnU-Net's raw, preprocessed and results. Default: its environment variables."
    ),
]
Plans = Annotated[str, typer.Option(help="nnU-Net's plans.")]


@nnunet_app.command("export")
def nnunet_export(data: PreparedDataset, name: NnunetName, work: Work = None) -> None:
    """Write a prepared dataset in nnU-Net's raw layout, with the masks of every rater beside its label.

    Volumes must be prepared with --slices none. nnU-Net's label is the majority of the raters.

    Example: **semidice nnunet export data Dataset101_Nodules --work nnunet**
    """
    with _reported("nnunet export"):
        from .nnunet.command import run_export

        run_export(data, name, work, new_console())


@nnunet_app.command("preprocess")
def nnunet_preprocess(
    name: NnunetName,
    work: Work = None,
    configurations: Annotated[
        list[str] | None,
        typer.Option("-c", "--configuration", help="Repeatable. Default: all that are planned."),
    ] = None,
    plans: Plans = "nnUNetPlans",
    folds: Annotated[int, typer.Option(min=2, help="Folds, split by patient.")] = 5,
    processes: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Plan and preprocess with nnU-Net, then preprocess the raters' masks alike.

    Finished work is skipped. The folds of nnU-Net are split by patient, unless it has folds already.

    Example: **semidice nnunet preprocess Dataset101_Nodules --work nnunet -c 2d**
    """
    with _reported("nnunet preprocess"):
        from .nnunet.command import run_preprocess

        chosen = configurations or ["2d", "3d_fullres", "3d_lowres"]
        run_preprocess(
            name, work, chosen, new_console(), plans=plans, num_folds=folds, num_processes=processes
        )


@nnunet_app.command("train")
def nnunet_train(
    name: NnunetName,
    configuration: Configuration,
    folds: Annotated[list[str], typer.Argument(help="Folds to train, such as 0 1 2 3 4, or all.")],
    work: Work = None,
    label: Annotated[str, typer.Option(help="majority, random, mean, dice_weighted or staple.")] = "mean",
    loss: Annotated[
        str, typer.Option(help="dml1, dml2, jml1, jml2, sdl or ce; nnunet: its own loss on the majority.")
    ] = "dml1",
    run_name: Annotated[
        str | None, typer.Option("--name", help="Name of this training. Default: label and loss.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: nnU-Net's 1000.")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Steps per epoch. Default: nnU-Net's 250.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Also learn from a finished training: the name of its trainer.")
    ] = None,
    calibration: Annotated[str, typer.Option(help="Of the teacher: kde, temperature or none.")] = "kde",
    plans: Plans = "nnUNetPlans",
    device: Annotated[str, typer.Option(help="cuda, cpu or mps.")] = "cuda",
    num_gpus: Annotated[int, typer.Option(min=1, help="GPUs of one training.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished training.")] = False,
) -> None:
    """Train with nnU-Net's own command, with a label of all raters and one of our losses.

    Results are where nnU-Net writes them. Finished folds are skipped.

    Example: **semidice nnunet train Dataset101_Nodules 2d 0 1 2 3 4 --label mean --loss dml1 --work nnunet**
    """
    with _reported("nnunet train"):
        from .nnunet.command import run_train
        from .nnunet.options import short_options

        short = short_options(label, loss, teacher, calibration)
        run_train(
            name,
            configuration,
            folds,
            work,
            new_console(),
            label=short.label,
            loss=short.loss,
            teacher=short.teacher,
            run_name=run_name,
            epochs=epochs,
            iterations=iterations,
            plans=plans,
            device=device,
            num_gpus=num_gpus,
            resume=resume,
        )


@nnunet_app.command("collect")
def nnunet_collect(
    name: NnunetName,
    configuration: Configuration,
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder to write.")],
    work: Work = None,
    trainer: Annotated[
        str, typer.Option(help="Name of the trainer's class; nnUNetTrainer is nnU-Net's own.")
    ] = "SemidiceTrainer_mean_dml1",
    run_name: Annotated[
        str | None, typer.Option("--name", help="Name of the method in tables. Default: that of the folder.")
    ] = None,
    plans: Plans = "nnUNetPlans",
    dataset: MovedDataset = None,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="A score. Repeatable. Default: those of a recipe.")
    ] = None,
) -> None:
    """Collect nnU-Net's held-out predictions into a run folder, for evaluate, compare and report.

    The folds are nnU-Net's. A later call adds folds that were finished in the meantime.

    Example: **semidice nnunet collect Dataset101_Nodules 2d -o runs/mean_dml1 --work nnunet**
    """
    with _reported("nnunet collect"):
        from .nnunet.command import run_collect

        run_collect(
            name,
            configuration,
            trainer,
            out,
            work,
            new_console(),
            plans=plans,
            run_name=run_name,
            data=dataset,
            metrics=metrics,
        )
