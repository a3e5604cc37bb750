"""Bad inputs: every row of the table ends in a message that names the thing and the way out."""

import jaxtyping
import pytest
from bad_inputs import LIBRARY


@pytest.fixture(autouse=True)
def _no_checked_annotations(monkeypatch):
    # a user has no checked annotations, and so must get the messages of the functions themselves
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("row", LIBRARY, ids=lambda row: row.what)
def test_the_library_refuses_a_bad_input_and_says_what_to_do(row, tmp_path):
    with pytest.raises(ValueError, match=row.message):
        row.make(tmp_path)
