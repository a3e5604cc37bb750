"""A grid as jobs: their order, and that every way to run them writes the same tables."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from grid_jobs import AlwaysDyingJob, BuggyJob, DyingJob, FullMemoryJob, set_options, variants_of, write_grid
from prepared import make_prepared
from rich.console import Console
from start import PATIENCE_S, refused, semidice

from semidice.compare import run_compare
from semidice.locks import locked
from semidice.paths import FoldFolder, MethodFolder, RunFolder
from semidice.recipes.grid import Variant
from semidice.training.context import Context, Event, read_seconds
from semidice.training.grid import check_engine, job_lines, train_grid
from semidice.training.jobs import MAX_ATTEMPTS, Schedule, fold_jobs, run_jobs
from semidice.training.local_pool import LocalPool

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
    names = {path.name for path in first.iterdir() if path.is_file()} - {".lock"}
    assert "cases.parquet" in names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for run in ("teacher", "student"):
        for fold in (0, 1):
            logs = [MethodFolder(out / run).seed(0).fold(fold).log.read_text() for out in (first, second)]
            assert logs[0] == logs[1]


class Recorder:
    """A pool without workers: jobs finish in the order in which they were started."""

    def __init__(self, size=2, failing=()):
        self.size, self.failing, self.running, self.order = size, failing, [], []

    def has_room(self):
        return len(self.running) < self.size

    def start(self, job):
        self.running.append(job)
        self.order.append((job.variant.name, job.fold))

    def wait(self, seconds):
        job = self.running.pop(0)
        failed = (job.variant.name, job.fold) in self.failing
        return [(job, Event("failed", "wrong") if failed else Event("finished", 0.0))]


def test_students_start_when_all_folds_of_their_teacher_are_finished(dataset, grid, tmp_path):
    jobs = fold_jobs(variants_of(grid, dataset, tmp_path))
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
    other = Variant(variants[0].recipe.model_copy(update={"name": "other"}), tmp_path / "other", "other")
    pool = Recorder(size=1, failing=[("teacher", 0)])
    errors = run_jobs(fold_jobs([*variants, other]), pool)
    assert pool.order == [("teacher", 0), ("other", 0), ("other", 1)]
    assert errors == {
        str(tmp_path / "teacher" / "seed_0"): "fold 0: wrong",
        str(tmp_path / "student" / "seed_0"): "teacher/seed_0, which it needs, failed",
    }


def test_a_job_is_lost_at_most_so_many_times(dataset, grid, tmp_path):
    job = fold_jobs(variants_of(grid, dataset, tmp_path))[0]
    schedule = Schedule([job])
    for number in range(MAX_ATTEMPTS):
        assert schedule.next_job() is job
        schedule.lose(job, "exit code -9")
        assert schedule.is_done == (number == MAX_ATTEMPTS - 1)
    assert schedule.errors == {job.group: "fold 0: its worker ended 4 times: exit code -9"}


def test_the_jobs_of_a_large_grid_are_each_run_once(dataset, grid, tmp_path):
    teacher, student = variants_of(grid, dataset, tmp_path)
    variants = []
    for number in range(200):
        for variant in (teacher, student):
            names = {"name": f"{variant.name}{number}"}
            if variant.teacher:
                run = tmp_path / f"teacher{number}"
                names["teacher"] = replace(variant.recipe.teacher, run=run)
            recipe = variant.recipe.model_copy(update=names)
            variants.append(Variant(recipe, tmp_path / recipe.name, recipe.name))
    lines = [line for line in job_lines(variants, ["semidice", "compare"]) if not line.startswith("#")]
    pool = Recorder(size=64)
    run_jobs(fold_jobs(variants), pool)
    assert len(lines) == len(pool.order) == len(set(pool.order)) == 800


def test_workers_get_absolute_folders(dataset, grid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher, *_, student = fold_jobs(variants_of(grid, dataset, Path("out")))
    assert teacher.variant.folder == tmp_path / "out" / "teacher" / "seed_0"
    assert student.after == teacher.group == str(teacher.variant.folder)


def test_folds_that_are_not_found_after_their_jobs_are_named(dataset, grid, tmp_path, monkeypatch):
    # as if workers had written them somewhere else
    monkeypatch.setattr("semidice.training.grid.fold_jobs", lambda *_, **__: [])
    outcome = train_grid(variants_of(grid, dataset, tmp_path)[:1], QUIET)
    refused(outcome.raise_if_failed, str(tmp_path / "teacher"), "no scores of fold 0, 1", "every machine")


@pytest.mark.parametrize("on", ["local", "local:0", "local:two", "slurm", "local:-1", ""])
def test_an_unknown_engine_is_named(on):
    refused(lambda: check_engine(on), f"--on {on}:", "local:N")


def test_worker_processes_write_the_tables_of_one_process(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    run_compare(variants_of(grid, dataset, out), out, QUIET, accelerator="cpu", on="local:2")
    assert_same_tables(plain, out)
    (attempt,) = read_seconds(MethodFolder(out / "student").seed(0).fold(1))
    assert (attempt["first_step"], attempt["last_step"]) == (0, 3)
    # the second job of a worker neither imports nor loads
    assert attempt["import"] == 0


def test_the_listed_commands_write_the_tables_of_one_process(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    arguments = ["compare", dataset, grid, "-o", out, *set_options(), "--accelerator", "cpu"]
    listed = semidice(*arguments, "--list-jobs")
    assert listed.code == 0
    assert not out.exists()
    lines = listed.out.splitlines()
    assert [line.startswith("#") for line in lines] == [False, False, True, False, False]
    jobs = [line.rpartition(" ")[2] for line in lines if not line.startswith("#")]
    assert jobs == ["teacher:0", "teacher:1", "student:0", "student:1"]
    refused(semidice(*arguments, "--job", "student:0"), "there is no teacher run", "train it first")
    refused(semidice(*arguments, "--job", "teacher:7"), "--job teacher:7", "teacher:0, teacher:1")
    for job in (jobs[1], jobs[1], jobs[0], *jobs[2:]):
        done = semidice(*arguments, "--job", job)
        assert done.code == 0, done.err
    assert semidice(*arguments, "--list-jobs").out == ""
    assert semidice(*arguments).code == 0
    assert_same_tables(plain, out)


def test_a_job_whose_worker_is_killed_continues_from_its_checkpoint(dataset, grid, plain, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    variants = variants_of(grid, dataset, out)
    jobs = [DyingJob(job.variant, job.fold) for job in fold_jobs(variants)]
    with LocalPool(1, accelerator="cpu") as pool:
        assert run_jobs(jobs, pool) == {}
    for job in jobs:
        # of the killed attempt only the steps after its last checkpoint were trained again
        (attempt,) = read_seconds(RunFolder(job.variant.folder).fold(job.fold))
        assert 1 <= attempt["first_step"] <= 2
        assert attempt["last_step"] == 3
    run_compare(variants, out, QUIET, accelerator="cpu")
    assert_same_tables(plain, out)


def test_a_job_whose_worker_always_dies_fails(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    job = AlwaysDyingJob(variant, 0)
    with LocalPool(1, accelerator="cpu") as pool:
        errors = run_jobs([job], pool)
    assert errors == {job.group: "fold 0: its worker ended 4 times: exit code -9"}


def test_a_job_that_found_the_memory_full_is_continued_by_a_new_process_beside_fewer(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    job = FullMemoryJob(variant, 0)
    events = []

    with LocalPool(2, accelerator="cpu") as pool:
        assert run_jobs([job], pool, lambda _, event, __: events.append(event)) == {}
        assert pool.num_workers == 1
    assert [event.content for event in events if event is not None and event.kind == "lost"] == [
        "CUDA out of memory"
    ]
    workers = (tmp_path / "pids").read_text().split()
    assert len(set(workers)) == 2
    assert RunFolder(variant.folder).fold(0).is_finished


def test_a_wrong_variant_fails_with_its_error_and_stops_its_student(dataset, grid, tmp_path):
    out = tmp_path / "out"
    (out / "teacher" / "seed_0").mkdir(parents=True)
    (out / "teacher" / "seed_0" / "foreign.txt").touch()
    variants = variants_of(grid, dataset, out)
    refused(
        lambda: run_compare(variants, out, QUIET, accelerator="cpu", on="local:1"),
        "2 of 2 variants failed",
        "teacher/seed_0 exists and is not a run folder: it has foreign.txt",
        "student: teacher/seed_0, which it needs, failed",
    )


def test_a_bug_in_a_worker_shows_its_traceback(dataset, grid, tmp_path):
    variant = variants_of(grid, dataset, tmp_path)[0]
    job = BuggyJob(variant, 0)
    with LocalPool(2, accelerator="cpu") as pool:
        (error,) = run_jobs([job], pool).values()
    assert "Traceback" in error
    assert "TypeError: a bug of the second step" in error
    assert "in die" in error


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_along_and_is_started_again(dataset, grid, plain, tmp_path, start):
    out = tmp_path / "out"
    command = ["-m", "semidice", "compare", dataset, grid, "-o", out]
    command += [*set_options(), "--accelerator", "cpu", "--on", "local:2"]
    driver = start(*command)
    driver.wait_until(lambda: list(out.glob("*/seed_*/fold_*/.lock.owner")))
    driver.send_signal(signal.SIGKILL)
    driver.end()
    # the locks of its workers end with them
    for folder in out.glob("*/seed_*/fold_*"):
        with locked(FoldFolder(folder), "test", wait_s=PATIENCE_S):
            pass
    assert start(*command).end().code == 0
    assert_same_tables(plain, out)


def test_a_phase_inside_of_another_is_counted_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("semidice.training.context.time.monotonic", lambda: next(now))
    context = Context()
    with context.phase("steps"), context.phase("validation"):
        pass
    assert context.seconds["steps"] == 2 + 4
    assert context.seconds["validation"] == 3
