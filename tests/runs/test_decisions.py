"""Rules that make masks and intervals of volumes, fitted and scored on the stored predictions of a run."""

import csv
import io
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from case_rows import metrics_of, select
from PIL import Image
from prepared import make_prepared, rehash
from rich.console import Console
from sklearn.metrics import f1_score
from start import refused, semidice
from synthetic_runs import write_runs
from trained import finished_table, score_fold

from semidice.data.dataset import Dataset
from semidice.data.folds import fold_cases, read_folds
from semidice.decisions.decision import Decision
from semidice.decisions.fitting import CANDIDATES
from semidice.decisions.masks import decide as masks_by
from semidice.paths import FoldFolder, RunFolder
from semidice.runs.evaluate import EvaluateOptions, run_evaluate, run_evaluate_files
from semidice.runs.fits import read_fits
from semidice.runs.held_out import HeldOut
from semidice.runs.predictions import read_prediction, write_prediction
from semidice.runs.rules import fitted_rules, score_rules
from semidice.runs.run import open_run, write_dataset_facts
from semidice.runs.scoring import ScoreOptions
from semidice.statistics.cases import in_order, read_cases

METHOD = "majority + SDL"
METRICS = ("dice_score", "iou_score", "brier_error")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """36 images of 18 patients, small enough that every rule is fast."""
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=36, size=(16, 16))


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    return write_runs(dataset, path, methods=[METHOD], metrics=METRICS, num_folds=3)[METHOD].path


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def decide(run, **options):
    console = Console(file=io.StringIO(), width=200)
    run_evaluate(run.path, EvaluateOptions(**options), console)
    return console.file.getvalue()


def change_predictions(run, dataset, fold, *, seed=0):
    """Replace the stored predictions of the held-out cases of a fold by noise."""
    rng = np.random.default_rng(seed)
    for number in fold_cases(read_folds(run.folds, dataset), fold)[1]:
        case = dataset.cases[number]
        prob = rng.uniform(0, 0.2, case.shape).astype(np.float32)
        write_prediction(run.fold(fold).prediction(case.name), np.stack([1 - prob, prob]))
    open_run(run).write_stamp(fold)


def without_fold(run, fold):
    """The run as if a fold were not finished."""
    run.fold(fold).cases.unlink()
    run.cases.unlink()


def values(table, **wanted):
    return table.pipe(select, **wanted).pipe(in_order)["value"]


def test_scores_of_masks_are_of_the_decided_masks_and_others_of_the_probabilities(run, dataset):
    cases = fold_cases(read_folds(run.folds, dataset), 0)[1]
    options = {"metrics": METRICS, "method": "m", "fold": 0}
    plain = score_fold(dataset, cases, run.fold(0), **options)
    decided = score_fold(dataset, cases, run.fold(0), **options, decision=Decision("threshold", 0.2))
    expected = {}
    for number in cases:
        prob = read_prediction(run.fold(0).prediction(dataset.cases[number].name))[1]
        majority = dataset.masks(number).mean(0) > 0.5
        expected[dataset.cases[number].name] = f1_score(majority.ravel(), (prob > 0.2).ravel())
    dice = decided.pipe(select, metric="dice_score", class_name="class1")
    found = dict(zip(dice["case"].tolist(), dice["value"], strict=True))
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), [expected[name] for name in found], rtol=1e-6)
    assert (values(plain, metric="iou_score") != values(decided, metric="iou_score")).any()
    for metric in ("brier_error", "truth_error"):
        np.testing.assert_array_equal(values(plain, metric=metric), values(decided, metric=metric))


def test_argmax_gives_the_bits_of_no_rule(run, dataset):
    table = score_rules(HeldOut.open(run.path), ["argmax"], ScoreOptions(["dice_score", "iou_score"]))
    stored = read_cases(run.cases)
    for metric in ("dice_score", "iou_score"):
        np.testing.assert_array_equal(values(table, metric=metric), values(stored, metric=metric))
    assert set(table.pipe(metrics_of)) == {"dice_score", "iou_score"}


