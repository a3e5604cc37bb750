"""Mistakes of users, one row per kind: the words of its message that name the thing and the way out.

A command ends with code 1 or 2 and one message; a function of the library raises a ValueError.
"""

import json
import shutil
from functools import partial
from math import nan
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from case_rows import CaseRow, table_of
from laws import class_map, random_logits, soft_label
from PIL import Image
from prepared import make_prepared
from raw_trees import AFFINE, make_folder, write_nifti
from start import refused, semidice
from trained import make_run, recipe_of

from semidice import calibration, decisions, labels, losses, metrics, statistics

# commands in a folder with data, run, raw and volumes; none has a folder out
COMMANDS = {
    "an unknown command": ("trian", "trian"),
    "a misspelt recipe": ("train quik -o out", "quik", "did you mean quick"),
    "a grid to train": ("train labels -o out", "labels is a grid", "semidice compare"),
    "a recipe without a dataset": ("train quick -o out", "data.dataset", "--set data.dataset="),
    "an unknown logger": ("train tiny.yaml -o out --log mlfow", "mlfow", "did you mean mlflow"),
    "a run in a folder of images": ("train tiny.yaml -o raw", "raw", "not a run folder", "--out"),
    "an unknown accelerator": ("train tiny.yaml -o out --accelerator tpux", "--accelerator tpux"),
    "an unknown layout": ("prepare foldr raw out", "foldr", "folder"),
    "a size of one number": ("prepare folder raw out --size 256", "--size", "256x256"),
    "a window upside down": ("prepare folder raw out --window 2 1", "window", "lower value first"),
    "raw images to check": ("check raw", "raw", "semidice prepare folder"),
    "no run": ("predict no raw/images -o out", "no is not a run folder"),
    "no input": ("predict run no.png -o out", "no.png", "check the path"),
    "a text as input": ("predict run tiny.yaml -o out", "tiny.yaml", "unknown format"),
    "output among the input": ("predict run raw/images -o raw/images", "raw/images", "choose another folder"),
    "a fold that was not trained": ("predict run raw/images -o out --fold 7", "fold 7", "0, 1"),
    "an unknown rule": ("predict run raw/images -o out --decide dise", "dise", "did you mean dice"),
    "a threshold in percent": ("predict run raw/images -o out --decide threshold:40", "threshold", "[0, 1]"),
    "a level in percent": ("predict run raw/images -o out --interval 90", "--interval", "between 0 and 1"),
    "a rule to fit first": ("predict run raw/images -o out --decide fitted", "semidice evaluate run"),
    "an unknown device": ("predict run raw/images -o out --device xyz", "--device", "cpu or cuda"),
    "nothing to evaluate": ("evaluate", "run folder", "--predictions"),
    "an unknown score": ("evaluate run --metric dise_score", "dise_score", "dice_score"),
    "scores as a text": ("evaluate run -o scores.txt", "scores.txt", ".csv"),
    "a tolerance of NaN": ("evaluate run --tolerance nan", "--tolerance"),
    "an endless tolerance": ("evaluate run --tolerance inf", "--tolerance", "inf"),
    "a dataset that was moved": ("evaluate run --dataset no", "there is no no", "semidice prepare"),
    "an unknown calibrator": ("calibrate run --by temprature", "--by", "did you mean temperature"),
    "an unknown file to export": ("export run -o model.tflite", "model.tflite", ".onnx"),
    "nothing to compare": ("compare data -o out", "name a grid", "--cases"),
    "a misspelt grid": ("compare data labls -o out", "labls", "did you mean labels"),
    "the dataset twice": ("compare data labels -o out --set data.dataset=x", "first argument"),
    "an unknown rule to compare": ("compare data labels -o out --decide dise", "did you mean dice"),
    "an unknown engine": ("compare data labels -o out --on slurm", "--on slurm", "local:N"),
    "no table": ("compare data -o out --cases no.csv", "no.csv", "semidice evaluate"),
    "another table": ("compare data -o out --cases other.csv", "other.csv", "columns"),
    "a table of percentages": ("compare data -o out --cases percent.csv", "percent.csv", "by 100"),
    "a report of a dataset": ("report data", "data", "run folder"),
    "a report of an open run": ("report open -o out", "open", "train --resume"),
    "an unknown label for nnU-Net": ("nnunet train Dataset101_A 2d 0 --label meen", "--label", "mean"),
    "a wrong name for nnU-Net": ("nnunet export data Nodules --work out", "Nodules", "Dataset101_Nodules"),
}
# train tiny.yaml --set OPTION
OPTIONS = {
    "an unknown option": ("loss.fom=min", "loss.fom", "did you mean loss.form"),
    "a rate of NaN": ("optimiser.lr=.nan", "optimiser.lr", "number"),
    "more folds than patients": ("data.num_folds=4", "4 patients", "lower num_folds"),
    "an option without effect": ("label.eps=0.3", "label.eps", "no effect", "label.smoothing"),
    "a rater too many": ("label.raters=[0,9]", "label.raters", "10 raters"),
    "a negative weight of false positives": ("loss.alpha=-0.3", "loss.alpha", "at least 0"),
    "an unknown score": ("validation.metrics=[dise_score]", "dise_score", "did you mean dice_score"),
    "an unknown option of a network": ("model.options.depth=3", "small_unet", "depth"),
    "an unknown network": ("model.architecture=unett", "unett", "did you mean unet"),
    "a crop that no network takes": ("augment.crop=[30,30]", "augment.crop", "multiples of 32"),
    "a batch that cannot be cut": ("optimiser.accumulate=3", "batch_size", "optimiser.accumulate 3"),
    "a teacher of other folds": ("teacher.run=three", "other folds", "data.num_folds"),
    "no teacher": ("teacher.run=nowhere", "teacher", "nowhere", "train it first"),
    "an option without its section": ("form=min", "did you mean loss.form"),
    "a fold twice": ("data.folds=[1, 1]", "data", "folds must be different numbers", "[1, 1]"),
    "nothing to learn": ("loss={cross_entropy_weight: 0, region_weight: 0}", "nothing would be learned"),
    "three weights for two classes": ("loss.class_weight=[1,2,3]", "class_weight", "2 classes"),
    "a folder that is no dataset": ("data.dataset=raw", "raw", "semidice prepare"),
}
GREY, NOISE = np.arange(1440).reshape(40, 36) % 200, np.random.default_rng(0).normal(size=(40, 36, 6, 2))
VOLUME, COLOUR = NOISE[..., 0], np.stack([GREY, GREY, 0 * GREY], -1)
MOVED = VOLUME > 0, 2 * AFFINE
ROWS = "".join(f"scan000,patient000,0,{method},mean,dice_score,0.5\n" for method in "ab")
GRID, CASES = "recipe: quick\nvariants: ", "case,patient\ncase1,a\ncase2,b\ncase3,c\n"
# a file in such a folder and its content, None if it is removed; the command that then reads it
FILES = {
    "train my.yaml -o out": {
        "code in a recipe": ("my.yaml", "data: !!python/object/apply:os.getcwd []", "my.yaml", "not YAML"),
        "a key twice": ("my.yaml", "name: a\nname: b", "line 2", "occur twice"),
    },
    "compare data my.yaml -o out": {
        "a misspelt option": ("my.yaml", GRID + "{a: {loss.fom: min}}", "variant a", "loss.form"),
        "a variant that teaches itself": ("my.yaml", GRID + "{a: {teacher.run: a}}", "a", "as its teacher"),
        "a variant that leads out": ("my.yaml", GRID + "{..: {}}", "'..'", "use letters"),
        "two variants in one folder": ("my.yaml", GRID + "{a + b: {}, a_b: {}}", "two variants", "rename"),
        "an unknown key": ("my.yaml", GRID + "{a: {}}\nsets: {}", "my.yaml", "sets"),
        "no seed": (
            "my.yaml",
            "seeds: 0\n" + GRID + "{a: {}}",
            "my.yaml",
            "seeds",
            "greater than or equal to 1",
        ),
    },
    "compare data -o out --cases my.csv": {
        "a table of one case": (
            "my.csv",
            "case,patient,fold,method,class,metric,value\n" + ROWS,
            "two or more",
        ),
    },
    "prepare folder raw out --workers 1": {
        "a picture of another kind": ("raw/images/case9.jpg", "x", "case9.jpg", "convert it"),
        "a picture in colour": ("raw/images/case2.png", COLOUR, "case2.png", "3 channels"),
        "a picture without masks": ("raw/raters/*/case1.png", None, "image", "case1.png has no mask"),
        "a mask without a picture": ("raw/images/case1.png", None, "has no image", "case1"),
        "two pictures of a case": ("raw/images/case1.tif", GREY, "'case1' has two files"),
        "a mask in colour": ("raw/raters/a/case1.png", COLOUR > 99, "a/case1.png", "one grey value"),
        "a mask with soft edges": ("raw/raters/a/case1.png", GREY, "a/case1.png", "threshold them"),
        "a mask of another size": ("raw/raters/a/case1.png", GREY[:20] > 9, "(20, 36)", "resample"),
        "a comma in a name": ("raw/cases.csv", CASES + "case4,Doe, John", "line 5", "in quotes"),
        "two spellings of a patient": ("raw/cases.csv", CASES + "case4,A", "'a' and 'A'", "spelling"),
        "a case of two patients": ("raw/cases.csv", CASES + "case3,d", "'case3' twice", "keep one row"),
        "a case without a row": ("raw/cases.csv", CASES, "'case4'", "add one"),
        "a negative class": ("raw/classes.csv", "value,name\n-1,a", "'-1'", "whole numbers"),
    },
    "prepare folder volumes out --workers 1": {
        "a volume with time": ("volumes/images/case1.nii.gz", (NOISE,), "(40, 36, 6, 2)", "3 spatial axes"),
        "a volume with NaN": ("volumes/images/case1.nii.gz", (VOLUME * nan,), "case1.nii.gz", "holds NaN"),
        "a mask of fractions": ("volumes/raters/a/case1.nii.gz", (VOLUME,), "a/case1.nii.gz", "threshold it"),
        "a mask elsewhere": ("volumes/raters/a/case1.nii.gz", MOVED, "not aligned", "--ignore-placement"),
    },
    "evaluate --predictions masks --dataset data -o out.csv": {
        "a scan without a mask": ("masks/scan000.png", None, "no prediction of 1 scan", "--skip-missing"),
        "a value that is no class": ("masks/scan000.png", GREY, "scan000.png", "0, 1, 255"),
        "a mask of another grid": ("masks/scan000.png", GREY[:20], "(20, 36)", "resample"),
        "two masks of a scan": ("masks/scan000.tif", 0 * GREY, "two predictions", "leave one"),
    },
    "evaluate --predictions prob --dataset data -o out.csv": {
        "logits": ("prob/scan000.npz", np.stack([GREY, -1.0 * GREY]), "scan000.npz", "apply softmax"),
        "probabilities that sum to 1.8": ("prob/scan000.npz", np.full((2, 40, 36), 0.9), "sum to one", "1.8"),
        "another class": ("prob/scan000.npz", np.full((3, 40, 36), 1 / 3), "(3, 40, 36)", "(2, 40, 36)"),
    },
    "predict run raw/images -o out --device cpu": {
        "a run without a recipe": ("run/recipe.yaml", None, "run is not a run folder", "recipe.yaml"),
        "no weights": ("run/fold_1/last.safetensors", None, "fold 1", "train --resume"),
        "two results of one name": ("raw/images/case1.tif", GREY, "case1.tif", "overwrite each other"),
        "a table of another tool": (
            "out/volumes.csv",
            "name,litres\n",
            "volumes.csv",
            "choose another folder",
        ),
    },
    "evaluate run": {
        "no stored prediction": ("run/fold_0/predictions/*", None, "scan", "removed", "train"),
    },
}

