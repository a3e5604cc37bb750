"""Preparing gives the same bytes every time, continues after a stop, and leaves no incomplete dataset."""

import gzip
import io
import os
import signal
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from PIL import Image
from preparing import (
    failing,
    file_hashes,
    folder_dataset,
    phantom_dataset,
    prepare,
    recording,
)
from raw_trees import ellipsoids, make_folder, make_kits, make_lits, write_nifti, write_picture
from rich.console import Console
from start import refused

from semidice.data.dataset import Dataset
from semidice.data.phantom import make_phantom
from semidice.data.prepare import PrepareError, run_prepare
from semidice.data.sources import find_datasets
from semidice.errors import UserError
from semidice.runs.run import manifest_digest

# a run in two threads that finishes one scan; the others wait until the file `go` exists
WAITING_RUN = """
import time
from dataclasses import replace
from pathlib import Path
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets

phantom = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)
(raw,) = find_datasets("phantom", Path("raw"), phantom=phantom)

def read_when_told(dataset, scan):
    while scan.name != "case0000" and not Path("go").exists():
        time.sleep(0.01)
    return raw.read(dataset, scan)

prepare_dataset(replace(raw, read=read_when_told), Path("out"), workers=2)
"""


def test_a_prepared_phantom_is_read_back_as_it_was_made(tmp_path):
    prepared = prepare(phantom_dataset(), tmp_path / "out")
    dataset = Dataset(tmp_path / "out")
    made = make_phantom(6, size=(24, 32), num_raters=3)
    assert prepared.manifest == dataset.manifest
    assert (prepared.num_cases, len(dataset)) == (6, 6)
    assert dataset.present.all()
    images = []
    for number in range(6):
        expected = np.clip((made.image[number].numpy() + 0.2) / 1.4, 0, 1)
        # half a level of int16, and the rounding of float32
        assert np.abs(dataset.image(number) - expected).max() <= 0.5 / 32767 + 1e-6
        assert np.array_equal(dataset.masks(number), made.masks[number].numpy())
        assert np.array_equal(dataset.truth(number), made.prob[number].numpy())
        images.append(dataset.stored("images", number).astype(np.float64) / 32767)
    assert dataset.manifest.mean == pytest.approx([np.mean(images)], rel=1e-12)
    assert dataset.manifest.std == pytest.approx([np.std(images)], rel=1e-12)
    assert [scan.mean for scan in dataset.manifest.scans] == [
        pytest.approx([np.mean(image)], rel=1e-12) for image in images
    ]
    assert dataset.mean_std(range(6)) == (dataset.manifest.mean, dataset.manifest.std)
    assert not list((tmp_path / "out").glob(".*"))


def test_bytes_do_not_depend_on_the_run_the_number_of_threads_or_the_order_of_scans(tmp_path):
    raw = phantom_dataset()
    seen = []
    prepare(raw, tmp_path / "one")
    prepare(replace(raw, scans=raw.scans[::-1]), tmp_path / "backwards")
    prepare(raw, tmp_path / "two", workers=2, on_scan=seen.append)
    assert sorted(seen) == [f"case000{number}" for number in range(6)]
    expected = file_hashes(tmp_path / "one")
    assert len(expected) == 3 * 6 + 1
    assert file_hashes(tmp_path / "two") == file_hashes(tmp_path / "backwards") == expected


def test_the_manifest_lists_scans_in_natural_order_with_hashes_of_their_raw_files(tmp_path):
    raw = folder_dataset(tmp_path / "raw", num_cases=11, patients=True)
    prepare(raw, tmp_path / "out")
    manifest = Dataset(tmp_path / "out").manifest
    assert [scan.name for scan in manifest.scans] == [f"case{number}" for number in range(1, 12)]
    assert manifest.scans[1].patient == manifest.scans[0].patient
    # the last rater has no file for case 2 and an empty mask for case 3
    assert manifest.scans[1].raters == ("a", "b")
    assert Dataset(tmp_path / "out").present.sum() == 3 * 11 - 1
    raw_hashes = file_hashes(tmp_path / "raw")
    for scan in manifest.scans:
        assert len(scan.inputs) == 1 + len(scan.raters)
        for name, digest in scan.inputs.items():
            assert raw_hashes[name] == digest


