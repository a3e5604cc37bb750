"""The walk of a newcomer: README's commands, as real processes, on images and on volumes."""

import csv
import re

import first_hour
import nibabel
import pytest
from PIL import Image

# the phrase of each command that says what to do next
NEXT = {
    "prepare": "next: semidice check data",
    "check": "next: semidice train auto --set data.dataset=data -o runs/first",
    "train": "next: semidice predict runs/first IMAGE... -o predictions",
    "predict": "next: semidice report runs/first -o report.html",
    "report": "next: open report.html in a browser",
}


def short_commands(prepare_options=""):
    """README's commands; training is short, because the walk is about commands and not about scores."""
    options = {"prepare": prepare_options, "train": first_hour.SHORT}
    return [command + options.get(command.split()[1], "") for command in first_hour.readme_commands()]


def check_steps(steps):
    """Every command succeeded, in README's order, and its last line names the next step."""
    for step in steps:
        assert step.status == 0, f"{step.command}\n{step.output}"
        last = step.output.splitlines()[-1]
        assert last.endswith(NEXT[step.command.split()[1]]), f"{step.command}\n{step.output}"
        assert "Traceback" not in step.output
        assert "Warning" not in step.output
    assert [step.command.split()[1] for step in steps] == list(NEXT)


def check_files(root, names, suffix):
    """The files that README promises."""
    assert (root / "data" / "manifest.json").is_file()
    with Image.open(root / "data_check.png") as sheet:
        assert sheet.width > 300
    assert (root / "runs" / "first" / "cases.parquet").is_file()
    predictions = root / "predictions"
    for name in names:
        assert (predictions / f"{name}_prob{suffix}").is_file()
        assert (predictions / f"{name}_mask{suffix}").is_file()
    with (predictions / "volumes.csv").open() as file:
        assert {row["case"] for row in csv.DictReader(file)} == set(names)
    assert (root / "report.html").read_text().count("</html>") == 1
    assert list((root / "report_files").glob("*.csv"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    first_hour.write_pictures(root)
    return root, first_hour.walk(short_commands(), root)


def test_the_commands_of_the_readme_work_on_pictures_of_three_raters(pictures):
    root, steps = pictures
    check_steps(steps)
    check_files(root, ["scan12", "scan13"], ".png")
    with (
        Image.open(root / "predictions" / "scan12_prob.png") as prob,
        Image.open(root / "new_scans" / "scan12.png") as image,
    ):
        assert prob.size == image.size
    # new images are not training images
    assert "warning" not in steps[3].output


def test_the_commands_print_what_the_page_shows(pictures):
    _, steps = pictures
    shown = first_hour.transcript_in(first_hour.PAGE.read_text())
    printed = first_hour.fixed_lines(first_hour.transcript(steps))
    # after one epoch the report has a warning that the page, made after all epochs, lacks
    (warning,) = [line for line in printed if "far below the raters' own agreement" in line]
    printed.remove(warning)
    message = "the output differs from docs/first_hour.md: run python docs/first_hour.py"
    assert printed == first_hour.fixed_lines(shown), message


def test_the_page_shows_no_folder_of_the_machine_that_made_it():
    assert re.findall(r"/(?:tmp|home|root|work|var)\b\S*", first_hour.PAGE.read_text()) == []


def test_a_changed_word_of_the_output_is_detected_and_a_changed_number_is_not():
    block = "wrote report.html (0.1 MB)\nauto: fold 1 epoch 3\n  dice   90.2 \n"
    assert first_hour.fixed_lines(block) == ["wrote report.html (# MB)", "dice #"]
    assert first_hour.fixed_lines(block.replace("0.1", "12")) == first_hour.fixed_lines(block)
    assert first_hour.fixed_lines(block.replace("wrote", "made")) != first_hour.fixed_lines(block)


@pytest.mark.slow
def test_the_commands_of_the_readme_work_on_volumes_of_two_raters(tmp_path):
    first_hour.write_volumes(tmp_path)
    steps = first_hour.walk(short_commands(" --slices all"), tmp_path)
    check_steps(steps)
    assert "24 slices" in steps[0].output
    check_files(tmp_path, ["scan06", "scan07"], ".nii.gz")
    image, mask = (
        nibabel.load(tmp_path / path)
        for path in ("new_scans/scan06.nii.gz", "predictions/scan06_mask.nii.gz")
    )
    assert mask.shape == image.shape
    assert (mask.affine == image.affine).all()