PROB, LOGITS, INDEX = soft_label(2, 3, 4, 5), random_logits(2, 3, 4, 5), class_map((2, 4, 5), 3)
ONE_HOT = torch.nn.functional.one_hot(INDEX, 3).movedim(-1, 1)
ONE, COARSE, MASKS = PROB[:, :1], LOGITS[:, :, ::2, ::2], random_logits(3, 4, 5) > 0
LABEL = labels.mean_label(MASKS)
mixture, distil = losses.SegmentationLoss, losses.DistillationLoss
teacher = partial(losses.Teacher, torch.nn.Conv2d(1, 3, 1))
KDE, TEMPERATURE = (losses.TeacherCalibration(name) for name in ("kde", "temperature"))
bootstrap, beta = statistics.paired_test, calibration.BetaCalibrator
KEYS = calibration.Keys(PROB[:1, :, 0].mT, ONE_HOT[:1, :, 0].mT.float())
recalibrate = partial(calibration.kde_recalibrate, keys=KEYS, bandwidth=0.1)
volume_error, hausdorff = metrics.volume_error_ml, metrics.hausdorff_error_mm


def dice(target, prediction=PROB, **options):
    return losses.dice_loss(prediction, target, **options)


def table(*changes):
    row = CaseRow("c0", "p0", 0, "a", "mean", "dice_score", 0.5)
    return table_of([row._replace(**change) for change in changes])


