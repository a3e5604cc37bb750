"""A recipe: every option of a training, read from YAML, checked, and written back with all defaults.

    read_recipe("my.yaml", ["loss.form=relaxed", "schedule.epochs=60"])     a file, or a shipped recipe's name
    write_recipe(recipe, RUN/recipe.yaml)                                   every option, defaults included

A key that does not exist is refused, and the message names the nearest key. YAML is read as version 1.2: 1e-3
is a number, `off` and 2024-01-31 are text, and a key that occurs twice is an error.

A path in a file is relative to the file, a path in an override to the working directory; in memory, paths are
absolute. A written recipe has absolute paths too, so its run folder can be moved and still finds its dataset.
But a teacher in the same folder as the run is written as ../NAME, because a folder of runs is moved together.
If the dataset or the teacher was moved, override `data.dataset` or `teacher.run`. Reading a recipe does not
check that paths exist.
"""

from .files import read_recipe, shipped_recipes, with_stored_choices, write_recipe
from .options import (
    Recipe,
    SystemOptions,
    differing_keys,
    flat_options,
    option_fields,
    option_value,
)

__all__ = [
    "Recipe",
    "SystemOptions",
    "differing_keys",
    "flat_options",
    "option_fields",
    "option_value",
    "read_recipe",
    "shipped_recipes",
    "with_stored_choices",
    "write_recipe",
]
