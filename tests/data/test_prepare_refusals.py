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
    failing_reader,
    file_hashes,
    folder_dataset,
    phantom_dataset,
    prepare,
    recording_reader,
)
from raw_trees import AFFINE, make_folder, make_kits, make_qubiq, write_nifti
from rich.console import Console

from semidice.data.dataset import Dataset
from semidice.data.prepare import PrepareError, PrepareRequest, run_prepare
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
    assert not (tmp_path / "out").exists()

    names = []
    prepared = prepare(dataset, tmp_path / "out", skip_bad=True, reader=recording_reader(names))
    assert names == ["case1", "case4", "case5"]
    assert prepared.left_out == error.value.problems
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["left_out"] == list(error.value.problems)
    assert [scan["name"] for scan in manifest["scans"]] == ["case2", "case3", "case6"]
    again = prepare(dataset, tmp_path / "out")
    assert again.already
    assert again.left_out == prepared.left_out


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
    assert problem.startswith(f"case4: mask {path} is not aligned with image {image}: ")
    assert "it is moved by (0, -12, 0) mm" in problem
    prepared = prepare(dataset, tmp_path / "out", skip_bad=True)
    assert prepared.left_out == (problem,)
    assert "case4" not in [scan.name for scan in prepared.manifest.scans]
    assert "ignore_placement" not in prepared.manifest.options

    by_shape = prepare(dataset, tmp_path / "by_shape", overrides={"ignore_placement": True})
    assert "case4" in [scan.name for scan in by_shape.manifest.scans]
    assert by_shape.manifest.options["ignore_placement"] is True
    with pytest.raises(PrepareError, match="ignore_placement was True and is now not given"):
        prepare(dataset, tmp_path / "by_shape")


def test_skip_bad_fails_if_no_scan_can_be_prepared(tmp_path):
    raw = replace(phantom_dataset(), scans=phantom_dataset().scans[:1])
    reader = failing_reader("case0000", MemoryError())
    with pytest.raises(PrepareError, match="no scan in raw can be prepared") as error:
        prepare(raw, tmp_path / "out", reader=reader, skip_bad=True)
    assert error.value.problems == ("case0000: there is not enough memory: use fewer --workers",)
    with pytest.raises(PrepareError, match="one odd thing"):
        prepare(replace(raw, scans=(), problems=("one odd thing",)), tmp_path / "out")


def test_an_unexpected_error_is_reported_with_its_type_and_the_scan(tmp_path):
    with pytest.raises(PrepareError, match=r"case0002: ZeroDivisionError: oh"):
        prepare(
            phantom_dataset(), tmp_path / "out", reader=failing_reader("case0002", ZeroDivisionError("oh"))
        )


@pytest.mark.parametrize("name", ["../escaped", "a/b", ".hidden", ""])
def test_a_scan_name_that_cannot_be_a_file_name_is_a_problem(tmp_path, name):
    raw = phantom_dataset()
    with pytest.raises(PrepareError, match="cannot be a file name"):
        prepare(
            replace(raw, scans=(replace(raw.scans[0], name=name), *raw.scans[1:])), tmp_path / "d" / "out"
        )
    assert not list(tmp_path.rglob("*escaped*"))


def test_scan_names_that_differ_only_in_capital_letters_are_refused(tmp_path):
    raw = phantom_dataset()
    scans = (replace(raw.scans[0], name="Case"), replace(raw.scans[1], name="case"))
    with pytest.raises(PrepareError, match="two scans are named case and Case: rename one"):
        prepare(replace(raw, scans=scans), tmp_path / "out")


def output_is_a_file(tmp_path):
    (tmp_path / "out").write_text("a file")
    return "out is a file: choose another folder"


def output_is_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    return "out is a link to elsewhere: give the folder itself"


def output_is_a_link_to_itself(tmp_path):
    (tmp_path / "out").symlink_to("out")
    return "out is a link to out"


