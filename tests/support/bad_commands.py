"""The table of bad inputs of the commands: how each is made, and the part of the message that helps.

A row changes a copy of a good input and names the command. The command must end with exit code 1 or 2, and
its message must match. The makers of inputs are below the table.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import torch
import yaml
from PIL import Image
from prepared import make_prepared
from raw_trees import make_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trained import make_run
from typer.testing import CliRunner

from semidice.cli import app

NAN = float("nan")


@dataclass(frozen=True)
class Workspace:
    """An empty folder of a row, and the good inputs that it may copy."""

    folder: Path
    good: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def copy(self, name: str) -> Path:
        """A copy of a good input: data, run, raw or volumes."""
        shutil.copytree(self.good / name, self.folder / name)
        return self.folder / name

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


class CommandRow(NamedTuple):
    """One bad input. command: its arguments, from the workspace in which the input is made."""

    what: str
    command: Callable[[Workspace], list]
    message: str


def make_good_inputs(folder: Path) -> None:
    """Write a prepared dataset, a run on it, and raw pictures and volumes."""
    dataset = make_prepared(folder / "data")
    make_run(folder / "run", dataset)
    make_folder(folder / "raw", num_cases=4)
    make_folder(folder / "volumes", num_cases=3, suffix=".nii.gz", volumes=True)


def run_command(arguments: list) -> tuple[int, str, BaseException | None]:
    """Exit code, all that was printed on one line, and the exception if it was not handled."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "400"})
    unhandled = None if isinstance(done.exception, SystemExit) else done.exception
    return done.exit_code, " ".join(done.output.split()), unhandled


