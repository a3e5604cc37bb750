"""Reads a NIfTI: its values, the sides of its voxels, and the positions that its header declares.

The values are those of nibabel, with slope and intercept. The header may declare two positions, sform and
qform; they are known only if their codes are set. A header whose voxel size contradicts its sform is refused,
because volumes would be wrong by the ratio.
"""

import gzip
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.imageglobals import logger as nibabel_log
from nibabel.spatialimages import HeaderDataError

from .raw import Content, check_size

_MM = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_KINDS = {348: nibabel.Nifti1Image, 540: nibabel.Nifti2Image}
# pixdim and affine are stored as float32, the affine sometimes with four decimals
_SPACING_TOLERANCE = 0.01


def nifti_header(path: Path) -> Any:
    """The header of a file as it is stored; its voxels are not read."""
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        header = _header(file.read(540))
    check_size(header.get_data_shape())
    return header


def _header(content: bytes) -> Any:
    kind = _kind(content).header_class
    return kind(content[: kind.template_dtype.itemsize], check=False)


def _kind(content: bytes) -> Any:
    orders = ("little", "big")
    sizes = [int.from_bytes(content[:4], order) for order in orders]  # type: ignore[arg-type]
    kind = next((_KINDS[size] for size in sizes if size in _KINDS), None)
    if kind is None:
        raise ValueError("it is not a NIfTI file")
    return kind


def read_nifti(content: bytes) -> Content:
    """The NIfTI in the bytes of a file that is not compressed."""
    # nibabel turns a side of 0 into 1
    sides = _header(content)["pixdim"][1:].astype(np.float32)
    # it repairs small faults of headers and logs that to the terminal, into the progress bar
    level = nibabel_log.level
    nibabel_log.setLevel(logging.CRITICAL + 1)
    try:
        image = _kind(content).from_bytes(content)
    finally:
        nibabel_log.setLevel(level)
    dtype = image.get_data_dtype()
    if dtype.kind not in "iuf":
        raise ValueError(f"it holds {dtype}, and not one real number per voxel")
    # the fourth side of a NIfTI is time
    if not np.isfinite(sides[:3]).all():
        raise ValueError(
            f"its voxel size is {' x '.join(map(str, sides[:3]))}: write the right one into its header"
        )
    affine = np.asarray(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all():
        raise ValueError("its affine is not finite")
    unit = _MM.get(image.header.get_xyzt_units()[0], 1.0)
    sides_mm = tuple(side * unit for side in _spacing(image, sides[: len(image.shape)]))
    affines_mm = tuple(np.diag([unit, unit, unit, 1.0]) @ declared for declared in _declared_affines(image))
    return Content(np.asanyarray(image.dataobj), False, sides_mm, affine, affines_mm)


def _spacing(image: Any, sides: np.ndarray) -> list[float]:
    """The sides of a voxel by the header; a side of 0 is that of the sform, if there is one."""
    # through text, so that the float32 number 0.7 becomes 0.7 and not 0.699999988
    spacing = [abs(float(str(side))) for side in sides]
    sform, code = image.get_sform(coded=True)
    if sform is None or not np.isfinite(sform).all():
        return spacing
    steps = [float(str(np.float32(step))) for step in np.linalg.norm(sform[:3, :3], axis=0)]
    for axis, (side, step) in enumerate(zip(spacing, steps, strict=False)):
        if side == 0:
            spacing[axis] = step
        # after a registration (codes 3 and more) the sform is the space of the atlas, not that of the scan
        elif image.shape[axis] > 1 and code < 3 and abs(step - side) > _SPACING_TOLERANCE * side:
            raise ValueError(
                f"its voxel size is {side:g} along axis {axis} by its pixdim, but {step:g} by its sform: "
                "write the right one into both"
            )
    return spacing


def _declared_affines(image: Any) -> list[np.ndarray]:
    """The sform and the qform, if their codes are set and they are finite."""
    affines = [image.get_sform(coded=True)[0]]
    # nibabel does not check that the qform is a rotation if there is an sform
    with suppress(ValueError, HeaderDataError):
        affines.append(image.get_qform(coded=True)[0])
    return [
        affine.astype(np.float64) for affine in affines if affine is not None and np.isfinite(affine).all()
    ]
