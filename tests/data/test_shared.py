"""A dataset that trainings share is opened once, and its arrays are compared with their hashes once."""

import os
import shutil

import numpy as np
import pytest
from prepared import make_prepared, rehash

from semidice.data import integrity, shared
from semidice.data.dataset import Dataset
from semidice.data.shared import SharedDataset


@pytest.fixture
def dataset(tmp_path):
    return make_prepared(tmp_path / "set", num_cases=3, size=(16, 16))


@pytest.fixture
def hashed(monkeypatch):
    """Names of the arrays that were read to be hashed."""
    names, original = [], integrity.file_hash
    monkeypatch.setattr(integrity, "file_hash", lambda path: names.append(path.name) or original(path))
    return names


def check(dataset, tmp_path, run):
    SharedDataset().check(Dataset(dataset.folder.path), tmp_path / run)


def test_a_second_run_reads_no_array_again(dataset, tmp_path, hashed):
    check(dataset, tmp_path, "first")
    assert len(hashed) == 9
    check(dataset, tmp_path, "second")
    assert len(hashed) == 9
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text()
    # its own notes are no foreign file of the dataset
    assert integrity.unlisted_files(dataset) == []


def test_an_array_that_changes_after_it_was_compared_is_found(dataset, tmp_path):
    check(dataset, tmp_path, "first")
    path = dataset.folder.array("images", "scan001")
    np.save(path, 255 - np.load(path))
    with pytest.raises(ValueError, match=r"1 array \(images/scan001\.npy\) that `semidice prepare`"):
        check(dataset, tmp_path, "second")


def test_a_copy_with_the_same_times_is_read_again(dataset, tmp_path, hashed):
    check(dataset, tmp_path, "first")
    shutil.copytree(dataset.folder.path, tmp_path / "copy")
    path = tmp_path / "copy" / "masks" / "scan002.npy"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    os.utime(path, ns=times)
    with pytest.raises(ValueError, match=r"1 array \(masks/scan002\.npy\)"):
        SharedDataset().check(Dataset(tmp_path / "copy"), tmp_path / "second")
    assert len(hashed) == 18


def test_a_folder_that_cannot_be_written_to_is_compared_all_the_same(dataset, tmp_path, monkeypatch):
    def fail(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shared, "write_text", fail)
    check(dataset, tmp_path, "first")
    assert (tmp_path / "first").exists()
    assert not dataset.folder.checked.exists()


def test_a_long_comparison_says_how_far_it_is(dataset, tmp_path, capsys, monkeypatch):
    check(dataset, tmp_path, "first")
    assert capsys.readouterr().err == ""
    dataset.folder.checked.unlink()
    monkeypatch.setattr(shared, "_SECONDS_BEFORE_LINE", 0.0)
    check(dataset, tmp_path, "second")
    text = capsys.readouterr().err
    assert "with its hashes: 0.0 of 0.0 GB" in text
    assert text.count("\n") == 1


def test_the_dataset_is_opened_again_if_its_manifest_changed(dataset):
    data, path = SharedDataset(), dataset.folder.path
    first = data.open(path)
    assert data.open(path) is first
    image = dataset.folder.array("images", "scan000")
    np.save(image, 255 - np.load(image))
    rehash(dataset)
    second = data.open(path)
    assert second is not first
    assert second.manifest != first.manifest
    dataset.folder.manifest.unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        data.open(path)
