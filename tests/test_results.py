"""docs/results.md: its commands are valid, and no sentence says more than the stored scores."""

import re
import shlex
import signal
import sys
from itertools import pairwise
from pathlib import Path

import make_figures
import numpy as np
import pytest
import result_files
import results_conclusions
import results_page
import results_study
from case_rows import CaseRow, rows_of, table_of
from doc_commands import Command, problem
from result_files import RESULTS, read_record, write_record, write_scores
from results_claims import QUESTIONS, Item, Question, asked, claims_text, sentence
from results_tables import DIFFERENCES, NETWORKS, SCORES_SHOWN, Cell, Effect, Results
from scipy.stats import ttest_1samp

from semidice.metrics import ScoreKey, higher_is_better
from semidice.recipes.grid import read_variants
from semidice.recipes.options import option_value
from semidice.recipes.recipe import shipped_files
from semidice.recipes.text import parse_yaml
from semidice.reproduce.conclusions import CONCLUSIONS, Verdict
from semidice.statistics import read_cases

DOCS = Path(__file__).parent.parent / "docs"
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


def test_seconds_of_stopped_calls_are_added_up(tmp_path, start):
    path = tmp_path / "seconds"
    code = (
        f"import sys; sys.path.insert(0, {str(DOCS)!r}); import results_study; from pathlib import Path; "
        f"results_study._timed([sys.executable, '-c', 'import time; time.sleep(600)'], Path({str(path)!r}))"
    )
    process = start("-c", code)
    process.wait_until(lambda: path.is_file() and float(path.read_text() or 0) >= 1)
    process.send_signal(signal.SIGINT)
    assert process.end().code != 0
    first = float(path.read_text())
    assert first >= 1
    seconds, code = results_study._timed([sys.executable, "-c", "raise SystemExit(3)"], path)
    assert seconds > first
    assert code == 3


def write_study(folder, name, *, num_cases=30, gains=None, seed=1):
    """Random scores of all methods of a study; gains: what a method has more than the others, by its name."""
    study, rng = results_study.STUDIES[name], np.random.default_rng(seed)
    variants = [parse_yaml(shipped_files()[grid], grid)["variants"] for grid in study.grids]
    methods = [method for each in variants for method in each]
    files = {name: (methods, results_study.DATA[study.data].metrics)}
    if study.decided:
        rules = [f"{method}, {rule}" for method in study.decided for rule in ("argmax", *results_study.RULES)]
        files[f"{name}_decisions"] = (rules, ("dice_score", "volume_error"))
    level = rng.normal(0.6, 0.1, num_cases)
    for file, (names, metrics) in files.items():
        rows = [
            CaseRow(f"c{case}", f"p{case // 2}", case % 5, method, "mean", metric, value, seed)
            for method in names
            for metric in metrics
            for seed in range(results_study.NUM_SEEDS)
            for case, value in enumerate(
                (level + rng.normal(0, 0.02, num_cases) + (gains or {}).get(method, 0)).tolist()
            )
        ]
        write_scores(table_of(rows), folder / f"{file}.parquet")
    record = results_study._record(study, SETTINGS, 60.0)
    write_record(record, folder / f"{name}.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of two studies: in one, uniform is higher by 0.1 in every score; in the other all are equal."""
    folder = tmp_path_factory.mktemp("results")
    write_study(folder, "labels", gains={"uniform": 0.1})
    # a seed without a difference that is significant by chance
    write_study(folder, "bandwidth", seed=2)
    return Results(folder)


def test_a_record_is_read_as_it_was_written(made):
    study = results_study.STUDIES["labels"]
    record = read_record(made.folder / "labels.json")
    assert record.command == results_study.shown_command(study, SETTINGS)
    epochs = results_study.DATA["lidc"].epochs
    assert (record.seeds, record.folds, record.epochs, record.seconds) == (3, 5, epochs, 60.0)


CLAUSE = re.compile(r"(better in|worse in|no difference was found in) (.*?) \(p ([=<≤≥]) ([\d.]+)\)")
FOUND = re.compile(r"(?:^|, | and )([A-Za-z][\w -]*?) ([+−]?[\d.]+)(?: to ([+−]?[\d.]+))?(?=$|, | and )")


def assert_sentence_is_true(line, question, folder):
    """The words of a sentence against the stored scores, by a t-test over patients."""
    change, _, answer = line.removeprefix("- ").partition(": ")
    assert change == question.change
    columns = read_cases(folder / f"{DIFFERENCES[question.table].file}.parquet")
    kinds, said = set(), []
    for kind, text, relation, p in CLAUSE.findall(answer):
        kinds.add(kind)
        if kind == "no difference was found in":
            assert relation in "=≥"
            assert float(p) >= 0.05
        else:
            assert relation in "=<≤"
            assert float(p) < 0.05
        for name, *ends in FOUND.findall(text):
            items = [item for item in question.items if name in (item.name, SCORES_SHOWN[item.metric].name)]
            assert items, name
            said += items
            assert_ends_are_true([end for end in ends if end], items, kind, columns)
    # every difference is named once
    assert sorted(said) == sorted(question.items)
    assert f"(#{question.section})" in line
    return kinds


def assert_ends_are_true(ends, items, kind, columns):
    """The numbers of one score: the lowest and the highest difference of the items."""
    differences = []
    for item in items:
        metric = item.metric
        difference, single_p = patient_test(columns, item, metric)
        is_share = (columns["unit"][columns["metric"] == metric] == "share").all()
        differences.append(difference * (100 if is_share else 1))
        if kind != "no difference was found in":
            assert (kind == "better in") == ((difference > 0) == higher_is_better(metric))
            assert single_p < 0.05
    decimals = len(ends[0].partition(".")[2])
    shown = [float(end.replace("−", "-")) for end in ends]
    assert {*shown} == {round(min(differences), decimals), round(max(differences), decimals)}
    assert all(end[0] in "+−" for end in ends if float(end.strip("+−")))


def patient_test(columns, item, metric):
    """Mean difference over cases of the means over seeds, and p of the patients' sums."""
    columns = columns[columns["metric"] == metric]
    methods, patients, cases, values = (
        columns[name].to_numpy() for name in ("method", "patient", "case", "value")
    )
    _, first, number = np.unique(cases, return_index=True, return_inverse=True)

    def of_cases(method):
        chosen = methods == method
        return np.bincount(number[chosen], values[chosen]) / np.bincount(number[chosen])

    difference = of_cases(item.method) - of_cases(item.baseline)
    sums = np.bincount(np.unique(patients[first], return_inverse=True)[1], difference)
    return difference.mean(), ttest_1samp(sums, 0).pvalue


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.change)
def test_a_question_asks_for_cells_of_its_table(question):
    _, pairs, metrics = DIFFERENCES[question.table]
    assert {(item.method, item.baseline) for item in question.items} <= set(pairs)
    assert {item.metric for item in question.items} <= set(metrics)


