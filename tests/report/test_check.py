"""Checks of prepared datasets: every kind of damage is found and named, and the numbers are right."""

import csv
import hashlib
import io
import json
import shlex
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from rich.console import Console
from start import refused

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
        entry |= {"mean": [0.5], "std": [0.2], "num_bytes": {}, "drawn": list(range(len(class_names)))}
        scans.append(entry | {"arrays": {kind: sha256(folder / kind / f"{name}.npy") for kind in arrays}})
    manifest = {"source": "folder", "class_names": class_names, "raters": raters, "channels": ["CT"]}
    options = {"keep_bytes": cases[0][2].dtype == np.uint8}
    manifest |= {"mean": [0.5], "std": [0.2], "options": options, "scans": scans}
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


@pytest.mark.parametrize("num_classes", [2, 3, 9, 256])
@pytest.mark.parametrize("space", [(5, 16), (2, 3, 21)])
def test_numpy_and_torch_unpack_the_same_masks(num_classes, space):
    classes = np.random.default_rng(0).integers(0, num_classes, (3, *space), dtype=np.uint8)
    packed = pack_classes(classes, num_classes=num_classes, num_space_axes=len(space))
    options = {"width": space[-1], "num_classes": num_classes, "num_space_axes": len(space)}
    assert np.array_equal(unpack_case(packed, width=space[-1]), classes)
    assert np.array_equal(unpack_classes(torch.from_numpy(packed), **options), classes)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def swap(first, second):
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def move_away(path):
    """The content stays the same: only the link is wrong."""
    elsewhere = path.parents[2] / "elsewhere.npy"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def of_manifest(**changes):
    """Damage to the entry of scan001 in the manifest."""
    return lambda folder: edit_manifest(folder, lambda manifest: manifest["scans"][1].update(changes))


def of_values(kind, index, value):
    """Damage to some values of scan001, with the hash that fits to them."""

    def change(array):
        array[index] = value

    return lambda folder: alter(folder, kind, "scan001", change)


def of_array(kind, array):
    """Another array of scan001, with the hash that fits to it."""
    return lambda folder: store(folder, kind, "scan001", array)


