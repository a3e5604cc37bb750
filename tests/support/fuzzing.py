"""Random damage to everything that semidice reads; only an error of its own may come of it.

    python tests/support/fuzzing.py [--seconds 600] [--seed 0]

Each target makes a good file, damages it, and reads it. It passes if the reader returns, or raises a
ValueError or an OSError, within `MAX_SECONDS` and without `MAX_BYTES` of memory. Anything else is printed
with the seed that makes it again, and the exit code is 1.
"""

import argparse
import gzip
import io
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import torch
import yaml
from PIL import Image
from prepared import make_prepared
from trained import recipe_of

from semidice.calibration import TemperatureScaling
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds, split_folds, write_folds
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.data.sources.readers import file_shape, mask_values, read_image, read_mask
from semidice.metrics import CaseRow, CaseTable, read_cases, write_cases
from semidice.networks.checkpoint import Checkpoint, write_checkpoint
from semidice.prediction.outputs import VOLUME_COLUMNS, read_volumes
from semidice.recipes import read_recipe, write_recipe
from semidice.recipes.grid import read_variants
from semidice.report.curves import read_log
from semidice.runs.predictions import read_prediction, write_prediction

MAX_SECONDS = 10
MAX_BYTES = 2 * 10**9
# what a reader may raise: its own messages, and the system's, which name the file
ALLOWED = (ValueError, OSError)
# numbers and words that break assumptions
ODD_NUMBERS = (0, -1, 1, 255, 256, 65535, 2**31 - 1, 2**31, 2**63, 10**30, float("nan"), float("inf"), 1e-320)
ODD_VALUES = (*ODD_NUMBERS, None, True, "", "x", "../x", "[x]", "é\0", [], {}, [[]], [None], {"a": [1]})


class Target(NamedTuple):
    """make(folder) writes a good file and returns it; damage(path, rng) changes it; read(path) reads it."""

    make: Callable[[Path], Path]
    damage: Callable[[Path, np.random.Generator], None]
    read: Callable[[Path], object]


class TooSlowError(Exception):
    """A reader took longer than `MAX_SECONDS`."""


def damage_bytes(path: Path, rng: np.random.Generator) -> None:
    """Cut, flip, insert, repeat or zero some bytes, more often near the start, where headers are."""
    content = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(1, 5))):
        if not content:
            break
        at = int(rng.integers(len(content)) * rng.random() ** 2)
        kind = int(rng.integers(6))
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            content[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            content[at : at + 4] = int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])).to_bytes(4, "big")
        elif kind == 4:
            content[at : at + 8] = bytes(8)
        else:
            content[at:at] = content[at : at + 64]
    path.write_bytes(bytes(content))


def damage_packed(path: Path, rng: np.random.Generator) -> None:
    """`damage_bytes` of what a gzip file holds, or of a PNG whose checksums are then made right."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        path.write_bytes(gzip.decompress(content))
        damage_bytes(path, rng)
        path.write_bytes(gzip.compress(path.read_bytes()))
    else:
        damage_bytes(path, rng)
        path.write_bytes(with_checksums(path.read_bytes()))


def with_checksums(png: bytes) -> bytes:
    """The parts of a PNG file with right checksums, as far as it can be read."""
    parts, at = [png[:8]], 8
    while at + 12 <= len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        body = png[at + 4 : at + 8 + length]
        parts.append(png[at : at + 4] + body + zlib.crc32(body).to_bytes(4, "big"))
        at += 12 + length
    return b"".join(parts)


def damage_tree(path: Path, rng: np.random.Generator) -> None:
    """Replace, delete, add or move values of a JSON or YAML file, which stays well-formed."""
    is_json = path.suffix == ".json"
    tree = json.loads(path.read_text()) if is_json else yaml.safe_load(path.read_text())
    for _ in range(int(rng.integers(1, 4))):
        node = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = keys[int(rng.integers(len(keys)))]
            if isinstance(node[key], (dict, list)) and rng.random() < 0.8:
                node = node[key]
                continue
            kind, value = int(rng.integers(4)), ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, dict):
                node[str(rng.integers(9))] = node.pop(key)
            else:
                node[key] = value
            break
    path.write_text(json.dumps(tree) if is_json else yaml.safe_dump(tree))


def damage_table(path: Path, rng: np.random.Generator) -> None:
    """Replace, delete, repeat or split cells and lines of a CSV file."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for _ in range(int(rng.integers(1, 4))):
        row = rows[int(rng.integers(len(rows)))] if rows else []
        if not row:
            break
        at, kind = int(rng.integers(len(row))), int(rng.integers(6))
        odd = str(ODD_VALUES[int(rng.integers(len(ODD_VALUES)))])
        if kind == 0:
            row[at] = odd
        elif kind == 1:
            del row[at]
        elif kind == 2:
            row.insert(at, odd)
        elif kind == 3:
            rows.remove(row)
        elif kind == 4:
            rows.append(list(row))
        else:
            row[at] = '"' + row[at]
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")