def test_a_sliced_volume_keeps_the_affine_and_spacing_of_the_raw_image(tmp_path):
    make_lits(tmp_path / "raw")
    (raw,) = find_datasets("lits", tmp_path / "raw")
    prepare(raw, tmp_path / "out", overrides={"size": (20, 18)})
    dataset = Dataset(tmp_path / "out")
    first = dataset.manifest.scans[0]
    (path,) = (path for path in first.inputs if "volume" in path)
    image = nibabel.load(tmp_path / "raw" / path)
    np.testing.assert_allclose(first.affine, image.affine)
    assert first.raw_shape == image.shape
    assert first.voxel_mm == pytest.approx((1.4, 1.6, 2.5))
    drawn = np.asarray(nibabel.load(tmp_path / "raw" / path.replace("volume", "segmentation")).dataobj)
    assert first.slices == tuple(np.flatnonzero((drawn == 2).any((0, 1))))
    window = np.clip((np.asarray(image.dataobj)[..., first.slices[1]] + 60.0) / 200, 0, 1)
    halves = window.reshape(20, 2, 18, 2).mean((1, 3))
    assert np.abs(dataset.image(1)[0] - halves).max() <= 0.5 / 32767 + 1e-6
    assert (
        dataset.cases[1].name == f"volume-0_slice{first.slices[1]:04d}" or first.name in dataset.cases[1].name
    )


def test_a_scan_without_foreground_gives_no_case_and_is_reported(tmp_path):
    root = make_kits(tmp_path / "raw", num_cases=3)
    path = root / "case_00001" / "segmentation.nii.gz"
    healthy = nibabel.load(path)
    nibabel.save(nibabel.Nifti1Image(np.minimum(np.asarray(healthy.dataobj), 1), healthy.affine), path)
    (raw,) = find_datasets("kits", root)
    prepared = prepare(raw, tmp_path / "out")
    assert prepared.without_foreground == ("case_00001",)
    assert [scan.name for scan in prepared.manifest.scans] == ["case_00000", "case_00002"]
    assert prepare(raw, tmp_path / "out").already
    healthy_alone = replace(raw, scans=raw.scans[1:2])
    refused(lambda: prepare(healthy_alone, tmp_path / "other"), "no scan", "foreground", "--slices all")