@pytest.mark.parametrize("rule", ["dice", "threshold:0.3"])
def test_a_rule_sees_a_scan_as_a_whole_and_not_the_slices_that_were_not_kept(tmp_path, rule):
    whole = make_prepared(tmp_path / "data", num_cases=4, size=(16, 16), slices_per_scan=4)
    manifest = json.loads(whole.folder.manifest.read_text())
    manifest["scans"][0]["slices"] = [3, 5, 6, 7]
    whole.folder.manifest.write_text(json.dumps(manifest))
    gaps, folder = Dataset(whole.folder.path), FoldFolder(tmp_path / "fold_0")
    names = [case.name for case in gaps.cases]
    for row, name in enumerate(names):
        prob = np.linspace(0.05, 0.95, 256).reshape(16, 16) ** (row + 1)
        write_prediction(folder.prediction(name), np.stack([1 - prob, prob]))
    table = score_fold(
        gaps, range(4), folder, metrics=["dice_score"], method="m", fold=0, decision=Decision.parse(rule)
    )
    # the oracle: the kept slices alone, as one image
    stored = np.stack([read_prediction(folder.prediction(name)) for name in names], 1)
    masks = masks_by(torch.from_numpy(stored)[None], rule)[0, 1].numpy()
    majority = np.stack([gaps.masks(number).mean(0) > 0.5 for number in range(4)])
    assert float(values(table, metric="dice_score", class_name="class1")[0]) == pytest.approx(
        f1_score(majority.ravel(), masks.ravel())
    )


def test_a_fitted_rule_is_chosen_by_the_scores_of_the_other_folds(run, dataset, monkeypatch):
    # six patients are too few for a significant gain
    monkeypatch.setattr("semidice.decisions.fitting.MIN_STANDARD_ERRORS", 0.0)
    held_out = HeldOut.open(run.path)
    rules = fitted_rules(held_out)
    assert set(rules) == {"0", "1", "2", "all"}
    # the oracle: Dice of a case table, averaged within patients and then over patients
    for rule in ("argmax", "threshold:0.3", "dice"):
        table = score_rules(held_out, [rule], ScoreOptions(["dice_score"])).pipe(select, class_name="mean")
        for name, fit in rules.items():
            used = table["fold"] != (-1 if name == "all" else int(name))
            patients, scores = table["patient"][used], table["value"][used]
            mean = np.mean([scores[patients == patient].mean() for patient in np.unique(patients)])
            assert fit.scores[rule] == pytest.approx(mean, abs=1e-6)
            assert fit.num_cases == used.sum()
    for fit in rules.values():
        assert set(fit.scores) == set(CANDIDATES)
        best = max(fit.scores, key=lambda rule: fit.scores[rule])
        assert fit.decision in ("argmax", best)
    # the synthetic outlines are shifted outwards
    assert {fit.decision for fit in rules.values()} != {"argmax"}


def test_the_fitted_rule_and_interval_of_a_fold_do_not_depend_on_its_own_predictions_and_masks(tmp_path):
    data = make_prepared(tmp_path / "data", num_cases=36, size=(16, 16))
    (run,) = write_runs(data, tmp_path / "runs", methods=[METHOD], metrics=METRICS, num_folds=3).values()
    decide(run, rules=["fitted"], interval=0.8)
    before = read_fits(run)
    change_predictions(run, data, 0)
    for number in fold_cases(read_folds(run.folds, data), 0)[1]:
        path = data.folder.array("masks", data.cases[number].scan.name)
        np.save(path, ~np.load(path))
    rehash(data)
    # as if the run had been started with these masks
    write_dataset_facts(run, Dataset(data.folder.path), read_folds(run.folds, data))
    for fold in range(3):
        open_run(run).write_stamp(fold)
    decide(run, rules=["fitted"], interval=0.8)
    after = read_fits(run)
    assert after.rules["0"] == before.rules["0"]
    assert after.intervals["0.8"]["0"] == before.intervals["0.8"]["0"]
    # all others were fitted to the changed fold
    for name in ("1", "2", "all"):
        assert after.rules[name].scores != before.rules[name].scores
        assert after.intervals["0.8"][name] != before.intervals["0.8"][name]


def test_a_rule_is_fitted_once_and_again_if_a_prediction_has_changed(run, dataset):
    calls = []

    def fit():
        return fitted_rules(HeldOut.open(run.path), on_scan=lambda: calls.append(1))

    first = fit()
    assert len(calls) == 36
    assert fit() == first
    assert len(calls) == 36
    change_predictions(run, dataset, 1)
    fit()
    assert len(calls) == 72


