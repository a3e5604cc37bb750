"""Memory and images per second of datasets larger than the memory, as Markdown.

    python benchmarks/bench_large.py [--docs docs/performance.md]

The datasets are stand-ins of 2, 20 and 200 GB: the files have their full size, but all except their first
4 kB is a hole, so that they need a few MB of disk. Reading a hole is reading from the page cache: the
figures are those of the program, and a disk that is slower limits them further. All scans are alike, so the
hash of one file, computed from its bytes, is the hash of all.

Each figure comes from a new process: open the dataset, split it, make batches of 8 slices of 512 x 512 with
the mean label of four raters, and read some held-out cases. Peak memory is what the process needs beyond its
imports (high-water mark of the resident set). The last rows are a PyTorch DataLoader with two processes that
maps the same files.
"""

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doc_tables import write_between_markers
from rich.progress import track

from semidice.data.batches.augment import AugmentOptions
from semidice.data.batches.feed import Batches, BatchOptions, whole_cases
from semidice.data.batches.label_making import LabelOptions
from semidice.data.batches.storage import Storage
from semidice.data.dataset import Dataset
from semidice.data.folds import fold_cases, read_folds, split_dataset, write_folds
from semidice.data.intensities import stored_mean_std
from semidice.data.manifest import Kind, Manifest, PrepareOptions, Scan, manifest_text
from semidice.paths import DatasetFolder

SIDE, SLICES, RATERS, BATCH, WORKERS = 512, 256, 4, 8, 2
SIZES_GB = (2, 20, 200)
# of a file that are not zero: with its header, one block of a disk
FIRST_BYTES = 4096 - 128
# batches before the clock starts: threads and processes have then read ahead
WARM_UP = 12
METHODS = {
    "resident": "semidice, in memory",
    "streamed": f"semidice, read by {WORKERS} threads",
    "on foreground": f"semidice, read by {WORKERS} threads, windows on the foreground",
    "DataLoader": f"DataLoader of {WORKERS} processes",
}


