"""Scores of stored predictions: checked by hand, by other libraries, and through `semidice evaluate`."""

import io
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from prepared import make_prepared
from rich.console import Console
from sklearn.metrics import f1_score, log_loss
from trained import METRICS, make_run

from semidice.data.dataset import Dataset
from semidice.data.manifest import Manifest
from semidice.metrics.cases import CaseTable, concatenate, read_cases
from semidice.metrics.registry import SCORES
from semidice.paths import FoldFolder, RunFolder
from semidice.recipes import write_recipe
from semidice.runs.evaluate import run_evaluate
from semidice.runs.predictions import read_prediction, write_prediction
from semidice.runs.run import open_run
from semidice.runs.scoring import inapplicable_metrics, score_fold


def value(table: CaseTable, case: str, metric: str, class_name: str) -> float:
    (row,) = table.select(case=case, metric=metric, class_name=class_name).rows()
    return row.value


def assert_same_table(table: CaseTable, expected: CaseTable) -> None:
    for name, column in table.columns.items():
        np.testing.assert_array_equal(column, expected.columns[name])


def noisy_prediction(dataset: Dataset, number: int) -> np.ndarray:
    """Noisy probabilities of the drawing of the first rater."""
    noise = np.random.default_rng(number).normal(0, 1, (dataset.num_classes, *dataset.cases[number].shape))
    logits = 3 * (dataset.masks(number)[0] == np.arange(dataset.num_classes)[:, None, None]) + noise
    prob = np.exp(logits)
    return (prob / prob.sum(0)).astype(np.float32)


def store_predictions(
    dataset: Dataset, path, prob: Callable[[Dataset, int], np.ndarray] = noisy_prediction
) -> FoldFolder:
    folder = FoldFolder(path)
    for number, case in enumerate(dataset.cases):
        write_prediction(folder.prediction(case.name), prob(dataset, number))
    return folder


def one_class(dataset: Dataset, number: int, *, label: int) -> np.ndarray:
    """Probability 1 for the class `label` in every voxel."""
    prob = np.zeros((2, *dataset.cases[number].shape), np.float32)
    prob[label] = 1
    return prob


background, foreground = partial(one_class, label=0), partial(one_class, label=1)


def with_spacing(dataset: Dataset, spacing_mm) -> Dataset:
    """The dataset with another voxel spacing, written and opened again."""
    scans = [scan.model_copy(update={"spacing_mm": spacing_mm}) for scan in dataset.manifest.scans]
    manifest = dataset.manifest.model_copy(update={"scans": tuple(scans)})
    dataset.folder.manifest.write_text(manifest.model_dump_json())
    return Dataset(dataset.folder.path)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_scores_against_the_majority_equal_those_of_sklearn(tmp_path, num_classes):
    dataset = make_prepared(tmp_path / "data", num_cases=3, num_classes=num_classes, num_raters=3)
    folder = store_predictions(dataset, tmp_path / "fold")
    table = score_fold(
        dataset,
        [2, 0],
        folder,
        metrics=["dice_score", "negative_log_likelihood", "binarized_dice_score"],
        method="m",
        fold=4,
    )
    assert set(table.columns["case"]) == {"scan000", "scan002"}
    assert set(table.columns["fold"]) == {4}
    assert set(table.columns["method"]) == {"m"}
    assert set(table.columns["patient"]) == {"patient000", "patient001"}
    for number in (0, 2):
        name = dataset.cases[number].name
        prob = read_prediction(folder.prediction(name))
        votes = np.stack([(dataset.masks(number) == label).sum(0) for label in range(num_classes)])
        majority = votes.argmax(0)
        for label in range(1, num_classes):
            prediction, reference = prob.argmax(0) == label, majority == label
            expected = f1_score(reference.ravel(), prediction.ravel(), zero_division=1.0)
            assert value(table, name, "dice_score", f"class{label}") == pytest.approx(expected, abs=1e-6)
        # scikit-learn requires sums closer to 1 than float32 can represent
        rows = prob.reshape(num_classes, -1).T.astype(float)
        rows /= rows.sum(1, keepdims=True)
        likelihood = log_loss(majority.ravel(), rows, labels=range(num_classes))
        assert value(table, name, "negative_log_likelihood", "all") == pytest.approx(likelihood, rel=1e-4)
        mean = votes[1] / votes.sum(0)
        dices = []
        for level in np.arange(1, 10) / 10:
            prediction, reference = prob[1] > level + 1e-6, mean > level + 1e-6
            dices.append(f1_score(reference.ravel(), prediction.ravel(), zero_division=1.0))
        score = value(table, name, "binarized_dice_score", "class1")
        assert score == pytest.approx(np.mean(dices), abs=1e-6)


