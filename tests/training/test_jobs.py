"""A grid as jobs: their order, and that every way to run them writes the same tables."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from grid_jobs import AlwaysDyingJob, DyingJob, FullMemoryJob, set_options, variants_of, write_grid
from prepared import make_prepared
from rich.console import Console
from typer.testing import CliRunner

from semidice.cli import app
from semidice.compare import run_compare
from semidice.data import integrity
from semidice.locks import FolderLock, LockedError, part_lock
from semidice.paths import ComparisonFolder, RunFolder
from semidice.recipes.grid import Variant
from semidice.training.grid import check_engine, job_lines
from semidice.training.jobs import MAX_ATTEMPTS, Report, Schedule, fold_jobs, run_jobs
from semidice.training.local_pool import LocalPool
from semidice.training.phases import PHASES, PhaseClock, read_seconds

# as in this process: the number of threads can change the last bits
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=8, truth=False)
    return path


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def plain(dataset, grid, tmp_path_factory):
    """The comparison by one process."""
    out = tmp_path_factory.mktemp("plain") / "out"
    run_compare(variants_of(grid, dataset, out), out, QUIET, accelerator="cpu")
    return out


def assert_same_tables(first, second):
    names = {path.name for path in first.iterdir() if path.is_file()} - {"jobs.csv", "arrays.json"}
    assert "cases.parquet" in names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for run in ("teacher", "student"):
        for fold in (0, 1):
            logs = [RunFolder(out / run).fold(fold).log.read_text() for out in (first, second)]
            assert logs[0] == logs[1]


class Recorder:
    """A pool without workers: jobs finish in the order in which they were started."""

    def __init__(self, size=2, failing=()):
        self.size, self.failing, self.running, self.order = size, failing, [], []

    def has_room(self):
        return len(self.running) < self.size

    def can_start(self, job):
        return True

    def start(self, job):
        self.running.append(job)
        self.order.append((job.name, job.fold))

    def wait(self, seconds):
        job = self.running.pop(0)
        failed = (job.name, job.fold) in self.failing
        return [(job, Report("failed", "wrong") if failed else Report("finished", 0.0))]


class NoView:
    def show(self, job, report): ...

    def show_schedule(self, schedule): ...


def test_students_start_when_all_folds_of_their_teacher_are_finished(dataset, grid, tmp_path):
    jobs = fold_jobs(variants_of(grid, dataset, tmp_path), tmp_path / "arrays.json")
    schedule = Schedule(jobs)
    first, second = schedule.next_job(), schedule.next_job()
    assert (str(first), str(second)) == ("teacher fold 0", "teacher fold 1")
    schedule.finish(second)
    assert schedule.next_job() is None
    assert not schedule.is_done
    schedule.finish(first)
    assert str(schedule.next_job()) == "student fold 0"


def test_a_failed_teacher_stops_its_students_and_no_other_run(dataset, grid, tmp_path):
    variants = variants_of(grid, dataset, tmp_path)
    other = Variant(variants[0].recipe.model_copy(update={"name": "other"}), tmp_path / "other")
    pool = Recorder(size=1, failing=[("teacher", 0)])
    errors = run_jobs(fold_jobs([*variants, other], tmp_path / "seen"), pool, NoView())
    assert pool.order == [("teacher", 0), ("other", 0), ("other", 1)]
    assert errors == {
        str(tmp_path / "teacher"): "fold 0: wrong",
        str(tmp_path / "student"): "its teacher teacher failed",
    }


def test_a_job_is_lost_at_most_so_many_times(dataset, grid, tmp_path):
    job = fold_jobs(variants_of(grid, dataset, tmp_path), tmp_path / "seen")[0]
    schedule = Schedule([job])
    for number in range(MAX_ATTEMPTS):
        assert schedule.next_job() is job
        assert schedule.lose(job, "exit code -9") == (number < MAX_ATTEMPTS - 1)
    assert schedule.is_done
    assert schedule.errors == {job.group: "fold 0: its worker ended 4 times: exit code -9"}


def test_10_000_jobs_are_planned_in_under_5_seconds(dataset, grid, tmp_path):
    teacher, student = variants_of(grid, dataset, tmp_path)
    folds = teacher.recipe.data.model_copy(update={"num_folds": 5})
    variants = []
    for number in range(1000):
        for variant in (teacher, student):
            names = {"name": f"{variant.name}{number}", "data": folds}
            if variant.teacher:
                run = tmp_path / f"teacher{number}"
                names["teacher"] = variant.recipe.teacher.model_copy(update={"run": run})
            recipe = variant.recipe.model_copy(update=names)
            variants.append(Variant(recipe, tmp_path / recipe.name, variant.teacher and f"teacher{number}"))
    # of this process: other programs may be busy
    started = time.process_time()
    lines = [line for line in job_lines(variants, ["semidice", "compare"]) if not line.startswith("#")]
    pool = Recorder(size=64)
    run_jobs(fold_jobs(variants, tmp_path / "seen"), pool, NoView())
    seconds = time.process_time() - started
    assert len(lines) == len(pool.order) == 10_000
    assert seconds < 5


@pytest.mark.parametrize("on", ["local", "local:0", "local:two", "slurm", "local:-1", ""])
def test_an_unknown_engine_is_named(on):
    with pytest.raises(ValueError, match=f"--on {on}: expected local:N"):
        check_engine(on)


def test_worker_processes_write_the_tables_of_one_process(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    run_compare(variants_of(grid, dataset, out), out, QUIET, accelerator="cpu", on="local:2")
    assert_same_tables(plain, out)
    rows = list(csv.DictReader(ComparisonFolder(out).jobs.read_text().splitlines()))
    assert [(row["method"], row["fold"]) for row in rows] == [
        (name, fold) for name in ("teacher", "student") for fold in "01"
    ]
    for row in rows:
        phases = sum(float(row[name]) for name in PHASES)
        assert float(row["total"]) == pytest.approx(phases, abs=1e-3)
        assert (row["first_step"], row["last_step"]) == ("0", "3")
        # what the grid adds to a training: the locks, opening the run, and looking at the dataset
        assert float(row["start"]) < 2
    # the second job of a worker neither imports nor loads
    students = rows[2:]
    assert all(float(row["import"]) == 0 for row in students)


def test_the_listed_commands_write_the_tables_of_one_process(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    arguments = ["compare", str(dataset), str(grid), "-o", str(out), *set_options(), "--accelerator", "cpu"]
    listed = CliRunner().invoke(app, [*arguments, "--list-jobs"])
    assert listed.exit_code == 0
    assert not out.exists()
    lines = listed.stdout.splitlines()
    assert [line.startswith("#") for line in lines] == [False, False, True, False, False]
    jobs = [line.rpartition(" ")[2] for line in lines if not line.startswith("#")]
    assert jobs == ["teacher:0", "teacher:1", "student:0", "student:1"]
    early = CliRunner().invoke(app, [*arguments, "--job", "student:0"])
    assert early.exit_code == 1
    for job in (jobs[1], jobs[1], jobs[0], *jobs[2:]):
        done = CliRunner().invoke(app, [*arguments, "--job", job])
        assert done.exit_code == 0, done.stderr
    assert CliRunner().invoke(app, [*arguments, "--list-jobs"]).stdout == ""
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert_same_tables(plain, out)


def test_an_unknown_job_is_named(dataset, grid, tmp_path):
    arguments = ["compare", dataset, grid, "-o", tmp_path / "out", *set_options(), "--accelerator", "cpu"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--job", "teacher:7"])
    assert done.exit_code == 1
    assert (
        "--job teacher:7: expected NAME:FOLD; the jobs of this grid are teacher:0, teacher:1" in done.stderr
    )


def test_a_job_whose_worker_is_killed_continues_from_its_checkpoint(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    variants = variants_of(grid, dataset, out)
    jobs = [
        DyingJob(**{name: getattr(job, name) for name in ("name", "recipe", "folder", "fold", "seen")})
        for job in fold_jobs(variants, ComparisonFolder(out).arrays)
    ]
    with LocalPool(1, accelerator="cpu") as pool:
        assert run_jobs(jobs, pool, NoView()) == {}
    for job in jobs:
        # of the killed attempt only the steps after its last checkpoint were trained again
        (attempt,) = read_seconds(RunFolder(job.folder).fold(job.fold))
        assert 1 <= attempt["first_step"] <= 2
        assert attempt["last_step"] == 3
    run_compare(variants, out, QUIET, accelerator="cpu")
    for path in out.glob("killed_*"):
        path.unlink()
    assert_same_tables(plain, out)


def test_a_job_whose_worker_always_dies_fails(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    job = AlwaysDyingJob("teacher", variant.recipe, variant.folder, 0)
    with LocalPool(1, accelerator="cpu") as pool:
        errors = run_jobs([job], pool, NoView())
    assert errors == {job.group: "fold 0: its worker ended 4 times: exit code -9"}


def test_a_job_that_found_the_memory_full_is_continued_by_a_new_process_beside_fewer(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    job = FullMemoryJob("teacher", variant.recipe, variant.folder, 0)
    reports = []

    class KeptReports(NoView):
        def show(self, job, report):
            reports.append(report)

    with LocalPool(2, accelerator="cpu") as pool:
        assert run_jobs([job], pool, KeptReports()) == {}
        assert pool.num_workers == 1
    assert [report.content for report in reports if report.kind == "lost"] == ["CUDA out of memory"]
    workers = (tmp_path / "pids").read_text().split()
    assert len(set(workers)) == 2
    assert RunFolder(variant.folder).fold(0).is_finished


def test_a_wrong_variant_fails_with_its_error_and_is_not_trained_again(dataset, grid, tmp_path, monkeypatch):
    out = tmp_path / "out"
    variants = variants_of(grid, dataset, out)
    (out / "teacher").mkdir(parents=True)
    (out / "teacher" / "foreign.txt").touch()
    with pytest.raises(ValueError, match="2 of 2 variants failed") as error:
        run_compare(variants, out, QUIET, accelerator="cpu", on="local:1")
    assert "teacher exists and is not a run folder: it has foreign.txt" in str(error.value)
    assert "student: its teacher teacher failed" in str(error.value)


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_along_and_is_started_again(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "semidice", "compare", str(dataset), str(grid), "-o", str(out)]
    command += [*set_options(), "--accelerator", "cpu", "--on", "local:2"]
    driver = subprocess.Popen(command, start_new_session=True, env=ONE_THREAD)
    deadline = time.monotonic() + 300
    locks = []
    while not locks and driver.poll() is None and time.monotonic() < deadline:
        locks = [path for path in out.glob("*/fold_*/.lock") if path.stat().st_size]
        time.sleep(0.01)
    driver.kill()
    driver.wait()
    owners = [json.loads(path.read_text())["pid"] for path in out.glob("*/fold_*/.lock")]
    for pid in owners:
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not os.path.exists(f"/proc/{pid}")
    assert subprocess.run(command, check=False, env=ONE_THREAD).returncode == 0
    assert_same_tables(plain, out)


def test_the_arrays_of_a_dataset_are_hashed_once(dataset, grid, tmp_path, monkeypatch):
    hashed = []

    def count(path):
        hashed.append(path)
        return original(path)

    original = integrity.file_hash
    monkeypatch.setattr(integrity, "file_hash", count)
    path = tmp_path / "data"
    shutil.copytree(dataset, path)
    run_compare(variants_of(grid, path, tmp_path / "out"), tmp_path / "out", QUIET, accelerator="cpu")
    # a copy has other times, so that what the original knows of its arrays does not count
    assert len(hashed) == len(set(hashed)) == 16
    run_compare(variants_of(grid, path, tmp_path / "new"), tmp_path / "new", QUIET, accelerator="cpu")
    assert len(hashed) == 16


def test_a_phase_inside_of_another_is_counted_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("semidice.training.phases.time.monotonic", lambda: next(now))
    clock = PhaseClock()
    with clock.phase("steps"), clock.phase("validation"):
        pass
    assert clock.seconds["steps"] == 2 + 4
    assert clock.seconds["validation"] == 3


def test_folds_of_a_run_are_worked_on_at_the_same_time_and_the_whole_run_is_refused(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    run = RunFolder(variant.folder)
    script = "\n".join(
        [
            "import sys, pathlib",
            "from semidice.locks import part_lock",
            "from semidice.paths import RunFolder",
            f"run = RunFolder(pathlib.Path({str(run.path)!r}))",
            "with part_lock(run, run.fold(1), 'other'): print('has it', flush=True); sys.stdin.read()",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "has it\n"
    with pytest.raises(LockedError, match="fold_1 is in use by `other`"), FolderLock(run, "semidice train"):
        pass
    assert not run.lock.exists()
    with part_lock(run, run.fold(0), "test"):
        assert run.fold(0).lock.exists()
    with pytest.raises(LockedError, match="fold_1 is in use by `other`"), part_lock(run, run.fold(1), "test"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with part_lock(run, run.fold(1), "test"), pytest.raises(LockedError), FolderLock(run, "semidice train"):
        pass
    with FolderLock(run, "semidice train"):
        part = part_lock(run, run.fold(0), "test")
        with pytest.raises(LockedError, match="in use by `semidice train`"), part:
            pass
