"""Errors of preparing name the file and say what to do; and what the command prints."""

import errno
import io
import json
import os
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
from raw_trees import AFFINE, make_folder, make_kits, make_qubiq, write_nifti
from rich.console import Console
from start import refused

from semidice.data.dataset import Dataset
from semidice.data.prepare import PrepareError, run_prepare
from semidice.data.sources import find_datasets


def test_the_problems_of_all_scans_are_reported_together_with_files_and_advice(tmp_path):
    dataset = replace(folder_dataset(tmp_path / "raw"), problems=("case9: it is odd",))
    other = make_folder(tmp_path / "other", size=(20, 20))
    image, mask, small = (
        tmp_path / "raw" / name for name in ("images/case1.png", "raters/a/case4.png", "raters/b/case5.png")
    )
    image.write_bytes(image.read_bytes()[:100])
    mask.write_bytes(mask.read_bytes()[::-1])
    small.write_bytes((other / "raters/b/case5.png").read_bytes())
    with pytest.raises(PrepareError) as error:
        prepare(dataset, tmp_path / "out")
    odd, first, fourth, fifth = error.value.problems
    assert odd == "case9: it is odd"
    assert str(image) in first
    assert str(mask) in fourth
    assert str(small) in fifth
    assert "(20, 20)" in fifth
    assert "4 problems" in error.value.advice
    assert "--skip-bad" in error.value.advice
    assert not (tmp_path / "out/manifest.json").exists()

    names = []
    prepared = prepare(recording(dataset, names), tmp_path / "out", skip_bad=True)
    assert names == ["case1", "case4", "case5"]
    assert prepared.manifest.left_out == error.value.problems
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["left_out"] == list(error.value.problems)
    assert [scan["name"] for scan in manifest["scans"]] == ["case2", "case3", "case6"]
    again = prepare(dataset, tmp_path / "out")
    assert again.already
    assert again.manifest.left_out == prepared.manifest.left_out


def test_a_mask_with_another_affine_is_a_problem_of_its_own_case_only(tmp_path):
    dataset = folder_dataset(tmp_path / "raw", suffix=".nii.gz", volumes=True)
    path = tmp_path / "raw/raters/b/case4.nii.gz"
    moved_affine = AFFINE.copy()
    moved_affine[1, 3] = -12
    write_nifti(path, np.asanyarray(nibabel.load(path).dataobj), moved_affine)
    with pytest.raises(PrepareError) as error:
        prepare(dataset, tmp_path / "out")
    (problem,) = error.value.problems
    image = tmp_path / "raw/images/case4.nii.gz"
    for words in ("case4", str(path), str(image), "(0, -12, 0) mm"):
        assert words in problem
    prepared = prepare(dataset, tmp_path / "out", skip_bad=True)
    assert prepared.manifest.left_out == (problem,)
    assert "case4" not in [scan.name for scan in prepared.manifest.scans]

    by_shape = prepare(dataset, tmp_path / "by_shape", overrides={"ignore_placement": True})
    assert "case4" in [scan.name for scan in by_shape.manifest.scans]
    assert by_shape.manifest.options.ignore_placement is True
    refused(lambda: prepare(dataset, tmp_path / "by_shape"), "options.ignore_placement was True", "now False")


def test_skip_bad_fails_if_no_scan_can_be_prepared(tmp_path):
    raw = replace(phantom_dataset(), scans=phantom_dataset().scans[:1])
    failed = failing(raw, "case0000", MemoryError())
    words = ("no scan in raw", "case0000", "memory", "fewer --workers")
    refused(lambda: prepare(failed, tmp_path / "out", skip_bad=True), *words)
    odd = replace(raw, scans=(), problems=("one odd thing",))
    refused(lambda: prepare(odd, tmp_path / "out"), "one odd thing")


