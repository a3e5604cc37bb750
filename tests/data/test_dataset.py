"""A prepared dataset is read back case by case; manifests, names and packed masks."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared import make_prepared, rehash
from start import refused

from semidice.data.dataset import Dataset, open_dataset
from semidice.data.intensities import pooled_mean_std, stored_mean_std
from semidice.data.manifest import manifest_text, read_manifest
from semidice.data.packing import num_planes, pack_classes, unpack_case, unpack_classes
from semidice.paths import atomic_write, check_name


@pytest.fixture
def dataset(tmp_path):
    """Three volumes of two slices; the last rater did not look at every second one."""
    return make_prepared(
        tmp_path / "data", num_cases=6, size=(9, 11), slices_per_scan=2, num_classes=3, absent=True
    )


def test_each_case_is_read_as_it_was_stored(dataset):
    folder = dataset.folder
    assert [case.name for case in dataset.cases[:3]] == [
        "scan000_slice0003",
        "scan000_slice0004",
        "scan001_slice0003",
    ]
    assert dataset.present[:4].tolist() == [[True] * 3] * 2 + [[True, False, True]] * 2
    for number, case in enumerate(dataset.cases):
        images, masks, truth = (
            np.load(folder.array(kind, case.scan.name))[case.row] for kind in ("images", "masks", "truth")
        )
        np.testing.assert_allclose(dataset.image(number), images / 255, rtol=1e-6)
        np.testing.assert_array_equal(dataset.masks(number), unpack_case(masks, width=11))
        np.testing.assert_array_equal(dataset.truth(number), truth)
        assert not dataset.masks(number)[~dataset.present[number]].any()
        # a copy: writing into it does not change the file
        dataset.stored("images", number)[...] = 0
        assert dataset.stored("images", number).any()


def test_a_manifest_is_read_back_unchanged_and_has_one_line_per_scan(dataset):
    text = manifest_text(dataset.manifest)
    dataset.folder.manifest.write_text(text)
    assert read_manifest(dataset.folder.path) == dataset.manifest
    lines = [line.strip().strip(",") for line in text.splitlines() if '"name"' in line]
    assert [json.loads(line)["name"] for line in lines] == ["scan000", "scan001", "scan002"]


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


def test_one_value_in_all_scans_has_no_contrast_but_one_value_in_each_scan_has(dataset):
    def flat(value, side):
        # thirds have no exact mean in floating point
        found = stored_mean_std(np.full((1, 1, side, 3), value, np.uint8))._asdict()
        return dataset.manifest.scans[0].model_copy(update=found | {"shape": (side, 3), "slices": None})

    refused(lambda: pooled_mean_std([flat(85, 3), flat(85, 7)]), "channel 1", "same value")
    pooled = pooled_mean_std([flat(85, 3), flat(85, 7), flat(0, 10)])
    assert pooled == ((pytest.approx(1 / 6),), (pytest.approx(1 / 6),))


def test_case_numbers_are_found_by_name_and_unknown_names_are_reported(dataset):
    assert dataset.numbers_of(["scan001_slice0003", "scan000_slice0003"]) == [2, 0]
    refused(lambda: dataset.numbers_of(["x", "scan000_slice0003", "y"]), "no case x, y")


def test_a_half_copied_dataset_is_refused(dataset):
    cut, missing = dataset.folder.array("images", "scan001"), dataset.folder.array("masks", "scan002")
    cut.write_bytes(cut.read_bytes()[:-1])
    missing.unlink()
    words = ("images/scan001.npy", "masks/scan002.npy", "copy")
    refused(lambda: open_dataset(dataset.folder.path), str(dataset.folder.path), *words)
    refused(lambda: dataset.stored("images", 2), str(cut), "semidice check")


def test_a_dataset_with_arrays_outside_of_its_folder_is_refused(dataset):
    path = dataset.folder.path
    shutil.move(path / "masks", path.with_name("elsewhere"))
    (path / "masks").symlink_to(path.with_name("elsewhere"))
    refused(lambda: Dataset(path), "masks", "link")


def test_a_dataset_is_opened_once_and_again_if_its_manifest_changed(dataset):
    path, image = dataset.folder.path, dataset.folder.array("images", "scan000")
    first = open_dataset(path)
    assert open_dataset(path) is first
    np.save(image, 255 - np.load(image))
    rehash(dataset)
    assert open_dataset(path).manifest != first.manifest


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [("version", 2, "version"), ("colour", "red", "colour"), ("name", "../other", "cannot be a file name")],
)
def test_a_manifest_that_prepare_did_not_write_is_refused(dataset, key, value, word):
    record = json.loads(dataset.folder.manifest.read_text())
    (record["scans"][0] if key == "name" else record)[key] = value
    dataset.folder.manifest.write_text(json.dumps(record))
    refused(lambda: read_manifest(dataset.folder.path), "manifest.json", word)


def test_a_folder_without_a_manifest_is_refused_with_the_command_that_makes_one(tmp_path):
    raw = tmp_path / "my scans"
    raw.mkdir()
    # never into the folder itself, which may hold the raw images
    command = f"`semidice prepare folder {shlex.quote(str(raw))} {shlex.quote(f'{raw}_prepared')}`"
    refused(lambda: read_manifest(raw), "manifest.json", command)
    refused(lambda: read_manifest(tmp_path / "nowhere"), "nowhere", "semidice prepare")


@pytest.mark.parametrize("name", ["case1", "LIDC-IDRI-0001_n-0", "a b", "1.2.840", "x+y=z,@", "_" * 150])
def test_valid_file_names_are_accepted_as_scan_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "a/b", "/a", "a\\b", "a\n", "a ", "é", "C:a", "_" * 151]
)
def test_a_name_that_leaves_the_folder_or_is_not_portable_is_refused(name):
    refused(lambda: check_name(name), repr(name), "use letters")


LENGTHS = st.lists(st.integers(1, 19), min_size=1, max_size=3)


@given(st.integers(2, 256), st.lists(st.integers(1, 5), max_size=2), LENGTHS)
def test_packed_classes_are_unpacked_exactly_and_use_the_fewest_bit_planes(num_classes, leading, space):
    rng = np.random.default_rng([num_classes, *space])
    classes = rng.integers(0, num_classes, (*leading, *space))
    packed = pack_classes(classes, num_classes=num_classes, num_space_axes=len(space))
    assert packed.dtype == np.uint8
    assert packed.shape == (*leading, num_planes(num_classes), *space[:-1], -(-space[-1] // 8))
    assert 2 ** num_planes(num_classes) >= num_classes > 2 ** (num_planes(num_classes) - 1)
    unpacked = unpack_classes(
        torch.from_numpy(packed), width=space[-1], num_classes=num_classes, num_space_axes=len(space)
    )
    assert np.array_equal(unpacked.numpy(), classes)


@pytest.mark.parametrize("num_classes", [1, 257])
def test_masks_of_too_few_or_too_many_classes_are_refused(num_classes):
    refused(lambda: num_planes(num_classes), "2 to 256 classes", str(num_classes))


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
