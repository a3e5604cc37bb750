"""Laws of all sources: every layout is found in order, and every scan is read in the same way."""

import hashlib
import os
import pickle
import shutil
from itertools import islice, permutations
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from raw_trees import (
    SHARED,
    find_only_dataset,
    make_folder,
    make_kits,
    make_lits,
    make_nnunet,
    make_qubiq,
    read_scan,
    scan_names,
)
from start import refused

from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.sources import SOURCES, find_datasets
from semidice.data.sources.raw import natural_order, safe_name, walk
from semidice.paths import check_name

MAKERS = {
    "qubiq": make_qubiq,
    "lits": make_lits,
    "kits": make_kits,
    "nnunet": make_nnunet,
    "folder": make_folder,
}
each_source = pytest.mark.parametrize("source", MAKERS)


@each_source
def test_every_scan_is_read_after_pickling_and_is_brighter_under_its_masks(tmp_path, source):
    for dataset in find_datasets(source, MAKERS[source](tmp_path)):
        assert len(dataset.scans) >= 5
        assert dataset.problems == ()
        for scan in dataset.scans:
            arrays = read_scan(*pickle.loads(pickle.dumps((dataset, scan))))
            assert arrays.image.shape[0] == len(dataset.channels)
            assert arrays.masks.shape == (len(arrays.raters), *arrays.image.shape[1:])
            assert arrays.grid.shape == arrays.masks.shape[1:]
            assert arrays.masks.ndim == dataset.num_axes + 1
            assert (arrays.grid.spacing_mm is None) == (scan.image[0].suffix == ".png")
            assert set(arrays.raters) <= set(dataset.raters)
            assert arrays.masks.max() < len(dataset.class_names)
            drawn = arrays.masks[0] > 0
            assert not drawn.any() or arrays.image[0][drawn].mean() > arrays.image[0][~drawn].mean()
            assert check_name(scan.name) == scan.name
            assert len(arrays.inputs) == len(scan.files)
            for name, digest in arrays.inputs.items():
                assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


@each_source
def test_datasets_do_not_depend_on_the_order_of_directory_entries(tmp_path, source, monkeypatch):
    MAKERS[source](tmp_path)
    first = find_datasets(source, tmp_path)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    assert find_datasets(source, tmp_path) == first


@each_source
def test_a_missing_or_empty_folder_is_refused(tmp_path, source):
    refused(lambda: find_datasets(source, tmp_path / "gone"), str(tmp_path / "gone"), SOURCES[source][1])
    refused(lambda: find_datasets(source, tmp_path), str(tmp_path))


def test_every_source_is_tested_and_an_unknown_source_is_refused(tmp_path):
    # tests/integrations/test_dicom.py has the tests of dicom
    assert set(SOURCES) == {*MAKERS, "dicom"}
    refused(lambda: find_datasets("nifti", tmp_path), "qubiq, lits, kits", "'nifti'")


def test_a_file_removed_or_damaged_is_refused_and_does_not_stop_the_search(tmp_path):
    make_folder(tmp_path, suffix=".nii.gz")
    image = tmp_path / "images" / "case2.nii.gz"
    image.write_bytes(image.read_bytes()[:300])
    dataset = find_only_dataset("folder", tmp_path)
    assert len(dataset.scans) == 6
    (tmp_path / "raters" / "a" / "case1.nii.gz").unlink()
    refused(lambda: read_scan(dataset, dataset.scans[0]), "there is no", "raters/a/case1.nii.gz")
    refused(lambda: read_scan(dataset, dataset.scans[1]), "images/case2.nii.gz")


@pytest.mark.parametrize("num_classes", [2, 4])
def test_the_scans_of_a_phantom_equal_its_cases_bit_for_bit(num_classes):
    options = PhantomOptions(num_cases=4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    dataset = find_only_dataset("phantom", options)
    expected = make_phantom(4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    assert len(dataset.class_names) == num_classes
    assert scan_names(dataset) == ["case0000", "case0001", "case0002", "case0003"]
    low, high = dataset.options.window
    for number, scan in enumerate(dataset.scans):
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image, expected.image[number].numpy())
        np.testing.assert_array_equal(arrays.truth, expected.prob[number].numpy())
        np.testing.assert_array_equal(arrays.masks, expected.masks[number].numpy())
        assert low < arrays.image.min() < arrays.image.max() < high


@pytest.mark.parametrize(
    ("source", "folder", "num_scans"), [("folder", "lidc", 573), ("nnunet", "hippocampus", 260)]
)
def test_real_data_have_the_values_of_pillow_and_nibabel(source, folder, num_scans):
    raw = SHARED / "data" / folder
    if not raw.exists():
        pytest.skip(f"{folder} is not at {raw}")
    dataset = find_only_dataset(source, raw)
    assert len(dataset.scans) == num_scans
    for scan in dataset.scans[::40]:
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image[0], load(scan.image[0]).astype(np.float32))
        for rater, mask in zip(arrays.raters, arrays.masks, strict=True):
            drawn = load(scan.masks[rater])
            np.testing.assert_array_equal(mask, drawn > 0 if folder == "lidc" else drawn)


def load(path: Path) -> np.ndarray:
    """The file as nibabel, or Pillow, reads it."""
    if ".nii" in path.name:
        return np.asarray(nibabel.load(path).dataobj)
    with Image.open(path) as picture:
        return np.array(picture)


def test_natural_order_compares_numbers_by_value_and_breaks_ties():
    ordered = ["case1", "case01x", "case2", "case10", "case10a", "rater"]
    for shuffled in islice(permutations(ordered), 0, 720, 37):
        assert sorted(shuffled, key=natural_order) == ordered
    assert sorted(["case1", "case01"], key=natural_order) == ["case01", "case1"]


def test_walk_follows_links_ignores_loops_and_hidden_files_and_visits_each_folder_once(tmp_path):
    make_lits(tmp_path / "elsewhere")
    first, second = sorted((tmp_path / "elsewhere").iterdir())
    shutil.copytree(first, first / ".trash")
    (first / "._volume-0.nii.gz").write_bytes(b"Mac OS X")
    raw = tmp_path / "raw"
    (raw / "inner").mkdir(parents=True)
    (raw / "inner" / "back").symlink_to(raw)
    (raw / "inner" / "itself").symlink_to(raw / "inner" / "itself")
    (raw / "A link").symlink_to(first)
    (raw / "another link").symlink_to(first)
    for path in second.iterdir():
        (raw / "inner" / path.name).symlink_to(path)
    dataset = find_only_dataset("lits", raw)
    assert scan_names(dataset) == ["volume-0", "volume-1", "volume-2", "volume-3", "volume-10"]
    names = {"A link/volume-0.nii.gz", "A link/segmentation-0.nii.gz"}
    assert read_scan(dataset, dataset.scans[0]).inputs.keys() == names
    assert [folder for folder, _ in walk(raw)] == [raw, raw / "inner", raw / "A link"]


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    # simulated, because the superuser ignores permissions
    def deny(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    raw = make_lits(tmp_path / "raw")
    for owner, name in ((os, "listdir"), (Path, "stat")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, deny)
            refused(lambda: find_datasets("lits", raw), str(raw), "ermission")


@pytest.mark.parametrize(
    ("name", "safe"),
    [("case 1", "case 1"), ("../../etc", "_.._etc"), ("日本", "__"), ("a" * 300, "a" * 150), ("...", "_")],
)
def test_safe_names_are_valid_in_a_manifest(name, safe):
    assert check_name(safe_name(name)) == safe
