"""Conformal intervals: coverage by simulation, laws of the correction, distorted phantoms, wrong files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import avg_pool2d

from semidice.data.phantom import make_phantom
from semidice.decisions import (
    ConformalInterval,
    fit_conformal,
    rater_volumes_ml,
    volume_interval,
    volume_ml,
)
from semidice.decisions.conformal import patient_quantile

VOXELS = (10.0, 10.0, 10.0)


def names(num):
    return [f"p{number}" for number in range(num)]


def covered(low, high, volumes):
    """Whether each rater's volume lies in the interval of its case; NaN for an absent rater."""
    inside = (volumes >= low[..., None]) & (volumes <= high[..., None])
    return np.where(np.isnan(volumes), np.nan, inside)


# the quantile


@given(seed=st.integers(0, 10_000), num=st.integers(9, 60))
def test_with_one_observation_per_patient_it_is_the_usual_split_conformal_quantile(seed, num):
    scores = np.random.default_rng(seed).normal(size=(num, 1))
    rank = int(np.ceil(round(0.9 * (num + 1), 9)))
    assert patient_quantile(scores, names(num), 0.9) == np.sort(scores[:, 0])[rank - 1]


@given(seed=st.integers(0, 10_000), level=st.floats(0.05, 0.8))
def test_it_is_the_smallest_score_whose_weight_with_the_new_patient_at_infinity_reaches_the_level(
    seed, level
):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (14, 3)).astype(float)
    scores[rng.random((14, 3)) < 0.3] = np.nan
    scores[:6, 0] = 1.0
    patients = [f"p{number % 6}" for number in range(14)]
    chosen = patient_quantile(scores, patients, level)
    shares = {}
    for value in np.unique(scores[~np.isnan(scores)]):
        of_patients = []
        for patient in set(patients):
            own = scores[[name == patient for name in patients]]
            of_patients.append((own[~np.isnan(own)] <= value).mean())
        shares[value] = sum(of_patients) / 7
    assert chosen == min(value for value, share in shares.items() if share >= level - 1e-9)


def test_repeating_the_cases_of_a_patient_changes_nothing():
    scores = np.random.default_rng(0).normal(size=(30, 2))
    repeated = np.concatenate([scores, scores[3:4], scores[3:4]])
    assert patient_quantile(repeated, [*names(30), "p3", "p3"], 0.9) == patient_quantile(
        scores, names(30), 0.9
    )


