"""One fold of a run: trained, its held-out cases predicted by the network that never saw them, and scored.

The folder of a fold is the state. A fold that has scores is finished and is not trained again. A fold that
has a checkpoint continues from it.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

from torch import nn

from ..data.dataset import open_dataset
from ..data.folds import read_folds
from ..locks import locked
from ..runs.predictions import stored_cases, write_prediction
from ..runs.run import FoldRun, TrainedRun
from ..runs.scoring import ScoreOptions, score_cases
from ..statistics.cases import CaseTable, write_cases
from .context import Context, Event
from .engine import train_fold

# files of predictions that are compressed and written at the same time
_NUM_WRITERS = 4


def finish_run(run: TrainedRun, context: Context) -> None:
    """Finish every fold of the recipe. All processes call it."""
    dataset = open_dataset(run.recipe.data.dataset)
    fold_of_case = read_folds(run.folder.folds, dataset)
    for number in run.recipe.data.fold_numbers:
        fold = FoldRun(run, dataset, number, fold_of_case)
        # only the first process writes; a worker of a grid may be at this fold
        with locked(fold.folder, "semidice train") if context.processes.is_first else nullcontext():
            finish_fold(fold, context)


def finish_fold(fold: FoldRun, context: Context) -> None:
    """Train, predict and score a fold, unless it is finished, and store the seconds of each phase."""
    processes = context.processes
    if not fold.folder.is_finished:
        context.say(Event("phase", "training", fold.fold))
        network = train_fold(fold, context)
        processes.barrier()
        if processes.number > 1:
            # means of batch norms may differ between processes: those of the first one are stored
            network = fold.run.network(fold.fold, device=processes.device)
        context.say(Event("phase", "predicting", fold.fold))
        with context.phase("prediction"):
            _predict(fold, context, network.eval())
        processes.barrier()
        with context.phase("scoring"):
            table = _score(fold, context)
        if processes.is_first:
            context.store_seconds(fold.folder)
            # the mark of a finished fold, which no other command opens again: nothing is written after it
            write_cases(table, fold.folder.cases)
        processes.barrier()
    context.say(Event("phase", "finished", fold.fold))


def _own_cases(fold: FoldRun, context: Context) -> list[int]:
    """The cases of the scans of the fold, or slices, that this process predicts and scores."""
    units = fold.dataset.units(fold.validation_cases, fold.recipe.validation.unit)
    return [number for unit in context.processes.share(units) for number in unit.cases]


def _predict(fold: FoldRun, context: Context, network: nn.Module) -> None:
    """Predict and store the held-out cases. Threads write the files."""
    cases = _own_cases(fold, context)
    predictions = fold.predicted(cases, fold.predictor(network), context.processes.device)
    with ThreadPoolExecutor(_NUM_WRITERS) as threads:
        writing: deque[Future[None]] = deque()
        for number, prob in zip(cases, predictions, strict=True):
            path = fold.folder.prediction(fold.dataset.cases[number].name)
            writing.append(threads.submit(write_prediction, path, prob.cpu()))
            if len(writing) > 4 * _NUM_WRITERS:
                writing.popleft().result()
        for each in writing:
            each.result()


def _score(fold: FoldRun, context: Context) -> CaseTable:
    """Scores of the stored predictions, whose stamp the first process writes."""
    if context.processes.is_first:
        fold.run.write_stamp(fold.fold)
    validation = fold.recipe.validation
    return score_cases(
        fold.dataset,
        _own_cases(fold, context),
        stored_cases(fold.folder, fold.dataset),
        ScoreOptions(validation.metrics, validation.unit, validation.tolerance),
        method=fold.recipe.name,
        fold=fold.fold,
    )
