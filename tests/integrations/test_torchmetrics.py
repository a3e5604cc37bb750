"""Our accumulators in a MetricCollection of torchmetrics: groups, names, and two processes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from laws import class_map, soft_label
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryJaccardIndex

from semidice.labels import mean_label
from semidice.metrics import calibration_bins, dice_score, foreground_mean, soft_dice_score
from semidice.metrics.accumulators import CalibrationError, CaseScores

CLASSES = ("background", "organ", "lesion")
NUM_CASES = 5


def collection(**options):
    return MetricCollection(
        {
            "hard": CaseScores(["dice_score"], class_names=CLASSES, method="a"),
            "soft": CaseScores(["soft_dice_score"], class_names=CLASSES, method="a"),
            "top": CalibrationError(),
            "top_again": CalibrationError(),
            "coarse": CalibrationError(num_bins=3),
            "mass": CalibrationError(binning="equal_mass"),
            "classwise": CalibrationError(confidence="classwise", num_classes=3),
        },
        **options,
    )


def batch(cases):
    masks = class_map((NUM_CASES, 4, 9, 8), 3)
    arrays = {
        "prob": soft_label(NUM_CASES, 3, 9, 8),
        "target": masks[:, 0],
        "soft_target": mean_label(masks, num_classes=3, batched=True),
    }
    return {name: array[cases] for name, array in arrays.items()} | {"case": [f"case{k}" for k in cases]}


def updated(cases, **options):
    metrics = collection(**options)
    for case in cases:
        metrics.update(**batch([case]))
    return metrics


def expected():
    """Every value of the collection, from the functions and all cases at once."""
    every = batch(list(range(NUM_CASES)))
    prob, target = every["prob"], every["target"]

    def error(**options):
        return calibration_bins(prob, target, per_case=False, **options).error()

    return {
        "dice_score": foreground_mean(dice_score(prob, target)).double().mean(),
        "soft_dice_score": foreground_mean(soft_dice_score(prob, every["soft_target"])).double().mean(),
        "top": error(),
        "top_again": error(),
        "coarse": error(num_bins=3),
        "mass": error(binning="equal_mass"),
        "classwise": error(confidence="classwise"),
    }


@pytest.mark.parametrize("compute_groups", [True, False, [["top", "top_again"], ["coarse"], ["mass"]]])
def test_a_collection_computes_what_the_functions_compute_with_and_without_groups(compute_groups):
    if isinstance(compute_groups, list):
        compute_groups = [*compute_groups, ["hard"], ["soft"], ["classwise"]]
    results = updated(range(NUM_CASES), compute_groups=compute_groups).compute()
    torch.testing.assert_close(results, expected(), check_dtype=False)


def test_metrics_share_a_state_only_if_their_options_are_equal():
    # the first batch of one voxel gives several metrics equal sums, and later batches must not be lost
    metrics = collection()
    prob = torch.tensor([[[0.1], [0.2], [0.7]]])
    metrics.update(prob=prob, target=torch.tensor([[2]]), soft_target=prob, case=["first"])
    for case in range(NUM_CASES):
        metrics.update(**batch([case]))
    alone = {name: metric.clone() for name, metric in collection(compute_groups=False).items()}
    for metric in alone.values():
        names = metric._filter_kwargs(prob=0, target=0, soft_target=0, case=0)
        first = {"prob": prob, "target": torch.tensor([[2]]), "soft_target": prob, "case": ["first"]}
        for values in (first, *(batch([case]) for case in range(NUM_CASES))):
            metric.update(**{name: values[name] for name in names})
    results = metrics.compute()
    for name, metric in alone.items():
        value = metric.compute()
        for key, one in value.items() if isinstance(value, dict) else [(name, value)]:
            torch.testing.assert_close(results[key], one, rtol=0, atol=0)
    assert len(metrics["hard"].table()) == len(metrics["soft"].table()) == 4 * (NUM_CASES + 1)
    assert metrics["hard"].table().metrics == ("dice_score",)
    assert metrics["soft"].table().metrics == ("soft_dice_score",)


def test_your_own_scores_of_the_same_name_do_not_share_a_state():
    def at(threshold):
        return {"dice_score": lambda scored: dice_score(scored.prob, scored.target, threshold=threshold)}

    metrics = MetricCollection(
        {
            name: CaseScores(at(threshold), class_names=["lesion"], method="a")
            for name, threshold in {"low": 0.5, "high": 0.9}.items()
        }
    )
    target = torch.tensor([[[1.0, 0.0]]])
    # both thresholds agree on the first case and not on the second
    metrics.update(prob=torch.tensor([[[0.95, 0.2]]]), target=target, case=["first"])
    metrics.update(prob=torch.tensor([[[0.8, 0.2]]]), target=target, case=["second"])
    results = {name: metric.compute()["dice_score"].item() for name, metric in metrics.items()}
    assert results == {"low": 1.0, "high": 0.5}


def test_a_metric_of_torchmetrics_may_be_in_the_same_collection():
    mixed = MetricCollection({"ours": CalibrationError(), "theirs": BinaryJaccardIndex()})
    prob, target = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8).round()
    mixed.update(prob, target.long())
    assert set(mixed.compute()) == {"ours", "theirs"}
    mixed.reset()
    mixed.update(prob, target.long())
    both = ((prob > 0.5) & (target > 0)).sum() / ((prob > 0.5) | (target > 0)).sum()
    torch.testing.assert_close(mixed.compute()["theirs"], both)


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    metrics = updated(([0, 1, 2], [3, 4])[rank])
    rows = list(metrics["hard"].table().rows())
    torch.save((metrics.compute(), [tuple(row) for row in rows]), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_collection_of_one(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    one = updated(range(NUM_CASES))
    for rank in (0, 1):
        results, rows = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(results, one.compute(), rtol=0, atol=0)
        assert rows == [tuple(row) for row in one["hard"].table().rows()]
