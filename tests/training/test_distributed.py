"""Two gloo processes with half of the batch each give the same result as one process with the whole batch."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from laws import class_map, random_logits, soft_label
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from semidice import DiceLoss, SegmentationLoss, TverskyLoss

LOSSES = {
    "DML1": lambda sync: DiceLoss(sync=sync),
    "mixture": lambda sync: SegmentationLoss(DiceLoss(sync=sync)),
    "present classes": lambda sync: DiceLoss(sync=sync, classes="present", form="product"),
    "focal": lambda sync: TverskyLoss(sync=sync, alpha=0.7, beta=0.3, gamma=2.0),
    "ignored voxels, weighted": lambda sync: SegmentationLoss(
        DiceLoss(sync=sync, ignore_index=255, class_weight=[1.0, 2.0, 0.5])
    ),
    "deep supervision": lambda sync: SegmentationLoss(DiceLoss(sync=sync)),
    "hard bins": lambda sync: SegmentationLoss(DiceLoss(sync=sync), calibration_weight=1.0),
    "soft bins": lambda sync: SegmentationLoss(
        DiceLoss(sync=sync, classes="present"), calibration_weight=1.0, calibration_binning="soft"
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
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
