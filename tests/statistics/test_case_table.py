"""The case table: its columns, exact writing and reading of files, pairing, and messages that name a row."""

import math

import pandas as pd
import pytest
from case_rows import CaseRow, rows_of, table_of
from hypothesis import given
from hypothesis import strategies as st
from start import refused

from semidice.statistics import COLUMNS, NEEDED, case_table, concatenate, paired, read_cases, write_cases
from semidice.statistics.cases import in_order, with_scores

FORMATS = [".csv", ".parquet"]
each_format = pytest.mark.parametrize("suffix", FORMATS)


def row(case="a", patient=None, fold=0, method="DML1", class_name="mean", metric="dice_score", value=0.9):
    return CaseRow(case, patient or case, fold, method, class_name, metric, value)


def small_table():
    return table_of(
        row(case=case, method=method, metric=metric, value=value)._replace(seed=seed)
        for case, value in (("b", 0.1 + 0.2), ("a", math.nan), ('odd, "name"\nä', 1e-300), ("=1+1", 1.0))
        for method, seed in (("SDL", -1), ("DML1", 0), ("DML1", 7))
        for metric in ("dice_score", "calibration_error")
    )


@each_format
def test_a_written_table_is_read_as_it_was_and_pandas_reads_the_same(tmp_path, suffix):
    table, path = in_order(small_table()), tmp_path / f"cases{suffix}"
    write_cases(small_table(), path)
    pd.testing.assert_frame_equal(read_cases(path), table, check_exact=True)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    if suffix == ".parquet":
        pd.testing.assert_frame_equal(pd.read_parquet(path), table, check_exact=True)
        assert list(pd.read_parquet(path)) == list(COLUMNS)


