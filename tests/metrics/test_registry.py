"""The table of scores: every record is complete and agrees with its function and the documentation."""

import re
from pathlib import Path

import pytest
import torch
from laws import class_map, soft_label

from semidice.arrays import one_hot
from semidice.metrics import SCORES, ScoredBatch, ScoreKey, higher_is_better
from semidice.metrics.registry import default_unit

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
    valid = torch.ones(2, 8, 8, dtype=torch.bool)
    valid[:, :, 6:] = False
    prob = soft_label(2, 3, 8, 8)
    changed = torch.where(valid.unsqueeze(1), prob, prob.flip(1))
    first, second = (score(ScoredBatch(p, **REFERENCES, valid=valid)) for p in (prob, changed))
    torch.testing.assert_close(first, second, equal_nan=True)


@each_score
def test_decided_masks_replace_the_prediction_in_scores_of_masks_and_in_no_other(name, score):
    prob = soft_label(2, 3, 8, 8)
    decided = one_hot(class_map((2, 8, 8), 3).flip(2), 3).bool()
    plain, of_mask = (score(ScoredBatch(each, **REFERENCES)) for each in (prob, decided.float()))
    found = score(ScoredBatch(prob, **REFERENCES, decided=decided))
    torch.testing.assert_close(found, of_mask if score.of_mask else plain, rtol=0, atol=0, equal_nan=True)
    # or the test could not fail
    assert not torch.equal(plain, of_mask)


@each_score
def test_the_name_of_a_score_tells_its_direction_and_no_unit(name, score):
    assert name.endswith("_score") <= score.higher_is_better
    assert name.endswith(("_error", "_distance", "_likelihood", "_width")) <= (not score.higher_is_better)
    assert not name.endswith(("_ml", "_mm", "_voxels"))
    assert score.needs_spacing <= (score.unit in ("mm", "ml", "share"))


def test_a_score_of_your_own_tells_its_direction_by_its_name():
    assert higher_is_better("my_score")
    assert not higher_is_better("my_calibration_error")
    assert (default_unit("my_calibration_error"), default_unit("my_error")) == ("share", "")
    assert ScoreKey("my_error", "").heading() == "my_error ↓"


@each_score
def test_the_documentation_agrees_with_the_record(name, score):
    lines = [line for line in DOCS.read_text().splitlines() if re.match(rf"\| .*`{name}`", line)]
    (line,) = lines
    _, against, unit, better = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][-5:-1]
    references = {"target": "majority", "soft_target": "mean", "masks": "each rater", "truth": "truth"}
    assert against == references[score.reference]
    assert unit == {"share": "%"}.get(score.unit, score.unit)
    assert better == ("↑" if score.higher_is_better else "↓")
