"""Checks of prepared datasets: every kind of damage is found and named, and the numbers are right."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from rich.console import Console

from semidice.data.integrity import enumerated
from semidice.data.packing import pack_classes, unpack_case, unpack_classes
from semidice.labels import rater_agreement
from semidice.report.check import check_dataset
from semidice.report.check_command import CheckError, rater_table, run_check, summary_table

LIDC = Path(__file__).parents[3] / "shared" / "data" / "lidc"


@pytest.fixture
def folder(tmp_path):
    """Six cases of three patients, 30 x 30: each packed row of a mask has two padding bits."""
    return make_prepared(tmp_path / "data", size=(30, 30)).folder.path


def write_dataset(folder, cases, *, raters, class_names=("background", "lesion")):
    """Write cases (name, patient, image (H, W), class maps (R, H, W)); every rater looked at every case."""
    scans = []
    for name, patient, image, classes in cases:
        arrays = {
            "images": image[None, None],
            "masks": pack_classes(classes, num_classes=len(class_names), num_space_axes=2)[None],
        }
        for kind, array in arrays.items():
            (folder / kind).mkdir(parents=True, exist_ok=True)
            np.save(folder / kind / f"{name}.npy", array)
        entry = {"name": name, "patient": patient, "shape": image.shape, "raw_shape": image.shape}
        entry |= {"spacing_mm": [0.5, 0.75], "affine": np.eye(4).tolist(), "raters": raters, "inputs": {}}
        scans.append(entry | {"arrays": {kind: sha256(folder / kind / f"{name}.npy") for kind in arrays}})
    manifest = {"source": "folder", "class_names": class_names, "raters": raters, "channels": ["CT"]}
    manifest |= {"mean": [0.5], "std": [0.2], "options": {}, "scans": scans}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def store(folder, kind, name, array):
    """Replace an array and its hash, so that only the values can be wrong."""
    np.save(folder / kind / f"{name}.npy", array)

    def change(manifest):
        scan = next(scan for scan in manifest["scans"] if scan["name"] == name)
        scan["arrays"][kind] = sha256(folder / kind / f"{name}.npy")

    edit_manifest(folder, change)


def alter(folder, kind, name, change):
    array = np.load(folder / kind / f"{name}.npy")
    change(array)
    store(folder, kind, name, array)


def printed(folder, **options):
    console = Console(file=io.StringIO(), width=120)
    try:
        run_check(folder, console=console, **options)
    except CheckError as error:
        return console.file.getvalue() + str(error)
    return console.file.getvalue()


def cells(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    rows = [line.strip("│").split("│") for line in console.file.getvalue().splitlines() if line[:1] == "│"]
    return [[cell.strip() for cell in row] for row in rows]


class TestSoundDatasets:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_classes": 5, "num_channels": 2, "dtype": "int16", "sizes": [(20, 33), (24, 24)]},
            {"absent": True, "slices_per_scan": 3, "truth": False},
            {"depth": 4, "num_classes": 3, "num_raters": 1},
        ],
        ids=["plain", "classes, channels and sizes", "slices and absent raters", "volumes"],
    )
    def test_a_sound_dataset_has_no_problems_and_every_case_is_counted(self, tmp_path, options):
        dataset = make_prepared(tmp_path / "data", **options)
        progress = []
        report = check_dataset(tmp_path / "data", on_case=lambda done, total: progress.append((done, total)))
        assert report.problems == ()
        assert progress == [(done, len(dataset)) for done in range(1, len(dataset) + 1)]
        assert report.readable.all()
        assert not np.isnan(report.foreground).any()
        files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        assert report.num_bytes == sum(path.stat().st_size for path in files)

    def test_raters_are_compared_over_all_slices_of_a_scan_together(self, tmp_path):
        dataset = make_prepared(tmp_path / "data", num_cases=6, slices_per_scan=3, num_classes=3)
        for scan in dataset.manifest.scans:
            masks = np.load(tmp_path / "data" / "masks" / f"{scan.name}.npy")
            masks[1] = 0
            store(tmp_path / "data", "masks", scan.name, masks)
        report = check_dataset(tmp_path / "data")
        assert report.problems == ()
        assert len(report.agreement) == 2
        assert len(report.case_agreement) == 6
        for number in range(2):
            volume = np.stack([dataset.masks(3 * number + row) for row in range(3)], -1)
            expected = rater_agreement(torch.from_numpy(volume), num_classes=3)
            torch.testing.assert_close(report.agreement[number], expected.majority)
            torch.testing.assert_close(report.pairwise[number], expected.pairwise)
        assert report.case_agreement[1] == 1
        assert dict(cells(summary_table(report)))["cases"] == "6, slices of 2 scans"

    @pytest.mark.parametrize("absent", [False, True])
    def test_foreground_and_agreement_of_each_case_are_computed_from_its_masks(self, tmp_path, absent):
        dataset = make_prepared(
            tmp_path / "data", num_classes=4, sizes=[(20, 33), (24, 24), (30, 17)], absent=absent
        )
        report = check_dataset(tmp_path / "data")
        for number in range(len(dataset)):
            masks, present = dataset.masks(number), dataset.present[number]
            shares = [[(mask == k).mean() for k in (1, 2, 3)] for mask in masks[present]]
            np.testing.assert_allclose(report.foreground[number], np.mean(shares, axis=0))
            expected = rater_agreement(torch.from_numpy(masks), num_classes=4, present=present).majority
            torch.testing.assert_close(report.agreement[number], expected, equal_nan=True)
            assert report.empty[number].tolist() == [
                bool(looked and not mask.any()) for mask, looked in zip(masks, present, strict=True)
            ]

    def test_cases_are_read_one_at_a_time(self, tmp_path):
        # 48 slices of 64 KB and truth of the same size: 6 MB in total; one case is 3 % of it
        make_prepared(tmp_path / "data", num_cases=48, size=(128, 128), slices_per_scan=48, dtype="int16")
        check_dataset(tmp_path / "data")
        tracemalloc.start()
        check_dataset(tmp_path / "data")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2e6


@pytest.mark.parametrize("num_classes", [2, 3, 9, 256])
@pytest.mark.parametrize("space", [(5, 16), (2, 3, 21)])
def test_numpy_and_torch_unpack_the_same_masks(num_classes, space):
    classes = np.random.default_rng(0).integers(0, num_classes, (3, *space), dtype=np.uint8)
    packed = pack_classes(classes, num_classes=num_classes, num_space_axes=len(space))
    options = {"width": space[-1], "num_classes": num_classes, "num_space_axes": len(space)}
    assert np.array_equal(unpack_case(packed, width=space[-1]), classes)
    assert np.array_equal(unpack_classes(torch.from_numpy(packed), **options), classes)


class TestDamage:
    def test_a_flipped_bit_is_named(self, folder):
        path = folder / "images" / "scan002.npy"
        damaged = bytearray(path.read_bytes())
        damaged[-7] ^= 1
        path.write_bytes(damaged)
        (problem,) = check_dataset(folder).problems
        assert problem.startswith(
            "images/scan002.npy is not the file that was prepared: it was changed since (SHA-256 "
        )

    def test_a_truncated_array_is_named_and_its_case_is_left_out(self, folder):
        path = folder / "masks" / "scan001.npy"
        path.write_bytes(path.read_bytes()[:-10])
        report = check_dataset(folder)
        assert len(report.problems) == 2
        assert report.problems[1].startswith("masks/scan001.npy cannot be read as an array: ")
        assert report.readable.tolist() == [True, False, True, True, True, True]
        assert np.isnan(report.foreground[1]).all()
        assert report.agreement[1].isnan().all()

    def test_a_deleted_array_and_a_folder_in_its_place_are_named(self, folder):
        (folder / "truth" / "scan000.npy").unlink()
        (folder / "truth" / "scan001.npy").unlink()
        (folder / "truth" / "scan001.npy").mkdir()
        assert check_dataset(folder).problems == (
            "truth/scan000.npy is missing",
            "truth/scan001.npy is not a file",
        )

    def test_swapped_arrays_are_named_with_their_correct_paths(self, folder):
        path_0, path_3 = (folder / "images" / f"scan00{number}.npy" for number in (0, 3))
        content_0 = path_0.read_bytes()
        path_0.write_bytes(path_3.read_bytes())
        path_3.write_bytes(content_0)
        problems = check_dataset(folder).problems
        assert len(problems) == 2
        assert (
            "images/scan000.npy is not the file that was prepared: it is the array of images/scan003.npy"
            in (problems[0])
        )
        assert "it is the array of images/scan000.npy" in problems[1]

    def test_the_check_survives_any_flipped_bit_of_a_header(self, folder):
        path = folder / "images" / "scan000.npy"
        sound = path.read_bytes()
        for position in range(0, 128, 3):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            problems = check_dataset(folder).problems
            assert problems[0].startswith("images/scan000.npy is not the file that was prepared"), position

    def test_pickles_and_archives_are_not_read_as_arrays(self, folder):
        store(folder, "images", "scan000", np.array([{"a": 1}], dtype=object))
        with (folder / "images" / "scan001.npy").open("wb") as file:
            np.savez(file, image=np.zeros(3))
        problems = check_dataset(folder).problems
        assert problems[0].startswith("images/scan000.npy cannot be read as an array: ")
        assert problems[2].startswith("images/scan001.npy cannot be read as an array: ")

    def test_a_link_out_of_the_dataset_is_refused_and_not_read(self, folder, tmp_path):
        path = folder / "masks" / "scan001.npy"
        # the content is right: only the link is wrong
        path.rename(tmp_path / "elsewhere.npy")
        path.symlink_to(tmp_path / "elsewhere.npy")
        report = check_dataset(folder)
        assert report.problems == (
            "masks/scan001.npy is a link that leads out of the dataset, and was not read: copy the file",
        )
        assert not report.readable[1]

    def test_a_linked_folder_and_a_cycle_of_links_are_refused(self, folder, tmp_path):
        (folder / "truth").rename(tmp_path / "truth")
        (folder / "truth").symlink_to(tmp_path / "truth")
        path = folder / "images" / "scan000.npy"
        path.unlink()
        path.symlink_to(path)
        problems = check_dataset(folder).problems
        assert sum("truth/" in problem and "leads out of" in problem for problem in problems) == 6
        assert re.match(r"images/scan000.npy is (a link|missing)", problems[0])
        assert len(problems) == 7

    def test_a_dataset_reached_through_a_link_is_sound(self, folder, tmp_path):
        (tmp_path / "link").symlink_to(folder)
        assert check_dataset(tmp_path / "link").problems == ()

    @pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
    def test_a_file_without_permission_is_named(self, folder):
        (folder / "images" / "scan000.npy").chmod(0)
        assert check_dataset(folder).problems == ("images/scan000.npy cannot be read: Permission denied",)

    def test_all_problems_are_reported_together(self, folder):
        (folder / "images" / "scan000.npy").unlink()
        alter(folder, "truth", "scan001", lambda truth: truth.fill(0.7))
        path = folder / "masks" / "scan005.npy"
        path.write_bytes(path.read_bytes()[:100])
        text = printed(folder)
        for name in ("images/scan000.npy", "case scan001", "masks/scan005.npy"):
            assert f"problem: {name}" in text
        assert "4 problems, no warnings in " in text


class TestManifest:
    @pytest.mark.parametrize("name", ["../x", "..", "/etc/x", "a/b", ".hidden", ""])
    def test_a_scan_name_that_is_not_a_plain_file_name_is_refused(self, folder, name):
        edit_manifest(folder, lambda manifest: manifest["scans"][0].update(name=name))
        with pytest.raises(ValueError, match=r"manifest.json is not a manifest.*scans\.0\.name"):
            check_dataset(folder)

    def test_a_manifest_of_another_version_a_broken_one_and_a_missing_one_are_named(self, folder):
        edit_manifest(folder, lambda manifest: manifest.update(version=2))
        with pytest.raises(ValueError, match=r"not a manifest of this semidice: version"):
            check_dataset(folder)
        (folder / "manifest.json").write_text('{"source": ')
        with pytest.raises(ValueError, match="not a manifest of this semidice"):
            check_dataset(folder)
        (folder / "manifest.json").unlink()
        with pytest.raises(ValueError, match=r"has no manifest.json, so it is not a prepared dataset"):
            check_dataset(folder)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"shape": [30]}, "shape must be 2 or 3 lengths of 1 or more; got (30,)"),
            ({"shape": [30, 0]}, "shape must be 2 or 3 lengths of 1 or more; got (30, 0)"),
            ({"shape": [1, 30, 30], "spacing_mm": [1, 1, 1]}, "it has 3 axes, but the first scan has 2"),
            ({"slices": []}, "no slice of it became a case"),
            (
                {"mean": [0.5], "std": [-0.1]},
                "mean must be finite and std 0 or more; got (0.5,) and (-0.1,)",
            ),
            ({"spacing_mm": [1.0]}, "spacing_mm must be a length above 0 for each axis; got (1.0,)"),
            (
                {"spacing_mm": [1.0, -1.0]},
                "spacing_mm must be a length above 0 for each axis; got (1.0, -1.0)",
            ),
        ],
        ids=str,
    )
    def test_an_impossible_entry_is_named(self, folder, change, words):
        edit_manifest(folder, lambda manifest: manifest["scans"][1].update(change))
        assert f"manifest.json, scan scan001: {words}" in check_dataset(folder).problems

    def test_a_scan_without_masks_is_named(self, folder):
        edit_manifest(folder, lambda manifest: manifest["scans"][1]["arrays"].pop("masks"))
        assert check_dataset(folder).problems == ("manifest.json, scan scan001: it has no masks",)

    def test_case_names_that_collide_and_a_deviation_of_0_are_named(self, tmp_path):
        folder = make_prepared(tmp_path / "data", slices_per_scan=3).folder.path

        def change(manifest):
            manifest["scans"][0]["slices"] = [4, 4, 5]
            manifest["std"] = [0.0]

        edit_manifest(folder, change)
        names, deviation = check_dataset(folder).problems
        assert names == "manifest.json has several cases with the same name: 1 name (scan000_slice0004)"
        assert deviation.startswith("manifest.json: mean must be finite and std above 0; got ")


class TestValues:
    def test_another_dtype_and_another_shape_are_named_with_the_expected_ones(self, folder):
        store(folder, "images", "scan000", np.zeros((1, 1, 30, 30), dtype=np.float32))
        store(folder, "masks", "scan001", np.zeros((1, 3, 1, 30, 5), dtype=np.uint8))
        store(folder, "truth", "scan002", np.ones((2, 2, 30, 30), dtype=np.float32))
        assert check_dataset(folder).problems == (
            "images/scan000.npy holds float32 (1, 1, 30, 30), "
            "but the manifest says uint8 or int16 (1, 1, 30, 30)",
            "masks/scan001.npy holds uint8 (1, 3, 1, 30, 5), but the manifest says uint8 (1, 3, 1, 30, 4)",
            "truth/scan002.npy holds float32 (2, 2, 30, 30), but the manifest says float32 (1, 2, 30, 30)",
        )

    def test_bits_beyond_the_last_voxel_are_named(self, folder):
        def change(masks):
            masks[0, 1, 0, 3, -1] |= 1

        alter(folder, "masks", "scan001", change)
        assert check_dataset(folder).problems == ("case scan001: bits after the last voxel of a row are set",)

    def test_an_unknown_class_is_named(self, tmp_path):
        folder = make_prepared(tmp_path / "data", num_classes=3).folder.path

        def change(masks):
            # both bit planes of the first eight voxels: class 3
            masks[0, 0, :, 0, 0] = 255

        alter(folder, "masks", "scan001", change)
        assert check_dataset(folder).problems == (
            "case scan001: masks hold class 3, but the dataset has 3: background, class1, class2",
        )

    def test_a_mask_of_a_rater_who_did_not_look_at_the_case_is_named(self, folder):
        edit_manifest(folder, lambda manifest: manifest["scans"][0].update(raters=["rater0", "rater2"]))
        assert check_dataset(folder).problems == (
            "case scan000: rater1 did not look at it according to the manifest, but the mask is not empty",
        )

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (np.nan, "true probabilities must lie in [0, 1]; got nan to nan"),
            (1.5, "true probabilities must lie in [0, 1]; got "),
            (-0.5, "true probabilities must lie in [0, 1]; got -0.5"),
        ],
    )
    def test_truth_outside_of_0_to_1_is_named(self, folder, value, words):
        def change(truth):
            truth[0, 1, 5, 5] = value

        alter(folder, "truth", "scan003", change)
        (problem,) = check_dataset(folder).problems
        assert problem.startswith(f"case scan003: {words}")

    @pytest.mark.parametrize(("off", "num_problems"), [(4e-6, 0), (3e-5, 1)])
    def test_truth_must_sum_to_one_within_1e_5(self, folder, off, num_problems):
        def change(truth):
            truth[0, :, 5, 5] = [0.25, 0.75 - off]

        alter(folder, "truth", "scan003", change)
        problems = check_dataset(folder).problems
        assert len(problems) == num_problems
        assert all(
            "must sum to 1 over the classes; the sums are off by up to 3e-05" in words for words in problems
        )

    def test_an_intensity_below_0_is_named(self, tmp_path):
        folder = make_prepared(tmp_path / "data", dtype="int16").folder.path

        def change(image):
            image[0, 0, 2, 2] = -4

        alter(folder, "images", "scan004", change)
        assert check_dataset(folder).problems == (
            "case scan004: stored intensities must be 0 or more; got -4",
        )


class TestWarnings:
    def test_an_image_or_channel_with_one_grey_value_gives_a_warning(self, tmp_path):
        folder = make_prepared(tmp_path / "data", num_channels=2).folder.path
        alter(folder, "images", "scan000", lambda image: image[:, 1].fill(7))
        alter(folder, "images", "scan001", lambda image: image.fill(7))
        alter(folder, "images", "scan005", lambda image: image.fill(7))
        report = check_dataset(folder)
        # two patients have the same image, but a constant image is not reported as a leak
        assert report.problems == ()
        names = "scan000 channel1, scan001 channel0 channel1, scan005 channel0 channel1"
        assert report.warnings == (f"3 images ({names}) with a single grey value",)

    def test_cases_and_raters_with_only_empty_masks_give_a_warning(self, folder):
        for number in range(6):
            alter(folder, "masks", f"scan00{number}", lambda masks: masks[:, 2].fill(0))
        alter(folder, "masks", "scan003", lambda masks: masks.fill(0))
        report = check_dataset(folder)
        assert report.warnings == (
            "1 case (scan003) in which no rater drew anything",
            "rater rater2 drew nothing in any of 6 cases",
        )
        assert report.empty[:, 2].all()
        assert report.empty[3].all()
        # two empty masks agree
        assert report.agreement[3].tolist() == [1, 1, 1]

    def test_scans_whose_images_are_stored_in_two_ways_give_a_warning(self, folder):
        image = np.load(folder / "images" / "scan002.npy")
        store(folder, "images", "scan002", np.rint(image / 255 * 32767).astype(np.int16))
        (warning,) = check_dataset(folder).warnings
        assert warning.startswith(
            "intensities are scaled in two ways, "
            "5 scans (scan000, scan001, scan003, scan004, scan005) as uint8 and 1 scan (scan002) as int16: "
        )

    @pytest.mark.parametrize("change", [{"mean": [0.99], "std": [0.1]}, {"mean": [0.0005], "std": [0.0005]}])
    def test_a_scan_with_intensities_far_from_the_others_gives_a_warning(self, folder, change):
        edit_manifest(folder, lambda manifest: manifest["scans"][4].update(change))
        (warning,) = check_dataset(folder).warnings
        assert warning.startswith("intensities of 1 scan (scan004) are far from those of the other scans: ")

    def test_files_that_the_manifest_does_not_list_give_a_warning(self, folder):
        (folder / "notes.txt").write_text("mine")
        shutil.copy(folder / "masks" / "scan000.npy", folder / "masks" / "old.npy")
        report = check_dataset(folder)
        assert report.problems == ()
        assert report.warnings == (
            "2 files (masks/old.npy, notes.txt) in the folder that the manifest does not list",
        )

    def test_the_same_image_in_two_patients_is_a_problem_and_in_one_patient_a_warning(self, folder):
        image = np.load(folder / "images" / "scan000.npy")
        store(folder, "images", "scan001", image)
        report = check_dataset(folder)
        assert report.problems == ()
        assert report.warnings == ("2 cases (scan000, scan001) of patient patient000 have the same image",)
        store(folder, "images", "scan005", image)
        report = check_dataset(folder)
        assert report.warnings == ()
        assert report.problems == (
            "the same image under two patients would leak between folds: scan000 (patient patient000), "
            "scan001 (patient patient000), scan005 (patient patient002)",
        )

    def test_long_lists_of_names_are_cut(self):
        assert enumerated(list("abcdefg"), "case") == "7 cases (a, b, c, d, e, ...)"


def write_tiny_dataset(folder):
    """Three cases of two sizes and two patients, three raters, two foreground classes."""
    grey = np.arange(16, dtype=np.uint8).reshape(4, 4)
    empty = np.zeros((3, 4, 4), dtype=np.uint8)
    first, second, third = empty.copy(), empty.copy(), empty[:, :2].copy()
    # organ (1): 4, 4 and 2 voxels, the majority is the first two; tumour (2): 1 voxel each
    first[:2, 0] = 1
    first[2, 0, :2] = 1
    first[:, 2, 2] = 2
    # the third rater draws nothing: majority 2 voxels of organ, no tumour
    second[:2, 1, 1:3] = 1
    third[:, 0, 0] = 1
    cases = [("a", "p", grey, first), ("b", "p", grey.T.copy(), second), ("c", "q", grey[:2] * 2, third)]
    write_dataset(
        folder, cases, raters=["anna", "ben", "[red]carl"], class_names=["background", "organ", "tumour"]
    )


class TestTables:
    def test_an_unknown_spacing_is_said(self, tmp_path):
        write_tiny_dataset(tmp_path / "data")

        def forget(manifest, number):
            manifest["scans"][number]["spacing_mm"] = None

        edit_manifest(tmp_path / "data", lambda manifest: forget(manifest, 0))
        rows = dict(cells(summary_table(check_dataset(tmp_path / "data"))))
        assert rows["spacing (mm)"] == "0.5 x 0.75, unknown in 1 of 3 scans"
        for number in (1, 2):
            edit_manifest(tmp_path / "data", lambda manifest, number=number: forget(manifest, number))
        report = check_dataset(tmp_path / "data")
        assert report.problems == ()
        assert dict(cells(summary_table(report)))["spacing (mm)"] == "unknown: distances will be in voxels"

    def test_the_summary_table_equals_values_computed_by_hand(self, tmp_path):
        write_tiny_dataset(tmp_path / "data")
        report = check_dataset(tmp_path / "data")
        assert (report.problems, report.warnings) == ((), ())
        rows = dict(cells(summary_table(report)))
        assert rows["source"] == "folder"
        assert (rows["cases"], rows["patients"], rows["raters"]) == ("3", "2", "3")
        assert rows["classes"] == "background, organ, tumour"
        assert rows["size"] == "4 x 4, 2 x 4"
        assert rows["spacing (mm)"] == "0.5 x 0.75"
        # organ: (4 + 4 + 2) / 3 of 16, (2 + 2 + 0) / 3 of 16, 1 of 8; tumour: 1 of 16, 0, 0
        shares = np.array([10 / 48, 4 / 48, 1 / 8]) * 100
        assert rows["share of organ"] == (
            f"{shares.mean():.2f} % of the voxels, {shares.min():.2f} to {shares.max():.2f} % in a case"
        )
        assert rows["share of tumour"] == "2.08 % of the voxels, 0.00 to 6.25 % in a case"

    def test_the_rater_table_equals_values_computed_by_hand(self, tmp_path):
        write_tiny_dataset(tmp_path / "data")
        # anna and ben draw the same and are the majority. carl, case a: organ 2 * 2 / (2 + 4), tumour 1;
        # case b: organ 0, tumour 1 because nobody drew one
        carl = ((2 / 3 + 1) / 2 + (0 + 1) / 2 + 1) / 3
        assert cells(rater_table(check_dataset(tmp_path / "data"))) == [
            ["anna", "3", "0", "100.00", f"{50 * (1 + carl):.2f}"],
            ["ben", "3", "0", "100.00", f"{50 * (1 + carl):.2f}"],
            ["[red]carl", "3", "1", f"{100 * carl:.2f}", f"{100 * carl:.2f}"],
            ["mean over raters", "", "", f"{100 * (2 + carl) / 3:.2f}", f"{100 * (1 + 2 * carl) / 3:.2f}"],
        ]

    def test_the_agreement_of_a_single_rater_is_undefined(self, tmp_path):
        make_prepared(tmp_path / "data", num_raters=1)
        assert cells(rater_table(check_dataset(tmp_path / "data"))) == [
            ["rater0", "6", "0", "-", "-"],
            ["mean over raters", "", "", "-", "-"],
        ]

    def test_many_sizes_are_shown_as_a_range(self, tmp_path):
        make_prepared(tmp_path / "data", sizes=[(16, 20), (18, 19), (20, 18), (22, 17)])
        rows = dict(cells(summary_table(check_dataset(tmp_path / "data"))))
        assert rows["size"] == "16 x 17 to 22 x 20"


class TestCommand:
    def test_the_check_of_a_sound_dataset_prints_the_next_command_and_changes_no_file(self, folder):
        before = {path: (sha256(path), path.stat().st_mtime_ns) for path in folder.rglob("*.*")}
        text = printed(folder)
        assert text.rstrip().endswith(
            f"no problems, no warnings; next: semidice train auto --set data.dataset={folder} -o runs/first"
        )
        assert f"wrote {folder.parent / 'data_check.png'}" in text
        assert {path: (sha256(path), path.stat().st_mtime_ns) for path in folder.rglob("*.*")} == before
        assert sorted(path.name for path in folder.parent.iterdir()) == ["data", "data_check.png"]

    def test_whole_volumes_give_one_line_about_the_networks_that_fit_and_how_to_prepare_for_them(
        self, tmp_path
    ):
        make_prepared(tmp_path / "data", depth=3)
        text = printed(tmp_path / "data")
        (line,) = [line for line in text.splitlines() if "whole volumes" in line]
        assert "every network is 2D (small_unet and those of segmentation_models_pytorch)" in line
        assert line.endswith("prepare it with --slices all")
        assert text.rstrip().endswith("next: semidice prepare phantom RAW_DIR NEW_DIR --slices all")

    def test_the_error_counts_the_problems_and_the_sheet_is_still_written(self, folder, tmp_path):
        (folder / "images" / "scan000.npy").unlink()
        (folder / "notes.txt").write_text("mine")
        console = Console(file=io.StringIO(), width=120)
        with pytest.raises(
            CheckError, match=re.escape(f"1 problem, 1 warning in {folder}: correct the raw files")
        ):
            run_check(folder, sheet=tmp_path / "new" / "sheet.png", console=console)
        assert "problem: images/scan000.npy is missing\nwarning: 1 file" in console.file.getvalue()
        assert (tmp_path / "new" / "sheet.png").is_file()

    def test_a_dataset_without_readable_cases_has_no_sheet(self, folder):
        shutil.rmtree(folder / "images")
        text = printed(folder)
        assert "6 problems" in text
        assert not (folder.parent / "data_check.png").exists()

    def test_a_long_list_of_problems_is_cut_and_counted(self, tmp_path):
        make_prepared(tmp_path / "data", num_cases=45, size=(8, 8), slices_per_scan=1)
        shutil.rmtree(tmp_path / "data" / "truth")
        text = printed(tmp_path / "data")
        assert text.count("is missing") == 40
        assert "... and 5 more problems" in text
        assert "45 problems" in text

    def test_a_sheet_inside_the_dataset_or_not_ending_in_png_is_refused(self, folder):
        with pytest.raises(ValueError, match="is inside the dataset, which must not change"):
            run_check(folder, sheet=folder / "sheet.png", console=Console(quiet=True))
        with pytest.raises(ValueError, match=r"a name that ends in \.png; got sheet\.jpg"):
            run_check(folder, sheet=Path("sheet.jpg"), console=Console(quiet=True))

    def test_the_sheet_of_the_current_folder_is_written_next_to_that_folder(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        assert "no problems" in printed(Path("."))
        assert (folder.parent / "data_check.png").is_file()


@pytest.mark.skipif(
    not LIDC.is_dir(), reason="the LIDC slices are not next to the repository (shared/data/lidc)"
)
def test_the_agreement_of_the_lidc_raters_equals_an_independent_computation(tmp_path):
    with (LIDC / "cases.csv").open() as file:
        entries = [(row["case"], row["patient"]) for row in csv.DictReader(file)]
    cases, scores, scores_with_others = [], [], []
    for case, patient in entries:
        paths = [
            LIDC / "images" / f"{case}.png",
            *(LIDC / "raters" / f"{k}" / f"{case}.png" for k in (1, 2, 3, 4)),
        ]
        image, *masks = (np.asarray(Image.open(path)) for path in paths)
        masks = np.stack(masks) > 0
        majority = masks.sum(axis=0) > 2
        overlap, sizes = (masks & majority).sum(axis=(1, 2)), masks.sum(axis=(1, 2)) + majority.sum()
        # every rater drew something, so no size is 0
        scores.append(2 * overlap / sizes)
        flat = masks.reshape(4, -1).astype(float)
        pairs = 2 * flat @ flat.T / (flat.sum(1)[:, None] + flat.sum(1))
        scores_with_others.append((pairs.sum(1) - 1) / 3)
        cases.append((case, patient, image, masks.astype(np.uint8)))
    write_dataset(tmp_path / "lidc", cases, raters=["1", "2", "3", "4"])
    report = check_dataset(tmp_path / "lidc")
    assert (report.problems, report.warnings) == ((), ())
    np.testing.assert_allclose(report.agreement.numpy(), scores, atol=1e-6)
    np.testing.assert_allclose(report.agreement_with_others().numpy(), scores_with_others, atol=1e-6)
    means = np.stack([np.mean(scores, axis=0), np.mean(scores_with_others, axis=0)])
    rater_rows = [
        [rater, "573", "0", *(f"{100 * mean:.2f}" for mean in column)]
        for rater, column in zip("1234", means.T, strict=True)
    ]
    mean_row = ["mean over raters", "", "", *(f"{100 * mean:.2f}" for mean in means.mean(1))]
    assert cells(rater_table(report)) == [*rater_rows, mean_row]