def sentences(text):
    return {line[2:].partition(": ")[0]: line for line in text.splitlines() if line.startswith("- ")}


def test_every_sentence_of_what_we_learned_follows_from_the_stored_scores():
    lines = sentences(make_figures.table_in((DOCS / "results.md").read_text(), "what_we_learned"))
    questions = {question.change: question for question in asked(Results(RESULTS))}
    assert lines.keys() == questions.keys()
    for change, line in lines.items():
        assert_sentence_is_true(line, questions[change], RESULTS)


@pytest.mark.parametrize(
    ("words", "table", "method", "baseline", "outcomes"),
    [
        (
            "nearer to the single raters and better in the CRPS of volumes",
            *("labels_differences", "uniform", "majority_sdl"),
            dict.fromkeys(
                [
                    *("calibration_error", "rater_calibration_error", "binarized_dice_score"),
                    *("generalised_energy_distance", "volume_crps_error"),
                ],
                "better",
            ),
        ),
        (
            "Dice against the majority shows no difference",
            *("labels_differences", "uniform", "majority_sdl"),
            {"dice_score": "no difference"},
        ),
        (
            "with cross entropy alone the mean has the worse ECE",
            *("label_alone_differences", "uniform_ce", "majority_ce"),
            {"calibration_error": "worse"},
        ),
        (
            "a label smoothed everywhere is worse in Dice and ECE",
            *("labels_differences", "smoothing", "majority_sdl"),
            {"dice_score": "worse", "calibration_error": "worse"},
        ),
        (
            "one smoothed at boundaries alone has the better rater ECE",
            *("smoothing_differences", "smoothing_boundary", "majority"),
            {"rater_calibration_error": "better"},
        ),
        (
            "Two raters are already better than one in BDice and ECE",
            *("raters_differences", "raters_2_mean", "raters_1"),
            {"binarized_dice_score": "better", "calibration_error": "better"},
        ),
        (
            "fit the rule that makes masks",
            *("decisions_differences", "uniform, fitted", "uniform, argmax"),
            {"volume_error": "better", "dice_score": "no difference"},
        ),
        (
            "calibrate the teacher with a temperature",
            *("distillation_differences", "small_temperature", "small_hard"),
            {"dice_score": "better", "calibration_error": "better"},
        ),
    ],
)
def test_the_answer_in_short_follows_from_the_tables_of_the_page(words, table, method, baseline, outcomes):
    page = (DOCS / "results.md").read_text()
    answer = page.partition("## What we learned")[2].partition("<!--")[0]
    assert words in " ".join(answer.split())
    found = shown_outcomes(page, table, method, baseline)
    assert outcomes.items() <= found.items()


