"""Tables and figures in the pages equal those of docs/make_figures.py, and statements about them are true."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doc_commands import Command, problem
from PIL import Image
from prepared import make_prepared
from synthetic_runs import write_runs
from typer.main import get_command

import semidice
from semidice.cli import app
from semidice.paths import DemoFolder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import build_site  # noqa: E402
import calibration_study  # noqa: E402
import calibrator_study  # noqa: E402
import decision_study  # noqa: E402
import label_study  # noqa: E402
import make_figures  # noqa: E402
import rooms  # noqa: E402
import seed_study  # noqa: E402
import site_reference  # noqa: E402
import volume_study  # noqa: E402
from docstrings import to_rst  # noqa: E402

# `make docs` and `make figures` write these tables again
TABLES = [
    pytest.param(page, name, id=name, marks=pytest.mark.slow)
    for page, makers in make_figures.TABLES.items()
    for name in makers
]
# a cell that contains only a number: 0.62, -0.0539, 5e-03
NUMBER = re.compile(r"\*{0,2}(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)\*{0,2}")


def differences(page, script):
    """Cells that differ by more than one in the last digit, or at all if they are not numbers.

    Another machine may add in another order, which can change the rounding of the last digit.
    """
    page_rows, script_rows = (
        [row.strip("|").split("|") for row in table.splitlines()] for table in (page, script)
    )
    if [len(row) for row in page_rows] != [len(row) for row in script_rows]:
        return ["the tables differ in shape"]
    cells = [pair for rows in zip(page_rows, script_rows, strict=True) for pair in zip(*rows, strict=True)]
    return [pair for pair in cells if not same_cell(*(cell.strip() for cell in pair))]


def same_cell(first, second):
    if first == second:
        return True
    numbers = [NUMBER.fullmatch(cell) for cell in (first, second)]
    if not all(numbers):
        return False
    texts = [number[1] for number in numbers]
    decimals = [len(text.partition(".")[2]) for text in texts]
    if "e" in "".join(texts) or decimals[0] != decimals[1]:
        return False
    return abs(float(texts[0]) - float(texts[1])) < 1.5 * 10 ** -decimals[0]


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_a_table_in_a_page_equals_the_output_of_the_script(page, name):
    if name == "calibrated_demo":
        pytest.skip("trained networks differ between machines, and their scores with them")
    rows = make_figures.TABLES[page][name]()
    if rows is None:
        pytest.skip(f"the data of table {name} are missing (shared/data/lidc)")
    shown = make_figures.table_in((DOCS / page).read_text(), name)
    assert differences(shown, make_figures.part_text(rows)) == []


def test_the_table_of_the_demo_is_made_from_runs_and_only_if_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrator_study, "DEMO", DemoFolder(tmp_path))
    assert calibrator_study.demo_rows() is None
    dataset = make_prepared(tmp_path / "phantom", num_cases=4, size=(24, 24), cases_per_patient=1)
    write_runs(dataset, tmp_path / "runs", methods=["uniform + DML1"])
    header, row = calibrator_study.demo_rows()
    shown = make_figures.table_in((DOCS / "calibration.md").read_text(), "calibrated_demo")
    assert f"| {' | '.join(header)} |" == shown.splitlines()[0]
    assert row[0] == "uniform + DML1"


def test_a_table_edited_by_hand_is_detected():
    table = make_figures.markdown([["name", "error"], ["a", "0.62"], ["b", "**1.30**"]])
    assert differences(table, table) == []
    assert differences(table.replace("0.62", "0.61"), table) == []
    assert differences(table.replace("0.62", "0.59"), table) == [(" 0.59 ", " 0.62 ")]
    assert differences(table.replace("| b", "| c"), table) == [(" c ", " b ")]
    assert differences(table.replace("1.30", "1.3"), table) != []
    assert differences(table + "\n| c | 1.00 |", table) == ["the tables differ in shape"]


def test_writing_a_table_changes_no_other_table_and_needs_its_markers():
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


def test_the_script_makes_every_marked_table_and_every_figure():
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    for name, text in pages.items():
        markers = re.findall(r"<!-- made by docs/make_figures\.py: (.*?) -->", text)
        assert sorted(markers) == sorted(make_figures.TABLES.get(name, {})), name
    all_text = "".join(pages.values())
    for name in make_figures.FIGURES:
        path = DOCS / "figures" / f"{name}.png"
        assert f"figures/{name}.png" in all_text
        assert path.stat().st_size <= make_figures.MAX_BYTES, f"run docs/make_figures.py --only {name}"


PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


def anchors(text):
    """The names of a page's headings in links, as forges and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    links = re.findall(r"\]\(([\w./]*\.(?:md|png))?(#[\w-]+)?\)", path.read_text())
    found = []
    for target, anchor in links:
        file = path.parent / target if target else path
        if not file.is_file() or (anchor and anchor[1:] not in anchors(file.read_text())):
            found.append(target + anchor)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_point_to_existing_files_and_headings(path):
    assert broken_links(path) == []


