"""Two processes with half of the batch each give the loss, the gradient and the weights of one process."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from case_rows import select
from laws import class_map, random_logits, soft_label
from prepared import make_prepared
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trained import volume_dice, weights

from semidice import DiceLoss, SegmentationLoss, TverskyLoss
from semidice.paths import RunFolder
from semidice.statistics import read_cases

LOSSES = {
    "DML1": lambda sync: DiceLoss(sync=sync),
    "mixture": lambda sync: SegmentationLoss(sync=sync),
    "present classes": lambda sync: DiceLoss(sync=sync, classes="present", form="product"),
    "focal": lambda sync: TverskyLoss(sync=sync, alpha=0.7, beta=0.3, gamma=2.0),
    "ignored voxels, weighted": lambda sync: SegmentationLoss(
        sync=sync, ignore_index=255, class_weight=[1.0, 2.0, 0.5]
    ),
    "deep supervision": lambda sync: SegmentationLoss(sync=sync),
    "hard bins": lambda sync: SegmentationLoss(sync=sync, calibration_weight=1.0),
    "soft bins": lambda sync: SegmentationLoss(
        sync=sync, classes="present", calibration_weight=1.0, calibration_binning="soft"
    ),
}


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1))


def batch(name):
    """Image and target of four cases whose classes and ignored voxels are spread unevenly."""
    image = random_logits(4, 2, 8, 8)
    if name != "ignored voxels, weighted":
        return image, soft_label(4, 3, 8, 8) if name != "present classes" else uneven_classes()
    target = class_map((4, 8, 8), 3)
    target[0, :6] = 255
    return image, target


def uneven_classes():
    target = class_map((4, 8, 8), 2)
    target[3, :2] = 2
    return target


def outputs_of(model, image, name):
    logits = model(image)
    return [logits, nn.functional.avg_pool2d(logits, 2)] if name == "deep supervision" else logits


def loss_and_gradients(model, image, target, name, *, sync):
    loss = LOSSES[name](sync)(outputs_of(model, image, name), target)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {}
    for name in LOSSES:
        image, target = batch(name)
        half = slice(2 * rank, 2 * rank + 2)
        model = DistributedDataParallel(network())
        results[name] = loss_and_gradients(model, image[half], target[half], name, sync=True)
        unsynced = DistributedDataParallel(network())
        results[name, "unsynced"] = loss_and_gradients(unsynced, image[half], target[half], name, sync=False)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    with pytest.MonkeyPatch.context() as patch:
        # a test machine may have odd networks
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(worker, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_have_the_loss_and_gradient_of_one(results, name):
    expected_loss, expected_gradients = loss_and_gradients(network(), *batch(name), name, sync=False)
    for rank in range(2):
        loss, gradients = results[rank][name]
        torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-6)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_two_processes_without_sync_differ_from_one(results):
    name = "present classes"
    expected_loss, _ = loss_and_gradients(network(), *batch(name), name, sync=False)
    losses = torch.stack([results[rank][name, "unsynced"][0] for rank in range(2)])
    assert abs(losses.mean() - expected_loss) > 1e-3


def test_sync_has_no_effect_without_a_process_group():
    logits, target = random_logits(2, 3, 8), class_map((2, 8), 3)
    torch.testing.assert_close(
        DiceLoss(sync=True)(logits, target), DiceLoss()(logits, target), rtol=0, atol=0
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=12)
    return path


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    """Six volumes of three slices, one per patient."""
    path = tmp_path_factory.mktemp("data") / "sliced"
    return make_prepared(path, num_cases=18, slices_per_scan=3, cases_per_patient=1, truth=False)


@pytest.fixture
def with_one_and_two(tmp_path, start):
    """Train with these options in one process, and in two; both run folders."""

    def train(dataset, *options, launcher=("-m", "semidice"), devices=("--devices", 2)):
        sets = [
            f"data.dataset={dataset}",
            "data.num_folds=2",
            "data.folds=[0]",
            "batch_size=4",
            "log_every=1",
        ]
        # torch synchronises batch norms on GPUs only
        sets += ["model.options.channels=[8,16]", "model.options.norm=group", *options]
        command = ["train", "quick", "--accelerator", "cpu", *(p for s in sets for p in ("--set", s)), "-o"]
        for process in (
            start("-m", "semidice", *command, tmp_path / "one"),
            start(*launcher, *command, tmp_path / "two", *devices),
        ):
            ended = process.end()
            assert ended.code == 0, ended.err
        return RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")

    return train


def assert_same_losses(folders):
    logs = [[json.loads(line) for line in folder.fold(0).log.read_text().splitlines()] for folder in folders]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]
    losses = [torch.tensor([line["loss"] for line in log if "loss" in line]) for log in logs]
    assert len(losses[0]) >= 4
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)


def test_two_processes_train_to_the_loss_curve_of_one_and_score_volumes(sliced, with_one_and_two):
    folders = with_one_and_two(
        sliced.folder.path, "schedule.epochs=4", "validation.every=2", "augment.noise=0.1"
    )
    assert_same_losses(folders)
    for folder in folders:
        rows = read_cases(folder.cases).pipe(select, metric="dice_score", class_name="class1")
        assert dict(zip(rows["case"], rows["value"], strict=True)) == pytest.approx(
            volume_dice(folder, sliced, 0), abs=1e-6
        )


@pytest.mark.slow
# every voxel is valid, so that both processes have equal shares of the cross entropy
@pytest.mark.parametrize(
    "options",
    [("loss.over=image", "augment.scale=[1,1]"), ("optimiser.accumulate=2", "optimiser.clip_norm=1")],
)
def test_two_processes_train_to_the_weights_of_one(dataset, with_one_and_two, options):
    folders = with_one_and_two(dataset, "schedule.epochs=4", *options)
    if "loss.over=image" not in options:
        # with one index per image, the log holds the loss of the images of one process
        assert_same_losses(folders)
    expected, actual = map(weights, folders)
    for name, tensor in expected.items():
        # sums of other orders, over some steps
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_processes_that_torchrun_started_have_the_loss_curve_of_one(dataset, with_one_and_two):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "semidice")
    assert_same_losses(with_one_and_two(dataset, "schedule.epochs=4", launcher=torchrun, devices=()))
