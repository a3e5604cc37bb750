"""The table of means that `train` and `evaluate` print, and the scores of files that other tools made."""

import io
import re

import nibabel
import numpy as np
import pytest
from case_rows import CaseRow, metrics_of, select, table_of
from PIL import Image
from prepared import make_prepared
from preparing import prepare
from raw_trees import make_folder
from rich.console import Console
from start import refused, semidice
from trained import score_fold

from semidice.data.dataset import Dataset
from semidice.data.sources import find_datasets
from semidice.paths import FoldFolder
from semidice.runs.evaluate import EvaluateOptions, run_evaluate_files, scores_table
from semidice.runs.predictions import write_prediction
from semidice.statistics.cases import read_cases


def test_the_printed_interval_of_a_share_stays_between_0_and_100_percent():
    # nearly all scores are close to 1, so the interval of their mean would exceed 1
    scores = [1.0, 1.0, 0.98, 1.0, 0.99, 1.0, 0.97, 1.0, 0.7, 0.99, 1.0, 0.98]
    rows = [
        CaseRow(f"c{case}", f"c{case}", 0, "m", "mean", metric, value)
        for case, score in enumerate(scores)
        for metric, value in (("dice_score", score), ("volume_error", 100 * score))
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(scores_table(table_of(rows), title="m"))
    ends = {
        metric: (float(low), float(high))
        for metric, low, high in re.findall(
            r"(dice_score|volume_error).* ([\d.]+) to ([\d.]+)", console.file.getvalue()
        )
    }
    assert ends["dice_score"][1] == 100
    assert ends["volume_error"][1] > 100
    assert ends["dice_score"][0] == ends["volume_error"][0]


METRICS = (
    "dice_score",
    "binarized_dice_score",
    "calibration_error",
    "brier_error",
    "negative_log_likelihood",
)
AFFINE = np.diag([0.7, 0.7, 2.5, 1])


def volumes(path, **options):
    """Two volumes (32, 24, 8), of which slices 3 to 6 are cases."""
    return make_prepared(path, num_cases=8, size=(32, 24), slices_per_scan=4, truth=False, **options)


def random_volumes(dataset, *, seed=0):
    """Probabilities (C, *raw_shape) of each scan."""
    rng = np.random.default_rng(seed)
    space = dataset.manifest.scans[0].raw_shape
    probs = {}
    for scan in dataset.manifest.scans:
        logits = rng.normal(0, 1, (dataset.num_classes, *space))
        probs[scan.name] = (np.exp(logits) / np.exp(logits).sum(0)).astype(np.float32)
    return probs


def one_hot(prob):
    return (prob.argmax(0) == np.arange(len(prob)).reshape(-1, *[1] * (prob.ndim - 1))).astype(np.float32)


def stored_scores(dataset, probs, path, **options):
    """The scores of the same predictions, stored in a run."""
    folder = FoldFolder(path)
    for case in dataset.cases:
        prob = probs[case.scan.name]
        if case.scan.slices is not None:
            prob = prob[..., case.scan.slices[case.row]]
        write_prediction(folder.prediction(case.name), prob)
    cases = range(len(dataset))
    return score_fold(dataset, cases, folder, **({"metrics": METRICS, "method": "m", "fold": -1} | options))


def evaluate(folder, dataset, **options):
    console = Console(file=io.StringIO(), width=200)
    given = {name: options.pop(name) for name in ("name", "skip_missing") if name in options}
    chosen = EvaluateOptions(**({"metrics": METRICS} | options))
    table = run_evaluate_files(folder, dataset.folder.path, chosen, console, **({"name": "m"} | given))
    return table, console.file.getvalue()


def write_nifti(path, values, affine=AFFINE):
    image = nibabel.Nifti1Image(values, affine)
    image.set_sform(affine, code=1)
    nibabel.save(image, path)


def assert_same_scores(table, expected, *, metrics=METRICS):
    """metrics: those of the table; the first is Dice, which is the same to the bit."""
    assert set(table.pipe(metrics_of)) == set(metrics)
    kept = np.isin(expected["metric"], metrics)
    for name, column in expected.items():
        if name == "value":
            # a stored probability is rounded to 1 / 65535
            np.testing.assert_allclose(table[name], column[kept], atol=1e-4)
        else:
            np.testing.assert_array_equal(table[name], column[kept])
    of_dice = (each.pipe(select, metric=metrics[0])["value"] for each in (table, expected))
    np.testing.assert_array_equal(*of_dice)


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "nnunet_out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("layout", ["npz", "nnunet npz", "softmax", "nifti", "foreground", "prob"])
def test_files_of_probabilities_are_scored_as_the_same_predictions_of_a_run(
    layout, num_classes, out, tmp_path
):
    dataset = volumes(tmp_path / "data", num_classes=num_classes)
    probs = random_volumes(dataset)
    for name, prob in probs.items():
        if layout == "npz":
            np.savez_compressed(out / f"{name}.npz", probabilities=prob)
        elif layout == "softmax":
            np.savez(out / f"{name}.npz", softmax=prob)
        elif layout == "nnunet npz":
            np.savez_compressed(out / f"{name}.npz", probabilities=prob.transpose(0, 3, 2, 1))
            write_nifti(out / f"{name}.nii.gz", prob.argmax(0).astype(np.uint8))
        elif layout == "nifti" or num_classes > 2:
            end = "_prob" if layout == "prob" else ""
            write_nifti(out / f"{name}{end}.nii.gz", np.moveaxis(prob, 0, -1))
        else:
            end = "_prob" if layout == "prob" else ""
            write_nifti(out / f"{name}{end}.nii", prob[1])
    table, printed = evaluate(out, dataset)
    assert_same_scores(table, stored_scores(dataset, probs, tmp_path / "run"))
    assert "probabilities of" in printed
    per_slice, _ = evaluate(out, dataset, unit="slice", metrics=["dice_score"])
    expected = stored_scores(dataset, probs, tmp_path / "run", unit="slice", metrics=["dice_score"])
    assert_same_scores(per_slice, expected, metrics=["dice_score"])
    assert set(per_slice["per"]) == {"slice"}


def test_masks_are_scored_without_calibration_and_the_command_says_so(out, tmp_path):
    dataset = volumes(tmp_path / "data", num_classes=3)
    probs = random_volumes(dataset)
    for number, (name, prob) in enumerate(probs.items()):
        dtype = np.uint8 if number else np.float64
        write_nifti(out / f"{name}.nii.gz", prob.argmax(0).astype(dtype))
    (out / "dataset.json").write_text("{}")
    hard = {name: one_hot(prob) for name, prob in probs.items()}
    expected = stored_scores(dataset, hard, tmp_path / "run", method="nnunet_out")
    table, printed = evaluate(out, dataset, name=None, out=tmp_path / "scores.csv")
    assert_same_scores(table, expected, metrics=["dice_score", "binarized_dice_score"])
    assert "left out calibration_error: the files are masks" in printed
    assert "no case has the name: 1 file (dataset.json)" in printed
    assert set(read_cases(tmp_path / "scores.csv")["method"]) == {"nnunet_out"}


def test_one_file_per_slice_is_scored_as_the_volume(out, tmp_path):
    dataset = volumes(tmp_path / "data")
    probs = random_volumes(dataset)
    for case in dataset.cases:
        mask = probs[case.scan.name].argmax(0)[..., case.scan.slices[case.row]]
        Image.fromarray((mask * 255).astype(np.uint8)).save(out / f"{case.name}.png")
    hard = {name: one_hot(prob) for name, prob in probs.items()}
    expected = stored_scores(dataset, hard, tmp_path / "run")
    assert_same_scores(evaluate(out, dataset)[0], expected, metrics=["dice_score", "binarized_dice_score"])


@pytest.mark.parametrize("kind", ["mask", "8 bit", "16 bit"])
def test_pictures_are_scored_as_the_same_predictions_of_a_run(kind, out, tmp_path):
    dataset = make_prepared(tmp_path / "data", size=(24, 32), truth=False)
    probs = {}
    for name, prob in random_volumes(dataset).items():
        highest = {"mask": 255, "8 bit": 255, "16 bit": 65535}[kind]
        share = prob[1] > 0.5 if kind == "mask" else prob[1]
        pixels = np.rint(share * highest).astype(np.uint16 if kind == "16 bit" else np.uint8)
        Image.fromarray(pixels).save(out / f"{name}{'' if kind == 'mask' else '_prob'}.png")
        foreground = (pixels / highest).astype(np.float32)
        probs[name] = np.stack([1 - foreground, foreground])
    expected = stored_scores(dataset, probs, tmp_path / "run")
    metrics = METRICS if kind != "mask" else ("dice_score", "binarized_dice_score")
    assert_same_scores(evaluate(out, dataset)[0], expected, metrics=metrics)


@pytest.mark.parametrize(
    ("suffix", "is_volume"), [(".png", False), (".tif", True), (".nii.gz", False), (".nii.gz", True)]
)
@pytest.mark.parametrize("slices", ["none", "foreground"])
def test_the_raw_masks_of_the_only_rater_have_dice_1_in_a_resized_dataset(
    suffix, is_volume, slices, tmp_path
):
    root = make_folder(
        tmp_path / "raw", num_raters=1, masks_folder=True, suffix=suffix, volumes=is_volume, num_classes=3
    )
    (raw,) = find_datasets("folder", root)
    prepare(raw, tmp_path / "data", overrides={"size": (20, 28), "slices": slices})
    dataset = Dataset(tmp_path / "data")
    table, _ = evaluate(root / "masks", dataset, metrics=["dice_score"])
    assert len(set(table["case"].tolist())) == len(dataset.manifest.scans)
    np.testing.assert_array_equal(table["value"], 1)


def test_the_mask_tells_the_order_of_the_axes_of_an_npz_where_its_shape_does_not(out, tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=2, size=(16, 16), depth=16, truth=False)
    probs = random_volumes(dataset)
    for name, prob in probs.items():
        np.savez(out / f"{name}.npz", probabilities=prob.transpose(0, 3, 2, 1))
    refused(lambda: evaluate(out, dataset), "scan000", "put the mask of the case next to it")
    for name, prob in probs.items():
        write_nifti(out / f"{name}.nii.gz", prob.argmax(0).astype(np.uint8))
    assert_same_scores(evaluate(out, dataset)[0], stored_scores(dataset, probs, tmp_path / "run"))


def test_missing_scans_are_named_and_left_out_only_on_request(out, tmp_path):
    dataset = volumes(tmp_path / "data")
    mask = np.zeros((32, 24, 8), np.uint8)
    write_nifti(out / "scan000.nii.gz", mask)
    refused(lambda: evaluate(out, dataset), "1 scan (scan001) of 2", "--skip-missing")
    table, printed = evaluate(out, dataset, skip_missing=True)
    assert set(table["case"].tolist()) == {"scan000"}
    assert "not in these scores: 1 scan (scan001) of 2" in printed


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a file ran code')",))


def probabilities(array):
    return lambda out: np.savez(out / "scan001.npz", probabilities=array)


def nifti(name, array, affine=AFFINE):
    return lambda out: write_nifti(out / name, array, affine)


def masks_in_two_formats(out):
    for suffix in (".nii", ".nii.gz"):
        write_nifti(out / f"scan001{suffix}", np.zeros((32, 24, 8), np.uint8))


# what is written, and words of the refusal beside the name
WRONG = {
    "a mask of another size": (
        nifti("scan001.nii.gz", np.zeros((32, 24, 9), np.uint8)),
        ["(32, 24, 9)", "(32, 24, 8)"],
    ),
    "another size": (probabilities(np.zeros((2, 32, 24, 9))), ["(2, 32, 24, 9)", "(2, 32, 24, 8)"]),
    "swapped axes": (probabilities(np.zeros((2, 24, 32, 8))), ["(24, 32, 8)", "(32, 24, 8)"]),
    "a pickle": (probabilities(np.array([Payload()])), []),
    "no probabilities": (
        lambda out: np.savez(out / "scan001.npz", logits=np.zeros(3)),
        ["probabilities or softmax"],
    ),
    "logits": (probabilities(np.full((2, 32, 24, 8), 3.0)), ["apply softmax"]),
    "a flipped axis": (
        nifti("scan001_prob.nii", np.full((32, 24, 8), 0.5, np.float32), AFFINE * [[-1], [1], [1], [1]]),
        ["axis 0 is flipped"],
    ),
    "an unknown class": (nifti("scan001.nii.gz", np.full((32, 24, 8), 3, np.uint8)), ["3", "0, 1, 255"]),
    "two predictions": (masks_in_two_formats, ["two predictions", "scan001.nii.gz"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_scored_is_refused_with_the_reason(name, out, tmp_path):
    dataset = volumes(tmp_path / "data")
    write, words = WRONG[name]
    write(out)
    refused(lambda: evaluate(out, dataset, skip_missing=True), "scan001", *words)


def test_masks_and_probabilities_are_not_mixed(out, tmp_path):
    dataset = volumes(tmp_path / "data")
    write_nifti(out / "scan000.nii.gz", np.zeros((32, 24, 8), np.uint8))
    write_nifti(out / "scan001.nii.gz", np.full((32, 24, 8), 0.25, np.float32))
    refused(lambda: evaluate(out, dataset), "1 mask (scan000.nii.gz)", "probabilities of 1 case")


def test_the_command_scores_files_and_needs_their_dataset(out, tmp_path):
    dataset = volumes(tmp_path / "data")
    for name, prob in random_volumes(dataset).items():
        np.savez(out / f"{name}.npz", probabilities=prob)
    files = ("evaluate", "--predictions", out)
    refused(semidice(*files), "--dataset")
    refused(semidice("evaluate"), "name a run folder")
    scores = tmp_path / "scores.csv"
    done = semidice(*files, "--dataset", dataset.folder.path, "--name", "other", "-o", scores)
    assert done.code == 0, done.err
    assert set(read_cases(scores)["method"]) == {"other"}
