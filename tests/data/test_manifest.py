"""Reading of prepared datasets: manifest, bit planes, cases by number, and what is not a whole dataset."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared import make_prepared, rehash
from start import refused

from semidice.data.dataset import Dataset, open_dataset
from semidice.data.intensities import pooled_mean_std, stored_mean_std
from semidice.data.manifest import Manifest, Scan, manifest_text, read_manifest
from semidice.data.packing import num_planes, pack_classes, unpack_classes
from semidice.paths import DatasetFolder, atomic_write, check_name

DIGEST = "0" * 64


def make_scan(name="case1", **changes):
    fields = {
        "name": name,
        "patient": name,
        "shape": (4, 11),
        "spacing_mm": (1.0, 0.5),
        "raw_shape": (4, 11),
        "raters": ("a", "b"),
        "inputs": {"images/é 1.png": DIGEST},
        "arrays": {"images": DIGEST, "masks": DIGEST},
        "num_bytes": {},
        "mean": (0.5,),
        "std": (0.1,),
    }
    return Scan(**(fields | changes))


def make_manifest(*scans, **changes):
    fields = {
        "source": "folder",
        "class_names": ("background", "lesion"),
        "raters": ("a", "b"),
        "channels": ("CT",),
        "mean": (0.1 + 0.2,),
        "std": (1 / 3,),
        "options": {"size": None, "window": [-60.0, 140.0]},
        "scans": scans
        or (make_scan(), make_scan("case2", slices=(3, 14), affine=tuple(map(tuple, np.eye(4))))),
    }
    return Manifest(**(fields | changes))


def make_dataset(folder, *, num_classes=2, truth=False):
    """Write a volume of two slices with masks of rater a, and a slice of another patient with both raters."""
    rng = np.random.default_rng(0)
    names = tuple(f"class {number}" for number in range(num_classes))
    kinds = ["images", "masks", "truth"] if truth else ["images", "masks"]
    arrays = dict.fromkeys(kinds, DIGEST)
    scans = (
        make_scan("volume", slices=(3, 14), raters=("a",), arrays=arrays),
        make_scan("other", slices=(0,), arrays=arrays),
    )
    arrays_by_scan = {}
    for scan, dtype in zip(scans, (np.int16, np.int16), strict=True):
        num_cases = len(scan.case_names())
        stored = {
            "images": rng.integers(0, np.iinfo(dtype).max, (num_cases, 1, 4, 11), dtype=dtype, endpoint=True),
            "masks": rng.integers(0, num_classes, (num_cases, 2, 4, 11), dtype=np.uint8),
            "truth": rng.dirichlet(np.ones(num_classes), (num_cases, 4, 11)).astype(np.float32),
        }
        stored["masks"][:, [rater not in scan.raters for rater in ("a", "b")]] = 0
        stored["truth"] = np.moveaxis(stored["truth"], -1, 1)
        arrays_by_scan[scan.name] = stored
        for kind in kinds:
            array = stored[kind]
            if kind == "masks":
                array = pack_classes(array, num_classes=num_classes, num_space_axes=2)
            path = DatasetFolder(folder).array(kind, scan.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, array)
    manifest = make_manifest(*scans, class_names=names)
    DatasetFolder(folder).manifest.write_text(manifest_text(manifest))
    return arrays_by_scan


def test_a_manifest_is_read_back_unchanged_and_has_one_line_per_scan(tmp_path):
    manifest = make_manifest()
    text = manifest_text(manifest)
    (tmp_path / "manifest.json").write_text(text)
    assert read_manifest(tmp_path) == manifest
    assert text == manifest_text(read_manifest(tmp_path))
    assert [
        json.loads(line.strip().strip(","))["name"] for line in text.splitlines() if '"name"' in line
    ] == [
        "case1",
        "case2",
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_mean_and_std_of_some_cases_are_those_of_their_voxels(tmp_path, dtype):
    options = {"num_cases": 10, "slices_per_scan": 2, "sizes": [(20, 33), (40, 17)], "num_channels": 2}
    dataset = make_prepared(tmp_path / "data", dtype=dtype, **options)
    for cases in ([2, 3], [8, 9, 0, 1], range(10)):
        stored = [dataset.stored("images", number).reshape(2, -1) for number in cases]
        voxels = np.concatenate(stored, 1) / {"uint8": 255, "int16": 32767}[dtype]
        mean_std = dataset.mean_std(cases)
        assert mean_std.mean == pytest.approx(voxels.mean(1).tolist(), rel=1e-12)
        assert mean_std.std == pytest.approx(voxels.std(1).tolist(), rel=1e-12)
        assert dataset.mean_std(cases[::-1]) == mean_std


def test_one_value_in_all_scans_has_no_contrast_but_one_value_in_each_scan_has():
    # thirds have no exact mean in floating point
    flat = [
        make_scan(
            f"case{side}",
            shape=(side, 3),
            **stored_mean_std(np.full((1, 1, side, 3), 85, np.uint8))._asdict(),
        )
        for side in (3, 7)
    ]
    refused(lambda: pooled_mean_std(flat), "channel 1", "same value")
    dark = make_scan("dark", shape=(10, 3), **stored_mean_std(np.zeros((1, 1, 10, 3), np.uint8))._asdict())
    assert pooled_mean_std([*flat, dark]) == ((pytest.approx(1 / 6),), (pytest.approx(1 / 6),))


def test_cases_are_scans_or_their_slices():
    assert make_scan().case_names() == ("case1",)
    assert make_scan(slices=(3, 14)).case_names() == ("case1_slice0003", "case1_slice0014")


@pytest.mark.parametrize("name", ["case1", "LIDC-IDRI-0001_n-0", "a b", "1.2.840", "x+y=z,@", "_" * 150])
def test_valid_file_names_are_accepted_as_scan_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "a/b", "../a", "/a", "a\\b", "a\n", "a\0", "a ", "é", "C:a", "_" * 151]
)
def test_a_name_that_leaves_the_folder_or_is_not_portable_is_refused(name):
    refused(lambda: check_name(name), repr(name), "use letters")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (["version"], 2, ["version"]),
        (["extra"], 1, ["extra"]),
        (["scans", 0, "name"], "../other", ["scans.0.name", "../other"]),
    ],
)
def test_a_manifest_with_another_version_key_or_name_is_refused(tmp_path, key, value, words):
    record = json.loads(manifest_text(make_manifest()))
    entry = record
    for part in key[:-1]:
        entry = entry[part]
    entry[key[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    refused(lambda: read_manifest(tmp_path), "manifest.json", *words)


def test_a_folder_without_a_manifest_is_refused_with_the_command_that_makes_one(tmp_path, monkeypatch):
    refused(
        lambda: read_manifest(tmp_path),
        "manifest.json",
        f"`semidice prepare folder {shlex.quote(str(tmp_path))} data`",
    )
    # never into the folder itself, which may hold the raw images
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for folder, out in ((".", f"{tmp_path}_prepared"), ("data", f"{tmp_path}/data_prepared")):
        words = f"`semidice prepare folder {folder} {shlex.quote(out)}`"
        refused(lambda folder=folder: read_manifest(Path(folder)), words)
    refused(lambda: read_manifest(tmp_path / "nowhere"), "nowhere", "semidice prepare")


LENGTHS = st.lists(st.integers(1, 19), min_size=1, max_size=3)


@given(st.integers(2, 256), st.lists(st.integers(1, 5), max_size=2), LENGTHS)
def test_packed_classes_are_unpacked_exactly_and_use_the_fewest_bit_planes(num_classes, leading, space):
    rng = np.random.default_rng([num_classes, *space])
    classes = rng.integers(0, num_classes, (*leading, *space), dtype=np.uint8)
    packed = pack_classes(classes, num_classes=num_classes, num_space_axes=len(space))
    assert packed.dtype == np.uint8
    assert packed.shape == (*leading, num_planes(num_classes), *space[:-1], -(-space[-1] // 8))
    assert 2 ** num_planes(num_classes) >= num_classes > 2 ** (num_planes(num_classes) - 1)
    unpacked = unpack_classes(
        torch.from_numpy(packed), width=space[-1], num_classes=num_classes, num_space_axes=len(space)
    )
    assert np.array_equal(unpacked.numpy(), classes)


def test_packing_is_the_same_for_every_integer_type():
    classes = np.random.default_rng(0).integers(0, 200, (3, 5, 13))
    packed = [
        pack_classes(classes.astype(kind), num_classes=200, num_space_axes=2)
        for kind in (np.uint8, np.int16, np.int64, np.uint64)
    ]
    assert all(np.array_equal(packed[0], other) for other in packed[1:])


@pytest.mark.parametrize("num_classes", [1, 257])
def test_masks_of_too_few_or_too_many_classes_are_refused(num_classes):
    refused(lambda: num_planes(num_classes), "2 to 256 classes", str(num_classes))


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_a_dataset_returns_each_case_as_it_was_stored(tmp_path, num_classes):
    arrays_by_scan = make_dataset(tmp_path, num_classes=num_classes, truth=True)
    dataset = Dataset(tmp_path)
    assert [case.name for case in dataset.cases] == [
        "volume_slice0003",
        "volume_slice0014",
        "other_slice0000",
    ]
    assert (len(dataset), dataset.num_classes, dataset.num_channels) == (3, num_classes, 1)
    assert dataset.present.tolist() == [[True, False], [True, False], [True, True]]
    for number, case in enumerate(dataset.cases):
        stored = arrays_by_scan[case.scan.name]
        assert dataset.image(number).dtype == np.float32
        np.testing.assert_allclose(dataset.image(number), stored["images"][case.row] / 32767, rtol=1e-6)
        assert np.array_equal(dataset.masks(number), stored["masks"][case.row])
        assert np.array_equal(dataset.truth(number), stored["truth"][case.row])
        assert case.patient == case.scan.name
        # a copy: writing into it does not change the file
        dataset.stored("images", number)[...] = 0
        assert dataset.stored("images", number).any()


def test_the_highest_stored_intensity_is_read_as_1(tmp_path):
    make_dataset(tmp_path)
    for name in ("volume", "other"):
        np.save(tmp_path / f"images/{name}.npy", np.full((2, 1, 4, 11), 32767, dtype=np.int16))
    dataset = Dataset(tmp_path)
    assert dataset.image(0).max() == dataset.image(2).max() == 1


def test_a_dataset_without_truth_returns_none(tmp_path):
    make_dataset(tmp_path)
    assert Dataset(tmp_path).truth(0) is None


def test_case_numbers_are_found_by_name_and_unknown_names_are_reported(tmp_path):
    make_dataset(tmp_path)
    dataset = Dataset(tmp_path)
    assert dataset.numbers_of(["other_slice0000", "volume_slice0003"]) == [2, 0]
    refused(lambda: dataset.numbers_of(["x", "other_slice0000", "y"]), "no case x, y")


def test_a_half_copied_dataset_is_refused(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=3, size=(16, 16))
    dataset.check_files()
    cut, missing = dataset.folder.array("images", "scan001"), dataset.folder.array("masks", "scan002")
    cut.write_bytes(cut.read_bytes()[:-1])
    missing.unlink()
    for check in (dataset.check_files, lambda: open_dataset(tmp_path / "data")):
        refused(check, str(tmp_path / "data"), "images/scan001.npy", "masks/scan002.npy", "copy")


def test_a_dataset_with_arrays_outside_of_its_folder_is_refused(tmp_path):
    make_prepared(tmp_path / "data", num_cases=3, size=(16, 16))
    shutil.move(tmp_path / "data/masks", tmp_path / "elsewhere")
    (tmp_path / "data/masks").symlink_to(tmp_path / "elsewhere")
    refused(lambda: Dataset(tmp_path / "data"), "masks", "link")


def test_a_shared_dataset_is_opened_once_and_again_if_its_manifest_changed(tmp_path):
    path = tmp_path / "data"
    dataset = make_prepared(path, num_cases=3, size=(16, 16))
    first = open_dataset(path)
    assert open_dataset(path) is first
    image = dataset.folder.array("images", "scan000")
    np.save(image, 255 - np.load(image))
    rehash(dataset)
    second = open_dataset(path)
    assert second is not first
    assert second.manifest != first.manifest


@pytest.mark.parametrize("durable", [True, False])
def test_atomic_write_shows_only_complete_files_and_an_error_keeps_the_old_file(tmp_path, durable):
    path = tmp_path / "file"
    with atomic_write(path, durable=durable) as temp_path:
        temp_path.write_text("old")
        assert not path.exists()

    def fail_half_way():
        with atomic_write(path, durable=durable) as temp_path:
            temp_path.write_text("ne")
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail_half_way()
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]