# fmt: off
TRAIN = [
    *(CommandRow(f"a recipe whose {key} is {value!r}", lambda w, k=key, v=value: train(w, **{k: v}), rf"recipe\.yaml: {key}: expected a mapping of options; got")
      for key, value in (("data", [1]), ("loss", [1, 2]), ("model", "x"), ("schedule", 3), ("label", ["a"]), ("optimiser", None))),
    CommandRow("a recipe whose name is a list", lambda w: train(w, name=[1]), r"name: expected a valid string; got \[1\]"),
    CommandRow("a recipe that is a list", lambda w: ["train", w.write("recipe.yaml", "- 1"), "-o", w.out], "expected options such as `data: ...`; got list"),
    CommandRow("a recipe with a list as key", lambda w: ["train", w.write("recipe.yaml", "[1]: 2"), "-o", w.out], "line 1, column 1: not YAML: a key must be a word"),
    CommandRow("a recipe with a mapping as key", lambda w: ["train", w.write("recipe.yaml", "{a: 1}: 2"), "-o", w.out], "not YAML: a key must be a word"),
    CommandRow("a recipe with a key twice", lambda w: ["train", w.write("recipe.yaml", "name: a\nname: b"), "-o", w.out], "line 2, column 1: not YAML: key 'name' occurs twice"),
    CommandRow("a recipe that is not YAML", lambda w: ["train", w.write("recipe.yaml", "a: [1"), "-o", w.out], "recipe.yaml line .*not YAML"),
    CommandRow("a recipe that is not text", lambda w: ["train", w.write("recipe.yaml", b"\xff\xfe\x00"), "-o", w.out], "is not a recipe: it is not UTF-8 text"),
    CommandRow("a recipe that is a folder", lambda w: ["train", w.folder, "-o", w.out], "cannot read recipe .*Is a directory"),
    CommandRow("a recipe that does not exist", lambda w: ["train", "quik", "-o", w.out], "neither a file nor a shipped recipe quik; did you mean quick"),
    CommandRow("a grid as recipe", lambda w: ["train", "labels", "-o", w.out], "labels is a grid of recipes: run `semidice compare"),
    CommandRow("--set without a value", lambda w: train(w, "loss.form"), "expected KEY=VALUE, such as loss.form=relaxed"),
    CommandRow("--set of an unknown option", lambda w: train(w, "los.form=min"), "no such option; did you mean loss.form"),
    CommandRow("--set of an unknown choice", lambda w: train(w, "loss.form=mni"), r"--set loss\.form: expected 'min'"),
    CommandRow("a learning rate of NaN", lambda w: train(w, "optimiser.lr=.nan"), r"optimiser\.lr: expected a valid number; got \"\.nan\""),
    CommandRow("a negative seed", lambda w: train(w, "seed=-1"), "--set seed: expected greater than or equal to 0; got -1"),
    CommandRow("more folds than patients", lambda w: train(w, "data.num_folds=4"), "4 folds need 4 patients or more.*lower num_folds"),
    CommandRow("a fold that does not exist", lambda w: train(w, "data.folds=[7]"), "folds are numbered 0 to 1; got 7"),
    CommandRow("folds as a word", lambda w: train(w, "data.folds=x"), r"data\.folds: expected a valid tuple"),
    CommandRow("a class weight of NaN", lambda w: train(w, "loss.class_weight=[1,.nan]"), r"loss\.class_weight: expected"),
    CommandRow("three class weights for two classes", lambda w: train(w, "loss.class_weight=[1,2,3]"), "one number for each of the 2 classes"),
    CommandRow("class weights of 0", lambda w: train(w, "loss.class_weight=[0,0]"), "class_weight must be .*not all 0"),
    CommandRow("sigma of a billion", lambda w: train(w, "label.smoothing=spatial", "label.sigma=1e9"), r"label\.sigma: expected less than or equal to 1000; got"),
    CommandRow("sigma as a list", lambda w: train(w, "label.sigma=[1]"), r"label\.sigma: expected a valid number; got \[1\]"),
    CommandRow("eps without smoothing", lambda w: train(w, "label.eps=0.3"), r"--set label\.eps: 0\.3 has no effect with smoothing none: leave it out, or use label\.smoothing=uniform or boundary"),
    CommandRow("width without boundary smoothing", lambda w: train(w, "label.width=5"), r"label\.width: 5 has no effect with smoothing none"),
    CommandRow("sigma without spatial smoothing", lambda w: train(w, "label.smoothing=uniform", "label.sigma=3"), r"label\.sigma: 3 has no effect with smoothing uniform"),
    CommandRow("eps without smoothing in a file", lambda w: train(w, label={"eps": 0.3}), r"recipe\.yaml: label\.eps: 0\.3 has no effect with smoothing none"),
    CommandRow("a rater that the dataset does not have", lambda w: train(w, "label.raters=[0, 9]"), r"label\.raters \[0, 9\] needs 10 raters, but the dataset has"),
    CommandRow("a rater twice", lambda w: train(w, "label.raters=[0, 0]"), r"raters must be different numbers, 0 for the first rater; got \[0, 0\]"),
    CommandRow("a negative rater", lambda w: train(w, "label.raters=[-1]"), r"raters must be different numbers, 0 for the first rater; got \[-1\]"),
    CommandRow("raters of a label that is not used", lambda w: train(w, "label.raters=[0]", "system.name=multi_head"), "system multi_head learns from the mask of every rater: leave label.raters out"),
    CommandRow("an unknown system", lambda w: train(w, "system.name=mc_dropoutt"), r"system\.name: expected 'standard'"),
    CommandRow("alpha of a Dice loss", lambda w: train(w, "loss.alpha=0.3"), "alpha and beta are for family tversky"),
    CommandRow("an unknown score", lambda w: train(w, "validation.metrics=[dise_score]"), "there is no score 'dise_score'; did you mean dice_score"),
    CommandRow("the best checkpoint by a surface score", lambda w: train(w, "validation.best_by=surface_dice_score"), r"surface_dice_score needs the spacing of voxels.*validation\.metrics"),
    CommandRow("the best checkpoint by a distance", lambda w: train(w, "validation.best_by=hausdorff_error_mm"), "hausdorff_error_mm needs the spacing of voxels"),
    CommandRow("the best checkpoint by a volume", lambda w: train(w, "validation.best_by=volume_error_ml"), "volume_error_ml needs the spacing of voxels"),
    CommandRow("channels as a word", lambda w: train(w, model__options__channels="abc"), "small_unet needs a list of channels, multiples of 8.*got 'abc'"),
    CommandRow("channels as words", lambda w: train(w, model__options__channels=["a"]), r"small_unet needs a list of channels.*got \['a'\]"),
    CommandRow("no channels", lambda w: train(w, model__options__channels=[]), r"small_unet needs a list of channels.*got \[\]"),
    CommandRow("channels of a billion", lambda w: train(w, model__options__channels=[8, 10**9]), "model.options.channels may be 4096 at most; got 1000000000"),
    CommandRow("an unknown norm", lambda w: train(w, model__options__norm=3), "small_unet needs norm 'batch' or 'group'; got 3"),
    CommandRow("an unknown option of the network", lambda w: train(w, model__options__depth=3), "no option of small_unet 'depth'"),
    CommandRow("an option of the recipe as one of the network", lambda w: train(w, model__options__dropout=0.1), "dropout is not an option of an architecture"),
    CommandRow("an unknown architecture", lambda w: train(w, "model.architecture=unett", "model.encoder=resnet18"), "no architecture 'unett'; did you mean unet"),
    CommandRow("an unknown encoder", lambda w: train(w, "model.architecture=unet", "model.encoder=resnet19"), "there is no encoder 'resnet19'; did you mean"),
    CommandRow("a crop that no network takes", lambda w: train(w, "augment.crop=[30,30]"), r"augment\.crop needs multiples of 32"),
    CommandRow("a batch that cannot be cut", lambda w: train(w, "optimiser.accumulate=3"), r"batch_size must be a multiple of optimiser\.accumulate 3"),
    CommandRow("a teacher that does not exist", lambda w: train(w, "teacher.run=nowhere"), r"there is no teacher run in .*nowhere: train it first"),
    CommandRow("weights that do not exist", lambda w: train(w, "model.architecture=unet", "model.encoder=resnet18", "model.weights=no.safetensors"), r"no\.safetensors"),
    CommandRow("a dataset that does not exist", lambda w: train(w, "data.dataset=nowhere"), "there is no folder .*nowhere: make a dataset with `semidice prepare"),
    CommandRow("a folder that is not a dataset", lambda w: train(w, f"data.dataset={w.folder}"), "has no manifest.json, so it is not a prepared dataset"),
    CommandRow("a training that diverges", lambda w: train(w, "optimiser.lr=1e30", "schedule.epochs=3"), r"fold 0: the loss of step \d+ is not finite; its cases are .*diverged.*Lower optimiser\.lr"),
    CommandRow("an unknown accelerator", lambda w: [*train(w), "--accelerator", "tpux"], "tpux"),
    CommandRow("no devices", lambda w: [*train(w), "--devices", "0"], "Invalid value for '--devices'"),
]

