"""Every option of a recipe changes what is trained, or is listed with the reason why it does not."""

import json

import numpy as np
import pytest
import torch
from prepared import make_prepared, rehash
from safetensors.torch import load_file
from trained import fold_of, make_run

from semidice.data.dataset import Dataset
from semidice.recipes import Recipe
from semidice.recipes.options import options_of
from semidice.runs.start import start_run
from semidice.training.context import Context
from semidice.training.engine import train_fold

BASE = {
    "name": "base",
    "data.num_folds": 2,
    "model.architecture": "small_unet",
    "model.encoder": "none",
    "model.weights": "none",
    "model.options": {"channels": [8, 16]},
    "augment.scale": [0.8, 1.25],
    "schedule.epochs": 2,
    "schedule.warmup_steps": 1,
    "batch_size": 2,
    "workers": 0,
}
ADAMW, KDE = {"optimiser.name": "adamw"}, {"teacher.calibration": "kde"}
BLURRED, CALIBRATED = {"label.smoothing": "boundary"}, {"loss.calibration_weight": 1.0}
# key: another value, and options without which it would have no effect
CHANGED = {
    "data.fold_seed": (1, {}),
    "data.num_folds": (3, {}),
    "label.maker": ("majority", {}),
    "label.smoothing": ("uniform", {}),
    "label.eps": (0.2, BLURRED),
    "label.width": (5, BLURRED),
    "label.sigma": (3.0, {"label.smoothing": "spatial"}),
    "label.raters": ([0, 1], {}),
    "augment.crop": ([32, 64], {}),
    "augment.scale": ([0.5, 2.0], {}),
    "augment.flip": (False, {}),
    "augment.rotate_degrees": (30.0, {}),
    "augment.brightness": (0.5, {}),
    "augment.contrast": (0.5, {}),
    "augment.gamma": (0.5, {}),
    "augment.noise": (0.5, {}),
    "augment.shift": (0.3, {}),
    "augment.foreground": (1.0, {"augment.crop": [32, 32], "augment.scale": [2.0, 2.0]}),
    "model.options": ({"channels": [8, 24]}, {}),
    "loss.form": ("relaxed", {}),
    "loss.alpha": (0.9, {}),
    "loss.beta": (0.9, {}),
    "loss.gamma": (2.0, {}),
    "loss.log": (True, {}),
    "loss.smooth": (5.0, {}),
    "loss.over": ("image", {}),
    "loss.classes": ("present", {"loss.over": "image"}),
    "loss.background": (False, {}),
    "loss.cross_entropy_weight": (0.5, {}),
    "loss.region_weight": (0.5, {}),
    "loss.calibration_weight": (1.0, {}),
    "loss.calibration_bins": (3, CALIBRATED),
    "loss.calibration_binning": ("soft", CALIBRATED),
    "loss.class_weight": ([0.1, 1.0], {}),
    "system.name": ("multi_head", {}),
    "system.dropout": (0.1, {"system.name": "mc_dropout"}),
    "system.trace_weight": (1.0, {"system.name": "learned_reliability"}),
    "teacher.calibration": ("kde", {}),
    "teacher.temperature": (3.0, {}),
    "teacher.bandwidth": (0.1, KDE),
    "teacher.num_keys": (64, KDE),
    "teacher.width": (0, KDE),
    "teacher.keys_per_image": (True, KDE),
    "teacher.keys_from": ("batch", KDE),
    "teacher.reweight_keys": (False, {**KDE, "teacher.num_keys": 64}),
    "teacher.label_weight": (0.9, {}),
    "teacher.teacher_weight": (0.9, {}),
    "teacher.terms": (["region"], {}),
    "optimiser.name": ("adamw", {}),
    "optimiser.lr": (0.02, {}),
    "optimiser.decoder_lr_factor": (2.0, {}),
    "optimiser.momentum": (0.1, {}),
    "optimiser.weight_decay": (0.1, {}),
    "optimiser.decay_one_dimensional": (False, {"optimiser.weight_decay": 0.5}),
    "optimiser.clip_norm": (0.01, {}),
    "optimiser.accumulate": (2, {}),
    "schedule.epochs": (3, {}),
    "schedule.power": (2.0, {}),
    "schedule.warmup_steps": (3, {}),
    "precision.dtype": ("bf16", {}),
    "batch_size": (4, {}),
    "seed": (1, {}),
}
# the weights are the same, for these reasons
SAME_WEIGHTS = {
    **dict.fromkeys(("name", "auto", "reasons"), "words"),
    **dict.fromkeys(("data.dataset", "data.folds"), "what is trained, not how"),
    **dict.fromkeys(("model.architecture", "model.encoder", "model.weights"), "tests/networks/test_build"),
    **dict.fromkeys(("precision.channels_last", "precision.compile", "precision.graph"), "speed alone"),
    **dict.fromkeys(("log_every", "workers"), "when and where, not what"),
    "system.num_samples": "of predictions: tests/networks/test_systems",
    "teacher.run": "tests/training/test_teacher",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from options to the weights of fold 0; trained once for the same options."""
    folder = tmp_path_factory.mktemp("options")
    data = make_prepared(folder / "data", num_cases=8, truth=False)
    # every second image has no lesion
    for case in data.cases[::2]:
        path = data.folder.array("masks", case.scan.name)
        np.save(path, np.zeros_like(np.load(path)))
    rehash(data)
    data = Dataset(data.folder.path)
    for num_folds in (2, 3):
        make_run(folder / f"teacher{num_folds}", data, num_folds=num_folds)
    known = {}

    def train(options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            nested = {"data": {"dataset": str(data.folder.path)}}
            if any(name.startswith("teacher.") for name in options):
                nested["teacher"] = {"run": str(folder / "teacher2")}
            for name, value in options.items():
                section, _, inner = name.rpartition(".")
                (nested.setdefault(section, {}) if section else nested)[inner or name] = value
            run = start_run(Recipe.model_validate(nested), folder / f"run{len(known)}", resume=False)
            train_fold(fold_of(run), Context())
            tensors = load_file(run.folder.fold(0).last)
            known[key] = {name: part for name, part in tensors.items() if name.startswith("model/")}
        return known[key]

    return train


def are_equal(first, second):
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("key", CHANGED)
def test_an_option_changes_the_weights(trained, key):
    value, needed = CHANGED[key]
    if key.startswith("teacher.") and "teacher.calibration" not in needed:
        needed = {"teacher.calibration": "temperature", **needed}
    assert not are_equal(trained(BASE | needed), trained(BASE | needed | {key: value}))


def test_every_option_is_in_one_of_the_tables():

    keys = {option.key for option in options_of() if option.section is None}
    # how held-out cases are scored
    keys -= {key for key in keys if key.startswith("validation.")}
    assert keys == CHANGED.keys() | SAME_WEIGHTS.keys()


def test_the_same_options_give_the_same_weights(trained):
    # otherwise nothing above could fail
    assert are_equal(trained(BASE), trained({**BASE, "log_every": 1}))
