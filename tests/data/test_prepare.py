"""Preparing gives the same bytes every time, continues after a stop, and leaves no incomplete dataset."""

import errno
import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from preparing import (
    PHANTOM,
    failing,
    file_hashes,
    folder_dataset,
    phantom_dataset,
    prepare,
    recording,
)
from raw_trees import AFFINE, ellipsoids, make_folder, make_kits, make_lits, make_qubiq, write_nifti
from rich.console import Console
from start import refused

from semidice.data.dataset import Dataset
from semidice.data.manifest import manifest_digest
from semidice.data.phantom import make_phantom
from semidice.data.prepare import run_prepare
from semidice.data.sources import find_datasets
from semidice.errors import UserError

# a run in two threads that finishes one scan; the others wait until the file `go` exists
WAITING_RUN = """
import time
from dataclasses import replace
from pathlib import Path
from semidice.data.phantom import PhantomOptions
from semidice.data.prepare import prepare_dataset
from semidice.data.sources import find_datasets

(raw,) = find_datasets("phantom", PhantomOptions(num_cases=6, size=(24, 32), num_raters=3))

def read_when_told(dataset, scan):
    while scan.name != "case0000" and not Path("go").exists():
        time.sleep(0.01)
    return raw.read(dataset, scan)

prepare_dataset(replace(raw, read=read_when_told), Path("out"), workers=2)
"""


def problems_of(call):
    """The lines of the message with which a call is refused; the last one is the way out."""
    with pytest.raises(UserError) as error:
        call()
    return str(error.value).splitlines()


def names_of(manifest):
    return [scan.name for scan in manifest.scans]


def test_a_prepared_phantom_is_read_back_as_it_was_made(tmp_path):
    manifest = prepare(phantom_dataset(), tmp_path / "out")
    dataset = Dataset(tmp_path / "out")
    made = make_phantom(6, size=(24, 32), num_raters=3)
    assert manifest == dataset.manifest
    assert dataset.present.all()
    images = []
    for number in range(6):
        expected = np.clip((made.image[number].numpy() + 0.2) / 1.4, 0, 1)
        # half a level of int16, and the rounding of float32
        assert np.abs(dataset.image(number) - expected).max() <= 0.5 / 32767 + 1e-6
        assert np.array_equal(dataset.masks(number), made.masks[number].numpy())
        assert np.array_equal(dataset.truth(number), made.prob[number].numpy())
        images.append(dataset.stored("images", number).astype(np.float64) / 32767)
    assert manifest.mean == pytest.approx([np.mean(images)], rel=1e-12)
    assert manifest.std == pytest.approx([np.std(images)], rel=1e-12)
    assert [scan.mean for scan in manifest.scans] == [pytest.approx([np.mean(each)]) for each in images]
    assert dataset.mean_std(range(6)) == (manifest.mean, manifest.std)


def test_bytes_do_not_depend_on_the_run_the_number_of_threads_or_the_order_of_scans(tmp_path):
    raw, seen = phantom_dataset(), []
    prepare(raw, tmp_path / "one")
    prepare(replace(raw, scans=raw.scans[::-1]), tmp_path / "backwards")
    prepare(raw, tmp_path / "two", workers=2, on_scan=seen.append)
    assert sorted(seen) == [f"case000{number}" for number in range(6)]
    expected = file_hashes(tmp_path / "one")
    assert len(expected) == 3 * 6 + 1
    assert file_hashes(tmp_path / "two") == file_hashes(tmp_path / "backwards") == expected


def test_the_manifest_lists_scans_in_natural_order_with_hashes_of_their_raw_files(tmp_path):
    raw = folder_dataset(tmp_path / "raw", num_cases=11, patients=True)
    manifest = prepare(raw, tmp_path / "out")
    assert names_of(manifest) == [f"case{number}" for number in range(1, 12)]
    assert manifest.scans[1].patient == manifest.scans[0].patient
    # the last rater has no file for case 2 and an empty mask for case 3
    assert manifest.scans[1].raters == ("a", "b")
    assert Dataset(tmp_path / "out").present.sum() == 3 * 11 - 1
    raw_hashes = file_hashes(tmp_path / "raw")
    for scan in manifest.scans:
        assert len(scan.inputs) == 1 + len(scan.raters)
        assert scan.inputs.items() <= raw_hashes.items()


