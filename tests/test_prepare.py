"""Preparing: the same bytes however it is done, whole or not there, and every problem told at once."""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from raw_trees import make_folder, make_kits, make_lits, make_qubiq
from rich.console import Console

from semidice.data import scan_job
from semidice.data.dataset import Dataset
from semidice.data.phantom import PhantomOptions, make_phantom
from semidice.data.prepare import PrepareError, prepare_dataset, run_prepare
from semidice.data.sources import find_datasets, read_scan
from semidice.data.workers import WorkerDiedError, Workers

PHANTOM = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)
# what a run that is killed or stopped prepares: readers are slow, so that there is a middle to be hit
SLOW_RUN = """
import time
from pathlib import Path
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets, read_scan

def slowly(dataset, scan):
    time.sleep({seconds})
    return read_scan(dataset, scan)

if __name__ == "__main__":
    phantom = PhantomOptions(num_cases=6, size=(24, 32), num_raters=3)
    (raw,) = find_datasets("phantom", Path("raw"), phantom=phantom)
    prepare_dataset(raw, Path("out"), workers={workers}, reader=slowly)
"""


def files_in(folder):
    """SHA-256 of every file by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def a_phantom():
    (raw,) = find_datasets("phantom", Path("raw"), phantom=PHANTOM)
    return raw


def a_folder(root, **options):
    (raw,) = find_datasets("folder", make_folder(root, **options))
    return raw


def prepare(raw, out, **options):
    return prepare_dataset(raw, out, **({"workers": 1} | options))


def reads(names, reader=read_scan):
    """A reader that notes in `names` which scans were read."""

    def noting(dataset, scan):
        names.append(scan.name)
        return reader(dataset, scan)

    return noting


def fails_at(name, error):
    def failing(dataset, scan):
        if scan.name == name:
            raise error
        return read_scan(dataset, scan)

    return failing


def dies_at_case_3(dataset, scan):
    if scan.name == "case0003":
        os._exit(1)
    return read_scan(dataset, scan)


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
    with pytest.raises(PrepareError, match="holds foreground, so there is no case: try --slices all"):
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
        "case4: raters/a/case4.png has changed since, or came or went",
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
        prepare(a_phantom(), tmp_path / "out", workers=2, reader=dies_at_case_3)
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


def test_all_problems_of_all_scans_come_at_once_with_the_files_and_a_way_out(tmp_path):
    dataset = replace(a_folder(tmp_path / "raw"), problems=("case9: it is odd",))
    other = make_folder(tmp_path / "other", size=(20, 20))
    image, mask, small = (
        tmp_path / "raw" / name for name in ("images/case1.png", "raters/a/case4.png", "raters/b/case5.png")
    )
    image.write_bytes(image.read_bytes()[:100])
    mask.write_bytes(mask.read_bytes()[::-1])
    small.write_bytes((other / "raters/b/case5.png").read_bytes())
    with pytest.raises(PrepareError) as told:
        prepare(dataset, tmp_path / "out")
    odd, first, fourth, fifth = told.value.problems
    assert odd == "case9: it is odd"
    assert str(image) in first
    assert str(mask) in fourth
    assert str(small) in fifth
    assert "(20, 20)" in fifth
    assert "4 problems" in told.value.advice
    assert "--skip-bad" in told.value.advice
    assert not (tmp_path / "out").exists()

    names = []
    prepared = prepare(dataset, tmp_path / "out", skip_bad=True, reader=reads(names))
    assert names == ["case1", "case4", "case5"]
    assert prepared.left_out == told.value.problems
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["left_out"] == list(told.value.problems)
    assert [scan["name"] for scan in manifest["scans"]] == ["case2", "case3", "case6"]
    again = prepare(dataset, tmp_path / "out")
    assert again.already
    assert again.left_out == prepared.left_out


def test_where_nothing_can_be_prepared_skipping_does_not_help(tmp_path):
    raw = replace(a_phantom(), scans=a_phantom().scans[:1])
    reader = fails_at("case0000", MemoryError())
    with pytest.raises(PrepareError, match="no scan in raw can be prepared") as told:
        prepare(raw, tmp_path / "out", reader=reader, skip_bad=True)
    assert told.value.problems == ("case0000: there is not enough memory for it: use fewer --workers",)
    with pytest.raises(PrepareError, match="one odd thing"):
        prepare(replace(raw, scans=(), problems=("one odd thing",)), tmp_path / "out")


def test_an_error_nobody_foresaw_is_told_with_its_kind_and_the_scan(tmp_path):
    with pytest.raises(PrepareError, match=r"case0002: ZeroDivisionError: oh"):
        prepare(a_phantom(), tmp_path / "out", reader=fails_at("case0002", ZeroDivisionError("oh")))


@pytest.mark.parametrize("name", ["../escaped", "a/b", ".hidden", ""])
def test_a_scan_whose_name_cannot_be_a_files_is_a_problem(tmp_path, name):
    raw = a_phantom()
    with pytest.raises(PrepareError, match="cannot name a file"):
        prepare(
            replace(raw, scans=(replace(raw.scans[0], name=name), *raw.scans[1:])), tmp_path / "d" / "out"
        )
    assert not list(tmp_path.rglob("*escaped*"))


def test_two_scans_that_some_disks_would_keep_as_one_file_are_refused(tmp_path):
    raw = a_phantom()
    scans = (replace(raw.scans[0], name="Case"), replace(raw.scans[1], name="case"))
    with pytest.raises(PrepareError, match="two scans are named case and Case: rename one"):
        prepare(replace(raw, scans=scans), tmp_path / "out")


def taken_by_a_file(tmp_path):
    (tmp_path / "out").write_text("a file")
    return "out is a file: choose another folder"


def taken_by_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    return "out is a link to elsewhere: give the folder itself"


def taken_by_a_loop(tmp_path):
    (tmp_path / "out").symlink_to("out")
    return "out is a link to out"


def taken_by_other_files(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    return "out is not empty, and holds no prepared dataset"


def taken_by_a_damaged_dataset(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text("{}")
    return "out/manifest.json is not a manifest of this semidice"


def work_folder_taken(tmp_path):
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part/notes.txt").write_text("mine")
    return r".out.part/notes.txt stands where .*out is prepared.*\nremove it, or choose another folder"


def work_folder_is_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.part").symlink_to("elsewhere")
    return ".out.part stands where"


@pytest.mark.parametrize(
    "taken",
    [
        taken_by_a_file,
        taken_by_a_link,
        taken_by_a_loop,
        taken_by_other_files,
        taken_by_a_damaged_dataset,
        work_folder_taken,
        work_folder_is_a_link,
    ],
)
def test_an_output_that_is_taken_is_named_and_left_as_it_is(tmp_path, taken):
    message = taken(tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(PrepareError, match=message):
        prepare(a_phantom(), tmp_path / "out")
    assert files_in(tmp_path) == before


def test_an_empty_folder_may_become_the_dataset(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(a_phantom(), tmp_path / "out")
    assert len(Dataset(tmp_path / "out")) == 6


def test_an_output_in_the_raw_folder_is_refused_through_links_too(tmp_path):
    raw = a_folder(tmp_path / "raw")
    (tmp_path / "link").symlink_to("raw")
    for out in (tmp_path / "raw/out", tmp_path / "link/out", tmp_path / "raw"):
        with pytest.raises(PrepareError, match=r"is in the raw folder .*: choose a folder outside"):
            prepare(raw, out)
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["images", "raters"]


def test_an_output_below_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PrepareError, match=r"cannot write .*file/out: Not a directory; choose another folder"
    ):
        prepare(a_phantom(), tmp_path / "file/out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch, number):
    # simulated, as permissions do not keep the superuser out
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PrepareError, match=f"out: {os.strerror(number)}; choose a folder you may write to"):
        prepare(a_phantom(), tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not keep the superuser out")
def test_a_read_only_folder_is_named(tmp_path):
    (tmp_path / "read_only").mkdir(mode=0o555)
    with pytest.raises(PrepareError, match="Permission denied; choose a folder you may write to"):
        prepare(a_phantom(), tmp_path / "read_only/out")


class FullDisk:
    """`np.save` on a disk that takes so many arrays and no more."""

    def __init__(self, room):
        self.room = room

    def __call__(self, file, array, **options):
        self.room -= 1
        if self.room < 0:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        np.lib.format.write_array(file, array, allow_pickle=False)


def test_a_full_disk_stops_it_at_once_with_the_file_and_it_continues_when_there_is_room(
    tmp_path, monkeypatch
):
    raw = a_phantom()
    names = []
    monkeypatch.setattr(scan_job.np, "save", FullDisk(room=7))
    with pytest.raises(PrepareError) as told:
        prepare(raw, tmp_path / "out", reader=reads(names))
    monkeypatch.undo()
    assert str(told.value) == (
        f"cannot write {tmp_path / '.out.part/dataset/masks/case0002.npy'}: No space left on device; "
        "make room and run the same command again: it continues with the scans that are finished"
    )
    assert names == ["case0000", "case0001", "case0002"]
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.rglob("*") if "case0002" in path.name and "masks" in str(path)]
    assert prepare(raw, tmp_path / "out").num_continued == 2
    prepare(raw, tmp_path / "fresh")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


@pytest.mark.parametrize("missing", ["manifest.json", "job.json"])
def test_a_disk_that_is_full_for_the_small_files_leaves_no_dataset(tmp_path, monkeypatch, missing):
    real = Path.write_text

    def write_text(path, *arguments, **options):
        if missing in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(PrepareError, match="No space left on device; make room"):
        prepare(a_phantom(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(a_phantom(), tmp_path / "out", reader=fails_at("case0004", KeyboardInterrupt()))
    assert not (tmp_path / "out").exists()
    assert prepare(a_phantom(), tmp_path / "out").num_continued == 4


def test_two_runs_at_once_do_not_write_into_each_other(tmp_path):
    told = []

    def meanwhile(dataset, scan):
        with pytest.raises(PrepareError, match=r"another `semidice prepare` is at work in .*wait"):
            prepare(a_phantom(), tmp_path / "out", overrides={"size": (8, 8)})
        told.append(scan.name)
        return read_scan(dataset, scan)

    prepare(a_phantom(), tmp_path / "out", reader=meanwhile)
    assert len(told) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"size": (0, 5)}, "size needs 1 or more rows and columns"),
        ({"window": (5, 5)}, "window needs the lower value first"),
        ({"slices": "some"}, "slices: Input should be 'none', 'all' or 'foreground'"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, overrides, message):
    with pytest.raises(PrepareError, match=message):
        prepare(a_phantom(), tmp_path / "out", overrides=overrides)


def run(*arguments, **options):
    """What the command prints."""
    printed = io.StringIO()
    run_prepare(*arguments, console=Console(file=printed, width=300), **({"workers": 1} | options))
    return printed.getvalue()


def test_the_command_prepares_every_task_and_says_what_is_where_and_what_is_next(tmp_path):
    raw = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3)
    out = tmp_path / "out"
    printed = run("qubiq", raw, out, size=(32, 32))
    names = sorted(path.name for path in out.iterdir())
    assert names == ["kidney", "prostate_task1", "prostate_task2"]
    for name in names:
        assert Dataset(out / name).cases[0].shape == (32, 32)
        assert f"next: semidice check {out / name}" in printed
    assert f"{out / 'kidney'}: 3 cases of 3 patients, 3 raters, 32 x 32" in printed
    assert "prepared already" not in printed
    assert run("qubiq", raw, out, size=(32, 32)).count("prepared already") == 3
    run("qubiq", raw, tmp_path / "raw size", size="raw", tasks=["kidney"])
    assert [path.name for path in (tmp_path / "raw size").iterdir()] == ["kidney"]
    assert Dataset(tmp_path / "raw size/kidney").cases[0].shape == (40, 36)


def test_a_problem_in_one_task_does_not_stop_the_next(tmp_path):
    raw = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3, layout="flat")
    damaged = raw / "kidney/case02/task01_seg02.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(PrepareError) as told:
        run("qubiq", raw, tmp_path / "out", size=(16, 16))
    (problem,) = told.value.problems
    assert problem.startswith("kidney: ")
    assert str(damaged) in problem
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == [
        "prostate_task1",
        "prostate_task2",
    ]
    printed = run("qubiq", raw, tmp_path / "out", size=(16, 16), skip_bad=True)
    assert f"left out: {problem.removeprefix('kidney: ')}" in printed
    assert printed.count("prepared already") == 2


def test_a_phantom_needs_no_raw_folder(tmp_path):
    printed = run("phantom", Path("none"), tmp_path / "out", phantom=PHANTOM)
    assert "6 cases of 6 patients, 3 raters, 24 x 32, classes background, lesion" in printed


def test_the_summary_tells_of_sizes_that_were_not_applied_and_scans_without_mask(tmp_path):
    raw = make_kits(tmp_path / "raw", num_cases=2, num_unlabelled=1)
    printed = run("kits", raw, tmp_path / "out", slices="none")
    assert "size was not applied: volumes keep theirs" in printed
    assert "no mask, hence not read: 1 scan" in printed
    assert "6 x 40 x 36" in printed


def test_ctrl_c_says_that_the_same_command_continues(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("semidice.data.prepare.prepare_dataset", stop)
    printed = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_prepare("phantom", tmp_path, tmp_path / "out", console=Console(file=printed, width=300))
    assert "stopped; the scans that are finished are kept: the same command continues" in printed.getvalue()
