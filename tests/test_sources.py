"""Sources: every layout is found whole and in order, and a scan is read the same way in all of them."""

import hashlib
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from raw_trees import (
    ellipsoids,
    make_decathlon,
    make_folder,
    make_kits,
    make_lidc,
    make_lits,
    make_qubiq,
    names,
    only,
    write_nifti,
    write_picture,
)

from semidice.data.manifest import check_name
from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.sources import SOURCES, find_datasets, read_scan

MAKERS = {
    "qubiq": make_qubiq,
    "lits": make_lits,
    "kits": make_kits,
    "lidc": make_lidc,
    "decathlon": make_decathlon,
    "folder": make_folder,
}


@pytest.mark.parametrize("source", MAKERS)
def test_every_scan_of_every_layout_is_read_after_pickling_with_a_bright_blob_under_its_masks(
    tmp_path, source
):
    datasets = find_datasets(source, MAKERS[source](tmp_path))
    for dataset in datasets:
        assert len(dataset.scans) >= 5
        assert dataset.problems == ()
        for scan in dataset.scans:
            arrays = read_scan(*pickle.loads(pickle.dumps((dataset, scan))))
            assert arrays.image.shape[0] == len(dataset.channels)
            assert arrays.masks.shape == (len(arrays.raters), *arrays.image.shape[1:])
            assert arrays.masks.ndim == dataset.num_axes + 1
            assert len(arrays.spacing_mm) == dataset.num_axes
            assert set(arrays.raters) <= set(dataset.raters)
            assert arrays.masks.max() < len(dataset.class_names)
            drawn = arrays.masks[0] > 0
            if drawn.any():
                assert arrays.image[0][drawn].mean() > arrays.image[0][~drawn].mean()
            assert check_name(scan.name) == scan.name


@pytest.mark.parametrize("source", MAKERS)
def test_the_digests_are_those_of_the_files_and_name_them_below_the_raw_folder(tmp_path, source):
    dataset = find_datasets(source, MAKERS[source](tmp_path))[0]
    scan = dataset.scans[0]
    inputs = read_scan(dataset, scan).inputs
    assert len(inputs) == 1 + len(scan.masks)
    for name, digest in inputs.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("source", MAKERS)
def test_the_same_files_give_the_same_datasets_whatever_order_the_disk_lists_them_in(
    tmp_path, source, monkeypatch
):
    MAKERS[source](tmp_path)
    first = find_datasets(source, tmp_path)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    assert find_datasets(source, tmp_path) == first


def test_every_source_says_what_it_looks_for_and_an_unknown_one_is_refused(tmp_path):
    assert set(SOURCES) == {*MAKERS, "phantom"}
    with pytest.raises(ValueError, match="no source 'nifti'; it is one of qubiq, lits, kits"):
        find_datasets("nifti", tmp_path)


@pytest.mark.parametrize("source", MAKERS)
def test_a_missing_or_empty_folder_says_what_was_looked_for_and_where(tmp_path, source):
    with pytest.raises(ValueError, match=f"no folder .*gone: source {source} looks in it for "):
        find_datasets(source, tmp_path / "gone")
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_datasets(source, tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".nii.gz"])
def test_a_mask_of_another_size_is_named_with_both_shapes(tmp_path, suffix):
    dataset = only("folder", make_folder(tmp_path, suffix=suffix))
    _, masks = ellipsoids(0, (30, 36))
    write = write_picture if suffix == ".png" else write_nifti
    write(tmp_path / "raters" / "b" / f"case1{suffix}", masks[0])
    with pytest.raises(
        ValueError, match=r"raters/b/case1.* has shape \(30, 36\), but image .*images/case1.*\(40, 36\)"
    ):
        read_scan(dataset, dataset.scans[0])


def test_a_file_that_went_away_or_was_damaged_after_the_search_is_named(tmp_path):
    dataset = only("folder", make_folder(tmp_path, suffix=".nii.gz"))
    (tmp_path / "raters" / "a" / "case1.nii.gz").unlink()
    image = tmp_path / "images" / "case2.nii.gz"
    image.write_bytes(image.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"no file .*raters/a/case1\.nii\.gz"):
        read_scan(dataset, dataset.scans[0])
    with pytest.raises(ValueError, match=r"cannot read .*images/case2\.nii\.gz"):
        read_scan(dataset, dataset.scans[1])


def test_a_damaged_file_does_not_stop_the_search(tmp_path):
    make_folder(tmp_path, suffix=".nii.gz")
    for path in (tmp_path / "images" / "case1.nii.gz", tmp_path / "raters" / "a" / "case2.nii.gz"):
        path.write_bytes(path.read_bytes()[:300])
    dataset = only("folder", tmp_path)
    assert len(dataset.scans) == 6
    assert dataset.class_names == ("background", "foreground")


def test_one_file_a_channel_is_joined_and_their_sizes_must_agree(tmp_path):
    dataset = only("folder", make_folder(tmp_path))
    first, second = dataset.scans[:2]
    joined = type(dataset)(**vars(dataset) | {"channels": ("T1", "T2")})
    both = type(first)(first.name, first.patient, (*first.image, *second.image), first.masks)
    arrays = read_scan(joined, both)
    for channel, scan in zip(arrays.image, (first, second), strict=True):
        np.testing.assert_array_equal(channel, read_scan(dataset, scan).image[0])
    assert len(arrays.inputs) == 5
    write_picture(second.image[0], np.arange(600, dtype=np.uint16).reshape(20, 30))
    with pytest.raises(
        ValueError, match=r"case2\.png has shape \(20, 30\), but image .*case1\.png has \(40, 36\)"
    ):
        read_scan(joined, both)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_phantoms_scans_are_its_cases_bit_for_bit(tmp_path, num_classes):
    options = PhantomOptions(num_cases=4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    dataset = only("phantom", tmp_path / "nothing", phantom=options)
    whole = make_phantom(4, size=(24, 32), num_raters=3, num_classes=num_classes, seed=7)
    assert len(dataset.class_names) == num_classes
    for number, scan in enumerate(dataset.scans):
        arrays = read_scan(dataset, scan)
        np.testing.assert_array_equal(arrays.image, whole.image[number].numpy())
        np.testing.assert_array_equal(arrays.truth, whole.prob[number].numpy())
        np.testing.assert_array_equal(arrays.masks, whole.masks[number].numpy())
        assert arrays.raters == dataset.raters == ("rater_1", "rater_2", "rater_3")
        low, high = dataset.options.window
        assert arrays.image.min() > low
        assert arrays.image.max() < high


def test_a_phantom_has_its_defaults_and_its_options_belong_to_it_alone(tmp_path):
    dataset = only("phantom", tmp_path)
    assert len(dataset.scans) == 60
    assert names(dataset)[:2] == ["case0000", "case0001"]
    with pytest.raises(ValueError, match="options of a phantom were given, but the source is lits"):
        find_datasets("lits", tmp_path, phantom=PhantomOptions())


def test_phantom_scans_are_made_alike_in_a_spawned_process(tmp_path):
    dataset = only("phantom", tmp_path, phantom=PhantomOptions(num_cases=2, size=(16, 16)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        there = pool.submit(read_scan, dataset, dataset.scans[1]).result()
    here = read_scan(dataset, dataset.scans[1])
    for name in ("image", "masks", "truth"):
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))