def test_a_sliced_volume_keeps_the_affine_and_spacing_of_the_raw_image(tmp_path):
    (raw,) = find_datasets("lits", make_lits(tmp_path / "raw"))
    first = prepare(raw, tmp_path / "out", overrides={"size": (20, 18)}).scans[0]
    (path,) = (path for path in first.inputs if "volume" in path)
    image = nibabel.load(tmp_path / "raw" / path)
    np.testing.assert_allclose(first.affine, image.affine)
    assert first.raw_shape == image.shape
    assert first.voxel_mm == pytest.approx((1.4, 1.6, 2.5))
    drawn = np.asarray(nibabel.load(tmp_path / "raw" / path.replace("volume", "segmentation")).dataobj)
    assert first.slices == tuple(np.flatnonzero((drawn == 2).any((0, 1))))
    window = np.clip((np.asarray(image.dataobj)[..., first.slices[1]] + 60.0) / 200, 0, 1)
    halves = window.reshape(20, 2, 18, 2).mean((1, 3))
    dataset = Dataset(tmp_path / "out")
    assert np.abs(dataset.image(1)[0] - halves).max() <= 0.5 / 32767 + 1e-6
    assert dataset.cases[1].name == f"{first.name}_slice{first.slices[1]:04d}"


def test_a_scan_without_foreground_gives_no_case_and_is_named(tmp_path):
    root = make_kits(tmp_path / "raw", num_cases=3)
    path = root / "case_00001" / "segmentation.nii.gz"
    healthy = nibabel.load(path)
    nibabel.save(nibabel.Nifti1Image(np.minimum(np.asarray(healthy.dataobj), 1), healthy.affine), path)
    (raw,) = find_datasets("kits", root)
    manifest = prepare(raw, tmp_path / "out")
    assert manifest.without_foreground == ("case_00001",)
    assert names_of(manifest) == ["case_00000", "case_00002"]
    assert prepare(raw, tmp_path / "out") == manifest
    healthy_alone = replace(raw, scans=raw.scans[1:2])
    refused(lambda: prepare(healthy_alone, tmp_path / "other"), "no scan", "foreground", "--slices all")


def test_a_finished_dataset_is_recognised_and_not_changed(tmp_path):
    raw, out = folder_dataset(tmp_path / "raw"), tmp_path / "out"
    manifest = prepare(raw, out)
    before, names = (file_hashes(out), {path: path.stat().st_ino for path in out.rglob("*")}), []
    assert prepare(recording(raw, names), out) == manifest
    assert names == []
    assert (file_hashes(out), {path: path.stat().st_ino for path in out.rglob("*")}) == before


