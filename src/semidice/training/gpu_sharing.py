"""One GPU for several processes at once, by NVIDIA's Multi-Process Service (MPS).

Without it, processes take turns on a GPU: a small network leaves most of it idle, and a second process does
not fill the gap. The service comes with the driver and needs no rights. It is started for the time of a
command, unless the user has started one. Where it does not work, processes take turns as before.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_PROGRAM = "nvidia-cuda-mps-control"
_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
# where the service of a user is, unless a variable says otherwise
_USERS_PIPE = Path("/tmp/nvidia-mps/control")
_PREFIX = "semidice_mps_"
_SECONDS = 30.0
# a context on the first GPU, without the time that importing torch takes
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(min(255, cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)))
"""


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Processes that are started in the block run on a GPU at the same time; False if they take turns."""
    if os.environ.get(_VARIABLES[0]) or _USERS_PIPE.exists():
        yield True
        return
    if shutil.which(_PROGRAM) is None:
        yield False
        return
    kept = {name: os.environ.get(name) for name in _VARIABLES}
    with TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(_VARIABLES, folder))
        is_shared = _succeeds([_PROGRAM, "-d"]) and _succeeds([sys.executable, "-c", _PROBE])
        try:
            if not is_shared:
                _restore(kept)
            yield is_shared
        finally:
            os.environ.update(dict.fromkeys(_VARIABLES, folder))
            stop_service()
            _restore(kept)


def stop_service() -> None:
    """End the service that `shared_gpu` has started, also if its process was killed; not one of the user."""
    if Path(os.environ.get(_VARIABLES[0], "")).name.startswith(_PREFIX):
        _succeeds([_PROGRAM], text="quit\n")


def _restore(kept: dict[str, str | None]) -> None:
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _succeeds(command: list[str], *, text: str = "") -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(command, input=text, text=True, capture_output=True, timeout=_SECONDS)
        return ended.returncode == 0
    return False
