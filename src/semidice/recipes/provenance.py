"""What a run was made with, and on."""

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__


def versions() -> dict[str, str | None]:
    """Versions and devices that can change a number; None for what is not installed or not there."""
    packages = ("numpy", "segmentation-models-pytorch", "timm", "lightning-fabric", "triton")
    has_gpu = torch.cuda.is_available()
    return {
        "semidice": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version_of(package) for package in packages},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if has_gpu else None,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "cpu": _cpu_name(),
        "system": platform.platform(),
    }


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's model; Linux alone tells it in a file."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
