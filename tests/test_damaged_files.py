"""A damaged file is read, or refused by a UserError that names it; nothing else ever comes of it.

Each kind of file is made, damaged by 25 seeds, and read; `make test-slow` tries many more.
"""

import json
import shutil
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from case_rows import CaseRow, table_of
from damage import damage
from PIL import Image
from prepared import make_prepared
from start import semidice
from trained import make_run

from semidice.calibration import load_calibrator
from semidice.calibration.calibrators import CALIBRATORS
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets
from semidice.data.sources.files import mask_values, read_header, read_image, read_mask
from semidice.errors import UserError
from semidice.networks.checkpoint import Checkpoint
from semidice.paths import RunFolder
from semidice.prediction.outputs import Finished, OutputFolder
from semidice.recipes import read_recipe
from semidice.recipes.grid import read_variants
from semidice.report import decisions
from semidice.report.curves import read_log
from semidice.runs.fits import read_fits
from semidice.runs.predictions import read_prediction
from semidice.runs.run import open_run
from semidice.runs.stamp import FoldStamp
from semidice.statistics import read_cases, write_cases

VALUES = np.random.default_rng(0).integers(0, 2, (6, 5, 4))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One folder with a good file of every kind."""
    good = tmp_path_factory.mktemp("good")
    for name, mode in (("grey.png", "L"), ("colour.png", "RGB"), ("palette.png", "P"), ("a.tif", "L")):
        Image.fromarray((VALUES[0] * 255).astype(np.uint8)).convert(mode).save(good / name)
    for name in ("a.nii", "b.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(VALUES.astype(np.int16), np.diag([0.7, 0.8, 2.5, 1])), good / name)
    run = make_run(good / "run", make_prepared(good / "data", num_cases=4, size=(16, 16)))
    run.fold(0).log.write_text("".join(f'{{"step": {n}, "loss": 0.5, "lr": 0.01}}\n' for n in range(5)))
    # fitted rules, corrected intervals, and volumes
    assert semidice("evaluate", run.path, "--decide", "fitted", "--interval", "0.5").code == 0
    grid = {"recipe": "quick", "variants": {"a": {"label.maker": "mean"}, "b": {"teacher.run": "a"}}}
    (good / "grid.yaml").write_text(json.dumps(grid))
    rows = [CaseRow(f"c{n}", f"p{n}", 0, m, "mean", "dice_score", 0.5) for n in range(3) for m in "ab"]
    for suffix in (".csv", ".parquet"):
        write_cases(table_of(rows), good / f"cases{suffix}")
    folder = OutputFolder(good, ("background", "lesion"))
    folder.record.inputs["a"] = Finished(sha256="0" * 64, volumes=({"case": "a", "class": "lesion"},))
    folder.close()
    prob, target = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.1, 0.9]]), torch.tensor([0, 1, 0])
    for name, kind in CALIBRATORS.items():
        kind().fit(prob, target).save(good / f"{name}.safetensors")
    for kind in ("images", "masks"):
        (good / "raw" / kind).mkdir(parents=True)
        for number in range(3):
            image = (np.random.default_rng(number).random((12, 9)) > 0.5) * np.uint8(255)
            Image.fromarray(image).save(good / "raw" / kind / f"case{number}.png")
    (good / "raw/cases.csv").write_text("case,patient\ncase0,a\ncase1,b\ncase2,b\n")
    (good / "raw/classes.csv").write_text("value,name\n0,background\n255,lesion\n")
    return good


def read_any_image(path):
    num_axes = 3 if ".nii" in path.name else 2
    num_channels = 3 if path.name in ("colour.png", "palette.png") else 1
    read_header(path)
    read_image(path, num_axes=num_axes, num_channels=num_channels)


def read_any_mask(path):
    mask_values(path)
    read_mask(path, num_axes=3 if ".nii" in path.name else 2)


def prepare(table):
    for raw in find_datasets("folder", table.parent):
        prepare_dataset(raw, table.parent.parent / "out", workers=1)


def read_decision(path):
    read_fits(RunFolder(path.parent))


def read_network(path):
    Checkpoint(path).check_origin(fold=0)
    open_run(path.parent.parent).network(0, device="cpu")


def read_array(path):
    dataset = Dataset(path.parent.parent)
    dataset.check_files()
    dataset.stored("images", 0)


READERS = {
    **dict.fromkeys(("colour.png", "palette.png", "a.tif", "a.nii"), read_any_image),
    **dict.fromkeys(("grey.png", "b.nii.gz"), read_any_mask),
    "run/recipe.yaml": lambda path: read_recipe(path, accelerator="cpu"),
    "grid.yaml": lambda p: read_variants([str(p)], dataset=p.parent / "data", out=p.parent / "out"),
    "data/manifest.json": lambda path: Dataset(path.parent),
    "data/images/scan000.npy": read_array,
    "run/folds.json": lambda path: read_folds(path, Dataset(path.parent.parent / "data")),
    "run/dataset.json": lambda path: open_run(path.parent),
    "run/fits.json": read_decision,
    "run/volumes.csv": lambda path: decisions.read_volumes(
        {"run": RunFolder(path.parent)}, Dataset(path.parent.parent / "data")
    ),
    "run/fold_0/stamp.json": lambda path: FoldStamp.read(RunFolder(path.parent.parent).fold(0)),
    "run/fold_0/log.jsonl": read_log,
    "run/fold_0/last.safetensors": read_network,
    "run/fold_0/predictions/scan000.npz": read_prediction,
    "raw/cases.csv": prepare,
    "raw/classes.csv": prepare,
    "cases.csv": read_cases,
    "cases.parquet": read_cases,
    "prediction.json": lambda path: OutputFolder(path.parent, ()).open({}, overwrite=True),
    **{f"{name}.safetensors": load_calibrator for name in CALIBRATORS},
}


def read_damaged(good, name, seed, work):
    folder = work / "copy"
    shutil.rmtree(work, ignore_errors=True)
    folder.mkdir(parents=True)
    top = Path(name).parts[0]
    # some readers also need the dataset
    for part in {top, "data"} if top in ("run", "grid.yaml") else {top}:
        copy = shutil.copytree if (good / part).is_dir() else shutil.copy
        copy(good / part, folder / part)
    damage(folder / name, seed)
    with warnings.catch_warnings():
        # a library may warn about a damaged file before it refuses it
        warnings.simplefilter("ignore")
        try:
            READERS[name](folder / name)
        except UserError as error:
            refusal = str(error)
        else:
            return
    # a scan, its file or its folder
    assert Path(name).stem.partition(".")[0] in refusal or str(folder) in refusal, refusal


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_name(name, good, tmp_path):
    for seed in range(25):
        read_damaged(good, name, seed, tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_thousands_of_damaged_files_are_read_or_refused_by_name(name, good, tmp_path):
    for seed in range(25, 600):
        read_damaged(good, name, seed, tmp_path / "work")


@pytest.mark.parametrize("name", READERS)
def test_the_undamaged_file_is_read(name, good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    READERS[name](tmp_path / "copy" / name)
