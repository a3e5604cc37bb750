"""Several seeds: means over seeds within a case, intervals that cover the draw of the seeds, the spread."""

import numpy as np
import pytest
from case_rows import CaseRow
from case_rows import table_of as of_rows
from scipy import optimize, stats

from semidice.statistics import compare_cases, concatenate, means_table, paired, paired_test, pairs_table
from semidice.statistics.pairing import mean_over_seeds, shared_seeds
from semidice.statistics.seeds import seed_variance, with_seed_variance

METHODS, SEEDS, NUM_CASES, NUM_FOLDS = ("a", "b", "c"), (0, 1, 2), 24, 3


def assert_equal(found, expected, *, but=(), rtol=0):
    """Whether means and pairs are equal, but for some columns."""
    for ours, theirs in ((found.means, expected.means), (found.pairs, expected.pairs)):
        columns = [name for name in ours if name not in ("spread", *but)]
        numbers = ours[columns].astype(float), theirs[columns].astype(float)
        np.testing.assert_allclose(*numbers, rtol=rtol, atol=1e-3 * rtol)


def scores(*, effect=0.05, seeds=SEEDS, rng=0):
    """Scores (seeds, cases, methods) of methods that differ, with an effect of each training."""
    rng = np.random.default_rng(rng)
    values = 0.6 + 0.02 * np.arange(len(METHODS)) + 0.05 * rng.standard_normal((NUM_CASES, len(METHODS)))
    training = effect * rng.standard_normal((len(seeds), NUM_FOLDS, len(METHODS)))
    noise = 0.03 * rng.standard_normal((len(seeds), NUM_CASES, len(METHODS)))
    return (values + training[:, np.arange(NUM_CASES) % NUM_FOLDS] + noise).clip(0, 1)


def table_of(values, seeds=SEEDS, *, methods=METHODS, cases_per_patient=1):
    """The case table of scores (seeds, cases, methods)."""
    return of_rows(
        CaseRow(
            f"case{case:02}",
            f"patient{case // (NUM_FOLDS * cases_per_patient)}-{case % NUM_FOLDS}",
            case % NUM_FOLDS,
            method,
            "mean",
            "dice_score",
            values[number, case, column],
            seed,
        )
        for number, seed in enumerate(seeds)
        for case in range(values.shape[1])
        for column, method in enumerate(methods)
    )


def averaged_by_hand(values, **options):
    return table_of(values.mean(0, keepdims=True), (-1,), **options)


@pytest.mark.parametrize("cases_per_patient", [1, 2])
def test_over_patients_alone_the_statistics_are_those_of_scores_averaged_by_hand(cases_per_patient):
    values = scores()
    found = compare_cases(
        table_of(values, cases_per_patient=cases_per_patient), "dice_score", cover_seeds=False
    )
    expected = compare_cases(averaged_by_hand(values, cases_per_patient=cases_per_patient), "dice_score")
    assert found.by_patient == (cases_per_patient == 2)
    assert_equal(found, expected)
    assert (found.seeds, found.covers_seeds, expected.seeds) == (SEEDS, False, ())


def test_a_table_with_one_seed_gives_the_numbers_of_a_table_without_seeds():
    values = scores(seeds=(7,))
    with_column, without = (compare_cases(table_of(values, seeds), "dice_score") for seeds in ((7,), (-1,)))
    assert_equal(with_column, without)
    assert (with_column.seeds, with_column.covers_seeds) == ((), False)
    assert with_column.means["spread"].isna().all()
    assert means_table([with_column]).records == means_table([without]).records


def test_equal_trainings_add_nothing_to_an_interval():
    values = np.repeat(scores(seeds=(0,)), 3, axis=0)
    covered, plain = (
        compare_cases(table_of(values), "dice_score", cover_seeds=cover) for cover in (True, False)
    )
    assert_equal(covered, plain, rtol=1e-9)