def shown_outcomes(page, table, method, baseline):
    """What a row of a table of differences says of each score: bold is significant, arrows are directions."""
    header, _, *rows = (
        line.strip("| ").split(" | ") for line in make_figures.table_in(page, table).splitlines()
    )
    (cells,) = [row[1:] for row in rows if row[0] == f"{method} − {baseline}"]
    found = {}
    for heading, cell, metric in zip(header[1:], cells, DIFFERENCES[table].metrics, strict=True):
        assert heading.startswith(SCORES_SHOWN[metric].name)
        is_better = cell.strip("*")[0] == ("+" if heading.endswith("↑") else "−")
        found[metric] = ("better" if is_better else "worse") if cell.startswith("**") else "no difference"
    return found


# what an answer may call better only if every score of the kind is
KINDS = {
    "better calibrated": lambda metric: metric.endswith("calibration_error"),
    "nearer to the single raters": lambda metric: metric.startswith(("rater_", "generalised_")),
    "better in volumes": lambda metric: metric.startswith("volume_") and "coverage" not in metric,
}


def is_better(columns, item, metric):
    difference, p = patient_test(columns, item, metric)
    return (difference > 0) == higher_is_better(metric) and p < 0.05


@pytest.mark.parametrize("words", KINDS)
def test_the_answer_in_short_calls_a_kind_of_scores_better_only_if_each_of_them_is(words):
    answer = " ".join((DOCS / "results.md").read_text().partition("## What we learned")[2].split())
    columns = read_cases(RESULTS / "labels.parquet")
    item = Item("uniform", "majority_sdl", "")
    metrics = [metric for metric in columns["metric"].unique() if KINDS[words](metric)]
    assert len(metrics) == 2
    # two numbers of volumes: the CRPS is better, and the error of masks is not
    assert all(is_better(columns, item, metric) for metric in metrics) == (words != "better in volumes")
    assert (words in answer.partition("<!--")[0]) == (words != "better in volumes")


@pytest.mark.parametrize("file", [path.stem for path in sorted(RESULTS.glob("*.parquet"))])
def test_every_mean_of_the_page_is_the_mean_of_the_stored_scores(file):
    table = make_figures.table_in((DOCS / "results.md").read_text(), f"{file}_means")
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


def test_kde_is_better_than_a_temperature_in_no_score():
    page = (DOCS / "results.md").read_text()
    for net in NETWORKS:
        found = shown_outcomes(page, "distillation_steps", f"{net}_kde", f"{net}_temperature")
        assert len(found) == 4
        assert "better" not in found.values()


def test_a_sentence_says_better_worse_or_that_no_difference_was_found(made):
    text = claims_text(made)
    lines = sentences(text)
    said = {
        question.table: assert_sentence_is_true(lines[question.change], question, made.folder)
        for question in (asked(made)[0], asked(made)[-1])
    }
    # a gain in every score is better in Dice and worse in errors
    assert said["labels_differences"] == {"better in", "worse in"}
    assert said["bandwidth_differences"] == {"no difference was found in"}
    weighed, undecided = (text.index(f"**{name}") for name in ("To be weighed", "Not decided"))
    assert weighed < text.index(asked(made)[0].change) < undecided < text.index(asked(made)[-1].change)


def test_a_false_sentence_is_detected(made):
    question = asked(made)[-1]
    line = sentences(claims_text(made))[question.change]
    assert_sentence_is_true(line, question, made.folder)
    wrong_number = re.sub(r"Dice [+−]?[\d.]+", "Dice −9.99", line)
    for wrong in (
        line.replace("no difference was found in", "better in"),
        line.replace("found in Dice ", "found in Dice at 1e-3 "),
        wrong_number,
        line.replace(" and ECE", " and NLL"),
    ):
        assert wrong != line
        with pytest.raises(AssertionError):
            assert_sentence_is_true(wrong, question, made.folder)


def test_a_sentence_names_the_items_of_a_score_that_do_not_agree():
    items = tuple(
        Item(method, "b", metric, f"of {method}")
        for metric in ("dice_score", "calibration_error")
        for method in "ac"
    )
    question = Question("A change", "labels_differences", "x", items)

    def said(*values):
        effects = [
            Effect(item.method, item.baseline, ScoreKey(item.metric), *value)
            for item, value in zip(items, values, strict=True)
        ]
        return sentence(question, effects)

    assert said((0.01, 0, 0, 0.01), (0.02, 0, 0, 0.0201), (-0.001, 0, 0, 0.01), (0.001, 0, 0, 0.5)) == (
        "- A change: better in Dice +1.00 to +2.00 and ECE of a −0.100 (p ≤ 0.021); "
        "no difference was found in ECE of c +0.100 (p = 0.500) ([table](#x))."
    )
    assert said((-0.01, 0, 0, 0.0001), *[(0.0, 0, 0, 0.05)] * 3) == (
        "- A change: worse in Dice of a −1.00 (p < 0.001); "
        "no difference was found in Dice of c 0.00 and ECE 0.000 (p = 0.050) ([table](#x))."
    )


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


