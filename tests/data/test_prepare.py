"""Preparing gives the same bytes every time, continues after a stop, and leaves no incomplete dataset."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from PIL import Image
from preparing import (
    PHANTOM,
    failing_reader,
    file_hashes,
    folder_dataset,
    phantom_dataset,
    prepare,
    recording_reader,
)
from raw_trees import ellipsoids, make_folder, make_kits, make_lits, write_nifti, write_picture
from rich.console import Console

from semidice.data.dataset import Dataset
from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.prepare import PrepareError
from semidice.data.prepare.command import PrepareRequest, run_prepare
from semidice.data.prepare.workers import WorkerDiedError, Workers
from semidice.data.sources import find_datasets
from semidice.data.sources.scan import read_scan

# a run that tests kill or interrupt: reading is slow, so that they can do so before it ends
SLOW_RUN = """
import time
from pathlib import Path
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset, scan
from semidice.data.sources import find_datasets

read_scan = scan.read_scan

def slowly(*arguments):
    time.sleep({seconds})
    return read_scan(*arguments)

# processes that are spawned import this file too
scan.read_scan = slowly

if __name__ == "__main__":
    phantom = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)
    (raw,) = find_datasets("phantom", Path("raw"), phantom=phantom)
    prepare_dataset(raw, Path("out"), workers={workers})
