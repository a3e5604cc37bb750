"""Optimal masks are the best of all sets of voxels, by enumeration."""

import numpy as np
import pytest
import rankseg
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import OPTIMAL, all_sets, expected_scores, masks_of, random_prob

from semidice.decisions import Decision, decide
from semidice.decisions.expected import (
    MAX_EXACT_VOXELS,
    NUM_LEVELS,
    dice_of_first,
    expected_score,
    jaccard_of_first,
    nested_dice_of_likeliest,
    reciprocal_nodes,
)

each_optimal_rule = pytest.mark.parametrize("text", OPTIMAL)
unit = st.floats(0, 1, allow_nan=False, width=32)


def regret(text, p):
    """How far the expected score of the rule's mask is below the best of all subsets."""
    mask = masks_of(text, torch.as_tensor(p).view(1, 1, -1)).numpy()[0]
    return expected_scores(text, p, all_sets(len(p))).max() - expected_scores(text, p, mask)[0]


@each_optimal_rule
@given(p=st.lists(unit, min_size=1, max_size=7))
def test_no_set_of_voxels_has_a_better_expected_score(text, p):
    assert regret(text, np.array(p)) < 1e-12


@each_optimal_rule
def test_no_split_of_tied_voxels_is_better_than_all_or_none_of_them(text):
    for seed in range(60):
        p = random_prob(8, seed=seed, num_levels=1 + seed % 4, power=[0.3, 1.0, 3.0][seed % 3]).numpy()
        assert regret(text, p) < 1e-12


class TestExpectedScores:
    def test_the_sum_of_exponentials_is_the_reciprocal(self):
        for max_log2 in (1, 8, 20, 31):
            nodes, weights = (np.array(values) for values in reciprocal_nodes(max_log2))
            x = np.unique(np.round(np.geomspace(1, 2.0**max_log2, 500)))
            sums = (weights * np.exp(-nodes * x[:, None])).sum(1)
            assert np.abs(sums * x - 1).max() < 5e-14

    @pytest.mark.parametrize(
        ("scores_of", "text"),
        [
            (dice_of_first, "dice"),
            (jaccard_of_first, "jaccard"),
            (nested_dice_of_likeliest, "nested"),
        ],
    )
    @given(p=st.lists(unit, min_size=1, max_size=8))
    def test_expected_scores_equal_the_enumeration(self, scores_of, text, p):
        p = np.sort(np.array(p))[::-1].copy()
        nested_sets = np.tril(np.ones((len(p) + 1, len(p)), bool), -1)
        expected = expected_scores(text, p, nested_sets)
        assert scores_of(torch.from_numpy(p)[None])[0].numpy() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("text", ["dice", "jaccard", "nested", "mix:0.3"])
    @given(p=st.lists(unit, min_size=1, max_size=6), seed=st.integers(0, 100))
    def test_the_expected_score_of_any_mask_equals_the_enumeration(self, text, p, seed):
        p = np.array(p)
        mask = np.random.default_rng(seed).random((1, len(p))) < 0.5
        rule = Decision.parse(text)
        score = expected_score(rule, torch.from_numpy(p)[None], torch.from_numpy(mask), exact=True)
        assert float(score) == pytest.approx(expected_scores(text, p, mask)[0], abs=1e-12)

    def test_the_exact_expected_dice_of_many_voxels_is_the_mean_over_drawn_raters(self):
        p = random_prob(1, 3000, seed=1, power=6).sort(descending=True).values
        scores = dice_of_first(p)[0]
        generator = torch.Generator().manual_seed(0)
        raters = torch.rand(4000, 3000, generator=generator, dtype=torch.float64) < p
        for k in (50, 400, 1500):
            dice = 2 * raters[:, :k].sum(1) / (k + raters.sum(1))
            assert float(dice.mean()) == pytest.approx(
                float(scores[k]), abs=4 * float(dice.std()) / 4000**0.5
            )


