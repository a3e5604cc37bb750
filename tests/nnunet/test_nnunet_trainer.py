"""Our trainer in the real nnU-Net: `make test-nnunet`."""

import json
import os
import shutil
import signal
import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from case_rows import select
from prepared import make_prepared
from processes import is_running, parent_of
from rich.console import Console
from start import refused, wait_until

from semidice.data.batches.label_making import LabelOptions
from semidice.data.dataset import Dataset
from semidice.losses import SegmentationLoss
from semidice.nnunet.collect import collect
from semidice.nnunet.export import export
from semidice.nnunet.folders import NnunetDataset, NnunetTraining, read_export, write_training
from semidice.nnunet.options import TrainerOptions
from semidice.nnunet.train import preprocess, train
from semidice.runs.run import open_run
from semidice.statistics.cases import read_cases

pytestmark = [
    pytest.mark.nnunet,
    # of nnU-Net and its packages
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("nnunetv2", reason="needs nnU-Net: make test-nnunet")

CONSOLE = Console(quiet=True)


@pytest.fixture(autouse=True)
def _few_processes(monkeypatch):
    monkeypatch.setenv("nnUNet_n_proc_DA", "0")
    monkeypatch.setenv("nnUNet_def_n_proc", "1")
    # nnU-Net uses operations that have no deterministic version
    torch.use_deterministic_algorithms(False)


def prepared(folder: Path, name: str, configuration: str, **options) -> NnunetDataset:
    make_prepared(folder / "data", cases_per_patient=1, absent=True, **options)
    dataset = NnunetDataset.find(name, folder / "work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("nnUNet_def_n_proc", "1")
        export(folder / "data", dataset, CONSOLE)
        preprocess(dataset, [configuration], CONSOLE, num_folds=2, num_processes=1)
    return dataset


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Six images of three raters, planned and preprocessed for 2d."""
    return prepared(tmp_path_factory.mktemp("some images"), "Dataset101_Images", "2d", size=(48, 40))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Six volumes of three classes, planned and preprocessed for 3d_fullres."""
    shape = {"size": (32, 24), "depth": 20, "num_classes": 3}
    return prepared(tmp_path_factory.mktemp("volumes"), "Dataset102_Volumes", "3d_fullres", **shape)


def trainer_of(dataset: NnunetDataset, configuration: str, monkeypatch, *, on_cpu=False, **options):
    """Our trainer in this process, initialised. on_cpu: also if nnU-Net has chosen a GPU for its process."""
    from nnunetv2.run.run_training import get_trainer_from_args

    for variable, value in dataset.environment().items():
        monkeypatch.setenv(variable, value)
    chosen = TrainerOptions(name="test", epochs=1, iterations=2, **options)
    training = NnunetTraining(dataset, configuration, chosen.trainer)
    together = torch.distributed.is_initialized()
    if not together or torch.distributed.get_rank() == 0:
        shutil.rmtree(training.results, ignore_errors=True)
        write_training(training, chosen)
    if together:
        torch.distributed.barrier()
    cpu = torch.device("cpu")
    trainer = get_trainer_from_args(dataset.name, configuration, 0, chosen.trainer, device=cpu)
    if on_cpu:
        trainer.device = torch.device("cpu")
    trainer.initialize()
    return trainer


def copy_without_sync(mix):
    """The loss of one process with the options of a loss of several."""
    options = TrainerOptions().loss_options(mix.options.over)
    return SegmentationLoss(**asdict(options), scale_weights=mix.scale_weights)


class TestLoss:
    """With one rater and hard labels, value and gradient are those of nnU-Net's own loss."""

    @pytest.mark.parametrize("batch_dice", [True, False])
    @pytest.mark.parametrize("ignore_label", [None, 3])
    def test_one_hard_rater_gives_nnunets_own_loss(self, batch_dice, ignore_label):
        from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
        from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

        from semidice.nnunet.trainer import RatersLoss

        theirs = DC_and_CE_loss(
            {"batch_dice": batch_dice, "smooth": 1e-5, "do_bg": False, "ddp": False},
            {},
            weight_ce=1,
            weight_dice=1,
            ignore_label=ignore_label,
            dice_class=MemoryEfficientSoftDiceLoss,
        )
        over = "batch" if batch_dice else "image"
        mix = SegmentationLoss(**asdict(TrainerOptions(loss="sdl").loss_options(over)))
        ours = RatersLoss(mix, LabelOptions(), num_classes=3, ignore_label=ignore_label)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, 3, 16, 12, generator=generator).requires_grad_()
        label = torch.randint(0, 3, (2, 1, 16, 12), generator=generator, dtype=torch.int16)
        raters = label.clone()
        if ignore_label is not None:
            label[:, :, :4] = ignore_label
        expected = theirs(logits, label)
        (expected_grad,) = torch.autograd.grad(expected, logits)
        # nnU-Net's Dice loss is -Dice, ours 1 - Dice
        value = ours(logits, [label, raters])
        (grad,) = torch.autograd.grad(value, logits)
        torch.testing.assert_close(value - 1, expected)
        torch.testing.assert_close(grad, expected_grad)
        dml1 = SegmentationLoss(**asdict(TrainerOptions(loss="dml1").loss_options(over)))
        both = RatersLoss(dml1, LabelOptions(), num_classes=3, ignore_label=ignore_label)
        torch.testing.assert_close(both(logits, [label, raters]), value)

    def test_weights_of_deep_supervision_are_nnunets(self, images, monkeypatch):
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        trainer = trainer_of(images, "2d", monkeypatch)
        own = nnUNetTrainer._build_loss(trainer)
        assert trainer.loss.mix.scale_weights == pytest.approx(tuple(own.weight_factors))


class TestBatches:
    """Targets of real batches of nnU-Net's loader, after its augmentation."""

    @pytest.mark.parametrize(
        ("name", "configuration", "classes"), [("images", "2d", 2), ("volumes", "3d_fullres", 3)]
    )
    def test_soft_labels_stay_probabilities(self, name, configuration, classes, request, monkeypatch):
        np.random.seed(0)
        trainer = trainer_of(request.getfixturevalue(name), configuration, monkeypatch)
        loader, _ = trainer.get_dataloaders()
        seen_soft = seen_outside = 0
        for _ in range(8):
            batch = next(loader)
            label, raters = batch["target"]
            assert label.shape[1] == 1
            assert raters.shape[1] == 3
            assert raters.shape[2:] == batch["data"].shape[2:]
            # every rater's mask stays hard, and what nobody saw stays -1
            assert set(raters.unique().tolist()) <= set(range(-1, classes))
            assert int(label.min()) >= 0
            soft, valid = trainer.loss.label(label, raters)
            torch.testing.assert_close(soft.sum(1), torch.ones_like(soft[:, 0]))
            assert bool((valid == (raters >= 0).any(1)).all())
            # thirds and halves: three raters, of whom one may be absent
            shares = {round(value, 4) for value in soft.movedim(1, -1)[valid].unique().tolist()}
            assert shares <= {0.0, 0.3333, 0.5, 0.6667, 1.0}
            seen_soft += bool(shares - {0.0, 1.0})
            seen_outside += bool((~valid).any())
        assert seen_soft
        assert seen_outside

    def test_preprocessed_raters_are_aligned_with_nnunets_label(self, volumes):
        """A rater's mask written as the label gives the same voxels as nnU-Net's own preprocessing."""
        import blosc2

        from semidice.nnunet.raters import rater_segmentations

        folder = rater_segmentations(volumes.preprocessed, "nnUNetPlans_3d_fullres")
        dataset = Dataset(Path(read_export(volumes.raw).dataset))
        for number, case in enumerate(dataset.cases):
            both = blosc2.open(str(folder / f"{case.name}_seg.b2nd"))[:]
            present = dataset.present[number]
            assert (both[1:][~present] == -1).all()
            votes = np.stack([(both[1:][present] == each).sum(0) for each in range(3)])
            # the spacing is equal in all cases, so nothing was resampled
            assert (votes.argmax(0) == both[0].clip(min=0)).all()

    def test_all_makers_train_a_step(self, images, monkeypatch):
        for maker in ("majority", "random", "mean", "dice_weighted", "staple"):
            trainer = trainer_of(images, "2d", monkeypatch, label=maker)
            trainer.dataloader_train, _ = trainer.get_dataloaders()
            result = trainer.train_step(next(trainer.dataloader_train))
            assert np.isfinite(result["loss"])


def train_a_step_of_two(rank: int, images: NnunetDataset, port: int) -> None:
    """One of two processes. nnU-Net's DDP needs GPUs, so its device and wrapper are exchanged for a CPU."""
    import torch.distributed as dist
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    nnUNetTrainer.DDP = lambda network, device_ids: DistributedDataParallel(network)
    with pytest.MonkeyPatch.context() as patch:
        trainer = trainer_of(images, "2d", patch, on_cpu=True)
        assert trainer.is_ddp
        loader, _ = trainer.get_dataloaders()
        batch = next(loader)
        with torch.no_grad():
            outputs = trainer.network(batch["data"])
            synced = trainer.loss(outputs, batch["target"])
        shares = [None, None]
        dist.all_gather_object(shares, (outputs, batch["target"], float(synced)))
        assert shares[0][2] == pytest.approx(shares[1][2], rel=1e-6)
        # the loss of the whole batch in one process
        all_outputs = [torch.cat(level) for level in zip(shares[0][0], shares[1][0], strict=True)]
        all_targets = [torch.cat(part) for part in zip(shares[0][1], shares[1][1], strict=True)]
        trainer.loss.mix = copy_without_sync(trainer.loss.mix)
        assert synced == pytest.approx(float(trainer.loss(all_outputs, all_targets)), rel=1e-5)
        # which the half of this process alone does not have
        assert synced != pytest.approx(float(trainer.loss(outputs, batch["target"])), rel=1e-5)
        trainer = trainer_of(images, "2d", patch, on_cpu=True)
        trainer.train_step(batch)
        weights = torch.cat([each.detach().flatten() for each in trainer.network.parameters()])
        both = [torch.empty_like(weights), torch.empty_like(weights)]
        dist.all_gather(both, weights)
        assert torch.equal(*both)
    dist.destroy_process_group()


class TestSeveralProcesses:
    def test_two_processes_have_the_loss_of_the_whole_batch_and_equal_weights(self, images):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(train_a_step_of_two, (images, port), nprocs=2)


def processes_below(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


class TestCommands:
    def train(self, dataset, configuration, folds, **options) -> NnunetTraining:
        chosen = TrainerOptions(**{"epochs": 2, "iterations": 3, **options})
        training = NnunetTraining(dataset, configuration, chosen.trainer)
        train(training, folds, chosen, CONSOLE, device="cpu")
        return training

    def collected_dice_is_nnunets(self, training, out):
        collect(training, out, CONSOLE)
        run = open_run(out)
        table = read_cases(run.folder.cases).pipe(select, metric="dice_score")
        for fold in run.finished_folds:
            summary = json.loads((training.validation(fold) / "summary.json").read_text())
            for entry in summary["metric_per_case"]:
                case = Path(entry["prediction_file"]).name.partition(".")[0]
                theirs = np.mean([each["Dice"] for each in entry["metrics"].values()])
                rows = table.pipe(select, case=case, class_name="mean")
                assert rows["value"].item() == pytest.approx(theirs, abs=2e-3)

    def test_images_from_two_folds_to_a_run(self, images, tmp_path):
        mean = self.train(images, "2d", ["0", "1"])
        self.collected_dice_is_nnunets(mean, tmp_path / "mean")
        self.collected_dice_is_nnunets(self.train(images, "2d", ["0"], loss="nnunet"), tmp_path / "own")
        # a student of the first training, with its probabilities calibrated by kernel density
        student = self.train(images, "2d", ["0"], teacher=mean.trainer)
        self.collected_dice_is_nnunets(student, tmp_path / "student")

    def test_volumes_from_a_fold_to_a_run_and_nnunets_prediction(self, volumes, tmp_path, start):
        training = self.train(volumes, "3d_fullres", ["0"])
        self.collected_dice_is_nnunets(training, tmp_path / "run")
        arguments = ["-i", volumes.raw / "imagesTr", "-o", tmp_path / "out", "-d", volumes.name]
        arguments += ["-tr", training.trainer, "-c", "3d_fullres", "-f", "0", "-device", "cpu"]
        code = "from nnunetv2.inference.predict_from_raw_data import predict_entry_point as p; p()"
        ended = start("-c", code, *arguments, env=volumes.environment()).end()
        assert ended.code == 0, ended.err
        assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 6

    def test_a_killed_training_leaves_no_process_and_continues(self, images, start):
        """Killed in an epoch, it starts again from the last checkpoint and ends with all epochs."""
        fold = NnunetTraining(images, "2d", "SemidiceTrainer_killed").validation(1).parent
        command = ["-m", "semidice", "nnunet", "train", images.name, "2d", "1", "--work", images.work]
        command += ["--name", "killed", "--device", "cpu", "--epochs", "12", "--iterations", "2"]
        # two processes of nnU-Net augment, as on a real machine
        process = start(*command, env={"nnUNet_n_proc_DA": "2"})
        process.wait_until((fold / "checkpoint_latest.pth").is_file)
        below = processes_below(process.process.pid)
        # nnU-Net, and those that it has started
        assert len(below) >= 3
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, below)))
        refused(start(*command).end(), "--resume")
        continued = start(*command, "--resume").end()
        assert continued.code == 0, continued.err
        assert "Epoch 0" not in continued.out
        assert "Epoch 11" in continued.out
        assert (fold / "validation" / "summary.json").is_file()
        assert not list(fold.glob(".*"))

    def test_the_cascade_takes_raters_and_the_previous_stage(self, volumes):
        """3d_lowres, then 3d_cascade_fullres, whose segmentations have one more channel."""
        path = volumes.preprocessed / "nnUNetPlans.json"
        plans = json.loads(path.read_text())
        fullres = plans["configurations"]["3d_fullres"]
        plans["configurations"]["3d_lowres"] = {
            **fullres,
            "data_identifier": "nnUNetPlans_3d_lowres",
            "spacing": [1.25 * side for side in fullres["spacing"]],
            "next_stage": "3d_cascade_fullres",
        }
        plans["configurations"]["3d_cascade_fullres"] = {
            "inherits_from": "3d_fullres",
            "previous_stage": "3d_lowres",
        }
        path.write_text(json.dumps(plans))
        preprocess(volumes, ["3d_lowres"], CONSOLE, num_processes=1)
        self.train(volumes, "3d_lowres", ["0", "1"], epochs=1, iterations=1)
        assert self.train(volumes, "3d_cascade_fullres", ["0"], epochs=1, iterations=1).is_validated("0")

    def test_another_export_or_other_raters_are_not_taken_for_those_that_were_preprocessed(self, images):
        header = images.raw / "dataset.json"
        before = header.read_text()
        header.write_text(before.replace(read_export(images.raw).manifest_sha256, "0"))
        refused(lambda: preprocess(images, ["2d"], CONSOLE), "exported again")
        header.write_text(before)
        (images.raters / "new").mkdir()
        refused(lambda: preprocess(images, ["2d"], CONSOLE), "other raters")
        (images.raters / "new").rmdir()


class _CreatesAFile:
    """What a stranger may put into a pickle: it is called when the file is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_of_a_teacher_runs_no_code(tmp_path):
    from semidice.nnunet.trainer import read_weights

    path, read = tmp_path / "final.pth", partial(read_weights, tmp_path / "final.pth", torch.device("cpu"))
    weights = {"conv.weight": torch.randn(2, 3)}
    logged = {"mean_fg_dice": [np.float64(0.5)], "lr": np.float32(0.1), "epoch": np.int64(3)}
    torch.save({"network_weights": weights, "logging": logged}, path)
    torch.testing.assert_close(read(), weights)
    torch.save({"network_weights": {}, "logging": _CreatesAFile(tmp_path / "created")}, path)
    refused(read, "final.pth", "train the teacher again")
    assert not (tmp_path / "created").exists()