def write_stand_in(path: Path, num_gb: float) -> None:
    """Write a dataset whose arrays have this size together, as files with holes."""
    folder, raters = DatasetFolder(path), tuple(f"rater{number}" for number in range(RATERS))
    shapes: dict[Kind, tuple[int, ...]] = {
        "images": (SLICES, 1, SIDE, SIDE),
        "masks": (SLICES, RATERS, 1, SIDE, SIDE // 8),
    }
    dtypes: dict[Kind, np.dtype[Any]] = {"images": np.dtype(np.int16), "masks": np.dtype(np.uint8)}
    scan_bytes = sum(math.prod(shape) * dtypes[kind].itemsize for kind, shape in shapes.items())
    names = [f"scan{number:05d}" for number in range(max(5, round(num_gb * 1e9 / scan_bytes)))]
    hashes: dict[Kind, str] = {}
    sizes: dict[Kind, int] = {}
    for kind, shape in shapes.items():
        (path / kind).mkdir(parents=True)
        for name in names:
            _write_with_hole(folder.array(kind, name), shape, dtypes[kind])
        with folder.array(kind, names[0]).open("rb") as file:
            hashes[kind] = hashlib.file_digest(file, "sha256").hexdigest()
        sizes[kind] = folder.array(kind, names[0]).stat().st_size
    measured = stored_mean_std(np.load(folder.array("images", names[0]), mmap_mode="r"))
    scans = tuple(
        Scan(
            name=name,
            patient=name,
            slices=tuple(range(SLICES)),
            shape=(SIDE, SIDE),
            spacing_mm=(1.0, 1.0),
            thickness_mm=1.0,
            affine=None,
            raw_shape=(SIDE, SIDE, SLICES),
            raters=raters,
            drawn=(0, 1),
            inputs={},
            arrays=hashes,
            num_bytes=sizes,
            mean=measured.mean,
            std=measured.std,
        )
        for name in names
    )
    manifest = Manifest(
        source="stand-in",
        class_names=("background", "lesion"),
        raters=raters,
        channels=("CT",),
        mean=measured.mean,
        std=measured.std,
        options=PrepareOptions(),
        scans=scans,
    )
    folder.manifest.write_text(manifest_text(manifest))


def _write_with_hole(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """An array with some values, so that images have contrast and masks foreground, and zeros as a hole."""
    values = np.arange(FIRST_BYTES // dtype.itemsize).astype(dtype)
    with path.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.write(values.tobytes())
        file.truncate(start + math.prod(shape) * dtype.itemsize)


def batches_of(dataset: Dataset, method: str) -> Iterator[object]:
    """Endless batches of the training cases of a fold, after some held-out cases were read."""
    with tempfile.TemporaryDirectory() as folder:
        write_folds(Path(folder) / "folds.json", dataset, split_dataset(dataset))
        folds = read_folds(Path(folder) / "folds.json", dataset)
    training, held_out = fold_cases(folds, 0)
    storage, mean_std = Storage(dataset, "cpu", resident=method == "resident"), dataset.mean_std(training)
    for _ in whole_cases(storage, held_out[:: max(1, len(held_out) // 64)], mean_std, batch_size=BATCH):
        pass
    augment = AugmentOptions(crop=(256, 256), foreground=0.5) if method == "on foreground" else None
    batches = Batches(
        storage,
        training,
        mean_std,
        BatchOptions(BATCH, LabelOptions(maker="mean"), augment),
        workers=WORKERS,
    )
    for feed in batches.feeds(0, 1_000_000):
        yield batches.make(feed)


class MappedCases(torch.utils.data.Dataset[Any]):
    """Cases as a plain loop reads them: memory-mapped, unpacked and averaged."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        case, manifest = self.dataset.cases[number], self.dataset.manifest
        image, packed = (
            np.load(self.dataset.folder.array(kind, case.scan.name), mmap_mode="r")[case.row]
            for kind in ("images", "masks")
        )
        scaled = (image.astype(np.float32) / np.float32(32767) - manifest.mean[0]) / manifest.std[0]
        foreground = np.unpackbits(packed[:, 0], axis=-1).mean(0, dtype=np.float32)
        return torch.from_numpy(scaled), torch.from_numpy(np.stack([1 - foreground, foreground]))


def data_loader(dataset: Dataset) -> Iterator[object]:
    """Endless batches of a DataLoader, in random order."""
    numbers = np.random.default_rng(0)
    while True:
        order = numbers.permutation(len(dataset)).tolist()
        yield from torch.utils.data.DataLoader(
            MappedCases(dataset), sampler=order, batch_size=BATCH, num_workers=WORKERS
        )


def memory_mb(field: str) -> float:
    """A size in /proc/self/status."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) / 1024


def measured(path: Path, method: str, num_batches: int) -> dict[str, float]:
    """Images per second and memory of this process, which must be new."""
    # a second thread waits for a core that another program has, and then measures that program
    torch.set_num_threads(1)
    before = memory_mb("VmRSS")
    dataset = Dataset(path)
    batches = data_loader(dataset) if method == "DataLoader" else batches_of(dataset, method)
    for _ in islice(batches, WARM_UP):
        pass
    start = time.perf_counter()
    for _ in islice(batches, num_batches):
        pass
    rate = num_batches * BATCH / (time.perf_counter() - start)
    return {"rate": rate, "grown_mb": memory_mb("VmHWM") - before, "cases": len(dataset)}


def in_new_process(path: Path, method: str, num_batches: int) -> dict[str, float]:
    """`measured` in a new process."""
    command = [sys.executable, __file__, "--measure", str(path), method, "--batches", str(num_batches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(folder: Path, num_rounds: int, num_batches: int) -> Iterator[str]:
    """One row per size and method: medians over the rounds, in which all methods take turns."""
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    paths = {size: folder / f"stand_in_{size}" for size in SIZES_GB}
    for size, path in paths.items():
        write_stand_in(path, size)
    disk = sum(file.stat().st_blocks * 512 for file in folder.rglob("*.npy"))
    yield (
        f"CPU, 1 thread, torch {torch.__version__}; `python benchmarks/bench_large.py`. Batches of {BATCH}, "
        f"{SIDE} x {SIDE}, mean label of {RATERS} raters; all stand-ins together take {disk / 1e6:.0f} MB of "
        "disk.\n"
    )
    for _ in track(range(num_rounds), "rounds", transient=True):
        for method in METHODS:
            for size, path in paths.items():
                # what does not fit into memory
                if method == "resident" and size > 2:
                    continue
                results.setdefault((method, size), []).append(in_new_process(path, method, num_batches))
    resident = [each["rate"] for each in results["resident", 2]]
    yield "| by | dataset | cases | images/s | times in memory | peak memory |"
    yield "|---|---:|---:|---:|---:|---:|"
    for (method, size), each in results.items():
        rates = [result["rate"] for result in each]
        peak = "" if method == "DataLoader" else f"{max(result['grown_mb'] for result in each):.0f} MB"
        ratio = statistics.median(a / b for a, b in zip(rates, resident, strict=True))
        row = f"| {METHODS[method]} | {size} GB | {each[0]['cases']:.0f} "
        yield f"{row}| {statistics.median(rates):.0f} | {ratio:.2f} | {peak} |"


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method")
    parser.add_argument("--batches", type=int, default=100, help="in a turn")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    parser.add_argument("--measure", nargs=2, metavar=("DATASET", "METHOD"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        path, method = chosen.measure
        print(json.dumps(measured(Path(path), method, chosen.batches)))
        return
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in table(Path(folder), chosen.rounds, chosen.batches):
            print(line, flush=True)
            lines.append(line + "\n")
    if chosen.docs:
        write_between_markers(chosen.docs, "large cpu", "".join(lines))


if __name__ == "__main__":
    main()