class TestFirstOrder:
    """Large sets: forms of first order, with their bounds in docs/theory.md, section 7."""

    @given(p=st.lists(unit, min_size=1, max_size=40))
    def test_the_error_of_the_first_order_dice_is_within_its_bounds(self, p):
        p = torch.tensor(p, dtype=torch.float64).sort(descending=True).values
        k, v, mean = torch.arange(1, len(p) + 1), p * (1 - p), p.sum()
        error = dice_of_first(p[None])[0, 1:] - 2 * p.cumsum(0) / (k + mean)
        inside, outside = v.cumsum(0), v.sum() - v.cumsum(0)
        assert (error >= -2 * inside / ((k + 1) * (k + mean)) - 1e-12).all()
        assert (error <= outside / ((k + 1) * (k + mean)) + 1e-12).all()

    @given(p=st.lists(unit, min_size=1, max_size=40))
    def test_the_error_of_the_first_order_jaccard_is_within_its_bounds(self, p):
        p = torch.tensor(p, dtype=torch.float64).sort(descending=True).values
        k, sums = torch.arange(1, len(p) + 1), p.cumsum(0)
        union = k + p.sum() - sums
        error = jaccard_of_first(p[None])[0, 1:] - sums / union
        outside = (p * (1 - p)).sum() - (p * (1 - p)).cumsum(0)
        assert (error >= -1e-12).all()
        assert (error <= sums * outside / (k * (k + 1) * union) + 1e-12).all()

    @pytest.mark.parametrize("power", [0.5, 2.0, 10.0])
    @pytest.mark.parametrize("rule", ["dice", "jaccard"])
    def test_the_threshold_of_a_large_set_is_half_the_best_first_order_dice(self, rule, power):
        prob = random_prob(1, 1, 20, 30, 40, power=power).float()
        p = prob.double().flatten().sort(descending=True).values
        ratio = 2 * p.cumsum(0) / (torch.arange(1, len(p) + 1) + p.sum())
        assert torch.equal(decide(prob, rule), prob.double() > ratio.max() / 2)

    def test_an_empty_mask_is_chosen_in_a_large_set_of_faint_voxels(self):
        prob = torch.full((1, 1, 100, 100), 1e-5)
        for text in OPTIMAL:
            assert not masks_of(text, prob).any()

    @pytest.mark.parametrize("text", ["nested", "mix:0.4"])
    @pytest.mark.parametrize("power", [0.5, 2.0, 10.0])
    def test_the_best_level_of_a_large_set_is_almost_as_good_as_the_best_set(self, text, power, monkeypatch):
        prob = random_prob(1, 1, 5000, power=power)
        share = 1.0 if text == "nested" else 0.4
        p = prob[0].sort(descending=True).values
        scores = share * nested_dice_of_likeliest(p) + (1 - share) * dice_of_first(p)
        mask = masks_of(text, prob)
        assert MAX_EXACT_VOXELS < 5000
        # first-order terms of the independent part: V / (k (k + mu))
        slack = 4 / NUM_LEVELS + (1 - share) * 2e-3
        assert float(scores.max() - scores[0, int(mask.sum())]) <= slack

    def test_a_large_image_with_few_likely_voxels_is_decided_exactly(self):
        small = random_prob(1, 1, 12, seed=3)
        large = torch.zeros(1, 1, 10_000, dtype=torch.float64)
        large[..., 500:512] = small
        for text in OPTIMAL:
            assert torch.equal(masks_of(text, large)[..., 500:512], masks_of(text, small))


@pytest.mark.parametrize("power", [1.0, 4.0])
def test_large_sets_equal_the_reciprocal_moment_iou_of_rankseg(power):
    prob = random_prob(2, 1, 90, 80, power=power)
    theirs = rankseg.rankseg_rma(prob, metric="iou", output_mode="multilabel", pruning_prob=0.0)
    assert torch.equal(decide(prob, "jaccard"), theirs)
    # Dice and Jaccard have the same threshold to first order
    assert torch.equal(decide(prob, "dice"), theirs)


def test_the_nested_rule_is_the_median_volume_in_a_case_worked_by_hand():
    # raters: 3 of 4 draw 2 voxels, 1 of 4 draws 4; against 2 voxels: 3/4 + 1/4 * 4/6
    prob = torch.tensor([[[1.0, 1.0, 0.25, 0.25]]])
    assert decide(prob, "nested").tolist() == [[[True, True, False, False]]]
    scores = nested_dice_of_likeliest(prob[0].double())[0]
    assert scores.tolist() == pytest.approx(
        [0, 0.75 * 2 / 3 + 0.25 * 2 / 5, 0.75 + 1 / 6, 0.75 * 4 / 5 + 0.25 * 6 / 7, 0.75 * 2 / 3 + 0.25]
    )
