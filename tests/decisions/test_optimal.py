"""Optimal masks are the best of all sets of voxels, by enumeration."""

import numpy as np
import pytest
import rankseg
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import OPTIMAL, all_sets, expected_scores, masks_of, random_prob

from semidice.decisions import dice_optimal_mask, jaccard_optimal_mask, nested_optimal_mask, thresholds
from semidice.decisions.expected import (
    NUM_LEVELS,
    dice_of_likeliest,
    expected_dice,
    jaccard_of_likeliest,
    nested_dice_of_likeliest,
    reciprocal_nodes,
)
from semidice.decisions.objective import Objective

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
@pytest.mark.parametrize("num", [8, 10, 12])
@pytest.mark.parametrize("power", [0.3, 1.0, 4.0])
def test_the_mask_of_random_voxels_is_the_best_of_all_subsets(text, num, power):
    for seed in range(3):
        assert regret(text, random_prob(num, seed=seed, power=power).numpy()) < 1e-12


@each_optimal_rule
def test_no_split_of_tied_voxels_is_better_than_all_or_none_of_them(text):
    for seed in range(60):
        p = random_prob(8, seed=seed, num_levels=1 + seed % 4, power=[0.3, 1.0, 3.0][seed % 3]).numpy()
        assert regret(text, p) < 1e-12


def test_a_single_voxel_is_decided_by_its_probability():
    prob = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
    for text in OPTIMAL:
        assert masks_of(text, prob).flatten().tolist() == [False, False, True]


def test_no_foreground_at_all_gives_an_empty_mask_and_all_foreground_a_full_one():
    for text in OPTIMAL:
        assert not masks_of(text, torch.zeros(1, 1, 5, 5)).any()
        assert masks_of(text, torch.ones(1, 1, 5, 5)).all()


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
            (dice_of_likeliest, "dice"),
            (jaccard_of_likeliest, "jaccard"),
            (nested_dice_of_likeliest, "nested"),
        ],
    )
    @given(p=st.lists(unit, min_size=1, max_size=8))
    def test_expected_scores_equal_the_enumeration(self, scores_of, text, p):
        p = np.sort(np.array(p))[::-1].copy()
        nested_sets = np.tril(np.ones((len(p) + 1, len(p)), bool), -1)
        expected = expected_scores(text, p, nested_sets)
        assert scores_of(torch.from_numpy(p)[None])[0].numpy() == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("name", ["dice", "jaccard", "nested", "mix"])
    @given(p=st.lists(unit, min_size=1, max_size=6), seed=st.integers(0, 100))
    def test_the_expected_score_of_any_mask_equals_the_enumeration(self, name, p, seed):
        p = np.array(p)
        mask = np.random.default_rng(seed).random((1, len(p))) < 0.5
        text = "mix:0.3" if name == "mix" else name
        score = Objective(name, 0.3).expected(torch.from_numpy(p)[None], torch.from_numpy(mask), exact=True)
        assert float(score) == pytest.approx(expected_scores(text, p, mask)[0], abs=1e-12)

    def test_the_exact_expected_dice_of_many_voxels_is_the_mean_over_drawn_raters(self):
        p = random_prob(1, 3000, seed=1, power=6).sort(descending=True).values
        scores = dice_of_likeliest(p)[0]
        generator = torch.Generator().manual_seed(0)
        raters = torch.rand(4000, 3000, generator=generator, dtype=torch.float64) < p
        for k in (50, 400, 1500):
            dice = 2 * raters[:, :k].sum(1) / (k + raters.sum(1))
            assert float(dice.mean()) == pytest.approx(
                float(scores[k]), abs=4 * float(dice.std()) / 4000**0.5
            )


