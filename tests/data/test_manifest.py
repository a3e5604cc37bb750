"""Reading of prepared datasets: manifest, bit planes, and cases by number."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared import make_prepared

from semidice.data.dataset import Dataset
from semidice.data.intensities import pooled_mean_std, stored_mean_std
from semidice.data.manifest import Manifest, Scan, manifest_text, read_manifest
from semidice.data.packing import num_planes, pack_classes, unpack_classes
from semidice.paths import DatasetFolder, atomic_write, check_name
from semidice.runs.run import manifest_digest

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
    for scan, dtype in zip(scans, (np.int16, np.uint8), strict=True):
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


def test_the_manifest_of_an_older_semidice_keeps_its_digest():
    # computed before scans had a mean and std
    digest = "1b8adb177a62afb22dec9ee307dc1816542373f9b28f85959a6a238c8fd4a578"
    assert manifest_digest(make_manifest()) == digest
    assert manifest_digest(make_manifest(make_scan(mean=(0.5,), std=(0.1,)))) != digest


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_mean_and_std_of_some_cases_are_those_of_their_voxels(tmp_path, dtype, is_old):
    options = {"num_cases": 10, "slices_per_scan": 2, "sizes": [(20, 33), (40, 17)], "num_channels": 2}
    dataset = make_prepared(tmp_path / "data", dtype=dtype, **options)
    if is_old:
        record = json.loads(dataset.folder.manifest.read_text())
        for scan in record["scans"]:
            del scan["mean"], scan["std"]
        dataset.folder.manifest.write_text(json.dumps(record))
        dataset = Dataset(tmp_path / "data")
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
    with pytest.raises(ValueError, match="channel 1 has the same value in all cases"):
        pooled_mean_std(flat)
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
    with pytest.raises(ValueError, match="cannot be a file name: use letters"):
        check_name(name)


def changed_manifest(path, value):
    """The JSON text of a manifest in which one value is changed."""
    record = json.loads(manifest_text(make_manifest()))
    entry = record
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "as a whole: Invalid JSON"),
        ("[]", "as a whole: Input should be an object"),
        (changed_manifest(["version"], 2), "version: Input should be 1"),
        (changed_manifest(["scans"], []), "scans: "),
        (changed_manifest(["extra"], 1), "extra: Extra inputs are not permitted"),
        (changed_manifest(["scans", 0, "name"], "../other"), r"scans\.0\.name: .*cannot be a file name"),
        (changed_manifest(["scans", 0, "name"], "CASE2"), "scans case2 occur twice"),
        (changed_manifest(["scans", 0, "raters"], ["z"]), "scan case1 has raters .*z.*the dataset has"),
        (changed_manifest(["scans", 0, "raters"], []), "scan case1 has raters"),
        (changed_manifest(["scans", 0, "arrays", "images"], "abc"), r"scans\.0\.arrays\.images: "),
        (changed_manifest(["scans", 0, "arrays", "other"], DIGEST), r"scans\.0\.arrays\.other"),
        (changed_manifest(["mean"], [0.5, 0.5]), "mean needs one number for each of 1 channels"),
        (changed_manifest(["scans", 0, "std"], [1, 2]), "std of scan case1 needs one number for each of 1"),
        (changed_manifest(["class_names"], ["background"]), "class_names: "),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=rf"manifest\.json is not a manifest of this semidice: .*{message}"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_reported_with_the_command_that_makes_one(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=rf"has no manifest\.json.*`semidice prepare folder {tmp_path} data`$"
    ):
        read_manifest(tmp_path)
    # never into the folder itself, which may hold the raw images
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for folder, out in ((".", f"{tmp_path}_prepared"), ("data", f"{tmp_path}/data_prepared")):
        with pytest.raises(ValueError, match=rf"`semidice prepare folder {folder} {out}`$"):
            read_manifest(Path(folder))
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere: make a dataset"):
        read_manifest(tmp_path / "nowhere")


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
    with pytest.raises(ValueError, match=f"2 to 256 classes; got {num_classes}"):
        num_planes(num_classes)


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
        levels = 32767 if case.scan.name == "volume" else 255
        assert dataset.image(number).dtype == np.float32
        np.testing.assert_allclose(dataset.image(number), stored["images"][case.row] / levels, rtol=1e-6)
        assert np.array_equal(dataset.masks(number), stored["masks"][case.row])
        assert np.array_equal(dataset.truth(number), stored["truth"][case.row])
        assert case.patient == case.scan.name
        # a copy: writing into it does not change the file
        dataset.stored("images", number)[...] = 0
        assert dataset.stored("images", number).any()


def test_the_highest_stored_intensity_is_read_as_1(tmp_path):
    make_dataset(tmp_path)
    for name, dtype in (("volume", np.int16), ("other", np.uint8)):
        np.save(tmp_path / f"images/{name}.npy", np.full((2, 1, 4, 11), np.iinfo(dtype).max, dtype=dtype))
    dataset = Dataset(tmp_path)
    assert dataset.image(0).max() == dataset.image(2).max() == 1


def test_a_dataset_without_truth_returns_none(tmp_path):
    make_dataset(tmp_path)
    assert Dataset(tmp_path).truth(0) is None


def test_case_numbers_are_found_by_name_and_unknown_names_are_reported(tmp_path):
    make_dataset(tmp_path)
    dataset = Dataset(tmp_path)
    assert dataset.numbers_of(["other_slice0000", "volume_slice0003"]) == [2, 0]
    with pytest.raises(ValueError, match="has no case x, y"):
        dataset.numbers_of(["x", "other_slice0000", "y"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, np.zeros((1, 1, 4, 11), dtype=np.int16)),
        lambda path: np.save(path, np.array([{"a": 1}] * 3), allow_pickle=True),
    ],
)
def test_an_array_that_cannot_be_read_is_reported(tmp_path, damage):
    make_dataset(tmp_path)
    path = tmp_path / "images/volume.npy"
    damage(path)
    dataset = Dataset(tmp_path)
    with pytest.raises(ValueError, match=rf"cannot read {path}: .*run `semidice check`"):
        dataset.image(1)
    assert dataset.image(2).shape == (1, 4, 11)


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
