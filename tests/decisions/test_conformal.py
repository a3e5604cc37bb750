"""Conformal intervals: coverage by simulation, laws of the correction, distorted phantoms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from start import refused
from torch.nn.functional import avg_pool2d

from semidice.data.phantom import make_phantom
from semidice.decisions import (
    ConformalInterval,
    Intervals,
    fit_conformal,
    rater_volumes_ml,
    volume_interval,
    volume_ml,
)
from semidice.decisions.conformal import patient_quantile

VOXELS = (10.0, 10.0, 10.0)


def names(num):
    return [f"p{number}" for number in range(num)]


def covered(ends, volumes):
    """Whether each rater's volume lies in the interval of its case; NaN for an absent rater."""
    inside = (volumes >= ends[0][..., None]) & (volumes <= ends[1][..., None])
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
    patients = np.array([f"p{number % 6}" for number in range(14)])
    shares = {}
    for value in np.unique(scores[~np.isnan(scores)]):
        own = [scores[patients == patient] for patient in np.unique(patients)]
        shares[value] = sum((each[~np.isnan(each)] <= value).mean() for each in own) / 7
    chosen = patient_quantile(scores, list(patients), level)
    assert chosen == min(value for value, share in shares.items() if share >= level - 1e-9)


@pytest.mark.parametrize(("level", "needed"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_too_few_patients_for_the_level_are_an_error_however_many_cases_they_have(level, needed):
    scores = np.tile(np.arange(float(needed)), 9)[:, None]
    assert patient_quantile(scores, names(needed) * 9, level) == needed - 1
    few = [f"p{number % max(1, needed - 1)}" for number in range(len(scores))]
    if needed > 1:
        refused(lambda: patient_quantile(scores, few, level), f"needs {needed} patients", f"got {needed - 1}")


# coverage


def simulated(rng, num_patients, *, num_raters=3):
    """Intervals and raters' volumes of patients with 1 to 6 cases; a patient with many cases is harder."""
    num_cases = rng.integers(1, 7, num_patients)
    owner = np.repeat(np.arange(num_patients), num_cases)
    patient_error = (rng.normal(size=num_patients) * num_cases / 3)[owner]
    expected = rng.lognormal(3, 0.7, (len(owner), 1))
    error = patient_error[:, None] + rng.normal(size=(len(owner), num_raters))
    volumes = expected * np.exp(0.2 * error)
    volumes[rng.random(volumes.shape) < 0.2] = np.nan
    volumes[:, 0] = np.nan_to_num(volumes[:, 0], nan=1.0)
    return owner, Intervals(expected * 0.8, expected * 1.1, expected), volumes[:, None]


@pytest.mark.parametrize(("num_patients", "level"), [(9, 0.9), (25, 0.9), (25, 0.6), (80, 0.95)])
def test_a_random_observation_of_a_new_patient_is_covered_at_the_nominal_level(num_patients, level):
    """Patients of unequal numbers of cases and raters, exchangeable; the guarantee is exact on average."""
    coverages = []
    for seed in range(1000):
        rng = np.random.default_rng((seed, num_patients))
        owner, intervals, volumes = simulated(rng, num_patients + 1)
        known, new = owner > 0, owner == 0
        patients = owner[known].astype(str).tolist()
        fitted = fit_conformal(intervals.part(known), volumes[known], patients, level)
        coverages.append(np.nanmean(covered(fitted.apply(intervals.part(new)), volumes[new])))
        assert fitted.num_patients == num_patients
    error = np.std(coverages) / np.sqrt(len(coverages))
    assert np.mean(coverages) >= level - 3 * error
    # with distinct scores it is at most level + 2 / (K + 1)
    assert np.mean(coverages) <= level + 2 / (num_patients + 1) + 3 * error


def temperature(prob, value):
    return torch.sigmoid(torch.logit(prob.double(), eps=1e-9) / value).float()


DISTORTIONS = {
    "the truth": lambda prob: prob,
    "hard": lambda prob: (prob > 0.5).float(),
    "overconfident": lambda prob: temperature(prob, 0.25),
    "underconfident": lambda prob: temperature(prob, 3.0),
    "blurred": lambda prob: avg_pool2d(prob, 9, stride=1, padding=4),
    "too small": lambda prob: prob**4,
    "too large": lambda prob: prob**0.1,
    "empty": torch.zeros_like,
}


@pytest.fixture(scope="module")
def phantoms():
    """20 seeds of 60 patients with four raters, who differ in every way that a phantom knows."""
    return [make_phantom(60, size=(32, 32), num_raters=4, seed=seed) for seed in range(20)]


@pytest.mark.parametrize("name", DISTORTIONS)
def test_corrected_intervals_of_distorted_phantoms_cover_raters_within_2_points_of_the_level_over_20_seeds(
    phantoms, name
):
    before, after = [], []
    known, new = slice(0, 30), slice(30, 60)
    for phantom in phantoms:
        prob = DISTORTIONS[name](phantom.prob[:, 1:])
        ends = (end.numpy() for end in volume_interval(prob, 0.9, spacing_mm=VOXELS))
        intervals = Intervals(*ends, volume_ml(prob, spacing_mm=VOXELS).double().numpy())
        volumes = rater_volumes_ml(phantom.masks, num_channels=1, spacing_mm=VOXELS).numpy()
        fitted = fit_conformal(intervals.part(known), volumes[known], names(30), 0.9)
        before.append(covered((intervals.low[new], intervals.high[new]), volumes[new]).mean())
        after.append(covered(fitted.apply(intervals.part(new)), volumes[new]).mean())
    assert np.mean(after) >= 0.88
    if name in ("hard", "overconfident", "too small", "too large", "empty"):
        # the distortion is one that needs a correction
        assert np.mean(before) < 0.75


# laws of the correction


@st.composite
def cases(draw, num=24):
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    ends = np.sort(rng.integers(0, 12, (num, 2, 2)).astype(float), axis=2)
    volumes = rng.integers(0, 14, (num, 2, 3)).astype(float)
    return Intervals(ends[..., 0], ends[..., 1], rng.uniform(0, 12, (num, 2))), volumes


@given(data=cases(), levels=st.lists(st.floats(0.05, 0.9), min_size=2, max_size=2))
def test_ends_are_ordered_and_never_below_0_and_a_higher_level_contains_a_lower_one(data, levels):
    intervals, volumes = data
    narrow, wide = (
        fit_conformal(intervals, volumes, names(24), level).apply(intervals) for level in sorted(levels)
    )
    for low, high in (narrow, wide):
        assert (low >= 0).all()
        assert (low <= high).all()
    assert (wide[0] <= narrow[0] + 1e-9).all()
    assert (wide[1] >= narrow[1] - 1e-9).all()


@given(data=cases(), factor=st.floats(1e-3, 1e3))
def test_the_unit_of_the_volumes_does_not_matter(data, factor):
    one, volumes = data
    other = Intervals(factor * one.low, factor * one.high, factor * one.expected, voxel=factor)
    ends = fit_conformal(one, volumes, names(24)).apply(one)
    other_ends = fit_conformal(other, factor * volumes, names(24)).apply(other)
    for end, other_end in zip(ends, other_ends, strict=True):
        np.testing.assert_allclose(other_end, factor * end, rtol=1e-6, atol=1e-6 * factor)


@given(data=cases())
def test_the_corrected_intervals_cover_the_cases_that_they_were_fitted_on(data):
    """Also a volume that is exactly at an end: rounding must not leave it outside."""
    intervals, volumes = data
    ends = fit_conformal(intervals, volumes, names(24), 0.9).apply(intervals)
    # 0.9 of 25 patients, of which one is new
    assert (covered(ends, volumes).mean((0, 2)) >= 0.9 * 25 / 24 - 1e-9).all()


def test_intervals_that_are_too_wide_become_narrower_and_each_class_has_its_own_correction():
    low, high = np.array([[0.0, 49.0]] * 30), np.array([[200.0, 51.0]] * 30)
    intervals = Intervals(low, high, expected=np.full((30, 2), 50.0))
    volumes = np.random.default_rng(0).uniform(40, 60, (30, 2, 2))
    fitted = fit_conformal(intervals, volumes, names(30))
    assert fitted.correction[0] < 0 < fitted.correction[1]
    new_low, new_high = fitted.apply(intervals)
    assert (new_high - new_low)[0, 0] < 200
    assert (new_high - new_low)[0, 1] > 2


def test_the_scale_of_a_hard_mask_is_a_tenth_of_its_volume_and_a_voxel():
    fifty = np.full((1, 1), 50.0)
    assert [scale.item() for scale in Intervals(fifty, fifty, fifty, voxel=2.0).scales()] == [7, 7]


def test_a_case_without_an_interval_is_left_out_and_stays_nan():
    ends = [np.full((12, 1), value) for value in (4.0, 6.0, 5.0)]
    volumes = np.linspace(1, 9, 24).reshape(12, 1, 2)
    fitted = fit_conformal(Intervals(*ends), volumes, names(12))
    nan = np.full((1, 1), np.nan)
    longer = Intervals(*(np.concatenate([end, nan]) for end in ends))
    more_volumes = np.concatenate([volumes, np.full((1, 1, 2), np.nan)])
    again = fit_conformal(longer, more_volumes, names(13))
    assert again == fitted
    assert again.num_patients == 12
    assert np.isnan(fitted.apply(Intervals(nan, nan, nan))).all()


def test_a_patient_with_many_scans_counts_as_one():
    # the last patient has the largest volumes
    volumes = np.linspace(1, 9, 24).reshape(12, 1, 2)

    def fitted(num_scans):
        scans = [*range(11), *[11] * num_scans]
        ends = (np.full((len(scans), 1), value) for value in (4.0, 6.0, 5.0))
        return fit_conformal(Intervals(*ends), volumes[scans], [f"p{scan}" for scan in scans], 0.7)

    assert fitted(40) == fitted(1)


ONE = np.ones((12, 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Intervals(ONE, ONE[:3], ONE), "one shape"),
        (lambda: Intervals(2 * ONE, ONE, ONE), "low <= high"),
        (lambda: Intervals(ONE, ONE, ONE, voxel=0.0), "voxel"),
        (lambda: fit_conformal(Intervals(ONE, ONE, ONE), ONE, names(12)), "raters"),
        (lambda: fit_conformal(Intervals(ONE, ONE, ONE), -ONE[..., None], names(12)), "0 or more"),
        (lambda: fit_conformal(Intervals(ONE, ONE, ONE), ONE[..., None], names(3)), "patient of each case"),
        (lambda: ConformalInterval(0.9, (0.1, 0.2), 20).apply(Intervals(ONE, ONE, ONE)), "2 classes"),
    ],
)
def test_what_cannot_be_an_interval_is_refused(call, words):
    refused(call, words)