def test_a_finished_dataset_is_recognised_and_not_changed(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    out = tmp_path / "out"
    assert not prepare(raw, out).already
    before = file_hashes(out), {path: path.stat().st_ino for path in out.rglob("*")}
    names = []
    again = prepare(recording(raw, names), out)
    assert again.already
    assert again.manifest == Dataset(out).manifest
    assert names == []
    assert (file_hashes(out), {path: path.stat().st_ino for path in out.rglob("*")}) == before


def test_a_finished_dataset_with_other_options_is_kept_and_the_changed_option_is_reported(tmp_path):
    out = tmp_path / "out"
    prepare(phantom_dataset(), out)
    before = file_hashes(out)
    way_out = "remove it, or choose another folder"
    resized = {"overrides": {"size": (12, 16)}}
    refused(
        lambda: prepare(phantom_dataset(), out, **resized), "options.size was None", "now [12, 16]", way_out
    )
    changed = replace(phantom_dataset(), made_with=phantom_dataset().made_with | {"seed": 4})
    refused(lambda: prepare(changed, out), "made_with.seed was 0", "now 4", way_out)
    assert file_hashes(out) == before


def test_a_finished_dataset_whose_raw_files_or_arrays_changed_is_kept_and_all_changes_are_reported(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    out = tmp_path / "out"
    prepare(raw, out)
    (tmp_path / "raw/raters/a/case4.png").write_bytes((tmp_path / "raw/raters/b/case4.png").read_bytes())
    with (out / "masks/case5.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    before = file_hashes(out)
    scans = (*raw.scans[1:5], replace(raw.scans[5], patient="another"), replace(raw.scans[1], name="new"))
    with pytest.raises(PrepareError) as error:
        prepare(replace(raw, scans=scans), out)
    assert sorted(error.value.problems) == [
        f"case1 is in {out}, but no longer in {tmp_path / 'raw'}",
        "case4: raters/a/case4.png was changed, added or removed since",
        "case5: masks/case5.npy is not the file that was prepared",
        "case6: the patient was case6 and is now another",
        "new: it is not in the dataset, but can be prepared now",
    ]
    assert file_hashes(out) == before


def test_copies_of_a_nifti_in_other_types_are_stored_with_the_same_values(tmp_path):
    image, masks = ellipsoids(0, (24, 26))
    values = np.rint(image * 90)
    for dtype in ("uint8", "int16", "float32"):
        write_nifti(tmp_path / "raw/images" / f"{dtype}.nii.gz", values.astype(dtype))
        write_nifti(tmp_path / "raw/masks" / f"{dtype}.nii.gz", masks[0])
    (raw,) = find_datasets("folder", tmp_path / "raw")
    assert prepare(raw, tmp_path / "out").manifest.options.keep_bytes is False
    dataset = Dataset(tmp_path / "out")
    low, high = np.percentile(values, (0.5, 99.5))
    expected = np.clip((values - low) / (high - low), 0, 1)
    for number in range(3):
        assert np.array_equal(dataset.stored("images", number), dataset.stored("images", 0))
        assert np.abs(dataset.image(number)[0] - expected).max() <= 0.5 / 32767 + 1e-6


def test_pictures_keep_their_8_bits_only_if_all_of_them_have_8_bits(tmp_path):
    pictures = folder_dataset(tmp_path / "raw", num_cases=3)
    kept = prepare(pictures, tmp_path / "kept")
    assert kept.manifest.options.keep_bytes is True
    pixels = {path.stem: np.array(Image.open(path)) for path in (tmp_path / "raw/images").iterdir()}
    for number, case in enumerate(Dataset(tmp_path / "kept").cases):
        assert np.array_equal(Dataset(tmp_path / "kept").stored("images", number)[0], pixels[case.name])
    windowed = prepare(pictures, tmp_path / "windowed", overrides={"window": (0, 200)})
    assert windowed.manifest.options.keep_bytes is False
    write_picture(tmp_path / "raw/images/case2.png", pixels["case2"].astype(np.uint16))
    scaled = prepare(pictures, tmp_path / "scaled")
    assert scaled.manifest.options.keep_bytes is False
    dataset = Dataset(tmp_path / "scaled")
    for number, case in enumerate(dataset.cases):
        low, high = np.percentile(pixels[case.name].astype(float), (0.5, 99.5))
        expected = np.clip((pixels[case.name] - low) / (high - low), 0, 1)
        assert np.abs(dataset.image(number)[0] - expected).max() <= 0.5 / 32767 + 1e-6


def test_only_unfinished_scans_are_read_again_after_a_failure(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    stopped = failing(raw, "case3", UserError("not today"))
    refused(lambda: prepare(stopped, tmp_path / "out"), "case3: not today")
    refused(lambda: Dataset(tmp_path / "out"), "not finished", "again")
    names = []
    prepared = prepare(recording(raw, names), tmp_path / "out")
    assert names == ["case3"]
    assert prepared.num_continued == 5
    prepare(raw, tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_changed_scans_are_read_again_after_an_interruption_and_other_options_start_over(tmp_path):
    raw, out = folder_dataset(tmp_path / "raw"), tmp_path / "out"
    stopped = failing(raw, "case6", UserError("stop"))
    refused(lambda: prepare(stopped, out), "case6: stop")
    (tmp_path / "raw/raters/a/case1.png").write_bytes((tmp_path / "raw/raters/b/case1.png").read_bytes())
    (out / "images/case2.npy").unlink()
    (out / ".scans/case3.json").write_text("{")
    (out / "masks/.case4.npy.123.part").write_bytes(b"half")
    (out / "images/gone.npy").write_bytes(b"of a scan that is no longer there")
    names = []
    changed = replace(raw, scans=(*raw.scans[:4], replace(raw.scans[4], patient="p"), raw.scans[5]))
    prepare(recording(changed, names), out)
    assert names == ["case1", "case2", "case3", "case5", "case6"]
    prepare(changed, tmp_path / "fresh")
    assert file_hashes(out) == file_hashes(tmp_path / "fresh")

    small = {"overrides": {"size": (16, 16)}}
    refused(lambda: prepare(stopped, tmp_path / "small"), "case6: stop")
    names.clear()
    prepare(recording(raw, names), tmp_path / "small", **small)
    assert len(names) == 6
    prepare(raw, tmp_path / "small again", **small)
    assert file_hashes(tmp_path / "small") == file_hashes(tmp_path / "small again")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_run_leaves_no_process_behind_and_continues(tmp_path, start, number):
    (tmp_path / "run.py").write_text(WAITING_RUN)
    process = start("run.py", cwd=tmp_path)
    process.wait_until(lambda: list(tmp_path.glob("out/.scans/case*.json")))
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out"), "out", "in use by", "wait")
    if number == signal.SIGINT:
        # a terminal sends the signal to all processes of the command, which first finish their scans
        os.killpg(process.process.pid, number)
        (tmp_path / "go").touch()
    else:
        process.send_signal(number)
    # returns when the last process has closed its output
    assert process.end().code != 0
    assert not (tmp_path / "out/manifest.json").exists()
    assert 6 > prepare(phantom_dataset(), tmp_path / "out").num_continued > 0
    prepare(phantom_dataset(), tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


@pytest.mark.parametrize(("has_sform", "spacing"), [(True, (0.7, 0.8, 2.5)), (False, None)])
def test_a_side_of_0_in_a_nifti_is_that_of_the_sform_or_not_known_and_never_1_mm(
    tmp_path, has_sform, spacing
):
    raw = tmp_path / "raw"
    make_folder(raw, num_cases=2, suffix=".nii.gz", volumes=True)
    for path in raw.rglob("case1.nii.gz"):
        image = nibabel.Nifti1Image(np.asarray(nibabel.load(path).dataobj), np.diag([0.7, 0.8, 2.5, 1]))
        image.set_qform(None, 0)
        if not has_sform:
            image.set_sform(None, 0)
        content = bytearray(image.to_bytes())
        content[88:92] = bytes(4)
        path.write_bytes(gzip.compress(bytes(content)))
    console = Console(file=io.StringIO(), width=400)
    (prepared,) = run_prepare("folder", raw, tmp_path / "out", workers=0, console=console)
    case1 = next(scan for scan in prepared.manifest.scans if scan.name == "case1")
    assert case1.voxel_mm == (() if spacing is None else pytest.approx(spacing))
    warned = "the header of 1 scan (case1) has no voxel size: distances and volumes will be in voxels"
    assert (warned in console.file.getvalue()) == (spacing is None)


def test_the_manifest_says_where_the_raw_files_were_and_how_to_get_their_intensities_back(tmp_path):
    raw = folder_dataset(tmp_path / "raw", suffix=".nii.gz", num_cases=3)
    manifest = prepare(raw, tmp_path / "out").manifest
    assert manifest.raw_folder == str(tmp_path / "raw")
    dataset = Dataset(tmp_path / "out")
    for number, scan in enumerate(manifest.scans):
        ((low, high),) = scan.limits
        image = np.asarray(nibabel.load(tmp_path / "raw/images" / f"{scan.name}.nii.gz").dataobj)
        restored = dataset.image(number)[0] * (high - low) + low
        assert np.abs(restored - image.clip(low, high)).max() <= (high - low) / 32767
    moved = manifest.model_copy(update={"raw_folder": "/elsewhere"})
    assert manifest_digest(moved) == manifest_digest(manifest)