def test_an_absent_rater_has_no_vote(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, num_raters=2, absent=True, truth=False)
    (rater,) = np.flatnonzero(dataset.present[1])
    mask = dataset.masks(1)[rater]
    prob = np.stack([1.0 - mask, mask]).astype(np.float32)
    table = score_fold(
        dataset,
        [1],
        store_predictions(dataset, tmp_path / "fold", lambda dataset, number: prob),
        metrics=["dice_score", "soft_dice_score", "rater_dice_score", "generalised_energy_distance"],
        method="m",
        fold=0,
    )
    name = dataset.cases[1].name
    assert mask.any()
    assert value(table, name, "dice_score", "mean") == 1
    assert value(table, name, "soft_dice_score", "mean") == 1
    assert value(table, name, "rater_dice_score", "all") == 1
    assert value(table, name, "generalised_energy_distance", "all") == 0


def test_predictions_for_phantoms_are_scored_against_the_truth(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2)
    truth = {case.name: dataset.truth(number) for number, case in enumerate(dataset.cases)}
    options = {"metrics": ["dice_score"], "method": "m", "fold": 0}
    at_truth = score_fold(
        dataset, [0, 1], store_predictions(dataset, tmp_path / "truth", Dataset.truth), **options
    )
    empty = score_fold(dataset, [0, 1], store_predictions(dataset, tmp_path / "empty", background), **options)
    for name, prob in truth.items():
        # stored probabilities are rounded to multiples of 1/65535
        assert value(at_truth, name, "truth_error", "class1") == pytest.approx(0, abs=0.5 / 65535 + 1e-7)
        assert value(empty, name, "truth_error", "class1") == pytest.approx(prob[1].mean(), rel=1e-5)
        assert value(empty, name, "truth_error", "mean") == value(empty, name, "truth_error", "class1")
    no_truth = make_prepared(tmp_path / "other", num_cases=2, truth=False)
    assert (
        "truth_error" not in score_fold(no_truth, [0, 1], FoldFolder(tmp_path / "empty"), **options).metrics
    )


def test_a_probability_of_zero_is_scored_as_half_of_the_stored_unit(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=1, cases_per_patient=1)
    folder = store_predictions(dataset, tmp_path / "fold", foreground)
    table = score_fold(dataset, [0], folder, metrics=["negative_log_likelihood"], method="m", fold=0)
    share = float((dataset.masks(0).sum(0) <= 1).mean())
    expected = share * math.log(2 * 65535)
    score = value(table, dataset.cases[0].name, "negative_log_likelihood", "all")
    # at the other voxels the stored probability is about 1e-5 below 1
    assert score == pytest.approx(expected, abs=2e-5)


def test_scores_do_not_depend_on_order_or_grouping_of_cases(tmp_path, monkeypatch):
    dataset = make_prepared(tmp_path / "data", num_cases=6, sizes=[(32, 32), (40, 24)])
    folder = store_predictions(dataset, tmp_path / "fold")
    options = {"metrics": [name for name in SCORES if "volume" not in name], "method": "m", "fold": 0}
    together = score_fold(dataset, range(6), folder, **options)
    shuffled = score_fold(dataset, [3, 5, 0, 1, 4, 2], folder, **options)
    assert_same_table(shuffled, together)
    alone = concatenate(score_fold(dataset, [n], folder, **options) for n in range(6)).sorted()
    assert_same_table(alone, together)
    monkeypatch.setattr("semidice.runs.scoring._MAX_VALUES", 1)
    assert_same_table(score_fold(dataset, range(6), folder, **options), together)


def test_inapplicable_metrics_are_left_out_with_a_reason(tmp_path):
    flat = make_prepared(tmp_path / "data", num_cases=2, truth=False)
    metrics = ["volume_error_ml", "dice_score", "hausdorff_error_mm", "truth_error"]
    reasons = inapplicable_metrics(flat, metrics)
    assert reasons.keys() == {"volume_error_ml", "truth_error"}
    assert "2 of 2 cases are images of unknown thickness" in reasons["volume_error_ml"]
    table = score_fold(
        flat,
        [0, 1],
        store_predictions(flat, tmp_path / "fold"),
        metrics=metrics,
        method="m",
        fold=0,
    )
    assert set(table.metrics) == {"dice_score", "hausdorff_error_mm"}
    with pytest.raises(ValueError, match="no metric 'dise_score'; there are dice_score"):
        inapplicable_metrics(flat, ["dise_score"])


def test_volumes_are_in_ml_if_slices_have_a_thickness(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, slices_per_scan=2, truth=False)
    dataset = with_spacing(dataset, (0.5, 2.0, 4.0))
    folder = store_predictions(dataset, tmp_path / "fold", foreground)
    table = score_fold(dataset, [0, 1], folder, metrics=["volume_error_ml"], method="m", fold=0)
    for number, case in enumerate(dataset.cases):
        majority = (dataset.masks(number).sum(0) >= 2).sum()
        expected = (32 * 32 - majority) * 0.5 * 2 * 4 / 1000
        assert value(table, case.name, "volume_error_ml", "class1") == pytest.approx(expected, rel=1e-6)


