"""Agreement of raters from a folder of masks, as a command and as functions."""

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from semidice import agreement as module
from semidice.agreement import folder_agreement, read_mask, run_agreement
from semidice.data.phantom import make_phantom
from semidice.labels import rater_agreement

LIDC = Path(__file__).parent.parent.parent / "shared" / "data" / "lidc"


def run(*arguments):
    command = [sys.executable, "-m", "semidice", "agreement", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def printed(folder, csv_path=None):
    console = Console(file=io.StringIO(), width=120)
    run_agreement(folder, csv_path, console)
    return console.file.getvalue()


def draw(folder, rater, case, rows):
    """A mask from strings such as "##.", as a PNG of 0 and 255."""
    path = folder / "raters" / rater / f"{case}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.array([[255 * (mark == "#") for mark in row] for row in rows], dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def three_raters(tmp_path):
    """Two cases of different sizes; carl did not look at the second."""
    draw(tmp_path, "anna", "a", ["##..", "#..."])
    draw(tmp_path, "ben", "a", ["##..", "...."])
    draw(tmp_path, "carl", "a", ["####", "#..."])
    draw(tmp_path, "anna", "b", ["##.", "..."])
    draw(tmp_path, "ben", "b", ["#..", "..."])
    return tmp_path


def test_dice_scores_are_those_computed_by_hand(three_raters):
    found = folder_agreement(three_raters)
    assert (found.cases, found.raters, found.num_alone) == (("a", "b"), ("anna", "ben", "carl"), 0)
    nan = torch.nan
    # a: 3, 2 and 5 pixels, the majority is anna's; b: 2 and 1, the majority is ben's, as a tie is background
    majority = torch.tensor([[1.0, 4 / 5, 6 / 8], [2 / 3, 1.0, nan]])
    torch.testing.assert_close(found.majority, majority, equal_nan=True)
    anna_ben, anna_carl, ben_carl = 4 / 5, 6 / 8, 4 / 7
    others = torch.tensor(
        [
            [(anna_ben + anna_carl) / 2, (anna_ben + ben_carl) / 2, (anna_carl + ben_carl) / 2],
            [2 / 3, 2 / 3, nan],
        ]
    )
    torch.testing.assert_close(found.others(), others, equal_nan=True)
    assert found.mean_pairwise() == pytest.approx((anna_ben + anna_carl + ben_carl + 2 / 3) / 4)


def cells(output):
    rows = [line.strip("│").split("│") for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_command_prints_a_row_a_rater_and_the_means(three_raters):
    done = run(three_raters)
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout) == [
        ["anna", "2", "0.833", "0.721"],
        ["ben", "2", "0.900", "0.676"],
        ["carl", "1", "0.750", "0.661"],
        ["mean over raters", "", "0.828", ""],
        ["mean over pairs of masks", "", "", "0.697"],
    ]
    assert "left out" not in done.stdout


def test_the_csv_has_a_row_for_every_mask_and_nothing_else_is_written(three_raters):
    out = three_raters / "new" / "scores.csv"
    assert f"wrote {out}" in printed(three_raters, out)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["rater"], row["majority_dice_score"]) for row in rows] == [
        ("a", "anna", "1.000000"),
        ("a", "ben", "0.800000"),
        ("a", "carl", "0.750000"),
        ("b", "anna", "0.666667"),
        ("b", "ben", "1.000000"),
    ]
    assert rows[3]["others_dice_score"] == "0.666667"
    assert [path.name for path in out.parent.iterdir()] == ["scores.csv"]


def test_a_csv_that_cannot_be_written_leaves_no_half_of_it(three_raters):
    taken = three_raters / "taken"
    taken.mkdir()
    done = run(three_raters, "--csv", taken)
    assert done.returncode == 1
    assert done.stderr == f"semidice agreement: {taken}: Is a directory\n"
    assert sorted(path.name for path in three_raters.iterdir()) == ["raters", "taken"]


def test_a_rater_who_did_not_look_is_not_one_who_drew_nothing(three_raters):
    without = folder_agreement(three_raters).majority[1]
    draw(three_raters, "carl", "b", ["...", "..."])
    empty = folder_agreement(three_raters).majority[1]
    assert without[2].isnan()
    assert empty[2] == 0


def test_a_case_that_one_rater_alone_looked_at_is_left_out_and_counted(three_raters):
    draw(three_raters, "ben", "c", ["#"])
    assert folder_agreement(three_raters).num_alone == 1
    assert "left out, as one rater alone looked at it: 1 of 3 cases" in printed(three_raters)


def test_a_rater_who_shares_no_case_has_no_score(three_raters):
    draw(three_raters, "dora", "c", ["#"])
    assert ["dora", "0", "-", "-"] in cells(printed(three_raters))


