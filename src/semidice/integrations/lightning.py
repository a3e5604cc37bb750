"""Lightning: a callback that scores every case of a validation or test loop and writes the case table.

The step returns a dict with prob, case (a name of each), and the parts of a `ScoredBatch` that the scores
need; also patient. Several processes write the table of one. docs/lightning.md has a module to copy.
"""

from ..errors import UserError
from ..extras import need

need("lightning", "semidice.integrations.lightning")

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..arrays import describe
from ..metrics.registry import ScoredBatch, ScoreFunction, ScoreKey
from ..options import check_value
from ..statistics.cases import CaseTable, write_cases
from ..statistics.collect import CaseScores

Stage = Literal["validate", "test"]
_PARTS = frozenset(field.name for field in fields(ScoredBatch))


class CaseTableCallback(Callback):  # type: ignore[misc]
    """Writes the case table of every validation (or test) epoch to `path`, .csv or .parquet.

    `semidice report` and `semidice compare` read it with --cases. scores, class_names, method: as in
    `statistics.CaseScores`. stage: the loop that is scored. fold: the fold of its cases. The means
    are logged as STAGE_SCORE, so that a checkpoint can monitor validate_soft_dice_score. `table` is the last
    table. The sanity check is not scored, and neither are cases that a DistributedSampler repeats.
    """

    def __init__(
        self,
        path: str | Path,
        scores: Sequence[str] | Mapping[ScoreKey, ScoreFunction] | Mapping[str, ScoreFunction],
        *,
        class_names: Sequence[str],
        method: str,
        stage: Stage = "validate",
        fold: int = -1,
    ) -> None:
        check_value(Stage, stage=stage)
        self.path, self.stage, self.fold = Path(path), stage, fold
        if self.path.suffix not in (".csv", ".parquet"):
            raise UserError(f"path must end in .csv or .parquet; got {path}")
        self.scores = CaseScores(scores, class_names=class_names, method=method)
        self.table: CaseTable | None = None
        # samples of this process so far, of each data loader
        self._num_seen: dict[int, int] = {}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_scored(trainer):
            self.scores.reset()
            self._num_seen.clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._is_scored(trainer):
            return
        references = self._references(outputs)
        num_cases, start = len(references["prob"]), self._num_seen.get(dataloader_idx, 0)
        self._num_seen[dataloader_idx] = start + num_cases
        num_kept = min(num_cases, _num_unrepeated(trainer, dataloader_idx) - start)
        if num_kept > 0:
            kept = {name: _first(name, value, num_kept) for name, value in references.items()}
            named = {name: kept.pop(name) for name in ("case", "patient") if name in kept}
            self.scores.update(ScoredBatch(**kept), **named, fold=self.fold)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_scored(trainer):
            return
        # on every process, because they exchange rows
        self.table = self.scores.table()
        # the means are those of all processes
        means = {f"{self.stage}_{name}": mean for name, mean in self.scores.means().items()}
        self.log_dict(means, sync_dist=True)
        if trainer.is_global_zero:
            write_cases(self.table, self.path)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _is_scored(self, trainer: Trainer) -> bool:
        return trainer.testing == (self.stage == "test") and not trainer.sanity_checking

    def _references(self, outputs: Any) -> dict[str, Any]:
        """What a step returned that scores need; other keys, such as loss, are left out."""
        is_mapping = isinstance(outputs, Mapping)
        if not is_mapping or not {"prob", "case"} <= outputs.keys():
            step = "test_step" if self.stage == "test" else "validation_step"
            got = f"keys {', '.join(map(str, outputs))}" if is_mapping else describe(outputs)
            raise UserError(
                f"{step} must return a dict with prob, case and what the scores need, such as soft_target; "
                f"got {got}"
            )
        return {name: value for name, value in outputs.items() if name in _PARTS | {"case", "patient"}}


def _num_unrepeated(trainer: Trainer, loader_index: int) -> int:
    """How many samples of this process count; a DistributedSampler repeats some to fill the last batch."""
    # trainer.val_dataloaders is that of fit, also in a later trainer.validate
    loader = trainer._evaluation_loop._combined_loader.flattened[loader_index]
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return sys.maxsize
    # sample k of this process is number rank + k * num_replicas of the dataset
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    return math.ceil((num_samples - sampler.rank) / sampler.num_replicas)


def _first(name: str, value: Any, num_kept: int) -> Any:
    """The first cases of an argument; a spacing may be one for all cases."""
    for_all = name == "spacing_mm" and not (isinstance(value, Tensor) and value.ndim == 2)
    return value if for_all or value is None else value[:num_kept]