PREPARE = [
    CommandRow("a PNG cut in the middle", lambda w: prepare(w, cut("images/case1.png", 0.5)), r"cannot read .*images/case1\.png: it is truncated; copy or export it again"),
    CommandRow("a PNG without its last bytes", lambda w: prepare(w, cut("images/case1.png", 0.98)), r"images/case1\.png: it is truncated"),
    CommandRow("a PNG with a flipped byte", lambda w: prepare(w, flip("images/case1.png", 0.5)), r"images/case1\.png: its part 'IDAT' has a wrong checksum"),
    CommandRow("a mask with a flipped byte", lambda w: prepare(w, flip("raters/a/case1.png", 0.5)), r"raters/a/case1\.png: its part 'IDAT' has a wrong checksum"),
    CommandRow("a PNG whose data hold half of the rows", lambda w: prepare(w, half_png), r"cannot read .*images/case1\.png"),
    CommandRow("a PNG of zero bytes", lambda w: prepare(w, lambda raw: (raw / "images/case1.png").write_bytes(b"")), r"case1\.png is empty: copy or export it again"),
    CommandRow("a PNG that is a text", lambda w: prepare(w, lambda raw: (raw / "images/case1.png").write_bytes(b"hello")), r"case1\.png: it is neither PNG nor TIFF"),
    CommandRow("a JPEG among the images", lambda w: prepare(w, lambda raw: (raw / "images/case9.jpg").write_bytes(b"x")), r"case9\.jpg cannot be used: convert it"),
    CommandRow("a colour image among grey ones", lambda w: prepare(w, colour), r"case2: .*case2\.png has 3 channels; expected 1.* 1 problem:"),
    CommandRow("a volume among images", lambda w: prepare(w, pages), r"case2: .*case2\.tif has shape \(3, 40, 36\); expected 2 spatial axes 1 problem:"),
    CommandRow("a mask drawn in its transparency", lambda w: prepare(w, alpha), r"raters/a/case1\.png: .*drawn in its transparency.*save it with one grey value"),
    CommandRow("a mask in colours", lambda w: prepare(w, colour_mask), r"mask .*raters/a/case1\.png is in colour: save it with one grey value"),
    CommandRow("a mask with blurred edges", lambda w: prepare(w, lambda raw: picture(raw / "raters/a/case1.png", np.arange(1440).reshape(40, 36) % 200)), r"without classes\.csv, masks must hold.*threshold them"),
    CommandRow("a mask of another size", lambda w: prepare(w, lambda raw: picture(raw / "raters/a/case1.png", np.eye(20) * 255)), r"mask .*case1\.png has shape \(20, 20\), but image .*resample"),
    CommandRow("an image of one value", lambda w: prepare(w, lambda raw: picture(raw / "images/case1.png", np.full((40, 36), 7))), r"case1\.png is 7 everywhere: it has no contrast"),
    CommandRow("an image without a mask", lambda w: prepare(w, lambda raw: [path.unlink() for path in raw.glob("raters/*/case1.png")]), r"image .*case1\.png has no mask"),
    CommandRow("a mask without an image", lambda w: prepare(w, lambda raw: (raw / "images/case1.png").unlink()), "has no image .*case1"),
    CommandRow("two files of one case", lambda w: prepare(w, lambda raw: shutil.copy(raw / "images/case1.png", raw / "images/case1.tif")), "case 'case1' has two files"),
    CommandRow("patients with a comma", lambda w: prepare(w, cases("case,patient\n{0},Doe, John\n{1},Doe, Jane\n{2},b\n{3},c\n")), r"cases\.csv has more cells than columns in line 2, 'case1,Doe, John': put a text with a , in quotes"),
    CommandRow("patients that differ in upper and lower case", lambda w: prepare(w, cases("case,patient\n{0},P01\n{1},p01\n{2},b\n{3},c\n")), "patients 'P01' and 'p01', which differ only in their spelling"),
    CommandRow("two columns of patients", lambda w: prepare(w, cases("case,patient,patient\n{0},a,b\n{1},a,b\n{2},a,b\n{3},a,b\n")), r"cases\.csv has 2 columns patient: keep one"),
    CommandRow("a voxel of NaN mm", lambda w: prepare(w, side("images/case1.nii.gz", NAN), "volumes"), r"images/case1\.nii\.gz: its voxel size is 0\.7 x 0\.8 x nan: write the right one into its header"),
    CommandRow("a voxel of infinite mm", lambda w: prepare(w, side("raters/a/case1.nii.gz", float("inf")), "volumes"), r"raters/a/case1\.nii\.gz: its voxel size is 0\.7 x 0\.8 x inf: write the right one"),
    CommandRow("a dataset.json of brackets", lambda w: ["prepare", "nnunet", nnunet_header(w, "[" * 100_000), w.out], r"dataset\.json cannot be read: .*nested too deeply.*it needs channel_names"),
    CommandRow("a case without a patient", lambda w: prepare(w, cases("case,patient\n{0}\n{1},b\n{2},c\n{3},d\n")), r"cases\.csv has no case and patient in line 2"),
    CommandRow("a quote that does not end", lambda w: prepare(w, cases('case,patient\n{0},"a\n{1},b\n{2},c\n{3},d\n')), r"cannot read .*cases\.csv: unexpected end of data; save it as CSV"),
    CommandRow("a case with two patients", lambda w: prepare(w, cases("case,patient\n{0},a\n{0},b\n{1},b\n{2},c\n{3},d\n")), "case 'case1' twice: keep one row"),
    CommandRow("a case without a row", lambda w: prepare(w, cases("case,patient\n{0},a\n{1},b\n{2},c\n")), "no row for case 'case4'.*add one"),
    CommandRow("cases.csv with tabs", lambda w: prepare(w, cases("case\tpatient\n{0}\ta\n")), "needs columns case and patient"),
    CommandRow("cases.csv in UTF-16", lambda w: prepare(w, lambda raw: (raw / "cases.csv").write_bytes("case,patient\n".encode("utf-16"))), r"cannot read .*cases\.csv: .*save it as CSV in UTF-8"),
    CommandRow("cases.csv that is a folder", lambda w: prepare(w, lambda raw: (raw / "cases.csv").mkdir()), r"cannot read .*cases\.csv: .*Is a directory"),
    CommandRow("a class twice", lambda w: prepare(w, classes("0,a\n0,b\n")), r"classes\.csv has value '0' twice"),
    CommandRow("a class -1", lambda w: prepare(w, classes("-1,a\n")), r"classes\.csv has value '-1'; use whole numbers"),
    CommandRow("one class", lambda w: prepare(w, classes("0,a\n")), r"classes\.csv declares 1 classes"),
    CommandRow("a folder without images", lambda w: prepare(w, lambda raw: shutil.rmtree(raw / "images")), "images"),
    CommandRow("a folder that does not exist", lambda w: ["prepare", "folder", w.folder / "no", w.out], "no"),
    CommandRow("an unknown source", lambda w: ["prepare", "foldr", w.copy("raw"), w.out], "foldr"),
    CommandRow("one folder instead of two", lambda w: ["prepare", "folder", w.copy("raw")], "folder needs RAW_DIR OUT_DIR; got 1 folders"),
    CommandRow("a size without an x", lambda w: [*prepare(w), "--size", "256"], "--size must be ROWSxCOLUMNS, such as 256x256.*got '256'"),
    CommandRow("a window with NaN", lambda w: [*prepare(w), "--window", "nan", "1"], "window"),
    CommandRow("a window the wrong way round", lambda w: [*prepare(w), "--window", "2", "1"], "window needs the lower value first"),
    CommandRow("slices of an unknown kind", lambda w: [*prepare(w), "--slices", "some"], "--slices must be one of none, all, foreground; got 'some'"),
    CommandRow("a task of a folder", lambda w: [*prepare(w), "--task", "x"], "task"),
    CommandRow("a NIfTI with time", lambda w: prepare(w, with_time, "volumes"), r"case1\.nii\.gz has shape \(40, 36, 6, 2\); expected 3 spatial axes"),
    CommandRow("a NIfTI cut in the middle", lambda w: prepare(w, cut("images/case1.nii.gz", 0.5), "volumes"), r"cannot read .*case1\.nii\.gz"),
    CommandRow("a NIfTI that is no gzip file", lambda w: prepare(w, lambda raw: unzip(raw / "images/case1.nii.gz"), "volumes"), r"case1\.nii\.gz: it is not a gzip file"),
    CommandRow("a NIfTI with NaN", lambda w: prepare(w, lambda raw: volume(raw / "images/case1.nii.gz", np.full((40, 36, 6), NAN)), "volumes"), "holds NaN or infinite values in 8640 of 8640 voxels"),
    CommandRow("a NIfTI mask with fractions", lambda w: prepare(w, lambda raw: volume(raw / "raters/a/case1.nii.gz", np.full((40, 36, 6), 0.5)), "volumes"), "holds fractions such as 0.5.*threshold it"),
]