def test_scores_of_rules_are_added_to_the_run_and_its_own_table_is_left_alone(run):
    own = run.cases.read_bytes()
    printed = decide(run, rules=["threshold:0.70", "dice"], metrics=["dice_score", "iou_score"])
    table = read_cases(run.decisions)
    assert set(table["method"]) == {"argmax", "threshold:0.7", "dice"}
    assert set(table.pipe(metrics_of)) == {"dice_score", "iou_score"}
    assert len(set(table["case"].tolist())) == 36
    for word in ("dice_score", "iou_score", "minus", "threshold:0.7"):
        assert word in printed
    printed = decide(run, rules=["nested", "dice"], metrics=["dice_score"])
    assert "which also has threshold:0.7" in printed
    after = read_cases(run.decisions)
    assert set(after["method"]) == {"argmax", "threshold:0.7", "dice", "nested"}
    np.testing.assert_array_equal(
        values(after, method="dice", metric="iou_score"), values(table, method="dice", metric="iou_score")
    )
    assert run.cases.read_bytes() == own


def test_scores_of_other_predictions_are_dropped(run, dataset):
    decide(run, rules=["nested"])
    change_predictions(run, dataset, 1)
    decide(run, rules=["dice"])
    assert set(read_cases(run.decisions)["method"]) == {"argmax", "dice"}


def test_the_difference_and_its_p_value_are_those_of_the_pair(run):
    from semidice.statistics import compare_cases

    printed = decide(run, rules=["threshold:0.7"], metrics=["dice_score"])
    comparison = compare_cases(read_cases(run.decisions), "dice_score", methods=["argmax", "threshold:0.7"])
    pair = comparison.pairs.loc["threshold:0.7", "argmax"]
    row = next(line for line in printed.splitlines() if line.strip().startswith("threshold:0.7"))
    assert f"{100 * pair.difference:+.2f}".replace("-", "−") in row
    p = float(pair.p)
    assert ("< 0.001" if p < 0.001 else f"{p:.3f}") in row
    assert ("★" in row) == (p < 0.05 and pair.difference > 0)


def test_a_run_with_unfinished_folds_is_scored_but_nothing_is_written_to_it(run, tmp_path):
    without_fold(run, 2)
    printed = decide(run, rules=["fitted"], interval=0.8)
    assert "not finished and not in these scores: fold 2" in printed
    assert f"{run.decisions} is written when all folds are finished; name a file with -o" in printed
    assert not any(path.exists() for path in (run.decisions, run.fits, run.volumes))
    decide(run, rules=["fitted"], out=tmp_path / "scores.csv")
    table = read_cases(tmp_path / "scores.csv")
    assert set(table["fold"].tolist()) == {0, 1}
    assert set(table["method"]) == {"argmax", "fitted"}


def test_one_finished_fold_cannot_be_fitted_and_says_so(run):
    without_fold(run, 2)
    run.fold(1).cases.unlink()
    refused(lambda: decide(run, rules=["fitted"]), "fitted", "other folds", "one finished")
    printed = decide(run, interval=0.8)
    assert "intervals are not corrected: the correction of intervals of a fold is fitted" in printed
    assert "nested 0.8" in printed
    assert "conformal" not in printed


def test_too_few_patients_for_a_correction_leave_the_nested_interval(run):
    # 12 patients in the other folds; 0.99 needs 99
    printed = decide(run, interval=0.99)
    assert "intervals are not corrected" in printed
    assert "needs 99 patients" in printed
    with run.volumes.open() as file:
        assert all(row["conformal_low"] == "" and row["low"] for row in csv.DictReader(file))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rules": ["dise"]}, ["'dise'", "did you mean dice"]),
        ({"rules": ["threshold"]}, ["'threshold'", "threshold:T"]),
        ({"rules": ["dice"], "metrics": ["brier_error"]}, ["no rule changes brier_error"]),
        ({"rules": ["dice"], "metrics": ["brier"]}, ["'brier'"]),
        ({"interval": 1.5}, ["1.5", "between 0 and 1"]),
        ({"interval": 0.9, "out": Path("scores.csv")}, ["-o", "--decide"]),
    ],
)
def test_wrong_options_are_refused(run, options, words):
    refused(lambda: decide(run, **options), *words)


