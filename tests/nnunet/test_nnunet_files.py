"""Options, folders, export and collection: everything that needs files of nnU-Net but not nnU-Net itself."""

import json
import os
import shutil
import signal
import sys
from dataclasses import fields
from functools import partial
from typing import get_args

import nibabel
import numpy as np
import pytest
from PIL import Image
from prepared import make_prepared
from processes import is_running
from raw_trees import make_folder, make_nnunet
from rich.console import Console
from start import refused, semidice, wait_until

from semidice.data.batches.label_making import Maker
from semidice.data.dataset import Dataset
from semidice.data.sources.files import read_image
from semidice.nnunet.collect import collect, read_splits
from semidice.nnunet.export import export
from semidice.nnunet.folders import OPTIONS, NnunetDataset, NnunetTraining, read_training, write_training
from semidice.nnunet.options import Label, TrainerOptions
from semidice.nnunet.train import write_splits
from semidice.runs.predictions import read_case
from semidice.runs.run import open_run
from semidice.statistics.cases import read_cases

NAME, CONSOLE = "Dataset101_Phantom", Console(quiet=True)


@pytest.fixture
def target(tmp_path):
    return NnunetDataset.find(NAME, tmp_path / "work")


class TestNamesAndOptions:
    def test_folders_are_those_of_nnunets_environment_and_own_trainers_stay_known(
        self, tmp_path, monkeypatch
    ):
        for kind in ("raw", "preprocessed", "results"):
            monkeypatch.setenv(f"nnUNet_{kind}", str(tmp_path / kind))
        monkeypatch.setenv("nnUNet_extTrainer", "/my/trainers")
        dataset = NnunetDataset.find(NAME, None)
        assert dataset.raw == tmp_path / "raw" / NAME
        environment = dataset.environment()
        assert environment["nnUNet_results"] == str(tmp_path / "results")
        assert environment["nnUNet_extTrainer"].split(os.pathsep)[1:] == ["/my/trainers"]
        monkeypatch.delenv("nnUNet_raw")
        refused(lambda: NnunetDataset.find(NAME, None), "nnUNet_raw", "--work")

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"name": "two__parts"}, "name"),
            ({"name": "../up"}, "name"),
            ({"epochs": 0}, "epochs"),
            ({"loss": "nnunet", "teacher": "nnUNetTrainer"}, "teacher"),
        ],
    )
    def test_what_nnunet_cannot_train_or_name_is_refused(self, changes, word):
        refused(partial(TrainerOptions, **changes), word)

    def test_every_field_is_an_option_of_the_command(self):
        said = semidice("nnunet", "train", "--help").out
        assert all(f"--{field.name}" in said for field in fields(TrainerOptions))
        assert get_args(Label) == get_args(Maker)

    def test_results_are_not_continued_with_other_options_or_of_another_export(self, target):
        options = TrainerOptions(label="random", loss="jml1", epochs=3, teacher="nnUNetTrainer")
        training = NnunetTraining(target, "2d", options.trainer)
        refused(partial(read_training, training.results), OPTIONS, "semidice nnunet train")
        write_training(training, options)
        training.validation(0).mkdir(parents=True)
        assert read_training(training.results) == options
        # the default name, given
        write_training(training, TrainerOptions(**{**vars(options), "name": "random_jml1_student_kde"}))
        refused(partial(write_training, training, TrainerOptions()), "other options", "--name")
        # nnU-Net has copied it from what was preprocessed when the training began
        for folder, digest in ((target.preprocessed, "new"), (training.results, "old")):
            record = {"dataset": "data", "manifest_sha256": digest, "patients": {}}
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "dataset.json").write_text(json.dumps({"semidice": record}))
        refused(partial(write_training, training, options), "before it was exported again")


def channel_of(exported):
    (name,) = json.loads((exported / "dataset.json").read_text())["channel_names"].values()
    return name