PREDICT = [
    CommandRow("weights of NaN", lambda w: predict(w, nan_weights), r"last\.safetensors holds NaN or infinite weights, such as .*: the training diverged"),
    *(CommandRow(f"a run with {key} {value}", lambda w, k=key, v=value: predict(w, facts(**{k: v})), message)
      for key, value, message in (
          ("fold_mean", [[NAN], [0.1]], r"dataset\.json .*mean must be finite and std above 0; got \(nan,\)"),
          ("fold_std", [[0.0], [0.1]], "mean must be finite and std above 0"),
          ("fold_std", [[-1.0], [0.1]], "mean must be finite and std above 0"),
          ("fold_std", [[NAN], [0.1]], "mean must be finite and std above 0"),
          ("fold_std", [[0.1]], "mean and std need one number for each of 1 channels and fold"),
          ("fold_mean", [[], []], "mean and std need one number for each of 1 channels and fold"),
          ("class_names", ["a"], "class_names: Tuple should have at least 2 items"),
          ("class_names", ["a", "b", "c"], "holds the weights of another model"),
          ("channels", ["a", "b"], "mean and std need one number for each of 2 channels"),
          ("mean", ["x"], "mean.0: Input should be a valid number"),
      )),
    CommandRow("a checkpoint that is cut", lambda w: predict(w, lambda run: cut("fold_0/last.safetensors", 0.5)(run)), r"last\.safetensors is not a complete checkpoint of semidice"),
    CommandRow("a checkpoint that is a text", lambda w: predict(w, lambda run: (run / "fold_0/last.safetensors").write_text("x")), "is not a complete checkpoint"),
    CommandRow("a checkpoint without progress", lambda w: predict(w, lambda run: rewrite(run / "fold_0/last.safetensors", None)), "is not a complete checkpoint"),
    CommandRow("a run without a recipe", lambda w: predict(w, lambda run: (run / "recipe.yaml").unlink()), r"is not a run folder of `semidice train`: it has no recipe\.yaml"),
    CommandRow("a run whose recipe is no YAML", lambda w: predict(w, lambda run: (run / "recipe.yaml").write_text("[1")), r"recipe\.yaml line .*not YAML"),
    CommandRow("a run whose facts are a list", lambda w: predict(w, lambda run: (run / "dataset.json").write_text("[1]")), r"dataset\.json was not written by this version of semidice"),
    CommandRow("a NIfTI with time to predict", lambda w: predict(w, file=time_series(w)), r"time\.nii\.gz has shape \(8, 9, 3, 2\).*expected"),
    CommandRow("a text to predict", lambda w: predict(w, file=w.write("a.txt", "x")), r"a\.txt has an unknown format: inputs are DICOM, or files with"),
    CommandRow("a file without a suffix", lambda w: predict(w, file=w.write("scan", "x")), "scan has an unknown format"),
    CommandRow("a file that is only a suffix", lambda w: predict(w, file=w.write(".png", "x")), r"\.png has no name before its suffix.*rename it"),
    CommandRow("an empty file to predict", lambda w: predict(w, file=w.write("a.png", "")), r"a\.png is empty"),
    CommandRow("a broken picture to predict", lambda w: predict(w, file=w.write("a.png", "x" * 99)), r"cannot read .*a\.png: it is neither PNG nor TIFF"),
    CommandRow("a broken NIfTI to predict", lambda w: predict(w, file=w.write("a.nii", "x" * 400)), r"cannot read .*a\.nii: it is not a NIfTI file"),
    CommandRow("a file that does not exist", lambda w: predict(w, file=w.folder / "no.png"), r"there is no file or folder .*no\.png: check the path"),
    CommandRow("a run that does not exist", lambda w: ["predict", w.folder / "no", w.good / "raw/images", "-o", w.out], "no is not a run folder"),
    CommandRow("a fold that was not trained", lambda w: [*predict(w), "--fold", "7"], "has no fold 7; its folds are 0, 1"),
    CommandRow("a threshold above 1", lambda w: [*predict(w), "--decide", "threshold:1.5"], r"must lie in \[0, 1\]; got 1.5"),
    CommandRow("mirrored images of a network without them", lambda w: [*predict(w, no_flip), "--flips"], "was trained with them.*augment.flip"),
    CommandRow("volumes.csv that is not a table", lambda w: predict_again(w, lambda path: path.write_bytes(b"\xff\xfe\x00")), r"volumes\.csv"),
    CommandRow("volumes.csv with other columns", lambda w: predict_again(w, lambda path: path.write_text("a\n1\n")), r"volumes\.csv"),
]

