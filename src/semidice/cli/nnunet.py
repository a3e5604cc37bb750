"""`semidice nnunet export | preprocess | train | collect`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import new_console
from .application import app, reported
from .options import Engine, MovedDataset, PreparedDataset

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
    with reported("nnunet export"):
        from ..nnunet.command import run_export

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
    with reported("nnunet preprocess"):
        from ..nnunet.command import run_preprocess

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
    on: Engine = None,
) -> None:
    """Train with nnU-Net's own command, with a label of all raters and one of our losses.

    Results are where nnU-Net writes them. Finished folds are skipped.

    Example: **semidice nnunet train Dataset101_Nodules 2d 0 1 2 3 4 --label mean --loss dml1 --work nnunet**
    """
    with reported("nnunet train"):
        from ..nnunet.command import run_train
        from ..nnunet.options import short_options

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
            on=on,
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
    with reported("nnunet collect"):
        from ..nnunet.command import run_collect

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
