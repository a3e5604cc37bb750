"""The paired test compared with SciPy, plain loops and closed forms; level and power by simulation (slow)."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from case_rows import CaseRow, table_of
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from start import refused

from semidice.metrics import ScoreKey
from semidice.statistics import PairedScores, compare_cases, compare_scores, holm, paired_test

DICE, VOLUME = ScoreKey("dice_score"), ScoreKey("volume_error", "ml")


def differences(num_cases=40, shift=0.3, seed=0):
    """Skewed differences, one column."""
    return np.random.default_rng(seed).exponential(1, (num_cases, 1)) - 1 + shift


def paired(values, methods=None, patients=None, key=DICE):
    values = np.asarray(values, dtype=float)
    cases = tuple(f"case{number:04}" for number in range(len(values)))
    methods = methods or tuple(f"method{number}" for number in range(values.shape[1]))
    return PairedScores(key, "mean", cases, patients or cases, methods, values)


# independent references


def test_the_exact_permutation_test_equals_that_of_scipy():
    columns = np.random.default_rng(2).standard_normal((11, 6)) + np.linspace(0, 1, 6)
    result = paired_test(columns).p_flips
    reference = stats.permutation_test(
        (columns,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    np.testing.assert_allclose(result, reference.pvalue, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_combined_p_is_the_larger_of_twice_a_studentised_tail_and_the_permutation_p(sign):
    # at shift 0.2 the permutation p is larger, at shift -0.35 that of the bootstrap
    for shift in (0.2, -0.35):
        column = sign * differences(shift=shift)[:, 0]
        rng = np.random.default_rng(3)

        def t_value(sample, centre):
            return (sample.mean() - centre) / (sample.std(ddof=1) / np.sqrt(len(sample)))

        drawn = np.array([t_value(rng.choice(column, 40), column.mean()) for _ in range(20_000)])
        observed = t_value(column, 0)
        tail = (drawn >= observed).mean() if observed > 0 else (drawn <= observed).mean()
        flipped = stats.permutation_test(
            (column,), np.mean, permutation_type="samples", n_resamples=20_000, random_state=rng
        )
        result = paired_test(column[:, None], num_resamples=20_000)
        assert (2 * tail > flipped.pvalue) == (shift < 0)
        assert result.p[0] == pytest.approx(max(2 * tail, flipped.pvalue), abs=0.01)


def test_the_combined_interval_is_of_all_means_that_its_two_tests_do_not_reject():
    # groups of unequal size; a shift of every case by m tests the mean m
    rng = np.random.default_rng(22)
    sizes = rng.integers(1, 4, 12)
    groups = [f"p{number:02}" for number in np.repeat(np.arange(12), sizes)]
    column = rng.exponential(1, (len(groups), 1))
    for level in (0.05, 0.2):
        result = paired_test(column, groups=groups, alpha=level)
        width = result.high[0] - result.low[0]
        for end, outwards in ((result.low[0], -1), (result.high[0], 1)):
            p = [
                paired_test(column - end - step * outwards * width, groups=groups).p[0]
                for step in (-1e-3, 1e-3)
            ]
            assert p[0] >= level > p[1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_equals_closed_testing_with_bonferroni(p):
    p = np.array(p)
    corrected = holm(p)
    for tested in range(len(p)):
        others = [number for number in range(len(p)) if number != tested]
        groups = [(tested, *rest) for size in range(len(p)) for rest in combinations(others, size)]
        closed = max(min(1.0, len(group) * p[list(group)].min()) for group in groups)
        assert corrected[tested] == pytest.approx(closed, abs=1e-12)


# clusters


def test_patients_are_drawn_with_all_their_cases():
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 6, 15)
    groups = np.repeat([f"p{number}" for number in range(15)], sizes)
    column = (rng.standard_normal(15).repeat(sizes) + 0.3 * rng.standard_normal(len(groups)))[:, None]
    members = [column[groups == f"p{number}", 0] for number in range(15)]
    patients = np.array([(values.sum(), len(values)) for values in members])

    def t_value(sample, centre):
        sums, counts = sample.T
        mean = sums.sum() / counts.sum()
        error = np.sqrt(((sums - mean * counts) ** 2).sum() * 15 / 14) / counts.sum()
        return (mean - centre) / error

    drawn = np.array([t_value(patients[rng.integers(0, 15, 15)], column.mean()) for _ in range(20_000)])
    observed = t_value(patients, 0)
    tail = (drawn >= observed).mean() if observed > 0 else (drawn <= observed).mean()
    result = paired_test(column, groups=groups.tolist(), num_resamples=20_000)
    flipped = paired_test(column, groups=groups.tolist(), num_resamples=20_000).p_flips
    assert result.p[0] == pytest.approx(max(2 * tail, flipped[0]), abs=0.01)
    # cases of a patient are alike; treating them as independent gives intervals that are far too narrow
    naive = paired_test(column)
    assert naive.high[0] - naive.low[0] < 0.8 * (result.high[0] - result.low[0])


def test_flipping_the_sign_of_a_patient_flips_all_their_cases():
    column = np.array([[1.0], [1.0], [2.0], [-1.0], [0.5], [0.25]])
    groups = ["a", "a", "b", "c", "d", "d"]
    sums = np.array([2.0, 2.0, -1.0, 0.75])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    expected = (np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12).mean()
    assert paired_test(column, groups=groups).p_flips[0] == expected


# properties


def test_a_pair_the_other_way_round_has_the_other_signs():
    values = np.random.default_rng(10).random((30, 2))
    pairs = compare_scores(paired(values)).pairs
    first, mirrored = pairs.loc["method0", "method1"], pairs.loc["method1", "method0"]
    assert first.difference == pytest.approx(values[:, 0].mean() - values[:, 1].mean())
    for end in ("", "_single"):
        assert (mirrored[f"low{end}"], mirrored[f"high{end}"]) == (-first[f"high{end}"], -first[f"low{end}"])
        assert mirrored[f"p{end}"] == first[f"p{end}"]
    assert mirrored.difference == -first.difference


def test_the_same_seed_gives_the_same_bits_in_any_order_of_the_rows():
    rng, methods = np.random.default_rng(11), ["SDL", "DML1", "DML2"]
    rows = [
        CaseRow(f"c{number}", f"p{number // 2}", 0, method, "mean", "dice_score", rng.random())
        for number in range(30)
        for method in methods
    ]
    first = compare_cases(table_of(rows), "dice_score", methods=methods)
    mixed = [rows[number] for number in rng.permutation(len(rows))]
    reordered = compare_cases(table_of(mixed), "dice_score", methods=methods)
    assert first.means.equals(reordered.means)
    assert first.pairs.equals(reordered.pairs)
    other_seed = compare_cases(table_of(rows), "dice_score", seed=1)
    assert (other_seed.pairs["p_single"] != first.pairs["p_single"]).any()
    assert (first.num_cases, first.num_patients, first.by_patient) == (30, 15, True)


def test_equal_methods_have_p_1_and_an_interval_of_0():
    same = np.random.default_rng(12).random((20, 1)).repeat(2, axis=1)
    comparison = compare_scores(paired(same))
    pair = comparison.pairs.loc["method0", "method1"]
    assert pair.p == pair.p_single == pair.p_flips == 1
    assert pair.low == pair.high == 0
    assert comparison.best == comparison.methods


def test_five_cases_are_never_significant_six_can_be_and_p_is_never_0():
    for num_cases, significant in ((2, False), (5, False), (6, True)):
        column = 1 + 1e-3 * np.arange(num_cases)[:, None]
        assert (paired_test(column).p[0] < 0.05) == significant
        assert (paired_test(column).p_flips[0] < 0.05) == significant
    clear = paired_test(10 + np.random.default_rng(0).standard_normal((100, 1)))
    assert clear.p[0] >= clear.p_flips[0] == 1 / 10_001


# the best set


def gain_scores(gains, *, noise=0.02, num_cases=60, key=DICE):
    rng = np.random.default_rng(13)
    base = rng.uniform(0.5, 0.8, (num_cases, 1))
    values = base + np.asarray(gains) + noise * rng.standard_normal((num_cases, len(gains)))
    return paired(values, methods=tuple("abcd"[: len(gains)]), key=key)


def test_the_best_methods_are_those_that_no_other_method_significantly_beats():
    comparison = compare_scores(gain_scores([0.0, 0.05, 0.0501, 0.02]))
    assert comparison.best == ("b", "c")
    assert comparison.pairs["better"].xs("b", level="first").to_dict() == {"c": False, "d": True, "a": True}
    lower = compare_scores(gain_scores([0.0, 0.05, 0.0501, 0.02], key=ScoreKey("calibration_error")))
    assert lower.best == ("a",)
    assert compare_scores(gain_scores([0.0, 0.0, 0.0])).best == ("a", "b", "c")


def test_holm_can_keep_a_method_that_uncorrected_p_values_exclude_from_the_best():
    rng = np.random.default_rng(21)
    for _ in range(200):
        comparison = compare_scores(
            paired(rng.standard_normal((12, 5)) + np.array([0, 0, 0, 0, 0.9])), num_resamples=200
        )
        # better are methods of higher scores
        pairs = comparison.pairs
        better = pairs.index[(pairs["difference"] > 0) & (pairs["p_single"] < 0.05)]
        uncorrected = {*comparison.methods} - {worse for _, worse in better}
        assert uncorrected <= set(comparison.best)
        if uncorrected != set(comparison.best):
            return
    pytest.fail("200 comparisons and Holm never made a difference")


def test_every_interval_excludes_0_exactly_where_the_p_shown_next_to_it_is_below_the_level():
    rng = np.random.default_rng(23)
    found = 0
    for num_cases in (4, 6, 12, 40):
        for _ in range(20):
            values = rng.standard_normal((num_cases, 4)) + rng.uniform(-1, 1, 4)
            comparison = compare_scores(paired(values), num_resamples=300)
            for end in ("", "_single"):
                low, high, p = (comparison.pairs[name + end] for name in ("low", "high", "p"))
                excludes = (low > 0) | (high < 0)
                np.testing.assert_array_equal(excludes, p < 0.05)
                found += excludes.sum()
    assert 100 < found < 900


def test_corrected_intervals_are_bonferroni_s_unless_holm_finds_more():
    rng = np.random.default_rng(24)
    kinds = set()
    for _ in range(40):
        values = rng.standard_normal((30, 3)) + rng.uniform(-0.5, 0.5, 3)
        pairs = compare_scores(paired(values, key=VOLUME), num_resamples=1000).pairs.iloc[:3]
        columns = values[:, [0, 0, 1]] - values[:, [1, 2, 2]]
        agrees = ((pairs["p_single"] < 0.05 / 3) == (pairs["p"] < 0.05)).all()
        kinds.add(bool(agrees))
        bonferroni = paired_test(columns, alpha=0.05 / 3, num_resamples=1000)
        if agrees:
            np.testing.assert_allclose(pairs["low"], bonferroni.low)
            np.testing.assert_allclose(pairs["high"], bonferroni.high)
        # between the interval of a single pair and that of Bonferroni
        assert (pairs["low"] <= pairs["low_single"]).all()
        assert (pairs["high"] >= pairs["high_single"]).all()
        assert (pairs["low"] >= bonferroni.low - 1e-12).all()
        assert (pairs["high"] <= bonferroni.high + 1e-12).all()
    assert kinds == {True, False}


def test_with_a_baseline_only_its_pairs_are_compared_and_corrected():
    rng = np.random.default_rng(5)
    scores = paired(0.5 + 0.1 * rng.random((20, 4)) + [0.0, 0.05, 0.03, 0.01], methods=("a", "b", "c", "d"))
    everything, against = compare_scores(scores), compare_scores(scores, baseline="c")
    others = [("a", "c"), ("b", "c"), ("d", "c")]
    assert set(against.pairs.index) == {*others, *((second, first) for first, second in others)}
    all_pairs, pairs = everything.pairs.loc[others], against.pairs.loc[others]
    np.testing.assert_array_equal(pairs["p_single"], all_pairs["p_single"])
    np.testing.assert_array_equal(pairs["p"], holm(all_pairs["p_single"].to_numpy()))
    assert (pairs["p"] <= all_pairs["p"]).all()
    np.testing.assert_array_equal(pairs["difference"], all_pairs["difference"])
    np.testing.assert_array_equal(against.means["mean"], everything.means["mean"])
    np.testing.assert_array_equal((pairs["low"] > 0) | (pairs["high"] < 0), pairs["p"] < 0.05)
    refused(lambda: compare_scores(scores, baseline="e"), "'e'", "a, b, c, d")


def test_the_interval_of_a_difference_of_shares_stays_between_minus_1_and_1():
    rng = np.random.default_rng(25)
    values = np.stack([rng.uniform(0.9, 1, 5), rng.uniform(0, 0.1, 5), rng.uniform(0, 1, 5)], 1)
    values[0] = [0.2, 0.9, 0.5]
    comparison = compare_scores(paired(values))
    for end in ("", "_single"):
        assert comparison.pairs[f"low{end}"].min() >= -1
        assert comparison.pairs[f"high{end}"].max() <= 1
    volume = compare_scores(paired(values, key=VOLUME))
    assert volume.pairs["high"].max() > 1


def test_the_interval_of_a_mean_equals_that_of_the_method_alone():
    scores = gain_scores([0.0, 0.1])
    comparison = compare_scores(scores)
    alone = paired_test(scores.values)
    np.testing.assert_allclose(comparison.means["mean"], alone.value)
    np.testing.assert_allclose(comparison.means["low"], alone.low)
    np.testing.assert_allclose(comparison.means["high"], alone.high)


def test_the_interval_of_a_share_stays_between_0_and_1():
    # nearly all scores are close to 1, so an interval symmetric about their mean would exceed 1
    high_scores = np.array([1.0, 1.0, 0.98, 1.0, 0.99, 1.0, 0.97, 1.0, 0.7, 0.99, 1.0, 0.98])
    scores = paired(np.stack([high_scores, 1 - high_scores], 1))
    alone = paired_test(scores.values)
    assert alone.high[0] > 1
    assert alone.low[1] < 0
    comparison = compare_scores(scores)
    low, high = comparison.means["low"].to_numpy(), comparison.means["high"].to_numpy()
    assert (high[0], low[1]) == (1.0, 0.0)
    np.testing.assert_allclose((low[0], high[1]), (alone.low[0], alone.high[1]))
    volume = compare_scores(paired(scores.values, key=VOLUME))
    np.testing.assert_allclose(volume.means["high"], alone.high)


# level and power


def null_differences(kind, num_cases, num_trials, seed):
    """Differences of two methods that are equally good: one trial per column."""
    rng = np.random.default_rng(seed)
    shape = (num_cases, num_trials)
    if kind == "normal":
        return rng.standard_normal(shape)
    # Dice of two exchangeable methods: bounded, skewed, and each method sometimes fails
    base = rng.beta(8, 2, shape)
    scores = [
        np.clip(
            base + 0.03 * rng.standard_normal(shape) - (rng.random(shape) < 0.05) * 0.3 * rng.random(shape),
            0,
            1,
        )
        for _ in range(2)
    ]
    return scores[0] - scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", [24, 60, 200])
def test_the_level_is_5_percent_within_sampling_error(num_cases):
    num_trials = 4000
    three_errors = 3 * np.sqrt(0.05 * 0.95 / num_trials)
    normal = null_differences("normal", num_cases, num_trials, seed=num_cases)
    dice = null_differences("dice", num_cases, num_trials, seed=num_cases + 1)

    rate = {
        "normal": (paired_test(normal, num_resamples=2000).p_flips < 0.05).mean(),
        "dice": (paired_test(dice, num_resamples=2000).p_flips < 0.05).mean(),
    }
    for name, measured in rate.items():
        assert abs(measured - 0.05) < three_errors, (name, measured)
    # the larger of two p-values finds a little less, but not much
    found = (paired_test(normal, num_resamples=2000).p < 0.05).mean()
    assert 0.035 < found < 0.05 + three_errors


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", [6, 12, 24, 48])
def test_the_default_finds_nothing_too_often_with_few_exchangeable_or_moderately_skewed_cases(num_cases):
    num_trials, rng = 4000, np.random.default_rng(num_cases)
    three_errors = 3 * np.sqrt(0.05 * 0.95 / num_trials)
    shape = (num_cases, num_trials)
    nulls = {
        "dice": null_differences("dice", num_cases, num_trials, seed=num_cases),
        "heavy tails": rng.standard_t(3, shape),
        "exponential": rng.exponential(1, shape) - 1,
        "gamma": 2 - rng.gamma(2, 1, shape),
    }
    for name, columns in nulls.items():
        assert (paired_test(columns, num_resamples=2000).p < 0.05).mean() < 0.05 + three_errors, name
    # a reason for two tests: one alone calls too many of these skewed differences significant
    if num_cases == 12:
        assert (paired_test(nulls["exponential"], num_resamples=2000).p_flips < 0.05).mean() > 0.07


@pytest.mark.slow
def test_the_level_holds_over_patients_but_not_over_single_cases():
    num_trials, rng = 2000, np.random.default_rng(15)
    groups = np.repeat(np.arange(40), 4)
    columns = rng.standard_normal((40, num_trials))[groups] + 0.5 * rng.standard_normal((160, num_trials))
    names = [f"p{number:02}" for number in groups]
    three_errors = 3 * np.sqrt(0.05 * 0.95 / num_trials)
    assert abs((paired_test(columns, groups=names, num_resamples=2000).p < 0.05).mean() - 0.05) < three_errors
    assert (
        abs((paired_test(columns, groups=names, num_resamples=2000).p_flips < 0.05).mean() - 0.05)
        < three_errors
    )
    assert (paired_test(columns, num_resamples=2000).p < 0.05).mean() > 0.2


def clustered(rng):
    """Scores of two equally good methods: 15 patients whose 4 cases each are alike."""
    gain = rng.standard_normal(15).repeat(4) + 0.3 * rng.standard_normal(60)
    return paired(np.stack([gain, np.zeros(60)], 1), patients=tuple(f"p{case // 4:02}" for case in range(60)))


def test_equal_methods_on_clustered_cases_are_seldom_called_different_unless_cases_are_resampled():
    rng = np.random.default_rng(24)
    trials = [clustered(rng) for _ in range(300)]
    alone = [replace(each, patients=each.cases) for each in trials]
    patients, cases = (
        np.mean([compare_scores(each, num_resamples=200).pairs["p"].iloc[0] < 0.05 for each in part])
        for part in (trials, alone)
    )
    assert patients < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert cases > 0.2


@pytest.mark.slow
def test_the_family_wise_error_stays_below_5_percent_after_holm():
    rng = np.random.default_rng(16)
    wrong = sum(
        len(compare_scores(paired(rng.standard_normal((40, 4))), num_resamples=400).best) < 4
        for _ in range(1000)
    )
    assert wrong / 1000 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.slow
def test_the_power_for_half_a_standard_deviation_with_34_cases_is_80_percent():
    # a textbook example: effect 0.5, n = 34, power 0.81 for the paired t-test
    columns = np.random.default_rng(17).standard_normal((34, 4000)) + 0.5
    expected = 1 - stats.nct.cdf(stats.t.ppf(0.975, 33), 33, 0.5 * np.sqrt(34))
    assert expected == pytest.approx(0.81, abs=0.01)
    assert (paired_test(columns, num_resamples=2000).p < 0.05).mean() == pytest.approx(expected, abs=0.03)
    assert (paired_test(columns, num_resamples=2000).p_flips < 0.05).mean() == pytest.approx(
        expected, abs=0.03
    )


@pytest.mark.slow
def test_intervals_cover_the_truth_nearly_as_often_as_their_level():
    columns = np.random.default_rng(18).exponential(1, (60, 3000))
    result = paired_test(columns, num_resamples=2000)
    covered = ((result.low <= 1) & (result.high >= 1)).mean()
    assert 0.92 < covered < 0.965


@pytest.mark.parametrize("score", [0.8, 1e-3, 250.0])
def test_a_difference_of_the_last_digit_in_every_case_is_no_difference(score):
    def compared(second):
        rows = [
            CaseRow(f"c{case}", f"c{case}", 0, method, "mean", "volume_error", value * (1 + case / 10))
            for case in range(10)
            for method, value in (("a", score), ("b", second))
        ]
        return compare_cases(table_of(rows), "volume_error")

    rounded = compared(score * (1 + 1e-15))
    pair = rounded.pairs.loc["a", "b"]
    assert pair.difference == 0
    assert pair.p == pair.p_single == pair.p_flips == 1
    assert rounded.best == ("a", "b")
    # a difference that can be told from rounding is kept, however small
    assert compared(score * (1 + 1e-9)).best == ("a",)