def compared(*changes, metric="dice_score"):
    return statistics.compare_cases(table(*changes), metric)


def interval(**changes):
    ones = np.ones((12, 1))
    good = {"low": ones, "high": ones, "expected": ones, "patients": list("abcdefghijkl")} | changes
    patients = good.pop("patients")
    return decisions.fit_conformal(decisions.Intervals(**good), np.ones((12, 1, 2)), patients)


FUNCTIONS = {
    # options of losses
    "alpha of NaN": (lambda: losses.TverskyLoss(alpha=nan, beta=1), "alpha", "number, at least 0"),
    "alpha and beta 0": (lambda: losses.TverskyLoss(alpha=0, beta=0), "alpha and beta", "greater than 0"),
    "alpha unlike beta": (lambda: losses.TverskyLoss(alpha=0, beta=1, form="squared"), "alpha = beta"),
    "a form of another library": (lambda: losses.DiceLoss(form="soft"), "form", "min", "'soft'"),
    "two weights for three classes": (lambda: dice(INDEX, class_weight=[1, 2]), "class_weight", "3 classes"),
    "no class left": (lambda: dice(ONE, ONE, background=False), "background=False leaves no class"),
    "no term with a weight": (lambda: mixture(cross_entropy_weight=0, region_weight=0), "nothing would be"),
    # predictions and targets
    "logits as probabilities": (lambda: dice(PROB, LOGITS), "[0, 1]", "softmax"),
    "logits of NaN": (lambda: mixture()(LOGITS * nan, INDEX), "prediction", "NaN"),
    "softmax of one channel": (lambda: mixture()(ONE, ONE), "one channel", "activation='sigmoid'"),
    "an empty batch": (lambda: dice(INDEX[:0], PROB[:0]), "prediction is empty"),
    "a target of another size": (lambda: dice(PROB[..., 1:]), "differ in shape", "(2, 3, 4, 4)"),
    "a target above one": (lambda: dice(2 * PROB), "target must lie in [0, 1]"),
    "NaN in a target": (lambda: dice(PROB * nan), "target must lie in [0, 1]", "nan"),
    "a label that sums to 2.7": (lambda: mixture()(LOGITS, 0 * PROB + 0.9), "sum to one", "2.7", "sigmoid"),
    "masks of 0 and 255": (lambda: dice(255 * ONE_HOT), "0 and 1", "0 to 255"),
    "integer masks that overlap": (lambda: dice((PROB > 0.2).long()), "one-hot", ".float()"),
    "a bool class map": (lambda: dice(INDEX > 0), "bool (2, 4, 5)", ".long()"),
    "a float class map": (lambda: dice(INDEX.float()), "class axis", ".long()"),
    "a class too many": (lambda: dice(INDEX + 1), "1 to 3", "there are 3 classes", "ignore_index"),
    "class numbers for a sigmoid": (lambda: dice(INDEX, activation="sigmoid"), "one mask per channel"),
    "ignore_index of a soft label": (lambda: dice(PROB, ignore_index=0), "ignore_index=0", "valid="),
    "an index that bytes cannot hold": (lambda: dice(INDEX.byte(), ignore_index=-1), "-1", "target.long()"),
    "a fractional valid": (lambda: dice(INDEX, valid=PROB[:, 0]), "valid must be bool", "float32"),
    # several outputs, and a teacher
    "the coarse output first": (lambda: mixture()([COARSE, LOGITS], INDEX), "finest first", "reverse"),
    "a coarse target": (lambda: mixture()([LOGITS, COARSE], INDEX[:, ::2, ::2]), "finer than the target"),
    "a list of targets": (lambda: mixture()([LOGITS, COARSE], [INDEX, INDEX]), "target must be a tensor"),
    "classes of a teacher": (lambda: distil()(LOGITS, INDEX, INDEX), "teacher_prob", "Teacher"),
    "no target of a teacher": (lambda: teacher(KDE)(ONE), "kde", "needs the target"),
    "a density of sigmoids": (lambda: teacher(KDE, activation="sigmoid")(ONE, PROB), "exclude"),
    "a name as calibration": (lambda: teacher("kde"), "'kde'", "TeacherCalibration"),
    "a temperature that none fitted": (lambda: teacher(TEMPERATURE), "temperature=NUMBER"),
    "a temperature of zero": (lambda: losses.TeacherCalibration("temperature", 0), "above 0", "got 0"),
    # labels of raters
    "probabilities as masks": (lambda: labels.mean_label(PROB), "masks", "use masks > 0.5"),
    "masks with 255": (lambda: labels.mean_label(MASKS.byte() * 255), "0 to 255", "use masks > 0"),
    "class maps without a number": (lambda: labels.mean_label(INDEX), "masks", "num_classes="),
    "a class beyond the last": (lambda: labels.mean_label(INDEX + 1, num_classes=3), "1 to 3", "3 classes"),
    "numbers as present": (lambda: labels.mean_label(MASKS, present=np.ones(3)), "present", "bool"),
    "a case without a rater": (lambda: labels.mean_label(MASKS, present=[False] * 3), "leave out"),
    "half a label": (lambda: labels.smooth_label(LABEL / 2, eps=0.1), "label must sum to one", "batched"),
    # scores
    "overlapping masks of a score": (lambda: metrics.dice_score(PROB, PROB.ceil()), "prob > 0.5"),
    "channels that may overlap": (
        lambda: metrics.soft_dice_score(PROB / 2, INDEX),
        "softmax",
        "threshold:0.5",
    ),
    "no class axis": (lambda: metrics.dice_score(PROB[:, 0], PROB[:, 0]), "unsqueeze(1)"),
    "a soft target": (lambda: metrics.dice_score(PROB, PROB), "needs a hard target", "majority_label"),
    "raters without classes": (
        lambda: metrics.rater_dice_score(ONE, 255 * INDEX[:, None]),
        "0 to 510",
        "masks > 0",
    ),
    "raters of another size": (lambda: metrics.rater_dice_score(ONE, MASKS[:2, None, 1:]), "differ"),
    "a surface of three sides": (lambda: hausdorff(PROB, INDEX, spacing_mm=(1, 1, 1)), "2 positive sides"),
    "a voxel without thickness": (lambda: volume_error(PROB, INDEX, spacing_mm=(1, 1)), "slice thickness"),
    "a voxel of NaN mm": (lambda: volume_error(PROB, INDEX, spacing_mm=(1, 1, nan)), "three positive sides"),
    "a score without a direction": (lambda: metrics.higher_is_better("hd95"), "hd95", "_score or _error"),
    "differences of NaN": (lambda: bootstrap(np.array([[nan], [1]])), "not finite", "leave such cases out"),
    "one patient": (lambda: bootstrap(np.ones((1, 1))), "two or more cases or patients", "got 1"),
    "patients of other cases": (lambda: bootstrap(np.ones((5, 1)), groups=["a"]), "one name per case"),
    "a score twice": (lambda: table({}, {"value": 0.4}), "c0", "twice"),
    "a case of two patients": (lambda: table({}, {"method": "b", "patient": "q"}), "c0", "patient q"),
    "a case in two folds": (lambda: table({}, {"metric": "iou_score", "fold": 1}), "c0", "fold 1"),
    "a case that one method lacks": (lambda: compared({}, {"case": "c1", "method": "b"}), "drop=True"),
    "seeds in no other method": (lambda: compared({"seed": 0}, {"method": "b", "seed": 1}), "same seeds"),
    "a score that was not made": (lambda: compared({}, metric="hd95"), "hd95", "it has metrics dice_score"),
    # calibration and decisions
    "a calibrator without data": (lambda: beta().calibrate(PROB), "seen no data"),
    "a calibrator of a mask": (lambda: beta().fit(ONE, ONE).calibrate(PROB), "fitted to", "got 3"),
    "a calibrator of logits": (lambda: beta().fit(LOGITS, INDEX), "[0, 1]"),
    "half of the probabilities": (lambda: recalibrate(PROB / 2), "prob must sum to one"),
    "keys of other classes": (lambda: recalibrate(PROB[:, 1:] / PROB[:, 1:].sum(1, True)), "(1, K, 2)"),
    "class indices of keys": (
        lambda: recalibrate(PROB, keys=KEYS._replace(label=INDEX[:1, 0])),
        "keys.label",
    ),
    "keys below zero": (lambda: recalibrate(PROB, keys=KEYS._replace(weight=-ONE[:1, 0, 0])), "0 or more"),
    "a region of other points": (lambda: recalibrate(PROB, region=INDEX[:1] > 0), "region", "(2, 4, 5)"),
    "other points than keys": (lambda: recalibrate(PROB, leave_one_out=True), "as many points as keys"),
    "a key of class -1": (lambda: calibration.draw_keys(PROB, INDEX - 1, 2), "-1 to 1"),
    "a rule of logits": (lambda: decisions.decide(LOGITS, "dice"), "[0, 1]"),
    "no case to fit": (lambda: decisions.fit_decision([]), "no case"),
    "low above high": (lambda: interval(low=2 * np.ones((12, 1))), "0 <= low <= high"),
    "too few patients": (lambda: interval(patients=["a"] * 12), "9 patients", "got 1"),
}


