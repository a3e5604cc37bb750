"""The service by which processes share a GPU: started and stopped with the pool, never that of a user."""

import os
from pathlib import Path

import pytest

from semidice.training import local_pool
from semidice.training.local_pool import shared_gpu, stop_service

VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of the driver's, which writes down how it is called."""
    log, program = tmp_path / "calls", tmp_path / "nvidia-cuda-mps-control"
    log.touch()
    program.write_text(f'#!/bin/sh\necho "$1 $(cat) ${VARIABLE}" >> "{log}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(local_pool, "_USERS_PIPE", tmp_path / "nobody")
    monkeypatch.setattr(local_pool, "_PROBE", "")
    return log


def test_the_service_runs_in_a_folder_of_its_own_for_the_time_of_the_block(calls: Path) -> None:
    with shared_gpu() as is_shared:
        folder = os.environ[VARIABLE]
        assert is_shared
        assert Path(folder).is_dir()
        assert calls.read_text() == f"-d  {folder}\n"
    assert calls.read_text() == f"-d  {folder}\n quit {folder}\n"
    assert VARIABLE not in os.environ
    assert not Path(folder).exists()


def test_a_gpu_that_refuses_the_service_is_used_in_turns(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_pool, "_PROBE", "raise SystemExit(1)")
    with shared_gpu() as is_shared:
        assert not is_shared
        assert VARIABLE not in os.environ
    assert calls.read_text().splitlines()[-1].startswith(" quit ")
    assert VARIABLE not in os.environ


def test_without_the_program_processes_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_pool, "_USERS_PIPE", tmp_path / "nobody")
    with shared_gpu() as is_shared:
        assert not is_shared


@pytest.mark.parametrize("by", ["a variable", "a pipe"])
def test_a_service_of_the_user_is_used_and_not_stopped(
    calls: Path, monkeypatch: pytest.MonkeyPatch, by: str, tmp_path: Path
) -> None:
    if by == "a variable":
        monkeypatch.setenv(VARIABLE, str(tmp_path))
    else:
        monkeypatch.setattr(local_pool, "_USERS_PIPE", tmp_path)
    with shared_gpu() as is_shared:
        assert is_shared
    stop_service()
    assert calls.read_text() == ""
