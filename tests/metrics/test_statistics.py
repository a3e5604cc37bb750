"""Paired tests compared with SciPy, plain loops and closed forms; level and power by simulation (slow)."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from semidice.metrics import (
    CaseRow,
    CaseTable,
    compare_cases,
    compare_scores,
    holm,
    paired_bootstrap,
    permutation_test,
)
from semidice.metrics.pairing import PairedScores

INTERVALS = ["combined", "studentised", "percentile", "bca"]


def differences(num_cases=40, shift=0.3, seed=0):
    """Skewed differences, one column."""
    return np.random.default_rng(seed).exponential(1, (num_cases, 1)) - 1 + shift


def paired(values, methods=None, patients=None, metric="dice_score"):
    values = np.asarray(values, dtype=float)
    cases = tuple(f"case{number:04}" for number in range(len(values)))
    methods = methods or tuple(f"method{number}" for number in range(values.shape[1]))
    return PairedScores(metric, "mean", cases, patients or cases, methods, values, 0)


# independent references


@pytest.mark.parametrize(("interval", "scipy_name"), [("percentile", "percentile"), ("bca", "BCa")])
def test_intervals_equal_those_of_scipy_within_resampling_error(interval, scipy_name):
    column = differences()
    result = paired_bootstrap(column, interval=interval, num_resamples=20_000)
    reference = stats.bootstrap(
        (column[:, 0],), np.mean, method=scipy_name, n_resamples=20_000, random_state=np.random.default_rng(5)
    )
    error = column.std(ddof=1) / np.sqrt(len(column))
    assert result.low[0] == pytest.approx(reference.confidence_interval.low, abs=0.06 * error)
    assert result.high[0] == pytest.approx(reference.confidence_interval.high, abs=0.06 * error)


def test_the_studentised_test_equals_a_plain_loop_within_resampling_error():
    column = differences(shift=0.25)[:, 0]
    rng = np.random.default_rng(3)

    def t_value(sample, centre):
        return (sample.mean() - centre) / (sample.std(ddof=1) / np.sqrt(len(sample)))

    drawn = [t_value(rng.choice(column, len(column)), column.mean()) for _ in range(20_000)]
    p = np.mean(np.abs(drawn) >= abs(t_value(column, 0)))
    half_width = np.quantile(np.abs(drawn), 0.95) * column.std(ddof=1) / np.sqrt(len(column))
    result = paired_bootstrap(column[:, None], num_resamples=20_000, interval="studentised")
    assert result.p[0] == pytest.approx(p, abs=0.01)
    assert result.high[0] - result.value[0] == pytest.approx(half_width, rel=0.03)
    assert result.value[0] - result.low[0] == pytest.approx(half_width, rel=0.03)


def test_the_studentised_test_equals_the_t_test_on_normal_differences():
    rng = np.random.default_rng(8)
    columns = rng.standard_normal((30, 12)) + np.linspace(0, 0.6, 12)
    result = paired_bootstrap(columns, num_resamples=20_000, interval="studentised")
    reference = stats.ttest_1samp(columns, 0)
    np.testing.assert_allclose(result.p, reference.pvalue, atol=0.025)
    interval = reference.confidence_interval()
    np.testing.assert_allclose(result.low, interval.low, atol=0.05)
    np.testing.assert_allclose(result.high, interval.high, atol=0.05)


def test_the_percentile_p_is_twice_the_smaller_tail():
    column = differences(shift=0.25)
    rng = np.random.default_rng(1)
    drawn = rng.choice(column[:, 0], (20_000, len(column))).mean(1)
    expected = 2 * min((drawn < 0).mean(), (drawn > 0).mean())
    assert paired_bootstrap(column, interval="percentile").p[0] == pytest.approx(expected, abs=0.01)


def test_the_exact_permutation_test_equals_that_of_scipy():
    columns = np.random.default_rng(2).standard_normal((11, 6)) + np.linspace(0, 1, 6)
    result = permutation_test(columns)
    reference = stats.permutation_test(
        (columns,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    np.testing.assert_allclose(result, reference.pvalue, atol=1e-12)


def test_the_sampled_permutation_test_equals_that_of_scipy_within_resampling_error():
    columns = np.random.default_rng(4).standard_normal((60, 4)) + np.array([0, 0.15, 0.3, 0.5])
    reference = stats.permutation_test(
        (columns,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        n_resamples=10_000,
        random_state=np.random.default_rng(6),
    )
    np.testing.assert_allclose(permutation_test(columns), reference.pvalue, atol=0.02)


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
        result = paired_bootstrap(column[:, None], num_resamples=20_000)
        assert (2 * tail > flipped.pvalue) == (shift < 0)
        assert result.p[0] == pytest.approx(max(2 * tail, flipped.pvalue), abs=0.01)


def test_the_combined_interval_is_of_all_means_that_its_two_tests_do_not_reject():
    # groups of unequal size; a shift of every case by m tests the mean m
    rng = np.random.default_rng(22)
    sizes = rng.integers(1, 4, 12)
    groups = [f"p{number:02}" for number in np.repeat(np.arange(12), sizes)]
    column = rng.exponential(1, (len(groups), 1))
    for level in (0.05, 0.2):
        result = paired_bootstrap(column, groups=groups, level=level)
        width = result.high[0] - result.low[0]
        for end, outwards in ((result.low[0], -1), (result.high[0], 1)):
            p = [
                paired_bootstrap(column - end - step * outwards * width, groups=groups).p[0]
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
    drawn = [np.concatenate([members[k] for k in rng.integers(0, 15, 15)]).mean() for _ in range(20_000)]
    result = paired_bootstrap(column, groups=groups.tolist(), interval="percentile", num_resamples=20_000)
    low, high = np.quantile(drawn, [0.025, 0.975])
    spread = np.std(drawn)
    assert result.low[0] == pytest.approx(low, abs=0.06 * spread)
    assert result.high[0] == pytest.approx(high, abs=0.06 * spread)
    # cases of a patient are alike; treating them as independent gives intervals that are far too narrow
    naive = paired_bootstrap(column, interval="percentile")
    assert naive.high[0] - naive.low[0] < 0.8 * (high - low)
    studentised = paired_bootstrap(column, groups=groups.tolist())
    assert studentised.high[0] - studentised.low[0] > high - low


def test_patients_with_one_case_each_give_the_same_result_as_cases():
    column = differences()
    groups = [f"p{number:03}" for number in range(len(column))]
    for interval in INTERVALS:
        for result, reference in zip(
            paired_bootstrap(column, groups=groups, interval=interval),
            paired_bootstrap(column, interval=interval),
            strict=True,
        ):
            np.testing.assert_allclose(result, reference)
    np.testing.assert_array_equal(permutation_test(column, groups=groups), permutation_test(column))


def test_flipping_the_sign_of_a_patient_flips_all_their_cases():
    column = np.array([[1.0], [1.0], [2.0], [-1.0], [0.5], [0.25]])
    groups = ["a", "a", "b", "c", "d", "d"]
    sums = np.array([2.0, 2.0, -1.0, 0.75])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    expected = (np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12).mean()
    assert permutation_test(column, groups=groups)[0] == expected


# properties


@pytest.mark.parametrize("interval", INTERVALS)
def test_the_interval_excludes_0_if_p_is_below_the_level(interval):
    rng = np.random.default_rng(9)
    columns = rng.standard_normal((25, 300)) + rng.uniform(-0.6, 0.6, 300)
    result = paired_bootstrap(columns, interval=interval, num_resamples=2000)
    outside = (result.low > 0) | (result.high < 0)
    # the ends of percentile intervals are interpolated
    near_the_edge = np.abs(result.p - 0.05) < (0.003 if interval in ("percentile", "bca") else 0)
    assert 30 < outside.sum() < 270
    assert (outside == (result.p < 0.05))[~near_the_edge].all()


@pytest.mark.parametrize("interval", INTERVALS)
def test_swapping_two_methods_changes_only_the_signs(interval):
    rng = np.random.default_rng(10)
    values = rng.random((30, 2))
    original = compare_scores(paired(values), interval=interval)
    swapped = compare_scores(paired(values[:, ::-1]), interval=interval)
    assert original.difference[0, 1] == pytest.approx(-swapped.difference[0, 1])
    assert original.low[0, 1] == pytest.approx(-swapped.high[0, 1], abs=1e-4)
    assert original.p[0, 1] == pytest.approx(swapped.p[0, 1], abs=1e-3)
    np.testing.assert_allclose(original.difference, -original.difference.T)
    np.testing.assert_allclose(original.low, -original.high.T)
    assert original.difference[0, 1] == pytest.approx(values[:, 0].mean() - values[:, 1].mean())


def test_the_same_seed_gives_the_same_bits_in_any_order_of_the_rows():
    rng = np.random.default_rng(11)
    rows = [
        CaseRow(f"c{number}", f"p{number // 2}", 0, method, "mean", "dice_score", rng.random())
        for number in range(30)
        for method in ("SDL", "DML1", "DML2")
    ]
    first = compare_cases(
        CaseTable.from_rows(rows), "dice_score", unit="patient", methods=["SDL", "DML1", "DML2"]
    )
    mixed = [rows[number] for number in rng.permutation(len(rows))]
    reordered = compare_cases(
        CaseTable.from_rows(mixed), "dice_score", unit="patient", methods=["SDL", "DML1", "DML2"]
    )
    for name in (
        "mean",
        "difference",
        "low",
        "high",
        "p",
        "low_holm",
        "high_holm",
        "p_holm",
        "p_permutation",
    ):
        np.testing.assert_array_equal(getattr(first, name), getattr(reordered, name))
    other_seed = compare_cases(CaseTable.from_rows(rows), "dice_score", seed=1)
    assert (other_seed.p != first.p).any()
    assert (first.num_cases, first.num_patients) == (30, 15)


@pytest.mark.parametrize("interval", INTERVALS)
def test_equal_methods_have_p_1_and_an_interval_of_0(interval):
    same = np.random.default_rng(12).random((20, 1)).repeat(2, axis=1)
    comparison = compare_scores(paired(same), interval=interval)
    assert comparison.p[0, 1] == comparison.p_permutation[0, 1] == 1
    assert comparison.low[0, 1] == comparison.high[0, 1] == 0
    assert comparison.best() == comparison.methods


@pytest.mark.parametrize("interval", INTERVALS)
def test_five_cases_are_never_significant_and_six_can_be(interval):
    for num_cases, significant in ((2, False), (5, False), (6, True)):
        column = 1 + 1e-3 * np.arange(num_cases)[:, None]
        assert (paired_bootstrap(column, interval=interval).p[0] < 0.05) == significant
        assert (permutation_test(column)[0] < 0.05) == significant


def test_p_is_never_0():
    column = 10 + np.random.default_rng(0).standard_normal((100, 1))
    for interval in INTERVALS:
        assert paired_bootstrap(column, interval=interval).p[0] >= 1 / 10_001
    assert permutation_test(column)[0] == 1 / 10_001


# the best set


def gain_scores(gains, *, noise=0.02, num_cases=60, metric="dice_score"):
    rng = np.random.default_rng(13)
    base = rng.uniform(0.5, 0.8, (num_cases, 1))
    values = base + np.asarray(gains) + noise * rng.standard_normal((num_cases, len(gains)))
    return paired(values, methods=tuple("abcd"[: len(gains)]), metric=metric)


def test_the_best_methods_are_those_that_no_other_method_significantly_beats():
    comparison = compare_scores(gain_scores([0.0, 0.05, 0.0501, 0.02]))
    assert comparison.best() == ("b", "c")
    assert comparison.superior()[1].tolist() == [True, False, False, True]
    lower = compare_scores(gain_scores([0.0, 0.05, 0.0501, 0.02], metric="calibration_error"))
    assert lower.best() == ("a",)
    assert compare_scores(gain_scores([0.0, 0.0, 0.0])).best() == ("a", "b", "c")


def test_holm_can_keep_a_method_that_uncorrected_p_values_exclude_from_the_best():
    rng = np.random.default_rng(21)
    for _ in range(200):
        comparison = compare_scores(
            paired(rng.standard_normal((12, 5)) + np.array([0, 0, 0, 0, 0.9])), num_resamples=200
        )
        assert set(comparison.best(correction="none")) <= set(comparison.best())
        if comparison.best(correction="none") != comparison.best():
            return
    pytest.fail("200 comparisons and Holm never made a difference")


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("correction", ["holm", "none"])
def test_every_interval_excludes_0_exactly_where_the_p_shown_next_to_it_is_below_the_level(
    interval, correction
):
    rng = np.random.default_rng(23)
    found = 0
    for num_cases in (4, 6, 12, 40):
        for _ in range(20):
            values = rng.standard_normal((num_cases, 4)) + rng.uniform(-1, 1, 4)
            comparison = compare_scores(paired(values), interval=interval, num_resamples=300)
            shown = comparison.corrected(correction)
            off_diagonal = ~np.eye(4, dtype=bool)
            excludes = ((shown.low > 0) | (shown.high < 0))[off_diagonal]
            np.testing.assert_array_equal(excludes, (shown.p < 0.05)[off_diagonal])
            found += excludes.sum()
    assert 100 < found < 900


def test_corrected_intervals_are_bonferroni_s_unless_holm_finds_more():
    rng = np.random.default_rng(24)
    kinds = set()
    for _ in range(40):
        values = rng.standard_normal((30, 3)) + rng.uniform(-0.5, 0.5, 3)
        comparison = compare_scores(paired(values, metric="volume_error_ml"), num_resamples=1000)
        pairs = np.triu_indices(3, 1)
        columns = values[:, pairs[0]] - values[:, pairs[1]]
        p, p_holm = comparison.p[pairs], comparison.p_holm[pairs]
        agrees = ((p < 0.05 / 3) == (p_holm < 0.05)).all()
        kinds.add(bool(agrees))
        bonferroni = paired_bootstrap(columns, level=0.05 / 3, num_resamples=1000)
        if agrees:
            np.testing.assert_allclose(comparison.low_holm[pairs], bonferroni.low)
            np.testing.assert_allclose(comparison.high_holm[pairs], bonferroni.high)
        # between the interval of a single pair and that of Bonferroni
        assert (comparison.low_holm[pairs] <= comparison.low[pairs]).all()
        assert (comparison.high_holm[pairs] >= comparison.high[pairs]).all()
        assert (comparison.low_holm[pairs] >= bonferroni.low - 1e-12).all()
        assert (comparison.high_holm[pairs] <= bonferroni.high + 1e-12).all()
    assert kinds == {True, False}


def test_with_a_baseline_only_its_pairs_are_compared_and_corrected():
    rng = np.random.default_rng(5)
    values = 0.5 + 0.1 * rng.random((20, 4)) + [0.0, 0.05, 0.03, 0.01]
    names = tuple(f"c{number}" for number in range(20))
    scores = PairedScores("dice_score", "mean", names, names, ("a", "b", "c", "d"), values, 0)
    everything, against = compare_scores(scores), compare_scores(scores, baseline="c")
    others = [0, 1, 3]
    np.testing.assert_array_equal(against.p[2, others], everything.p[2, others])
    np.testing.assert_array_equal(against.p_holm[others, 2], holm(everything.p[others, 2]))
    assert (against.p_holm[2, others] <= everything.p_holm[2, others]).all()
    np.testing.assert_array_equal(against.difference[2], everything.difference[2])
    np.testing.assert_array_equal(against.mean, everything.mean)
    excludes_0 = (against.low_holm[2, others] > 0) | (against.high_holm[2, others] < 0)
    np.testing.assert_array_equal(excludes_0, against.p_holm[2, others] < 0.05)
    assert np.isnan(against.p[0, 1])
    assert not against.superior()[np.ix_(others, others)].any()
    with pytest.raises(ValueError, match="baseline must be one of a, b, c, d; got 'e'"):
        compare_scores(scores, baseline="e")


def test_the_interval_of_a_difference_of_shares_stays_between_minus_1_and_1():
    rng = np.random.default_rng(25)
    values = np.stack([rng.uniform(0.9, 1, 5), rng.uniform(0, 0.1, 5), rng.uniform(0, 1, 5)], 1)
    values[0] = [0.2, 0.9, 0.5]
    for interval in INTERVALS:
        comparison = compare_scores(paired(values), interval=interval)
        for low, high in ((comparison.low, comparison.high), (comparison.low_holm, comparison.high_holm)):
            assert low.min() >= -1
            assert high.max() <= 1
    volume = compare_scores(paired(values, metric="volume_error_ml"))
    assert volume.high_holm.max() > 1


def test_the_interval_of_a_mean_equals_that_of_the_method_alone():
    scores = gain_scores([0.0, 0.1])
    comparison = compare_scores(scores)
    alone = paired_bootstrap(scores.values)
    np.testing.assert_allclose(comparison.mean, alone.value)
    np.testing.assert_allclose(comparison.mean_low, alone.low)
    np.testing.assert_allclose(comparison.mean_high, alone.high)


def test_the_interval_of_a_share_stays_between_0_and_1():
    # nearly all scores are close to 1, so an interval symmetric about their mean would exceed 1
    high_scores = np.array([1.0, 1.0, 0.98, 1.0, 0.99, 1.0, 0.97, 1.0, 0.7, 0.99, 1.0, 0.98])
    scores = paired(np.stack([high_scores, 1 - high_scores], 1))
    alone = paired_bootstrap(scores.values)
    assert alone.high[0] > 1
    assert alone.low[1] < 0
    comparison = compare_scores(scores)
    assert (comparison.mean_high[0], comparison.mean_low[1]) == (1.0, 0.0)
    np.testing.assert_allclose(
        (comparison.mean_low[0], comparison.mean_high[1]), (alone.low[0], alone.high[1])
    )
    volume = compare_scores(paired(scores.values, metric="volume_error_ml"))
    np.testing.assert_allclose(volume.mean_high, alone.high)


# refused input


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (np.zeros((1, 1)), {}, "two or more cases or patients; got 1"),
        (np.full((5, 1), np.nan), {}, r"finite numbers.*5 that are not"),
        (np.zeros(5), {}, r"\(cases, columns\); got shape \(5,\)"),
        (np.zeros((5, 1)), {"num_resamples": 10}, "num_resamples must be 100 to 1000000; got 10"),
        (np.zeros((5, 1)), {"level": 0.0}, "level must lie between 0 and 1"),
        (np.zeros((5, 1)), {"groups": ["a"]}, "one name per case; got 1 for 5"),
    ],
)
def test_the_error_names_wrong_input(column, options, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(column, **options)


def test_a_metric_without_a_known_direction_needs_higher_is_better():
    with pytest.raises(ValueError, match="does not say whether higher is better"):
        compare_scores(gain_scores([0.0, 0.1], metric="hd95"))
    assert compare_scores(gain_scores([0.0, 0.1], metric="hd95"), higher_is_better=False).best() == ("a",)


# speed, level and power


def test_ten_methods_on_a_thousand_cases_take_under_5_seconds():
    rng = np.random.default_rng(14)
    scores = paired(rng.uniform(0.5, 0.9, (1000, 1)) + 0.05 * rng.standard_normal((1000, 10)))
    start = time.perf_counter()
    comparison = compare_scores(scores, num_resamples=10_000)
    assert time.perf_counter() - start < 5
    assert comparison.p.shape == (10, 10)


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

    def found(columns, interval):
        return (paired_bootstrap(columns, num_resamples=2000, interval=interval).p < 0.05).mean()

    rate = {
        ("studentised", "normal"): found(normal, "studentised"),
        ("permutation", "normal"): (permutation_test(normal, num_resamples=2000) < 0.05).mean(),
        ("permutation", "dice"): (permutation_test(dice, num_resamples=2000) < 0.05).mean(),
    }
    for name, measured in rate.items():
        assert abs(measured - 0.05) < three_errors, (name, measured)
    # the larger of two p-values finds a little less, but not much
    assert 0.035 < found(normal, "combined") < 0.05 + three_errors
    # with rare failures the studentised bootstrap may reject too rarely, but not too often
    assert found(dice, "studentised") < 0.05 + three_errors
    # a reason for the default: the percentile bootstrap rejects too often with few cases
    if num_cases == 24:
        assert found(normal, "percentile") > 0.05 + three_errors


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
        assert (paired_bootstrap(columns, num_resamples=2000).p < 0.05).mean() < 0.05 + three_errors, name
    # the reason for the default: the other two tests call too many of these skewed differences significant
    if num_cases == 12:
        alone = paired_bootstrap(nulls["exponential"], num_resamples=2000, interval="studentised").p
        assert (alone < 0.05).mean() > 0.05 + three_errors
        assert (permutation_test(nulls["exponential"], num_resamples=2000) < 0.05).mean() > 0.07


@pytest.mark.slow
def test_the_level_holds_over_patients_but_not_over_single_cases():
    num_trials, rng = 2000, np.random.default_rng(15)
    groups = np.repeat(np.arange(40), 4)
    columns = rng.standard_normal((40, num_trials))[groups] + 0.5 * rng.standard_normal((160, num_trials))
    names = [f"p{number:02}" for number in groups]
    three_errors = 3 * np.sqrt(0.05 * 0.95 / num_trials)
    assert (
        abs((paired_bootstrap(columns, groups=names, num_resamples=2000).p < 0.05).mean() - 0.05)
        < three_errors
    )
    assert (
        abs((permutation_test(columns, groups=names, num_resamples=2000) < 0.05).mean() - 0.05) < three_errors
    )
    assert (paired_bootstrap(columns, num_resamples=2000).p < 0.05).mean() > 0.2


def clustered(rng):
    """Scores of two equally good methods: 15 patients whose 4 cases each are alike."""
    gain = rng.standard_normal(15).repeat(4) + 0.3 * rng.standard_normal(60)
    return paired(np.stack([gain, np.zeros(60)], 1), patients=tuple(f"p{case // 4:02}" for case in range(60)))


def test_patients_are_resampled_by_default_if_a_patient_has_several_cases():
    scores = clustered(np.random.default_rng(23))
    default = compare_scores(scores)
    assert default.unit == "patient"
    np.testing.assert_array_equal(default.p, compare_scores(scores, unit="patient").p)
    by_case = compare_scores(scores, unit="case")
    assert by_case.unit == "case"
    assert by_case.high[0, 1] - by_case.low[0, 1] < 0.8 * (default.high[0, 1] - default.low[0, 1])
    assert compare_scores(scores._replace(patients=scores.cases)).unit == "case"


def test_equal_methods_on_clustered_cases_are_seldom_called_different_unless_cases_are_resampled():
    rng = np.random.default_rng(24)
    trials = [clustered(rng) for _ in range(300)]
    rate = {
        unit: np.mean([compare_scores(each, unit=unit, num_resamples=200).p[0, 1] < 0.05 for each in trials])
        for unit in (None, "case")
    }
    assert rate[None] < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert rate["case"] > 0.2


@pytest.mark.slow
def test_the_family_wise_error_stays_below_5_percent_after_holm():
    rng = np.random.default_rng(16)
    wrong = sum(
        len(compare_scores(paired(rng.standard_normal((40, 4))), num_resamples=400).best()) < 4
        for _ in range(1000)
    )
    assert wrong / 1000 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.slow
def test_the_power_for_half_a_standard_deviation_with_34_cases_is_80_percent():
    # a textbook example: effect 0.5, n = 34, power 0.81 for the paired t-test
    columns = np.random.default_rng(17).standard_normal((34, 4000)) + 0.5
    expected = 1 - stats.nct.cdf(stats.t.ppf(0.975, 33), 33, 0.5 * np.sqrt(34))
    assert expected == pytest.approx(0.81, abs=0.01)
    assert (paired_bootstrap(columns, num_resamples=2000).p < 0.05).mean() == pytest.approx(
        expected, abs=0.03
    )
    assert (permutation_test(columns, num_resamples=2000) < 0.05).mean() == pytest.approx(expected, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("interval", INTERVALS)
def test_intervals_cover_the_truth_nearly_as_often_as_their_level(interval):
    columns = np.random.default_rng(18).exponential(1, (60, 3000))
    result = paired_bootstrap(columns, num_resamples=2000, interval=interval)
    covered = ((result.low <= 1) & (result.high >= 1)).mean()
    assert 0.92 < covered < 0.965


@pytest.mark.parametrize("score", [0.8, 1e-3, 250.0])
def test_a_difference_of_the_last_digit_in_every_case_is_no_difference(score):
    def compared(second):
        rows = [
            CaseRow(f"c{case}", f"c{case}", 0, method, "mean", "volume_error_ml", value * (1 + case / 10))
            for case in range(10)
            for method, value in (("a", score), ("b", second))
        ]
        return compare_cases(CaseTable.from_rows(rows), "volume_error_ml")

    rounded = compared(score * (1 + 1e-15))
    assert rounded.difference[0, 1] == 0
    assert rounded.p[0, 1] == rounded.p_holm[0, 1] == rounded.p_permutation[0, 1] == 1
    assert rounded.best() == ("a", "b")
    # a difference that can be told from rounding is kept, however small
    assert compared(score * (1 + 1e-9)).best() == ("a",)
