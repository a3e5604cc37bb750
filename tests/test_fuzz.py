"""Damaged files: a short run of `make fuzz`, and proofs that it finds what it looks for."""

import warnings

import fuzzing
import pytest


@pytest.fixture(autouse=True)
def _warnings_are_shown():
    # a library may warn about a damaged file before it refuses it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_eight_seconds_of_damaged_files_end_in_messages():
    trials, failures = fuzzing.fuzz(8)
    assert not failures
    assert trials >= len(fuzzing.TARGETS)


def test_every_target_reads_its_undamaged_file(tmp_path):
    for name, target in fuzzing.TARGETS.items():
        (tmp_path / name).mkdir()
        target.read(target.make(tmp_path / name))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda path: {}["missing"], "KeyError"),
        (lambda path: bytes(3 * 10**9), "MemoryError"),
        (lambda path: _wait_for_ever(), "it took longer than"),
    ],
    ids=["a traceback", "memory", "a hang"],
)
def test_an_error_of_another_kind_is_found(monkeypatch, read, message):
    monkeypatch.setattr(fuzzing, "MAX_SECONDS", 0.3)
    target = fuzzing.TARGETS["log"]._replace(read=read)
    monkeypatch.setattr(fuzzing, "TARGETS", {"log": target})
    trials, failures = fuzzing.fuzz(0.01)
    assert len(failures) == trials
    assert all(message in problem for problem in failures.values())


def _wait_for_ever():
    while True:
        pass
