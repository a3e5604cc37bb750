"""The paper's tables on small data in the published layouts: every cell and every conclusion is checked."""

import csv
import dataclasses
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from case_rows import CaseRow, select, table_of
from raw_trees import SHARED, make_kits, make_lits, make_qubiq
from rich.console import Console

from semidice.data.dataset import Dataset
from semidice.data.manifest import read_manifest
from semidice.data.prepare import run_prepare
from semidice.paths import ReproductionFolder
from semidice.recipes import read_recipe
from semidice.recipes.grid import read_variants
from semidice.reproduce import ReproduceError, paper_tables, run_reproduce
from semidice.reproduce.comparison_tables import count_close, count_same_marks, count_same_order, learned
from semidice.reproduce.conclusions import CONCLUSIONS
from semidice.reproduce.paper import METRICS, NETWORKS, QUBIQ, RowKey, TableValues, grid_of
from semidice.reproduce.plan import (
    StepTimes,
    chosen_tables,
    estimated_seconds,
    make_plan,
    num_steps,
    setting_text,
)
from semidice.reproduce.scores import comparable_paper_values, our_values, row_scores
from semidice.statistics import compare_scores, read_cases

PAPER = SHARED / "paper"
TASKS = ("brain_tumor_task2", "kidney")
SMALL = (
    "model.architecture=small_unet",
    "model.encoder=none",
    "model.weights=none",
    "model.options.channels=[8, 16]",
    # no running means: after two steps they are far off and hide the differences between methods
    "model.options.norm=group",
)
QUICK = (
    "augment.crop=[32, 32]",
    "data.num_folds=2",
    "batch_size=4",
    "optimiser.lr=0.2",
    "workers=0",
)


def new_console():
    return Console(file=io.StringIO(), width=200)


def reproduce(table, data, out, **options):
    """Run `semidice reproduce`; return its results and the printed text."""
    console = new_console()
    options = {"epochs": 1, "folds": 1, "overrides": [*SMALL, *QUICK], "accelerator": "cpu", **options}
    return run_reproduce(table, data, out, console=console, **options), console.file.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two tasks of QUBIQ, LiTS and KiTS, prepared with the commands that the messages name."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("data")
    console, small = new_console(), {"overrides": {"size": (32, 32)}, "workers": 1}
    qubiq = make_qubiq(raw / "qubiq", datasets=("brain-tumor", "kidney"), num_cases=8)
    run_prepare("qubiq", qubiq, out, tasks=TASKS, console=console, **small)
    run_prepare("lits", make_lits(raw / "lits", num_cases=4), out / "lits", console=console, **small)
    run_prepare("kits", make_kits(raw / "kits", num_cases=4), out / "kits", console=console, **small)
    return out


@pytest.fixture(scope="module")
def reproduced(data, tmp_path_factory):
    """All tables, reproduced in one output folder."""
    out = tmp_path_factory.mktemp("reproduced")
    results, printed = reproduce("all", data, out)
    return results, out, printed


