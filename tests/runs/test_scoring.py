"""Scores of stored predictions: checked by hand, by other libraries, and through `semidice evaluate`."""

import io
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from case_rows import metrics_of, rows_of, select
from prepared import make_prepared, rehash
from rich.console import Console
from sklearn.metrics import f1_score, log_loss
from start import refused
from trained import METRICS, make_run, score_fold

from semidice.data.dataset import Dataset
from semidice.data.packing import pack_classes
from semidice.metrics.registry import SCORES
from semidice.paths import FoldFolder, RunFolder
from semidice.recipes import write_recipe
from semidice.runs.evaluate import EvaluateOptions, run_evaluate
from semidice.runs.predictions import read_prediction, write_prediction
from semidice.runs.run import open_run
from semidice.runs.scoring import inapplicable_metrics, score_key
from semidice.statistics.cases import CaseTable, concatenate, in_order, keys_of, read_cases


def value(table: CaseTable, case: str, metric: str, class_name: str) -> float:
    (row,) = table.pipe(select, case=case, metric=metric, class_name=class_name).pipe(rows_of)
    return row.value


def assert_same_table(table: CaseTable, expected: CaseTable) -> None:
    for name, column in table.items():
        np.testing.assert_array_equal(column, expected[name])


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


def sides(spacing_mm) -> dict:
    """Fields of a scan in slices: sides of a pixel, then the distance of slices."""
    if spacing_mm is None:
        return {"spacing_mm": None, "thickness_mm": None}
    return {"spacing_mm": spacing_mm[:2], "thickness_mm": spacing_mm[2]}


def with_spacing(dataset: Dataset, spacing_mm) -> Dataset:
    """The dataset with another voxel spacing, written and opened again."""
    scans = [scan.model_copy(update=sides(spacing_mm)) for scan in dataset.manifest.scans]
    manifest = dataset.manifest.model_copy(update={"scans": tuple(scans)})
    dataset.folder.manifest.write_text(manifest.model_dump_json())
    return Dataset(dataset.folder.path)


def without_masks(dataset: Dataset, first: int | None = None) -> Dataset:
    """The dataset in which nobody drew in the first cases of each scan, or in any."""
    for scan in dataset.manifest.scans:
        path = dataset.folder.array("masks", scan.name)
        stored = np.load(path)
        stored[:first] = 0
        np.save(path, stored)
    rehash(dataset)
    return Dataset(dataset.folder.path)


def assert_same_names(table: CaseTable, expected: CaseTable) -> None:
    for name in ("metric", "class", "patient"):
        np.testing.assert_array_equal(table[name], expected[name])


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
    assert set(table["case"]) == {"scan000", "scan002"}
    assert set(table["fold"]) == {4}
    assert set(table["method"]) == {"m"}
    assert set(table["patient"]) == {"patient000", "patient001"}
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
        "truth_error"
        not in score_fold(no_truth, [0, 1], FoldFolder(tmp_path / "empty"), **options)["metric"].unique()
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
    options = {"metrics": list(SCORES), "method": "m", "fold": 0}
    together = score_fold(dataset, range(6), folder, **options)
    shuffled = score_fold(dataset, [3, 5, 0, 1, 4, 2], folder, **options)
    assert_same_table(shuffled, together)
    alone = concatenate(score_fold(dataset, [n], folder, **options) for n in range(6)).pipe(in_order)
    assert_same_table(alone, together)
    monkeypatch.setattr("semidice.runs.scoring._MAX_VALUES", 1)
    assert_same_table(score_fold(dataset, range(6), folder, **options), together)


def test_inapplicable_metrics_are_left_out_with_a_reason(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, num_raters=1, truth=False)
    metrics = ["dice_score", "truth_error", "rater_dice_score", "rater_calibration_error"]
    reasons = inapplicable_metrics(dataset, metrics)
    assert reasons == {
        "truth_error": "the true probability is known of phantoms alone",
        "rater_dice_score": "every case has one rater",
        "rater_calibration_error": "every case has one rater",
    }
    folder = store_predictions(dataset, tmp_path / "fold")
    table = score_fold(dataset, [0, 1], folder, metrics=metrics, method="m", fold=0)
    assert table.pipe(metrics_of) == ("dice_score",)
    refused(lambda: inapplicable_metrics(dataset, ["dise_score"]), "'dise_score'", "dice_score")


def test_surfaces_are_left_out_where_all_masks_are_empty(tmp_path):
    dataset = without_masks(make_prepared(tmp_path / "data", num_cases=2))
    reasons = inapplicable_metrics(dataset, ["hausdorff_error", "surface_dice_score", "dice_score"])
    assert reasons.keys() == {"hausdorff_error", "surface_dice_score"}
    assert "all masks are empty" in reasons["hausdorff_error"]