def test_the_error_names_a_missing_prediction_or_one_of_another_dataset(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=1)
    folder = FoldFolder(tmp_path / "fold")
    options = {"metrics": ["dice_score"], "method": "m", "fold": 0}
    with pytest.raises(ValueError, match=r"there is no stored prediction .*scan000\.npz"):
        score_fold(dataset, [0], folder, **options)
    write_prediction(folder.prediction("scan000"), np.full((2, 16, 16), 0.5))
    with pytest.raises(ValueError, match=r"scan000\.npz has shape \(2, 16, 16\).*\(2, 32, 32\)"):
        score_fold(dataset, [0], folder, **options)


# semidice evaluate


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=6, size=(32, 32))


def table_and_output(run: RunFolder, **options) -> tuple[CaseTable, str]:
    console = Console(file=io.StringIO(), width=200)
    table = run_evaluate(run.path, console=console, **options)
    return table, console.file.getvalue()


def test_evaluation_gives_exactly_the_scores_of_training(dataset, tmp_path):
    run = make_run(
        tmp_path / "run", dataset, num_folds=3, metrics=[name for name in SCORES if name != "truth_error"]
    )
    trained = concatenate(read_cases(run.fold(fold).cases) for fold in range(3)).sorted()
    table, output = table_and_output(run)
    assert_same_table(table, trained)
    assert_same_table(read_cases(run.cases), trained)
    assert len(set(table.columns["case"])) == len(dataset)
    assert "left out volume_error_ml" in output
    assert f"wrote {run.cases}" in output
    assert "tiny: 3 folds" in output
    mean = table.select(metric="dice_score", class_name="mean").columns["value"].mean()
    assert f"{100 * mean:.3f}" in output


def test_other_metrics_are_scored_without_a_network(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    for fold in (0, 1):
        run.fold(fold).last.unlink()
    table, output = table_and_output(run, metrics=["brier_error"], out=tmp_path / "scores" / "brier.csv")
    assert set(table.metrics) == {"brier_error", "truth_error"}
    assert_same_table(read_cases(tmp_path / "scores" / "brier.csv"), table)
    assert not run.cases.exists()
    assert "brier_error" in output


def test_unfinished_folds_are_reported_and_the_table_of_the_run_is_not_written(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, num_folds=3, finished=[0, 2])
    table, output = table_and_output(run)
    assert set(table.columns["fold"]) == {0, 2}
    assert "not in these scores: fold 1" in output
    assert not run.cases.exists()
    table_and_output(run, out=tmp_path / "part.parquet")
    assert_same_table(read_cases(tmp_path / "part.parquet"), table)
    for fold in (0, 2):
        run.fold(fold).cases.unlink()
    with pytest.raises(ValueError, match="no finished fold to evaluate"):
        table_and_output(run)


def test_folds_trained_by_an_earlier_call_stay_in_the_table_of_the_run(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, num_folds=3)
    before, _ = table_and_output(run)
    recipe = open_run(run).recipe
    changed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"folds": (1,)})})
    write_recipe(changed, run.recipe)
    assert open_run(run).finished_folds == (0, 1, 2)
    assert_same_table(table_and_output(run)[0], before)


def test_the_new_path_of_a_moved_dataset_can_be_given(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    before, _ = table_and_output(run)
    text = run.recipe.read_text().replace(str(dataset.folder.path), str(tmp_path / "gone"))
    run.recipe.write_text(text)
    with pytest.raises(ValueError, match="gone"):
        table_and_output(run)
    table, output = table_and_output(run, dataset_path=dataset.folder.path)
    assert_same_table(table, before)
    assert "prepared again" not in output


def test_a_changed_dataset_is_reported_or_refused(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    changed = make_prepared(tmp_path / "changed", num_cases=6, seed=5)
    _, output = table_and_output(run, dataset_path=changed.folder.path, out=tmp_path / "cases.csv")
    assert "changed was prepared again" in output
    manifest = Manifest.model_validate_json(changed.folder.manifest.read_bytes())
    renamed = manifest.model_copy(update={"class_names": ("background", "tumour")})
    changed.folder.manifest.write_text(renamed.model_dump_json())
    with pytest.raises(ValueError, match=r"has classes background, tumour, but .* background, class1"):
        table_and_output(run, dataset_path=changed.folder.path)
    fewer = make_prepared(tmp_path / "fewer", num_cases=4)
    with pytest.raises(ValueError, match=r"folds\.json does not belong to the dataset"):
        table_and_output(run, dataset_path=fewer.folder.path)


def test_each_class_has_a_line_if_there_are_three_or_more(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=4, num_classes=3)
    _, output = table_and_output(make_run(tmp_path / "run", dataset, metrics=METRICS[:1]))
    shown = [line.split()[3] for line in output.splitlines() if "dice_score" in line]
    assert shown == ["background", "class1", "class2", "mean"]
    _, output = table_and_output(
        make_run(tmp_path / "two", make_prepared(tmp_path / "other"), metrics=METRICS[:1])
    )
    assert [line.split()[3] for line in output.splitlines() if "dice_score" in line] == ["mean"]