@pytest.mark.parametrize(("level", "needed"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_too_few_patients_for_the_level_are_an_error_that_names_the_number_needed(level, needed):
    scores = np.arange(float(needed)).reshape(-1, 1)
    assert patient_quantile(scores, names(needed), level) == needed - 1
    with pytest.raises(ValueError, match=rf"needs {needed} patients with raters or more; got {needed - 1}: "):
        patient_quantile(scores[1:], names(needed)[1:], level)


def test_many_cases_of_few_patients_are_still_too_few():
    scores = np.random.default_rng(0).normal(size=(400, 4))
    with pytest.raises(ValueError, match="needs 9 patients with raters or more; got 8"):
        patient_quantile(scores, [f"p{number % 8}" for number in range(400)], 0.9)


# coverage


def simulated(rng, num_patients, *, num_raters=3):
    """Intervals and raters' volumes of patients with 1 to 6 cases; a patient with many cases is harder."""
    num_cases = rng.integers(1, 7, num_patients)
    owner = np.repeat(np.arange(num_patients), num_cases)
    patient_error = (rng.normal(size=num_patients) * num_cases / 3)[owner]
    expected = rng.lognormal(3, 0.7, len(owner))
    error = patient_error[:, None] + rng.normal(size=(len(owner), num_raters))
    volumes = expected[:, None] * np.exp(0.2 * error)
    volumes[rng.random(volumes.shape) < 0.2] = np.nan
    volumes[:, 0] = np.nan_to_num(volumes[:, 0], nan=1.0)
    low, high = expected * 0.8, expected * 1.1
    return owner, expected[:, None], low[:, None], high[:, None], volumes[:, None]


@pytest.mark.parametrize(("num_patients", "level"), [(9, 0.9), (25, 0.9), (25, 0.6), (80, 0.95)])
def test_a_random_observation_of_a_new_patient_is_covered_at_the_nominal_level(num_patients, level):
    """Patients of unequal numbers of cases and raters, exchangeable; the guarantee is exact on average."""
    coverages = []
    for seed in range(1000):
        rng = np.random.default_rng((seed, num_patients))
        owner, expected, low, high, volumes = simulated(rng, num_patients + 1)
        known, new = owner > 0, owner == 0
        fitted = fit_conformal(
            low[known],
            high[known],
            volumes[known],
            owner[known].astype(str).tolist(),
            level,
            expected=expected[known],
        )
        ends = fitted.apply(low[new], high[new], expected=expected[new])
        coverages.append(np.nanmean(covered(*ends, volumes[new])))
        assert fitted.num_patients == num_patients
    error = np.std(coverages) / np.sqrt(len(coverages))
    assert np.mean(coverages) >= level - 3 * error
    # with distinct scores it is at most level + 2 / (K + 1)
    assert np.mean(coverages) <= level + 2 / (num_patients + 1) + 3 * error


def temperature(prob, value):
    return torch.sigmoid(torch.logit(prob.double(), eps=1e-9) / value).float()


def blur(prob):
    return avg_pool2d(prob, 9, stride=1, padding=4)


DISTORTIONS = {
    "the truth": lambda prob: prob,
    "hard": lambda prob: (prob > 0.5).float(),
    "overconfident": lambda prob: temperature(prob, 0.25),
    "underconfident": lambda prob: temperature(prob, 3.0),
    "blurred": blur,
    "too small": lambda prob: prob**4,
    "too large": lambda prob: prob**0.1,
    "empty": torch.zeros_like,
}


@pytest.fixture(scope="module")
def phantoms():
    """20 seeds of 60 patients with four raters, who differ in every way that a phantom knows."""
    return [make_phantom(60, size=(32, 32), num_raters=4, seed=seed) for seed in range(20)]


def phantom_volumes(phantom, distort):
    prob = distort(phantom.prob[:, 1:])
    expected = volume_ml(prob, spacing_mm=VOXELS, of="probability").double().numpy()
    low, high = (end.numpy() for end in volume_interval(prob, 0.9, spacing_mm=VOXELS))
    return expected, low, high, rater_volumes_ml(phantom.masks, num_channels=1, spacing_mm=VOXELS).numpy()


@pytest.mark.parametrize("name", DISTORTIONS)
def test_corrected_intervals_of_distorted_phantoms_cover_raters_within_2_points_of_the_level_over_20_seeds(
    phantoms, name
):
    before, after = [], []
    for phantom in phantoms:
        expected, low, high, volumes = phantom_volumes(phantom, DISTORTIONS[name])
        known, new = slice(0, 30), slice(30, 60)
        fitted = fit_conformal(
            low[known], high[known], volumes[known], names(30), 0.9, expected=expected[known]
        )
        ends = fitted.apply(low[new], high[new], expected=expected[new])
        before.append(covered(low[new], high[new], volumes[new]).mean())
        after.append(covered(*ends, volumes[new]).mean())
    assert np.mean(after) >= 0.88
    if name in ("hard", "overconfident", "too small", "too large", "empty"):
        # the distortion is one that needs a correction
        assert np.mean(before) < 0.75


# laws of the correction


@st.composite
def cases(draw, num=24):
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    ends = np.sort(rng.integers(0, 12, (num, 2, 2)).astype(float), axis=2)
    expected = rng.uniform(0, 12, (num, 2))
    volumes = rng.integers(0, 14, (num, 2, 3)).astype(float)
    return ends[..., 0], ends[..., 1], expected, volumes


@given(data=cases(), first=st.floats(0.05, 0.9), second=st.floats(0.05, 0.9))
def test_a_higher_level_gives_an_interval_that_contains_that_of_a_lower_level(data, first, second):
    low, high, expected, volumes = data
    narrow, wide = (
        fit_conformal(low, high, volumes, names(len(low)), level, expected=expected).apply(
            low, high, expected=expected
        )
        for level in sorted((first, second))
    )
    assert (wide[0] <= narrow[0] + 1e-9).all()
    assert (wide[1] >= narrow[1] - 1e-9).all()


@given(data=cases(), level=st.sampled_from([0.05, 0.3, 0.9]))
def test_ends_are_ordered_and_never_below_0_also_after_narrowing(data, level):
    low, high, expected, volumes = data
    fitted = fit_conformal(low, high, volumes, names(len(low)), level, expected=expected)
    new_low, new_high = fitted.apply(low, high, expected=expected)
    assert (new_low >= 0).all()
    assert (new_low <= new_high).all()


@given(data=cases(), factor=st.floats(1e-3, 1e3))
def test_the_unit_of_the_volumes_does_not_matter(data, factor):
    low, high, expected, volumes = data
    ends = fit_conformal(low, high, volumes, names(len(low)), expected=expected).apply(
        low, high, expected=expected
    )
    scaled = {"expected": factor * expected, "voxel": factor}
    other = fit_conformal(factor * low, factor * high, factor * volumes, names(len(low)), **scaled).apply(
        factor * low, factor * high, **scaled
    )
    for end, other_end in zip(ends, other, strict=True):
        np.testing.assert_allclose(other_end, factor * end, rtol=1e-6, atol=1e-6 * factor)


@given(data=cases())
def test_the_corrected_intervals_cover_the_cases_that_they_were_fitted_on(data):
    """Also a volume that is exactly at an end: rounding must not leave it outside."""
    low, high, expected, volumes = data
    fitted = fit_conformal(low, high, volumes, names(len(low)), 0.9, expected=expected)
    ends = fitted.apply(low, high, expected=expected)
    # 0.9 of 25 patients, of which one is new
    assert (covered(*ends, volumes).mean((0, 2)) >= 0.9 * 25 / 24 - 1e-9).all()


def test_intervals_that_are_too_wide_become_narrower_and_each_class_has_its_own_correction():
    expected = np.full((30, 2), 50.0)
    low, high = np.array([[0.0, 49.0]] * 30), np.array([[200.0, 51.0]] * 30)
    volumes = np.random.default_rng(0).uniform(40, 60, (30, 2, 2))
    fitted = fit_conformal(low, high, volumes, names(30), expected=expected)
    assert fitted.correction[0] < 0 < fitted.correction[1]
    new_low, new_high = fitted.apply(low, high, expected=expected)
    assert (new_high - new_low)[0, 0] < 200
    assert (new_high - new_low)[0, 1] > 2


def test_a_voxel_per_case_is_the_same_as_cases_one_by_one():
    fitted = ConformalInterval(0.9, (0.5, -0.2), 20)
    rng = np.random.default_rng(0)
    low, voxel = rng.uniform(1, 5, (4, 2)), rng.uniform(0.1, 2, 4)
    high, expected = low + rng.uniform(1, 5, (4, 2)), low + 0.5
    together = fitted.apply(low, high, expected=expected, voxel=voxel)
    for case in range(4):
        alone = fitted.apply(low[case], high[case], expected=expected[case], voxel=float(voxel[case]))
        np.testing.assert_allclose(alone, [end[case] for end in together])


def test_a_case_without_an_interval_is_left_out_and_stays_nan():
    expected, low, high = np.full((12, 1), 5.0), np.full((12, 1), 4.0), np.full((12, 1), 6.0)
    volumes = np.linspace(1, 9, 24).reshape(12, 1, 2)
    fitted = fit_conformal(low, high, volumes, names(12), expected=expected)
    nan = np.full((1, 1), np.nan)
    longer = [np.concatenate([part, nan]) for part in (low, high, expected)]
    more_volumes = np.concatenate([volumes, np.full((1, 1, 2), np.nan)])
    again = fit_conformal(*longer[:2], more_volumes, names(13), expected=longer[2])
    assert again == fitted
    assert again.num_patients == 12
    assert np.isnan(fitted.apply(nan, nan, expected=nan)).all()


ONE = np.ones((12, 1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"level": 1.0}, "level must lie between 0 and 1"),
        ({"level": float("nan")}, "level must lie between 0 and 1"),
        ({"low": 2 * ONE}, "0 <= low <= high"),
        ({"low": -ONE}, "0 <= low <= high"),
        ({"high": np.full((12, 1), np.inf)}, "all finite"),
        ({"expected": np.ones((12, 2))}, "must have one shape"),
        ({"rater_volumes": np.ones((12, 2))}, r"\(cases, classes, raters\)"),
        ({"rater_volumes": -np.ones((12, 1, 2))}, "0 or more, or NaN for an absent rater"),
        ({"patients": ["a"]}, "patient of each of 12 cases; got 1"),
        ({"patients": ["a"] * 12}, "needs 9 patients with raters or more; got 1"),
        ({"voxel": 0.0}, "voxel must be a positive volume"),
        ({"voxel": np.ones(5)}, r"one per case \(12,\)"),
    ],
)
def test_the_error_names_what_cannot_be_fitted(changed, message):
    arguments = {
        "low": ONE,
        "high": ONE,
        "rater_volumes": np.ones((12, 1, 2)),
        "patients": names(12),
        "expected": ONE,
    } | changed
    with pytest.raises(ValueError, match=message):
        fit_conformal(**arguments)


