"""One fold of a run: the cases it trains on, the cases it is validated on, and its folder."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.dataset import Dataset
from ..data.folds import fold_cases
from ..paths import FoldFolder
from ..recipes import Recipe
from ..runs.run import TrainedRun


@dataclass(frozen=True)
class FoldRun:
    """fold_of_case: the fold in which each case of the dataset is validated."""

    run: TrainedRun
    dataset: Dataset
    fold: int
    fold_of_case: Sequence[int]

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def folder(self) -> FoldFolder:
        return self.run.folder.fold(self.fold)

    @property
    def training_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[0]

    @property
    def validation_cases(self) -> list[int]:
        return fold_cases(self.fold_of_case, self.fold)[1]
