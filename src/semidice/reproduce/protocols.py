"""The protocols of `semidice reproduce`: the paper's text, and the configuration that its authors released.

The shipped grids follow the text. The released configuration differs in the options below, as far as a recipe
can express it. docs/reproduce.md lists every point, also those that are left out.
"""

import math
from collections.abc import Sequence
from typing import Any

from ..recipes import Recipe

PROTOCOLS = {
    "text": "options that the text of the paper names",
    "authors": "options of the configuration that the authors released, where it differs from the text",
}
_ALL = {
    "optimiser.decoder_lr_factor": 10.0,
    "optimiser.decay_one_dimensional": False,
    "loss.smooth": 1.0,
}
# The authors flip the columns of their arrays. They read QUBIQ with the axes in reverse order, so these are
# the rows of our arrays; LiTS and KiTS have the same order as here.
_QUBIQ = {"augment.flip": (True, False)}
_TUMOURS = {"augment.flip": (False, True), "augment.crop": (384, 384), "validation.unit": "scan"}
_HARD_LABEL = {"loss.classes": "present"}
_STUDENT = {"teacher.keys_per_image": True}
_WARMUP_SHARE = 0.01


def authors_recipe(
    recipe: Recipe, *, is_tumour: bool, num_steps: int | None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe of a shipped grid, with the options of the released configuration.

    is_tumour: on LiTS and KiTS, otherwise on QUBIQ. num_steps: of a training; None leaves out the warm-up.
    overrides: KEY=VALUE that the recipe already has; these options are not changed.
    """
    changes: dict[str, Any] = {**_ALL, **(_TUMOURS if is_tumour else _QUBIQ)}
    if recipe.teacher is not None:
        changes |= _STUDENT
    elif recipe.label.is_hard and recipe.label.smoothing == "none":
        changes |= _HARD_LABEL
    if recipe.system.name == "mrnet":
        # not in the released configuration, and at the higher rate it can fail to learn
        del changes["optimiser.decoder_lr_factor"]
    if num_steps is not None:
        changes["schedule.warmup_steps"] = math.ceil(_WARMUP_SHARE * num_steps)
    fixed = [override.partition("=")[0].strip() for override in overrides]
    options = recipe.model_dump()
    for key, value in changes.items():
        if not any(key == other or key.startswith(f"{other}.") for other in fixed):
            section, name = key.split(".")
            options[section][name] = value
    return Recipe.model_validate(options)
