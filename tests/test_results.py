"""The studies of docs/results.md: their commands are valid, and their stored scores small and exact."""

import os
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import result_files
import results_study
from doc_commands import Command, problem
from result_files import read_scores, write_scores

from semidice.metrics.cases import CaseRow, CaseTable
from semidice.recipes.grid import read_variants
from semidice.recipes.options import option_value

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = results_study.Settings(
    lidc=Path("LIDC"),
    hippocampus=Path("HIPPOCAMPUS"),
    weights=Path("WEIGHTS"),
    work=Path("WORK"),
    out=Path("OUT"),
)


@pytest.mark.parametrize("name", results_study.STUDIES)
def test_the_command_of_a_study_is_valid_and_names_no_folder(name):
    study = results_study.STUDIES[name]
    command = results_study.shown_command(study, SETTINGS)
    assert problem(Command(command, complete=True)) is None
    assert "/" not in command
    assert f"schedule.epochs={results_study.DATA[study.data].epochs}" in command


def test_every_method_of_a_study_is_trained_with_the_same_epochs_batch_and_folds(tmp_path):
    for name, study in results_study.STUDIES.items():
        command = shlex.split(results_study.shown_command(study, SETTINGS._replace(weights=Path("none"))))
        overrides = [value for key, value in pairwise(command) if key == "--set"]
        # recipes that are not `auto` need no dataset
        overrides = [value for value in overrides if not value.startswith("model.weights")]
        variants = read_variants(
            study.grids, dataset=tmp_path, out=tmp_path / name, overrides=["auto=false", *overrides]
        )
        keys = ("schedule.epochs", "batch_size", "data.num_folds", "data.fold_seed", "optimiser.lr")
        settings = {tuple(option_value(variant.recipe, key) for key in keys) for variant in variants}
        assert len(settings) == 1, name
        assert set(study.decided) <= {variant.method for variant in variants}


def scores(num_cases, *, methods=("a", "b"), seeds=(0, 1), metrics=("dice_score",)):
    rng = np.random.default_rng(0)
    return CaseTable.from_rows(
        CaseRow(
            f"case{case:04d}", f"patient{case // 2}", case % 5, method, "mean", metric, rng.random(), seed
        )
        for case in range(num_cases)
        for method in methods
        for seed in seeds
        for metric in metrics
    )


def test_stored_scores_are_read_as_they_were_to_the_precision_of_float32(tmp_path):
    table = scores(7, metrics=("dice_score", "volume_error_voxels")).sorted()
    with_classes = CaseTable.from_rows(
        [*table.rows(), *(row._replace(class_name="nodule", value=0.0) for row in table.rows())]
    )
    write_scores(with_classes, tmp_path / "scores.parquet")
    read = read_scores(tmp_path / "scores.parquet").sorted()
    for name, column in table.columns.items():
        expected = column.astype(np.float32) if name == "value" else column
        np.testing.assert_array_equal(read.columns[name], expected)


def test_the_largest_study_is_stored_in_less_than_two_megabytes(tmp_path, monkeypatch):
    path = tmp_path / "scores.parquet"
    table = scores(
        573,
        methods=[f"method{number}" for number in range(12)],
        seeds=range(3),
        metrics=results_study.DATA["lidc"].metrics,
    )
    write_scores(table, path)
    assert path.stat().st_size < result_files.MAX_BYTES
    monkeypatch.setattr(result_files, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 are stored"):
        write_scores(table, tmp_path / "large.parquet")
    assert not (tmp_path / "large.parquet").exists()


def test_seconds_of_stopped_calls_are_added_up(tmp_path):
    path = tmp_path / "seconds"
    code = (
        f"import sys; sys.path.insert(0, {str(DOCS)!r}); import results_study; from pathlib import Path; "
        f"results_study._timed([sys.executable, '-c', 'import time; time.sleep(60)'], Path({str(path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not path.is_file() or float(path.read_text() or 0) < 1:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) != 0
    first = float(path.read_text())
    assert first >= 1
    assert results_study._timed([sys.executable, "-c", "pass"], path) > first
    with pytest.raises(SystemExit, match="exit code 3"):
        results_study._timed([sys.executable, "-c", "raise SystemExit(3)"], path)
