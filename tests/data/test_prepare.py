"""Preparing: the same bytes however it is done, continued where it was stopped, and whole or not there."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from preparing import PHANTOM, a_folder, a_phantom, fails_at, files_in, prepare, reads
from raw_trees import make_kits, make_lits

from semidice.data.dataset import Dataset
from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.prepare import PrepareError
from semidice.data.prepare.workers import WorkerDiedError, Workers
from semidice.data.sources import find_datasets
from semidice.data.sources.scan import read_scan

# what a run that is killed or stopped prepares: readers are slow, so that there is a middle to be hit
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


def test_a_phantom_reads_back_as_it_was_made(tmp_path):
    prepared = prepare(a_phantom(), tmp_path / "out")
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
    assert not list(tmp_path.glob(".*"))


def test_bytes_depend_neither_on_the_run_nor_on_the_number_of_processes_nor_on_the_order_of_scans(tmp_path):
    raw = a_phantom()
    seen = []
    prepare(raw, tmp_path / "one")
    prepare(replace(raw, scans=raw.scans[::-1]), tmp_path / "backwards")
    prepare(raw, tmp_path / "two", workers=2, on_scan=seen.append)
    assert sorted(seen) == [f"case000{number}" for number in range(6)]
    whole = files_in(tmp_path / "one")
    assert len(whole) == 3 * 6 + 1
    assert files_in(tmp_path / "two") == files_in(tmp_path / "backwards") == whole


def test_scans_stand_in_natural_order_with_the_hashes_of_what_was_read(tmp_path):
    raw = a_folder(tmp_path / "raw", num_cases=11, patients=True)
    prepare(raw, tmp_path / "out")
    manifest = Dataset(tmp_path / "out").manifest
    assert [scan.name for scan in manifest.scans] == [f"case{number}" for number in range(1, 12)]
    assert manifest.scans[1].patient == manifest.scans[0].patient
    # the last rater has no file for case 2 and drew nothing in case 3
    assert manifest.scans[1].raters == ("a", "b")
    assert Dataset(tmp_path / "out").present.sum() == 3 * 11 - 1
    read = files_in(tmp_path / "raw")
    for scan in manifest.scans:
        assert len(scan.inputs) == 1 + len(scan.raters)
        for name, digest in scan.inputs.items():
            assert read[name] == digest


def test_a_volume_in_slices_keeps_affine_and_spacing_of_the_raw_image(tmp_path):
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


def test_a_scan_without_foreground_gives_no_case_and_is_told(tmp_path):
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


def test_a_finished_dataset_is_recognised_and_not_touched(tmp_path):
    raw = a_folder(tmp_path / "raw")
    out = tmp_path / "out"
    assert not prepare(raw, out).already
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    names = []
    again = prepare(raw, out, reader=reads(names))
    assert again.already
    assert again.manifest == Dataset(out).manifest
    assert names == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_finished_dataset_with_other_options_is_kept_and_the_option_is_named(tmp_path):
    out = tmp_path / "out"
    prepare(a_phantom(), out)
    before = files_in(out)
    with pytest.raises(PrepareError, match=r"size was None and is now \[12, 16\]") as told:
        prepare(a_phantom(), out, overrides={"size": (12, 16)})
    assert "remove it, or choose another folder" in str(told.value)
    other = replace(a_phantom(), phantom=replace(PHANTOM, seed=4))
    with pytest.raises(PrepareError, match=r"phantom\.seed was 0 and is now 4"):
        prepare(other, out)
    assert files_in(out) == before


def test_a_finished_dataset_whose_raw_files_or_arrays_changed_is_kept_and_all_changes_are_named(tmp_path):
    raw = a_folder(tmp_path / "raw")
    out = tmp_path / "out"
    prepare(raw, out)
    (tmp_path / "raw/raters/a/case4.png").write_bytes((tmp_path / "raw/raters/b/case4.png").read_bytes())
    with (out / "masks/case5.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    before = files_in(out)
    scans = (*raw.scans[1:5], replace(raw.scans[5], patient="another"), replace(raw.scans[1], name="new"))
    with pytest.raises(PrepareError) as told:
        prepare(replace(raw, scans=scans), out)
    assert sorted(told.value.problems) == [
        f"case1 is in {out}, but no longer in {tmp_path / 'raw'}",
        "case4: raters/a/case4.png was changed, added or removed since",
        "case5: masks/case5.npy is not the file that was prepared",
        "case6: the patient was case6 and is now another",
        "new: it is not in the dataset, but can be prepared now",
    ]
    assert files_in(out) == before


def test_after_a_failure_only_the_scans_that_are_not_finished_are_read_again(tmp_path):
    raw = a_folder(tmp_path / "raw")
    with pytest.raises(PrepareError, match="case3: not today"):
        prepare(raw, tmp_path / "out", reader=fails_at("case3", ValueError("not today")))
    assert not (tmp_path / "out").exists()
    names = []
    prepared = prepare(raw, tmp_path / "out", reader=reads(names))
    assert names == ["case3"]
    assert prepared.num_continued == 5
    prepare(raw, tmp_path / "fresh")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


def test_what_changed_since_an_interruption_is_read_again_and_other_options_begin_anew(tmp_path):
    raw = a_folder(tmp_path / "raw")
    stopped = {"reader": fails_at("case6", ValueError("stop"))}
    with pytest.raises(PrepareError, match="stop"):
        prepare(raw, tmp_path / "out", **stopped)
    part = tmp_path / ".out.part"
    (tmp_path / "raw/raters/a/case1.png").write_bytes((tmp_path / "raw/raters/b/case1.png").read_bytes())
    (part / "dataset/images/case2.npy").unlink()
    (part / "records/case3.json").write_text("{")
    (part / "dataset/masks/.case4.npy.123.part").write_bytes(b"half")
    (part / "dataset/images/gone.npy").write_bytes(b"of a scan that is no longer there")
    names = []
    changed = replace(raw, scans=(*raw.scans[:4], replace(raw.scans[4], patient="p"), raw.scans[5]))
    prepare(changed, tmp_path / "out", reader=reads(names))
    assert names == ["case1", "case2", "case3", "case5", "case6"]
    prepare(changed, tmp_path / "fresh")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")

    with pytest.raises(PrepareError, match="stop"):
        prepare(raw, tmp_path / "small", **stopped)
    names.clear()
    prepare(raw, tmp_path / "small", reader=reads(names), overrides={"size": (16, 16)})
    assert len(names) == 6
    prepare(raw, tmp_path / "small again", overrides={"size": (16, 16)})
    assert files_in(tmp_path / "small") == files_in(tmp_path / "small again")


def test_a_run_killed_after_the_rename_leaves_a_finished_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    prepare(a_phantom(), tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / ".out.part").is_dir()
    assert prepare(a_phantom(), tmp_path / "out").already
    assert not (tmp_path / ".out.part").exists()


def started(tmp_path, *, workers, seconds):
    """A slow preparation in a process of its own, once it has finished a scan and not yet all."""
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
    prepared = prepare(a_phantom(), tmp_path / "out", reader=reads(names))
    prepare(a_phantom(), tmp_path / "fresh")
    assert prepared.num_continued == 6 - len(names) > 0
    assert names
    return files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


def test_killed_in_the_middle_it_continues_to_the_same_bytes(tmp_path):
    process = started(tmp_path, workers=1, seconds=0.2)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    assert continues_to_the_same_bytes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_stopped_with_several_processes_none_is_left_and_it_continues(tmp_path, sent):
    process = started(tmp_path, workers=2, seconds=0.7)
    if sent == signal.SIGINT:
        # as a terminal does: to all processes of the command
        os.killpg(process.pid, sent)
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
def test_a_process_that_dies_is_told_with_the_scans_it_may_have_died_of(tmp_path):
    with pytest.raises(PrepareError, match=r"a process died while it prepared .*case0003") as told:
        prepare(replace(a_phantom(), phantom=DyingPhantom(**vars(PHANTOM))), tmp_path / "out", workers=2)
    assert "--workers 1" in told.value.advice
    # no more than there are processes
    assert str(told.value).count("case000") <= 2
    assert not (tmp_path / "out").exists()
    assert prepare(a_phantom(), tmp_path / "out").num_continued > 0


class DyingWorkers(Workers):
    """Two of whose processes die on the way, as far as others can tell."""

    def each(self, task, items):
        first, second, third, *_ = items
        yield first, task(first)
        raise WorkerDiedError((second, third))


def test_scans_under_way_when_a_process_dies_are_named_and_what_was_finished_is_kept(tmp_path):
    died = "a process died while it prepared case0001, case0002: it ran out of memory, or a library crashed"
    with pytest.raises(PrepareError) as told:
        prepare(a_phantom(), tmp_path / "out", workers=DyingWorkers(2))
    assert told.value.problems == (died,)
    assert told.value.advice == "run the same command again with --workers 1: it continues"
    assert prepare(a_phantom(), tmp_path / "out").num_continued == 1
    with pytest.raises(PrepareError, match=r"died while it compared case0001, case0002: try --workers 1"):
        prepare(a_phantom(), tmp_path / "out", workers=DyingWorkers(2))


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(a_phantom(), tmp_path / "out", reader=fails_at("case0004", KeyboardInterrupt()))
    assert not (tmp_path / "out").exists()
    assert prepare(a_phantom(), tmp_path / "out").num_continued == 4


def test_two_runs_at_once_do_not_write_into_each_other(tmp_path):
    told = []

    def meanwhile(dataset, scan):
        with pytest.raises(PrepareError, match=r"another `semidice prepare` is working in .*wait"):
            prepare(a_phantom(), tmp_path / "out", overrides={"size": (8, 8)})
        told.append(scan.name)
        return read_scan(dataset, scan)

    prepare(a_phantom(), tmp_path / "out", reader=meanwhile)
    assert len(told) == 6
