"""Loggers of a training: they get the values of log.jsonl, and their errors do not stop it."""

import json

import pytest
from prepared import make_prepared
from trained import fold_of, recipe_for, train_until

from semidice.runs.start import start_run
from semidice.training.context import Context
from semidice.training.engine import train_fold


@pytest.fixture
def fold(tmp_path):
    make_prepared(tmp_path / "phantom", num_cases=8, cases_per_patient=1)
    changes = {"schedule": {"epochs": 3}, "batch_size": 2, "log_every": 1}
    changes["validation"] = {"every": 3, "metrics": ["dice_score"]}
    return fold_of(start_run(recipe_for(tmp_path / "phantom", **changes), tmp_path / "run", resume=False))


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


def by_step(values):
    merged = {}
    for step, of_step in values:
        merged.setdefault(step, {}).update(of_step)
    return sorted(merged.items())


def test_a_logger_gets_every_value_and_the_options_of_the_recipe(fold):
    recorder = Recorder()
    train_fold(fold, Context(loggers={"recorder": lambda _: recorder}))
    assert by_step(recorder.values) == log_by_step(fold)
    assert len(log_by_step(fold)) == 6
    assert "val_dice_score" in log_by_step(fold)[-1][1]
    assert recorder.options["batch_size"] == "2"
    assert recorder.options["model.options.channels"] == "[8, 16]"
    assert recorder.is_closed


def test_a_logger_of_a_resumed_training_gets_the_earlier_values_too(fold):
    train_until(fold, 4)
    recorder = Recorder()
    train_fold(fold, Context(loggers={"recorder": lambda _: recorder}))
    assert by_step(recorder.values) == log_by_step(fold)
    assert len(log_by_step(fold)) == 6


@pytest.mark.parametrize("fails", ["params", "scalars", "close", "opening"])
def test_a_logger_that_fails_is_named_once_and_the_others_go_on(fold, fails):
    warnings, other = [], Recorder()

    def opened(_):
        if fails == "opening":
            raise RuntimeError("opening is out of order")
        return Recorder(fails)

    loggers = {"broken": opened, "other": lambda _: other}
    train_fold(
        fold, Context(say=lambda e: warnings.append(e) if e.kind == "warning" else None, loggers=loggers)
    )
    (warning,) = warnings
    assert "logging to broken failed" in warning.content
    assert f"{fails} is out of order" in warning.content
    assert by_step(other.values) == log_by_step(fold)
    assert fold.folder.last.exists()
