"""Seconds of `semidice prepare` for gzipped volumes and for pictures, beside another checkout, as Markdown.

    python benchmarks/bench_prepare.py
    python benchmarks/bench_prepare.py --other ../old --volumes 40 --pictures 1000 --rounds 3

The whole command is measured, with its imports. The checkouts take turns; a ratio is the median over the
rounds. Without --workers each checkout decides itself how many threads or processes it starts.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image
from rich.progress import track

HERE = Path(__file__).parents[1]
AFFINE = np.diag([0.7, 0.7, 1.5, 1.0])


def write_volume(folder: Path, name: str, rng: np.random.Generator) -> None:
    """A CT of 256 x 256 x 48 with noise, and a sphere as its mask."""
    space = (256, 256, 48)
    distance = sum((axis / length - 0.5) ** 2 for axis, length in zip(np.indices(space), space, strict=True))
    values = np.rint(rng.normal(0, 20, space) + 60 * (distance < 0.1)).astype(np.int16)
    for kind, array in (("images", values), ("masks", (distance < 0.1).astype(np.uint8))):
        image = nibabel.Nifti1Image(array, AFFINE)  # type: ignore[no-untyped-call]
        nibabel.save(image, folder / kind / f"{name}.nii.gz")


def write_picture(folder: Path, name: str, rng: np.random.Generator) -> None:
    """A grey picture of 256 x 256 with noise, and a disc as its mask."""
    rows, columns = np.indices((256, 256)) / 256 - 0.5
    disc = rows**2 + columns**2 < 0.1
    pixels = rng.normal(100, 10, disc.shape) + 60 * disc
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "images" / f"{name}.png")
    Image.fromarray(disc * np.uint8(255)).save(folder / "masks" / f"{name}.png")


def made(folder: Path, number: int, write: Callable[[Path, str, np.random.Generator], None]) -> Path:
    """A user's folder of `number` cases."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for case in track(range(number), f"writing {folder.name}", transient=True):
        write(folder, f"case{case}", rng)
    return folder


def seconds(checkout: Path, raw: Path, workers: int | None) -> float:
    """The time of the command of a checkout."""
    out = raw.with_name("out")
    command = [sys.executable, "-m", "semidice", "prepare", "folder", str(raw), str(out)]
    command += [] if workers is None else ["--workers", str(workers)]
    start = time.perf_counter()
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(checkout / "src")}
    )
    taken = time.perf_counter() - start
    shutil.rmtree(out)
    return taken


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, help="another checkout, to compare with")
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    checkouts = {"here": HERE} | ({"other": chosen.other.resolve()} if chosen.other else {})
    print(f"{os.cpu_count()} CPUs\n\n| raw files | checkout | s | ratio to the other |\n|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as temp:
        raws = {
            f"{chosen.volumes} volumes": made(Path(temp, "volumes"), chosen.volumes, write_volume),
            f"{chosen.pictures} pictures": made(Path(temp, "pictures"), chosen.pictures, write_picture),
        }
        for name, raw in raws.items():
            times: dict[str, list[float]] = {checkout: [] for checkout in checkouts}
            for _ in range(chosen.rounds):
                for checkout, path in checkouts.items():
                    times[checkout].append(seconds(path, raw, chosen.workers))
            last = times[list(checkouts)[-1]]
            for checkout, taken in times.items():
                ratio = statistics.median(a / b for a, b in zip(taken, last, strict=True))
                print(f"| {name} | {checkout} | {statistics.median(taken):.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
