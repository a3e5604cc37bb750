"""The case table: its schema, exact writing and reading of files, and messages that name what is wrong."""

import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semidice.metrics import CaseRow, CaseTable, concatenate, higher_is_better, read_cases, write_cases
from semidice.metrics.cases import COLUMNS

FORMATS = [".csv", ".parquet"]
each_format = pytest.mark.parametrize("suffix", FORMATS)


def row(case="a", patient=None, fold=0, method="DML1", class_name="mean", metric="dice_score", value=0.9):
    return CaseRow(case, patient or case, fold, method, class_name, metric, value)


def small_table():
    return CaseTable.from_rows(
        row(case=case, method=method, metric=metric, value=value)
        for case, value in (("b", 0.1 + 0.2), ("a", math.nan), ('odd, "name"\nä', 1e-300))
        for method in ("SDL", "DML1")
        for metric in ("dice_score", "calibration_error")
    )


def rows_equal(first, second):
    """Whether the rows are equal; NaN equals NaN."""
    return [list(map(repr, entry)) for entry in first] == [list(map(repr, entry)) for entry in second]


@each_format
def test_reading_a_written_table_gives_the_same_bits(tmp_path, suffix):
    table = small_table()
    write_cases(table, tmp_path / f"cases{suffix}")
    read_table = read_cases(tmp_path / f"cases{suffix}")
    assert rows_equal(read_table.rows(), table.sorted().rows())
    assert [path.name for path in tmp_path.iterdir()] == [f"cases{suffix}"]


@each_format
def test_the_same_rows_in_another_order_give_the_same_bytes(tmp_path, suffix):
    table = small_table()
    mixed = CaseTable.from_rows(reversed(list(table.rows())))
    for name, ordered in (("first", table), ("second", mixed)):
        write_cases(ordered, tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes()


@given(value=st.floats(allow_nan=True, allow_infinity=True))
def test_a_csv_keeps_every_bit_of_a_value(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("csv") / "cases.csv"
    write_cases(CaseTable.from_rows([row(value=value, metric="volume_error_ml")]), path)
    (read_row,) = read_cases(path).rows()
    assert repr(read_row.value) == repr(value)


@each_format
def test_an_empty_table_can_be_written_and_read(tmp_path, suffix):
    write_cases(CaseTable.from_rows([]), tmp_path / f"cases{suffix}")
    assert len(read_cases(tmp_path / f"cases{suffix}")) == 0


@each_format
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"cases{suffix}"
    write_cases(small_table(), path)
    before = path.read_bytes()

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_cases(CaseTable.from_rows([row()]), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(value=0.8)], "rows 0 and 1 score the same thing twice: case a, method DML1, class mean"),
        ([row(), row(patient="other", method="SDL")], "case a has two values of patient, a and other"),
        ([row(), row(fold=1, metric="iou_score")], "case a, method DML1 has two values of fold, 0 and 1"),
        ([row(case="b"), row(method="")], "column method is empty in row 1"),
        ([row(fold=-2)], "fold must be -1"),
    ],
)
def test_the_error_names_rows_that_contradict_each_other(rows, message):
    with pytest.raises(ValueError, match=message):
        CaseTable.from_rows(rows)


def test_a_case_may_have_another_fold_under_another_method():
    assert len(CaseTable.from_rows([row(fold=0), row(fold=3, method="SDL")])) == 2


HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the columns case, patient, .* lacks case, patient, fold"),
        ("case,patient,method,class,metric,value\n", "it lacks fold"),
        (HEADER + ",extra\n", "it has extra"),
        ("patient,case,fold,method,class,metric,value\n", "in this order; it has another order"),
        (
            f"{HEADER}\na,a,0,m,mean,dice_score,0.5\na,a,0,m,mean,iou_score,high\n",
            "line 3: value .* got 'high'",
        ),
        (f"{HEADER}\na,a,first,m,mean,dice_score,0.5\n", "line 2: fold must be a number; got 'first'"),
        (f"{HEADER}\na,a,0,m,mean,dice_score\n", "line 2: expected 7 cells, got 6"),
        (f"{HEADER}\na,a,0,m,mean,dice_score,1\na,a,0,m,mean,dice_score,1\n", "same thing twice"),
    ],
)
def test_the_error_names_a_wrong_csv_file_and_the_line(tmp_path, text, message):
    path = tmp_path / "cases.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_cases(path)
    assert str(path) in str(caught.value)


