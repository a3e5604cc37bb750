"""Folds: patients stay together, each case is validated once, and a stored file must fit its dataset."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import make_prepared
from start import refused

from semidice.data.folds import fold_cases, read_folds, split_dataset, split_folds, write_folds

patient_names = st.text(st.characters(codec="utf-8"), max_size=3)


@given(patients=st.lists(patient_names, min_size=8), num_folds=st.integers(2, 5), seed=st.integers(0, 9))
def test_no_patient_is_in_two_folds_and_no_fold_is_empty(patients, num_folds, seed):
    patients = [*patients, *map(str, range(100, 100 + num_folds))]
    folds = split_folds(patients, num_folds=num_folds, seed=seed)
    assert len(set(zip(patients, folds, strict=True))) == len(set(patients))
    assert set(folds) == set(range(num_folds))


@given(counts=st.lists(st.integers(1, 6), min_size=5, max_size=30), seed=st.integers(0, 9))
def test_folds_differ_by_no_more_cases_than_the_largest_patient_has(counts, seed):
    patients = [f"p{number}" for number, count in enumerate(counts) for _ in range(count)]
    folds = split_folds(patients, seed=seed)
    sizes = [folds.count(fold) for fold in range(5)]
    assert max(sizes) - min(sizes) <= max(counts)


def test_the_fold_of_a_patient_does_not_depend_on_the_order_of_the_cases():
    patients = [f"p{number % 13}" for number in range(40)]
    shuffled = random.Random(0).sample(patients, len(patients))
    fold_of_patient = dict(zip(patients, split_folds(patients, seed=3), strict=True))
    assert fold_of_patient == dict(zip(shuffled, split_folds(shuffled, seed=3), strict=True))
    assert split_folds(patients, seed=3) != split_folds(patients, seed=2)


def test_each_case_is_validated_in_one_fold_and_trained_on_in_all_other_folds():
    folds = split_folds([f"p{number // 2}" for number in range(25)], num_folds=4)
    validated = [number for fold in range(4) for number in fold_cases(folds, fold)[1]]
    assert sorted(validated) == list(range(25))
    for fold in range(4):
        training, validation = fold_cases(folds, fold)
        assert sorted(training + validation) == list(range(25))


def test_fewer_patients_than_folds_are_refused_with_advice():
    refused(lambda: split_folds(["a", "b", "c"] * 4), "5 folds", "3 patients", "lower num_folds")
    refused(lambda: split_folds(["a", "b"], num_folds=1), "num_folds", "2 or more")


@pytest.fixture
def dataset(tmp_path):
    return make_prepared(tmp_path / "data", num_cases=8, size=(8, 8), num_raters=1)


def test_a_volume_has_the_same_fold_whole_and_in_slices(tmp_path):
    """So that networks of slices and of volumes are compared on the same held-out scans."""
    whole = make_prepared(tmp_path / "whole", num_cases=8, cases_per_patient=1, size=(8, 8))
    cut = make_prepared(tmp_path / "cut", num_cases=30, slices_per_scan=4, cases_per_patient=1, size=(8, 8))
    of_volume = dict(zip([case.name for case in whole.cases], split_dataset(whole, num_folds=3), strict=True))
    folds = split_dataset(cut, num_folds=3)
    assert folds == [of_volume[case.scan.name] for case in cut.cases]
    # the last scan has fewer slices, so balanced numbers of slices would give other folds
    assert folds != split_folds([case.patient for case in cut.cases], num_folds=3)


@pytest.mark.parametrize("slices_per_scan", [None, 3])
def test_two_scans_of_a_patient_are_never_in_two_folds(tmp_path, slices_per_scan):
    options = {"size": (8, 8), "cases_per_patient": 2, "slices_per_scan": slices_per_scan}
    dataset = make_prepared(tmp_path / "data", num_cases=24, **options)
    scans = dataset.manifest.scans
    patients = {scan.patient for scan in scans}
    assert len(scans) == 2 * len(patients)
    for seed in range(5):
        folds = split_dataset(dataset, num_folds=3, seed=seed)
        pairs = {(case.patient, fold) for case, fold in zip(dataset.cases, folds, strict=True)}
        assert len(pairs) == len(patients)


def test_written_folds_are_read_back(dataset, tmp_path):
    folds = split_folds([case.patient for case in dataset.cases], num_folds=3)
    write_folds(tmp_path / "folds.json", dataset, folds)
    assert read_folds(tmp_path / "folds.json", dataset) == folds
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "folds.json"]


def test_folds_that_split_a_patient_are_neither_written_nor_read(dataset, tmp_path):
    path = tmp_path / "folds.json"
    refused(lambda: write_folds(path, dataset, [0, 1] * 4), "patient000", "folds 0 and 1")
    assert not path.exists()
    stored = {case.name: number % 2 for number, case in enumerate(dataset.cases)}
    path.write_text(json.dumps({"version": 1, "num_folds": 2, "fold_of_case": stored}))
    refused(lambda: read_folds(path, dataset), str(path), "patient000", "folds 0 and 1")


def test_folds_of_another_dataset_are_refused(dataset, tmp_path):
    path = tmp_path / "folds.json"
    write_folds(path, dataset, [0] * 4 + [1] * 4)
    smaller = make_prepared(tmp_path / "smaller", num_cases=6, size=(8, 8), num_raters=1)
    refused(lambda: read_folds(path, smaller), str(path), "scan006", "start a new run")
    larger = make_prepared(tmp_path / "larger", num_cases=9, size=(8, 8), num_raters=1)
    refused(lambda: read_folds(path, larger), str(path), "scan008", "start a new run")
    refused(lambda: write_folds(path, dataset, [0, 1, 2]), "8 cases", "3")


def test_an_empty_fold_is_refused(dataset, tmp_path):
    path = tmp_path / "folds.json"
    write_folds(path, dataset, [0] * 4 + [1] * 4)
    path.write_text(path.read_text().replace('"num_folds": 2', '"num_folds": 3'))
    refused(lambda: read_folds(path, dataset), str(path), "folds [0, 1]", "0 to 2")