def brute_force_variance(values, folds, patients):
    """v and w of the docstring of `seeds`, from their definitions, one number at a time."""
    num_seeds, num_cases = values.shape
    mean = values.mean(0)
    of_seeds = of_cases = 0.0
    for fold in sorted(set(folds)):
        cases = [case for case in range(num_cases) if folds[case] == fold]
        names = sorted({patients[case] for case in cases})
        for seed in range(num_seeds):
            of_patient = {
                name: sum(values[seed, case] - mean[case] for case in cases if patients[case] == name)
                for name in names
            }
            total = sum(of_patient.values())
            of_seeds += total**2
            if len(names) > 1:
                sizes = {name: sum(patients[case] == name for case in cases) for name in names}
                rest = sum((of_patient[name] - sizes[name] * total / len(cases)) ** 2 for name in names)
                of_cases += rest * len(names) / (len(names) - 1)
    scale = (num_seeds - 1) * num_seeds * num_cases**2
    return of_seeds / scale, of_cases / scale


def test_the_variance_over_seeds_follows_its_definition_also_with_several_cases_of_a_patient():
    values = scores()
    folds = [case % NUM_FOLDS for case in range(NUM_CASES)]
    # unequal patients; the last fold has one
    patients = ["only" if fold == 2 else f"{fold}-{case // 7}" for case, fold in enumerate(folds)]
    found = seed_variance(values, folds, patients)
    for column in range(len(METHODS)):
        expected = brute_force_variance(values[..., column], folds, patients)
        np.testing.assert_allclose((found.of_seeds[column], found.of_cases[column]), expected, rtol=1e-12)
    assert found.freedom == NUM_FOLDS * (len(SEEDS) - 1)
    without_folds = seed_variance(values, [-1] * NUM_CASES)
    # without folds, the variance of the mean of each seed, divided by their number
    expected = values.mean(1).var(0, ddof=1) / len(SEEDS)
    np.testing.assert_allclose(without_folds.of_seeds, expected, rtol=1e-12)


@pytest.mark.parametrize("effect", [0.0, 0.02, 0.1])
def test_interval_and_p_follow_their_definition(effect):
    values = scores(effect=effect)
    folds = [case % NUM_FOLDS for case in range(NUM_CASES)]
    patients = paired_test(values.mean(0) - 0.55)
    variance = seed_variance(values - 0.55, folds)
    found = with_seed_variance(patients, variance, 0.05)
    t, z = stats.t.ppf(0.975, variance.freedom), stats.norm.ppf(0.975)
    for column in range(len(METHODS)):
        v, w, value = variance.of_seeds[column], variance.of_cases[column], patients.value[column]
        more = max(0, t**2 * v - z**2 * w)
        low = value - np.sqrt((value - patients.low[column]) ** 2 + more)
        high = value + np.sqrt((value - patients.high[column]) ** 2 + more)
        np.testing.assert_allclose((found.low[column], found.high[column]), (low, high), rtol=1e-10)
        error = value / -stats.norm.ppf(patients.p[column] / 2)

        def beyond(log_p, v=v, w=w, error=error, value=value):
            p = np.exp(log_p)
            t, z = stats.t.isf(p / 2, variance.freedom), stats.norm.isf(p / 2)
            return z**2 * error**2 + max(0, t**2 * v - z**2 * w) - value**2

        if beyond(np.log(patients.p[column])) <= 1e-12:
            assert found.p[column] == pytest.approx(patients.p[column], rel=1e-6)
        else:
            expected = np.exp(optimize.brentq(beyond, np.log(patients.p[column]), -1e-9, xtol=1e-14))
            assert found.p[column] == pytest.approx(expected, rel=1e-6)


