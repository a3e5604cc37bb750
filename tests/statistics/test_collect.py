"""Rows of scores collected over batches and processes: two processes give the same bits as one."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from case_rows import rows_of, select
from laws import class_map, soft_label
from start import refused

from semidice.labels.makers import mean_label
from semidice.metrics import SCORES, ScoredBatch, ScoreKey, dice_score, foreground_mean
from semidice.statistics import CaseScores, write_cases

CLASSES = ("background", "organ", "lesion")
# the cases that each of two processes sees; "padded" repeats a case, as DistributedSampler does
SPLITS = {
    "uneven": ([0, 1, 2, 3], [4]),
    "one process has all": ([], [0, 1, 2, 3, 4]),
    "padded": ([0, 1, 2], [3, 4, 0]),
}


def batch_of(cases, **changes):
    """Some of five cases with all references."""
    masks = class_map((5, 4, 9, 10), 3)
    arrays = {
        "prob": soft_label(5, 3, 9, 10),
        "target": class_map((5, 9, 10), 3),
        "soft_target": mean_label(masks, num_classes=3, batched=True),
        "masks": masks,
        "valid": torch.rand(5, 9, 10, generator=torch.Generator().manual_seed(3)) < 0.9,
        "truth": soft_label(5, 3, 9, 10, seed=1),
    }
    chosen = {name: array[cases] for name, array in arrays.items()}
    return ScoredBatch(**chosen, spacing_mm=(1, 1, 2), **changes)


def score_cases(cases, **changes):
    """Names of cases have different lengths."""
    scores = CaseScores(list(SCORES), class_names=CLASSES, method="DML1")
    for case in cases:
        names = [f"case {'é' * case}{case}"], [f"patient{case // 2}"]
        scores.update(batch_of([case], **changes), names[0], patient=names[1], fold=1)
    return scores


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, split in SPLITS.items():
        scores = score_cases(split[rank])
        write_cases(scores.table(), Path(folder) / f"{name} {rank}.csv")
        torch.save(scores.means(), Path(folder) / f"{name} {rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    with pytest.MonkeyPatch.context() as patch:
        # test machines may have odd networks
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(worker, args=(str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_write_the_same_table_and_means_as_one(folder, tmp_path, split, rank):
    scores = score_cases([0, 1, 2, 3, 4])
    write_cases(scores.table(), tmp_path / "one.csv")
    assert (folder / f"{split} {rank}.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    assert torch.load(folder / f"{split} {rank}.pt") == scores.means()


def test_the_table_has_rows_for_every_class_the_mean_and_scores_without_a_class():
    table, batch = score_cases([0, 3]).table(), batch_of([0])
    dice = {(row.case, row.class_name): row.value for row in rows_of(select(table, metric="dice_score"))}
    by_class = dice_score(batch.prob, batch.target, valid=batch.valid)
    for channel, name in enumerate(CLASSES):
        assert dice["case 0", name] == by_class[0, channel].item()
    assert dice["case 0", "mean"] == pytest.approx(foreground_mean(by_class).item())
    (brier,) = rows_of(select(table, metric="brier_error", case="case ééé3"))
    assert (brier.patient, brier.fold, brier.method, brier.class_name) == ("patient1", 1, "DML1", "all")


def test_a_class_that_nobody_ever_drew_is_in_no_mean_over_classes():
    plain, without = (score_cases([0, 1], drawn=drawn).table() for drawn in (None, (True, False, True)))
    for metric in ("dice_score", "soft_dice_score", "hausdorff_error"):
        mean = select(without, metric=metric, class_name="mean")["value"].tolist()
        assert mean == select(plain, metric=metric, class_name="lesion")["value"].tolist()
        of_class = (
            select(each, metric=metric, class_name="organ")["value"].tolist() for each in (plain, without)
        )
        assert next(of_class) == next(of_class)
    # the scores that take their own mean over classes
    for metric in ("rater_dice_score", "generalised_energy_distance"):
        values = (select(each, metric=metric)["value"].tolist() for each in (plain, without))
        assert next(values) != next(values)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_every_score_is_finite_for_one_to_three_channels(channels):
    width, first = max(2, channels), slice(1, None) if channels == 1 else slice(None)
    masks, hard = class_map((2, 3, 8, 8), width), class_map((2, 8, 8), width)
    soft = mean_label(masks, num_classes=width, batched=True)[:, first]
    scores = CaseScores(list(SCORES), class_names=CLASSES[:channels], method="x")
    batch = ScoredBatch(
        soft_label(2, width, 8, 8)[:, first],
        hard if channels > 1 else hard.unsqueeze(1).float(),
        soft,
        masks.bool() if channels < 3 else masks,
        spacing_mm=(1, 1, 3),
        truth=soft,
    )
    scores.update(batch, ["a", "b"])
    means = scores.means()
    assert list(means) == list(SCORES)
    assert np.isfinite(list(means.values())).all()


def test_a_mapping_gives_custom_scores_and_options():
    custom = {
        ScoreKey("dice_score"): lambda b: dice_score(b.prob > 0.9, b.need("target")),
        ScoreKey("largest_error", ""): lambda b: (b.prob - b.target).abs().amax((1, 2)),
    }
    scores = CaseScores(custom, class_names=["lesion"], method="x")
    scores.update(ScoredBatch(torch.tensor([[[0.8, 0.2]]]), torch.tensor([[[1.0, 0.0]]])), ["a"])
    assert scores.means() == {"dice_score": 0, "largest_error": pytest.approx(0.2)}
    scores.reset()
    assert len(scores.table()) == 0


def test_a_case_has_one_name_and_one_score():
    scores = CaseScores(["binarized_dice_score"], class_names=["lesion"], method="x")
    prob = torch.rand(2, 1, 4)
    batch = ScoredBatch(prob, soft_target=prob)
    refused(lambda: scores.update(batch, ["a"]), "each of 2 cases", "got 1")
    scores.update(batch, ["a", "b"])
    scores.update(ScoredBatch(prob, soft_target=1 - prob), ["a", "c"])
    refused(scores.table, "case a was scored twice")
    refused(lambda: CaseScores(["dise_score"], class_names=["lesion"], method="x"), "dise_score")


def test_scores_need_no_pandas_and_torchmetrics(start):
    code = (
        "import sys\nfor name in ('torchmetrics', 'monai', 'pandas', 'pyarrow', 'matplotlib', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import semidice.metrics\n"
        "print(len([getattr(semidice.metrics, name) for name in semidice.metrics.__all__]))"
    )
    assert int(start("-c", code).end().out) > 20