"""


class DyingPhantom(PhantomOptions):
    """A phantom that ends the process that makes its case 3."""

    def make_case(self, number):
        if number == 3:
            os._exit(1)
        return super().make_case(number)


def test_a_prepared_phantom_is_read_back_as_it_was_made(tmp_path):
    prepared = prepare(phantom_dataset(), tmp_path / "out")
    dataset = Dataset(tmp_path / "out")
    made = make_phantom(6, size=(24, 32), num_raters=3)
    assert prepared.manifest == dataset.manifest
    assert (prepared.num_cases, prepared.num_patients, len(dataset)) == (6, 6, 6)
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
    assert not list(tmp_path.glob(".*"))


def test_bytes_do_not_depend_on_the_run_the_number_of_processes_or_the_order_of_scans(tmp_path):
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
    assert first.spacing_mm == pytest.approx((1.4, 1.6, 2.5))
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
    with pytest.raises(PrepareError, match="has foreground, so there is no case: use --slices all"):
        prepare(replace(raw, scans=raw.scans[1:2]), tmp_path / "other")


def test_a_finished_dataset_is_recognised_and_not_changed(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    out = tmp_path / "out"
    assert not prepare(raw, out).already
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    names = []
    again = prepare(raw, out, reader=recording_reader(names))
    assert again.already
    assert again.manifest == Dataset(out).manifest
    assert names == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_finished_dataset_with_other_options_is_kept_and_the_changed_option_is_reported(tmp_path):
    out = tmp_path / "out"
    prepare(phantom_dataset(), out)
    before = file_hashes(out)
    with pytest.raises(PrepareError, match=r"size was None and is now \[12, 16\]") as error:
        prepare(phantom_dataset(), out, overrides={"size": (12, 16)})
    assert "remove it, or choose another folder" in str(error.value)
    changed = replace(phantom_dataset(), phantom=replace(PHANTOM, seed=4))
    with pytest.raises(PrepareError, match=r"phantom\.seed was 0 and is now 4"):
        prepare(changed, out)
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
    assert prepare(raw, tmp_path / "out").manifest.options["keep_bytes"] is False
    dataset = Dataset(tmp_path / "out")
    low, high = np.percentile(values, (0.5, 99.5))
    expected = np.clip((values - low) / (high - low), 0, 1)
    for number in range(3):
        assert np.array_equal(dataset.stored("images", number), dataset.stored("images", 0))
        assert np.abs(dataset.image(number)[0] - expected).max() <= 0.5 / 32767 + 1e-6


def test_pictures_keep_their_8_bits_only_if_all_of_them_have_8_bits(tmp_path):
    pictures = folder_dataset(tmp_path / "raw", num_cases=3)
    kept = prepare(pictures, tmp_path / "kept")
    assert kept.manifest.options["keep_bytes"] is True
    pixels = {path.stem: np.array(Image.open(path)) for path in (tmp_path / "raw/images").iterdir()}
    for number, case in enumerate(Dataset(tmp_path / "kept").cases):
        assert np.array_equal(Dataset(tmp_path / "kept").stored("images", number)[0], pixels[case.name])
    windowed = prepare(pictures, tmp_path / "windowed", overrides={"window": (0, 200)})
    assert windowed.manifest.options["keep_bytes"] is False
    write_picture(tmp_path / "raw/images/case2.png", pixels["case2"].astype(np.uint16))
    scaled = prepare(pictures, tmp_path / "scaled")
    assert scaled.manifest.options["keep_bytes"] is False
    dataset = Dataset(tmp_path / "scaled")
    for number, case in enumerate(dataset.cases):
        low, high = np.percentile(pixels[case.name].astype(float), (0.5, 99.5))
        expected = np.clip((pixels[case.name] - low) / (high - low), 0, 1)
        assert np.abs(dataset.image(number)[0] - expected).max() <= 0.5 / 32767 + 1e-6


def test_a_dataset_of_an_older_semidice_is_compared_by_the_type_of_its_images(tmp_path):
    out = tmp_path / "out"
    prepare(folder_dataset(tmp_path / "raw", num_cases=3), out)
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["options"]["keep_bytes"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    (raw,) = find_datasets("folder", tmp_path / "raw")
    assert prepare(raw, out).already
    pixels = np.array(Image.open(tmp_path / "raw/images/case1.png"))
    write_picture(tmp_path / "raw/images/case4.png", pixels.T.astype(np.uint16))
    write_picture(
        tmp_path / "raw/raters/a/case4.png", np.array(Image.open(tmp_path / "raw/raters/a/case1.png")).T
    )
    (raw,) = find_datasets("folder", tmp_path / "raw")
    with pytest.raises(PrepareError, match="case1: its intensities were stored as uint8, and would now be"):
        prepare(raw, out)


def test_only_unfinished_scans_are_read_again_after_a_failure(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    with pytest.raises(PrepareError, match="case3: not today"):
        prepare(raw, tmp_path / "out", reader=failing_reader("case3", ValueError("not today")))
    assert not (tmp_path / "out").exists()
    names = []
    prepared = prepare(raw, tmp_path / "out", reader=recording_reader(names))
    assert names == ["case3"]
    assert prepared.num_continued == 5
    prepare(raw, tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_changed_scans_are_read_again_after_an_interruption_and_other_options_start_over(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    failing = {"reader": failing_reader("case6", ValueError("stop"))}
    with pytest.raises(PrepareError, match="stop"):
        prepare(raw, tmp_path / "out", **failing)
    part = tmp_path / ".out.part"
    (tmp_path / "raw/raters/a/case1.png").write_bytes((tmp_path / "raw/raters/b/case1.png").read_bytes())
    (part / "dataset/images/case2.npy").unlink()
    (part / "records/case3.json").write_text("{")
    (part / "dataset/masks/.case4.npy.123.part").write_bytes(b"half")
    (part / "dataset/images/gone.npy").write_bytes(b"of a scan that is no longer there")
    names = []
    changed = replace(raw, scans=(*raw.scans[:4], replace(raw.scans[4], patient="p"), raw.scans[5]))
    prepare(changed, tmp_path / "out", reader=recording_reader(names))
    assert names == ["case1", "case2", "case3", "case5", "case6"]
    prepare(changed, tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")

    with pytest.raises(PrepareError, match="stop"):
        prepare(raw, tmp_path / "small", **failing)
    names.clear()
    prepare(raw, tmp_path / "small", reader=recording_reader(names), overrides={"size": (16, 16)})
    assert len(names) == 6
    prepare(raw, tmp_path / "small again", overrides={"size": (16, 16)})
    assert file_hashes(tmp_path / "small") == file_hashes(tmp_path / "small again")


def test_a_run_killed_after_the_rename_leaves_a_finished_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    prepare(phantom_dataset(), tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / ".out.part").is_dir()
    assert prepare(phantom_dataset(), tmp_path / "out").already
    assert not (tmp_path / ".out.part").exists()


def start_slow_run(tmp_path, *, workers, seconds):
    """Start a slow preparation in its own process and return it when the first scan is finished."""
    script = tmp_path / "slow_run.py"
    script.write_text(SLOW_RUN.format(workers=workers, seconds=seconds))
    process = subprocess.Popen([sys.executable, script.name], cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.part/records/case*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def processes_of(session):
    listing = subprocess.run(["ps", "-s", str(session), "-o", "stat="], capture_output=True, text=True)
    return [state for state in listing.stdout.split() if not state.startswith("Z")]


def continues_to_the_same_bytes(tmp_path):
    names = []
    prepared = prepare(phantom_dataset(), tmp_path / "out", reader=recording_reader(names))
    prepare(phantom_dataset(), tmp_path / "fresh")
    assert prepared.num_continued == 6 - len(names) > 0
    assert names
    return file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_a_killed_run_continues_to_the_same_bytes(tmp_path):
    process = start_slow_run(tmp_path, workers=1, seconds=0.2)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    assert continues_to_the_same_bytes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_run_leaves_no_process_behind_and_continues(tmp_path, signal_sent):
    process = start_slow_run(tmp_path, workers=2, seconds=0.7)
    if signal_sent == signal.SIGINT:
        # a terminal sends the signal to all processes of the command
        os.killpg(process.pid, signal_sent)
    else:
        process.kill()
    process.wait(20)
    deadline = time.monotonic() + 20
    while processes_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(process.pid) == []
    assert not (tmp_path / "out").exists()
    assert continues_to_the_same_bytes(tmp_path)


@pytest.mark.slow
def test_a_dead_process_is_reported_with_the_scans_it_may_have_prepared(tmp_path):
    with pytest.raises(PrepareError, match=r"a process died while it prepared .*case0003") as error:
        prepare(
            replace(phantom_dataset(), phantom=DyingPhantom(**vars(PHANTOM))), tmp_path / "out", workers=2
        )
    assert "--workers 1" in error.value.advice
    # at most one scan per process
    assert str(error.value).count("case000") <= 2
    assert not (tmp_path / "out").exists()
    assert prepare(phantom_dataset(), tmp_path / "out").num_continued > 0


class DyingWorkers(Workers):
    """Workers that finish the first item and then report that two processes died."""

    def each(self, task, items):
        first, second, third, *_ = items
        yield first, task(first)
        raise WorkerDiedError((second, third))


def test_unfinished_scans_of_dead_processes_are_reported_and_finished_scans_are_kept(tmp_path):
    message = (
        "a process died while it prepared case0001, case0002: it ran out of memory, or a library crashed"
    )
    with pytest.raises(PrepareError) as error:
        prepare(phantom_dataset(), tmp_path / "out", workers=DyingWorkers(2))
    assert error.value.problems == (message,)
    assert error.value.advice == "run the same command again with --workers 1: it continues"
    assert prepare(phantom_dataset(), tmp_path / "out").num_continued == 1
    with pytest.raises(PrepareError, match=r"died while it compared case0001, case0002: try --workers 1"):
        prepare(phantom_dataset(), tmp_path / "out", workers=DyingWorkers(2))


def test_ctrl_c_keeps_finished_scans(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(phantom_dataset(), tmp_path / "out", reader=failing_reader("case0004", KeyboardInterrupt()))
    assert not (tmp_path / "out").exists()
    assert prepare(phantom_dataset(), tmp_path / "out").num_continued == 4


def test_a_second_run_at_the_same_time_is_refused(tmp_path):
    names = []

    def start_second_run(dataset, scan):
        with pytest.raises(
            PrepareError, match=r"\.out\.part is in use by `semidice prepare` \(process .*wait"
        ):
            prepare(phantom_dataset(), tmp_path / "out", overrides={"size": (8, 8)})
        names.append(scan.name)
        return read_scan(dataset, scan)

    prepare(phantom_dataset(), tmp_path / "out", reader=start_second_run)
    assert len(names) == 6


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
    (prepared,) = run_prepare("folder", raw, tmp_path / "out", PrepareRequest(workers=0), console=console)
    case1 = next(scan for scan in prepared.manifest.scans if scan.name == "case1")
    assert case1.spacing_mm == (None if spacing is None else pytest.approx(spacing))
    warned = "the header of 1 scan (case1) has no voxel size: distances and volumes will be in voxels"
    assert (warned in console.file.getvalue()) == (spacing is None)
