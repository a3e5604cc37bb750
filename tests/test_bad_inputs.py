"""Bad inputs: every row of the tables ends in a message that names the thing and the way out."""

import re

import jaxtyping
import pytest
from bad_commands import COMMANDS, CommandRow, Workspace, make_good_inputs, run_command
from bad_inputs import LIBRARY


@pytest.fixture(autouse=True)
def _no_checked_annotations(monkeypatch):
    # a user has no checked annotations, and so must get the messages of the functions themselves
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    make_good_inputs(folder)
    return folder


def assert_refused(row, work):
    code, printed, unhandled = run_command(row.command(work))
    assert unhandled is None, f"{type(unhandled).__name__}: {unhandled}"
    assert code in (1, 2), printed
    assert "Traceback" not in printed
    assert re.search(row.message, printed), printed


@pytest.mark.parametrize("row", LIBRARY, ids=lambda row: row.what)
def test_the_library_refuses_a_bad_input_and_says_what_to_do(row, tmp_path):
    with pytest.raises(ValueError, match=row.message):
        row.make(tmp_path)


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.what)
def test_a_command_refuses_a_bad_input_and_says_what_to_do(row, tmp_path, good):
    assert_refused(row, Workspace(tmp_path, good))


def test_the_tables_have_two_hundred_rows_or_more_and_no_row_twice():
    names = [row.what for row in (*LIBRARY, *COMMANDS)]
    assert len(names) >= 500
    assert len(COMMANDS) >= 150
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda work: ["check", work.good / "data", "-o", work.folder / "sheet.png"], "wrote"),
        (lambda work: ["check", work.folder], "a message that is not printed"),
    ],
    ids=["a good input", "another message"],
)
def test_a_row_that_is_not_refused_as_it_says_fails(command, message, tmp_path, good):
    with pytest.raises(AssertionError):
        assert_refused(CommandRow("", command, message), Workspace(tmp_path, good))
