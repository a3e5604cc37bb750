"""`semidice nnunet export | preprocess | train | collect`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..console import new_console
from ..nnunet.options import TrainerOptions
from .application import Command, MovedDataset, PreparedDataset, app, takes

nnunet_app = typer.Typer(
    help="nnU-Net with several raters: export, preprocess, train, collect; see docs/nnunet.md.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


app.add_typer(nnunet_app, name="nnunet")
nnunet_command = partial(nnunet_app.command, cls=Command)


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


@nnunet_command("export")
def nnunet_export(
    data: PreparedDataset,
    name: NnunetName,
    work: Work = None,
    raw: Annotated[Path | None, typer.Option(help="Raw folder of the dataset, if it was moved.")] = None,
) -> None:
    """Write a prepared dataset in nnU-Net's raw layout, with the masks of every rater beside its label.

    Volumes must be prepared with --slices none. nnU-Net's label is the majority of the raters. Intensities
    are those of the raw files; of a resized dataset, or without the raw files, those of the dataset.

    Example: **semidice nnunet export data Dataset101_Nodules --work nnunet**
    """
    from ..nnunet.export import export
    from ..nnunet.folders import NnunetDataset

    export(data, NnunetDataset.find(name, work), new_console(), raw=raw)


@nnunet_command("preprocess")
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
    from ..nnunet.folders import NnunetDataset
    from ..nnunet.train import preprocess

    chosen = configurations or ["2d", "3d_fullres", "3d_lowres"]
    dataset = NnunetDataset.find(name, work)
    preprocess(dataset, chosen, new_console(), plans=plans, num_folds=folds, num_processes=processes)


@nnunet_command("train")
@takes
def nnunet_train(
    dataset: NnunetName,
    configuration: Configuration,
    folds: Annotated[list[str], typer.Argument(help="Folds to train, such as 0 1 2 3 4, or all.")],
    options: TrainerOptions,
    work: Work = None,
    plans: Plans = "nnUNetPlans",
    device: Annotated[Literal["cuda", "cpu", "mps"], typer.Option(help="Where nnU-Net trains.")] = "cuda",
    num_gpus: Annotated[int, typer.Option(min=1, help="GPUs of one training.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished training.")] = False,
) -> None:
    """Train with nnU-Net's own command, with a label of all raters and one of our losses.

    Results are where nnU-Net writes them. Finished folds are skipped.

    Example: **semidice nnunet train Dataset101_Nodules 2d 0 1 2 3 4 --label mean --loss dml1 --work nnunet**
    """
    from ..nnunet.folders import NnunetDataset, NnunetTraining
    from ..nnunet.train import train

    training = NnunetTraining(NnunetDataset.find(dataset, work), configuration, options.trainer, plans)
    train(training, folds, options, new_console(), device=device, num_gpus=num_gpus, resume=resume)


@nnunet_command("collect")
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
    from ..nnunet.collect import collect
    from ..nnunet.folders import NnunetDataset, NnunetTraining

    training = NnunetTraining(NnunetDataset.find(name, work), configuration, trainer, plans)
    collect(training, out, new_console(), name=run_name, dataset=dataset, metrics=metrics)
