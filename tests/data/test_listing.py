"""Files in folders: natural order, links and loops, hidden files, names that cannot be file names."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
from raw_trees import find_only_dataset, make_lits, read_scan, scan_names
from start import refused

from semidice.data.sources import find_datasets
from semidice.data.sources.raw import natural_order, safe_name, walk
from semidice.paths import check_name


def test_natural_order_compares_numbers_by_value_and_breaks_ties():
    ordered = ["case1", "case01x", "case2", "case10", "case10a", "rater"]
    for shuffled in itertools.islice(itertools.permutations(ordered), 0, 720, 37):
        assert sorted(shuffled, key=natural_order) == ordered
    assert sorted(["case1", "case01"], key=natural_order) == ["case01", "case1"]


def test_walk_follows_links_ignores_loops_and_visits_each_folder_once(tmp_path):
    make_lits(tmp_path / "elsewhere")
    raw = tmp_path / "raw"
    (raw / "inner").mkdir(parents=True)
    (raw / "inner" / "back").symlink_to(raw)
    (raw / "inner" / "itself").symlink_to(raw / "inner" / "itself")
    (raw / "A link").symlink_to(tmp_path / "elsewhere" / "Training Batch 1")
    (raw / "another link").symlink_to(tmp_path / "elsewhere" / "Training Batch 1")
    for path in (tmp_path / "elsewhere" / "Training Batch 2").iterdir():
        (raw / "inner" / path.name).symlink_to(path)
    dataset = find_only_dataset("lits", raw)
    assert scan_names(dataset) == ["volume-0", "volume-1", "volume-2", "volume-3", "volume-10"]
    assert read_scan(dataset, dataset.scans[0]).inputs.keys() == {
        "A link/volume-0.nii.gz",
        "A link/segmentation-0.nii.gz",
    }
    assert [folder for folder, _ in walk(raw)] == [raw, raw / "inner", raw / "A link"]


def test_hidden_files_and_folders_are_ignored(tmp_path):
    make_lits(tmp_path)
    shutil.copytree(tmp_path / "Training Batch 1", tmp_path / ".trash")
    (tmp_path / "Training Batch 1" / "._volume-0.nii.gz").write_bytes(b"Mac OS X")
    assert len(find_only_dataset("lits", tmp_path).scans) == 5


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
    [
        ("case 1", "case 1"),
        ("../../etc", "_.._etc"),
        (".hidden", "hidden"),
        ("日本", "__"),
        ("a" * 300, "a" * 150),
        ("...", "_"),
        ("trailing ", "trailing"),
        ("CON: α/β", "CON_ ___"),
    ],
)
def test_safe_names_are_valid_in_a_manifest(name, safe):
    assert safe_name(name) == safe
    assert check_name(safe) == safe