def test_a_broken_link_is_detected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `one`\n[a](page.md) [b](#a-page-one) [c](gone.md) [d](page.md#gone) [e](#gone)"
    )
    assert broken_links(page) == ["gone.md", "page.md#gone", "#gone"]


class TestReadme:
    text = (ROOT / "README.md").read_text()

    def test_the_first_screen_has_the_figure_and_the_first_commands(self):
        first = self.text.splitlines()
        assert first.index("make demo    # " + self.text.partition("make demo    # ")[2].split("\n")[0]) < 25
        assert (
            self.text.index("figures/landing.png")
            < self.text.index("make demo")
            < self.text.index("make test")
        )

    def test_each_of_the_three_ways_in_has_five_lines(self):
        ways = dict(re.findall(r"^## (I .*?)\n.*?^```\w*\n(.*?)^```", self.text, flags=re.M | re.S))
        assert list(ways) == ["I want a loss", "I have raters", "I have a trained model"]
        for name, block in ways.items():
            assert len([line for line in block.splitlines() if line]) <= 5, name

    def test_the_page_for_beginners_has_the_same_commands(self):
        block = re.search(r"```\n(semidice prepare.*?)```", self.text, flags=re.S)[1]
        assert block in (DOCS / "start.md").read_text()


class TestSite:
    def test_every_page_is_in_exactly_one_section(self):
        listed = [page for pages in build_site.sections().values() for page in pages]
        listed += [*build_site.FIRST_PAGES, "where"]
        assert sorted(listed) == sorted(path.stem for path in DOCS.glob("*.md"))
        landing = (DOCS / "site" / "index.md").read_text()
        for name in (
            *build_site.SECTIONS,
            *build_site.FIRST_PAGES,
            "reference/index",
            "examples/index",
            "project",
        ):
            assert re.search(rf"^{name}$|<{name}>$", landing, flags=re.M), name

    def test_links_lead_to_pages_of_the_site(self):
        text = (
            "[a](ARCHITECTURE.md) [b](docs/labels.md#x) ![c](docs/figures/rooms.png) "
            "[d](benchmarks/README.md) [e](Makefile) [f](https://example.org/x.md) [g](#here)"
        )
        assert build_site.with_site_links(text, ROOT / "README.md") == (
            "[a](architecture.md) [b](labels.md#x) ![c](docs/figures/rooms.png) [d](benchmarks.md) "
            "e [f](https://example.org/x.md) [g](#here)"
        )

    def test_every_command_and_option_is_in_the_reference(self):
        page = site_reference.command_page()
        for words, command in site_reference._commands(get_command(app), ()):
            section = page.partition(f"## {' '.join(words)}\n")[2].partition("\n## ")[0]
            for parameter in command.params:
                names = parameter.opts if parameter.param_type_name == "option" else []
                assert [name for name in names if f"`{name}`" not in section] == [], words

    def test_every_public_name_is_in_the_reference(self):
        pages = site_reference.api_pages()
        text = "\n".join(pages.values())
        for name in semidice.__all__:
            assert re.search(rf"^\.\. auto(class|function|data):: {name}$", text, flags=re.M), name

    def test_a_docstring_becomes_plain_text_code_and_tables(self):
        lines = ["Mean of `x`, (N, *space).", "", "    a table", "", ">>> f(*x)", "1"]
        assert to_rst(lines) == [
            *("Mean of ``x``, (N, \\*space).", "", "::", "", "    a table", "", ">>> f(*x)", "1"),
        ]
        assert to_rst(["Args:", "    x: rows, *space", "        of `y`."]) == [
            *("Args:", "    x: rows, \\*space", "        of ``y``."),
        ]
        columns = ["Three makers:", "mean      of all", "majority  of most"]
        assert to_rst(columns) == [columns[0], "", "::", "", *(f"    {line}" for line in columns[1:])]