@pytest.mark.parametrize("name", ["../escaped", "a/b", ".hidden", ""])
def test_a_scan_name_that_cannot_be_a_file_name_is_a_problem(tmp_path, name):
    raw = phantom_dataset()
    scans = (replace(raw.scans[0], name=name), *raw.scans[1:])
    refused(lambda: prepare(replace(raw, scans=scans), tmp_path / "d" / "out"), "cannot be a file name")
    assert not list(tmp_path.rglob("*escaped*"))


OCCUPIED = {
    "a file": (lambda out: out.write_text("mine"), ["out is a file", "choose another folder"]),
    "a link": (lambda out: out.symlink_to("."), ["out is a link to .", "give the folder itself"]),
    "a loop": (lambda out: out.symlink_to("out"), ["out is a link to out"]),
    "other files": (lambda out: write(out / "notes.txt"), ["out contains files", "choose another folder"]),
    "a damaged dataset": (lambda out: write(out / "manifest.json"), ["manifest.json", "another folder"]),
    "raw images": (lambda out: write(out / "images"), ["out contains files", "choose another folder"]),
}


def write(path):
    path.parent.mkdir()
    path.write_text("{}")


@pytest.mark.parametrize("name", OCCUPIED)
def test_an_occupied_output_is_refused_and_not_changed(tmp_path, name):
    occupy, words = OCCUPIED[name]
    occupy(tmp_path / "out")
    before = file_hashes(tmp_path)
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out"), *words)
    assert file_hashes(tmp_path) == before


def test_an_empty_folder_is_accepted_as_output(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(phantom_dataset(), tmp_path / "out")
    assert len(Dataset(tmp_path / "out")) == 6


def test_an_output_in_the_raw_folder_is_refused_even_through_links(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    (tmp_path / "link").symlink_to("raw")
    for out in (tmp_path / "raw/out", tmp_path / "link/out", tmp_path / "raw"):
        refused(lambda out=out: prepare(raw, out), str(out), "choose a folder outside")
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["images", "raters"]


def test_an_output_below_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: prepare(phantom_dataset(), tmp_path / "file/out"), "file/out", "choose another folder")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_output_without_write_permission_is_reported(tmp_path, monkeypatch, number):
    # simulated, because the superuser ignores permissions
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = ("out", os.strerror(number), "choose a folder that you may write to")
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out"), *words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"size": (0, 5)}, ["size", "1 or more"]),
        ({"window": (5, 5)}, ["window", "lower value first"]),
        ({"slices": "some"}, ["slices", "foreground"]),
        ({"colour": "red"}, ["colour"]),
    ],
)
def test_invalid_options_are_refused(tmp_path, overrides, words):
    refused(lambda: prepare(phantom_dataset(), tmp_path / "out", overrides=overrides), *words)


def run_command(*arguments, **options):
    """Run the command and return what it prints."""
    printed = io.StringIO()
    own = ("tasks", "phantom", "skip_bad")
    passed = {name: options.pop(name) for name in own if name in options}
    console = Console(file=printed, width=300)
    run_prepare(*arguments, console=console, workers=1, overrides=options, **passed)
    return printed.getvalue()


def test_the_command_prepares_every_task_and_prints_a_summary_and_the_next_command(tmp_path):
    raw = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3)
    out = tmp_path / "out"
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
    assert Dataset(tmp_path / "raw size/kidney").cases[0].shape == (40, 36)


def test_a_problem_in_one_task_does_not_stop_other_tasks(tmp_path):
    raw = make_qubiq(tmp_path / "raw", datasets=["kidney", "prostate"], num_cases=3, layout="flat")
    damaged = raw / "kidney/case02/task01_seg02.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(PrepareError) as error:
        run_command("qubiq", raw, tmp_path / "out", size=(16, 16))
    (problem,) = error.value.problems
    assert problem.startswith("kidney: ")
    assert str(damaged) in problem
    assert sorted(path.parent.name for path in (tmp_path / "out").glob("*/manifest.json")) == [
        "prostate_task1",
        "prostate_task2",
    ]
    printed = run_command("qubiq", raw, tmp_path / "out", size=(16, 16), skip_bad=True)
    assert f"left out: {problem.removeprefix('kidney: ')}" in printed
    assert printed.count("prepared already") == 2