def test_the_error_names_a_wrong_parquet_file(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "cases.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        read_cases(path)
    parquet.write_table(pyarrow.table({"case": ["a"]}), path)
    with pytest.raises(ValueError, match="it lacks patient"):
        read_cases(path)
    columns = {name: ["a"] for name in COLUMNS} | {"fold": [0], "value": [None]}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match="empty cells: write NaN"):
        read_cases(path)
    newer = pyarrow.table(columns).replace_schema_metadata({"semidice_case_table": "2"})
    parquet.write_table(newer, path)
    with pytest.raises(ValueError, match="version 2; this semidice reads version 1"):
        read_cases(path)
    write_cases(small_table(), path)
    schema = parquet.read_schema(path)
    assert [str(schema.field(name).type) for name in ("case", "fold", "value")] == [
        "string",
        "int64",
        "double",
    ]


def test_other_file_types_are_refused(tmp_path):
    for operation in (lambda path: write_cases(small_table(), path), read_cases):
        with pytest.raises(ValueError, match=r"a \.parquet or a \.csv file; got .*cases\.xlsx"):
            operation(tmp_path / "cases.xlsx")


# pairing


def test_pairing_sorts_cases_and_keeps_the_order_of_methods():
    table = CaseTable.from_rows(
        row(case=case, patient=f"p{case}", method=method, metric="volume_error_ml", value=value)
        for case, method, value in (
            ("b", "SDL", 1.0),
            ("b", "DML1", 2.0),
            ("a", "DML1", 4.0),
            ("a", "SDL", 3.0),
        )
    )
    paired = table.paired("volume_error_ml")
    assert (paired.cases, paired.patients, paired.methods) == (("a", "b"), ("pa", "pb"), ("SDL", "DML1"))
    assert paired.values.tolist() == [[3, 4], [1, 2]]
    assert table.paired("volume_error_ml", methods=["DML1"]).values.tolist() == [[4], [2]]


def test_a_missing_or_nan_score_is_an_error_unless_the_case_is_dropped():
    rows = [row(case=case, method=method, value=0.5) for case in "abc" for method in ("SDL", "DML1")]
    rows[2] = rows[2]._replace(value=math.nan)
    table = CaseTable.from_rows(rows[:-1])
    with pytest.raises(ValueError, match="missing or NaN in 2 of 3 cases, first for case b and method SDL"):
        table.paired("dice_score")
    paired = table.paired("dice_score", missing="drop")
    assert (paired.cases, paired.num_dropped) == (("a",), 2)


def test_the_default_class_is_mean_if_the_metric_has_it_and_all_otherwise():
    table = CaseTable.from_rows(
        [
            row(class_name="lesion", value=0.1),
            row(value=0.2),
            row(class_name="all", metric="brier_error", value=0.3),
        ]
    )
    assert table.paired("dice_score").values.item() == 0.2
    assert table.paired("dice_score", class_name="lesion").values.item() == 0.1
    assert table.paired("brier_error").class_name == "all"
    with pytest.raises(ValueError, match="no hd95 of class 'all'; it has metrics dice_score, brier_error"):
        table.paired("hd95")
    with pytest.raises(ValueError, match="no dice_score of class 'mean' for SDL"):
        table.paired("dice_score", methods=["SDL"])


def test_selected_tables_can_be_concatenated_again():
    table = small_table()
    first, second = table.select(method="SDL"), table.select(method="DML1")
    assert len(first) == len(second) == 6
    assert rows_equal(concatenate([first, second]).sorted().rows(), table.sorted().rows())
    with pytest.raises(ValueError, match="same thing twice"):
        concatenate([table, first])
    with pytest.raises(ValueError, match=r"has columns case.*got 'klass'"):
        table.select(klass="mean")
    with pytest.raises(ValueError, match="at least one"):
        concatenate([])


def test_the_name_of_a_metric_tells_its_direction_or_raises_an_error():
    up = ["dice_score", "surface_dice_score", "jaccard_index"]
    down = ["calibration_error", "volume_error_ml", "hausdorff_error_mm", "negative_log_likelihood", "x_loss"]
    assert all(map(higher_is_better, up))
    assert not any(map(higher_is_better, down))
    with pytest.raises(ValueError, match="'hd95' does not say whether higher is better"):
        higher_is_better("hd95")


def test_columns_of_the_wrong_kind_are_refused():
    good = small_table().columns
    with pytest.raises(ValueError, match="column value must be float64; got float32"):
        CaseTable(good | {"value": good["value"].astype(np.float32)})
    with pytest.raises(ValueError, match="different lengths"):
        CaseTable(good | {"value": good["value"][1:]})


def test_a_table_of_half_a_million_rows_is_checked_in_seconds():
    count = 500_000
    names = np.char.add("case", (np.arange(count) // 50).astype(str))
    metrics = np.char.add("metric", (np.arange(count) % 50).astype(str))
    columns = dict(
        zip(COLUMNS, (names, names, np.zeros(count, np.int64), names, names, metrics), strict=False)
    )
    constant = {"method": np.full(count, "DML1"), "class": np.full(count, "mean")}
    table = CaseTable(columns | constant | {"metric": metrics, "value": np.zeros(count)})
    assert len(table) == count
