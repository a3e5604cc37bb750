"""Names, options, export and collection: everything that needs files of nnU-Net but not nnU-Net itself."""

import json
import os
import subprocess
import sys
import time

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from prepared import make_prepared
from processes import is_running

from semidice.data.label_making import LabelOptions
from semidice.metrics.cases import read_cases
from semidice.nnunet import command
from semidice.nnunet.collect import collect_run, read_splits
from semidice.nnunet.export import export_dataset
from semidice.nnunet.folders import NnunetFolders
from semidice.nnunet.options import (
    NnunetTeacher,
    TrainerOptions,
    read_options,
    short_options,
    trainer_name,
    trainer_options,
    write_options,
)
from semidice.nnunet.weights import read_nnunet_weights
from semidice.runs.run import open_run
from semidice.training.jobs import Worker, WorkerOptions

NAME = "Dataset101_Phantom"


@pytest.fixture
def target(tmp_path):
    return NnunetFolders.of(tmp_path / "work").dataset(NAME)


class TestNames:
    def test_a_name_without_three_digits_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"Dataset101_Nodules.*got 'Nodules'"):
            NnunetFolders.of(tmp_path).dataset("Nodules")

    def test_without_work_and_environment_the_error_names_the_variables(self, monkeypatch):
        for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(ValueError, match=r"nnUNet_raw.*--work"):
            NnunetFolders.of(None)

    def test_the_environment_keeps_trainers_of_the_user(self, tmp_path, monkeypatch):
        monkeypatch.setenv("nnUNet_extTrainer", "/my/trainers")
        paths = NnunetFolders.of(tmp_path).environment()["nnUNet_extTrainer"].split(":")
        assert paths[-1] == "/my/trainers"
        assert paths[0].endswith("semidice/nnunet/trainers")

    @pytest.mark.parametrize("name", ["two__parts", "with space", "../up"])
    def test_a_trainer_that_nnunet_cannot_name_is_refused(self, name):
        with pytest.raises(ValueError, match="name"):
            trainer_name("mean", "dml1", name, None)

    def test_an_unknown_label_or_loss_is_named(self):
        with pytest.raises(ValueError, match=r"--label must be one of.*'mean'.*got 'average'"):
            short_options("average", "dml1", None, "kde")
        with pytest.raises(ValueError, match=r"--loss must be one of.*'dml1'.*got 'dice'"):
            short_options("mean", "dice", None, "kde")