EVALUATE = [
    *(CommandRow(f"a stored prediction that {what}", lambda w, c=change: evaluate(w, c), message)
      for what, change, message in (
          ("is cut", lambda path: path.write_bytes(path.read_bytes()[:50]), r"scan002\.npz is not a complete stored prediction"),
          ("has flipped bytes", lambda path: path.write_bytes(path.read_bytes()[:90] + b"x" * 60 + path.read_bytes()[150:]), r"scan002\.npz is not a complete stored prediction"),
          ("has another array", lambda path: np.savez(path, a=np.ones(3)), "is not a complete stored prediction: .*no item named 'foreground"),
          ("holds a pickle", lambda path: np.savez(path, foreground=np.array([{}])), r"it holds shape \(1,\)"),
          ("holds floats", lambda path: np.savez(path, foreground=np.full((1, 32, 32), NAN)), "must hold uint16"),
          ("has another shape", lambda path: np.savez(path, foreground=np.zeros((1, 3, 3), np.uint16)), "made from another dataset; predict again"),
          ("is missing", lambda path: path.unlink(), r"there is no stored prediction .*scan002\.npz"),
      )),
    CommandRow("an unknown score to evaluate", lambda w: [*evaluate(w), "--metric", "dise_score"], "dise_score"),
    CommandRow("a table as text", lambda w: [*evaluate(w), "-o", w.folder / "x.txt"], r"a case table is a \.parquet or a \.csv file"),
    CommandRow("an unknown unit", lambda w: [*evaluate(w), "--unit", "voxel"], "--unit must be scan or slice; got 'voxel'"),
    CommandRow("a tolerance of NaN", lambda w: [*evaluate(w), "--tolerance", "nan"], "--tolerance"),
    CommandRow("a dataset that was deleted", lambda w: [*evaluate(w), "--dataset", w.folder / "no"], "there is no folder"),
    CommandRow("folds that are no JSON", lambda w: evaluate(w, lambda path: (path.parents[2] / "folds.json").write_text("x")), r"folds\.json does not hold folds of this semidice"),
    CommandRow("folds without numbers", lambda w: evaluate(w, lambda path: (path.parents[2] / "folds.json").write_text("{}")), r"folds\.json does not hold folds.*num_folds"),
    CommandRow("neither a run nor predictions", lambda w: ["evaluate"], "name a run folder, or --predictions DIR --dataset DATA"),
    CommandRow("predictions without a dataset", lambda w: ["evaluate", "--predictions", w.folder], "--predictions needs --dataset DATA"),
    CommandRow("no predictions", lambda w: evaluate_files(w, lambda name: None), "has no prediction of 6 scans .*name each file as its scan"),
    CommandRow("masks with a value that is no class", lambda w: evaluate_files(w, lambda path: picture(path, np.full((32, 32), 7))), r"scan000\.png holds 7; its values must be 0, 1, 255"),
    CommandRow("masks of another size", lambda w: evaluate_files(w, lambda path: picture(path, np.zeros((3, 32)))), r"scan000\.png has shape \(3, 32\).*resample it"),
    CommandRow("probabilities under another name", lambda w: evaluate_files(w, lambda path: np.savez(path.with_suffix(".npz"), a=np.ones(3))), r"scan000\.npz: it has no array probabilities or softmax"),
    CommandRow("probabilities as texts", lambda w: evaluate_files(w, lambda path: np.savez(path.with_suffix(".npz"), probabilities=np.array(["a"]))), "expected floating-point numbers"),
    CommandRow("probabilities that are cut", lambda w: evaluate_files(w, lambda path: path.with_suffix(".npz").write_bytes(b"PK\x03\x04")), r"cannot use .*scan000\.npz"),
]

