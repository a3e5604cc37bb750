"""torchmetrics classes: batches, and two processes with uneven loads, give the same bits as one process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from laws import class_map, soft_label
from torchmetrics import MetricCollection

from semidice.labels.makers import mean_label
from semidice.metrics import calibration_bins, dice_score, foreground_mean, write_cases
from semidice.metrics.accumulators import CalibrationError, CaseScores
from semidice.metrics.registry import SCORES

CLASSES = ("background", "organ", "lesion")
# the scores that need no optional package; importing MONAI takes seconds in each process
QUICK = [name for name, score in SCORES.items() if score.package is None]
# the cases that each of two processes sees; "padded" repeats a case, as DistributedSampler does
SPLITS = {
    "uneven": ([0, 1, 2, 3], [4]),
    "one process has all": ([], [0, 1, 2, 3, 4]),
    "padded": ([0, 1, 2], [3, 4, 0]),
}


def data(cases):
    """All arguments of `update` for some of five cases, whose names have different lengths."""
    masks = class_map((5, 4, 9, 10), 3)
    valid = torch.rand(5, 9, 10, generator=torch.Generator().manual_seed(3)) < 0.9
    arrays = {
        "prob": soft_label(5, 3, 9, 10),
        "target": class_map((5, 9, 10), 3),
        "soft_target": mean_label(masks, num_classes=3, batched=True),
        "masks": masks,
        "valid": valid,
        "truth": soft_label(5, 3, 9, 10, seed=1),
    }
    names = {"case": [f"case {'é' * k}{k}" for k in cases], "patient": [f"patient{k // 2}" for k in cases]}
    return {name: array[cases] for name, array in arrays.items()} | names | {"spacing_mm": (1, 1, 2)}


def score_cases(cases):
    scores = CaseScores(QUICK, class_names=CLASSES, method="DML1")
    errors = {
        "top": CalibrationError(),
        "classwise": CalibrationError(confidence="classwise", num_classes=3, binning="equal_mass"),
    }
    for case in cases:
        batch = data([case])
        scores.update(**batch, fold=1)
        for error in errors.values():
            error.update(batch["prob"], batch["target"], valid=batch["valid"])
    return scores, errors


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, split in SPLITS.items():
        scores, errors = score_cases(split[rank])
        write_cases(scores.table(), Path(folder) / f"{name} {rank}.csv")
        results = {key: error.compute() for key, error in errors.items()}
        results["sums"] = errors["top"].bins().accuracy
        results["local"] = len(scores.encoded)
        if split[0]:
            results["means"] = scores.compute()
        torch.save(results, Path(folder) / f"{name} {rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(worker, args=(str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_write_the_same_table_as_one(folder, tmp_path, split, rank):
    scores, _ = score_cases([0, 1, 2, 3, 4])
    write_cases(scores.table(), tmp_path / "one.csv")
    assert (folder / f"{split} {rank}.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


@pytest.mark.parametrize("split", ["uneven", "one process has all"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_compute_the_same_calibration_error_as_one_to_the_last_bit(folder, split, rank):
    _, errors = score_cases([4, 2, 0, 1, 3])
    results = torch.load(folder / f"{split} {rank}.pt")
    assert torch.equal(results["top"], errors["top"].compute())
    assert torch.equal(results["classwise"], errors["classwise"].compute())
    assert torch.equal(results["sums"], errors["top"].bins().accuracy)


def test_two_processes_give_the_means_of_one_and_restore_the_local_state(folder):
    scores, _ = score_cases([0, 1, 2, 3, 4])
    expected = scores.compute()
    results = torch.load(folder / "uneven 0.pt")
    for name, mean in results["means"].items():
        torch.testing.assert_close(mean, expected[name], rtol=0, atol=1e-12)
    # this process made four updates; gathering the table does not change its local state
    assert results["local"] == 4


def test_the_table_has_rows_for_every_class_the_mean_and_scores_without_a_class():
    scores, _ = score_cases([0, 3])
    table = scores.table()
    dice_values = {(row.case, row.class_name): row.value for row in table.select(metric="dice_score").rows()}
    batch = data([0])
    by_class = dice_score(batch["prob"], batch["target"], valid=batch["valid"])
    for channel, name in enumerate(CLASSES):
        assert dice_values["case 0", name] == by_class[0, channel].item()
    assert dice_values["case 0", "mean"] == pytest.approx(foreground_mean(by_class).item())
    assert {row.class_name for row in table.select(metric="brier_error").rows()} == {"all"}
    (brier_row,) = table.select(metric="brier_error", case="case ééé3").rows()
    assert (brier_row.patient, brier_row.fold, brier_row.method) == ("patient1", 1, "DML1")


def test_every_registered_score_is_finite_for_one_to_three_channels():
    pytest.importorskip("monai.metrics")
    for channels in (1, 2, 3):
        prob = soft_label(2, max(2, channels), 8, 8)[:, -channels:]
        hard = class_map((2, 8, 8), max(2, channels))
        masks = class_map((2, 3, 8, 8), max(2, channels))
        soft = mean_label(masks, num_classes=max(2, channels), batched=True)[:, -channels:]
        scores = CaseScores(list(SCORES), class_names=CLASSES[:channels], method="x")
        scores.update(
            prob,
            hard if channels > 1 else hard.unsqueeze(1).float(),
            case=["a", "b"],
            soft_target=soft,
            masks=masks.bool() if channels < 3 else masks,
            spacing_mm=(1, 1, 3),
            truth=soft,
        )
        means = scores.compute()
        assert list(means) == list(SCORES)
        assert all(mean.isfinite() for mean in means.values())


def test_a_mapping_gives_custom_scores_and_options():
    custom_scores = {
        "dice_score": lambda b: dice_score(b.prob, b.need("target"), threshold=0.9),
        "largest_error": lambda b: (b.prob - b.target).abs().amax((1, 2)),
    }
    scores = CaseScores(custom_scores, class_names=["lesion"], method="x")
    scores.update(torch.tensor([[[0.8, 0.2]]]), torch.tensor([[[1.0, 0.0]]]), case=["a"])
    means = scores.compute()
    assert (means["dice_score"].item(), means["largest_error"].item()) == (0, pytest.approx(0.2))


def test_forward_collections_reset_and_pickle_work_as_in_torchmetrics():
    scores, errors = score_cases([0, 1])
    batch = data([2])
    before = scores.compute()["dice_score"]
    batch_mean = scores(**batch)["dice_score"]
    batch_scores, _ = score_cases([2])
    assert batch_mean == batch_scores.compute()["dice_score"]
    assert scores.compute()["dice_score"] != before
    restored = pickle.loads(pickle.dumps(scores))
    assert list(restored.table().rows()) == list(scores.table().rows())
    scores.reset()
    assert len(scores.table()) == 0
    collection = MetricCollection({"ece": CalibrationError(), "mass": CalibrationError(binning="equal_mass")})
    collection.update(batch["prob"], batch["target"], valid=batch["valid"])
    assert set(collection.compute()) == {"ece", "mass"}
    errors["top"].reset()
    assert errors["top"].bins().count.sum() == 0


def test_the_dataset_error_is_computed_over_voxels_and_is_not_the_mean_over_cases():
    error = CalibrationError(num_bins=15)
    prob, target = soft_label(4, 3, 50), soft_label(4, 3, 50, seed=5)
    for case in range(4):
        error.update(prob[case : case + 1], target[case : case + 1])
    assert error.compute() == calibration_bins(prob, target, num_bins=15, per_case=False).error()
    assert error.compute() <= calibration_bins(prob, target, num_bins=15).error().mean()


def test_the_error_names_wrong_use():
    scores = CaseScores(["binarized_dice_score"], class_names=["lesion"], method="x")
    prob = torch.rand(2, 1, 4)
    with pytest.raises(ValueError, match="needs soft_target: pass soft_target="):
        scores.update(prob, prob.round(), case=["a", "b"])
    with pytest.raises(ValueError, match="one name for each of 2 cases; got 1"):
        scores.update(prob, soft_target=prob, case=["a"])
    with pytest.raises(ValueError, match="one name for each of 3 channels"):
        scores.update(soft_label(1, 3, 4), soft_target=soft_label(1, 3, 4), case=["a"])
    with pytest.raises(ValueError, match="there is no score hd95; there are dice_score"):
        CaseScores(["hd95"], class_names=["lesion"], method="x")
    scores.update(prob, soft_target=prob, case=["a", "b"])
    scores.update(prob, soft_target=1 - prob, case=["a", "c"])
    with pytest.raises(ValueError, match="case a was scored twice with different results"):
        scores.table()
    with pytest.raises(ValueError, match="num_classes is 2, but prob has 3 channels"):
        CalibrationError(confidence="classwise", num_classes=2).update(
            soft_label(1, 3, 4), soft_label(1, 3, 4)
        )


def test_without_torchmetrics_the_error_says_what_to_install_and_the_rest_works():
    code = (
        "import sys\nfor name in ('torchmetrics', 'monai', 'pyarrow', 'rich', 'matplotlib', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import semidice.metrics\n"
        "print(len([getattr(semidice.metrics, name) for name in semidice.metrics.__all__]))\n"
        "import semidice.metrics.accumulators"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert int(completed.stdout) > 30
    assert completed.stderr.strip().splitlines()[-1] == (
        "ImportError: collecting metrics over batches needs torchmetrics: pip install 'semidice[train]'"
    )
