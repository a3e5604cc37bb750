"""The table of scores: every record is complete, true of its function, and true in the documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from laws import class_map, soft_label

from semidice.metrics.registry import SCORES, ScoredBatch, display_scale, higher_is_better, is_fraction

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
REFERENCES = {
    "target": class_map((2, 8, 8), 3),
    "soft_target": soft_label(2, 3, 8, 8),
    "masks": class_map((2, 4, 8, 8), 3),
    "spacing_mm": (1.0, 1.0, 2.0),
    "truth": soft_label(2, 3, 8, 8),
}
each_score = pytest.mark.parametrize("score", SCORES.values(), ids=list(SCORES))


@each_score
def test_a_score_reads_the_references_that_it_names_and_no_other(score):
    if score.package is not None:
        pytest.importorskip(score.package)
    prob = soft_label(2, 3, 8, 8)
    references = {name: REFERENCES[name] for name in score.needs}
    assert score.function(ScoredBatch(prob, **references)).shape in ((2,), (2, 3))
    for missing in score.needs:
        others = {name: reference for name, reference in references.items() if name != missing}
        with pytest.raises(ValueError, match=f"needs {missing}"):
            score.function(ScoredBatch(prob, **others))


@each_score
def test_the_record_agrees_with_the_rule_for_names(score):
    """A table of a later version, read by an older one, still has the right direction and unit."""
    for ending, direction in {
        "_score": True,
        "_error": False,
        "_error_ml": False,
        "_error_mm": False,
    }.items():
        if score.name.endswith(ending):
            assert higher_is_better(score.name) == score.higher_is_better == direction
    assert score.name.endswith(("_ml", "_mm")) == (score.unit in ("ml", "mm"))
    assert is_fraction(score.name) == (score.unit == "percent") == (display_scale(score.name) == 100)


def test_names_of_scores_of_ones_own_tell_direction_and_unit():
    assert higher_is_better("my_score")
    assert is_fraction("my_score")
    assert not higher_is_better("my_error_ml")
    assert not is_fraction("my_error_ml")
    assert not higher_is_better("my_calibration_error")
    assert is_fraction("my_calibration_error")


@each_score
def test_the_documentation_says_what_the_record_says(score):
    lines = [line for line in DOCS.read_text().splitlines() if re.match(rf"\| .*`{score.name}`", line)]
    (line,) = lines
    _, against, unit, better = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][-5:-1]
    references = {"target": "majority", "soft_target": "mean", "masks": "each rater", "truth": "truth"}
    assert against == references[score.needs[0]]
    assert unit == {"percent": "%", "none": ""}.get(score.unit, score.unit)
    assert better == ("↑" if score.higher_is_better else "↓")


def test_the_table_of_scores_does_not_import_torchmetrics():
    code = "import sys, semidice.metrics.registry; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