CHECK = [
    *(CommandRow(f"a manifest with {key} {value}", lambda w, k=key, v=value: check(w, lambda record: record.update({k: v})), message)
      for key, value, message in (
          ("scans", [], "scans: Tuple should have at least 1 item"),
          ("scans", {}, r"manifest\.json is not a manifest of this semidice: scans"),
          ("version", 9, "version: Input should be 1"),
          ("class_names", ["a"], "class_names: Tuple should have at least 2 items"),
          ("raters", ["x"], "scan scan000 has raters"),
          ("extra", 1, "extra: Extra inputs are not permitted"),
      )),
    CommandRow("a scan name that leads out", lambda w: check(w, lambda record: record["scans"][0].update(name="../x")), "'../x' cannot be a file name"),
    CommandRow("a manifest that is no JSON", lambda w: ["check", broken(w.copy("data") / "manifest.json")], r"manifest\.json is not a manifest of this semidice: as a whole: Invalid JSON"),
    CommandRow("a manifest of brackets", lambda w: ["check", broken(w.copy("data") / "manifest.json", b"[" * 100_000)], "Invalid JSON: recursion limit"),
    CommandRow("a folder without a manifest", lambda w: ["check", w.folder], "is not a prepared dataset: make one from raw images with `semidice prepare"),
    CommandRow("raw images to check", lambda w: ["check", w.copy("raw")], "semidice prepare folder"),
]

DEVICES_AND_TABLES = [
    CommandRow("a device that does not exist", lambda w: [*predict(w)[:-1], "xyz"], "--device must be cpu or cuda; got 'xyz'"),
    *(CommandRow(f"{command[0]} into a text file", lambda w, c=command: [c[0], w.good / "run", *c[1:], "-o", w.folder / "a.txt"], rf"^semidice {command[0]}: a case table is a \.parquet or a \.csv file; got .*a\.txt")
      for command in (["evaluate"], ["calibrate", "--by", "isotonic"])),
    CommandRow("rules into a text file", lambda w: ["evaluate", w.good / "run", "--decide", "dice", "-o", w.folder / "a.txt"], r"^semidice evaluate: a case table is a \.parquet"),
    CommandRow("a recipe that would colour the terminal", lambda w: train(w, name="a\x1b[31mred", data__num_folds=9), r"^semidice train: (?!.*\x1b)"),
    CommandRow("an option that would colour the terminal", lambda w: train(w, **{"\x1b[31m": 1}), r"\\x1b\[31m"),
    CommandRow("a checkpoint of brackets", lambda w: predict(w, lambda run: rewrite(run / "fold_0/last.safetensors", {"progress": "[" * 100_000})), r"last\.safetensors is not a complete checkpoint .*nested too deeply"),
    CommandRow("a grid with a name that is no folder", lambda w: compare(w, "variants: {'[x] :b:': {}}"), r"'\[x\]_:b:' cannot be a file name: use letters"),
]

COMPARE = [
    CommandRow("a misspelt grid", lambda w: ["compare", w.good / "data", "labls", "-o", w.out], "neither a file nor a shipped grid or recipe labls: did you mean labels"),
    CommandRow("nothing to compare", lambda w: ["compare", w.good / "data", "-o", w.out], "name a grid or recipe, such as labels, or tables of scores with --cases"),
    CommandRow("a dataset that does not exist to compare", lambda w: ["compare", w.folder / "no", "labels", "-o", w.out], "there is no folder"),
    *(CommandRow(f"a grid with {what}", lambda w, t=text: compare(w, t), message)
      for what, text, message in (
          ("another dataset in a variant", "variants: {a: {data.dataset: other}}", r"grid\.yaml: data\.dataset has no effect in a grid, because it is the first argument of the command: leave it out"),
          ("another dataset for all", "set: {data.dataset: other}\nvariants: {a: {}}", "data.dataset has no effect in a grid"),
          ("a name in a variant", "variants: {a: {name: b}}", "name has no effect in a grid, because it is the name of the variant"),
          ("variants as a list", "variants: [a]", r"variants must be a mapping; got \['a'\]"),
          ("options as a list", "set: [1]\nvariants: {a: {}}", r"set must be a mapping; got \[1\]"),
          ("a variant that is a number", "variants: {a: 3}", "variant a must be a mapping of options; got 3"),
          ("a recipe that is a list", "variants: {a: {recipe: [1]}}", r"recipe must be a file or a shipped name; got \[1\]"),
          ("a recipe that does not exist", "variants: {a: {recipe: quik}}", "variant a: there is neither a file nor a shipped recipe quik"),
          ("a number as option", "variants: {a: {1: 2}}", "variant a: --set 1=2: no such option"),
          ("a list of teachers", "variants: {a: {teacher.run: [b]}}", r"teacher\.run must be a variant or a folder; got \['b'\]"),
          ("a variant that teaches itself", "variants: {a: {teacher.run: a}}", "no variant of a can be trained first"),
          ("a name that leads out", "variants: {..: {}}", "'..' cannot be a file name"),
          ("a variant twice", "variants: {a: {}, a: {}}", "key 'a' occurs twice"),
          ("an unknown key", "sets: {}\nvariants: {a: {}}", "a grid has the keys recipe, set, seeds and variants; got sets"),
          ("no seed", "seeds: 0\nvariants: {a: {}}", r"grid\.yaml: seeds must be the number of trainings, 1 to 1000; got 0"),
          ("a list of seeds", "seeds: [1, 2]\nvariants: {a: {}}", r"seeds must be the number of trainings, 1 to 1000; got \[1, 2\]"),
          ("a share of a seed", "seeds: 1.5\nvariants: {a: {}}", "seeds must be the number of trainings, 1 to 1000; got 1.5"),
          ("seeds that are true", "seeds: yes\nvariants: {a: {}}", "seeds must be the number of trainings, 1 to 1000; got (True|'yes')"),
          ("different first seeds", "seeds: 2\nvariants: {a: {}, b: {seed: 4}}", "several seeds start with different ones: a 0, b 4; give all the same option seed"),
          ("no variant", "variants: {}", "one variant or more"),
      )),
    CommandRow("an override of the dataset", lambda w: [*compare(w, "variants: {a: {}}"), "--set", "data.dataset=x"], "--set data.dataset=x: data.dataset is the first argument of the command"),
    CommandRow("no seed to compare", lambda w: [*compare(w, "variants: {a: {}}"), "--seeds", "0"], "--seeds"),
    CommandRow("too many seeds to compare", lambda w: [*compare(w, "variants: {a: {}}"), "--seeds", "100000"], "--seeds must be the number of trainings, 1 to 1000; got 100000"),
    CommandRow("an unknown score to compare", lambda w: [*compare(w, "variants: {a: {}}"), "--metric", "dise_score"], "^semidice compare: there is no score 'dise_score'; did you mean dice_score"),
    CommandRow("an unknown engine", lambda w: [*compare(w, "variants: {a: {}}"), "--on", "slurm"], "^semidice compare: --on slurm: expected local:N with a number of processes, local:auto, ray or ray:ADDRESS"),
    CommandRow("an engine for folds of several GPUs", lambda w: ["nnunet", "train", "Dataset101_Nodules", "2d", "0", "--num-gpus", "3", "--on", "local:2"], "^semidice nnunet train: --on local:2 trains each fold on one GPU, but --num-gpus is 3: leave out one of them"),
    CommandRow("an engine without workers", lambda w: [*compare(w, "variants: {a: {}}"), "--on", "local:0"], "--on local:0: expected local:N"),
    CommandRow("a job of another grid", lambda w: [*compare(w, "variants: {a: {}}"), "--job", "b:0"], "--job b:0: expected NAME:FOLD; the jobs of this grid are a:0, a:1"),
    CommandRow("a table that does not exist", lambda w: ["compare", w.good / "data", "-o", w.out, "--cases", w.folder / "no.csv"], r"there is no case table .*no\.csv: write it with `semidice evaluate"),
    CommandRow("a table with other columns to compare", lambda w: ["compare", w.good / "data", "-o", w.out, "--cases", w.write("t.csv", "a,b\n")], r"t\.csv must have the columns"),
    CommandRow("a table of percentages to compare", lambda w: ["compare", w.good / "data", "-o", w.out, "--cases", w.write("t.csv", "case,patient,fold,method,class,metric,value\nscan000,p,0,m,mean,dice_score,87\n")], r"t\.csv: dice_score .*is 87 .*divide percentages by 100"),
]

