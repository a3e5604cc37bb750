"""Tables and figures in the pages are those of docs/make_figures.py, and statements about them hold."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import calibration_study  # noqa: E402
import label_study  # noqa: E402
import make_figures  # noqa: E402
import rooms  # noqa: E402

TABLES = [(page, name) for page, makers in make_figures.TABLES.items() for name in makers]
# a number in a cell, alone: 0.62, -0.0539, 5e-03
NUMBER = re.compile(r"\*{0,2}(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)\*{0,2}")


def differences(page, script):
    """Cells that differ by more than one in the last digit, or at all if they are not numbers.

    Another machine may add in another order, and a number between two roundings then goes the other way.
    """
    ours, theirs = ([row.strip("|").split("|") for row in table.splitlines()] for table in (page, script))
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        return ["the tables differ in shape"]
    cells = [pair for rows in zip(ours, theirs, strict=True) for pair in zip(*rows, strict=True)]
    return [pair for pair in cells if not same_cell(*(cell.strip() for cell in pair))]


def same_cell(one, other):
    if one == other:
        return True
    numbers = [NUMBER.fullmatch(cell) for cell in (one, other)]
    if not all(numbers):
        return False
    texts = [number[1] for number in numbers]
    places = [len(text.partition(".")[2]) for text in texts]
    if "e" in "".join(texts) or places[0] != places[1]:
        return False
    return abs(float(texts[0]) - float(texts[1])) < 1.5 * 10 ** -places[0]


@pytest.mark.parametrize(("page", "name"), TABLES, ids=[name for _, name in TABLES])
def test_a_table_in_a_page_is_what_the_script_makes(page, name):
    rows = make_figures.TABLES[page][name]()
    if rows is None:
        pytest.skip(f"the data of table {name} are not beside the repository (shared/data/lidc)")
    shown = make_figures.table_in((DOCS / page).read_text(), name)
    assert differences(shown, make_figures.markdown(rows)) == []


def test_a_table_that_was_edited_by_hand_is_noticed():
    table = make_figures.markdown([["name", "error"], ["a", "0.62"], ["b", "**1.30**"]])
    assert differences(table, table) == []
    assert differences(table.replace("0.62", "0.61"), table) == []
    assert differences(table.replace("0.62", "0.59"), table) == [(" 0.59 ", " 0.62 ")]
    assert differences(table.replace("| b", "| c"), table) == [(" c ", " b ")]
    assert differences(table.replace("1.30", "1.3"), table) != []
    assert differences(table + "\n| c | 1.00 |", table) == ["the tables differ in shape"]


def test_writing_a_table_replaces_that_one_alone_and_needs_its_markers():
    page = "\n".join(
        f"text\n<!-- made by docs/make_figures.py: {name} -->\n<!-- end -->" for name in ("first", "second")
    )
    table = make_figures.markdown([["name", "error"], ["a", "1"]])
    written = make_figures.with_table(page, "second", table)
    assert make_figures.table_in(written, "second") == table
    assert make_figures.table_in(written, "first") == ""
    assert make_figures.with_table(written, "second", table) == written
    assert make_figures.with_table(written, "second", "") != written
    with pytest.raises(ValueError, match="one pair of markers for the table 'third'; found 0"):
        make_figures.with_table(page, "third", table)


def test_every_marker_and_every_figure_is_known_to_the_script():
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    for name, text in pages.items():
        markers = re.findall(r"<!-- made by docs/make_figures\.py: (.*?) -->", text)
        assert sorted(markers) == sorted(make_figures.TABLES.get(name, {})), name
    everything = "".join(pages.values())
    for name in make_figures.FIGURES:
        path = DOCS / "figures" / f"{name}.png"
        assert f"figures/{name}.png" in everything
        assert path.stat().st_size <= make_figures.MAX_BYTES, f"run docs/make_figures.py --only {name}"


def test_links_between_pages_lead_to_files():
    for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        for target in re.findall(r"\]\(([\w./]+\.(?:md|png))\)", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.name} points to {target}"


def test_every_benchmark_is_listed_with_its_room():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"`{script.name}`" in page, script.name
    for names in re.findall(r"^\|.*\|.*\| (.*) \|$", page, flags=re.MULTILINE)[2:]:
        assert set(re.findall(r"`(\w+)`", names)) <= set(rooms.ROOMS), names


@pytest.mark.parametrize("name", ["label_makers", "reliability", "bias_bound"])
def test_a_figure_is_drawn_and_small_enough_for_a_page(name, tmp_path):
    make_figures.save_compact(make_figures.FIGURES[name](), tmp_path / "figure.png")
    assert 10_000 < (tmp_path / "figure.png").stat().st_size <= make_figures.MAX_BYTES


def test_a_figure_with_too_many_bytes_gets_a_palette(tmp_path, monkeypatch):
    monkeypatch.setattr(make_figures, "MAX_BYTES", 40_000)
    make_figures.save_compact(make_figures.FIGURES["bias_bound"](), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.mode == "P"


def test_raters_who_drew_nothing_or_everything_can_be_drawn():
    masks = torch.zeros(3, 20, 30, dtype=torch.bool)
    assert len(label_study.draw_labels(torch.rand(20, 30), masks, {"mean": torch.zeros(20, 30)}).axes) == 6
    masks[1] = True
    masks[2, 5:9, 5:9] = True
    figure = label_study.draw_labels(torch.rand(20, 30), masks, {"mean": masks.float().mean(0)}, columns=3)
    assert [axes.get_title() for axes in figure.axes[:3]] == ["image", "outlines of 3 raters", "mean"]


class TestRooms:
    def problems(self, page):
        """Rooms that are missing on the page, and rooms on the page that do not exist."""
        names = {
            path.name.removesuffix(".py")
            for path in rooms.PACKAGE.iterdir()
            if path.suffix == ".py" or (path / "__init__.py").exists()
        } - {"__init__"}
        on_page = set(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, flags=re.MULTILINE))
        return sorted(names ^ on_page)

    def test_every_room_is_on_the_page_and_every_room_on_the_page_exists(self):
        assert self.problems((DOCS / "where.md").read_text()) == []

    def test_a_room_that_is_missing_or_does_not_exist_is_found(self):
        page = (DOCS / "where.md").read_text()
        assert self.problems(page.replace("| `losses/` |", "| `loses/` |")) == ["loses", "losses"]
        assert self.problems(page.replace("| `console.py` |", "| console |")) == ["console"]

    def test_the_page_has_the_layers_of_the_import_contract(self):
        names = [name for layer in rooms.layers() for name in layer]
        assert names == [re.search(r"\w+", row[0])[0] for row in rooms.rooms_table()[1:]]
        assert set(names) == set(rooms.ROOMS)
        texts = [text.get_text() for text in rooms.draw_rooms().axes[0].texts]
        assert [name for name in names if not {f"{name}/", f"{name}.py"} & set(texts)] == []

    def test_the_figure_on_the_page_is_drawn_from_the_contract(self, tmp_path):
        make_figures.save_compact(rooms.draw_rooms(), tmp_path / "rooms.png")
        drawn, stored = (
            np.asarray(Image.open(path).convert("L"), dtype=float)
            for path in (tmp_path / "rooms.png", DOCS / "figures" / "rooms.png")
        )
        assert drawn.shape == stored.shape, "run docs/make_figures.py --only rooms"
        # another release of matplotlib may draw letters a little differently
        assert np.abs(drawn - stored).mean() < 2, "run docs/make_figures.py --only rooms"

    def test_places_for_new_parts_exist(self):
        additions = " ".join(room.addition for room in rooms.ROOMS.values())
        for place in re.findall(r"`([^`]+)`", additions):
            base = ROOT if place.startswith("tests/") else rooms.PACKAGE
            assert list(base.glob(place)), place
        for part in ("a loss:", "a label:", "a score:", "a source:", "a network:", "a part of the report:"):
            assert part in additions

    def test_the_map_in_the_readme_has_every_room(self):
        table = (ROOT / "README.md").read_text().partition("| in `src/semidice` |")[2]
        named = set(re.findall(r"`(\w+)(?:/|\.py)`", table))
        assert {name for name in rooms.ROOMS if rooms.is_folder(name)} <= named <= set(rooms.ROOMS)

    def test_the_page_is_linked_from_the_pages_that_newcomers_read(self):
        for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
            assert "](docs/where.md)" in (ROOT / name).read_text(), name


class TestStatementsOfThePages:
    def test_no_teacher_is_more_biased_than_miscalibrated(self):
        points = [point for group in calibration_study.many_distortions().values() for point in group]
        assert len(points) == 23
        assert all(point.bias <= point.from_truth + 1e-9 for point in points)
        assert sum(point.bias < 0.9 * point.from_truth for point in points) > 5

    def test_calibration_by_density_halves_the_error_of_a_teacher_who_draws_too_much(self):
        result = calibration_study.calibrated("over-segmenting")
        before, scaled, by_kde, unweighted = map(
            calibration_study.error_to_truth,
            (result.before, result.by_temperature, result.by_kde, result.unweighted),
        )
        assert by_kde < 0.5 * before < scaled
        assert unweighted > before

    def test_unweighted_keys_move_a_teacher_from_the_truth_and_weighted_ones_towards_it(self):
        for name in ("over-segmenting", "over-segmenting and overconfident", "dilated", "blurred"):
            before = calibration_study.error_to_truth(
                calibration_study.teacher_prob(name)[calibration_study.JUDGED]
            )
            near, weighted, unweighted = (
                calibration_study.batchwise_error(name, **keys)
                for keys in (
                    {"keys_from": "region"},
                    {"keys_from": "batch"},
                    {"keys_from": "batch", "reweight_keys": False},
                )
            )
            assert near < weighted < before < unweighted

    def test_the_chosen_bandwidth_is_the_nearest_to_the_truth_of_those_tried(self):
        table = calibration_study.bandwidth_errors()
        assert max(table, key=lambda row: row[1]) == min(table, key=lambda row: row[2])

    def test_the_winners_with_four_raters_are_those_named(self):
        errors = {model: label_study.label_errors(model, 4) for model in label_study.RATER_MODELS}
        winners = {model: min(by_maker, key=by_maker.__getitem__) for model, by_maker in errors.items()}
        assert winners == {
            "raters alike": "mean, spatially smoothed, σ 1",
            "20 % overlook it, p* counts that": "mean, spatially smoothed, σ 1",
            "20 % overlook it, a mistake": "STAPLE",
            "25 % of drawings careless": "majority, spatially smoothed, σ 1",
        }