GALLERY = sorted((DOCS / "gallery").glob("plot_*.py"))


def test_the_gallery_has_ten_subjects():
    assert len({path.name[:7] for path in GALLERY}) == 10


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.name)
def test_an_example_of_the_gallery_ends_in_a_picture_and_its_commands_are_valid(path):
    text = path.read_text()
    assert text.rstrip().endswith("plt.show()")
    commands = re.findall(r"^semidice .*$", text, flags=re.M)
    assert {command: problem(Command(command, complete=True)) for command in commands} == dict.fromkeys(
        commands
    )
    for page in re.findall(r":doc:`/(\w+)`", text):
        assert (DOCS / f"{page}.md").is_file() or (DOCS / "site" / f"{page}.md").is_file(), page


def test_every_benchmark_is_listed_with_existing_rooms():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"`{script.name}`" in page, script.name
    for names in re.findall(r"^\|.*\|.*\| (.*) \|$", page, flags=re.MULTILINE)[2:]:
        assert set(re.findall(r"`(\w+)`", names)) <= set(rooms.ROOMS), names


@pytest.mark.parametrize(
    "name", ["label_makers", "reliability", "bias_bound", "decisions", "calibrator_curves"]
)
def test_a_figure_is_drawn_and_small_enough_for_a_page(name, tmp_path):
    make_figures.save_compact(make_figures.FIGURES[name](), tmp_path / "figure.png")
    assert 10_000 < (tmp_path / "figure.png").stat().st_size <= make_figures.MAX_BYTES


