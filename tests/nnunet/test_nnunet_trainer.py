"""Our trainer in the real nnU-Net: `make test-nnunet`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from prepared import make_prepared
from processes import is_running, parent_of
from rich.console import Console

from semidice.data.dataset import Dataset
from semidice.data.label_making import LabelOptions
from semidice.losses import DiceLoss, SegmentationLoss
from semidice.metrics.cases import read_cases
from semidice.nnunet.command import run_collect, run_export, run_preprocess, run_train
from semidice.nnunet.folders import NnunetFolders, rater_segmentations
from semidice.nnunet.options import NnunetTeacher, trainer_options
from semidice.runs.run import open_run

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


def prepared(folder: Path, name: str, configurations, **options) -> Path:
    make_prepared(folder / "data", cases_per_patient=1, absent=True, **options)
    run_export(folder / "data", name, folder / "work", CONSOLE)
    run_preprocess(name, folder / "work", configurations, CONSOLE, num_folds=2, num_processes=1)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Six images of three raters, planned and preprocessed for 2d."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("nnUNet_def_n_proc", "1")
        return prepared(tmp_path_factory.mktemp("images"), "Dataset101_Images", ["2d"], size=(48, 40))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Six volumes of three classes, planned and preprocessed for 3d_fullres."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("nnUNet_def_n_proc", "1")
        folder = tmp_path_factory.mktemp("volumes")
        return prepared(folder, "Dataset102_Volumes", ["3d_fullres"], size=(32, 24), depth=20, num_classes=3)


def trainer_of(folder: Path, name: str, configuration: str, monkeypatch, *, on_cpu=False, **options):
    """Our trainer in this process, initialised. on_cpu: also if nnU-Net has chosen a GPU for its process."""
    from nnunetv2.run.run_training import get_trainer_from_args

    from semidice.nnunet.options import write_options

    folders = NnunetFolders.of(folder / "work")
    for variable, value in folders.environment().items():
        monkeypatch.setenv(variable, value)
    write_options(
        folders.dataset(name).preprocessed,
        "SemidiceTrainer_test",
        trainer_options(**{"label": "mean", "loss": "dml1", "epochs": 1, "iterations": 2, **options}),
        has_results=False,
    )
    trainer = get_trainer_from_args(
        name, configuration, 0, "SemidiceTrainer_test", device=torch.device("cpu")
    )
    if on_cpu:
        trainer.device = torch.device("cpu")
    trainer.initialize()
    return trainer


def copy_without_sync(mix):
    """The loss of one process with the options of a loss of several."""
    options = trainer_options("mean", "dml1").loss
    alone = options.model_copy(update={"over": mix.region.options.over}).build()
    alone.scale_weights = mix.scale_weights
    return alone


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
        options = trainer_options("mean", "sdl").loss
        assert options is not None
        over = "batch" if batch_dice else "image"
        mix = options.model_copy(update={"over": over}).build()
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
        dml1 = SegmentationLoss(
            DiceLoss(form="min", over=over, background=False, smooth=0.5e-5),
            cross_entropy_weight=1,
            region_weight=1,
        )
        both = RatersLoss(dml1, LabelOptions(), num_classes=3, ignore_label=ignore_label)
        torch.testing.assert_close(both(logits, [label, raters]), value)

    def test_weights_of_deep_supervision_are_nnunets(self, images, monkeypatch):
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        trainer = trainer_of(images, "Dataset101_Images", "2d", monkeypatch)
        own = nnUNetTrainer._build_loss(trainer)
        assert trainer.loss.mix.scale_weights == pytest.approx(tuple(own.weight_factors))


class TestBatches:
    """Targets of real batches of nnU-Net's loader, after its augmentation."""

    @pytest.mark.parametrize("name", ["images", "volumes"])
    def test_soft_labels_stay_probabilities(self, name, request, monkeypatch):
        folder = request.getfixturevalue(name)
        dataset, configuration, classes = {
            "images": ("Dataset101_Images", "2d", 2),
            "volumes": ("Dataset102_Volumes", "3d_fullres", 3),
        }[name]
        np.random.seed(0)
        trainer = trainer_of(folder, dataset, configuration, monkeypatch)
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

    def test_coarse_targets_are_means_of_probabilities(self, images, monkeypatch):
        from semidice.arrays import downsample_target

        trainer = trainer_of(images, "Dataset101_Images", "2d", monkeypatch)
        loader, _ = trainer.get_dataloaders()
        batch = next(loader)
        soft, valid = trainer.loss.label(*batch["target"])
        outputs = trainer.network(batch["data"])
        assert len(outputs) > 1
        for output in outputs[1:]:
            coarse, counted = downsample_target(soft, valid, output.shape)
            factor = [fine // small for fine, small in zip(soft.shape[2:], output.shape[2:], strict=True)]
            blocks = [(size // step, step) for size, step in zip(soft.shape[2:], factor, strict=True)]
            (rows, row), (columns, column) = blocks
            split = torch.where(valid.unsqueeze(1), soft, 0).view(len(soft), -1, rows, row, columns, column)
            num_valid = valid.view(len(soft), 1, rows, row, columns, column).sum((3, 5))
            torch.testing.assert_close(
                coarse[counted.unsqueeze(1).expand_as(coarse)],
                (split.sum((3, 5)) / num_valid.clamp(min=1))[counted.unsqueeze(1).expand_as(coarse)],
            )
        assert torch.isfinite(trainer.loss(outputs, batch["target"]))

    def test_preprocessed_raters_are_aligned_with_nnunets_label(self, volumes):
        """A rater's mask written as the label gives the same voxels as nnU-Net's own preprocessing."""
        import blosc2

        preprocessed = NnunetFolders.of(volumes / "work").dataset("Dataset102_Volumes").preprocessed
        folder = rater_segmentations(preprocessed, "nnUNetPlans_3d_fullres")
        dataset = Dataset(volumes / "data")
        for number, case in enumerate(dataset.cases):
            both = blosc2.open(str(folder / f"{case.name}_seg.b2nd"))[:]
            present = dataset.present[number]
            assert (both[1:][~present] == -1).all()
            votes = np.stack([(both[1:][present] == each).sum(0) for each in range(3)])
            # the spacing is equal in all cases, so nothing was resampled
            assert (votes.argmax(0) == both[0].clip(min=0)).all()

    def test_all_makers_train_a_step(self, images, monkeypatch):
        for maker in ("majority", "random", "mean", "dice_weighted", "staple"):
            trainer = trainer_of(images, "Dataset101_Images", "2d", monkeypatch, label=maker)
            trainer.dataloader_train, _ = trainer.get_dataloaders()
            result = trainer.train_step(next(trainer.dataloader_train))
            assert np.isfinite(result["loss"])


def train_a_step_of_two(rank: int, folder: Path, port: int) -> None:
    """One of two processes. nnU-Net's DDP needs GPUs, so its device and wrapper are exchanged for a CPU."""
    import torch.distributed as dist
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    nnUNetTrainer.DDP = lambda network, device_ids: DistributedDataParallel(network)
    with pytest.MonkeyPatch.context() as patch:
        trainer = trainer_of(folder, "Dataset101_Images", "2d", patch, on_cpu=True)
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
        trainer = trainer_of(folder, "Dataset101_Images", "2d", patch, on_cpu=True)
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


def trainings(trainer: str, fold: str) -> list[int]:
    """The processes of nnU-Net that train a fold."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            pid = int(path.parent.name)
            is_training = "-c" in words and trainer in words and words[words.index(trainer) - 2] == fold
            # a process that nnU-Net has just forked has the same words
            if is_training and os.getpgid(pid) == pid and is_running(pid):
                found.append(pid)
    return found


class TestCommands:
    def train(self, folder, name, configuration, folds, **options):
        return run_train(
            name,
            configuration,
            folds,
            folder / "work",
            CONSOLE,
            **{"epochs": 2, "iterations": 3, "device": "cpu", **options},
        )

    def collected_dice_is_nnunets(self, folder, name, configuration, trainer, out):
        run_collect(name, configuration, trainer, out, folder / "work", CONSOLE)
        run = open_run(out)
        results = (
            NnunetFolders.of(folder / "work").dataset(name).results(trainer, "nnUNetPlans", configuration)
        )
        table = read_cases(run.folder.cases).select(metric="dice_score")
        for fold in run.finished_folds:
            summary = json.loads((results / f"fold_{fold}" / "validation" / "summary.json").read_text())
            for entry in summary["metric_per_case"]:
                case = Path(entry["prediction_file"]).name.partition(".")[0]
                theirs = np.mean([each["Dice"] for each in entry["metrics"].values()])
                rows = table.select(case=case, class_name="mean")
                assert rows.columns["value"] == pytest.approx(theirs, abs=2e-3)

    def test_images_from_two_folds_to_a_run(self, images, tmp_path):
        trainer = self.train(images, "Dataset101_Images", "2d", ["0", "1"])
        assert trainer == "SemidiceTrainer_mean_dml1"
        self.collected_dice_is_nnunets(images, "Dataset101_Images", "2d", trainer, tmp_path / "mean")
        own = self.train(images, "Dataset101_Images", "2d", ["0"], loss="nnunet")
        self.collected_dice_is_nnunets(images, "Dataset101_Images", "2d", own, tmp_path / "own")
        # a student of the first training, with its probabilities calibrated by kernel density
        teacher = NnunetTeacher(trainer=trainer)
        student = self.train(images, "Dataset101_Images", "2d", ["0"], teacher=teacher)
        self.collected_dice_is_nnunets(images, "Dataset101_Images", "2d", student, tmp_path / "student")

    def test_volumes_from_a_fold_to_a_run_and_nnunets_prediction(self, volumes, tmp_path):
        name = "Dataset102_Volumes"
        trainer = self.train(volumes, name, "3d_fullres", ["0"])
        self.collected_dice_is_nnunets(volumes, name, "3d_fullres", trainer, tmp_path / "run")
        folders = NnunetFolders.of(volumes / "work")
        arguments = ["-i", str(folders.dataset(name).raw / "imagesTr"), "-o", str(tmp_path / "out")]
        arguments += ["-d", name, "-tr", trainer, "-c", "3d_fullres", "-f", "0", "-device", "cpu"]
        code = "from nnunetv2.inference.predict_from_raw_data import predict_entry_point as p; p()"
        subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **folders.environment()},
            check=True,
            capture_output=True,
        )
        assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 6

    def test_a_killed_training_continues(self, images):
        """Killed in an epoch, it starts again from the last checkpoint and ends with all epochs."""
        folders = NnunetFolders.of(images / "work")
        results = folders.dataset("Dataset101_Images").results("SemidiceTrainer_killed", "nnUNetPlans", "2d")
        command = [sys.executable, "-m", "semidice", "nnunet", "train", "Dataset101_Images", "2d", "1"]
        command += ["--work", str(images / "work"), "--name", "killed", "--device", "cpu"]
        command += ["--epochs", "12", "--iterations", "2"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 300
        while not (results / "fold_1" / "checkpoint_latest.pth").is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 1
        assert "--resume" in again.stderr
        continued = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=True)
        assert "Epoch 0" not in continued.stdout
        assert "Epoch 11" in continued.stdout
        assert (results / "fold_1" / "validation" / "summary.json").is_file()

    def test_two_folds_at_the_same_time_outlive_a_killed_worker_and_a_killed_nnunet(self, images, tmp_path):
        """Both folds continue from a checkpoint, and never does a second process write to a fold."""
        name, folders = "Dataset101_Images", NnunetFolders.of(images / "work")
        results = folders.dataset(name).results("SemidiceTrainer_at_once", "nnUNetPlans", "2d")
        command = [sys.executable, "-m", "semidice", "nnunet", "train", name, "2d", "0", "1"]
        command += ["--work", str(images / "work"), "--name", "at_once", "--device", "cpu"]
        command += ["--epochs", "8", "--iterations", "2", "--on", "local:2"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 300
        to_kill = {"0", "1"}
        while to_kill:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            for fold in sorted(to_kill):
                if (results / f"fold_{fold}" / "checkpoint_latest.pth").is_file():
                    (training,) = trainings("SemidiceTrainer_at_once", fold)
                    # a worker, and the process of nnU-Net as the system does if there is no memory
                    os.kill(parent_of(training) if fold == "0" else training, signal.SIGKILL)
                    while is_running(training):
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
                    to_kill.remove(fold)
            assert all(len(trainings("SemidiceTrainer_at_once", fold)) <= 1 for fold in "01")
            time.sleep(0.1)
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said
        assert "fold 0 with SemidiceTrainer_at_once: its worker ended (exit code -9)" in said
        assert "fold 1 with SemidiceTrainer_at_once: its worker ended (nnU-Net's run_training" in said
        for fold in "01":
            messages = (results / f"fold_{fold}.txt").read_text()
            assert messages.count("Epoch 0\n") == 1
            assert messages.count("Epoch 7\n") == 1
            checkpoint = results / f"fold_{fold}" / "checkpoint_final.pth"
            assert torch.load(checkpoint, weights_only=False)["current_epoch"] == 8
            assert not list((results / f"fold_{fold}").glob(".*"))
        self.collected_dice_is_nnunets(images, name, "2d", "SemidiceTrainer_at_once", tmp_path / "run")
        assert open_run(tmp_path / "run").finished_folds == (0, 1)

    def test_the_cascade_takes_raters_and_the_previous_stage(self, volumes, monkeypatch):
        """3d_lowres, then 3d_cascade_fullres, whose segmentations have one more channel."""
        name = "Dataset102_Volumes"
        dataset = NnunetFolders.of(volumes / "work").dataset(name)
        plans = json.loads((dataset.preprocessed / "nnUNetPlans.json").read_text())
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
        (dataset.preprocessed / "nnUNetPlans.json").write_text(json.dumps(plans))
        run_preprocess(name, volumes / "work", ["3d_lowres"], CONSOLE, num_processes=1)
        for fold in ("0", "1"):
            trainer = self.train(volumes, name, "3d_lowres", [fold], epochs=1, iterations=1)
        self.train(volumes, name, "3d_cascade_fullres", ["0"], epochs=1, iterations=1)
        results = dataset.results(trainer, "nnUNetPlans", "3d_cascade_fullres")
        assert (results / "fold_0" / "validation" / "summary.json").is_file()
