"""Images per second that reach a training step, with soft labels of four raters, as Markdown.

    python benchmarks/bench_data.py                  two threads of a CPU, against a DataLoader with MONAI
    python benchmarks/bench_data.py --device cuda    a GPU, with `make` as a CUDA graph and without

Batches of 8 slices of 512 x 512 come from one prepared dataset, which the first run writes. The reference
does the same work in the usual way: a PyTorch DataLoader with two processes reads a case, unpacks and
averages the masks, and MONAI's RandAffine and RandFlip change image and label; it does not compute which
voxels are valid. All methods take turns in one run. --docs docs/performance.md writes the table there.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doc_tables import write_between_markers
from rich.progress import track

from semidice.data.batches.augment import AugmentOptions
from semidice.data.batches.feed import Batches, BatchOptions, Feed
from semidice.data.batches.label_making import LabelOptions
from semidice.data.batches.storage import Storage
from semidice.data.dataset import Dataset
from semidice.data.intensities import stored_mean_std
from semidice.data.manifest import Kind, Manifest, PrepareOptions, Scan
from semidice.data.packing import pack_classes
from semidice.data.phantom import make_phantom
from semidice.paths import DatasetFolder, file_hash

SIDE, RATERS, BATCH, WORKERS = 512, 4, 8, 2
KINDS: tuple[Kind, ...] = ("images", "masks")
# maximum number of batches that are read ahead during the turns of other methods
AHEAD = 8
AUGMENTED = {"as they are": None, "augmented": AugmentOptions()}


def prepared(num_cases: int) -> Dataset:
    """The dataset of the benchmark: phantoms of 128 x 128 with repeated pixels, written once."""
    path = Path(tempfile.gettempdir()) / f"semidice_bench_{SIDE}_{num_cases}"
    if not path.exists():
        temp_path = Path(tempfile.mkdtemp(dir=path.parent))
        write_phantoms(DatasetFolder(temp_path), num_cases)
        temp_path.rename(path)
    return Dataset(path)


def write_phantoms(folder: DatasetFolder, num_cases: int) -> None:
    """Write arrays and manifest as `semidice prepare` does."""
    for kind in KINDS:
        (folder.path / kind).mkdir()
    raters, scans = tuple(f"rater{number}" for number in range(RATERS)), []
    repeated = np.ones((SIDE // 128, SIDE // 128), dtype=np.uint8)
    for number in track(range(num_cases), "writing phantoms"):
        phantom = make_phantom(1, size=(128, 128), num_raters=RATERS, seed=number)
        image = np.kron((phantom.image[0].numpy().clip(0, 1) * 255).astype(np.uint8), repeated)
        masks = np.kron(phantom.masks[0].numpy().astype(np.uint8), repeated)
        arrays: dict[Kind, np.ndarray] = {
            "images": image,
            "masks": pack_classes(masks, num_classes=2, num_space_axes=2),
        }
        paths = {kind: folder.array(kind, f"scan{number}") for kind in KINDS}
        for kind, array in arrays.items():
            np.save(paths[kind], array[None])
        scans.append(
            Scan(
                name=f"scan{number}",
                patient=f"patient{number}",
                slices=None,
                shape=(SIDE, SIDE),
                spacing_mm=(1.0, 1.0),
                affine=None,
                raw_shape=(SIDE, SIDE),
                raters=raters,
                drawn=(0, 1),
                inputs={},
                arrays={kind: file_hash(path) for kind, path in paths.items()},
                num_bytes={kind: path.stat().st_size for kind, path in paths.items()},
                **stored_mean_std([image])._asdict(),
            )
        )
    manifest = Manifest(
        version=1,
        source="phantom",
        class_names=("background", "lesion"),
        raters=raters,
        channels=("CT",),
        mean=(0.33,),
        std=(0.14,),
        options=PrepareOptions(keep_bytes=True),
        scans=tuple(scans),
    )
    folder.manifest.write_text(manifest.model_dump_json())


def ours(
    dataset: Dataset, device: str, augment: AugmentOptions | None, *, resident: bool
) -> Iterator[object]:
    """Endless batches, as a training step gets them."""
    batches = batches_of(dataset, device, augment, resident=resident)
    for feed in batches.feeds(0, 1_000_000):
        yield batches.make(feed.to(device))


def ours_recorded(
    dataset: Dataset, device: str, augment: AugmentOptions | None, *, resident: bool
) -> Iterator[object]:
    """Endless batches with `make` recorded as a CUDA graph, as in the training engine."""
    batches = batches_of(dataset, device, augment, resident=resident)
    static = batches.feed(0).to(device)
    batches.make(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = batches.make(static)
    for feed in batches.feeds(0, 1_000_000):
        copy_into(static, feed)
        graph.replay()
        yield batch


def copy_into(static: Feed, feed: Feed) -> None:
    """Copy a feed into the tensors that the graph reads."""
    for target, part in zip(static, feed, strict=True):
        if target is not None and part is not None:
            target.copy_(part, non_blocking=True)


def batches_of(dataset: Dataset, device: str, augment: AugmentOptions | None, *, resident: bool) -> Batches:
    """Batches of all cases with mean labels."""
    return Batches(
        Storage(dataset, device, resident=resident),
        range(len(dataset)),
        dataset.mean_std(range(len(dataset))),
        BatchOptions(BATCH, LabelOptions(maker="mean"), augment),
        workers=WORKERS,
    )


class MonaiCases(torch.utils.data.Dataset[Any]):
    """Cases loaded and augmented in the usual way."""

    def __init__(self, dataset: Dataset, *, augmented: bool) -> None:
        # not at the top, because a machine with a GPU may not have MONAI
        from monai.transforms.compose import Compose
        from monai.transforms.spatial.dictionary import RandAffined, RandFlipd

        self.dataset = dataset
        keys = ["image", "label"]
        self.change = None
        if augmented:
            self.change = Compose(
                [
                    RandAffined(
                        keys,
                        prob=1.0,
                        scale_range=((-0.5, 1.0), (-0.5, 1.0)),
                        translate_range=(SIDE / 4, SIDE / 4),
                        spatial_size=(SIDE, SIDE),
                        mode="bilinear",
                        padding_mode="zeros",
                    ),
                    RandFlipd(keys, prob=0.5, spatial_axis=0),
                    RandFlipd(keys, prob=0.5, spatial_axis=1),
                ]
            )

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        name = self.dataset.cases[number].scan.name
        folder, manifest = self.dataset.folder, self.dataset.manifest
        image = np.load(folder.array("images", name))[0].astype(np.float32) * np.float32(1 / 255)
        image = (image - np.float32(manifest.mean[0])) / np.float32(manifest.std[0])
        masks = np.unpackbits(np.load(folder.array("masks", name))[0, :, 0], axis=-1)
        foreground = masks.mean(0, dtype=np.float32)
        label = np.stack([1 - foreground, foreground])
        case = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}
        return case if self.change is None else self.change(case)


def monai(dataset: Dataset, *, augmented: bool) -> Iterator[object]:
    """Endless batches of the DataLoader with MONAI, in random order."""
    from monai.data.meta_obj import set_track_meta

    # otherwise MONAI keeps an affine with every tensor, which is slower
    set_track_meta(False)
    shuffled = np.random.default_rng(0)
    order = (int(number) for _ in count() for number in shuffled.permutation(len(dataset)))
    yield from torch.utils.data.DataLoader(
        MonaiCases(dataset, augmented=augmented),
        sampler=order,
        batch_size=BATCH,
        num_workers=WORKERS,
    )


def methods(dataset: Dataset, device: str, augment: AugmentOptions | None) -> dict[str, Iterator[object]]:
    """The methods to compare, by name."""
    if device == "cuda":
        return {
            "resident, CUDA graph": ours_recorded(dataset, device, augment, resident=True),
            "resident, eager": ours(dataset, device, augment, resident=True),
            f"read by {WORKERS} threads, CUDA graph": ours_recorded(dataset, device, augment, resident=False),
        }
    return {
        "semidice, in memory": ours(dataset, device, augment, resident=True),
        f"semidice, read by {WORKERS} threads": ours(dataset, device, augment, resident=False),
        f"DataLoader of {WORKERS} processes with MONAI": monai(dataset, augmented=augment is not None),
    }


def images_per_second(batches: Iterator[object], num_batches: int, wait: Callable[[], object]) -> float:
    """The rate over one turn, without the batches that were read ahead."""
    for _ in islice(batches, AHEAD):
        pass
    wait()
    start = time.perf_counter()
    for _ in islice(batches, num_batches):
        pass
    wait()
    return num_batches * BATCH / (time.perf_counter() - start)


def table(device: str, num_cases: int, num_rounds: int, num_batches: int) -> Iterator[str]:
    """One row per method and kind of batch: the median rate, and the median ratio to the last method."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    yield (
        f"{where}, torch {torch.__version__}; `python benchmarks/bench_data.py --device {device}`. "
        f"Batches of {BATCH}, {SIDE} x {SIDE}, mean label of {RATERS} raters.\n"
    )
    yield "| batches | by | images/s | best round | times the last row |\n|---|---|---:|---:|---:|"
    dataset = prepared(num_cases)
    for kind, augment in AUGMENTED.items():
        batches_by = methods(dataset, device, augment)
        rates: dict[str, list[float]] = {name: [] for name in batches_by}
        for _ in track(range(num_rounds), kind, transient=True):
            for name, batches in batches_by.items():
                rates[name].append(images_per_second(batches, num_batches, wait))
        last = rates[list(batches_by)[-1]]
        for name, rate in rates.items():
            ratio = statistics.median(a / b for a, b in zip(rate, last, strict=True))
            yield f"| {kind} | {name} | {statistics.median(rate):.0f} | {max(rate):.0f} | {ratio:.2f} |"


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", type=int, default=256, help="in the dataset, 0.4 MB each")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method")
    parser.add_argument("--batches", type=int, default=40, help="in a turn")
    parser.add_argument("--docs", type=Path, help="page whose table to replace")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    lines = []
    for line in table(chosen.device, chosen.cases, chosen.rounds, chosen.batches):
        print(line, flush=True)
        lines.append(line + "\n")
    if chosen.docs:
        write_between_markers(chosen.docs, f"data {chosen.device}", "".join(lines))


if __name__ == "__main__":
    main()
