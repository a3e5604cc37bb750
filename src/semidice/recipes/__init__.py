"""A recipe: everything a training depends on but the data, read from YAML, checked, and written back whole.

    read_recipe("my.yaml", ["loss.form=relaxed", "schedule.epochs=60"])     a file, or a shipped recipe's name
    write_recipe(recipe, RUN/recipe.yaml)                                   every option, defaults included

Keys that do not exist are refused with the nearest that do. YAML is read as version 1.2 has it: 1e-3 is a
number, `off` and 2024-01-31 are text, and a key that occurs twice is an error.

Paths in a file are relative to the file, those in an override to the working directory, and in memory they
are absolute. So they are in a written recipe, whose run folder can be moved and still finds its dataset; but
a teacher beside the run folder is ../NAME there, as a folder of runs is moved as a whole. Where dataset or
teacher have moved, override `data.dataset` or `teacher.run`. Reading checks no path; that is for whoever
opens it.
"""

from .files import read_recipe, shipped_recipes, write_recipe
from .options import (
    DataOptions,
    ModelOptions,
    OptimiserOptions,
    PrecisionOptions,
    Recipe,
    ScheduleOptions,
    SegmentationLossOptions,
    SystemOptions,
    TeacherOptions,
    ValidationOptions,
    differing_keys,
    flat_options,
    option_fields,
)
from .provenance import versions

__all__ = [
    "DataOptions",
    "ModelOptions",
    "OptimiserOptions",
    "PrecisionOptions",
    "Recipe",
    "ScheduleOptions",
    "SegmentationLossOptions",
    "SystemOptions",
    "TeacherOptions",
    "ValidationOptions",
    "differing_keys",
    "flat_options",
    "option_fields",
    "read_recipe",
    "shipped_recipes",
    "versions",
    "write_recipe",
]
