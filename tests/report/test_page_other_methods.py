"""Methods of other tools on the page: only their scores are known."""

import re
from functools import partial

import numpy as np
import pytest
from case_rows import CaseRow, rows_of, select, table_of
from pages import NAMES, shown, tables_of
from prepared import make_prepared
from start import refused, semidice
from synthetic_runs import METRICS, write_runs

from semidice.report.runs import read_cases_of
from semidice.statistics import compare_cases, concatenate, read_cases, write_cases


@pytest.fixture
def small(tmp_path):
    """Two finished runs on six images."""
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    return dataset, write_runs(dataset, tmp_path / "runs", methods=NAMES[:2], metrics=METRICS[:3])


def scores_of_tool(path, dataset, method, *, shift=0.1, cases=None):
    """Write a table as `evaluate --predictions` does: Dice and Brier error of every scan, without folds."""
    rng = np.random.default_rng(len(method))
    rows = [
        CaseRow(cases[number] if cases else scan.name, scan.patient, -1, method, class_name, metric, value)
        for number, scan in enumerate(dataset.manifest.scans)
        for metric, class_name, value in (
            ("dice_score", "mean", float(0.7 + shift * rng.random())),
            ("brier_error", "all", float(0.1 * rng.random())),
        )
    ]
    write_cases(table_of(rows), path)
    return path


def test_a_table_of_another_tool_is_compared_with_the_runs_and_has_no_curves_or_pictures(small, tmp_path):
    dataset, runs = small
    tool = scores_of_tool(tmp_path / "tool.parquet", dataset, "other tool")
    out = tmp_path / "report.html"
    done = semidice("report", tmp_path / "runs", "--cases", tool, "-o", out)
    assert done.code == 0, done.err
    (rows,) = tables_of(out)["cases"]
    assert rows[0] == ["case", "patient", "fold", *NAMES[:2], "other tool"]
    scores = read_cases(tool).pipe(select, metric="dice_score").pipe(rows_of)
    expected = {row.case: shown(row.value, "dice_score") for row in scores}
    assert {row[0]: row[5] for row in rows[1:]} == expected
    # the fold of a case is that of the runs
    assert {row[2] for row in rows[1:]} == {"0", "1"}
    text = out.read_text(encoding="utf-8")
    assert "Of other tool, only scores are known" in text
    assert "by a network of the runs that never saw its patient" in text
    assert "probability of other tool" not in text
    assert "other tool: ECE" not in text
    pairs = (tmp_path / "report_files" / "pairs_dice_score.csv").read_text()
    comparison = compare_cases(joined(runs, read_cases(tool)), "dice_score")
    pair = comparison.pairs.loc[NAMES[0], "other tool"]
    for name in ("difference", "low", "high", "p"):
        assert repr(float(pair[name])) in pairs
    assert "other tool" in (tmp_path / "report_files" / "means.csv").read_text()


def methods_of(page):
    """The methods of its case table."""
    return tables_of(page)["cases"][0][0][3:]


def joined(runs, *tables):
    return concatenate([*(read_cases(run.cases) for run in runs.values()), *tables])


def test_tables_of_other_tools_are_reported_without_a_run(small, tmp_path):
    dataset, _ = small
    tables = [scores_of_tool(tmp_path / f"{name}.csv", dataset, name) for name in ("one", "another")]
    out = tmp_path / "report.html"
    arguments = [part for table in tables for part in ("--cases", table)]
    refused(semidice("report", *arguments, "-o", out), "--dataset")
    done = semidice("report", *arguments, "--dataset", dataset.folder.path, "-o", out)
    assert done.code == 0, done.err
    assert methods_of(out) == ["one", "another"]
    sections = re.findall('<section id="(.*?)"', out.read_text(encoding="utf-8"))
    assert not {"images", "calibration", "training"} & set(sections)
    assert "never saw its patient" not in out.read_text(encoding="utf-8")


def test_a_report_of_nothing_is_refused(tmp_path):
    refused(semidice("report", "-o", tmp_path / "report.html"), "name a run folder", "--cases")


def test_other_methods_of_a_comparison_are_found_in_its_table(small, tmp_path):
    dataset, runs = small
    tool = read_cases(scores_of_tool(tmp_path / "tool.csv", dataset, "tool"))
    # `compare` writes the methods of runs and of other tools into one table
    write_cases(joined(runs, tool), tmp_path / "runs" / "cases.parquet")
    out = tmp_path / "report.html"
    assert semidice("report", tmp_path / "runs", "-o", out).code == 0
    assert methods_of(out) == [*NAMES[:2], "tool"]
    # a table that is named replaces the one that was found
    newer = scores_of_tool(tmp_path / "newer.csv", dataset, "tool", shift=0.2)
    assert semidice("report", tmp_path / "runs", "--cases", newer, "-o", out).code == 0
    expected = read_cases(newer).pipe(select, metric="dice_score")["value"].tolist()
    assert [row[5] for row in tables_of(out)["cases"][0][1:]] == [
        shown(each, "dice_score") for each in expected
    ]
    only = tmp_path / "only"
    only.mkdir()
    write_cases(tool, only / "cases.parquet")
    assert semidice("report", only, "--dataset", dataset.folder.path, "-o", out).code == 0
    assert methods_of(out) == ["tool"]


def test_tables_that_do_not_fit_the_runs_are_named(small, tmp_path):
    dataset, _ = small
    taken = scores_of_tool(tmp_path / "taken.csv", dataset, NAMES[0])
    foreign = scores_of_tool(tmp_path / "foreign.csv", dataset, "b", cases=[f"x{n}" for n in range(6)])
    swapped = [scan.name for scan in dataset.manifest.scans][::-1]
    patients = scores_of_tool(tmp_path / "patients.csv", dataset, "c", cases=swapped)
    for path, words in (
        (taken, [NAMES[0], "semidice evaluate --name"]),
        (foreign, ["6 cases (x0"]),
        (patients, ["scan000", "patient005"]),
        (tmp_path / "missing.csv", ["no case table"]),
    ):
        done = semidice("report", tmp_path / "runs", "--cases", path, "-o", tmp_path / "report.html")
        refused(done, str(path), *words)


def test_a_table_of_another_dataset_with_the_same_names_is_refused(small, tmp_path):
    dataset, runs = small
    tool = scores_of_tool(tmp_path / "tool.csv", dataset, "tool")
    own = read_cases(next(iter(runs.values())).cases)["dataset"].unique()
    assert len(own) == 1
    for fingerprint, is_refused in ((own[0], False), ("0123456789abcdef", True)):
        write_cases(read_cases(tool).assign(dataset=fingerprint), tool)
        read = partial(read_cases_of, dataset, tool, "semidice evaluate")
        if is_refused:
            refused(read, "tool.csv", "another dataset", str(dataset.folder.path), "semidice evaluate")
        else:
            assert len(read()) == 12


def test_a_table_without_patients_gets_those_of_the_dataset(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=2)
    names = [scan.name for scan in dataset.manifest.scans]
    rows = "".join(f"{name},tool,dice_score,0.5\n" for name in names)
    (tmp_path / "tool.csv").write_text(f"case,method,metric,value\n{rows}")
    table = read_cases_of(dataset, tmp_path / "tool.csv", "semidice evaluate")
    assert table["patient"].tolist() == [scan.patient for scan in dataset.manifest.scans]
    assert table["patient"].nunique() == 3