def output_has_other_files(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    return "out contains files that `prepare` did not write"


def output_is_a_damaged_dataset(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text("{}")
    return "out/manifest.json is not a manifest of this semidice"


def work_folder_has_other_files(tmp_path):
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part/notes.txt").write_text("mine")
    return r".out.part/notes.txt was not written by `prepare`.*\nremove it, or choose another folder"


def work_folder_is_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.part").symlink_to("elsewhere")
    return ".out.part was not written by `prepare`"


@pytest.mark.parametrize(
    "occupy",
    [
        output_is_a_file,
        output_is_a_link,
        output_is_a_link_to_itself,
        output_has_other_files,
        output_is_a_damaged_dataset,
        work_folder_has_other_files,
        work_folder_is_a_link,
    ],
)
def test_an_occupied_output_is_reported_and_not_changed(tmp_path, occupy):
    message = occupy(tmp_path)
    before = file_hashes(tmp_path)
    with pytest.raises(PrepareError, match=message):
        prepare(phantom_dataset(), tmp_path / "out")
    assert file_hashes(tmp_path) == before


def test_an_empty_folder_is_accepted_as_output(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(phantom_dataset(), tmp_path / "out")
    assert len(Dataset(tmp_path / "out")) == 6


def test_an_output_in_the_raw_folder_is_refused_even_through_links(tmp_path):
    raw = folder_dataset(tmp_path / "raw")
    (tmp_path / "link").symlink_to("raw")
    for out in (tmp_path / "raw/out", tmp_path / "link/out", tmp_path / "raw"):
        with pytest.raises(PrepareError, match=r"is in the raw folder .*: choose a folder outside"):
            prepare(raw, out)
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["images", "raters"]


def test_an_output_below_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PrepareError, match=r"cannot write .*file/out: Not a directory; choose another folder"
    ):
        prepare(phantom_dataset(), tmp_path / "file/out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_output_without_write_permission_is_reported(tmp_path, monkeypatch, number):
    # simulated, because the superuser ignores permissions
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        PrepareError, match=f"out: {os.strerror(number)}; choose a folder that you may write to"
    ):
        prepare(phantom_dataset(), tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser ignores permissions")
def test_a_read_only_folder_is_reported(tmp_path):
    (tmp_path / "read_only").mkdir(mode=0o555)
    with pytest.raises(PrepareError, match="Permission denied; choose a folder that you may write to"):
        prepare(phantom_dataset(), tmp_path / "read_only/out")


class FullDisk:
    """A replacement of `np.save` for a disk that is full after `num_free` arrays."""

    def __init__(self, num_free):
        self.num_free = num_free

    def __call__(self, file, array, **options):
        self.num_free -= 1
        if self.num_free < 0:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        np.lib.format.write_array(file, array, allow_pickle=False)


def test_a_full_disk_stops_preparing_with_the_file_name_and_a_later_run_continues(tmp_path, monkeypatch):
    raw = phantom_dataset()
    names = []
    monkeypatch.setattr(np, "save", FullDisk(num_free=7))
    with pytest.raises(PrepareError) as error:
        prepare(raw, tmp_path / "out", reader=recording_reader(names))
    monkeypatch.undo()
    assert str(error.value) == (
        f"cannot write {tmp_path / '.out.part/dataset/masks/case0002.npy'}: No space left on device; "
        "free some space and run the same command again: it continues"
    )
    assert names == ["case0000", "case0001", "case0002"]
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.rglob("*") if "case0002" in path.name and "masks" in str(path)]
    assert prepare(raw, tmp_path / "out").num_continued == 2
    prepare(raw, tmp_path / "fresh")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


@pytest.mark.parametrize("missing", ["manifest.json", "job.json"])
def test_a_disk_too_full_for_a_json_file_leaves_no_dataset(tmp_path, monkeypatch, missing):
    original = Path.write_bytes

    def write_bytes(path, content):
        if missing in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(PrepareError, match="No space left on device; free some space"):
        prepare(phantom_dataset(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"size": (0, 5)}, "size needs 1 or more rows and columns"),
        ({"window": (5, 5)}, "window needs the lower value first"),
        ({"slices": "some"}, "slices: Input should be 'none', 'all' or 'foreground'"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_invalid_options_are_refused(tmp_path, overrides, message):
    with pytest.raises(PrepareError, match=message):
        prepare(phantom_dataset(), tmp_path / "out", overrides=overrides)


def run_command(*arguments, **options):
    """Run the command and return what it prints."""
    printed = io.StringIO()
    request = PrepareRequest(**({"workers": 1} | options))
    run_prepare(*arguments, request, console=Console(file=printed, width=300))
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
    run_command("qubiq", raw, tmp_path / "raw size", size="raw", tasks=["kidney"])
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
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == [
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

    monkeypatch.setattr("semidice.data.prepare.command.prepare_dataset", stop)
    printed = io.StringIO()
    console = Console(file=printed, width=300)
    with pytest.raises(KeyboardInterrupt):
        run_prepare("phantom", tmp_path, tmp_path / "out", PrepareRequest(), console=console)
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