def test_the_page_names_every_part_and_says_what_was_not_run(made, tmp_path):
    page = (DOCS / "results.md").read_text()
    parts = results_page.makers(made)
    for name in parts:
        make_figures.table_in(page, name)
    assert parts["systems_means"]() == parts["systems_run"]() == "Not run."
    header, *rows = parts["bandwidth_means"]()
    assert [row[0] for row in rows][:2] == ["teacher", "no_kde"]
    assert header[1] == "Dice (%) ↑"
    assert len(parts["conclusions"]().splitlines()) == 2 + 29
    assert parts["conclusions"]().count("| not run |") == 11
    results_page.write_page(made, tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text()
    for name, part in parts.items():
        assert make_figures.table_in(written, name) == make_figures.part_text(part())
    pictures = list((tmp_path / "figures").iterdir())
    assert [path.name for path in pictures] == ["results_labels.png"]
    assert pictures[0].stat().st_size < make_figures.MAX_BYTES


def test_every_conclusion_of_the_paper_is_checked_or_not_testable():
    for table, judges in CONCLUSIONS.items():
        for name in judges:
            has_rows = table in results_conclusions.counterparts("kde")
            assert has_rows or name in results_conclusions.NOT_TESTABLE
    known = [name for judges in CONCLUSIONS.values() for name in judges]
    assert {*results_conclusions.CHECKS, *results_conclusions.NOT_TESTABLE} <= set(known)
    assert not results_conclusions.CHECKS.keys() & results_conclusions.NOT_TESTABLE.keys()


@pytest.mark.parametrize(
    ("judged", "effects", "expected"),
    [
        ("holds", [(0.1, 0.01), (0.1, 0.01)], "**holds**"),
        ("holds", [(0.1, 0.01), (0.1, 0.06)], "tendency"),
        ("tendency", [(0.1, 0.06)], "tendency"),
        ("fails", [(0.1, 0.01), (-0.1, 0.06)], "fails, not significantly"),
        ("fails", [(0.1, 0.01), (-0.1, 0.01)], "**fails**"),
        ("unknown", [], "undecided"),
        ("holds", [], "**holds**"),
    ],
)
def test_a_conclusion_holds_or_fails_only_significantly(judged, effects, expected):
    made = [Effect("a", "b", ScoreKey("dice_score"), difference, 0, 0, p) for difference, p in effects]
    assert results_conclusions.outcome(Verdict(judged, ""), made) == expected


def test_stored_results_are_of_known_studies_and_small():
    for path in RESULTS.glob("*"):
        study = path.stem.removesuffix("_decisions")
        assert study in results_study.STUDIES
        assert path.suffix in (".parquet", ".json")
        assert path.stat().st_size < result_files.MAX_BYTES
        record = read_record(RESULTS / f"{study}.json")
        assert problem(Command(record.command, complete=True)) is None
        assert "/" not in record.command
        assert record.epochs == results_study.DATA[results_study.STUDIES[study].data].epochs


@pytest.mark.parametrize(
    ("study", "method", "other", "same"),
    [
        ("systems", "majority", "labels", "majority"),
        ("systems", "uniform", "labels", "uniform"),
        ("raters", "raters_4_random", "labels", "random"),
        ("raters", "raters_4_mean", "labels", "uniform"),
        ("bandwidth", "teacher", "distillation", "teacher"),
        ("bandwidth", "no_kde", "distillation", "small_dml"),
        ("bandwidth", "h1e-3", "distillation", "small_kde"),
    ],
)
def test_a_training_has_the_same_scores_whatever_else_runs_on_the_gpu(study, method, other, same):
    def scores(study, method):
        columns = read_cases(RESULTS / f"{study}.parquet").query("method == @method")
        keys = zip(columns["seed"], columns["case"], columns["metric"], strict=True)
        return dict(zip(keys, columns["value"].tolist(), strict=True))

    expected = scores(other, same)
    num_cases, data = {"labels": (573, "lidc"), "distillation": (260, "hippocampus")}[other]
    assert len(expected) == results_study.NUM_SEEDS * num_cases * len(results_study.DATA[data].metrics)
    assert scores(study, method) == expected