def test_small_batches_and_mixed_sizes_give_what_one_case_at_a_time_gives(tmp_path, monkeypatch):
    sizes = [(16, 16), (24, 16), (16, 24)] * 3
    expected = []
    for number, size in enumerate(sizes):
        masks = make_phantom(1, size=size, num_raters=3, seed=number).masks[0]
        expected.append(rater_agreement(masks))
        for rater, mask in zip(["9", "10", "11"], masks.numpy(), strict=True):
            path = tmp_path / "raters" / rater / f"case{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(mask).save(path)
    monkeypatch.setattr(module, "_BATCH", 2 * 3 * 16 * 16)
    seen = []
    found = folder_agreement(tmp_path, on_case=lambda done, total: seen.append((done, total)))
    # numbers in names count as numbers
    assert found.raters == ("9", "10", "11")
    torch.testing.assert_close(found.majority, torch.stack([one.majority for one in expected]))
    torch.testing.assert_close(found.pairwise, torch.stack([one.pairwise for one in expected]))
    assert seen == [(done, 9) for done in range(1, 10)]


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "RGB", "RGBA", "LA"])
def test_any_pixel_above_0_is_lesion_whatever_the_kind_of_png(tmp_path, mode):
    mask = np.array([[True, False, False], [False, True, True]])
    if mode == "I;16":
        image = Image.fromarray(mask.astype(np.uint16) * 300)
    elif mode == "P":
        image = Image.fromarray(mask.astype(np.uint8)).convert("P")
    else:
        # opaque everywhere: the alpha channel of the background is 255
        image = Image.fromarray(mask.astype(np.uint8) * 255).convert(mode)
    image.save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png"), mask)


def test_a_folder_that_is_not_there_or_has_no_raters_is_named(tmp_path):
    done = run(tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith(f"semidice agreement: there is no folder {tmp_path / 'nowhere'}: ")
    home = tmp_path / "raters"
    with pytest.raises(
        ValueError,
        match=re.escape(f"it has no folder {home}: raters' masks are looked for in {home}/NAME/CASE.png"),
    ):
        folder_agreement(tmp_path)


def test_fewer_than_two_raters_and_a_rater_without_masks_are_named(tmp_path):
    draw(tmp_path, "anna", "a", ["#"])
    with pytest.raises(ValueError, match=r"needs two raters or more.*found 'anna' alone"):
        folder_agreement(tmp_path)
    (tmp_path / "raters" / "ben").mkdir()
    (tmp_path / "raters" / "ben" / ".a.png").write_text("hidden")
    with pytest.raises(ValueError, match=r"rater 'ben' has no mask: looked for .*CASE.png"):
        folder_agreement(tmp_path)
    draw(tmp_path, "ben", "b", ["#"])
    with pytest.raises(ValueError, match=r"no case in .* was looked at by two raters"):
        folder_agreement(tmp_path)


def test_masks_of_different_sizes_are_named_with_their_raters(three_raters):
    draw(three_raters, "carl", "b", ["##..", "...."])
    with pytest.raises(
        ValueError, match="case 'b' has masks of different sizes: anna 3 x 2, ben 3 x 2, carl 4 x 2"
    ):
        folder_agreement(three_raters)


@pytest.mark.parametrize("content", [b"not an image", b"\x89PNG\r\n\x1a\n", "cut off"])
def test_a_png_that_cannot_be_read_is_named(three_raters, content):
    path = three_raters / "raters" / "ben" / "b.png"
    path.write_bytes(path.read_bytes()[:45] if content == "cut off" else content)
    with pytest.raises(ValueError, match=re.escape(f"cannot read {path} as a PNG: ")):
        folder_agreement(three_raters)


@pytest.mark.skipif(
    not LIDC.is_dir(), reason="the LIDC slices are not beside the repository (shared/data/lidc)"
)
def test_each_rater_of_the_lidc_slices_agrees_with_the_majority_at_85_to_95_percent():
    found = folder_agreement(LIDC)
    mean = found.majority.nanmean(0)
    assert len(found.raters) == 4
    assert ((mean > 0.85) & (mean < 0.95)).all(), mean
    # independent: masks read and compared by numpy alone, in 20 cases
    for number, case in enumerate(found.cases[:20]):
        masks = [
            np.asarray(Image.open(LIDC / "raters" / rater / f"{case}.png")) > 0 for rater in found.raters
        ]
        majority = np.sum(masks, axis=0) > 2
        for column, mask in enumerate(masks):
            dice = 2 * (mask & majority).sum() / max(mask.sum() + majority.sum(), 1)
            if mask.any() or majority.any():
                assert float(found.majority[number, column]) == pytest.approx(dice, abs=1e-6)