def test_a_figure_that_is_too_large_is_saved_with_a_palette(tmp_path, monkeypatch):
    monkeypatch.setattr(make_figures, "MAX_BYTES", 40_000)
    make_figures.save_compact(make_figures.FIGURES["bias_bound"](), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.mode == "P"


def test_empty_and_full_masks_can_be_plotted():
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

    def test_a_missing_or_unknown_room_is_detected(self):
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

    def test_the_suggested_locations_for_new_parts_exist(self):
        additions = " ".join(room.addition for room in rooms.ROOMS.values())
        for pattern in re.findall(r"`([^`]+)`", additions):
            base = ROOT if pattern.startswith("tests/") else rooms.PACKAGE
            assert list(base.glob(pattern)), pattern
        for part in ("a loss:", "a label:", "a score:", "a source:", "a network:", "a part of the report:"):
            assert part in additions

    def test_the_pages_for_newcomers_link_to_the_page(self):
        for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
            assert "](docs/where.md)" in (ROOT / name).read_text(), name


class TestStatementsInThePages:
    @pytest.mark.parametrize("num_seeds", [2, 3, 5])
    def test_intervals_of_patients_and_seeds_hold_their_level_for_any_size_of_the_trainings_effect(
        self, num_seeds
    ):
        for name in ("none", "half", "1", "3", "3, without folds"):
            # 0.94 is two standard errors of 2000 trials below 0.95
            assert seed_study.judged(name, num_seeds, True).coverage >= 0.94, name

    def test_intervals_of_patients_alone_do_not_hold_it_where_trainings_differ(self):
        for num_seeds in seed_study.SEEDS:
            assert seed_study.judged("none", num_seeds, False).coverage >= 0.94
            assert seed_study.judged("3", num_seeds, False).coverage < 0.8

    def test_a_rare_failure_of_a_training_is_not_covered_by_few_seeds(self):
        failing = "3, from a tenth of the trainings, which fail"
        assert seed_study.judged(failing, 3, True).coverage < 0.9

    @pytest.mark.parametrize("scale", volume_study.SCALES)
    def test_corrected_intervals_keep_the_level_with_every_scale_and_distortion(self, scale):
        interval = volume_study.scaled(scale)
        for name in volume_study.DISTORTIONS:
            assert volume_study.judged(name, interval).coverage >= 0.89, name

    def test_the_scale_called_ours_is_that_of_the_package(self):
        ours = volume_study.scaled("own side + volume / 10 (ours)")
        for name in volume_study.DISTORTIONS:
            first, second = (volume_study.judged(name, way) for way in (ours, volume_study.corrected))
            np.testing.assert_allclose(first, second, rtol=1e-6)

    def test_the_bias_of_a_teacher_never_exceeds_its_calibration_error(self):
        points = [point for group in calibration_study.many_distortions().values() for point in group]
        assert len(points) == 23
        assert all(point.bias <= point.from_truth + 1e-9 for point in points)
        assert sum(point.bias < 0.9 * point.from_truth for point in points) > 5

    def test_only_isotonic_calibration_corrects_every_distortion_of_single_probabilities(self):
        in_space = {"dilated", "blurred"}
        worst = {
            name: max(
                calibration_study.error_to_truth(calibrator_study.judged(distortion)[name])
                for distortion in calibrator_study.DISTORTIONS.keys() - in_space
            )
            for name in calibrator_study.CALIBRATORS
        }
        assert [name for name, error in worst.items() if error < 0.5] == ["isotonic"]
        by_name = calibrator_study.judged("asymmetric")
        error = {name: calibrator_study.rater_error(prob) for name, prob in by_name.items()}
        assert error["beta"] < 0.5 * error["vector"]

    def test_kde_halves_the_error_of_an_over_segmenting_teacher(self):
        result = calibration_study.calibrated("over-segmenting")
        before, scaled, by_kde, unweighted = map(
            calibration_study.error_to_truth,
            (result.before, result.by_temperature, result.by_kde, result.unweighted),
        )
        assert by_kde < 0.5 * before < scaled
        assert unweighted > before

    def test_weighted_keys_reduce_the_error_of_a_teacher_and_unweighted_keys_increase_it(self):
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

    def test_the_chosen_bandwidth_has_the_smallest_error_to_the_truth(self):
        table = calibration_study.bandwidth_errors()
        assert max(table, key=lambda row: row[1]) == min(table, key=lambda row: row[2])

    def test_the_best_labels_with_four_raters_are_those_named_in_the_page(self):
        errors = {model: label_study.label_errors(model, 4) for model in label_study.RATER_MODELS}
        winners = {model: min(by_maker, key=by_maker.__getitem__) for model, by_maker in errors.items()}
        assert winners == {
            "raters alike": "mean, spatially smoothed, σ 1",
            "20 % overlook it, p* counts that": "mean, spatially smoothed, σ 1",
            "20 % overlook it, a mistake": "STAPLE",
            "25 % of drawings careless": "majority, spatially smoothed, σ 1",
        }

    def test_each_decision_rule_is_best_for_the_raters_it_assumes(self):
        best = {kind: decision_study.best_rules(by_rule) for kind, by_rule in decision_study.scores().items()}
        assert "dice" in best["independent voxels"]
        assert "nested" in best["nested raters"]
        assert "argmax" not in best["raters of the phantom"]
        assert best["their majority"] == {"argmax"}