def either(*damages: Callable) -> Callable[[Path, np.random.Generator], None]:
    return lambda path, rng: damages[int(rng.integers(len(damages)))](path, rng)


def _picture(folder: Path, name: str, mode: str = "L") -> Path:
    values = np.random.default_rng(0).integers(0, 2, (12, 9, *([3] if mode == "RGB" else []))) * 255
    Image.fromarray(values.astype(np.uint8)).convert(mode).save(folder / name)
    return folder / name


def _nifti(folder: Path, name: str) -> Path:
    values = np.random.default_rng(0).integers(0, 2, (6, 5, 4)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([0.7, 0.8, 2.5, 1.0])), folder / name)
    return folder / name


def _read_any(path: Path) -> None:
    """Every way to read an image file."""
    for read in (
        lambda: file_shape(path),
        lambda: read_image(path, num_axes=3 if ".nii" in path.name else 2),
        lambda: read_mask(path, num_axes=3 if ".nii" in path.name else 2),
        lambda: mask_values(path),
    ):
        try:
            read()
        except ALLOWED:
            continue


def _table(folder: Path, name: str) -> Path:
    rows = [CaseRow(f"c{n}", f"p{n}", 0, m, "mean", "dice_score", 0.5) for n in range(3) for m in "ab"]
    write_cases(CaseTable.from_rows(rows), folder / name)
    return folder / name


def _checkpoint(folder: Path) -> Path:
    write_checkpoint(folder / "last.safetensors", {"model/a": torch.ones(3, 2)}, {"step": 1, "best": 0.5})
    return folder / "last.safetensors"


def _load_checkpoint(path: Path) -> None:
    layer = torch.nn.Linear(2, 3, bias=False)
    Checkpoint(path).load_model(torch.nn.ParameterDict({"a": layer.weight}))


def _prediction(folder: Path) -> Path:
    write_prediction(folder / "case.npz", np.full((2, 4, 5), 0.5, dtype=np.float32))
    return folder / "case.npz"


def _calibrator(folder: Path) -> Path:
    path = folder / "t.safetensors"
    TemperatureScaling().fit(torch.tensor([[0.6, 0.4], [0.3, 0.7]]), torch.tensor([0, 1])).save(path)
    return path


def _dataset(folder: Path) -> Path:
    return make_prepared(folder / "data", num_cases=4, size=(16, 16)).folder.manifest


def _recipe(folder: Path) -> Path:
    dataset = make_prepared(folder / "data", num_cases=4, size=(16, 16))
    write_recipe(recipe_of(dataset), folder / "recipe.yaml")
    return folder / "recipe.yaml"


def _grid(folder: Path) -> Path:
    make_prepared(folder / "data", num_cases=4, size=(16, 16))
    variants = "variants:\n  a: {label.maker: mean}\n  b: {teacher.run: a}\n"
    (folder / "grid.yaml").write_text(f"recipe: quick\nset: {{schedule.epochs: 1}}\n{variants}")
    return folder / "grid.yaml"


def _read_grid(path: Path) -> None:
    read_variants([str(path)], dataset=path.parent / "data", out=path.parent / "out", accelerator="cpu")


def _folds(folder: Path) -> Path:
    dataset = make_prepared(folder / "data", num_cases=4, size=(16, 16))
    write_folds(
        folder / "folds.json",
        dataset,
        split_folds([case.patient for case in dataset.cases], num_folds=2, seed=0),
    )
    return folder / "folds.json"


def _raw_folder(folder: Path, table: str, text: str) -> Path:
    for number in range(3):
        for kind in ("images", "masks"):
            (folder / kind).mkdir(exist_ok=True)
            _picture(folder, f"{kind}/case{number}.png")
    (folder / table).write_text(text)
    return folder / table


def _prepare(table: Path) -> None:
    with tempfile.TemporaryDirectory() as out:
        for raw in find_datasets("folder", table.parent):
            prepare_dataset(raw, Path(out) / "data", workers=1)


