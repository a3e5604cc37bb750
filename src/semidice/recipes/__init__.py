"""A recipe: every option of a training, read from YAML, checked, and written back with all defaults.

    read_recipe("my.yaml", ["loss.form=relaxed", "schedule.epochs=60"])     a file, or a shipped recipe's name
    write_recipe(recipe, RUN/recipe.yaml)                                   every option, defaults included

options   every option: type, default, meaning, and checks of combinations
recipe    reading with overrides, problems by the key of their option, writing
text      YAML: 1e-3 is a number, and a key that occurs twice is an error
grid      variants of a recipe, each with its seeds, teachers before students
auto      options chosen from the dataset and the device, with reasons

A path in a file is relative to the file, a path in an override to the working directory; in memory and in a
written recipe, paths are absolute, so a run folder can be moved and still finds its dataset. But a teacher
beside the run is written relative to it, because a folder of runs is moved together. If the dataset or the
teacher was moved, override `data.dataset` or `teacher.run`. Reading a recipe does not check that paths exist.
"""

from .options import DataOptions, Recipe, differing_keys, flat_options, option_value
from .recipe import read_recipe, shipped_recipes, with_stored_choices, write_recipe

__all__ = [
    "DataOptions",
    "Recipe",
    "differing_keys",
    "flat_options",
    "option_value",
    "read_recipe",
    "shipped_recipes",
    "with_stored_choices",
    "write_recipe",
]