@pytest.fixture(autouse=True)
def _no_checked_annotations(monkeypatch):
    # a user has no checked annotations, and so must get the messages of the functions themselves
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of good inputs; rows change a copy of it."""
    good = tmp_path_factory.mktemp("good")
    dataset = make_prepared(good / "data", size=(40, 36))
    make_run(good / "run", dataset)
    make_run(good / "open", dataset, finished=[0])
    make_run(good / "three", dataset, num_folds=3, scored=False)
    make_folder(good / "raw", num_cases=4)
    make_folder(good / "volumes", num_cases=3, suffix=".nii.gz", volumes=True)
    recipe = recipe_of(dataset).model_dump(mode="json", exclude_none=True)
    put(good / "tiny.yaml", json.dumps(recipe | {"data": {"dataset": "data", "num_folds": 2}}))
    put(good / "other.csv", "a,b\n")
    put(good / "percent.csv", "case,method,metric,value\nscan000,m,dice_score,87\n")
    for number in range(6):
        put(good / f"masks/scan{number:03d}.png", 0 * GREY)
        put(good / f"prob/scan{number:03d}.npz", np.full((2, 40, 36), 0.5))
    return good


def put(path, content):
    """Write a file in the format of its suffix; without content, remove all files of a pattern."""
    path.parent.mkdir(exist_ok=True)
    if content is None:
        for file in Path().glob(str(path)):
            file.unlink()
    elif isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".npz":
        np.savez(path, probabilities=content)
    elif ".nii" in path.name:
        write_nifti(path, np.float32(content[0]), *content[1:])
    else:
        Image.fromarray(content.astype(np.uint8)).save(path)


@pytest.fixture
def work(good, tmp_path, monkeypatch):
    """A copy of the good inputs, as the current folder."""
    monkeypatch.chdir(shutil.copytree(good, tmp_path / "work"))


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("what", COMMANDS)
def test_a_wrong_command_says_what_is_wrong_and_writes_nothing(what):
    command, *words = COMMANDS[what]
    refused(semidice(*command.split()), *words)
    assert not Path("out").exists()


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("what", OPTIONS)
def test_a_wrong_option_is_named(what):
    option, *words = OPTIONS[what]
    refused(semidice("train", "tiny.yaml", "-o", "out", "--accelerator", "cpu", "--set", option), *words)


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(("command", "what"), [(each, what) for each, rows in FILES.items() for what in rows])
def test_a_file_that_cannot_be_used_is_named(command, what):
    name, content, *words = FILES[command][what]
    put(Path(name), content)
    refused(semidice(*command.split()), *words)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_function_says_what_is_wrong(what):
    make, *words = FUNCTIONS[what]
    refused(make, *words)