OTHERS = [
    CommandRow("an export to an unknown format", lambda w: ["export", w.good / "run", "-o", w.folder / "model.tflite"], r"exported to a file with \.onnx or \.pt2; got .*model\.tflite"),
    CommandRow("an export of a fold that does not exist", lambda w: ["export", w.good / "run", "--fold", 7, "-o", w.folder / "model.pt2"], "has no fold 7; its folds are 0, 1"),
    CommandRow("an export with a size of one number", lambda w: ["export", w.good / "run", "-o", w.folder / "model.pt2", "--size", "256"], "--size must be ROWSxCOLUMNS, such as 256x256; got '256'"),
    CommandRow("a logger that does not exist", lambda w: ["train", "quick", "--log", "mlfow"], "there is no logger 'mlfow'; there are mlflow, wandb"),
    CommandRow("a report of nothing", lambda w: ["report", w.folder / "no"], "there is no folder .*no: name a run folder"),
    CommandRow("a report of a dataset", lambda w: ["report", w.good / "data"], r"neither a run folder nor a folder of run folders.*recipe\.yaml"),
    CommandRow("a report of a run that is not finished", lambda w: ["report", w.good / "run", "-o", w.folder / "r.html"], "is not finished: continue with `semidice train --resume`"),
    CommandRow("a table that the paper does not have", lambda w: ["reproduce", "qubiq_lables"], "the paper has no table 'qubiq_lables'; choose one of"),
    CommandRow("a task that the paper does not have", lambda w: ["reproduce", "qubiq_labels", "--task", "x", "--data", w.folder], "unknown task x; choose from"),
    CommandRow("a protocol that does not exist", lambda w: ["reproduce", "--protocol", "x", "--list"], "unknown protocol 'x'; choose from text, authors"),
    CommandRow("a file where the demo writes", lambda w: ["demo", "-o", w.write("taken", "x")], "taken: File exists"),
    CommandRow("a demo of one case", lambda w: ["demo", "--cases", "1"], "Invalid value for '--cases'"),
    CommandRow("an unknown command", lambda w: ["trian"], "No such command 'trian'"),
]
# fmt: on
COMMANDS = [*TRAIN, *PREPARE, *PREDICT, *EVALUATE, *CHECK, *DEVICES_AND_TABLES, *COMPARE, *OTHERS]


def train(work: Workspace, *overrides: str, **changes: object) -> list:
    """A training of one epoch with a small network; changes: of the recipe, with __ between the levels."""
    recipe: dict = {
        "data": {"dataset": str(work.good / "data"), "num_folds": 2},
        "model": {"architecture": "small_unet", "encoder": "none", "weights": "none"},
        "schedule": {"epochs": 1},
        "batch_size": 2,
    }
    if not any(override.startswith("model.architecture") for override in overrides):
        recipe["model"]["options"] = {"channels": [8, 16], "norm": "group"}
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = recipe
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    path = work.write("recipe.yaml", yaml.safe_dump(recipe))
    sets = [part for override in overrides for part in ("--set", override)]
    return ["train", path, "-o", work.out, "--accelerator", "cpu", *sets]


def prepare(
    work: Workspace, change: Callable[[Path], object] = lambda raw: None, source: str = "raw"
) -> list:
    raw = work.copy(source)
    change(raw)
    return ["prepare", "folder", raw, work.out, "--workers", "1"]


def predict(
    work: Workspace, change: Callable[[Path], object] = lambda run: None, file: Path | None = None
) -> list:
    run = work.copy("run")
    change(run)
    return ["predict", run, file or work.good / "raw/images/case1.png", "-o", work.out, "--device", "cpu"]