def _log(folder: Path) -> Path:
    lines = [json.dumps({"step": step, "loss": 0.5, "lr": 0.01}) for step in range(5)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "log.jsonl"


def _volumes(folder: Path) -> Path:
    header, row = ",".join(VOLUME_COLUMNS), "a,b" + ",1" * (len(VOLUME_COLUMNS) - 2)
    (folder / "volumes.csv").write_text(f"{header}\n{row}\n")
    return folder / "volumes.csv"


TARGETS: dict[str, Target] = {
    "png": Target(lambda f: _picture(f, "a.png"), either(damage_bytes, damage_packed), _read_any),
    "colour png": Target(lambda f: _picture(f, "a.png", "RGB"), damage_packed, _read_any),
    "palette png": Target(lambda f: _picture(f, "a.png", "P"), damage_packed, _read_any),
    "tiff": Target(lambda f: _picture(f, "a.tif"), damage_bytes, _read_any),
    "nifti": Target(lambda f: _nifti(f, "a.nii"), damage_bytes, _read_any),
    "gzip nifti": Target(lambda f: _nifti(f, "a.nii.gz"), either(damage_bytes, damage_packed), _read_any),
    "recipe": Target(_recipe, either(damage_tree, damage_bytes), lambda p: read_recipe(p, accelerator="cpu")),
    "grid": Target(_grid, either(damage_tree, damage_bytes), _read_grid),
    "manifest": Target(_dataset, either(damage_tree, damage_bytes), lambda p: Dataset(p.parent)),
    "folds": Target(
        _folds, either(damage_tree, damage_bytes), lambda p: read_folds(p, Dataset(p.parent / "data"))
    ),
    "cases.csv": Target(
        lambda f: _raw_folder(f, "cases.csv", "case,patient\ncase0,a\ncase1,b\ncase2,b\n"),
        either(damage_table, damage_bytes),
        _prepare,
    ),
    "classes.csv": Target(
        lambda f: _raw_folder(f, "classes.csv", "value,name\n0,background\n255,lesion\n"),
        either(damage_table, damage_bytes),
        _prepare,
    ),
    "case table csv": Target(lambda f: _table(f, "t.csv"), either(damage_table, damage_bytes), read_cases),
    "case table parquet": Target(lambda f: _table(f, "t.parquet"), damage_bytes, read_cases),
    "checkpoint": Target(_checkpoint, damage_bytes, _load_checkpoint),
    "calibrator": Target(_calibrator, damage_bytes, TemperatureScaling.load),
    "prediction": Target(_prediction, damage_bytes, read_prediction),
    "log": Target(_log, damage_bytes, read_log),
    "volumes.csv": Target(_volumes, either(damage_table, damage_bytes), read_volumes),
}


def fuzz_once(name: str, seed: int, good: Path) -> str | None:
    """What was wrong with reading the damaged file of a seed; None if nothing.

    good: a folder for the good files, which are made once.
    """
    target, source = TARGETS[name], good / name
    if not source.exists():
        source.mkdir(parents=True)
        (good / f"{name}.path").write_text(str(target.make(source).relative_to(source)))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        path = Path(folder) / (good / f"{name}.path").read_text()
        target.damage(path, np.random.default_rng(seed))
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        try:
            target.read(path)
        except TooSlowError:
            return f"it took longer than {MAX_SECONDS} s"
        except ALLOWED:
            return None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def fuzz(seconds: float, *, seed: int = 0, out: io.TextIOBase | None = None) -> tuple[int, dict[str, str]]:
    """Damage the targets in turn for some seconds: the number of trials, and a message for each failure."""

    def stop(number: int, frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES, limit[1]))
    failures: dict[str, str] = {}
    trials, end, names = 0, time.monotonic() + seconds, list(TARGETS)
    good = tempfile.TemporaryDirectory()
    try:
        while time.monotonic() < end:
            name = names[trials % len(names)]
            problem = fuzz_once(name, seed + trials, Path(good.name))
            if problem is not None:
                failures[f"{name}, seed {seed + trials}"] = problem
                print(f"{name}, seed {seed + trials}: {problem}", file=out or sys.stdout, flush=True)
            trials += 1
    finally:
        good.cleanup()
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGALRM, before)
    return trials, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trials, failures = fuzz(options.seconds, seed=options.seed)
    print(f"{trials} damaged files, {len(failures)} that were not refused as they should be")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
