"""A process ends with the one that started it, even if that one was killed.

Otherwise it would stay on the GPU, and go on writing to a folder that the same command may have opened again.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from threading import Thread


def end_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Make this process, one of `multiprocessing`, end as soon as its parent is gone.

    If it leads a process group, the whole group ends: also what a library started. clean_up: called before.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("only a process that multiprocessing started has a parent to end with")

    def watch() -> None:
        # becomes ready when the parent is gone, however it ended
        wait([parent.sentinel])
        try:
            clean_up()
        finally:
            # Windows has no process groups
            if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(1)

    Thread(target=watch, name="watches the parent", daemon=True).start()
