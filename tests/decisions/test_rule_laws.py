"""Laws that every public decision rule obeys."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rules import OPTIMAL, RULES, expected_scores, masks_of, random_prob
from start import refused

from semidice.decisions import Decision, decide, decide_classes, decision, fit_decision

each_rule = pytest.mark.parametrize("text", RULES)
# below and above the limit of exact expected scores
SHAPES = [(2, 1, 6, 7), (2, 3, 5, 4), (1, 1, 70, 80), (1, 3, 70, 80)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def prob_of(shape, seed=0):
    """Random probabilities: each channel on its own if there is one, softmax of several."""
    if shape[1] == 1:
        return random_prob(*shape, seed=seed, power=3).float()
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (2 * logits).softmax(1)


def test_the_table_lists_every_rule():
    assert {Decision.parse(text).rule for text in RULES} == set(decision.RULES)


@each_rule
@each_shape
def test_the_shape_of_space_does_not_matter(text, shape):
    prob = prob_of(shape)
    volume = prob.unflatten(2, (shape[2] // 2 if shape[2] % 2 == 0 else shape[2], -1))
    assert torch.equal(masks_of(text, prob), masks_of(text, volume).view(prob.shape))


@each_rule
@each_shape
def test_a_case_does_not_depend_on_the_rest_of_its_batch(text, shape):
    first, second = prob_of(shape), prob_of(shape, seed=5)
    both = masks_of(text, torch.cat([second, first]))
    assert torch.equal(both, torch.cat([masks_of(text, second), masks_of(text, first)]))


@each_rule
@each_shape
def test_voxels_that_are_not_valid_are_in_no_mask_and_do_not_count(text, shape):
    prob = prob_of(shape).flatten(2)
    valid = torch.rand(shape[0], prob.shape[2], generator=torch.Generator().manual_seed(2)) < 0.7
    # NaN would reveal that a voxel was read
    masks = masks_of(text, torch.where(valid.unsqueeze(1), prob, torch.nan), valid)
    for case in range(shape[0]):
        kept = valid[case]
        assert torch.equal(masks[case : case + 1, :, kept], masks_of(text, prob[case : case + 1, :, kept]))
        assert not masks[case, :, ~kept].any()


@each_rule
@each_shape
def test_hard_probabilities_are_their_own_masks(text, shape):
    prob = decide(prob_of(shape)).float()
    assert torch.equal(masks_of(text, prob), prob.bool())


@each_rule
@each_shape
def test_the_class_map_is_that_of_the_masks(text, shape):
    prob = prob_of(shape)
    valid = torch.rand(shape[0], *shape[2:], generator=torch.Generator().manual_seed(2)) < 0.7
    masks, classes = decide(prob, text, valid=valid), decide_classes(prob, text, valid=valid)
    if shape[1] == 1:
        assert torch.equal(classes.bool(), masks[:, 0])
    else:
        assert torch.equal(classes, masks.int().argmax(1))
        assert torch.equal(masks.sum(1), valid.long())


@each_rule
def test_two_classes_are_the_rule_of_the_foreground_channel(text):
    prob = prob_of((2, 2, 6, 7))
    masks = masks_of(text, prob)
    assert torch.equal(masks[:, 1:], masks_of(text, prob[:, 1:]))
    assert torch.equal(masks[:, 0], ~masks[:, 1])


@each_rule
def test_channels_that_are_not_exclusive_are_decided_one_by_one(text):
    prob = random_prob(2, 3, 6, 7)
    masks = decide(prob, text, exclusive=False)
    for channel in range(3):
        part = slice(channel, channel + 1)
        assert torch.equal(masks[:, part], masks_of(text, prob[:, part]))


@each_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_accepted(text, dtype):
    prob = prob_of((1, 1, 70, 80)).to(dtype)
    assert torch.equal(masks_of(text, prob), masks_of(text, prob.double()))


@each_rule
def test_a_prediction_without_voxel_axes_is_accepted(text):
    prob = prob_of((4, 3, 1)).squeeze(2)
    assert torch.equal(masks_of(text, prob), masks_of(text, prob.unsqueeze(2)).squeeze(2))


@pytest.mark.parametrize("text", OPTIMAL)
@given(
    logits=arrays.arrays("float64", (3, 6), elements=st.floats(-4, 4, allow_nan=False)),
    sharpness=st.floats(0.1, 3),
)
def test_the_expected_score_of_several_classes_is_never_below_that_of_argmax(text, logits, sharpness):
    prob = (torch.from_numpy(logits) * sharpness).softmax(0)[None]
    ours, plain = (
        sum(expected_scores(text, prob[0, number].numpy(), masks[:, number].numpy())[0] for number in (1, 2))
        for masks in (masks_of(text, prob), decide(prob))
    )
    assert ours >= plain - 1e-12


@pytest.mark.parametrize("text", OPTIMAL)
def test_several_classes_lose_less_than_half_of_what_argmax_loses_to_the_best_assignment(text):
    assignments = np.array(list(product(range(3), repeat=6)))
    lost = []
    for seed in range(20):
        prob = (torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 2)).softmax(
            1
        )
        prob = prob.double()

        def score(masks, prob=prob):
            """Mean over the foreground classes; masks: (assignments, voxels) of each class."""
            return sum(expected_scores(text, prob[0, n].numpy(), masks(n)) for n in (1, 2)) / 2

        best = score(lambda n: assignments == n).max()
        ours, plain = masks_of(text, prob), decide(prob)
        lost.append([best - score(lambda n, masks=masks: masks[:, n].numpy())[0] for masks in (ours, plain)])
    mean_ours, mean_argmax = np.mean(lost, axis=0)
    assert mean_ours < mean_argmax / 2


@pytest.mark.parametrize("text", ["dice", "jaccard"])
@pytest.mark.parametrize("num_classes", [3, 5, 8])
def test_moving_voxels_to_the_class_of_the_largest_gain_cannot_raise_the_score(text, num_classes):
    # too large for exact scores, so the first-order ones are what the rule maximises
    prob = prob_of((1, num_classes, 70, 80)).flatten(2)[:, 1:].double()

    def score(masks):
        overlap, total = (masks * prob).sum(2), masks.sum(2) + prob.sum(2)
        return (2 * overlap / total if text == "dice" else overlap / (total - overlap)).mean()

    masks = masks_of(text, prob_of((1, num_classes, 70, 80))).flatten(2)[:, 1:].double().requires_grad_()
    (gains,) = torch.autograd.grad(score(masks), masks)
    largest = gains.max(1, keepdim=True).values.clamp_min(0)
    moved = ((gains == largest) & (gains > 0)).double()
    # the rule computes gains in float32, so it may swap voxels that are almost tied
    assert score(moved) <= score(masks) + 1e-9


def test_a_mix_without_a_share_of_one_coupling_is_the_rule_of_the_other():
    for shape in ((2, 1, 6, 7), (2, 3, 5, 4)):
        prob = prob_of(shape)
        assert torch.equal(decide(prob, "mix:0"), decide(prob, "dice"))
        assert torch.equal(decide(prob, "mix:1"), decide(prob, "nested"))


PROB, MASK = torch.full((1, 2, 2), 0.5), torch.ones(2, 2, dtype=torch.int64)
TWO_SIGMOIDS = torch.tensor([[[0.9, 0.6], [0.8, 0.7]]])


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "overlapping channels": (lambda: decide(TWO_SIGMOIDS), "exclusive=False"),
        "their class map": (lambda: decide_classes(TWO_SIGMOIDS, "dice"), "must sum to one"),
        "images without a class axis": (lambda: decide(torch.rand(2, 40, 48), "dice"), ".unsqueeze(1)"),
        "the same, not exclusive": (lambda: decide(torch.rand(2, 40, 48), exclusive=False), ".unsqueeze(1)"),
        "logits": (lambda: decide(9 * TWO_SIGMOIDS[:, :1]), "softmax or sigmoid"),
        "masks": (lambda: decide(TWO_SIGMOIDS > 0.5), "decided already"),
        "a number": (lambda: Decision.parse(0.5), "'threshold:0.4'"),
        "percent": (lambda: decide(TWO_SIGMOIDS[:, :1], "threshold:40"), "[0, 1]"),
        "no parameter": (lambda: decide(TWO_SIGMOIDS[:, :1], "mix"), "'mix:0.4'"),
        "a soft target": (lambda: fit_decision([(PROB, PROB, None, "a")]), "class map"),
        "a target of 0 and 255": (lambda: fit_decision([(PROB, 255 * MASK, None, "a")]), "255"),
    }.values(),
)
def test_what_would_give_a_wrong_mask_is_refused_with_the_way_out(call, words):
    refused(call, words)


def test_channels_that_may_overlap_have_masks_that_overlap():
    assert decide(TWO_SIGMOIDS, "threshold:0.65", exclusive=False).tolist() == [[[True, False], [True, True]]]


def test_a_tie_goes_to_the_lowest_class_and_a_probability_at_the_threshold_is_background():
    prob = torch.tensor([[[0.5, 0.25, 0.2], [0.25, 0.375, 0.4], [0.25, 0.375, 0.4]]])
    assert decide_classes(prob).tolist() == [[0, 1, 1]]
    assert decide_classes(prob, "threshold:0.5").tolist() == [[0, 1, 1]]
    assert decide_classes(prob[:, :1], "threshold:0.25").tolist() == [[1, 0, 0]]


def test_a_voxel_that_two_classes_want_goes_to_the_one_whose_limit_it_exceeds_more():
    # class 1 is certain elsewhere and its limit is 0.3; class 2 is likely nowhere and its limit is 0.1
    sure, faint, low = [[0.0, 1.0, 0.0]] * 8, [[0.6, 0.0, 0.4]] * 6, [[0.7, 0.3, 0.0], [0.9, 0.0, 0.1]]
    prob = torch.tensor([*sure, *faint, *low, [0.08, 0.54, 0.38]]).t().unsqueeze(0)
    assert decide_classes(prob, "dice")[0].tolist() == [1] * 8 + [2] * 6 + [0, 0, 2]