@each_format
def test_the_same_rows_in_another_order_give_the_same_bytes(tmp_path, suffix):
    for name, table in (("first", small_table()), ("second", small_table()[::-1])):
        write_cases(table, tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes()


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_a_csv_keeps_every_bit_of_a_value(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("csv") / "cases.csv"
    write_cases(table_of([row(value=value, metric="volume_error")]), path)
    assert repr(read_cases(path)["value"].item()) == repr(value)


@each_format
def test_an_empty_table_can_be_written_and_read(tmp_path, suffix):
    write_cases(table_of([]), tmp_path / f"cases{suffix}")
    assert len(read_cases(tmp_path / f"cases{suffix}")) == 0


def test_a_csv_of_another_tool_needs_four_columns_in_any_order(tmp_path):
    (tmp_path / "cases.csv").write_text(
        "value,metric,case,method\n0.5,dice_score,007,tool\n,dice_score,8,tool\n"
    )
    first, second = rows_of(read_cases(tmp_path / "cases.csv"))
    assert first == CaseRow("007", "007", -1, "tool", "mean", "dice_score", 0.5, -1, "share", "scan")
    assert math.isnan(second.value)
    # a frame with numbers for names, and any index
    frame = pd.DataFrame({"case": [7], "method": "tool", "metric": "hausdorff_error", "value": 3}, index=[4])
    (made,) = rows_of(case_table(frame))
    assert (made.case, made.value, made.unit) == ("7", 3.0, "mm")


GOOD = {"case": "a", "method": "m", "metric": "dice_score", "value": 0.5}
WRONG = {
    "a column that lacks": ([{"case": "a", "metric": "x", "value": 1}], ["lacks", "method"]),
    "a column that is misspelt": ([GOOD | {"pateint": "p"}], ["pateint", "patient"]),
    "a share in percent": ([GOOD, GOOD | {"case": "b", "value": 87}], ["case b", "87", "by 100"]),
    "a value in words": ([GOOD, GOOD | {"value": "high"}], ["value", "'high'"]),
    "half a fold": ([GOOD | {"fold": 0.5}], ["fold", "0.5", "row 0"]),
    "a seed of -2": ([GOOD | {"seed": -2}], ["seed", "-2"]),
    "an empty case": ([GOOD, GOOD | {"case": ""}], ["case", "empty", "row 1"]),
    "a case in numbers": ([GOOD | {"case": 1.5}], ["case", "strings"]),
    "a score twice": ([GOOD, GOOD | {"value": 0.6}], ["row 1", "twice", "case a"]),
    "a case of two patients": (
        [GOOD | {"patient": "p"}, GOOD | {"method": "b", "patient": "q"}],
        ["case a", "patient q", "row 1"],
    ),
    "a case in two folds": (
        [GOOD | {"fold": n, "seed": n} for n in (0, 1)],
        ["fold 1", "another fold"],
    ),
    "a metric that names a folder": ([GOOD | {"metric": "a/b"}], ["a/b", "slash", "row 0"]),
    "a level of its own": ([GOOD | {"per": "volume"}], ["scan or slice", "volume"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_table_is_refused_with_its_row(tmp_path, mistake):
    rows, words = WRONG[mistake]
    refused(lambda: case_table(rows, "my.csv"), "my.csv", *words)


def test_a_csv_that_would_be_misread_is_refused(tmp_path):
    path = tmp_path / "cases.csv"
    for text in ("case,method,metric,value\na,m,dice_score,0.5,0.6\n", "case;method;metric;value\na;m;x;1\n"):
        path.write_text(text)
        refused(lambda: read_cases(path), str(path))
    assert set(NEEDED) < set(COLUMNS)


def test_a_case_may_have_another_fold_under_another_method():
    assert len(table_of([row(fold=0), row(fold=3, method="SDL")])) == 2


def test_added_scores_replace_those_of_the_same_method_score_and_level():
    old = table_of([row(value=0.1), row(value=0.2)._replace(per="slice"), row(method="SDL", value=0.3)])
    new = table_of([row(value=0.4), row(case="b", value=0.5)])
    found = [(each.case, each.method, each.per, each.value) for each in rows_of(with_scores(old, new))]
    assert sorted(found) == [
        ("a", "DML1", "scan", 0.4),
        ("a", "DML1", "slice", 0.2),
        ("a", "SDL", "scan", 0.3),
        ("b", "DML1", "scan", 0.5),
    ]


# pairing


def test_pairing_sorts_cases_and_keeps_the_order_of_methods():
    table = table_of(
        row(case=case, patient=f"p{case}", method=method, metric="volume_error", value=value)
        for case, method, value in (
            ("b", "SDL", 1.0),
            ("b", "DML1", 2.0),
            ("a", "DML1", 4.0),
            ("a", "SDL", 3.0),
        )
    )
    scores = paired(table, "volume_error")
    assert (scores.cases, scores.patients, scores.methods) == (("a", "b"), ("pa", "pb"), ("SDL", "DML1"))
    assert scores.values.tolist() == [[3, 4], [1, 2]]
    assert paired(table, "volume_error", methods=["DML1"]).values.tolist() == [[4], [2]]


def test_a_missing_or_nan_score_is_an_error_unless_the_case_is_dropped():
    rows = [row(case=case, method=method, value=0.5) for case in "abc" for method in ("SDL", "DML1")]
    rows[2] = rows[2]._replace(value=math.nan)
    table = table_of(rows[:-1])
    refused(lambda: paired(table, "dice_score"), "2 of 3 cases, first for case b")
    scores = paired(table, "dice_score", drop=True)
    assert (scores.cases, scores.num_dropped) == (("a",), 2)


def test_units_and_levels_are_scores_of_their_own():
    rows = [row(metric="surface_dice_score")._replace(unit=f"share within {mm} mm") for mm in (1, 2)]
    rows += [row(value=0.1), row(value=0.2)._replace(per="slice"), row(class_name="lesion", value=0.3)]
    table = table_of(rows)
    refused(lambda: paired(table, "dice_score"), "several scores")
    refused(lambda: paired(table, "surface_dice_score"), "within 2 mm")
    assert paired(table, "surface_dice_score within 2 mm").values.item() == 0.9
    assert paired(table, "dice_score per slice").values.item() == 0.2
    scans = table[table["per"] == "scan"]
    assert paired(scans, "dice_score").values.item() == 0.1
    assert paired(scans, "dice_score", "lesion").values.item() == 0.3
    refused(lambda: paired(scans, "dice_score", methods=["SDL"]), "no dice_score", "SDL")


def test_scores_of_two_datasets_whose_cases_have_the_same_names_are_not_compared():
    rows = [GOOD | {"method": method, "dataset": name} for method, name in ("ax", "by", ("c", ""))]
    table = case_table(rows)
    refused(lambda: paired(table, "dice_score"), "case a", "two datasets")
    assert paired(table, "dice_score", methods=["a", "c"]).values.tolist() == [[0.5, 0.5]]


def test_parts_of_a_table_can_be_joined_again_but_not_twice():
    table = small_table()
    parts = [part for _, part in table.groupby("method")]
    pd.testing.assert_frame_equal(in_order(concatenate(parts)), in_order(table))
    refused(lambda: concatenate([table, parts[0]]), "scored twice")
