"""The held-out cases of a run, each predicted by the network that never saw its patient.

    cross_fit(parts, fit)    for each fold what is fitted to all other folds, and `ALL_FOLDS` for new scans

Rules, intervals and calibrators are fitted to stored predictions alone, and all in this way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..data.dataset import Dataset, Unit
from ..data.folds import fold_cases, read_folds
from ..errors import UserError, listing
from .predictions import stored_cases
from .run import TrainedRun, open_run
from .scoring import PredictedBatch, Read, predicted_batches
from .stamp import digest_of

Part = TypeVar("Part")
Fit = TypeVar("Fit")

ALL_FOLDS = "all"


@dataclass(frozen=True)
class HeldOut:
    """Stored predictions of the finished folds of a run. cases: numbers, by fold. digest: of their stamps."""

    run: TrainedRun
    dataset: Dataset
    cases: Mapping[int, Sequence[int]]
    digest: str

    @classmethod
    def open(cls, run: Path, dataset: Path | None = None) -> "HeldOut":
        """Those of the run in a folder. dataset: the folder of its dataset, if it was moved.

        A UserError names a prediction, or masks, that are not those of the training.
        """
        trained = open_run(run)
        opened = Dataset(dataset or trained.recipe.data.dataset)
        opened.check_files()
        trained.check_dataset(opened)
        if opened.changed_masks:
            changed = listing(opened.changed_masks, "scan")
            raise UserError(
                f"the masks of {changed} in {opened.folder.path} have changed since `semidice prepare`: put "
                "them back, or prepare the dataset again and train a new run on it"
            )
        stamps = trained.stamps(whole=True)
        if not stamps:
            raise UserError(f"{run} has no finished fold: continue with `semidice train --resume`")
        fold_of_case = read_folds(trained.folder.folds, opened)
        cases = {stamp.fold: fold_cases(fold_of_case, stamp.fold)[1] for stamp in stamps}
        return cls(trained, opened, cases, digest_of(stamps))

    def need_two_folds(self, what: str) -> None:
        """A UserError if only one fold is finished. what: is fitted, for the message."""
        if len(self.cases) < 2:
            raise UserError(
                f"{what} of a fold is fitted to the other folds, but {self.run.folder.path} has one finished "
                "fold: finish a second one with `semidice train --resume`"
            )

    def num_cases(self, unit: Unit = "slice") -> int:
        """Of all folds: slices, or scans."""
        return sum(len(self.dataset.units(numbers, unit)) for numbers in self.cases.values())

    def read(self, fold: int) -> Read:
        return stored_cases(self.run.folder.fold(fold), self.dataset)

    def batches(self, fold: int, unit: Unit) -> Iterator[PredictedBatch]:
        return predicted_batches(self.dataset, self.cases[fold], self.read(fold), unit=unit)


def cross_fit(parts: Mapping[int, Part], fit: Callable[[Sequence[Part]], Fit]) -> dict[str, Fit]:
    """What is fitted to the parts of all other folds, by fold; and to all of them, for new scans.

    >>> cross_fit({0: 1, 1: 10, 2: 100}, sum)
    {'0': 110, '1': 101, '2': 11, 'all': 111}
    """
    folds = {str(fold): part for fold, part in parts.items()}
    return {name: fit([part for fold, part in folds.items() if fold != name]) for name in (*folds, ALL_FOLDS)}
