"""Rules and volumes: every number equals the files of the run, and what would be misread is refused."""

import csv

import numpy as np
import pytest
from case_rows import CaseRow, select, table_of
from decision_files import RULES, write_decision_files
from pages import NAMES, RESAMPLES, build, tables_of
from prepared import make_prepared
from start import refused
from synthetic_runs import write_runs

from semidice.report.decisions import INTERVALS, compare_rules, read_volumes
from semidice.statistics import compare_cases, read_cases, write_cases


@pytest.fixture
def small(tmp_path):
    """A finished run on six images, with decisions and volumes."""
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1, absent=True)
    (run,) = write_runs(dataset, tmp_path / "runs", methods=NAMES[2:3], metrics=["dice_score"]).values()
    write_decision_files(dataset, run)
    return dataset, run


def page_of(dataset, run, tmp_path, **options):
    return build({NAMES[2]: run}, dataset, tmp_path / "report.html", **options)


def written(built, name):
    with (built.out.parent / "report_files" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def step_down(p):
    """Holm's correction, one p-value after the other."""
    corrected, largest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, value * (len(p) - rank))
        corrected[name] = min(1.0, largest)
    return corrected


@pytest.mark.parametrize("metric", ["dice_score", "volume_error"])
def test_every_number_on_rules_equals_the_case_table(built, metric):
    name = metric if metric == "dice_score" else f"{metric}_voxels"
    rows = {(row["method"], row["rule"]): row for row in written(built, f"decisions_{name}.csv")}
    assert set(rows) == {(name, rule) for name in NAMES for rule in RULES}
    for name, run in built.runs.items():
        table = read_cases(run.decisions)
        values = {rule: table.pipe(select, metric=metric, method=rule)["value"].to_numpy() for rule in RULES}
        alone = {}
        for rule in RULES[1:]:
            pair = compare_cases(table, metric, methods=["argmax", rule], num_resamples=RESAMPLES).pairs
            alone[rule] = pair.loc[rule, "argmax"].p
        for rule, p in step_down(alone).items():
            row = rows[name, rule]
            assert float(row["p"]) == pytest.approx(p, rel=1e-12)
            assert float(row["mean"]) == pytest.approx(values[rule].mean(), rel=1e-12)
            change = (values[rule] - values["argmax"]).mean()
            assert float(row["difference"]) == pytest.approx(change, rel=1e-9)
            low, high = float(row["low"]), float(row["high"])
            assert low <= float(row["difference"]) <= high
            assert (p < 0.05) == (low > 0 or high < 0) == (row["significant"] == "True")


def test_the_page_marks_the_rules_that_are_best_and_those_that_change_something(built):
    (dice, volume) = tables_of(built.out)["decisions"]
    rows = {(row["method"], row["rule"]): row for row in written(built, "decisions_dice_score.csv")}
    for method, rule, mean, difference, _ in dice[1:]:
        row = rows[method, rule]
        assert mean.startswith(f"{100 * float(row['mean']):.2f} [")
        assert ("★" in mean) == (row["best"] == "True")
        assert ("★" in difference) == (row["significant"] == "True")
    assert volume[0][2].startswith("volume_error (voxels) ↓")


def rules_of(values, *, metric="dice_score"):
    """A table of 12 cases; values: by rule, the score of a case number."""
    return table_of(
        CaseRow(f"c{case}", f"c{case}", 0, rule, "mean", metric, float(score(case)))
        for rule, score in values.items()
        for case in range(12)
    )


def plain(case):
    return 0.7 + 0.01 * case


def compared(values):
    (score,) = compare_rules({"a": rules_of(values)}, num_resamples=2000)
    return score, score.rows.set_index("rule")


def test_argmax_is_not_best_if_a_rule_is_better_and_a_worse_rule_is_not():
    score, rows = compared(
        {"argmax": plain, "dice": lambda c: plain(c) + 0.03, "nested": lambda c: plain(c) - 0.03}
    )
    assert rows.index[rows["best"]].tolist() == ["dice"]
    assert rows["better"].tolist() == [False, True, False]
    assert rows["significant"].tolist() == [False, True, True]
    assert score.rules == ["argmax", "dice", "nested"]


