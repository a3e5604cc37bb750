"""Loggers of a training: they get the values of log.jsonl once, and their errors do not stop it."""

import json

import pytest
from lightning_fabric import Fabric
from prepared import make_prepared
from test_training import SMALL

from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.recipes import Recipe
from semidice.runs.run import FoldRun
from semidice.training.crossvalidation import start_run
from semidice.training.engine import train_fold


@pytest.fixture(scope="module")
def fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


@pytest.fixture
def fold(tmp_path):
    path = tmp_path / "phantom"
    make_prepared(path, num_cases=8, size=(32, 32), cases_per_patient=1)
    options = {
        "name": "test",
        "data": {"dataset": str(path), "num_folds": 2},
        "model": SMALL,
        "schedule": {"epochs": 3},
        "batch_size": 2,
        "log_every": 1,
        "validation": {"every": 3, "metrics": ["dice_score"]},
        "workers": 0,
    }
    run = start_run(Recipe.model_validate(options), tmp_path / "run", resume=False)
    dataset = Dataset(path)
    return FoldRun(run, dataset, 0, read_folds(run.folder.folds, dataset))


class Recorder:
    """A logger that keeps what it gets, and raises in the method `fails`."""

    def __init__(self, fails=None):
        self.fails, self.values, self.options, self.is_closed = fails, [], {}, False

    def params(self, values):
        self._maybe_fail("params")
        self.options = dict(values)

    def scalars(self, step, values):
        self._maybe_fail("scalars")
        self.values.append((step, dict(values)))

    def close(self):
        self.is_closed = True
        self._maybe_fail("close")

    def _maybe_fail(self, method):
        if method == self.fails:
            raise OSError(f"{method} is\nout of order")


def log_by_step(fold):
    values = {}
    for line in fold.folder.log.read_text().splitlines():
        parsed = json.loads(line)
        values.setdefault(parsed.pop("step"), {}).update(parsed)
    return sorted(values.items())


def test_a_logger_gets_all_values_of_a_step_at_once_and_the_options_of_the_recipe(fold, fabric):
    recorder = Recorder()
    train_fold(fold, fabric, loggers={"recorder": lambda _: recorder})
    assert recorder.values == log_by_step(fold)
    assert len(recorder.values) == 6
    assert "val_dice_score" in recorder.values[-1][1]
    assert recorder.options["batch_size"] == "2"
    assert recorder.options["model.options.channels"] == "[8, 16]"
    assert recorder.is_closed


def test_a_step_is_sent_when_its_checkpoint_is_written_so_that_it_is_never_trained_again(fold, fabric):
    first, second = Recorder(), Recorder()

    def stop(status):
        if status.step == 4:
            raise KeyboardInterrupt

    # no checkpoint before the end: nothing that was logged is final
    with pytest.raises(KeyboardInterrupt):
        train_fold(fold, fabric, on_step=stop, loggers={"first": lambda _: first})
    assert len(log_by_step(fold)) == 4
    assert first.values == []
    train_fold(fold, fabric, loggers={"second": lambda _: second}, seconds_between_checkpoints=0)
    assert second.values == log_by_step(fold)


@pytest.mark.parametrize("fails", ["params", "scalars", "close", "opening"])
def test_a_logger_that_fails_is_named_once_and_the_others_go_on(fold, fabric, fails):
    warnings, other = [], Recorder()

    def opened(_):
        if fails == "opening":
            raise RuntimeError("opening is out of order")
        return Recorder(fails)

    loggers = {"broken": opened, "other": lambda _: other}
    train_fold(fold, fabric, loggers=loggers, on_warning=warnings.append)
    assert [
        f"logging to broken failed and ends here; training continues, and log.jsonl has every value: {fails} "
        "is out of order" in text
        for text in warnings
    ] == [True]
    assert other.values == log_by_step(fold)
    assert fold.folder.last.exists()