IMAGE, MASKS, TRUTH = "images/scan001.npy", "masks/scan001.npy", "truth/scan001.npy"
# what is done to a folder, and words of each problem that is found then
DAMAGE = {
    "a flipped bit": (lambda folder: flip_a_bit(folder / IMAGE), [[IMAGE, "not the file", "changed"]]),
    "a cut array": (
        lambda folder: (folder / MASKS).write_bytes((folder / MASKS).read_bytes()[:-10]),
        [[MASKS, "not the file"]],
    ),
    "a missing array": (lambda folder: (folder / TRUTH).unlink(), [[TRUTH, "missing"]]),
    "swapped arrays": (
        lambda folder: swap(folder / IMAGE, folder / "images/scan003.npy"),
        [[IMAGE, "swapped"], ["images/scan003.npy", "swapped"]],
    ),
    "a link": (lambda folder: move_away(folder / MASKS), [[MASKS, "leads out", "not read", "copy the file"]]),
    "another shape": (of_array("masks", np.zeros((1, 3, 1, 30, 5), np.uint8)), [[MASKS, "bytes instead of"]]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_kind_of_damage_is_found_and_named(folder, name):
    change, expected = DAMAGE[name]
    change(folder)
    problems = check_dataset(folder).problems
    assert len(problems) == len(expected), problems
    for problem, words in zip(problems, expected, strict=True):
        for word in words:
            assert word in problem


class TestDamage:
    def test_a_case_that_cannot_be_read_is_left_out(self, folder):
        (folder / MASKS).write_bytes((folder / MASKS).read_bytes()[:-10])
        report = check_dataset(folder)
        assert report.readable.tolist() == [True, False, True, True, True, True]
        assert np.isnan(report.foreground[1]).all()
        assert report.agreement[1].isnan().all()

    def test_the_check_survives_flipped_bits_of_a_header(self, folder):
        sound = (folder / IMAGE).read_bytes()
        for position in range(0, 128, 7):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << position % 8
            (folder / IMAGE).write_bytes(damaged)
            assert IMAGE in check_dataset(folder).problems[0], position

    def test_a_dataset_reached_through_a_link_is_sound(self, folder, tmp_path):
        (tmp_path / "link").symlink_to(folder)
        assert check_dataset(tmp_path / "link").problems == ()

    def test_all_problems_are_reported_together(self, folder):
        (folder / "images" / "scan000.npy").unlink()
        path = folder / "masks" / "scan005.npy"
        path.write_bytes(path.read_bytes()[:100])
        text = printed(folder)
        for name in ("images/scan000.npy", "masks/scan005.npy"):
            assert f"problem: {name}" in text
        assert "2 problems" in text


class TestWarnings:
    def test_an_image_or_channel_with_one_grey_value_gives_a_warning(self, tmp_path):
        folder = make_prepared(tmp_path / "data", num_channels=2).folder.path
        alter(folder, "images", "scan000", lambda image: image[:, 1].fill(7))
        alter(folder, "images", "scan001", lambda image: image.fill(7))
        alter(folder, "images", "scan005", lambda image: image.fill(7))
        report = check_dataset(folder)
        # two patients have the same image, but a constant image is not reported as a leak
        assert report.problems == ()
        (warning,) = report.warnings
        assert "(scan000 channel1, scan001 channel0 channel1, scan005 channel0 channel1)" in warning

    def test_cases_and_raters_with_only_empty_masks_give_a_warning(self, folder):
        for number in range(6):
            alter(folder, "masks", f"scan00{number}", lambda masks: masks[:, 2].fill(0))
        alter(folder, "masks", "scan003", lambda masks: masks.fill(0))
        report = check_dataset(folder)
        of_case, of_rater = report.warnings
        assert "scan003" in of_case
        assert "rater2" in of_rater
        assert report.empty[:, 2].all()
        assert report.empty[3].all()
        # two empty masks agree
        assert report.agreement[3].tolist() == [1, 1, 1]

    def test_a_rater_with_inverted_masks_or_a_copy_and_masks_that_fill_the_image_give_warnings(self, folder):
        first = {n: np.load(folder / "masks" / f"scan00{n}.npy") for n in range(6)}
        assert check_dataset(folder).warnings == ()

        def change(name, make):
            for number, masks in first.items():
                changed = masks.copy()
                make(changed, number)
                store(folder, "masks", f"scan00{number}", changed)
            return [text for text in check_dataset(folder).warnings if name in text]

        (inverted,) = change("rater1", lambda masks, _: np.invert(masks[:, 1], out=masks[:, 1]))
        assert "inverted" in inverted
        (copied,) = change("rater2", lambda masks, _: masks.__setitem__((slice(None), 2), masks[:, 0]))
        assert "rater0 and rater2 drew the same" in copied
        (full,) = change("rater0", lambda masks, n: n == 3 and masks[:, 0].fill(255))
        assert "more than 90%" in full
        assert "scan003" in full

    @pytest.mark.parametrize("change", [{"mean": [0.99], "std": [0.1]}, {"mean": [0.0005], "std": [0.0005]}])
    def test_a_scan_with_intensities_far_from_the_others_gives_a_warning(self, folder, change):
        edit_manifest(folder, lambda manifest: manifest["scans"][4].update(change))
        (warning,) = check_dataset(folder).warnings
        assert "1 scan (scan004)" in warning
        assert "far from" in warning

    def test_files_that_the_manifest_does_not_list_give_a_warning(self, folder):
        (folder / "notes.txt").write_text("mine")
        shutil.copy(folder / "masks" / "scan000.npy", folder / "masks" / "old.npy")
        report = check_dataset(folder)
        assert report.problems == ()
        (warning,) = report.warnings
        assert "2 files (masks/old.npy, notes.txt)" in warning

    def test_the_same_image_in_two_patients_is_a_problem_and_in_one_patient_a_warning(self, folder):
        image = np.load(folder / "images" / "scan000.npy")
        store(folder, "images", "scan001", image)
        report = check_dataset(folder)
        assert report.problems == ()
        (warning,) = report.warnings
        assert "2 cases (scan000, scan001) of patient patient000" in warning
        store(folder, "images", "scan005", image)
        report = check_dataset(folder)
        assert report.warnings == ()
        (problem,) = report.problems
        assert "leak between folds" in problem
        for case in ("scan000 (patient patient000)", "scan005 (patient patient002)"):
            assert case in problem


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
        before = {path: sha256(path) for path in folder.rglob("*.*")}
        text = printed(folder)
        assert "no problems" in text
        option = shlex.quote(f"data.dataset={folder}")
        assert text.rstrip().endswith(f"semidice train auto --set {option} -o runs/first")
        assert f"wrote {folder.parent / 'data_check.png'}" in text
        assert {path: sha256(path) for path in folder.rglob("*.*")} == before
        assert sorted(path.name for path in folder.parent.iterdir()) == ["data", "data_check.png"]

    def test_whole_volumes_give_one_line_about_the_networks_that_fit_and_how_to_prepare_for_them(
        self, tmp_path
    ):
        make_prepared(tmp_path / "data", depth=3)
        text = printed(tmp_path / "data")
        (line,) = [line for line in text.splitlines() if "whole volumes" in line]
        assert "every network is 2D" in line
        assert line.endswith("prepare it with --slices all")
        assert text.rstrip().endswith("next: semidice prepare phantom RAW_DIR NEW_DIR --slices all")

    def test_the_error_counts_the_problems_and_the_sheet_is_still_written(self, folder, tmp_path):
        (folder / "images" / "scan000.npy").unlink()
        (folder / "notes.txt").write_text("mine")
        console = Console(file=io.StringIO(), width=120)
        sheet = tmp_path / "new" / "sheet.png"
        refused(lambda: run_check(folder, sheet=sheet, console=console), "1 problem, 1 warning", str(folder))
        assert "problem: images/scan000.npy is missing" in console.file.getvalue()
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
        for sheet, word in ((folder / "sheet.png", "outside"), (Path("sheet.jpg"), ".png")):
            check = partial(run_check, folder, sheet=sheet, console=Console(quiet=True))
            refused(check, str(sheet), word)

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
