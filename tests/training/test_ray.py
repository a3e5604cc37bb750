"""A grid on Ray: a cluster of three nodes on this machine, of which a node, a worker or the driver dies."""

import importlib.util
import os
import signal
import sys

import pytest
from grid_jobs import DyingJob, FullMemoryJob, set_options, variants_of, write_grid
from prepared import make_prepared
from rich.console import Console
from test_jobs import assert_same_tables

from semidice.compare import run_compare
from semidice.paths import RunFolder
from semidice.training.context import read_seconds
from semidice.training.jobs import fold_jobs, run_jobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integrations,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
    # ray leaves sockets and files open when a cluster ends
    pytest.mark.filterwarnings("ignore"),
]
QUIET = Console(quiet=True)


@pytest.fixture
def cluster(monkeypatch):
    """Three nodes with one processor each; the first one is the head, on which the driver is."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # the nodes import semidice and the jobs of the tests
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def grid(tmp_path):
    return write_grid(tmp_path)


@pytest.fixture
def dataset(tmp_path):
    return make_prepared(tmp_path / "data", num_cases=8, truth=False).folder.path


@pytest.fixture
def plain(dataset, grid, tmp_path):
    out = tmp_path / "plain"
    run_compare(variants_of(grid, dataset, out), out, QUIET, accelerator="cpu")
    return out


def test_a_killed_node_and_killed_workers_lose_nothing(cluster, dataset, grid, plain, tmp_path):
    from semidice.training.ray_pool import RayPool

    out = tmp_path / "out"
    out.mkdir()
    variants = variants_of(grid, dataset, out)
    # the worker of each kills itself at step 2, the first time
    jobs = [DyingJob(job.variant, job.fold) for job in fold_jobs(variants)]
    nodes, lost = list(cluster.worker_nodes), []

    def kill_a_node(job, event, schedule):
        kind = "" if event is None else event.kind
        if kind == "lost":
            lost.append(job)
        if kind == "phase" and nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            nodes.clear()

    with RayPool(cluster.address, accelerator="cpu") as pool:
        assert run_jobs(jobs, pool, kill_a_node) == {}
    assert len(lost) >= len(jobs)
    for job in jobs:
        (attempt,) = read_seconds(RunFolder(job.variant.folder).fold(job.fold))
        assert attempt["first_step"] >= 1
    run_compare(variants, out, QUIET, accelerator="cpu")
    assert_same_tables(plain, out)


def test_a_process_whose_job_found_the_memory_full_ends(dataset, grid, tmp_path, start):
    """Without a cluster: Ray may take another process for the next job even if this one is left."""
    script = "\n".join(
        [
            "import pathlib",
            "from grid_jobs import FullMemoryJob, variants_of",
            "from semidice.training.jobs import WorkerOptions",
            "from semidice.training.ray_pool import _task",
            f"folder = pathlib.Path({str(tmp_path)!r})",
            f"variant = variants_of(pathlib.Path({str(grid)!r}), pathlib.Path({str(dataset)!r}), folder)[0]",
            "job = FullMemoryJob(variant, 0)",
            "for event in _task(job, WorkerOptions('cpu')): print(event.kind, flush=True)",
            "print('is used again')",
        ]
    )
    ended = start("-c", script, env={"PYTHONPATH": os.pathsep.join(sys.path)}).end()
    assert ended[:2] == (1, "lost\n"), ended.err


def test_a_job_that_found_the_memory_full_is_continued(cluster, dataset, grid, tmp_path):
    from semidice.training.ray_pool import RayPool

    variant = variants_of(grid, dataset, tmp_path)[0]
    job = FullMemoryJob(variant, 0)
    with RayPool(cluster.address, accelerator="cpu") as pool:
        assert run_jobs([job], pool) == {}
    assert RunFolder(variant.folder).fold(0).is_finished


def test_a_killed_driver_is_started_again(cluster, dataset, grid, plain, tmp_path, start):
    out = tmp_path / "out"
    command = ["-m", "semidice", "compare", dataset, grid, "-o", out]
    command += [*set_options(), "--accelerator", "cpu", "--on", f"ray:{cluster.address}"]
    driver = start(*command)
    driver.wait_until(lambda: list(out.glob("*/seed_*/fold_*/.lock.owner")))
    driver.send_signal(signal.SIGKILL)
    driver.end()
    finished = {path: path.read_bytes() for path in out.glob("*/seed_*/fold_*/cases.parquet")}
    assert start(*command).end().code == 0
    # a finished fold is not trained again
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert_same_tables(plain, out)
