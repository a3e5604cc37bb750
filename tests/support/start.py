"""How tests run semidice: in this process, or as a real process that is ended with its test.

result = semidice("train", "quick", "-o", out)         # a command in this process
process = start("-m", "semidice", "train", "quick")    # a real one: wait_until, send_signal, end
refused(semidice("train", recipe), "loss.fom", "loss.form")
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

# nothing in a test takes that long, on any machine: a limit for what hangs, not a measure of speed
PATIENCE_S = 600.0

# one thread, as in this process: tests compare bits. Loopback alone: test machines may have odd networks.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
if sys.platform == "linux":
    _ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


class Result(NamedTuple):
    """How a command or a process ended."""

    code: int
    out: str
    err: str


def semidice(*arguments: object, columns: int = 400) -> Result:
    """Run a command in this process. An error that the command does not report is raised."""
    # a test of a library function needs no command line
    from semidice.cli import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Result(done.exit_code, done.stdout, done.stderr)


def refused(made: Result | Callable[[], object], *words: str) -> str:
    """Assert that a command, or a call of a function, is refused in words that contain all of `words`.

    A command must end with code 1 or 2 and one message; a function must raise a ValueError. Returns the text.
    """
    if isinstance(made, Result):
        assert made.code in (1, 2), made
        assert "Traceback" not in made.err, made.err
        text = made.err
    else:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            made()
        text = str(raised.value)
    text = " ".join(text.split())
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def wait_until(condition: Callable[[], Any]) -> None:
    """Return when the condition holds; fail after PATIENCE_S."""
    waited_until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < waited_until, "the condition never held"
        time.sleep(0.01)


def _listen() -> None:
    """A shell or nohup that runs tests in the background makes them deaf to signals, and children too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Started:
    """A process of a test, with a process group of its own."""

    def __init__(self, arguments: list[str], *, env: Mapping[str, str], cwd: Path | None) -> None:
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
            env={**os.environ, **_ENVIRONMENT, **env},
            start_new_session=True,
            preexec_fn=_listen,
        )

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Return when the condition holds; fail if the process ends before, or after PATIENCE_S."""

        def holds() -> Any:
            if found := condition():
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"the process ended before: {self.end()}")
            return None

        wait_until(holds)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> Result:
        """Wait for the end of the process."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return Result(self.process.returncode, out, err)

    def kill(self) -> None:
        """Kill what is left of the process and of its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Start Python with these arguments; whatever happens, no process is left after the test."""
    started: list[Started] = []

    def run(*arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Started:
        command = [sys.executable, *(str(argument) for argument in arguments)]
        started.append(Started(command, env=env or {}, cwd=cwd))
        return started[-1]

    yield run
    for process in started:
        process.kill()
