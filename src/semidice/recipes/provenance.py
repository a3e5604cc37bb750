"""Versions of software and hardware that a run was made with."""

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__


def versions() -> dict[str, str | None]:
    """Versions and devices on which results can depend; None for what is missing on this machine."""
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
    """The model of the processor; only Linux has a file with it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
