"""Loggers for `semidice train --log mlflow --log wandb`: values go to files in the run folder alone.

    mlflow   RUN/mlruns, a file store: one experiment per recipe, one run per fold
    wandb    RUN/wandb, offline: one run per fold; `wandb sync` uploads it, if you want to

A resumed training continues the runs of its folds. Usage statistics and error reports of both packages are
turned off. Not here: which values are logged and when, see `training.log`.
"""

import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError, nearest
from ..extras import need
from ..recipes.grid import folder_name
from ..runs.run import FoldRun
from ..training.log import OpenLogger


def new_loggers(names: Sequence[str]) -> dict[str, OpenLogger]:
    """What opens each logger of a fold; an error now, and not in a training, if its package is missing."""
    for name in names:
        if name not in _LOGGERS:
            raise UserError(f"there is no logger {name!r}{nearest(name, _LOGGERS)}")
        need(name, f"--log {name}")
    return {name: _LOGGERS[name] for name in names}


class MLflow:
    """A run of MLflow in the file store of the run folder; its experiment has the name of the recipe."""

    def __init__(self, fold_run: FoldRun) -> None:
        # read when the package is imported, or when the store is opened
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        # newer versions ask for this, because they prefer a database; mlflow-skinny has none
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow import MlflowClient

        store = fold_run.run.folder.mlflow.resolve()
        self.client: Any = MlflowClient(tracking_uri=store.as_uri())
        experiment = self.client.get_experiment_by_name(fold_run.recipe.name)
        number = (
            experiment.experiment_id if experiment else self.client.create_experiment(fold_run.recipe.name)
        )
        name = fold_run.folder.path.name
        found = self.client.search_runs([number], filter_string=f"attributes.run_name = '{name}'")
        run = found[0] if found else self.client.create_run(number, run_name=name)
        self.run: str = run.info.run_id
        self.client.update_run(self.run, status="RUNNING")
        self.known_params: dict[str, str] = run.data.params
        # the last step of each value: a killed process may have written some values of a step
        self.last = {
            key: max(metric.step for metric in self.client.get_metric_history(self.run, key))
            for key in run.data.metrics
        }

    def params(self, values: Mapping[str, str]) -> None:
        """Those that are new: MLflow does not allow another value."""
        from mlflow.entities import Param

        new = [Param(key, value) for key, value in values.items() if key not in self.known_params]
        self.client.log_batch(self.run, params=new)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = {name: value for name, value in values.items() if step > self.last.get(name, -1)}
        self.client.log_batch(
            self.run, metrics=[Metric(name, value, now, step) for name, value in new.items()]
        )
        self.last.update(dict.fromkeys(new, step))

    def close(self) -> None:
        self.client.set_terminated(self.run)


class WandB:
    """An offline run of Weights & Biases.

    A killed process loses what it has not written yet. So a resumed training writes the files of its run
    again, from the first step on, and the run keeps its identity.
    """

    def __init__(self, fold_run: FoldRun) -> None:
        # read when the package is imported
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        folder, name = fold_run.run.folder, fold_run.folder.path.name
        # offline-run-DATE-ID
        earlier = sorted(folder.wandb.glob(f"offline-run-*-{name}-*"))
        number = earlier[-1].name.split("-", 3)[3] if earlier else f"{name}-{uuid.uuid4().hex}"
        for path in earlier:
            shutil.rmtree(path)
        self.run: Any = wandb.init(
            project=folder_name(fold_run.recipe.name),
            name=name,
            id=number,
            dir=folder.path,
            mode="offline",
            # a run per fold, also if the program that trains has a run of its own
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )

    def params(self, values: Mapping[str, str]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


_LOGGERS: dict[str, OpenLogger] = {"mlflow": MLflow, "wandb": WandB}
