"""A law of all functions that take arrays of voxels: nonsense is refused by the name of its argument."""

import inspect
from functools import partial

import jaxtyping
import pytest
import torch
from laws import class_map, random_logits, soft_label
from start import refused

from semidice import calibration, decisions, labels, losses, metrics, overlap


def needed_arguments(function):
    """The names of the arguments without a default, none for a class."""
    every = inspect.signature(function).parameters.values() if inspect.isfunction(function) else ()
    return [each.name for each in every if each.default is each.empty and each.kind is not each.VAR_KEYWORD]


# the arguments that a function needs, if one of them is an array of voxels
ARRAYS = {"prediction", "prob", "target", "masks", "label"}
FUNCTIONS_OF_ARRAYS = {
    (package, name): needed
    for package in (losses, overlap, metrics, calibration, labels, decisions)
    for name in package.__all__
    if ARRAYS & set(needed := needed_arguments(getattr(package, name)))
}
# values of all required arguments of functions that take an array
VALUES = {
    **dict.fromkeys(("prob", "prediction"), soft_label(2, 3, 4, 4, 4)),
    **dict.fromkeys(("masks", "samples"), random_logits(2, 3, 4, 4, 4) > 0),
    **dict.fromkeys(("alpha", "beta", "weight", "threshold", "eps", "bandwidth", "level"), 0.5),
    **dict.fromkeys(("generator", "num_channels", "num_keys", "num_samples"), 1),
    "target": class_map((2, 4, 4, 4), 3),
    "label": soft_label(1, 3, 4, 5)[0],
    "keys": calibration.Keys(*(soft_label(1, 3, 4).movedim(1, -1) for _ in range(2)), None),
    "volumes_ml": torch.ones(2, 3, 2),
    "levels": [0.5],
    "decision": "dice",
    "spacing_mm": (1, 1, 1),
}


@pytest.fixture(autouse=True)
def _no_checked_annotations(monkeypatch):
    # a user has no checked annotations, and so must get the messages of the functions themselves
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("package", "name"), FUNCTIONS_OF_ARRAYS)
def test_nonsense_names_its_argument(package, name):
    function = getattr(package, name)
    good = {argument: VALUES[argument] for argument in FUNCTIONS_OF_ARRAYS[package, name]}
    if package is labels and "masks" in good:
        # of one case
        good["masks"] = good["masks"][0]
    function(**good)
    for argument in ARRAYS & good.keys():
        nonsense = [None, "x", good[argument] + 0j]
        # labels are made of arrays as they come from files
        if package is not labels:
            nonsense.append(good[argument].numpy())
        for value in nonsense:
            message = refused(partial(function, **good | {argument: value}))
            assert argument in message or (argument == "prob" and "prediction" in message)
