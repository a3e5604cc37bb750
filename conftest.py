"""Settings of every test: checked shapes, poisoned memory, seeded randomness, one thread."""

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined: without a GPU they run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes in annotations are checked under pytest only. Not in kernels/: Triton compiles the source of its
# functions and cannot have them wrapped. Not in cli: its annotations are for typer.
_PACKAGE = Path(__file__).parent / "src" / "semidice"
_CHECKED = [
    f"semidice.{path.stem}" for path in _PACKAGE.iterdir() if path.stem not in ("kernels", "cli", "__init__")
]
install_import_hook(_CHECKED, "shapecheck.check")

# Tensors here are tiny: a second thread costs more than it gives, a hundredfold on a busy machine.
torch.set_num_threads(1)

settings.register_profile("semidice", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("semidice")


@pytest.fixture(autouse=True)
def _poisoned_memory_and_seed():
    # deterministic algorithms also fill torch.empty with NaN, so a value that nobody wrote shows
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _names_of_the_examples(doctest_namespace):
    doctest_namespace.update(np=np, torch=torch)