def test_a_finished_dataset_is_kept_and_all_that_differs_is_reported(tmp_path):
    raw, out = folder_dataset(tmp_path / "raw"), tmp_path / "out"
    prepare(raw, out)
    (tmp_path / "raw/raters/a/case4.png").write_bytes((tmp_path / "raw/raters/b/case4.png").read_bytes())
    with (out / "masks/case5.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    before = file_hashes(out)
    scans = (*raw.scans[1:5], replace(raw.scans[5], patient="another"), replace(raw.scans[1], name="new"))
    *problems, way_out = problems_of(lambda: prepare(replace(raw, scans=scans), out))
    assert sorted(problems) == [
        f"case1 is in {out}, but no longer in {tmp_path / 'raw'}",
        "case4: raters/a/case4.png was changed, added or removed since",
        "case5: masks/case5.npy is not the file that was prepared",
        "case6: the patient was case6 and is now another",
        "new: it is not in the dataset, but can be prepared now",
    ]
    assert "remove it, or choose another folder" in way_out
    resized = {"overrides": {"size": (12, 16)}}
    refused(lambda: prepare(raw, out, **resized), "size': None", "is now", "size': [12, 16]", way_out)
    assert file_hashes(out) == before


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_a_nifti_of_any_type_is_stored_with_the_values_of_its_percentiles(tmp_path, dtype):
    image, masks = ellipsoids(0, (24, 26))
    values = np.rint(image * 90)
    write_nifti(tmp_path / "raw/images/case.nii.gz", values.astype(dtype))
    write_nifti(tmp_path / "raw/masks/case.nii.gz", masks[0])
    (raw,) = find_datasets("folder", tmp_path / "raw")
    assert prepare(raw, tmp_path / "out").options.keep_bytes is False
    low, high = np.percentile(values, (0.5, 99.5))
    expected = np.clip((values - low) / (high - low), 0, 1)
    assert np.abs(Dataset(tmp_path / "out").image(0)[0] - expected).max() <= 0.5 / 32767 + 1e-6


def test_pictures_keep_their_8_bits_only_if_all_of_them_have_8_bits_and_there_is_no_window(tmp_path):
    pictures = folder_dataset(tmp_path / "raw", num_cases=3)
    assert prepare(pictures, tmp_path / "kept").options.keep_bytes is True
    dataset = Dataset(tmp_path / "kept")
    pixels = {path.stem: np.array(Image.open(path)) for path in (tmp_path / "raw/images").iterdir()}
    for number, case in enumerate(dataset.cases):
        assert np.array_equal(dataset.stored("images", number)[0], pixels[case.name])
    windowed = prepare(pictures, tmp_path / "windowed", overrides={"window": (0, 200)})
    assert windowed.options.keep_bytes is False
    Image.fromarray(pixels["case2"].astype(np.uint16)).save(tmp_path / "raw/images/case2.png")
    (mixed,) = find_datasets("folder", tmp_path / "raw")
    assert prepare(mixed, tmp_path / "mixed").options.keep_bytes is False


def test_after_a_stop_only_what_is_not_finished_or_has_changed_is_read_again(tmp_path):
    raw, out, names = folder_dataset(tmp_path / "raw"), tmp_path / "out", []
    stopped = failing(raw, "case6", UserError("not today"))
    refused(lambda: prepare(stopped, out), "case6: not today")
    refused(lambda: Dataset(out), "not finished", "again")
    (tmp_path / "raw/raters/a/case1.png").write_bytes((tmp_path / "raw/raters/b/case1.png").read_bytes())
    (out / "images/case2.npy").unlink()
    (out / ".scans/case3.json").write_text("{")
    (out / "masks/.case4.npy.123.part").write_bytes(b"half")
    (out / "images/gone.npy").write_bytes(b"of a scan that is no longer there")
    changed = replace(raw, scans=(*raw.scans[:4], replace(raw.scans[4], patient="p"), raw.scans[5]))
    prepare(recording(changed, names), out)
    assert names == ["case1", "case2", "case3", "case5", "case6"]
    prepare(changed, tmp_path / "fresh")
    assert file_hashes(out) == file_hashes(tmp_path / "fresh")


def test_other_options_start_over_while_a_dataset_is_not_finished(tmp_path):
    raw, names = folder_dataset(tmp_path / "raw"), []
    refused(lambda: prepare(failing(raw, "case6", UserError("stop")), tmp_path / "out"), "case6: stop")
    small = {"overrides": {"size": (16, 16)}}
    prepare(recording(raw, names), tmp_path / "out", **small)
    assert len(names) == 6
    prepare(raw, tmp_path / "fresh", **small)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


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
    names = []
    prepare(recording(phantom_dataset(), names), tmp_path / "out")
    assert 0 < len(names) < 6
    prepare(phantom_dataset(), tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_the_manifest_says_where_the_raw_files_were_and_how_to_get_their_intensities_back(tmp_path):
    raw = folder_dataset(tmp_path / "raw", suffix=".nii.gz", num_cases=3)
    manifest = prepare(raw, tmp_path / "out")
    assert manifest.raw_folder == str(tmp_path / "raw")
    dataset = Dataset(tmp_path / "out")
    for number, scan in enumerate(manifest.scans):
        ((low, high),) = scan.limits
        image = np.asarray(nibabel.load(tmp_path / "raw/images" / f"{scan.name}.nii.gz").dataobj)
        restored = dataset.image(number)[0] * (high - low) + low
        assert np.abs(restored - image.clip(low, high)).max() <= (high - low) / 32767
    moved = manifest.model_copy(update={"raw_folder": "/elsewhere"})
    assert manifest_digest(moved) == manifest_digest(manifest)


def test_the_problems_of_all_scans_are_reported_together_with_their_files_and_the_way_out(tmp_path):
    dataset = replace(folder_dataset(tmp_path / "raw"), problems=("case9: it is odd",))
    other = make_folder(tmp_path / "other", size=(20, 20))
    image, mask, small = (
        tmp_path / "raw" / name for name in ("images/case1.png", "raters/a/case4.png", "raters/b/case5.png")
    )
    image.write_bytes(image.read_bytes()[:100])
    mask.write_bytes(mask.read_bytes()[::-1])
    small.write_bytes((other / "raters/b/case5.png").read_bytes())
    odd, first, fourth, fifth, advice = problems_of(lambda: prepare(dataset, tmp_path / "out"))
    assert odd == "case9: it is odd"
    assert [
        str(path) in text for path, text in zip((image, mask, small), (first, fourth, fifth), strict=True)
    ]
    assert "(20, 20)" in fifth
    assert "4 problems" in advice
    assert "--skip-bad" in advice
    assert not (tmp_path / "out/manifest.json").exists()
    names = []
    manifest = prepare(recording(dataset, names), tmp_path / "out", skip_bad=True)
    assert names == ["case1", "case4", "case5"]
    assert manifest.left_out == (odd, first, fourth, fifth)
    assert names_of(manifest) == ["case2", "case3", "case6"]
    assert prepare(dataset, tmp_path / "out") == manifest


def test_a_mask_that_is_not_aligned_is_a_problem_of_its_own_case_only(tmp_path):
    dataset = folder_dataset(tmp_path / "raw", suffix=".nii.gz", volumes=True)
    path = tmp_path / "raw/raters/b/case4.nii.gz"
    moved_affine = AFFINE.copy()
    moved_affine[1, 3] = -12
    write_nifti(path, np.asanyarray(nibabel.load(path).dataobj), moved_affine)
    problem, _ = problems_of(lambda: prepare(dataset, tmp_path / "out"))
    for words in ("case4", str(path), "images/case4.nii.gz", "(0, -12, 0) mm", "--ignore-placement"):
        assert words in problem
    assert "case4" not in names_of(prepare(dataset, tmp_path / "out", skip_bad=True))
    by_shape = prepare(dataset, tmp_path / "by_shape", overrides={"ignore_placement": True})
    assert "case4" in names_of(by_shape)


def test_skip_bad_is_refused_if_no_scan_can_be_prepared(tmp_path):
    raw = replace(phantom_dataset(), scans=phantom_dataset().scans[:1])
    failed = failing(raw, "case0000", MemoryError())
    refused(lambda: prepare(failed, tmp_path / "out", skip_bad=True), "case0000", "memory", "no scan in")
    odd = replace(raw, scans=(), problems=("one odd thing",))
    refused(lambda: prepare(odd, tmp_path / "out"), "one odd thing")


def write(path):
    path.parent.mkdir()
    path.write_text("{}")


OCCUPIED = {
    "a file": (lambda out: out.write_text("mine"), "file"),
    "a loop": (lambda out: out.symlink_to("out"), "out"),
    "other files": (lambda out: write(out / "notes.txt"), "did not write"),
    "a damaged dataset": (lambda out: write(out / "manifest.json"), "manifest.json"),
    "raw images": (lambda out: write(out / "images"), "did not write"),
}


@pytest.mark.parametrize("name", OCCUPIED)
def test_an_occupied_output_is_refused_and_not_changed(tmp_path, name):
    occupy, words = OCCUPIED[name]
    occupy(tmp_path / "out")
    before = file_hashes(tmp_path)
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out"), str(tmp_path / "out"), words)
    assert file_hashes(tmp_path) == before


def test_an_output_in_the_raw_folder_is_refused_even_through_links(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    (tmp_path / "link").symlink_to("raw")
    for out in (tmp_path / "raw/out", tmp_path / "link/out", tmp_path / "raw"):
        refused(lambda out=out: prepare(raw, out), str(out), "raw folder", "choose another")
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["images", "raters"]


def test_an_output_without_write_permission_is_reported(tmp_path, monkeypatch):
    # simulated, because the superuser ignores permissions
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = ("out", os.strerror(errno.EROFS), "choose a folder that you may write to")
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out"), *words)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({"size": (0, 5)}, "size"), ({"window": (5, 5)}, "window"), ({"slices": "some"}, "slices")],
)
def test_invalid_options_are_refused(tmp_path, overrides, word):
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out", overrides=overrides), word)


def run_command(*arguments, tasks=(), skip_bad=False, **overrides):
    """Run the command and return what it prints."""
    console = Console(file=io.StringIO(), width=300)
    passed = {"tasks": tasks, "skip_bad": skip_bad, "overrides": overrides}
    run_prepare(*arguments, console=console, workers=1, **passed)
    return console.file.getvalue()


def test_the_command_prepares_every_task_and_prints_a_summary_and_the_next_command(tmp_path):
    raw, out = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3), tmp_path / "out"
    printed = run_command("qubiq", raw, out, size=(32, 32))
    names = sorted(path.name for path in out.iterdir())
    assert names == ["kidney", "prostate_task1", "prostate_task2"]
    for name in names:
        assert Dataset(out / name).cases[0].shape == (32, 32)
        assert f"next: semidice check {out / name}" in printed
    assert f"{out / 'kidney'}: 3 cases of 3 patients, 3 raters, 32 x 32" in printed
    assert "prepared already" not in printed
    assert run_command("qubiq", raw, out, size=(32, 32)).count("prepared already") == 3
    run_command("qubiq", raw, tmp_path / "raw size", size=None, tasks=["kidney"])
    assert [path.name for path in (tmp_path / "raw size").iterdir()] == ["kidney"]
    printed = run_command("phantom", PHANTOM, tmp_path / "phantom")
    assert "6 cases of 6 patients, 3 raters, 24 x 32, classes background, lesion" in printed


def test_a_problem_in_one_task_does_not_stop_other_tasks(tmp_path):
    raw = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3, layout="flat")
    damaged = raw / "kidney/case02/task01_seg02.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    task, problem, _ = problems_of(lambda: run_command("qubiq", raw, tmp_path / "out", size=(16, 16)))
    assert task == "kidney:"
    assert str(damaged) in problem
    assert [path.parent.name for path in sorted(tmp_path.glob("out/*/manifest.json"))] == [
        "prostate_task1",
        "prostate_task2",
    ]
    printed = run_command("qubiq", raw, tmp_path / "out", size=(16, 16), skip_bad=True)
    assert f"left out: {problem}" in printed
    assert printed.count("prepared already") == 2