def records_of(out, table):
    with (out / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# the paper


def paper_values(table):
    return paper_tables()[table].paper


def cells_of(node, names=()):
    """Names and content of each line of numbers in tables.yaml: lists, and records of the raters."""
    if isinstance(node, dict) and not {"values", "raters"} & set(node):
        for name, part in node.items():
            if name != "columns":
                yield from cells_of(part, (*names, str(name)))
    else:
        yield names, node


@pytest.mark.skipif(not PAPER.is_dir(), reason="the paper is not next to the repository")
def test_the_shipped_values_equal_those_of_the_paper():
    original = yaml.safe_load((PAPER / "tables.yaml").read_text())
    assert set(paper_tables()) == set(original)
    for table, content in original.items():
        shipped = {
            frozenset((*key.name.split(" on "), key.metric)): (list(cells.values()), paper.best.get(key))
            for paper in (paper_values(table),)
            for key, cells in paper.values.items()
        }
        lines = list(cells_of(content))
        assert len(lines) == len(shipped)
        for names, line in lines:
            (found,) = [value for key, value in shipped.items() if set(names) <= key]
            numbers = line if isinstance(line, list) else line.get("values", list(line.values()))
            assert found[0] == [number for number in numbers if number is not None]
            if isinstance(line, dict) and "best" in line:
                assert found[1] == set(line["best"])


@pytest.mark.skipif(not PAPER.is_dir(), reason="the paper is not next to the repository")
@pytest.mark.parametrize(
    ("table", "label"),
    [
        ("qubiq_labels", "qubiq"),
        ("qubiq_sota", "qubiq_sota"),
        ("lits_kits", "lits_kits"),
        ("ce_against_dml", "ceDMLs"),
        ("sdl_against_dml", "DMLs"),
        ("distillation_terms", "kdloss"),
        ("kde_bandwidth", "bandwidth"),
    ],
)
def test_shipped_values_and_marks_equal_the_cells_of_the_latex_table(table, label):
    text = (PAPER / "dice_semimetric_losses.tex").read_text()
    body = text[text.index(rf"\label{{tb:{label}}}") :].split(r"\end{tabular}")[0]
    cells = re.findall(r"&\s*(\\cellcolor\{red!15\}\{)?(\d+\.\d\d)\}?", body)
    figures = paper_values(table)
    shipped = [
        (value, column in figures.best[key])
        for key in figures.values
        for column, value in figures.values[key].items()
    ]
    latex = [(float(number), bool(mark)) for mark, number in cells]
    # the paper puts LiTS and KiTS next to each other, the shipped table one below the other
    assert sorted(shipped) == sorted(latex)
    if table != "lits_kits":
        assert shipped == latex


def test_the_paper_s_value_over_all_tasks_is_the_mean_of_the_task_means():
    for table in ("qubiq_labels", "qubiq_sota"):
        paper = paper_values(table)
        for key in [key for key in paper.values if key.name == "all"]:
            for column, value in paper.values[key].items():
                mean = np.mean([paper.values[RowKey(task, key.metric)][column] for task in QUBIQ])
                # values are rounded; the paper's value for mrnet is not the mean of its column
                slack = 0.12 if column == "mrnet" else 0.011
                assert abs(value - mean) < slack


@pytest.mark.parametrize("table", list(CONCLUSIONS))
def test_every_conclusion_holds_for_the_paper_s_own_values(table):
    for sentence, judge in CONCLUSIONS[table].items():
        assert judge(paper_values(table)).outcome == "holds", sentence


# conclusions for values chosen by hand


def changed(table, key, *, best=None, **values):
    """The paper's values with changed values and marks in one row."""
    paper = paper_values(table)
    cells = {**paper.values[key], **values}
    marks = paper.best.get(key, frozenset()) if best is None else frozenset(best)
    pairs = frozenset((better, worse) for better in marks for worse in cells if worse not in marks)
    return dataclasses.replace(
        paper,
        values={**paper.values, key: cells},
        best={**paper.best, key: marks},
        superior={**paper.superior, key: pairs},
    )


def without(table, *keys):
    paper = paper_values(table)
    return dataclasses.replace(paper, values={k: v for k, v in paper.values.items() if k not in keys})


def outcome(table, sentence, values):
    (judge,) = [judge for text, judge in CONCLUSIONS[table].items() if text.startswith(sentence)]
    return judge(values)


LITS, KITS = RowKey("lits", "dice"), RowKey("kits", "dice")
ALL_DICE, ALL_BDICE = RowKey("all", "dice"), RowKey("all", "bdice")
R18 = RowKey("unet_resnet18 on lits", "dice")
CASES = [
    # a mean with the opposite order; the same mean without significance
    ("sdl_against_dml", "DML1 beats", changed("sdl_against_dml", LITS, dml1=58.0), "fails"),
    ("sdl_against_dml", "DML1 beats", changed("sdl_against_dml", LITS, best={"sdl", "dml1"}), "tendency"),
    ("sdl_against_dml", "DML2 beats", changed("sdl_against_dml", KITS, dml2=60.0), "fails"),
    ("sdl_against_dml", "DML1 is slightly", changed("sdl_against_dml", KITS, dml2=69.5), "fails"),
    ("sdl_against_dml", "soft labels help", changed("sdl_against_dml", KITS, sdl=67.0), "fails"),
    ("ce_against_dml", "DML beats", changed("ce_against_dml", KITS, ce=80.0), "fails"),
    ("ce_against_dml", "DML beats", changed("ce_against_dml", KITS, best={"ce", "dml"}), "tendency"),
    ("qubiq_labels", "uniform weights have", changed("qubiq_labels", ALL_BDICE, random=78.0), "fails"),
    # a tie is not the opposite
    ("qubiq_labels", "uniform weights have", changed("qubiq_labels", ALL_BDICE, random=77.0), "unknown"),
    (
        "qubiq_labels",
        "uniform weights have",
        changed("qubiq_labels", ALL_BDICE, best={"uniform", "weighted"}),
        "tendency",
    ),
    ("qubiq_labels", "Dice weights have", changed("qubiq_labels", ALL_DICE, random=80.0), "fails"),
    ("qubiq_labels", "Dice weights beat", changed("qubiq_labels", ALL_DICE, weighted=70.0), "fails"),
    (
        "qubiq_labels",
        "Dice weights are among",
        changed("qubiq_labels", RowKey("kidney", "dice"), best={"uniform"}),
        "fails",
    ),
    (
        "qubiq_labels",
        "on brain_tumor_task2",
        changed("qubiq_labels", RowKey("brain_tumor_task2", "bdice"), weighted=56.0),
        "fails",
    ),
    ("qubiq_sota", "averaged labels have", changed("qubiq_sota", ALL_BDICE, mrnet=79.0), "fails"),
    (
        "qubiq_sota",
        "averaged labels are",
        changed("qubiq_sota", RowKey("kidney", "bdice"), best={"mrnet"}),
        "fails",
    ),
    ("lits_kits", "label smoothing raises", changed("lits_kits", R18, smoothing=57.0), "fails"),
    (
        "lits_kits",
        "label smoothing lowers",
        changed("lits_kits", RowKey(R18.name, "ece"), smoothing=0.53),
        "fails",
    ),
    (
        "lits_kits",
        "label smoothing lowers",
        changed("lits_kits", RowKey(R18.name, "ece"), best={"hard", "smoothing"}),
        "tendency",
    ),
    ("lits_kits", "distillation raises", changed("lits_kits", R18, distillation=57.0), "fails"),
    ("lits_kits", "distillation is among", changed("lits_kits", R18, best={"smoothing"}), "fails"),
    (
        "lits_kits",
        "distillation does not",
        changed("lits_kits", RowKey(R18.name, "ece"), distillation=0.53),
        "fails",
    ),
    ("lits_kits", "on LiTS the students", changed("lits_kits", R18, distillation=59.0), "fails"),
    ("distillation_terms", "each term", changed("distillation_terms", LITS, ce=57.0), "fails"),
    ("distillation_terms", "DML adds", changed("distillation_terms", KITS, dml=68.0), "fails"),
    ("distillation_terms", "KDE adds", changed("distillation_terms", KITS, kde=69.0), "fails"),
    ("distillation_terms", "KDE adds", changed("distillation_terms", KITS, best={"dml", "kde"}), "tendency"),
    ("kde_bandwidth", "the best bandwidth", changed("kde_bandwidth", KITS, **{"5e-5": 72.0}), "fails"),
    ("kde_bandwidth", "the best bandwidth", changed("kde_bandwidth", KITS, **{"5e-5": 71.34}), "unknown"),
    ("kde_bandwidth", "1e-3 is among", changed("kde_bandwidth", KITS, best={"5e-5"}), "fails"),
    ("kde_bandwidth", "1e-3 beats", changed("kde_bandwidth", KITS, **{"0": 72.0}), "fails"),
    (
        "kde_bandwidth",
        "the bandwidth matters",
        changed("kde_bandwidth", KITS, best=paper_values("kde_bandwidth").columns),
        "fails",
    ),
    (
        "rater_agreement",
        "raters disagree",
        changed("rater_agreement", RowKey("kidney", "agreement"), dice=60.0),
        "fails",
    ),
]


@pytest.mark.parametrize(("table", "sentence", "values", "expected"), CASES)
def test_a_conclusion_that_the_values_contradict_fails(table, sentence, values, expected):
    assert outcome(table, sentence, values).outcome == expected


def test_every_conclusion_has_a_case_in_which_it_fails():
    failing = {(table, sentence) for table, sentence, _, expected in CASES if expected == "fails"}
    for table, conclusions in CONCLUSIONS.items():
        for sentence in conclusions:
            # conclusions on most tasks have their own test
            if "on most tasks" not in sentence:
                assert any(table == name and sentence.startswith(start) for name, start in failing), sentence


@pytest.mark.parametrize(("other", "expected"), [(49.0, "fails"), (50.0, "unknown")])
def test_soft_labels_need_to_win_on_more_than_half_of_the_tasks(other, expected):
    figures = paper_values("qubiq_labels")
    for number, task in enumerate(QUBIQ):
        cells = {"majority": 50.0, "uniform": 51.0 if number < 3 else other}
        figures = dataclasses.replace(figures, values={**figures.values, RowKey(task, "bdice"): cells})
    verdict = outcome("qubiq_labels", "soft labels beat the majority vote in BDice", figures)
    assert verdict == (expected, "uniform on 3 of 7")


def test_nothing_follows_from_networks_that_learned_nothing():
    ece = RowKey("all", "ece")
    paper = paper_values("qubiq_labels")
    nothing = dataclasses.replace(paper, values={**paper.values, ALL_DICE: dict.fromkeys(paper.columns, 0.4)})
    kept = learned(nothing).values
    assert set(paper.values) - set(kept) == {ALL_DICE, ALL_BDICE, ece}


def test_a_lower_calibration_error_is_the_better_one():
    key = RowKey("kidney", "ece")
    figures = TableValues(("majority", "uniform"), {key: {"majority": 0.9, "uniform": 0.6}})
    assert figures.gain(key, "uniform", "majority") == pytest.approx(0.3)
    sentence = "soft labels beat the majority vote in ECE"
    # too few cases for a test
    assert outcome("qubiq_labels", sentence, figures) == ("tendency", "uniform on 1 of 1")
    tested = dataclasses.replace(figures, best={key: frozenset(["uniform"])})
    assert outcome("qubiq_labels", sentence, tested) == ("holds", "uniform on 1 of 1")


@pytest.mark.parametrize("table", list(CONCLUSIONS))
def test_every_conclusion_is_unknown_without_values(table):
    empty = TableValues(paper_values(table).columns, {})
    assert {judge(empty).outcome for judge in CONCLUSIONS[table].values()} == {"unknown"}


def test_being_among_the_best_is_unknown_if_no_difference_is_significant():
    columns = paper_values("kde_bandwidth").columns
    figures = changed("kde_bandwidth", KITS, best=columns)
    figures = dataclasses.replace(figures, best={LITS: frozenset(columns), KITS: frozenset(columns)})
    assert outcome("kde_bandwidth", "1e-3 is among", figures).outcome == "unknown"


def test_a_conclusion_is_checked_on_the_datasets_that_have_values():
    verdict = outcome("distillation_terms", "KDE adds", without("distillation_terms", KITS))
    assert verdict == ("holds", "on 1 of 1, significantly on 1")
    assert outcome("kde_bandwidth", "the best", without("kde_bandwidth", KITS)).outcome == "unknown"


def test_equal_orders_equal_marks_and_close_values_are_counted():
    paper = paper_values("ce_against_dml")
    assert count_same_order(paper, paper) == (3, 3)
    assert count_same_marks(paper, paper) == (6, 6)
    reversed_order = changed("ce_against_dml", LITS, best={"ce"}, ce=60.5)
    assert count_same_order(reversed_order, paper) == (2, 3)
    assert count_same_marks(reversed_order, paper) == (4, 6)
    assert count_close(reversed_order, paper, points=1.0) == (5, 6)


# the methods behind the cells


def variant_of(name, dataset, *, data, out, overrides=()):
    """One method of the shipped grid of a dataset."""
    variants = read_variants(
        [grid_of(dataset)], dataset=data / dataset, out=out / dataset, overrides=overrides, only=[name]
    )
    return variants[-1]


def methods_on(dataset):
    grid = read_variants([grid_of(dataset)], dataset=Path("data"), out=Path("out"))
    return [variant.name for variant in grid]


def test_every_cell_of_the_paper_has_a_run_and_there_are_no_other_runs():
    used = set()
    for table in paper_tables().values():
        for row in table.rows if table.name != "rater_agreement" else ():
            assert {column for column, runs in row.runs.items() if runs} == set(table.paper.values[row.key])
            used |= {name for runs in row.runs.values() for name in runs.values()}
    assert used == {*methods_on("kidney"), *methods_on("lits")}


def recipe_of(name, dataset, tmp_path):
    return variant_of(name, dataset, data=tmp_path, out=tmp_path / "out").recipe


def test_recipes_of_methods_have_the_options_of_the_paper(tmp_path):
    recipe = recipe_of("unet_resnet18_distillation_sdl", "lits", tmp_path)
    assert (recipe.loss.form, recipe.teacher.calibration) == ("relaxed", "none")
    assert recipe.teacher.run == tmp_path / "out" / "lits" / "unet_resnet50_hard" / "seed_0"
    assert recipe.schedule.epochs == 60
    recipe = recipe_of("unet_resnet18_distillation_h5e-5", "kits", tmp_path)
    assert (recipe.teacher.bandwidth, recipe.teacher.calibration) == (5e-5, "kde")
    assert recipe_of("unet_resnet18_distillation", "kits", tmp_path).teacher.bandwidth == 1e-3
    assert recipe_of("unet_resnet18_distillation_ce", "kits", tmp_path).teacher.terms == ("cross_entropy",)
    recipe = recipe_of("weighted_dml2", "kidney", tmp_path)
    assert (recipe.label.maker, recipe.loss.form, recipe.schedule.epochs) == ("dice_weighted", "product", 150)
    recipe = recipe_of("ce", "kidney", tmp_path)
    assert (recipe.label.maker, recipe.loss.region_weight) == ("majority", 0)
    recipe = recipe_of("deeplabv3plus_resnet18_smoothing", "lits", tmp_path)
    assert (recipe.model.architecture, recipe.model.encoder) == ("deeplabv3plus", "tu-resnet18")
    assert (recipe.label.smoothing, recipe.label.eps) == ("boundary", 0.5)


@pytest.mark.parametrize(
    ("table", "row", "dataset", "expected"),
    [
        ("ce_against_dml", "qubiq", "kidney", {"ce": "ce", "dml": "majority"}),
        ("ce_against_dml", "lits", "lits", {"ce": "unet_resnet50_ce", "dml": "unet_resnet50_hard"}),
        (
            "sdl_against_dml",
            "qubiq",
            "kidney",
            {"hard": "majority", "sdl": "weighted_sdl", "dml1": "weighted", "dml2": "weighted_dml2"},
        ),
        (
            "sdl_against_dml",
            "kits",
            "kits",
            {
                "hard": "unet_resnet18_hard",
                "sdl": "unet_resnet18_distillation_sdl",
                "dml1": "unet_resnet18_distillation_dml1",
                "dml2": "unet_resnet18_distillation_dml2",
            },
        ),
        (
            "distillation_terms",
            "lits",
            "lits",
            {
                "hard": "unet_resnet18_hard",
                "ce": "unet_resnet18_distillation_ce",
                "dml": "unet_resnet18_distillation_dml1",
                "kde": "unet_resnet18_distillation",
            },
        ),
        (
            "qubiq_sota",
            "kidney",
            "kidney",
            {
                "dropout": "mc_dropout",
                "multi_head": "multi_head",
                "mrnet": "mrnet",
                "softseg": "softseg",
                "ours": "weighted",
            },
        ),
    ],
)
def test_each_column_uses_the_runs_of_its_method(table, row, dataset, expected):
    (table_row,) = [each for each in paper_tables()[table].rows if each.key.name == row]
    assert {column: runs[dataset] for column, runs in table_row.runs.items()} == expected


def test_our_method_weights_raters_equally_on_the_task_where_they_disagree_most():
    table = paper_tables()["qubiq_sota"]
    (over_all,) = [row for row in table.rows if row.key.name == "all"]
    assert over_all.runs["ours"] == {
        task: "uniform" if task == "brain_tumor_task2" else "weighted" for task in QUBIQ
    }


def test_tables_share_runs_and_teachers_come_first(tmp_path):
    tables = [paper_tables()[name] for name in ("lits_kits", "distillation_terms", "kde_bandwidth")]
    plan = make_plan(tables, data=tmp_path, out=tmp_path / "out")
    names = [variant.name for variant in plan.variants["lits"]]
    assert len(names) == len(set(names)) < sum(len(table.methods("lits")) for table in tables)
    assert names[0] == "unet_resnet50_hard"
    folders = {name: set(table.methods("lits")) for name, table in paper_tables().items()}
    assert "unet_resnet18_hard" in folders["lits_kits"] & folders["distillation_terms"]
    assert "unet_resnet18_distillation" in folders["lits_kits"] & folders["kde_bandwidth"]


# protocols: the paper's text, and the configuration that its authors released

PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"


def planned(data, out, *, protocol, overrides=()):
    """Variants of all tables by dataset and method, for the datasets that exist."""
    out = ReproductionFolder.of(out, protocol).path
    tables = list(paper_tables().values())
    plan = make_plan(tables, data=data, out=out, overrides=overrides, protocol=protocol)
    return {(name, each.name): each for name, group in plan.runnable().items() for each in group}


def flat(recipe):
    """Options by dotted key, without the run of the teacher, which is a folder of the protocol."""
    options = recipe.model_dump(mode="json")
    options = {
        f"{section}.{name}": value
        for section, values in options.items()
        if isinstance(values, dict)
        for name, value in values.items()
    } | {name: value for name, value in options.items() if not isinstance(value, dict)}
    return {name: value for name, value in options.items() if name != "teacher.run"}


def option_differences(data, out):
    """By option: the values of the text, and those of the authors, over all methods in which they differ."""
    text, authors = (planned(data, out, protocol=protocol) for protocol in ("text", "authors"))
    differences = {}
    for key in text:
        old, new = flat(text[key].recipe), flat(authors[key].recipe)
        assert set(old) == set(new)
        for option in old:
            if old[option] != new[option]:
                values = differences.setdefault(option, (set(), set()))
                values[0].add(json.dumps(old[option]))
                values[1].add(json.dumps(new[option]))
    return differences


def options_in_page(page):
    """The table of differing options: values of the text and of the authors by option."""
    start = page.index("| option | the text says")
    rows = [row.strip("|").split("|") for row in page[start:].partition("\n\n")[0].splitlines()[2:]]
    values = [re.compile(r"`([^`]*)`").findall(cell) for row in rows for cell in (row[0], *row[-2:])]
    as_json = [{json.dumps(yaml.safe_load(value)) for value in cell} for cell in values]
    return {values[n][0]: (as_json[n + 1], as_json[n + 2]) for n in range(0, len(values), 3)}


def test_the_protocols_differ_in_the_options_and_values_of_the_page(data, tmp_path):
    shown, real = options_in_page(PAGE.read_text()), option_differences(data, tmp_path)
    assert set(shown) == set(real)
    # the number of steps depends on the dataset
    assert shown.pop("schedule.warmup_steps") == ({"0"}, set())
    assert shown == {option: real[option] for option in shown}


def test_a_row_that_is_missing_from_the_page_or_has_another_value_is_detected(data, tmp_path):
    page, real = PAGE.read_text(), option_differences(data, tmp_path)
    without_row = re.sub(r"\| `loss.smooth` .*\n", "", page)
    assert set(real) - set(options_in_page(without_row)) == {"loss.smooth"}
    other = options_in_page(page.replace("`10.0`", "`5.0`"))
    assert other["optimiser.decoder_lr_factor"] != real["optimiser.decoder_lr_factor"]


def test_both_protocols_have_the_same_methods_in_different_folders(data, tmp_path):
    text, authors = (planned(data, tmp_path, protocol=protocol) for protocol in ("text", "authors"))
    assert list(text) == list(authors)
    folders = [variant.folder for variant in (*text.values(), *authors.values())]
    assert len(set(folders)) == 2 * len(text)
    for (dataset, method), variant in authors.items():
        assert variant.folder == tmp_path / "authors" / dataset / method / "seed_0"
        if variant.teacher is not None:
            assert variant.recipe.teacher.run == authors[dataset, variant.teacher].folder


def test_the_authors_options_are_only_set_where_they_mean_something(data, tmp_path):
    authors = planned(data, tmp_path, protocol="authors")
    label = authors["kidney", "smoothing"].recipe.label
    assert (label.maker, label.smoothing, label.eps, label.width) == ("majority", "boundary", 0.5, 3)
    assert authors["kidney", "uniform"].recipe.label.smoothing == "none"
    classes = {method: variant.recipe.loss.classes for (_, method), variant in authors.items()}
    assert classes["majority"] == classes["random"] == classes["unet_resnet50_hard"] == "present"
    assert classes["weighted"] == classes["smoothing"] == classes["unet_resnet18_distillation"] == "all"
    factors = {method: each.recipe.optimiser.decoder_lr_factor for (_, method), each in authors.items()}
    assert {method for method, factor in factors.items() if factor != 10} == {"mrnet"}
    assert authors["kidney", "majority"].recipe.augment.crop == (256, 256)
    assert authors["kits", "unet_resnet50_hard"].recipe.augment.crop == (384, 384)
    assert authors["kits", "unet_resnet50_hard"].recipe.validation.unit == "scan"


def test_the_warm_up_is_a_hundredth_of_the_steps_that_are_asked_for(data, tmp_path):
    # 8 cases of kidney, of which two folds train on 4 each: one batch per epoch
    options = ["data.num_folds=2", "batch_size=4", "schedule.epochs=350"]
    recipe = planned(data, tmp_path, protocol="authors", overrides=options)["kidney", "majority"].recipe
    assert recipe.schedule.warmup_steps == 4


def test_an_override_replaces_an_option_of_the_protocol(data, tmp_path):
    options = ["augment.crop=[64, 64]", "optimiser={lr: 0.1}", "schedule.warmup_steps=7"]
    for variant in planned(data, tmp_path, protocol="authors", overrides=options).values():
        recipe = variant.recipe
        assert (recipe.augment.crop, recipe.schedule.warmup_steps) == ((64, 64), 7)
        assert (recipe.optimiser.lr, recipe.optimiser.decoder_lr_factor) == (0.1, 1.0)
        assert recipe.loss.smooth == 1


def test_both_protocols_run_in_one_folder_and_keep_their_results(data, tmp_path):
    tables = {}
    for protocol in ("text", "authors", "text"):
        results, printed = reproduce(
            "qubiq_labels", data, tmp_path, tasks=["kidney"], protocol=protocol, epochs=2
        )
        folder = tmp_path / "authors" if protocol == "authors" else tmp_path
        assert f"protocol {protocol}: " in printed
        assert f"protocol {protocol}: " in (folder / "qubiq_labels.md").read_text()
        ours = results["qubiq_labels"].values
        assert all(np.isfinite(value) for row in ours.values() for value in row.values())
        # the third command finds the runs of the first
        assert ("trainings to run" in printed) == (protocol not in tables)
        assert tables.setdefault(protocol, ours) == ours
    assert tables["text"] != tables["authors"]
    smoothing = read_recipe(
        tmp_path / "authors" / "kidney" / "smoothing" / "seed_0" / "recipe.yaml"
    ).label.smoothing
    assert smoothing == "boundary"


def test_students_and_systems_run_with_the_authors_options(data, tmp_path):
    options = {"tasks": ["kidney", "lits"], "protocol": "authors"}
    for table in ("qubiq_sota", "distillation_terms"):
        results, _ = reproduce(table, data, tmp_path, **options)
        rows = results[table].values
        assert rows
        assert all(np.isfinite(value) for row in rows.values() for value in row.values())


def test_list_only_says_which_protocol_is_listed(data, tmp_path):
    reproduce("ce_against_dml", data, tmp_path, tasks=["kidney"])
    for protocol, finished in (("text", 2), ("authors", 0)):
        _, printed = reproduce(
            "ce_against_dml", data, tmp_path, tasks=["kidney"], list_only=True, protocol=protocol
        )
        assert f"protocol {protocol}: " in printed
        assert re.search(rf"ce_against_dml +1 of 1 +2 +2 +{finished} +{2 - finished}\b", printed)


# our values


def case_table(method, values):
    """A case table of one method; the keys of `values` are (patient, case)."""
    return table_of(
        CaseRow(case, patient, 0, method, "mean", metric, value)
        for (patient, case), value in values.items()
        for metric in ("dice_score", "binarized_dice_score", "calibration_error")
    )


def random_cases(rng, mean, num_cases):
    return {(f"p{number}", f"p{number}"): mean + rng.normal(0, 0.02) for number in range(num_cases)}


def test_tasks_have_equal_weight_in_a_mean_and_tests_resample_within_tasks():
    rng = np.random.default_rng(0)
    runs = {}
    # means far apart, very different numbers of cases, and a small gain in each task
    for task, level, num_cases in (("kidney", 0.5, 10), ("brain_growth", 0.9, 40)):
        for method, gain in (("ce", 0.0), ("majority", 0.03)):
            runs[task, method] = case_table(method, random_cases(rng, level + gain, num_cases))
    table = paper_tables()["ce_against_dml"]
    figures = our_values(table, runs)
    key = RowKey("qubiq", "dice")
    for column, method in (("ce", "ce"), ("dml", "majority")):
        means = [
            runs[task, method].pipe(select, metric="dice_score")["value"].mean()
            for task in ("kidney", "brain_growth")
        ]
        assert figures.value(key, column) == pytest.approx(100 * np.mean(means))
    assert figures.best[key] == {"dml"}
    assert figures.num_cases[key] == 50
    assert set(figures.values) == {key}


def test_the_spread_between_tasks_is_not_part_of_the_uncertainty():
    rng = np.random.default_rng(1)
    sizes = {"kidney": 24, "brain_growth": 39}
    runs, noise = {}, {}
    for task, gain in (("kidney", 0.13), ("brain_growth", 0.01)):
        noise[task] = rng.normal(0, 0.03, sizes[task])
        base = {(f"p{n}", f"p{n}"): 0.7 for n in range(sizes[task])}
        runs[task, "ce"] = case_table("ce", base)
        better = {key: 0.7 + gain + noise[task][n] for n, key in enumerate(base)}
        runs[task, "majority"] = case_table("majority", better)
    (row,) = [row for row in paper_tables()["ce_against_dml"].rows if row.key.name == "qubiq"]
    comparison = compare_scores(row_scores(row, runs))
    # computed by hand: the standard error of a mean of two means over independent cases
    error = np.sqrt(sum(noise[task].var() / sizes[task] for task in sizes) / 4)
    half_width = (comparison.pairs["high"] - comparison.pairs["low"]).iloc[0] / 2
    # 1.96 standard errors for a normal distribution; the studentised bootstrap is a little wider
    assert 1.85 < half_width / error < 2.2


def test_tasks_of_one_qubiq_folder_share_their_patients():
    rng = np.random.default_rng(0)
    runs = {
        (task, method): case_table(method, random_cases(rng, 0.8, 6))
        for task in ("prostate_task1", "prostate_task2", "kidney")
        for method in ("ce", "majority")
    }
    (row,) = [row for row in paper_tables()["ce_against_dml"].rows if row.key.name == "qubiq"]
    scores = row_scores(row, runs)
    assert len(scores.cases) == len(set(scores.cases)) == 18
    assert len(set(scores.patients)) == 12


def test_a_column_that_lacks_a_run_on_one_task_has_no_value_over_all_tasks():
    rng = np.random.default_rng(0)
    runs = {
        (task, method): case_table(method, random_cases(rng, 0.8, 6))
        for task in TASKS
        for method in ("majority", "uniform", "random")
    }
    del runs["kidney", "random"]
    figures = our_values(paper_tables()["qubiq_labels"], runs)
    assert set(figures.values[RowKey("all", "dice")]) == {"majority", "uniform"}
    assert set(figures.values[RowKey("brain_tumor_task2", "dice")]) == {"majority", "uniform", "random"}


def test_a_subset_of_tasks_is_compared_with_the_paper_s_mean_over_the_same_tasks():
    table = paper_tables()["qubiq_labels"]
    paper = comparable_paper_values(table, TASKS)
    assert paper.value(ALL_BDICE, "majority") == pytest.approx((38.68 + 62.47) / 2)
    assert paper.best[ALL_BDICE] == frozenset()
    assert comparable_paper_values(table, QUBIQ) == table.paper
    # the paper has no values of single tasks in this table
    assert (
        comparable_paper_values(paper_tables()["ce_against_dml"], TASKS).values[RowKey("qubiq", "dice")] == {}
    )


# running the command


def test_all_tables_are_reproduced_from_the_published_layouts(reproduced):
    results, out, printed = reproduced
    assert set(results) == set(paper_tables())
    for name in results:
        for suffix in (".md", ".csv", ".tex", "_conclusions.md", "_conclusions.csv", "_conclusions.tex"):
            assert (out / f"{name}{suffix}").stat().st_size > 50
        assert paper_tables()[name].title in printed
        assert "## Conclusions" in (out / f"{name}.md").read_text()
        # every cell of the paper is listed, with our value if the dataset exists
        records = records_of(out, name)
        assert len(records) == len(paper_tables()[name].paper.values) * len(
            paper_tables()[name].paper.columns
        )
        with_data = [row for row in records if {"lits", "kits", *TASKS} & {*re.split(" on ", row["row"])}]
        for row in with_data:
            if (row["row"][:13], row["column"]) != ("unet_resnet50", "distillation"):
                assert row["ours"], row


def test_a_table_names_the_networks_epochs_and_folds_that_ran(reproduced, tmp_path):
    _, out, printed = reproduced
    words = "Ran: small_unet, 1 epoch, 1 of 2 folds. The paper has unet-resnet50, 150 epochs, 5 folds, "
    assert words in printed
    assert words in (out / "qubiq_labels.md").read_text()
    assert "Ran:" not in (out / "rater_agreement.md").read_text()
    assert not re.search("resnet", paper_tables()["qubiq_labels"].title, re.I)
    plan = make_plan(chosen_tables("lits_kits"), data=tmp_path, out=tmp_path, tasks=["lits"])
    assert setting_text(plan.variants).startswith("unet-resnet50, unet-resnet18, ")


def test_tables_share_run_folders(reproduced):
    _, out, _ = reproduced
    for dataset in ("lits", "kidney"):
        folders = {path.name for path in (out / dataset).iterdir() if path.is_dir()}
        assert folders == set(methods_on(dataset))


def test_rows_of_volumes_say_that_they_are_per_slice(reproduced):
    _, out, _ = reproduced
    lines = (out / "lits_kits.md").read_text().splitlines()
    assert [line for line in lines if "on lits, Dice per slice ↑" in line]
    assert not [line for line in lines if "on lits, Dice ↑" in line]
    assert "per slice" not in (out / "qubiq_labels.md").read_text()


def test_every_value_is_a_mean_of_the_case_tables(reproduced):
    _, out, printed = reproduced
    # computed by hand: plain means over the rows of each run's Parquet file
    traced = 0
    for name in paper_tables():
        if name == "rater_agreement":
            continue
        for record in records_of(out, name):
            if not record["ours"]:
                continue
            means = []
            for run in record["runs"].split():
                # the paper scores volumes slice by slice
                per = "slice" if run.startswith(("lits/", "kits/")) else "scan"
                table = read_cases(out / run / "seed_0" / "cases.parquet")
                table = table.pipe(select, metric=METRICS[record["metric"]], per=per)
                kind = "mean" if "mean" in set(table["class"]) else "all"
                values = table.pipe(select, class_name=kind)["value"]
                assert np.isfinite(values).all()
                means.append(values.mean())
            assert float(record["ours"]) == pytest.approx(100 * np.mean(means), rel=1e-9)
            if record["paper"]:
                difference = float(record["ours"]) - float(record["paper"])
                assert float(record["difference"]) == pytest.approx(difference, abs=1e-9)
            assert f"{float(record['ours']):.2f}" in printed
            traced += 1
    assert traced > 150
    # values in a row differ, so a cell with the value of another run would be found
    for name in ("lits_kits", "sdl_against_dml", "qubiq_labels"):
        for row in {(record["row"], record["metric"]) for record in records_of(out, name)}:
            ours = [
                record["ours"]
                for record in records_of(out, name)
                if (record["row"], record["metric"]) == row and record["ours"]
            ]
            assert len(set(ours)) == len(ours), (name, row, ours)


def test_rater_agreement_is_the_mean_dice_with_the_majority(reproduced, data):
    _, out, _ = reproduced
    for record in records_of(out, "rater_agreement"):
        if record["row"] not in TASKS:
            assert record["ours"] == ""
            continue
        dataset = Dataset(data / record["row"])
        dice = np.full(dataset.present.shape, np.nan)
        for number in range(len(dataset)):
            present = dataset.present[number]
            masks = dataset.masks(number)[present] > 0
            majority = masks.sum(0) * 2 > present.sum()
            both, sizes = (masks & majority).sum((1, 2)), masks.sum((1, 2)) + majority.sum()
            dice[number, present] = np.where(sizes == 0, 1.0, 2 * both / np.maximum(sizes, 1))
        expected = len(dataset.manifest.raters)
        if record["column"] == "dice":
            expected = 100 * np.nanmean(np.nanmean(dice, 0))
        assert float(record["ours"]) == pytest.approx(expected, rel=1e-6)
    table = read_cases(out / "rater_agreement_cases.parquet")
    assert table["case"][0].startswith("brain_tumor_task2/")


def test_a_second_run_trains_nothing_and_writes_the_same_table(reproduced, data, tmp_path):
    _, out, _ = reproduced
    before = (out / "distillation_terms.csv").read_text()
    log = out / "lits" / "unet_resnet18_hard" / "seed_0" / "fold_0" / "log.jsonl"
    stamp = log.stat().st_mtime_ns
    _, printed = reproduce("distillation_terms", data, out)
    assert (out / "distillation_terms.csv").read_text() == before
    assert log.stat().st_mtime_ns == stamp
    assert "trainings to run" not in printed


def test_a_run_in_a_moved_folder_trains_nothing_and_writes_the_same_table(reproduced, data, tmp_path):
    _, out, _ = reproduced
    moved = tmp_path / "moved"
    for dataset in ("lits", "kits"):
        shutil.copytree(out / dataset, moved / dataset)
    student = moved / "lits" / "unet_resnet18_distillation" / "seed_0" / "recipe.yaml"
    assert read_recipe(student).teacher.run == moved / "lits" / "unet_resnet50_hard" / "seed_0"
    weights = sorted(moved.rglob("*.safetensors"))
    stamps = [path.stat().st_mtime_ns for path in weights]
    _, printed = reproduce("distillation_terms", data, moved)
    assert "trainings to run" not in printed
    assert sorted(moved.rglob("*.safetensors")) == weights
    assert [path.stat().st_mtime_ns for path in weights] == stamps
    assert (moved / "distillation_terms.csv").read_text() == (out / "distillation_terms.csv").read_text()


def test_worker_processes_reproduce_the_table_of_one_process_to_the_bit(
    reproduced, data, tmp_path, monkeypatch
):
    # as in this process: the number of threads can change the last bits
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, plain, _ = reproduced
    out = tmp_path / "out"
    _, printed = reproduce("qubiq_labels", data, out, on="local:2")
    assert "failed" not in printed
    written = [path.name for path in out.iterdir() if path.is_file() and path.name.startswith("qubiq_labels")]
    assert "qubiq_labels.csv" in written
    of_runs = [path.relative_to(out) for kind in ("log.jsonl", "cases.parquet") for path in out.rglob(kind)]
    # of each run, and the table of its fold
    assert len([path for path in of_runs if path.name == "cases.parquet"]) == 20
    for name in (*written, *of_runs):
        assert (out / name).read_bytes() == (plain / name).read_bytes(), name


def test_list_only_prints_trainings_and_time_and_starts_nothing(data, tmp_path):
    results, printed = reproduce("all", data, tmp_path / "out", list_only=True)
    assert results == {}
    assert not (tmp_path / "out").exists()
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    # one fold: five labels on seven tasks; two of the tasks exist here
    assert lines["qubiq_labels"][:7] == ["2", "of", "7", "35", "10", "0", "10"]
    assert lines["rater_agreement"] == ["2", "of", "7", "0", "0", "0", "0"]
    assert lines["lits_kits"][3:7] == ["28", "28", "0", "28"]
    # 12 methods on 7 tasks and 24 methods on 2: fewer than the sum over the tables
    assert re.search(r"shared runs once +4 of 9 +132 +72 +0 +72", printed)
    assert "min" in lines["qubiq_labels"]


def test_finished_trainings_are_not_counted_as_remaining(reproduced, data):
    _, out, _ = reproduced
    _, printed = reproduce("kde_bandwidth", data, out, list_only=True)
    assert re.search(r"kde_bandwidth +2 of 2 +16 +16 +16 +0\s*$", printed, re.MULTILINE)


def test_the_estimated_time_is_the_number_of_steps_times_the_time_of_a_step(data, tmp_path):
    variant = variant_of(
        "majority", "kidney", data=data, out=tmp_path, overrides=[*SMALL, *QUICK, "schedule.epochs=30"]
    )
    manifest = read_manifest(data / "kidney")
    # 8 cases; each of two folds trains on half of them; batches of 4
    assert num_steps(variant.recipe, manifest) == 30

    class Fixed(StepTimes):
        def seconds(self, recipe, manifest):
            return 0.5

    times = Fixed(torch.device("cpu"))
    total = estimated_seconds({"kidney": [variant]}, {"kidney": manifest}, times)
    assert total == pytest.approx(2 * 30 * 0.5)
    teacher, student = (
        variant_of(name, "lits", data=data, out=tmp_path, overrides=[*SMALL, *QUICK])
        for name in ("unet_resnet50_hard", "unet_resnet18_distillation")
    )
    lits = read_manifest(data / "lits")
    steps = num_steps(teacher.recipe, lits)
    total = estimated_seconds({"lits": [teacher, student]}, {"lits": lits}, times)
    assert total == pytest.approx(2 * steps * 0.5 * (1 + 1 + 1 / 3))


def test_measuring_a_step_does_not_change_the_random_state(data, tmp_path):
    recipe = read_recipe("quick", [f"data.dataset={data / 'kidney'}", "augment.crop=[32, 32]"])
    manifest = read_manifest(data / "kidney")
    state = torch.get_rng_state()
    times = StepTimes(torch.device("cpu"))
    seconds = times.seconds(recipe, manifest)
    assert 0 < seconds < 60
    assert torch.equal(torch.get_rng_state(), state)
    assert times.seconds(recipe, manifest) == seconds
    unknown = recipe.model_copy(
        update={"model": replace(recipe.model, architecture="unet", encoder="nothing")}
    )
    assert times.seconds(unknown, manifest) is None


def test_a_missing_task_is_named_with_its_path_and_the_command_that_prepares_it(data, tmp_path):
    _, printed = reproduce("rater_agreement", data, tmp_path / "out")
    assert (
        f"no dataset prostate_task1: {data / 'prostate_task1' / 'manifest.json'} does not exist; "
        f"make it with: semidice prepare qubiq QUBIQ_DIR {data} --task prostate_task1"
    ) in printed
    assert "no dataset kidney" not in printed


def test_the_missing_files_are_named_if_there_is_no_dataset(tmp_path):
    console = new_console()
    with pytest.raises(ValueError, match="has no dataset of table kde_bandwidth"):
        run_reproduce("kde_bandwidth", tmp_path, tmp_path / "out", console=console, accelerator="cpu")
    printed = console.file.getvalue()
    for name in ("lits", "kits"):
        assert f"{tmp_path / name / 'manifest.json'} does not exist" in printed
        assert f"semidice prepare {name} {name.upper()}_DIR {tmp_path / name}" in printed
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_cannot_be_read_is_named(data, tmp_path):
    shutil.copytree(data / "lits", tmp_path / "lits")
    (tmp_path / "lits" / "manifest.json").write_text("{}")
    console = new_console()
    with pytest.raises(ValueError, match="has no dataset of table"):
        run_reproduce("kde_bandwidth", tmp_path, tmp_path / "out", console=console, accelerator="cpu")
    assert "manifest.json cannot be used" in console.file.getvalue()


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ("qubic", {}, "the paper has no table 'qubic'; choose one of rater_agreement, qubiq_labels"),
        ("qubiq_labels", {"tasks": ["spleen"]}, "unknown task spleen; choose from prostate_task1"),
        ("qubiq_labels", {"tasks": ["lits"]}, "has no rows for lits; choose from prostate_task1"),
        ("qubiq_labels", {"overrides": ["loss.fom=min"]}, "did you mean loss.form"),
        ("qubiq_labels", {"folds": 9}, "different numbers from 0 to 4"),
        ("qubiq_labels", {"folds": 0}, "different numbers from 0 to 4"),
        ("qubiq_labels", {"protocol": "paper"}, "unknown protocol 'paper'; choose from text, authors"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(table, options, message, data, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        run_reproduce(table, data, tmp_path / "out", console=new_console(), accelerator="cpu", **options)
    assert not (tmp_path / "out").exists()


def test_some_tasks_and_some_folds_can_be_run(data, tmp_path):
    results, printed = reproduce("ce_against_dml", data, tmp_path / "out", tasks=["kidney"], folds=2)
    figures = results["ce_against_dml"]
    assert set(figures.values) == {RowKey("qubiq", "dice")}
    assert figures.num_cases[RowKey("qubiq", "dice")] == len(Dataset(data / "kidney"))
    assert "qubiq (1 of 7 tasks)" in printed
    # fewer folds than before: the other finished folds are left out
    results, _ = reproduce("ce_against_dml", data, tmp_path / "out", tasks=["kidney"], folds=1)
    table = read_cases(tmp_path / "out" / "kidney" / "ce" / "seed_0" / "cases.parquet")
    table = table.pipe(select, metric="dice_score", fold=0)
    ours = results["ce_against_dml"].value(RowKey("qubiq", "dice"), "ce")
    assert ours == pytest.approx(100 * table.pipe(select, class_name="mean")["value"].mean())


def test_a_method_that_fails_is_reported_and_the_others_are_in_the_table(data, tmp_path):
    (tmp_path / "out" / "kidney" / "ce" / "seed_0").mkdir(parents=True)
    (tmp_path / "out" / "kidney" / "ce" / "seed_0" / "notes.txt").write_text("mine")
    console = new_console()
    with pytest.raises(ReproduceError, match=r"kidney/ce: .*is not a run folder"):
        run_reproduce(
            "ce_against_dml",
            data,
            tmp_path / "out",
            console=console,
            epochs=1,
            folds=1,
            tasks=["kidney"],
            overrides=[*SMALL, *QUICK],
            accelerator="cpu",
        )
    rows = {row["column"]: row["ours"] for row in records_of(tmp_path / "out", "ce_against_dml")[:2]}
    assert rows["ce"] == ""
    assert float(rows["dml"]) > 0
    assert "Cross entropy against DML" in console.file.getvalue()


@pytest.mark.slow
def test_all_seven_tasks_and_five_networks_run(tmp_path):
    console = new_console()
    qubiq = make_qubiq(tmp_path / "qubiq")
    request = {"overrides": {"size": (64, 64)}, "workers": 1}
    run_prepare("qubiq", qubiq, tmp_path / "data", console=console, **request)
    run_prepare("lits", make_lits(tmp_path / "lits"), tmp_path / "data" / "lits", console=console, **request)
    options = {"overrides": ["model.weights=none", "augment.crop=[64, 64]", *QUICK[1:]]}
    results, _ = reproduce("lits_kits", tmp_path / "data", tmp_path / "out", **options)
    names = {key.name for key in results["lits_kits"].values}
    assert names == {f"{network} on lits" for network in NETWORKS}
    results, _ = reproduce("qubiq_labels", tmp_path / "data", tmp_path / "out2")
    assert set(results["qubiq_labels"].values) == set(paper_values("qubiq_labels").values)