def test_the_interval_excludes_zero_exactly_where_p_is_below_the_level():
    found = 0
    for seed in range(60):
        comparison = compare_cases(table_of(scores(rng=seed)), "dice_score", num_resamples=400)
        for end in ("", "_single"):
            low, high, p = (comparison.pairs[name + end] for name in ("low", "high", "p"))
            excludes = (low > 0) | (high < 0)
            np.testing.assert_array_equal(excludes, p < 0.05)
            found += int(excludes.sum())
        plain = compare_cases(table_of(scores(rng=seed)), "dice_score", num_resamples=400, cover_seeds=False)
        assert (comparison.pairs["p_single"] >= plain.pairs["p_single"]).all()
        widths = (each.means["high"] - each.means["low"] for each in (comparison, plain))
        assert (next(widths) >= next(widths)).all()
    assert found > 0


def test_the_spread_is_the_standard_deviation_of_the_means_of_the_seeds():
    values = scores()
    comparison = compare_cases(table_of(values), "dice_score")
    means = values.mean(1)
    np.testing.assert_allclose(comparison.seed_means, means, rtol=1e-12)
    np.testing.assert_allclose(comparison.means["spread"], means.std(0, ddof=1), rtol=1e-12)
    pair = (means[:, 0] - means[:, 2]).std(ddof=1)
    assert comparison.pairs.loc["a", "c"].spread == pytest.approx(pair, rel=1e-12)
    table = means_table([comparison])
    assert table.rows[0][1].text.endswith(f"] ± {100 * means[:, 0].std(ddof=1):.2f}")
    assert table.records[0]["seed_spread"] == pytest.approx(means[:, 0].std(ddof=1))
    assert table.records[0]["num_seeds"] == 3
    assert "means over 3 seeds" in table.note
    assert "the draw of patients and seeds" in table.note
    pairs = pairs_table(comparison)
    assert pairs.records[1]["seed_spread"] == pytest.approx(pair)
    assert pairs.rows[1][2].text.endswith(f"± {100 * pair:.2f}")


def test_methods_are_compared_by_the_seeds_that_all_have_and_the_others_are_named():
    values = scores()
    table = table_of(values)
    table = table[(table["method"] != "b") | (table["seed"] != 1)]
    assert shared_seeds(table) == ((0, 2), {1: ("b",)})
    found = compare_cases(table, "dice_score")
    expected = compare_cases(table_of(values[[0, 2]], (0, 2)), "dice_score")
    assert_equal(found, expected)
    apart = table_of(values[:1], (0,), methods=("a",)), table_of(values[:1], (5,), methods=("b",))
    with pytest.raises(ValueError, match=r"a has 0; b has 5; train"):
        compare_cases(concatenate(apart), "dice_score")


def test_a_method_with_one_training_is_compared_with_the_means_and_adds_no_spread():
    values = scores()
    values[:, :, 2] = values[0, :, 2]
    seeded = table_of(values[..., :2], methods=("a", "b"))
    single = table_of(values[:1, :, 2:], (-1,), methods=("c",))
    found = compare_cases(concatenate([seeded, single]), "dice_score")
    expected = compare_cases(table_of(values), "dice_score")
    assert_equal(found, expected, rtol=1e-9)
    assert found.means["spread"].isna().tolist() == [False, False, True]
    assert found.pairs.loc["a", "c"].spread == pytest.approx(found.means.loc["a", "spread"])
    # text of the third method without a spread
    assert "±" not in means_table([found]).rows[2][1].text


def test_a_case_that_one_seed_has_no_score_of_is_dropped_for_all():
    values = scores()
    values[1, 4, 0] = np.nan
    with pytest.raises(ValueError, match="first for case case04 and method a"):
        compare_cases(table_of(values), "dice_score")
    assert compare_cases(table_of(values), "dice_score", drop=True).num_dropped == 1
    averaged = mean_over_seeds(table_of(values))
    assert averaged["value"].isna().sum() == 1
    assert set(averaged["seed"]) == {-1}
    scores_of = paired(averaged, "dice_score", drop=True)
    np.testing.assert_allclose(scores_of.values, np.delete(values, 4, 1).mean(0), rtol=1e-12)
