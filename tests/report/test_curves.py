"""Curves of a training: means over folds from logs."""

import numpy as np
import pytest
from start import refused

from semidice.paths import RunFolder
from semidice.report.curves import over_folds, read_curves


def test_a_curve_is_the_mean_over_folds_up_to_the_last_step_that_all_folds_have():
    first = np.array([[1, 4.0], [2, 2.0], [3, 1.0]])
    second = np.array([[1, 2.0], [2, 4.0], [3, 5.0], [4, 9.0]])
    curve = over_folds([first, second])
    assert curve.step.tolist() == [1, 2, 3]
    assert curve.mean.tolist() == [3, 3, 3]
    assert curve.low.tolist() == [2, 2, 1]
    assert curve.high.tolist() == [4, 4, 5]
    assert curve.num_folds == 2


def test_a_long_log_is_averaged_over_windows_with_the_same_number_of_lines():
    points = np.stack([np.arange(1000.0), np.arange(1000.0) % 2], 1)
    curve = over_folds([points])
    assert len(curve.step) == 112
    assert curve.step[0] == 4.0
    assert curve.mean[0] == pytest.approx(4 / 9)


def test_curves_are_read_by_series_and_a_wrong_line_is_named(tmp_path):
    run = RunFolder(tmp_path)
    run.fold(0).path.mkdir()
    lines = [
        '{"step": 10, "lr": 0.1, "loss": 1.0}',
        '{"step": 20, "lr": 0.05, "loss": NaN}',
        '{"step": 20, "epoch": 2, "val_dice_score": 0.5}',
    ]
    run.fold(0).log.write_text("\n".join(lines))
    curves = read_curves({"a": run})
    assert list(curves) == ["loss", "val_dice_score", "lr"]
    assert curves["loss"]["a"].mean.tolist() == [1.0]
    assert curves["lr"]["a"].step.tolist() == [10, 20]
    run.fold(0).log.write_text('{"step": 10}\n{"loss"')
    refused(lambda: read_curves({"a": run}), "log.jsonl", "a JSON object with a step")
