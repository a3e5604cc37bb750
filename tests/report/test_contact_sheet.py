"""The contact sheet: the chosen cases, the part of each case that is shown, and the labels."""

import json

import numpy as np
import pytest
from matplotlib.colors import same_color
from PIL import Image
from prepared import make_prepared
from rich.console import Console

from semidice.data.dataset import Dataset
from semidice.paths import file_hash
from semidice.report.check_command import run_check
from semidice.report.contact_sheet import SheetPanel, case_panel, choose_cases, draw_contact_sheet
from semidice.report.figures import line_style


def test_the_most_contested_cases_of_the_dataset_are_shown_first():
    agreement = np.random.default_rng(0).permutation(100) / 100
    usable = agreement != 0
    chosen = choose_cases(agreement, usable)
    assert agreement[chosen].tolist() == [number / 100 for number in range(1, 25)]
    assert choose_cases(agreement, np.zeros(100, dtype=bool)) == []


def test_cases_with_one_rater_come_last_and_are_spread_evenly():
    agreement = np.full(100, np.nan)
    chosen = choose_cases(agreement, np.ones(100, dtype=bool))
    assert len(chosen) == 24
    assert (chosen[0], chosen[-1]) == (0, 99)
    assert set(np.diff(chosen)) <= {4, 5}
    agreement[[7, 50]] = 0.9, 0.2
    assert choose_cases(agreement, np.ones(100, dtype=bool), max_cases=4) == [50, 7, 0, 99]


def test_the_sheet_of_a_large_dataset_shows_its_most_contested_case(tmp_path, monkeypatch):
    folder = make_prepared(tmp_path / "data", num_cases=30, size=(24, 24)).folder
    drawn = np.load(folder.array("masks", "scan007"))
    drawn[:] = 0
    # each of the three raters draws another row, so that there is no majority
    for rater in range(3):
        drawn[0, rater, 0, rater] = 255
    np.save(folder.array("masks", "scan007"), drawn)
    manifest = json.loads(folder.manifest.read_text())
    manifest["scans"][7]["arrays"]["masks"] = file_hash(folder.array("masks", "scan007"))
    folder.manifest.write_text(json.dumps(manifest))
    shown = []
    monkeypatch.setattr(
        "semidice.report.check_command.draw_contact_sheet",
        lambda panels, raters, **options: (
            shown.extend(panels) or draw_contact_sheet(panels, raters, **options)
        ),
    )
    run_check(folder.path, sheet=tmp_path / "sheet.png", console=Console(quiet=True))
    assert shown[0].name == "scan007"
    assert len(shown) == 24


@pytest.mark.parametrize(
    ("num_cases", "size", "num_raters"), [(1, (32, 32), 1), (5, (40, 24), 8), (24, (16, 40), 3)]
)
def test_the_sheet_has_a_readable_size_for_any_number_of_cases_and_raters(
    tmp_path, num_cases, size, num_raters
):
    folder = tmp_path / "data"
    make_prepared(folder, num_cases=num_cases, size=size, num_raters=num_raters, truth=False)
    run_check(folder, sheet=tmp_path / "sheet.png", console=Console(quiet=True))
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert 900 <= sheet.width <= 2000
        assert 300 <= sheet.height <= 2400
        # grey images and coloured outlines
        assert np.ptp(np.asarray(sheet.convert("RGB")).astype(int), axis=2).max() > 100


def test_titles_and_legend_name_every_case_and_rater():
    image = np.linspace(0, 1, 900, dtype=np.float32).reshape(30, 30)
    masks = np.zeros((3, 30, 30), dtype=np.uint8)
    masks[0, 5:20, 5:20] = 1
    masks[1, 5:20, 9:20] = 2
    panels = [
        SheetPanel("a" * 30 + "_slice0012", 0.512, image, masks),
        SheetPanel("b", np.nan, image, masks),
    ]
    figure = draw_contact_sheet(panels, ["_anna", "a$b$c", "carl"], num_cases=7)
    assert [axes.get_title() for axes in figure.axes] == ["aaaaaaaa…aaaaaaa_slice0012\nDice 51.2 %", "b"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [" _anna", r" a\$b\$c", " carl"]
    assert figure.get_suptitle().startswith("2 of 7 cases, the most contested first")
    # two raters drew something; each has a dark line and a coloured line
    assert len(figure.axes[0].collections) == 4


def test_a_rater_has_the_same_colour_on_every_panel_and_in_the_legend():
    image = np.linspace(0, 1, 900, dtype=np.float32).reshape(30, 30)
    masks = np.zeros((2, 30, 30), dtype=np.uint8)
    masks[1, 5:20, 5:20] = 1
    figure = draw_contact_sheet([SheetPanel("a", 0.5, image, masks)], ["anna", "ben"], num_cases=1)
    outline = figure.axes[0].collections[-1]
    line = figure.legends[0].get_lines()[1]
    assert same_color(outline.get_edgecolor(), line.get_color())


def test_36_raters_have_36_different_line_styles():
    styles = [line_style(number) for number in range(36)]
    assert len(set(styles)) == 36


def test_the_panel_of_a_volume_shows_the_slice_with_most_foreground_with_the_aspect_of_its_voxels(tmp_path):
    path = make_prepared(tmp_path / "data", depth=9, size=(40, 30), dtype="int16").folder.manifest
    manifest = json.loads(path.read_text())
    manifest["options"] = {"slice_axis": 0}
    for scan in manifest["scans"]:
        scan["spacing_mm"] = [5.0, 1.5, 0.5]
    path.write_text(json.dumps(manifest))
    dataset = Dataset(tmp_path / "data")
    panel = case_panel(dataset, 2, 0.5)
    masks = dataset.masks(2)
    fullest = (masks > 0).sum(axis=(0, 2, 3)).argmax()
    assert panel.aspect == 3
    # the crop contains all foreground, and the image is cropped like the masks
    assert panel.masks.sum() == masks[:, fullest].sum()
    rows, columns = panel.image.shape
    full_slice = dataset.image(2)[0, fullest]
    windows = np.lib.stride_tricks.sliding_window_view(full_slice, (rows, columns))
    (corner,) = np.argwhere((windows == panel.image).all(axis=(2, 3)))
    row, column = corner
    assert np.array_equal(masks[:, fullest, row : row + rows, column : column + columns], panel.masks)


def test_a_case_with_empty_masks_is_not_cropped(tmp_path):
    dataset = make_prepared(tmp_path / "data", size=(30, 36))
    path = dataset.folder.array("masks", "scan000")
    np.save(path, np.zeros_like(np.load(path)))
    assert case_panel(dataset, 0, 1.0).image.shape == (30, 36)
    assert case_panel(dataset, 1, 1.0).image.shape != (30, 36)