def test_a_phantom_needs_no_raw_folder(tmp_path):
    printed = run_command("phantom", Path("none"), tmp_path / "out", phantom=PHANTOM)
    assert "6 cases of 6 patients, 3 raters, 24 x 32, classes background, lesion" in printed


def test_the_summary_says_into_how_many_slices_volumes_were_cut(tmp_path):
    raw = make_kits(tmp_path / "raw", num_cases=2)
    printed = run_command("kits", raw, tmp_path / "all", slices="all")
    assert "2 volumes were cut into 12 slices: networks see slices" in printed
    printed = run_command("kits", raw, tmp_path / "kept", slices="foreground")
    num_cases = len(Dataset(tmp_path / "kept"))
    assert f"2 volumes were cut into {num_cases} slices, those with foreground" in printed
    assert "were cut" not in run_command("kits", raw, tmp_path / "none", slices="none")


def test_the_summary_mentions_unapplied_sizes_and_scans_without_mask(tmp_path):
    raw = make_kits(tmp_path / "raw", num_cases=2, num_unlabelled=1)
    printed = run_command("kits", raw, tmp_path / "out", slices="none")
    assert "size was not applied: volumes keep their size" in printed
    assert "because they have no mask: 1 scan" in printed
    assert "6 x 40 x 36" in printed


def test_ctrl_c_says_that_the_same_command_continues(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("semidice.data.prepare.prepare_dataset", stop)
    printed = io.StringIO()
    console = Console(file=printed, width=300)
    with pytest.raises(KeyboardInterrupt):
        run_prepare("phantom", tmp_path, tmp_path / "out", console=console)
    assert "stopped; the finished scans are kept: the same command continues" in printed.getvalue()


def test_one_odd_scan_is_left_out_and_the_others_are_kept(tmp_path):
    make_folder(tmp_path / "raw")
    rng = np.random.default_rng(0)
    path = tmp_path / "raw/images/case2.png"
    Image.fromarray(rng.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(path)
    (dataset,) = find_datasets("folder", tmp_path / "raw")
    assert dataset.channels == ("intensity",)
    with pytest.raises(PrepareError) as error:
        prepare(dataset, tmp_path / "out")
    (problem,) = error.value.problems
    assert problem.startswith(f"case2: {path} has 3 channels; expected 1")
    prepared = prepare(dataset, tmp_path / "out", skip_bad=True)
    assert [scan.name for scan in prepared.manifest.scans] == ["case1", "case3", "case4", "case5", "case6"]


@pytest.mark.parametrize("num_slices", [1, 3])
def test_volumes_of_one_slice_among_others_are_volumes(tmp_path, num_slices):
    make_folder(tmp_path / "raw", suffix=".nii.gz", volumes=True)
    for path in sorted(tmp_path.rglob("case[1-5].nii.gz")):
        image = nibabel.load(path)
        write_nifti(path, np.asanyarray(image.dataobj)[:, :, 2 : 2 + num_slices], image.affine)
    (dataset,) = find_datasets("folder", tmp_path / "raw")
    assert dataset.num_axes == 3
    assert len(prepare(dataset, tmp_path / "out").manifest.scans) == 6


def test_a_name_in_quotes_may_have_a_comma(tmp_path):
    make_folder(tmp_path / "raw", num_cases=3)
    (tmp_path / "raw/cases.csv").write_text(
        'case,patient\ncase1,"Doe, John"\ncase2,"Doe, Jane"\ncase3,"Doe, John"\n'
    )
    (dataset,) = find_datasets("folder", tmp_path / "raw")
    assert [scan.patient for scan in dataset.scans] == ["Doe, John", "Doe, Jane", "Doe, John"]
