"""The table of scores: every record is complete and agrees with its function and the documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import class_map, soft_label

from semidice.arrays import one_hot
from semidice.metrics.registry import SCORES, ScoredBatch, display_scale, higher_is_better

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
REFERENCES = {
    "target": class_map((2, 8, 8), 3),
    "soft_target": soft_label(2, 3, 8, 8),
    "masks": class_map((2, 4, 8, 8), 3),
    "spacing_mm": (1.0, 1.0, 2.0),
    "truth": soft_label(2, 3, 8, 8),
}
each_score = pytest.mark.parametrize(("name", "score"), SCORES.items(), ids=list(SCORES))


@each_score
def test_a_score_needs_exactly_the_references_that_it_names(name, score):
    if score.package is not None:
        pytest.importorskip(score.package)
    prob = soft_label(2, 3, 8, 8)
    needs = [score.reference, *(["spacing_mm"] if score.needs_spacing else [])]
    references = {need: REFERENCES[need] for need in needs}
    assert score(ScoredBatch(prob, **references)).shape in ((2,), (2, 3))
    for missing in needs:
        others = {need: reference for need, reference in references.items() if need != missing}
        with pytest.raises(ValueError, match=f"needs {missing}"):
            score(ScoredBatch(prob, **others))


@each_score
def test_an_invalid_voxel_does_not_change_the_score(name, score):
    if score.package is not None:
        pytest.importorskip(score.package)
    valid = torch.ones(2, 8, 8, dtype=torch.bool)
    valid[:, :, 6:] = False
    prob = soft_label(2, 3, 8, 8)
    changed = torch.where(valid.unsqueeze(1), prob, prob.flip(1))
    first, second = (score(ScoredBatch(p, **REFERENCES, valid=valid)) for p in (prob, changed))
    torch.testing.assert_close(first, second, equal_nan=True)


@each_score
def test_decided_masks_replace_the_prediction_in_scores_of_masks_and_in_no_other(name, score):
    if score.package is not None:
        pytest.importorskip(score.package)
    prob = soft_label(2, 3, 8, 8)
    decided = one_hot(class_map((2, 8, 8), 3).flip(2), 3).bool()
    plain, of_mask = (score(ScoredBatch(each, **REFERENCES)) for each in (prob, decided.float()))
    found = score(ScoredBatch(prob, **REFERENCES, decided=decided))
    torch.testing.assert_close(found, of_mask if score.of_mask else plain, rtol=0, atol=0, equal_nan=True)
    # or the test could not fail
    assert not torch.equal(plain, of_mask)


@each_score
def test_the_record_agrees_with_the_rule_for_names(name, score):
    """An older version that reads a later table still gets the right direction and unit."""
    for ending, direction in {
        "_score": True,
        "_error": False,
        "_error_ml": False,
        "_error_mm": False,
    }.items():
        if name.endswith(ending):
            assert higher_is_better(name) == score.higher_is_better == direction
    assert name.endswith(("_ml", "_mm")) == (score.unit in ("ml", "mm"))
    assert display_scale(name) == (100 if score.unit == "percent" else 1)


def test_names_of_custom_scores_tell_direction_and_unit():
    assert higher_is_better("my_score")
    assert display_scale("my_score") == 100
    assert not higher_is_better("my_error_ml")
    assert display_scale("my_error_ml") == 1
    assert not higher_is_better("my_calibration_error")
    assert display_scale("my_calibration_error") == 100


@each_score
def test_the_documentation_agrees_with_the_record(name, score):
    lines = [line for line in DOCS.read_text().splitlines() if re.match(rf"\| .*`{name}`", line)]
    (line,) = lines
    _, against, unit, better = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][-5:-1]
    references = {"target": "majority", "soft_target": "mean", "masks": "each rater", "truth": "truth"}
    assert against == references[score.reference]
    assert unit == {"percent": "%", "none": ""}.get(score.unit, score.unit)
    assert better == ("↑" if score.higher_is_better else "↓")


def test_the_table_of_scores_does_not_import_torchmetrics():
    code = "import sys, semidice.metrics.registry; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
