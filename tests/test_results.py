"""docs/results.md: its commands are valid, and every number of a sentence stands in its table."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import make_figures
import numpy as np
import pytest
import result_files
import results_page
import results_study
from case_rows import CaseRow, rows_of, table_of
from doc_commands import Command, problem
from result_files import RESULTS, write_scores
from results_tables import DIFFERENCES, SCORES_SHOWN, Cell, Results

from semidice.recipes.grid import read_variants
from semidice.recipes.options import option_value
from semidice.statistics import read_cases

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
SETTINGS = results_study.Settings(
    lidc=Path("LIDC"),
    hippocampus=Path("HIPPOCAMPUS"),
    weights=Path("WEIGHTS"),
    work=Path("WORK"),
    out=Path("OUT"),
)


@pytest.mark.parametrize("name", results_study.STUDIES)
def test_the_command_of_a_study_is_valid_and_names_no_folder(name):
    study = results_study.STUDIES[name]
    command = results_study.shown_command(study, SETTINGS)
    assert problem(Command(command, complete=True)) is None
    assert "/" not in command
    assert f"schedule.epochs={results_study.DATA[study.data].epochs}" in command


def test_every_method_of_a_study_is_trained_with_the_same_epochs_batch_and_folds(tmp_path):
    for name, study in results_study.STUDIES.items():
        command = shlex.split(results_study.shown_command(study, SETTINGS._replace(weights=Path("none"))))
        overrides = [value for key, value in pairwise(command) if key == "--set"]
        # recipes that are not `auto` need no dataset
        overrides = [value for value in overrides if not value.startswith("model.weights")]
        variants = read_variants(
            study.grids, dataset=tmp_path, out=tmp_path / name, overrides=["auto=false", *overrides]
        )
        keys = ("schedule.epochs", "batch_size", "data.num_folds", "data.fold_seed", "optimiser.lr")
        settings = {tuple(option_value(variant.recipe, key) for key in keys) for variant in variants}
        assert len(settings) == 1, name
        assert set(study.decided) <= {variant.method for variant in variants}


def scores(num_cases, *, methods=("a", "b"), seeds=(0, 1), metrics=("dice_score",)):
    rng = np.random.default_rng(0)
    return table_of(
        CaseRow(
            f"case{case:04d}", f"patient{case // 2}", case % 5, method, "mean", metric, rng.random(), seed
        )
        for case in range(num_cases)
        for method in methods
        for seed in seeds
        for metric in metrics
    )


def test_stored_scores_are_read_as_they_were_to_the_precision_of_float32(tmp_path):
    rows = rows_of(scores(7, metrics=("dice_score", "volume_error")))
    of_classes = [row._replace(class_name="nodule", value=0.0) for row in rows]
    write_scores(table_of([*rows, *of_classes]), tmp_path / "scores.parquet")
    expected = {row._replace(value=float(np.float32(row.value))) for row in rows}
    assert set(rows_of(read_cases(tmp_path / "scores.parquet"))) == expected


def test_the_largest_study_is_stored_in_less_than_two_megabytes(tmp_path, monkeypatch):
    path = tmp_path / "scores.parquet"
    table = scores(
        573,
        methods=[f"method{number}" for number in range(12)],
        seeds=range(3),
        metrics=results_study.DATA["lidc"].metrics,
    )
    write_scores(table, path)
    assert path.stat().st_size < result_files.MAX_BYTES
    monkeypatch.setattr(result_files, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 are stored"):
        write_scores(table, tmp_path / "large.parquet")
    assert not (tmp_path / "large.parquet").exists()


@pytest.mark.parametrize("file", [path.stem for path in sorted(RESULTS.glob("*.parquet"))])
def test_every_mean_of_the_page_is_the_mean_of_the_stored_scores(file):
    table = make_figures.table_in(PAGE, f"{file}_means")
    header, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    columns = read_cases(RESULTS / f"{file}.parquet")
    assert sorted(row[0] for row in rows) == sorted(set(columns["method"]))
    for position, title in enumerate(header[1:], 1):
        name = title.partition(" (")[0].rstrip(" ↑↓")
        (metric,) = [each for each in columns["metric"].unique() if SCORES_SHOWN[each].name == name]
        values = columns[columns["metric"] == metric]
        for method, *cells in rows:
            # over seeds first, then over cases
            of_cases = values[values["method"] == method].groupby("case")["value"].mean()
            shown = cells[position - 1].strip("*").replace("−", "-")
            decimals = len(shown.partition(".")[2])
            scale = 100 if values["unit"].iloc[0] == "share" else 1
            assert float(shown) == pytest.approx(of_cases.mean() * scale, abs=0.51 * 10**-decimals)


def section(anchor):
    """The part of the page below a heading, up to the next heading of the same level or above."""
    for found in re.finditer(r"^(#+) (.*)$", PAGE, re.M):
        if re.sub(r"[^a-z0-9 -]", "", found[2].lower()).replace(" ", "-") == anchor:
            return re.split(rf"^#{{1,{len(found[1])}}} ", PAGE[found.end() :], maxsplit=1, flags=re.M)[0]
    raise AssertionError(f"the page has no heading {anchor}")


def cells_of(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def differences(anchor):
    """The cells of the tables of differences in a section, by pair and name of the score, with the arrow."""
    found = {}
    for line in section(anchor).splitlines():
        if line.startswith("| difference"):
            names = [cell.rpartition(" ")[::2] for cell in cells_of(line)[1:]]
            names = [(name.partition(" (")[0], arrow) for name, arrow in ((n[0], n[1]) for n in names)]
        elif line.startswith("| ") and " − " in cells_of(line)[0]:
            pair, *cells = cells_of(line)
            found |= {(pair, name): (cell, arrow) for (name, arrow), cell in zip(names, cells, strict=True)}
    return found


def number_of(cell):
    return cell.strip("*").partition(" ")[0]


def kind_of(cell, arrow):
    """What a cell says: bold is significant."""
    if not cell.startswith("**"):
        return "no difference in"
    return "better in" if (number_of(cell)[0] == "+") == (arrow == "↑") else "worse in"


LEARNED = " ".join(section("what-we-learned").split())
# a claim: the pairs in brackets, what is said of them, and the link to their section
CLAIMS = re.findall(r"\(((?:`[^`]+ − [^`]+`(?:, )?)+)\): (.*?)(?=\(\[table\]|\(`|(?<=\d)\. [A-Z])", LEARNED)
LINKS = re.compile(r"\(\[table\]\(#([a-z0-9-]+)\)\)")


def claims():
    """Pairs, words and section of every claim; the section is that of the next link."""
    place = 0
    for pairs, words in CLAIMS:
        place = LEARNED.index(f"({pairs}): {words}", place)
        yield re.findall("`([^`]+)`", pairs), words, LINKS.search(LEARNED, place)[1]


def false_parts(pairs, words, anchor):
    """What a claim says that is not in its table."""
    found, wrong, known = differences(anchor), [], {name for _, name in differences(anchor)}
    for clause in re.split(r"; |\. ", words):
        kind = re.match("(better in|worse in|no difference in) ", clause)
        if kind is None:
            wrong += re.findall(r"[+−]\d[\d.]*", clause)
            continue
        said = re.findall(
            r"(?:, | and |^)([A-Za-z ]+?) ([+−][\d.]+)(?: to ([+−][\d.]+))?", clause[kind.end() :]
        )
        if not said or sum(len(list(filter(None, ends))) for _, *ends in said) != len(
            re.findall(r"[+−]\d", clause)
        ):
            wrong.append(clause)
        for name, *ends in said:
            cells = [found.get((pair, name)) for pair in pairs]
            if name not in known or None in cells:
                wrong.append(f"{name} of {pairs}")
                continue
            numbers = sorted((number_of(cell) for cell, _ in cells), key=lambda n: float(n.replace("−", "-")))
            if [end for end in ends if end] != list(dict.fromkeys((numbers[0], numbers[-1]))):
                wrong.append(f"{name} {ends}: {numbers}")
            if {kind_of(*cell) for cell in cells} != {kind[1]}:
                wrong.append(f"{kind[1]} {name}")
    return wrong


def test_the_section_has_one_table_and_at_most_ten_sentences():
    text = section("what-we-learned")
    assert text.count("| --- |") == 1
    items = re.findall(r"^- \*\*", text, re.M)
    assert 1 <= len(items) <= 10
    assert len(list(claims())) >= len(items)


@pytest.mark.parametrize("claim", list(claims()), ids=lambda claim: claim[0][0])
def test_every_number_and_direction_of_a_sentence_stands_in_its_table(claim):
    assert false_parts(*claim) == []


def test_false_sentences_are_detected():
    pairs, words, anchor = next(claims())
    assert "better in BDice +2.15" in words
    for old, new in (
        ("BDice +2.15", "BDice +2.16"),
        ("better in BDice", "worse in BDice"),
        ("no difference in Dice", "better in Dice"),
        ("rater ECE −0.112", "rater ECE +0.112"),
        ("GED −0.104", "NLL −0.104"),
    ):
        assert false_parts(pairs, words.replace(old, new), anchor) != [], new
    assert false_parts(["uniform − majority"], words, anchor) != []


def test_the_first_table_repeats_the_tables_that_it_leads_to():
    header, _, *rows = (line for line in section("what-we-learned").splitlines() if line.startswith("| "))
    names = [name.partition(" (")[0] for name in cells_of(header)[2:]]
    assert len(rows) > 3
    for row in rows:
        change, pair, *cells = cells_of(row)
        found = differences(re.search(r"\(#(.*)\)", change)[1])
        for name, cell in zip(names, cells, strict=True):
            expected = found[pair.strip("`"), name][0]
            assert cell.strip("*") == number_of(expected)
            assert cell.startswith("**") == expected.startswith("**")


def test_a_difference_stands_in_one_table():
    pairs = [(table.file, *pair) for table in DIFFERENCES.values() for pair in table.pairs]
    assert len(set(pairs)) == len(pairs)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of one study, in which uniform is higher by 0.1 in every score."""
    folder = tmp_path_factory.mktemp("results")
    rng = np.random.default_rng(1)
    level = rng.normal(0.6, 0.1, 30)
    metrics = results_study.DATA["lidc"].metrics
    methods = dict.fromkeys(name for pair in DIFFERENCES["labels_differences"].pairs for name in pair)
    rows = [
        CaseRow(
            f"c{case}", f"p{case // 2}", case % 5, method, "mean", metric, value + 0.1 * (method == "uniform")
        )
        for method in methods
        for metric in metrics
        for case, value in enumerate((level + rng.normal(0, 0.02, 30)).tolist())
    ]
    write_scores(table_of(rows), folder / "labels.parquet")
    return Results(folder)


def test_differences_are_corrected_for_all_cells_and_intervals_agree_with_p(made):
    effects = made.effects("labels_differences")
    names = DIFFERENCES["labels_differences"]
    assert len(effects) == len(names.pairs) * len(names.metrics)
    (single,) = made.corrected([Cell("labels", "random", "majority_sdl", "dice_score")])
    (among_many,) = [each for each in effects if (each.method, each.key.metric) == ("random", "dice_score")]
    assert single.difference == among_many.difference
    assert single.p < among_many.p
    assert single.high - single.low < among_many.high - among_many.low
    for each in effects:
        assert each.is_significant == (not each.low <= 0 <= each.high)
        assert each.is_significant == (each.method == "uniform")


def test_the_page_has_every_part_and_says_what_was_not_run(made):
    parts = results_page.makers(made)
    for name in parts:
        make_figures.table_in(PAGE, name)
    assert parts["systems_means"]() == parts["systems_run"]() == "Not run."