class TestOptions:
    def test_stored_options_are_read_back(self, tmp_path):
        teacher = NnunetTeacher(trainer="nnUNetTrainer")
        options = trainer_options("random", "jml1", epochs=3, iterations=7, teacher=teacher)
        write_options(tmp_path, "SemidiceTrainer_x", options, has_results=False)
        assert read_options(tmp_path, "SemidiceTrainer_x") == options

    def test_results_are_not_continued_with_other_options(self, tmp_path):
        write_options(tmp_path, "SemidiceTrainer_x", trainer_options("mean", "dml1"), has_results=True)
        write_options(tmp_path, "SemidiceTrainer_x", trainer_options("mean", "dml1"), has_results=True)
        with pytest.raises(ValueError, match=r"results with other options.*--name"):
            write_options(tmp_path, "SemidiceTrainer_x", trainer_options("mean", "sdl"), has_results=True)

    def test_missing_and_damaged_options_name_the_file(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no options in .*semidice nnunet train"):
            read_options(tmp_path, "SemidiceTrainer_x")
        write_options(tmp_path, "SemidiceTrainer_x", TrainerOptions(), has_results=False)
        (tmp_path / "semidice_trainers" / "x.json").write_text('{"epochs": "many"}')
        with pytest.raises(ValueError, match=r"x.json does not hold options of a trainer: epochs"):
            read_options(tmp_path, "SemidiceTrainer_x")

    def test_a_label_of_some_raters_is_refused(self):
        with pytest.raises(ValueError, match=r"learns from all raters.*leave raters out; got \(0, 1\)"):
            TrainerOptions(label=LabelOptions(raters=(0, 1)))

    def test_nnunets_own_loss_takes_no_teacher(self):
        with pytest.raises(ValueError, match=r"takes no teacher.*dml1"):
            trainer_options("mean", "nnunet", teacher=NnunetTeacher(trainer="nnUNetTrainer"))


class TestExport:
    def test_pictures_and_masks_of_all_present_raters_are_written(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", absent=True)
        export_dataset(dataset, target)
        for number, case in enumerate(dataset.cases):
            picture = np.array(Image.open(target.raw / "imagesTr" / f"{case.name}_0000.png"))
            assert (picture == dataset.stored("images", number)[0]).all()
            masks = dataset.masks(number)
            for rater, mask, looked in zip(
                dataset.manifest.raters, masks, dataset.present[number], strict=True
            ):
                path = target.raters / rater / f"{case.name}.png"
                assert path.is_file() == looked
                if looked:
                    assert (np.array(Image.open(path)) == mask).all()
            label = np.array(Image.open(target.raw / "labelsTr" / f"{case.name}.png"))
            votes = masks.astype(int).sum(0)
            assert (label == (votes * 2 > dataset.present[number].sum())).all()

    def test_a_volume_keeps_its_voxels_and_affine(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", depth=3, num_classes=3, dtype="int16")
        export_dataset(dataset, target)
        case = dataset.cases[0]
        volume = nibabel.load(target.raw / "imagesTr" / f"{case.name}_0000.nii.gz")
        assert (np.asanyarray(volume.dataobj) == dataset.stored("images", 0)[0]).all()
        assert np.allclose(volume.affine, case.scan.affine)
        header = json.loads((target.raw / "dataset.json").read_text())
        assert header["labels"]["background"] == 0
        assert len(header["labels"]) == 3

    def test_slices_of_volumes_are_refused(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", slices_per_scan=3)
        with pytest.raises(ValueError, match=r"needs them whole.*--slices none"):
            export_dataset(dataset, target)

    def test_an_exported_dataset_is_not_overwritten(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data")
        export_dataset(dataset, target)
        with pytest.raises(ValueError, match="already exported"):
            export_dataset(dataset, target)


class TestCollect:
    @pytest.fixture
    def trained(self, tmp_path, target):
        """A prepared dataset, exported, with probabilities as nnU-Net stores them in two folds."""
        dataset = make_prepared(tmp_path / "data", cases_per_patient=1, depth=3)
        export_dataset(dataset, target)
        names = [case.name for case in dataset.cases]
        splits = [{"train": names[k::2], "val": names[1 - k :: 2]} for k in range(2)]
        target.preprocessed.mkdir(parents=True)
        target.splits.write_text(json.dumps(splits))
        results = target.results("nnUNetTrainer", "nnUNetPlans", "3d_fullres")
        rng = np.random.default_rng(0)
        probs = {}
        for fold, split in enumerate(splits):
            folder = results / f"fold_{fold}" / "validation"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text("{}")
            for name in split["val"]:
                shape = dataset.cases[names.index(name)].shape
                prob = rng.random(shape).astype(np.float32)
                probs[name] = prob
                # nnU-Net has the axes of a NIfTI in reverse order
                both = np.stack([1 - prob, prob]).transpose(0, 3, 2, 1)
                np.savez_compressed(folder / f"{name}.npz", probabilities=both.astype(np.float16))
                mask = (prob > 0.5).astype(np.uint8)
                affine = np.array(dataset.cases[names.index(name)].scan.affine)
                nibabel.save(nibabel.Nifti1Image(mask, affine), folder / f"{name}.nii.gz")
        return dataset, target, probs

    def collect(self, trained, out, **options):
        dataset, target, _ = trained
        return collect_run(
            target,
            dataset,
            out,
            **{
                "trainer": "nnUNetTrainer",
                "plans": "nnUNetPlans",
                "configuration": "3d_fullres",
                "name": "theirs",
                **options,
            },
        )

    def test_probabilities_and_folds_are_those_of_nnunet(self, tmp_path, trained):
        dataset, target, probs = trained
        assert self.collect(trained, tmp_path / "run") == (0, 1)
        run = open_run(tmp_path / "run")
        assert run.finished_folds == (0, 1)
        assert run.recipe.model.options["configuration"] == "3d_fullres"
        from semidice.runs.predictions import read_case

        folds = read_splits(target.splits, dataset)
        for number, case in enumerate(dataset.cases):
            stored = read_case(run.folder.fold(folds[number]), dataset, number)
            assert np.abs(stored[1] - probs[case.name]).max() < 1e-3
        table = read_cases(run.folder.cases)
        assert table.methods == ("theirs",)
        assert set(table.columns["case"].tolist()) == {case.name for case in dataset.cases}

    def test_a_fold_that_is_not_validated_is_left_out(self, tmp_path, trained):
        _, target, _ = trained
        results = target.results("nnUNetTrainer", "nnUNetPlans", "3d_fullres")
        (results / "fold_1" / "validation" / "summary.json").unlink()
        assert self.collect(trained, tmp_path / "run") == (0,)
        (results / "fold_1" / "validation" / "summary.json").write_text("{}")
        assert self.collect(trained, tmp_path / "run") == (0, 1)

    def test_masks_without_probabilities_name_the_way_out(self, tmp_path, trained):
        _, target, _ = trained
        results = target.results("nnUNetTrainer", "nnUNetPlans", "3d_fullres")
        for path in (results / "fold_0" / "validation").glob("*.npz"):
            path.unlink()
        with pytest.raises(ValueError, match=r"no probabilities.*--val --npz"):
            self.collect(trained, tmp_path / "run")

    def test_another_dataset_is_refused(self, tmp_path, trained):
        _, target, _ = trained
        other = make_prepared(tmp_path / "other", cases_per_patient=1, depth=3, seed=1)
        with pytest.raises(ValueError, match="not the dataset that"):
            self.collect((other, target, None), tmp_path / "run")

    def test_splits_that_hold_out_a_case_twice_are_refused(self, trained):
        dataset, target, _ = trained
        splits = json.loads(target.splits.read_text())
        splits[0]["val"].append(splits[1]["val"][0])
        target.splits.write_text(json.dumps(splits))
        with pytest.raises(ValueError, match="in 2 folds"):
            read_splits(target.splits, dataset)

    def test_a_run_of_semidice_train_is_not_overwritten(self, tmp_path, trained):
        self.collect(trained, tmp_path / "run")
        recipe = tmp_path / "run" / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("architecture: nnunet", "architecture: small_unet"))
        with pytest.raises(ValueError, match="which would be lost"):
            self.collect(trained, tmp_path / "run")

    def test_predict_says_where_the_networks_are(self, tmp_path, trained):
        self.collect(trained, tmp_path / "run")
        with pytest.raises(ValueError, match="nnUNetv2_predict"):
            open_run(tmp_path / "run").checkpoint_path(0)


@pytest.fixture
def fake_nnunet(tmp_path, monkeypatch):
    """A package nnunetv2 whose training runs the given lines; returns a job of it."""

    def make(*lines):
        run = tmp_path / "packages" / "nnunetv2" / "run"
        run.mkdir(parents=True)
        (run.parent / "__init__.py").touch()
        (run / "__init__.py").touch()
        body = "".join(f"    {line}\n" for line in lines)
        (run / "run_training.py").write_text(f"def run_training_entry():\n    import os, sys, time\n{body}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(run.parent.parent), *sys.path]))
        return command.NnunetJob(NnunetFolders.of(tmp_path), "Trainer", tmp_path / "fold_0", ["D", "2d", "0"])

    return make


class TestJobs:
    def test_a_training_that_was_begun_is_continued(self, fake_nnunet):
        job = fake_nnunet("print(sys.argv[1:])")
        job.run(Worker(WorkerOptions()))
        job.results.mkdir()
        (job.results / ".checkpoint_latest.pth.1-00.part").touch()
        job.run(Worker(WorkerOptions()))
        assert job.messages.read_text().splitlines() == ["['D', '2d', '0']", "['D', '2d', '0', '--c']"]
        assert not list(job.results.iterdir())
        assert str(job) == "fold 0 with Trainer"

    @pytest.mark.parametrize(
        ("line", "kind", "said"),
        [
            ("raise ValueError('no such fold')", "failed", "code 1: ValueError: no such fold; see "),
            ("os.kill(os.getpid(), 9)", "lost", "code -9: begun; see "),
            ("raise type('OutOfMemoryError', (Exception,), {})('1 GiB')", "lost", "OutOfMemoryError: 1 GiB"),
            ("raise RuntimeError('CUDA error: launch failure')", "lost", "CUDA error: launch failure"),
        ],
    )
    def test_the_report_has_the_last_message_and_names_the_file(self, fake_nnunet, line, kind, said):
        job = fake_nnunet("print('begun')", line)
        job.messages.write_text("CUDA error of an earlier attempt\n")
        report = Worker(WorkerOptions()).work(job)
        assert (report.kind, said in report.content) == (kind, True), report.content
        assert str(job.messages) in report.content

    def test_nnunet_sees_only_the_gpu_of_its_worker(self, fake_nnunet, monkeypatch):
        job = fake_nnunet("print(os.environ['CUDA_VISIBLE_DEVICES'])")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        job.run(Worker(WorkerOptions(device=1)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
        job.run(Worker(WorkerOptions(device=1)))
        assert job.messages.read_text().split() == ["1", "5"]

    @pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
    def test_nnunet_and_its_processes_end_with_a_killed_parent(self, fake_nnunet, tmp_path):
        fork = "print(os.getpid(), os.fork(), flush=True); time.sleep(600)"
        job = fake_nnunet(fork)
        script = "\n".join(
            [
                "import pathlib",
                "from semidice.nnunet.command import NnunetJob",
                "from semidice.nnunet.folders import NnunetFolders",
                "from semidice.training.jobs import Worker, WorkerOptions",
                f"path = pathlib.Path({str(tmp_path)!r})",
                "job = NnunetJob(NnunetFolders.of(path), 'Trainer', path / 'fold_0', ['D', '2d', '0'])",
                "job.run(Worker(WorkerOptions()))",
            ]
        )
        parent = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 120
        while not (job.messages.is_file() and len(job.messages.read_text().splitlines()) == 2):
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = {int(pid) for pid in job.messages.read_text().split()} - {0}
        assert len(processes) == 2
        parent.kill()
        parent.wait()
        while any(is_running(pid) for pid in processes):
            assert time.monotonic() < deadline
            time.sleep(0.05)


class _CreatesAFile:
    """What a stranger may put into a pickle: it is called when the file is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class TestWeightsOfATeacher:
    def test_numbers_of_numpy_beside_the_weights_are_read(self, tmp_path):
        weights = {"conv.weight": torch.randn(2, 3)}
        logged = {"mean_fg_dice": [np.float64(0.5)], "lr": np.float32(0.1), "epoch": np.int64(3)}
        torch.save({"network_weights": weights, "logging": logged}, tmp_path / "checkpoint_final.pth")
        read = read_nnunet_weights(tmp_path / "checkpoint_final.pth")
        torch.testing.assert_close(read, weights)

    def test_a_checkpoint_cannot_run_code(self, tmp_path):
        content = {"network_weights": {}, "logging": _CreatesAFile(tmp_path / "created")}
        torch.save(content, tmp_path / "checkpoint_final.pth")
        with pytest.raises(ValueError, match="is not a checkpoint of nnU-Net with plain weights"):
            read_nnunet_weights(tmp_path / "checkpoint_final.pth")
        assert not (tmp_path / "created").exists()

    def test_a_damaged_checkpoint_is_named(self, tmp_path):
        (tmp_path / "checkpoint_final.pth").write_bytes(b"not a checkpoint")
        with pytest.raises(ValueError, match=r"checkpoint_final.pth is not a checkpoint of nnU-Net"):
            read_nnunet_weights(tmp_path / "checkpoint_final.pth")