def test_volumes_and_intervals_of_a_run_equal_counts_of_voxels(run, dataset):
    printed = decide(run, interval=0.8)
    with run.volumes.open(newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    folds = read_folds(run.folds, dataset)
    covered, widths = [], []
    for number, case in enumerate(dataset.cases):
        row = rows[case.name]
        prob = read_prediction(run.fold(folds[number]).prediction(case.name))[1]
        assert (row["patient"], row["fold"], row["class"], row["unit"]) == (
            case.patient,
            str(folds[number]),
            "class1",
            "voxels",
        )
        assert float(row["expected"]) == pytest.approx(prob.sum(), rel=1e-5)
        # a nested rater of level t marks p > t; levels 0.9 and 0.1 are the ends
        assert (float(row["low"]), float(row["high"])) == ((prob > 0.9).sum(), (prob > 0.1).sum())
        masks = dataset.masks(number).reshape(3, -1).sum(1)
        assert [float(row[f"rater rater{r}"]) for r in range(3)] == masks.tolist()
        ends = float(row["conformal_low"]), float(row["conformal_high"])
        covered.append(np.mean([ends[0] <= volume <= ends[1] for volume in masks]))
        widths.append(ends[1] - ends[0])
    line = next(line for line in printed.splitlines() if "conformal 0.8" in line)
    assert f" {100 * np.mean(covered):.1f} " in line
    width = np.mean(widths)
    assert (f" {width:.0f} " if width >= 100 else f" {width:.3g} ") in line
    assert np.mean(covered) > 0.75


def test_volumes_are_in_ml_if_the_spacing_is_known_and_an_absent_rater_has_an_empty_cell(tmp_path):
    dataset = make_prepared(
        tmp_path / "data", num_cases=16, size=(16, 16), slices_per_scan=4, absent=True, cases_per_patient=1
    )
    (run,) = write_runs(dataset, tmp_path / "runs", methods=[METHOD], metrics=["dice_score"]).values()
    decide(run, interval=0.5)
    with run.volumes.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == [scan.name for scan in dataset.manifest.scans]
    assert {row["unit"] for row in rows} == {"ml"}
    voxel_ml = 0.7 * 0.7 * 2.5 / 1000
    masks = np.stack([dataset.masks(number) for number in range(4, 8)])
    assert float(rows[1]["rater rater0"]) == pytest.approx((masks[:, 0] == 1).sum() * voxel_ml, rel=1e-5)
    # scan 1 lacks rater 1
    assert rows[1]["rater rater1"] == ""
    assert rows[0]["rater rater1"] != ""


def test_one_rater_has_a_coverage(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=12, size=(16, 16), num_raters=1, cases_per_patient=1)
    (run,) = write_runs(dataset, tmp_path / "runs", methods=[METHOD], metrics=["dice_score"]).values()
    assert "nested 0.5" in decide(run, rules=["dice"], interval=0.5)


def test_a_finished_run_that_is_resumed_keeps_every_bit_of_its_scores(run):
    before = run.cases.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finished_table(open_run(run))
    assert run.cases.read_bytes() == before


# Files of other tools


def test_rules_decide_the_probabilities_of_other_tools(dataset, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "probs").mkdir()
    for case in dataset.cases:
        prob = rng.uniform(0, 1, case.shape).astype(np.float32)
        Image.fromarray(np.rint(prob * 65535).astype(np.uint16)).save(
            tmp_path / "probs" / f"{case.name}_prob.png"
        )
    console = Console(file=io.StringIO(), width=200)
    folder = dataset.folder.path

    def evaluate(files, *rules):
        options = EvaluateOptions(["dice_score", "brier_error"], rules=rules)
        return run_evaluate_files(tmp_path / files, folder, options, console, name="other")

    table = evaluate("probs", "threshold:0.7")
    assert set(table["method"]) == {"other, argmax", "other, threshold:0.7"}
    assert set(table.pipe(metrics_of)) == {"dice_score"}
    plain = evaluate("probs")
    np.testing.assert_array_equal(values(table, method="other, argmax"), values(plain, metric="dice_score"))
    assert "other, threshold:0.7" in console.file.getvalue()
    refused(lambda: evaluate("probs", "fitted"), "fitted", "needs a run")
    (tmp_path / "masks").mkdir()
    for number, case in enumerate(dataset.cases):
        Image.fromarray(dataset.masks(number)[0]).save(tmp_path / "masks" / f"{case.name}.png")
    refused(lambda: evaluate("masks", "dice"), "probabilities", str(tmp_path / "masks"), "are masks")


def test_the_command_takes_rules_and_an_interval(run):
    done = semidice("evaluate", run.path, "--decide", "dice", "--decide", "jaccard", "--interval", 0.8)
    assert done.code == 0, done.err
    assert set(read_cases(run.decisions)["method"]) == {"argmax", "dice", "jaccard"}
    assert run.volumes.is_file()
    refused(semidice("evaluate", run.path, "--decide", "dise"), "'dise'", "did you mean dice")