def test_the_summary_says_what_became_of_volumes_and_of_scans_without_mask(tmp_path):
    raw = make_kits(tmp_path / "raw", num_cases=2, num_unlabelled=1)
    printed = run_command("kits", raw, tmp_path / "all", slices="all")
    assert "2 volumes cut into 12 slices" in printed
    printed = run_command("kits", raw, tmp_path / "whole", slices="none")
    assert "size was not applied: volumes keep their size" in printed
    assert "because they have no mask: 1 scan" in printed
    assert "6 x 40 x 36" in printed
    assert "cut into" not in printed


def test_ctrl_c_says_that_the_same_command_continues(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("semidice.data.prepare.prepare_dataset", stop)
    console = Console(file=io.StringIO(), width=300)
    with pytest.raises(KeyboardInterrupt):
        run_prepare("phantom", PHANTOM, tmp_path / "out", console=console)
    assert "the same command continues" in console.file.getvalue()


def test_processes_prepare_many_small_scans_with_the_same_bytes(tmp_path, monkeypatch):
    raw = folder_dataset(tmp_path / "raw")
    prepare(raw, tmp_path / "one")
    monkeypatch.setattr("semidice.data.prepare._MANY_SCANS", 2)
    manifest = prepare(raw, tmp_path / "two", workers=2)
    assert file_hashes(tmp_path / "two") == file_hashes(tmp_path / "one")
    assert prepare(raw, tmp_path / "two", workers=2) == manifest
    (tmp_path / "raw/images/case4.png").write_bytes(b"damaged")
    problem, _ = problems_of(lambda: prepare(raw, tmp_path / "three", workers=2))
    assert "images/case4.png" in problem