def test_an_interval_that_only_the_range_of_the_score_limits_has_no_end():
    # one case of twelve differs
    score, rows = compared({"argmax": plain, "dice": lambda case: plain(case) + 0.05 * (case == 3)})
    assert rows.loc["dice"].high == np.inf
    assert not rows.loc["dice"].significant
    assert "∞" in score.table().markdown()


def test_without_files_the_page_has_the_commands_that_write_them(small, tmp_path):
    dataset, run = small
    run.decisions.unlink()
    run.volumes.unlink()
    text = page_of(dataset, run, tmp_path).page.read_text(encoding="utf-8")
    assert "<code>semidice evaluate RUN --decide dice --decide fitted</code>" in text
    assert "<code>semidice evaluate RUN --interval 0.9</code>" in text


def test_a_table_of_rules_that_is_not_one_is_named(small, tmp_path):
    dataset, run = small
    table = read_cases(run.decisions)
    write_cases(table.pipe(select, method="fitted"), run.decisions)
    report = page_of(dataset, run, tmp_path)
    assert any("decisions.parquet" in notice and "argmax" in notice for notice in report.notices)
    write_cases(table.assign(case="x" + table["case"]), run.decisions)
    refused(lambda: page_of(dataset, run, tmp_path), "decisions.parquet", "6 cases (xscan000")


def rows_of(run):
    with run.volumes.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def covered_share(rows, low, high):
    shares = []
    for row in rows:
        drawn = [float(value) for name, value in row.items() if name.startswith("rater ") and value]
        shares.append(sum(float(row[low]) <= value <= float(row[high]) for value in drawn) / len(drawn))
    return sum(shares) / len(shares)


def test_coverage_and_width_equal_a_count_over_the_rows(built):
    for record in written(built, "volumes.csv"):
        rows = rows_of(built.runs[record["method"]])
        for kind, (low, high) in INTERVALS.items():
            width = sum(float(row[high]) - float(row[low]) for row in rows) / len(rows)
            assert float(record[f"width_{kind}"]) == pytest.approx(width)
            assert float(record[f"coverage_{kind}"]) == pytest.approx(covered_share(rows, low, high))
        assert (record["level"], record["unit"], record["num_cases"]) == ("0.9", "voxels", "14")


def test_without_a_correction_the_nested_interval_is_shown(small, tmp_path):
    dataset, run = small
    write_decision_files(dataset, run, corrected=False)
    (volumes,) = read_volumes({"a": run}, dataset)
    assert volumes.shown == INTERVALS["nested"]
    assert volumes.coverage(volumes.shown) == pytest.approx(covered_share(rows_of(run), "low", "high"))
    page_of(dataset, run, tmp_path)
    assert "| – |" in (tmp_path / "report_files" / "volumes.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("case,patient", "image,patient", ["case"]),
        ("scan003,patient003", "scan003,patient004", ["scan003", "patient004"]),
        ("scan003,", "scan009,", ["scan009"]),
        (",0.9,", ",high,", ["high"]),
    ],
)
def test_a_table_of_volumes_that_is_not_of_the_dataset_is_refused(small, old, new, words):
    dataset, run = small
    text = run.volumes.read_text()
    assert old in text
    run.volumes.write_text(text.replace(old, new, 1))
    refused(lambda: read_volumes({"a": run}, dataset), str(run.volumes), *words)


def test_tables_and_figures_of_both_panels_lie_next_to_the_page(small, tmp_path):
    dataset, run = small
    names = {file.name for file in page_of(dataset, run, tmp_path, figures=True).files}
    suffixes = (".csv", ".md", ".tex", ".png", ".svg")
    for stem in ("decisions_dice_score", "decisions_volume_error_voxels", "volumes"):
        assert {f"{stem}{suffix}" for suffix in suffixes} <= names