def predict_again(work: Workspace, change: Callable[[Path], object]) -> list:
    """A prediction into a folder whose volumes.csv was changed."""
    first = predict(work)
    assert run_command(first)[0] == 0
    change(work.out / "volumes.csv")
    return [*first[:2], work.good / "raw/images/case2.png", *first[3:]]


def evaluate(work: Workspace, change: Callable[[Path], object] = lambda path: None) -> list:
    """An evaluation of a run; change: of a stored prediction."""
    run = work.copy("run")
    change(run / "fold_0/predictions/scan002.npz")
    return ["evaluate", run]


def evaluate_files(work: Workspace, write: Callable[[Path], object]) -> list:
    """An evaluation of files; write: called with the PNG of each scan."""
    folder = work.folder / "files"
    folder.mkdir()
    for number in range(6):
        write(folder / f"scan{number:03d}.png")
    return [
        "evaluate", "--predictions", folder, "--dataset", work.good / "data", "-o", work.folder / "t.csv",
    ]  # fmt: skip


def check(work: Workspace, change: Callable[[dict], object]) -> list:
    path = work.copy("data") / "manifest.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return ["check", path.parent, "-o", work.folder / "sheet.png"]


def compare(work: Workspace, grid: str) -> list:
    path = work.write("grid.yaml", f"recipe: quick\n{grid}\n")
    return ["compare", work.good / "data", path, "-o", work.out, "--set", "schedule.epochs=1"]


def cut(name: str, share: float) -> Callable[[Path], object]:
    """Keep only this share of a file."""
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: int((folder / name).stat().st_size * share)]
    )


def flip(name: str, share: float) -> Callable[[Path], object]:
    """Flip the byte at this share of a file."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(len(content) * share)] ^= 0xFF
        (folder / name).write_bytes(bytes(content))

    return change


def broken(path: Path, content: bytes = b"\xff\x00") -> Path:
    path.write_bytes(content)
    return path.parent


def cases(text: str) -> Callable[[Path], object]:
    names = [f"case{number}" for number in range(1, 5)]
    return lambda raw: (raw / "cases.csv").write_text(text.format(*names))


def classes(rows: str) -> Callable[[Path], object]:
    return lambda raw: (raw / "classes.csv").write_text(f"value,name\n{rows}")


def picture(path: Path, values: np.ndarray) -> None:
    Image.fromarray(values.astype(np.uint8)).save(path)


def half_png(raw: Path) -> None:
    """A PNG with the height of the whole image and the rows of its upper half; all checksums are right."""
    path = raw / "images/case1.png"
    upper = raw / "upper.png"
    with Image.open(path) as image:
        image.crop((0, 0, image.width, image.height // 2)).save(upper)
    content, whole = bytearray(upper.read_bytes()), path.read_bytes()
    # the header, with its checksum, is at bytes 12 to 33
    content[12:33] = whole[12:33]
    upper.unlink()
    path.write_bytes(bytes(content))


def colour(raw: Path) -> None:
    picture(raw / "images/case2.png", np.random.default_rng(0).integers(0, 255, (40, 36, 3)))


def colour_mask(raw: Path) -> None:
    picture(raw / "raters/a/case1.png", np.random.default_rng(0).integers(0, 2, (40, 36, 3)) * 255)


def alpha(raw: Path) -> None:
    path = raw / "raters/a/case1.png"
    with Image.open(path) as mask:
        values = np.zeros((*np.array(mask).shape, 4))
        values[..., 3] = np.array(mask)
    picture(path, values)


def pages(raw: Path) -> None:
    """Replace image and masks of case 2 by volumes of three slices."""
    for path in [raw / "images/case2.png", *raw.glob("raters/*/case2.png")]:
        with Image.open(path) as image:
            image.save(path.with_suffix(".tif"), save_all=True, append_images=[image.copy(), image.copy()])
        path.unlink()


def volume(path: Path, values: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.diag([0.7, 0.8, 2.5, 1.0])), path)
    return path


def with_time(raw: Path) -> None:
    path = raw / "images/case1.nii.gz"
    volume(path, np.random.default_rng(0).random((40, 36, 6, 2)))


def time_series(work: Workspace) -> Path:
    return volume(work.folder / "time.nii.gz", np.random.default_rng(0).random((8, 9, 3, 2)))


def side(name: str, length: float) -> Callable[[Path], object]:
    """Write a third side of the voxel into the header of a NIfTI."""

    def change(raw: Path) -> None:
        content = bytearray(gzip.decompress((raw / name).read_bytes()))
        content[88:92] = np.float32(length).tobytes()
        (raw / name).write_bytes(gzip.compress(bytes(content)))

    return change


def nnunet_header(work: Workspace, text: str) -> Path:
    raw = work.folder / "nnunet"
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True)
    (raw / "dataset.json").write_text(text)
    return raw


def unzip(path: Path) -> None:
    path.write_bytes(gzip.decompress(path.read_bytes()))


def rewrite(path: Path, metadata: dict[str, str] | None, change: Callable[[dict], object] = dict) -> None:
    """Write a checkpoint again with other metadata and changed tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def nan_weights(run: Path) -> None:
    path = run / "fold_0/last.safetensors"
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
    # without the digest, as an older semidice wrote it
    del progress["digest"]
    metadata = {"progress": json.dumps(progress)}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        next(tensor for tensor in tensors.values() if tensor.is_floating_point()).fill_(NAN)

    rewrite(path, metadata, change)


def facts(**changes: object) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        path = run / "dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def no_flip(run: Path) -> None:
    path = run / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["augment"]["flip"] = False
    path.write_text(yaml.safe_dump(recipe))
