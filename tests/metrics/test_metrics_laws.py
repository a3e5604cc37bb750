"""What holds for every score of the registry: references, voxels that do not count, layouts, refusals."""

import re
from pathlib import Path

import pytest
import torch
from laws import class_map, soft_label
from start import refused

from semidice.arrays import one_hot
from semidice.metrics import SCORES, ScoredBatch, ScoreKey, dice_score, higher_is_better
from semidice.metrics.registry import default_unit

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PROB = soft_label(2, 3, 8, 8)
REFERENCES = {
    "target": class_map((2, 8, 8), 3),
    "soft_target": soft_label(2, 3, 8, 8, seed=1),
    "masks": class_map((2, 4, 8, 8), 3),
    "truth": soft_label(2, 3, 8, 8, seed=2),
}
SPACING = (1.0, 1.0, 2.0)
each_score = pytest.mark.parametrize(("name", "score"), SCORES.items(), ids=list(SCORES))
of_surfaces = ("hausdorff_error", "surface_dice_score")


def batch_of(prob=PROB, cases=slice(None), **changes):
    """A batch with all references; changes replace some."""
    parts = {name: part[cases] for name, part in REFERENCES.items()} | {"spacing_mm": SPACING}
    return ScoredBatch(prob[cases], **(parts | changes))


@each_score
def test_a_score_needs_exactly_the_references_that_it_names(name, score):
    needs = {score.reference: REFERENCES[score.reference]}
    needs |= {"spacing_mm": SPACING} if score.needs_spacing else {}
    assert score(ScoredBatch(PROB, **needs)).shape in ((2,), (2, 3))
    for missing in needs:
        others = {need: part for need, part in needs.items() if need != missing}
        refused(lambda others=others: score(ScoredBatch(PROB, **others)), f"needs {missing}")


@each_score
def test_voxels_that_are_not_valid_do_not_count_and_a_case_of_them_alone_is_nan(name, score):
    valid = torch.rand(2, 8, 8) < 0.6
    expected = score(batch_of(valid=valid))
    changed = torch.where(valid.unsqueeze(1), PROB, PROB.flip(1))
    torch.testing.assert_close(score(batch_of(changed, valid=valid)), expected, rtol=0, atol=0)
    # all raters are covered either way
    assert name == "volume_coverage_score" or not torch.equal(score(batch_of()), expected)
    if name not in of_surfaces:
        # the valid voxels of a case, one after the other
        for case, kept in enumerate(valid):
            parts = {name: part[case : case + 1, ..., kept] for name, part in REFERENCES.items()}
            alone = score(ScoredBatch(PROB[case : case + 1, :, kept], **parts, spacing_mm=SPACING))
            torch.testing.assert_close(alone[0], expected[case])
    valid[0] = False
    scores = score(batch_of(valid=valid))
    assert scores[0].isnan().all()
    torch.testing.assert_close(scores[1], expected[1])


@each_score
def test_a_case_scores_the_same_in_any_batch_layout_and_dtype(name, score):
    expected = score(batch_of())
    for case in range(2):
        torch.testing.assert_close(score(batch_of(cases=slice(case, case + 1)))[0], expected[case])
    torch.testing.assert_close(score(batch_of(PROB.to(memory_format=torch.channels_last))), expected)
    torch.testing.assert_close(score(batch_of(PROB.double())), expected, check_dtype=False)
    assert score(batch_of(PROB.bfloat16())).isfinite().all()


@each_score
def test_decided_masks_replace_the_prediction_in_scores_of_masks_and_in_no_other(name, score):
    decided = one_hot(class_map((2, 8, 8), 3).flip(2), 3).bool()
    plain, of_mask = (score(batch_of(each)) for each in (PROB, decided.float()))
    found, expected = score(batch_of(decided=decided)), of_mask if score.judges == "mask" else plain
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # or the test could not fail
    assert not torch.equal(plain, of_mask)


@each_score
def test_several_channels_that_do_not_sum_to_one_are_refused_with_the_ways_out(name, score):
    if name == "truth_error":
        pytest.skip("of phantoms alone")
    ways_out = ("sum to one", "softmax", "prob[:, c : c + 1]", "unsqueeze(1)", "threshold:0.5")
    # two disjoint masks of 40 x 40 without a class axis, and channels that may overlap
    disjoint, some = torch.zeros(2, 40, 40), torch.ones(2, 40, dtype=torch.long)
    disjoint[0, :20], disjoint[1, 20:] = 1, 1
    references = {"target": some, "soft_target": disjoint, "masks": some.unsqueeze(1), "spacing_mm": SPACING}
    if name not in of_surfaces:
        refused(lambda: score(ScoredBatch(disjoint, **references)), *ways_out)
    refused(lambda: score(batch_of(torch.full_like(PROB, 0.9))), *ways_out)


def test_one_voxel_among_many_that_does_not_sum_to_one_is_found():
    # channels of a sigmoid network sum to one but at the edge of a small object, which a sample would miss
    prob = torch.tensor([0.99, 0.01]).view(1, 2, 1, 1).repeat(1, 1, 300, 400)
    target = torch.zeros(1, 300, 400, dtype=torch.long)
    assert dice_score(prob, target)[0, 0] == 1
    for voxel in (1, 77_777, 119_999):
        wrong = prob.clone()
        wrong.flatten(2)[0, :, voxel] = torch.tensor([0.6, 0.7])
        refused(lambda wrong=wrong: dice_score(wrong, target), "sum to one", "1.3")
        valid = (torch.arange(120_000) != voxel).view(1, 300, 400)
        assert dice_score(wrong, target, valid=valid)[0, 0] == 1


def test_masks_and_images_without_a_class_axis_are_refused():
    mask = torch.ones(2, 40, 40, dtype=torch.bool)
    refused(lambda: dice_score(mask, mask), "unsqueeze(1)")


@each_score
def test_a_score_of_lengths_or_volumes_needs_the_spacing_and_its_name_has_no_unit(name, score):
    assert not name.endswith(("_ml", "_mm", "_voxels"))
    assert (score.unit in ("mm", "ml")) <= score.needs_spacing <= (score.unit in ("mm", "ml", "share"))


def test_a_score_of_your_own_tells_its_direction_by_its_name():
    assert higher_is_better("my_score")
    assert not higher_is_better("my_calibration_error")
    # that of a probability is higher if the prediction is better
    refused(lambda: higher_is_better("log_likelihood"), "log_likelihood", "_score or _error")
    assert (default_unit("my_calibration_error"), default_unit("my_error")) == ("share", "")
    assert ScoreKey("my_error", "").heading() == "my_error ↓"


@each_score
def test_the_documentation_agrees_with_the_record(name, score):
    (line,) = [line for line in DOCS.read_text().splitlines() if re.match(rf"\| .*`{name}`", line)]
    _, against, unit, better = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][-5:-1]
    references = {"target": "majority", "soft_target": "mean", "masks": "each rater", "truth": "truth"}
    assert against == references[score.reference]
    assert unit == {"share": "%"}.get(score.unit, score.unit)
    assert better == ("↑" if higher_is_better(name) else "↓")