# units: scans and slices, millimetres and voxels


def as_volumes(dataset: Dataset, folder: FoldFolder, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored probabilities (C, *space) and the majority (*space) of a scan, with the slices last."""
    scan = dataset.manifest.scans[number]
    cases = [at for at, case in enumerate(dataset.cases) if case.scan.name == scan.name]
    prob = np.stack([read_prediction(folder.prediction(dataset.cases[at].name)) for at in cases], -1)
    masks = np.stack([dataset.masks(at) for at in cases], -1)
    votes = np.stack([(masks == label).sum(0) for label in range(dataset.num_classes)])
    return prob, votes.argmax(0)


SPACING = (0.5, 2.0, 4.0)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Three volumes of four slices, of which the raters left some empty, and noisy predictions."""
    path = tmp_path_factory.mktemp("volumes")
    dataset = make_prepared(
        path / "data", num_cases=12, slices_per_scan=4, num_classes=3, cases_per_patient=1, truth=False
    )
    dataset = with_spacing(without_masks(dataset, first=2), SPACING)
    return dataset, store_predictions(dataset, path / "fold")


def test_scores_of_a_volume_equal_those_of_monai_and_sklearn_on_the_reassembled_volume(volumes):
    monai_metrics = pytest.importorskip("monai.metrics")
    dataset, folder = volumes
    metrics = ["dice_score", "hausdorff_error", "surface_dice_score", "volume_error", "brier_error"]
    table = score_fold(
        dataset, range(12), folder, metrics=[*metrics, "calibration_error"], method="m", fold=0, tolerance=2
    )
    assert set(table["case"]) == {"scan000", "scan001", "scan002"}
    assert set(table.pipe(metrics_of)) == {*metrics, "calibration_error"}
    assert set(table.pipe(select, metric="surface_dice_score")["unit"]) == {"share within 2 mm"}
    dice = monai_metrics.DiceMetric(include_background=True, reduction="none")
    surface = monai_metrics.SurfaceDiceMetric([2.0, 2.0, 2.0], include_background=True, reduction="none")
    hausdorff = monai_metrics.HausdorffDistanceMetric(
        include_background=True, percentile=95, reduction="none"
    )
    for number in range(3):
        prob, majority = as_volumes(dataset, folder, number)
        one_hot = [
            torch.from_numpy(np.stack([classes == label for label in range(3)])[None])
            for classes in (prob.argmax(0), majority)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*always_return_as_numpy.*", FutureWarning)
            expected = {
                "dice_score": dice(*(part.float() for part in one_hot))[0],
                "hausdorff_error": hausdorff(*one_hot, spacing=list(SPACING))[0],
                "surface_dice_score": surface(*one_hot, spacing=list(SPACING))[0],
            }
        for metric, values in expected.items():
            for label, name in enumerate(dataset.manifest.class_names):
                ours = value(table, f"scan{number:03d}", metric, name)
                assert ours == pytest.approx(float(values[label]), rel=1e-5), (metric, name)
        for label in (1, 2):
            difference = abs(int((prob.argmax(0) == label).sum()) - int((majority == label).sum()))
            ours = value(table, f"scan{number:03d}", "volume_error", f"class{label}")
            assert ours == pytest.approx(difference * 4.0 / 1000, rel=1e-6)
        truth = np.eye(3)[majority.ravel()]
        rows = prob.reshape(3, -1).T
        brier = ((rows - truth) ** 2).sum(1).mean() / 2
        assert value(table, f"scan{number:03d}", "brier_error", "all") == pytest.approx(brier, rel=1e-5)
        confidence, right = rows.max(1), rows.argmax(1) == majority.ravel()
        bins = np.minimum((confidence * 10).astype(int), 9)
        gaps = [abs(right[bins == each].sum() - confidence[bins == each].sum()) for each in range(10)]
        ours = value(table, f"scan{number:03d}", "calibration_error", "all")
        assert ours == pytest.approx(sum(gaps) / len(right), abs=1e-5)


def test_scores_per_slice_are_named_so_and_empty_slices_count_as_1(volumes):
    dataset, folder = volumes
    scores = {
        unit: score_fold(dataset, range(12), folder, metrics=["dice_score"], method="m", fold=0, unit=unit)
        for unit in ("scan", "slice")
    }
    assert scores["slice"].pipe(metrics_of) == ("dice_score",)
    assert (set(scores["slice"]["per"]), set(scores["scan"]["per"])) == ({"slice"}, {"scan"})
    assert scores["scan"].pipe(metrics_of) == ("dice_score",)
    assert set(scores["slice"]["case"]) == {case.name for case in dataset.cases}
    assert set(scores["slice"]["patient"]) == set(scores["scan"]["patient"])
    for number, case in enumerate(dataset.cases):
        prob = read_prediction(folder.prediction(case.name)).argmax(0) == 1
        votes = np.stack([(dataset.masks(number) == label).sum(0) for label in range(3)])
        expected = f1_score((votes.argmax(0) == 1).ravel(), prob.ravel(), zero_division=1.0)
        ours = value(scores["slice"], case.name, "dice_score", "class1")
        assert ours == pytest.approx(expected, abs=1e-6)
    # an image of its own has no slices
    flat = make_prepared(dataset.folder.path.parent / "flat", num_cases=1)
    images = store_predictions(flat, dataset.folder.path.parent / "flat_fold")
    table = score_fold(flat, [0], images, metrics=["dice_score"], method="m", fold=0, unit="slice")
    assert "dice_score" in table.pipe(metrics_of)


def test_slices_that_were_not_kept_are_not_scored_but_keep_their_place(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=3, slices_per_scan=3, truth=True)
    (scan,) = dataset.manifest.scans
    apart = dataset.manifest.model_copy(
        update={"scans": (scan.model_copy(update={"slices": (2, 3, 6), **sides(SPACING)}),)}
    )
    dataset.folder.manifest.write_text(apart.model_dump_json())
    dataset = Dataset(dataset.folder.path)
    folder = store_predictions(dataset, tmp_path / "fold")
    voxel_scores = [
        name
        for name in SCORES
        if name not in ("hausdorff_error", "surface_dice_score", "kde_calibration_error")
    ]
    options = {"method": "m", "fold": 0}
    with_gap = score_fold(dataset, range(3), folder, metrics=voxel_scores, **options)
    dense = make_prepared(tmp_path / "dense", num_cases=3, slices_per_scan=3)
    dense = with_spacing(dense, SPACING)
    for old, new in zip(dataset.cases, dense.cases, strict=True):
        prob = read_prediction(folder.prediction(old.name))
        write_prediction(FoldFolder(tmp_path / "dense_fold").prediction(new.name), prob)
    without_gap = score_fold(
        dense, range(3), FoldFolder(tmp_path / "dense_fold"), metrics=voxel_scores, **options
    )
    assert_same_names(with_gap, without_gap)
    np.testing.assert_allclose(with_gap["value"], without_gap["value"], rtol=1e-5, atol=1e-7)
    # distances across the gap are those of the scan: a point in slice 2, and one in slice 6
    for at, case in enumerate(dataset.cases):
        masks = np.zeros((3, 32, 32), np.uint8)
        prob = np.zeros((2, 32, 32), np.float32)
        prob[0] = 1
        if at == 0:
            masks[:, 5, 5] = 1
        if at == 2:
            prob[:, 5, 5] = 0, 1
        path = dataset.folder.array("masks", scan.name)
        stored = np.load(path)
        stored[at] = pack_classes(masks[None], num_classes=2, num_space_axes=2)[0]
        np.save(path, stored)
        write_prediction(folder.prediction(case.name), prob)
    table = score_fold(dataset, range(3), folder, metrics=["hausdorff_error"], **options)
    assert value(table, scan.name, "hausdorff_error", "class1") == pytest.approx(4 * SPACING[2])


def test_without_spacing_distances_and_volumes_are_in_voxels_and_named_so(volumes, tmp_path):
    dataset, folder = volumes
    metrics = ["hausdorff_error", "surface_dice_score", "volume_error", "dice_score"]
    options = {"metrics": metrics, "method": "m", "fold": 0}
    shutil.copytree(dataset.folder.path, tmp_path / "data")
    ones = with_spacing(Dataset(tmp_path / "data"), (1.0, 1.0, 1.0))
    in_mm = score_fold(ones, range(12), folder, **options)
    unknown = with_spacing(Dataset(tmp_path / "data"), None)
    in_voxels = score_fold(unknown, range(12), folder, **options)
    for metric, old, new, scale in (
        ("hausdorff_error", "mm", "voxels", 1),
        ("surface_dice_score", "share within 1 mm", "share within 1 voxels", 1),
        ("volume_error", "ml", "voxels", 1000),
        ("dice_score", "share", "share", 1),
    ):
        was, now = (each.pipe(select, metric=metric) for each in (in_mm, in_voxels))
        assert (set(was["unit"]), set(now["unit"])) == ({old}, {new})
        np.testing.assert_allclose(now["value"], scale * was["value"], rtol=1e-5)


def test_one_scan_without_spacing_puts_all_distances_in_voxels(volumes, tmp_path):
    dataset, _ = volumes
    shutil.copytree(dataset.folder.path, tmp_path / "data")
    first, *others = dataset.manifest.scans
    mixed = dataset.manifest.model_copy(update={"scans": (first.model_copy(update=sides(None)), *others)})
    (tmp_path / "data" / "manifest.json").write_text(mixed.model_dump_json())
    assert score_key(Dataset(tmp_path / "data"), "hausdorff_error").unit == "voxels"
    assert score_key(dataset, "hausdorff_error").unit == "mm"


def test_an_image_of_known_spacing_has_distances_in_mm_and_its_volume_in_voxels(tmp_path):
    flat = make_prepared(tmp_path / "data", num_cases=1)
    units = [score_key(flat, name).unit for name in ("hausdorff_error", "volume_error")]
    assert units == ["mm", "voxels"]


def test_the_error_names_a_missing_prediction_or_one_of_another_dataset(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=1)
    folder = FoldFolder(tmp_path / "fold")
    options = {"metrics": ["dice_score"], "method": "m", "fold": 0}
    score = partial(score_fold, dataset, [0], folder, **options)
    refused(score, "scan000.npz", "predict again")
    write_prediction(folder.prediction("scan000"), np.full((2, 16, 16), 0.5))
    refused(score, "scan000.npz", "(2, 16, 16)", "(2, 32, 32)", "predict again")


# semidice evaluate


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("data") / "dataset", num_cases=6, size=(32, 32))


def table_and_output(run: RunFolder, dataset=None, **options) -> tuple[CaseTable, str]:
    console = Console(file=io.StringIO(), width=200)
    table = run_evaluate(run.path, EvaluateOptions(**options), console, dataset=dataset)
    return table, console.file.getvalue()


def test_evaluation_gives_exactly_the_scores_of_training(dataset, tmp_path):
    run = make_run(
        tmp_path / "run", dataset, num_folds=3, metrics=[name for name in SCORES if name != "truth_error"]
    )
    trained = concatenate(read_cases(run.fold(fold).cases) for fold in range(3)).pipe(in_order)
    table, output = table_and_output(run)
    assert_same_table(table, trained)
    assert_same_table(read_cases(run.cases), trained)
    assert len(set(table["case"])) == len(dataset)
    assert "in voxels, because the spacing is not known of every scan: volume_error" in output
    assert f"wrote {run.cases}" in output
    assert "tiny: 3 folds" in output
    mean = table.pipe(select, metric="dice_score", class_name="mean")["value"].mean()
    assert f"{100 * mean:.3f}" in output


def test_other_metrics_are_scored_without_a_network(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    for fold in (0, 1):
        run.fold(fold).last.unlink()
    table, output = table_and_output(run, metrics=["brier_error"], out=tmp_path / "scores" / "brier.csv")
    assert set(table.pipe(metrics_of)) == {"brier_error", "truth_error"}
    assert_same_table(read_cases(tmp_path / "scores" / "brier.csv"), table)
    assert not run.cases.exists()
    assert "brier_error" in output


def test_other_metrics_are_added_to_the_table_of_the_run(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    before, _ = table_and_output(run)
    added, output = table_and_output(run, metrics=["brier_error"])
    assert set(added.pipe(metrics_of)) == {"brier_error", "truth_error"}
    both = read_cases(run.cases)
    assert set(both.pipe(metrics_of)) == {*before.pipe(metrics_of), "brier_error"}
    assert_same_table(both.pipe(select, metric="dice_score"), before.pipe(select, metric="dice_score"))
    assert_same_table(both.pipe(select, metric="brier_error"), added.pipe(select, metric="brier_error"))
    assert "which also has binarized_dice_score" in output
    # a resumed training makes the table of the run from those of the folds
    assert_same_table(concatenate(read_cases(run.fold(fold).cases) for fold in (0, 1)).pipe(in_order), both)
    again, _ = table_and_output(run, metrics=["dice_score"])
    assert_same_table(read_cases(run.cases), both)
    assert set(again.pipe(metrics_of)) == {"dice_score", "truth_error"}


def test_scores_that_do_not_apply_are_said_and_nothing_is_written(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=4, num_raters=1, truth=False)
    run = make_run(tmp_path / "run", dataset)
    table_and_output(run)
    before = run.cases.read_bytes()
    refused(lambda: table_and_output(run, metrics=["rater_dice_score"]), "rater_dice_score", "nothing")
    assert run.cases.read_bytes() == before
    _, output = table_and_output(run, metrics=["rater_dice_score", "brier_error"])
    assert "left out rater_dice_score: every case has one rater" in output


def test_slices_and_a_tolerance_are_added_to_the_scores_of_scans(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=8, slices_per_scan=2, cases_per_patient=1)
    run = make_run(tmp_path / "run", dataset, metrics=["dice_score"])
    table, output = table_and_output(run)
    assert len(set(table["case"])) == 4
    assert "8 slices are put together to 4 scans" in output
    table, output = table_and_output(run, unit="slice")
    assert "each of 8 slices of 4 scans is scored on its own" in output
    assert "dice_score per slice" in output
    table_and_output(run, metrics=["surface_dice_score"], tolerance=2.5)
    names = {"dice_score", "truth_error"}
    assert {(key.metric, key.per) for key in keys_of(read_cases(run.cases))} == {
        *((name, per) for name in names for per in ("scan", "slice")),
        ("surface_dice_score", "scan"),
    }


def test_unfinished_folds_are_reported_and_the_table_of_the_run_is_not_written(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, num_folds=3, finished=[0, 2])
    table, output = table_and_output(run)
    assert set(table["fold"]) == {0, 2}
    assert "not in these scores: fold 1" in output
    assert not run.cases.exists()
    table_and_output(run, out=tmp_path / "part.parquet")
    assert_same_table(read_cases(tmp_path / "part.parquet"), table)
    for fold in (0, 2):
        run.fold(fold).cases.unlink()
    refused(lambda: table_and_output(run), "no finished fold", "train --resume")


def test_folds_trained_by_an_earlier_call_stay_in_the_table_of_the_run(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset, num_folds=3)
    before, _ = table_and_output(run)
    recipe = open_run(run).recipe
    changed = recipe.model_copy(update={"data": replace(recipe.data, folds=(1,))})
    write_recipe(changed, run.recipe)
    assert open_run(run).finished_folds == (0, 1, 2)
    assert_same_table(table_and_output(run)[0], before)


def test_the_new_path_of_a_moved_dataset_can_be_given(dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    before, _ = table_and_output(run)
    text = run.recipe.read_text().replace(str(dataset.folder.path), str(tmp_path / "gone"))
    run.recipe.write_text(text)
    refused(lambda: table_and_output(run), str(tmp_path / "gone"))
    table, _ = table_and_output(run, dataset=dataset.folder.path)
    assert_same_table(table, before)


def test_another_dataset_and_masks_that_have_changed_are_refused(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6)
    run = make_run(tmp_path / "run", dataset)
    again = make_prepared(tmp_path / "again", num_cases=6, seed=5)
    refused(lambda: table_and_output(run, dataset=again.folder.path), "again is not the dataset", "--dataset")
    path = dataset.folder.array("masks", "scan003")
    np.save(path, ~np.load(path))
    refused(lambda: table_and_output(run), "masks of 1 scan (scan003)", "have changed")
    assert not run.cases.exists()


@pytest.mark.parametrize("change", ["another case", "another fold", "another run", "removed"])
def test_a_prediction_that_is_not_the_one_of_the_training_is_refused(change, dataset, tmp_path):
    run = make_run(tmp_path / "run", dataset)
    other = make_run(tmp_path / "other", dataset, change=lambda network: network.apply(doubled))
    first, second = sorted(run.fold(0).predictions.iterdir())[:2]
    if change == "another case":
        first.write_bytes(second.read_bytes())
    elif change == "another fold":
        shutil.rmtree(run.fold(0).path)
        shutil.copytree(run.fold(1).path, run.fold(0).path)
    elif change == "another run":
        first.write_bytes((other.fold(0).predictions / first.name).read_bytes())
    else:
        first.unlink()
    named = "fold_0" if change == "another fold" else str(first)
    refused(lambda: table_and_output(run), named, "train --resume")


def doubled(layer):
    if isinstance(layer, torch.nn.Conv2d):
        with torch.no_grad():
            layer.weight.mul_(2)


def test_each_class_has_a_line_if_there_are_three_or_more(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=4, num_classes=3)
    _, output = table_and_output(make_run(tmp_path / "run", dataset, metrics=METRICS[:1]))
    shown = [line.split()[3] for line in output.splitlines() if "dice_score" in line]
    assert shown == ["background", "class1", "class2", "mean"]
    _, output = table_and_output(
        make_run(tmp_path / "two", make_prepared(tmp_path / "other"), metrics=METRICS[:1])
    )
    assert [line.split()[3] for line in output.splitlines() if "dice_score" in line] == ["mean"]
