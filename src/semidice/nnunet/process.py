"""A command in a process group of its own, which ends with the process that waits for it.

nnU-Net has processes that load and augment. If the process that started nnU-Net is killed, such as a worker,
all of them must end: otherwise they go on writing to a fold that is started again. This module is imported
in nnU-Net's process, so it needs nothing else.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO

_SECONDS_BETWEEN_LOOKS = 0.2


def run_group(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None) -> int:
    """The exit code of a command. After an error or an interrupt, nothing that it started is left.

    output: file for its messages; None prints them.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        if process.returncode != 0:
            _end_group(process)


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    # Windows has no process groups
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()
    leader.wait()


def end_with(parent: int) -> None:
    """End the process group of this process as soon as its parent is gone. Called by the command itself."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    Thread(target=watch, name="looks for the parent", daemon=True).start()