class TestFirstOrder:
    """Large sets: forms of first order, with the bounds in the docstring of `thresholds`."""

    @given(p=st.lists(unit, min_size=1, max_size=40))
    def test_the_error_of_the_first_order_dice_is_within_its_bounds(self, p):
        p = torch.tensor(p, dtype=torch.float64).sort(descending=True).values
        k, v, mean = torch.arange(1, len(p) + 1), p * (1 - p), p.sum()
        error = dice_of_likeliest(p[None])[0, 1:] - 2 * p.cumsum(0) / (k + mean)
        inside, outside = v.cumsum(0), v.sum() - v.cumsum(0)
        assert (error >= -2 * inside / ((k + 1) * (k + mean)) - 1e-12).all()
        assert (error <= outside / ((k + 1) * (k + mean)) + 1e-12).all()

    @given(p=st.lists(unit, min_size=1, max_size=40))
    def test_the_error_of_the_first_order_jaccard_is_within_its_bounds(self, p):
        p = torch.tensor(p, dtype=torch.float64).sort(descending=True).values
        k, sums = torch.arange(1, len(p) + 1), p.cumsum(0)
        union = k + p.sum() - sums
        error = jaccard_of_likeliest(p[None])[0, 1:] - sums / union
        outside = (p * (1 - p)).sum() - (p * (1 - p)).cumsum(0)
        assert (error >= -1e-12).all()
        assert (error <= sums * outside / (k * (k + 1) * union) + 1e-12).all()

    @pytest.mark.parametrize("power", [0.5, 2.0, 10.0])
    @pytest.mark.parametrize("rule", [dice_optimal_mask, jaccard_optimal_mask])
    def test_the_threshold_of_a_large_set_is_half_the_best_first_order_dice(self, rule, power):
        prob = random_prob(1, 1, 20, 30, 40, power=power).float()
        p = prob.double().flatten().sort(descending=True).values
        ratio = 2 * p.cumsum(0) / (torch.arange(1, len(p) + 1) + p.sum())
        assert torch.equal(rule(prob), prob.double() > ratio.max() / 2)

    def test_exact_and_first_order_choices_of_a_large_set_are_as_close_as_the_bounds_say(self, monkeypatch):
        prob = random_prob(1, 1, 3000, power=3)
        exact = dice_optimal_mask(prob)
        monkeypatch.setattr(thresholds, "MAX_EXACT_VOXELS", 100)
        first_order = dice_optimal_mask(prob)
        scores = [expected_dice(prob[:, 0], mask[:, 0], exact=True) for mask in (exact, first_order)]
        v = float((prob * (1 - prob)).sum())
        bounds = [
            2 * v / ((float(mask.sum()) + 1) * float(mask.sum() + prob.sum()))
            for mask in (exact, first_order)
        ]
        assert 0 <= float(scores[0] - scores[1]) <= sum(bounds)

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
        scores = share * nested_dice_of_likeliest(p) + (1 - share) * dice_of_likeliest(p)
        mask = masks_of(text, prob)
        assert thresholds.MAX_EXACT_VOXELS < 5000
        # first-order terms of the independent part: V / (k (k + mu))
        slack = 4 / NUM_LEVELS + (1 - share) * 2e-3
        assert float(scores.max() - scores[0, int(mask.sum())]) <= slack

    def test_a_large_image_with_few_likely_voxels_is_decided_exactly(self):
        small = random_prob(1, 1, 12, seed=3)
        large = torch.zeros(1, 1, 10_000, dtype=torch.float64)
        large[..., 500:512] = small
        for text in OPTIMAL:
            assert torch.equal(masks_of(text, large)[..., 500:512], masks_of(text, small))


class TestRankseg:
    """rankseg 0.0.8 has no exact solver, so its formulas and its expected scores are compared."""

    @pytest.mark.parametrize("power", [1.0, 4.0])
    def test_large_sets_equal_the_reciprocal_moment_iou_of_rankseg(self, power):
        prob = random_prob(2, 1, 90, 80, power=power)
        theirs = rankseg.rankseg_rma(prob, metric="iou", output_mode="multilabel", pruning_prob=0.0)
        assert torch.equal(jaccard_optimal_mask(prob), theirs)
        # Dice and Jaccard have the same threshold to first order
        assert torch.equal(dice_optimal_mask(prob), theirs)

    def test_large_sets_equal_the_normal_approximation_of_rankseg_up_to_its_error(self):
        prob = random_prob(1, 1, 80, 80, power=4)
        theirs = rankseg.rankdice_ba(prob, solver="BA", pruning_prob=0.0)
        sizes = [int(mask.sum()) for mask in (dice_optimal_mask(prob), theirs)]
        assert abs(sizes[0] - sizes[1]) <= 2

    def test_hard_probabilities_are_exact_in_both(self):
        prob = (random_prob(1, 1, 30) > 0.5).double()
        theirs = rankseg.rankseg_rma(prob, output_mode="multilabel", pruning_prob=0.0)
        assert torch.equal(dice_optimal_mask(prob), theirs)
        assert torch.equal(theirs, prob.bool())

    def test_no_solver_of_rankseg_has_a_better_expected_dice(self):
        gains = {"TRNA": [], "BA": [], "RMA": []}
        for seed in range(40):
            prob = random_prob(1, 1, 9, seed=seed, power=1.5)
            # one certain voxel: no rater is empty, so both conventions for empty masks agree
            prob[..., 0] = 1
            p = prob.flatten().numpy()
            ours = expected_scores("dice", p, dice_optimal_mask(prob).numpy()[0])[0]
            for solver, values in gains.items():
                if solver == "RMA":
                    theirs = rankseg.rankseg_rma(prob, output_mode="multilabel", pruning_prob=0.0)
                else:
                    theirs = rankseg.rankdice_ba(prob, solver=solver, pruning_prob=0.0)
                values.append(ours - expected_scores("dice", p, theirs.numpy()[0])[0])
        for values in gains.values():
            assert min(values) >= -1e-12
        # the approximations miss the best set in some of these cases
        assert max(gains["RMA"]) > 1e-4


def test_the_nested_rule_is_the_median_volume_in_a_case_worked_by_hand():
    # raters: 3 of 4 draw 2 voxels, 1 of 4 draws 4; against 2 voxels: 3/4 + 1/4 * 4/6
    prob = torch.tensor([[[1.0, 1.0, 0.25, 0.25]]])
    assert nested_optimal_mask(prob).tolist() == [[[True, True, False, False]]]
    scores = nested_dice_of_likeliest(prob[0].double())[0]
    assert scores.tolist() == pytest.approx(
        [0, 0.75 * 2 / 3 + 0.25 * 2 / 5, 0.75 + 1 / 6, 0.75 * 4 / 5 + 0.25 * 6 / 7, 0.75 * 2 / 3 + 0.25]
    )