def test_intervals_of_other_classes_are_refused():
    with pytest.raises(ValueError, match="the correction is of 2 classes"):
        ConformalInterval(0.9, (0.1, 0.2), 20).apply(ONE, ONE, expected=ONE)


# files


def test_a_correction_survives_json():
    fitted = ConformalInterval(0.9, (0.25, -0.1234567890123), 57)
    assert ConformalInterval.from_dict(json.loads(json.dumps(fitted.to_dict()))) == fitted


GOOD = {"level": 0.9, "correction": [0.5], "num_patients": 20}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "has the entries level, correction, num_patients; got NoneType"),
        ([GOOD], "got list"),
        ({}, "has the entries"),
        (GOOD | {"scale": 1}, "'scale'"),
        (GOOD | {"level": 1}, "level must be"),
        (GOOD | {"level": "0.9"}, "level must be a number"),
        (GOOD | {"level": True}, "level must be"),
        (GOOD | {"correction": []}, "correction must be a list"),
        (GOOD | {"correction": 0.5}, "correction must be a list"),
        (GOOD | {"correction": [float("nan")]}, "finite numbers"),
        (GOOD | {"correction": [float("inf")]}, "finite numbers"),
        (GOOD | {"correction": [10**400]}, "finite numbers"),
        (GOOD | {"correction": [10**5000]}, "finite numbers"),
        (GOOD | {"correction": [["x"]]}, "finite numbers"),
        (GOOD | {"num_patients": 0}, "num_patients must be"),
        (GOOD | {"num_patients": 2.5}, "num_patients must be"),
        (GOOD | {"num_patients": True}, "num_patients must be"),
    ],
)
def test_a_changed_file_is_an_error_that_names_the_entry(values, message):
    with pytest.raises(ValueError, match=message):
        ConformalInterval.from_dict(values)


@given(
    values=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(GOOD)), inner),
        max_leaves=8,
    )
)
def test_no_json_value_gives_anything_but_a_record_or_a_value_error(values):
    try:
        fitted = ConformalInterval.from_dict(values)
    except ValueError:
        return
    assert ConformalInterval.from_dict(fitted.to_dict()) == fitted