class TestExport:
    def test_pictures_and_masks_of_all_present_raters_are_written(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", absent=True)
        export(dataset.folder.path, target, CONSOLE)
        for number, case in enumerate(dataset.cases):
            picture = np.array(Image.open(target.raw / "imagesTr" / f"{case.name}_0000.png"))
            assert (picture == dataset.stored("images", number)[0]).all()
            masks, present = dataset.masks(number), dataset.present[number]
            for rater, mask, looked in zip(dataset.manifest.raters, masks, present, strict=True):
                path = target.raters / rater / f"{case.name}.png"
                assert path.is_file() == looked
                assert not looked or (np.array(Image.open(path)) == mask).all()
            label = np.array(Image.open(target.raw / "labelsTr" / f"{case.name}.png"))
            assert (label == (masks[present].astype(int).sum(0) * 2 > present.sum())).all()
        refused(partial(export, dataset.folder.path, target, CONSOLE), "already exported")

    def test_a_volume_keeps_its_voxels_and_affine(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", depth=3, num_classes=3, dtype="int16")
        export(dataset.folder.path, target, CONSOLE)
        case = dataset.cases[0]
        volume = nibabel.load(target.raw / "imagesTr" / f"{case.name}_0000.nii.gz")
        assert (np.asanyarray(volume.dataobj) == dataset.stored("images", 0)[0]).all()
        assert np.allclose(volume.affine, case.scan.affine)
        header = json.loads((target.raw / "dataset.json").read_text())
        assert list(header["labels"].values()) == [0, 1, 2]
        assert header["labels"]["background"] == 0

    @pytest.mark.parametrize("source", ["folder", "nnunet"])
    def test_intensities_are_those_of_the_raw_files_which_nnunet_predicts(self, tmp_path, source):
        """Prepared with a window, which clips: nnU-Net is trained on what its users let it predict."""
        raw, num_axes = tmp_path / "raw", 2 if source == "folder" else 3
        if source == "folder":
            images, window = make_folder(raw, suffix=".png") / "images", ("--window", "60", "120")
        else:
            images, window = make_nnunet(raw, channels=["CT"]) / "imagesTr", ("--window", "300", "500")
        made = semidice("prepare", source, raw, tmp_path / "data", "--slices", "none", *window)
        assert made.code == 0, made.err
        done = semidice("nnunet", "export", tmp_path / "data", NAME, "--work", tmp_path / "work")
        assert (done.code, "warning" in done.out) == (0, False), done
        paths = sorted(images.iterdir())
        written = sorted((tmp_path / "work" / "raw" / NAME / "imagesTr").iterdir())
        for pair in zip(paths, written, strict=True):
            np.testing.assert_array_equal(*(read_image(path, num_axes=num_axes).values for path in pair))
        # Hounsfield units keep nnU-Net's own rule
        name = "zscore_intensity" if source == "folder" else "CT"
        assert channel_of(tmp_path / "work" / "raw" / NAME) == name
        # the files are gone, or others: the stored intensities with a warning, or an error
        raw.rename(tmp_path / "moved")
        again = ("nnunet", "export", tmp_path / "data", "Dataset102_Again", "--work", tmp_path / "work")
        moved = tmp_path / "moved" / images.name
        shutil.copy(moved / paths[0].name, moved / paths[-1].name)
        refused(semidice(*again, "--raw", tmp_path / "moved"), "have changed")
        said = semidice(*again)
        assert said.code == 0, said.err
        assert "--raw" in said.out.partition("warning")[2]
        assert channel_of(tmp_path / "work" / "raw" / "Dataset102_Again").startswith("zscore_")

    def test_slices_of_volumes_are_refused(self, tmp_path, target):
        dataset = make_prepared(tmp_path / "data", slices_per_scan=3)
        refused(partial(export, dataset.folder.path, target, CONSOLE), "needs them whole", "--slices none")


def test_all_cases_of_a_patient_are_in_one_fold(tmp_path):
    patients = {f"case{number}": f"patient{number // 3}" for number in range(12)}
    write_splits(tmp_path / "splits_final.json", patients, 2)
    splits = json.loads((tmp_path / "splits_final.json").read_text())
    held_out = [{patients[case] for case in split["val"]} for split in splits]
    assert sorted(map(len, held_out)) == [2, 2]
    for split, own in zip(splits, held_out, strict=True):
        assert own.isdisjoint(patients[case] for case in split["train"])
        assert {*split["train"], *split["val"]} == set(patients)


class TestCollect:
    @pytest.fixture
    def trained(self, tmp_path, target):
        """A prepared dataset, exported, with probabilities as nnU-Net stores them in two folds."""
        dataset = make_prepared(tmp_path / "data", cases_per_patient=1, depth=3, size=(24, 20), truth=False)
        export(dataset.folder.path, target, CONSOLE)
        cases = {case.name: case for case in dataset.cases}
        splits = [{"val": list(cases)[1 - fold :: 2]} for fold in range(2)]
        target.preprocessed.mkdir(parents=True)
        target.splits.write_text(json.dumps(splits))
        training = NnunetTraining(target, "3d_fullres", "nnUNetTrainer")
        rng, probs = np.random.default_rng(0), {}
        for fold, split in enumerate(splits):
            folder = training.validation(fold)
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text("{}")
            for name in split["val"]:
                prob = probs[name] = rng.random(cases[name].shape).astype(np.float32)
                # nnU-Net has the axes of a NIfTI in reverse order
                both = np.stack([1 - prob, prob]).transpose(0, 3, 2, 1)
                np.savez_compressed(folder / f"{name}.npz", probabilities=both.astype(np.float16))
        # as nnU-Net does in its first epoch
        shutil.copy(target.raw / "dataset.json", training.results)
        return training, dataset, probs

    def test_probabilities_and_folds_are_those_of_nnunet(self, tmp_path, trained):
        training, dataset, probs = trained
        summary = training.validation(1) / "summary.json"
        summary.unlink()
        out = tmp_path / "a run"
        assert collect(training, out, CONSOLE, name="theirs") == (0,)
        summary.touch()
        assert collect(training, out, CONSOLE, name="theirs") == (0, 1)
        run = open_run(out)
        assert run.finished_folds == (0, 1)
        assert run.recipe.model.options["configuration"] == "3d_fullres"
        folds = read_splits(training.dataset.splits, dataset)
        for number, case in enumerate(dataset.cases):
            stored = read_case(run.folder.fold(folds[number]), dataset, number)
            assert np.abs(stored[1] - probs[case.name]).max() < 1e-3
        table = read_cases(run.folder.cases)
        assert set(table["method"]) == {"theirs"}
        assert set(table["case"].tolist()) == set(probs)
        refused(partial(run.checkpoint_path, 0), "nnUNetv2_predict")
        recipe = out / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("architecture: nnunet", "architecture: small_unet"))
        refused(partial(collect, training, out, CONSOLE), "which would be lost")

    @pytest.mark.parametrize("slices", ["none", "all"])
    def test_a_dataset_of_the_user_is_scored_against_its_own_raters(self, tmp_path, trained, slices):
        """The same raw files, whose dataset.json semidice did not write: the scores are the same."""
        training, dataset, _ = trained
        raw, out = training.dataset.raw, tmp_path / "own"
        collect(training, tmp_path / "exported", CONSOLE, metrics=["rater_calibration_error"])
        for folder in (raw, training.results):
            header = json.loads((folder / "dataset.json").read_text())
            del header["semidice"]
            (folder / "dataset.json").write_text(json.dumps(header))
        refused(partial(collect, training, out, CONSOLE), "semidice prepare nnunet", "--dataset")
        refused(partial(collect, training, out, CONSOLE, dataset=dataset.folder.path), "not what")
        done = semidice("prepare", "nnunet", raw, tmp_path / "prepared", "--slices", slices, "--workers", "1")
        assert done.code == 0, done.err
        own = partial(collect, training, out, CONSOLE, dataset=tmp_path / "prepared")
        own(metrics=["rater_calibration_error"])
        theirs, ours = (read_cases(tmp_path / run / "cases.parquet") for run in ("exported", "own"))
        assert len(Dataset(tmp_path / "prepared").manifest.raters) == 3
        assert ours["case"].tolist() == theirs["case"].tolist()
        np.testing.assert_allclose(ours["value"], theirs["value"], rtol=1e-6)
        mask = next((raw / "ratersTr" / "rater1").iterdir())
        shutil.copy(mask.with_name("scan001.nii.gz"), mask.with_name("scan002.nii.gz"))
        refused(own, "prepared again")

    def test_what_is_not_a_cross_validation_of_this_dataset_is_refused(self, tmp_path, trained):
        training, _, _ = trained
        collected = partial(collect, training, tmp_path / "run", CONSOLE)
        other = make_prepared(tmp_path / "other", cases_per_patient=1, depth=3, seed=1)
        refused(partial(collected, dataset=other.folder.path), "not what", "--dataset")
        refused(partial(collected, metrics=["dise_score"]), "--metric", "did you mean dice_score")
        for path in training.validation(0).glob("*.npz"):
            path.unlink()
        refused(collected, "no probabilities", "--val --npz")
        splits = json.loads(training.dataset.splits.read_text())
        splits[0]["val"].append(splits[1]["val"][0])
        training.dataset.splits.write_text(json.dumps(splits))
        refused(collected, "in 2 folds")


FAKE = """
import os, pathlib, time
def run_training_entry():
    if os.fork():
        pathlib.Path("child").write_text(str(os.getpid()))
    else:
        pathlib.Path("grandchild").write_text(str(os.getpid()))
        time.sleep(600)
    while {waits} or not os.path.exists("grandchild"):
        time.sleep(0.01)
    raise SystemExit(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("killed", [True, False])
def test_nothing_of_nnunet_outlives_the_command(tmp_path, target, start, killed):
    """Killed by SIGKILL, or after an error of nnU-Net: its processes that load and augment end."""
    package = tmp_path / "packages" / "nnunetv2" / "run"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run_training.py").write_text(FAKE.format(waits=killed))
    (package.parents[1] / "nnunetv2-2.8.1.dist-info").mkdir()
    (package.parents[1] / "nnunetv2-2.8.1.dist-info" / "METADATA").write_text(
        "Name: nnunetv2\nVersion: 2.8.1\n"
    )
    target.preprocessed.mkdir(parents=True)
    (target.preprocessed / "nnUNetPlans.json").touch()
    path = os.pathsep.join([str(package.parents[1]), *sys.path])
    command = ["-m", "semidice", "nnunet", "train", NAME, "2d", "0", "--work", target.work]
    parent = start(*command, cwd=tmp_path, env={"PYTHONPATH": path})
    files = [tmp_path / "child", tmp_path / "grandchild"]

    def pids():
        return [int(text) for text in (file.read_text() if file.is_file() else "" for file in files) if text]

    if killed:
        parent.wait_until(lambda: len(pids()) == 2)
        parent.send_signal(signal.SIGKILL)
    else:
        refused(parent.end(), "nnU-Net's run_training ended with code 3")
    wait_until(lambda: not any(map(is_running, pids())))
