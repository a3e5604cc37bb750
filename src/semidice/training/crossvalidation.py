"""A run: every fold trained, every case predicted by the model that never saw its patient, one case table.

The run folder is the state. A fold whose scores are there is finished and not touched again; one with a
checkpoint goes on from it; the table of the run is made once all of its folds are there.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_fabric import Fabric
from torch import nn

from ..data.batches import WholeCases
from ..data.dataset import Dataset
from ..data.folds import read_folds, split_folds, write_folds
from ..metrics.cases import CaseTable, concatenate, read_cases, write_cases
from ..paths import RunFolder, atomic_write
from ..recipes import Recipe, differing_keys, read_recipe, versions, write_recipe
from ..runs.predictions import write_prediction
from ..runs.run import network_probability, write_dataset_facts
from ..runs.scoring import score_fold
from .engine import FoldRun, StepStatus, load_trained, train_fold

# what a run that goes on may have different: which folds are to be run now, and how they are fed
_MAY_DIFFER = ("data.folds", "data.dataset", "workers")


def open_run(recipe: Recipe, out: Path, *, resume: bool) -> RunFolder:
    """The run folder of a recipe, made new or found again; a ValueError if it holds another run.

    resume: whether to go on with a run that is there already.
    """
    run = RunFolder(out)
    if run.recipe.exists():
        stored = read_recipe(run.recipe)
        may_differ = (*_MAY_DIFFER, "teacher.run") if _teacher_has_moved(stored, recipe) else _MAY_DIFFER
        different = [key for key in differing_keys(recipe, stored) if key not in may_differ]
        if different:
            was = stored.teacher.run if stored.teacher and different == ["teacher.run"] else None
            way_out = f"if {was} is the same teacher, correct {run.recipe}; else " if was else ""
            raise ValueError(
                f"{out} holds a run of another recipe, which differs in {', '.join(different)}; "
                f"{way_out}choose another folder with --out, or remove it"
            )
        if not resume:
            raise ValueError(f"{out} holds this run already; go on with it by --resume, or remove it")
        write_recipe(recipe, run.recipe)
        return run
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and is no run folder; choose another one with --out")
    dataset = Dataset(recipe.data.dataset)
    folds = split_folds(
        [case.patient for case in dataset.cases], num_folds=recipe.data.num_folds, seed=recipe.data.fold_seed
    )
    out.mkdir(parents=True, exist_ok=True)
    write_folds(run.folds, dataset, folds)
    write_dataset_facts(run, dataset.manifest)
    with atomic_write(run.versions) as temp_path:
        temp_path.write_text(json.dumps(versions(), indent=2) + "\n")
    # the recipe comes last: a folder that has one is a run
    write_recipe(recipe, run.recipe)
    return run


def _teacher_has_moved(stored: Recipe, recipe: Recipe) -> bool:
    """Whether the teacher's run is gone from where it was, and there is one of its name where it is now."""
    if stored.teacher is None or recipe.teacher is None:
        return False
    was, now = stored.teacher.run, recipe.teacher.run
    # os.path, as a place on another machine may be one that cannot be looked into here
    return was.name == now.name and not os.path.exists(was) and RunFolder(now).recipe.is_file()


def cross_validate(
    recipe: Recipe,
    run: RunFolder,
    fabric: Fabric,
    *,
    on_step: Callable[[StepStatus], object] = lambda _: None,
    on_fold: Callable[[int, str], object] = lambda _, __: None,
) -> CaseTable | None:
    """The case table of all folds; None in all processes but the first. Finished folds are not redone.

    on_fold(fold, what) is called when a fold starts to be trained, predicted, or is found finished.
    """
    dataset = Dataset(recipe.data.dataset)
    fold_of_case = read_folds(run.folds, dataset)
    folds = recipe.data.folds if recipe.data.folds is not None else sorted(set(fold_of_case))
    for fold in folds:
        fold_run = FoldRun(recipe, dataset, fold, fold_of_case, run.fold(fold))
        if fold_run.folder.cases.exists():
            on_fold(fold, "finished")
            continue
        on_fold(fold, "training")
        train_fold(fold_run, fabric, on_step=on_step)
        fabric.barrier()
        on_fold(fold, "predicting")
        judge_fold(fold_run, fabric)
        fabric.barrier()
        on_fold(fold, "finished")
    if not fabric.is_global_zero:
        return None
    return collect_cases(run, recipe.data.num_folds)


def judge_fold(fold_run: FoldRun, fabric: Fabric) -> None:
    """Predict and store every validation case, then score what was stored: processes share the cases."""
    model = load_trained(fold_run, fabric.device)
    mine = fold_run.validation_cases[fabric.global_rank :: fabric.world_size]
    _store_predictions(fold_run, model, mine, fabric)
    recipe = fold_run.recipe
    # the table is of all processes together
    table = score_fold(
        fold_run.dataset,
        mine,
        fold_run.folder,
        metrics=recipe.validation.metrics,
        method=recipe.name,
        fold=fold_run.fold,
    )
    if fabric.is_global_zero:
        write_cases(table, fold_run.folder.cases)


def _store_predictions(fold_run: FoldRun, model: nn.Module, cases: Sequence[int], fabric: Fabric) -> None:
    recipe, dataset = fold_run.recipe, fold_run.dataset
    whole = WholeCases(dataset, cases, batch_size=recipe.batch_size, device=fabric.device)
    for batch in whole:
        probs = network_probability(model, batch.image, dtype=recipe.precision.dtype).cpu()
        for number, prob in zip(batch.case.tolist(), probs, strict=True):
            case = dataset.cases[number]
            inside = prob[(slice(None), *(slice(0, size) for size in case.shape))]
            write_prediction(fold_run.folder.prediction(case.name), inside)


def collect_cases(run: RunFolder, num_folds: int) -> CaseTable:
    """The table of the run from those of its finished folds, written to the run folder."""
    finished = [run.fold(fold).cases for fold in range(num_folds) if run.fold(fold).cases.exists()]
    table = concatenate([read_cases(path) for path in finished]).sorted()
    write_cases(table, run.cases)
    return table
