"""Settings for every test: checked shapes, NaN in uninitialised memory, a fixed seed, one thread."""

import importlib.util
import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined. Without a GPU, kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes in annotations are checked under pytest only. kernels/ is excluded: Triton compiles the source of
# its functions, which must not be wrapped. cli is excluded: typer reads its annotations.
_PACKAGE = Path(__file__).parent / "src" / "semidice"
_CHECKED = [
    f"semidice.{path.stem}" for path in _PACKAGE.iterdir() if path.stem not in ("kernels", "cli", "__init__")
]
install_import_hook(_CHECKED, "shapecheck.check")

# the fixture `start`: processes that end with their test
pytest_plugins = ["start"]

# modules that are classes of a package; `make test-nnunet` and `make test-integrations` have them
_MODULES_OF_PACKAGE = {
    "highdicom": ["tests/support/dicom_trees.py"],
    "lightning": ["src/semidice/integrations/lightning.py"],
    "nnunetv2": ["src/semidice/nnunet/raters.py", "src/semidice/nnunet/trainer*"],
}
collect_ignore_glob = [
    module
    for package, modules in _MODULES_OF_PACKAGE.items()
    if importlib.util.find_spec(package) is None
    for module in modules
]

# Tensors in tests are tiny: a second thread slows tests down, up to a hundredfold on a busy machine.
torch.set_num_threads(1)

settings.register_profile("semidice", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("semidice")


@pytest.fixture(autouse=True)
def _nan_memory_and_seed():
    # deterministic algorithms also fill torch.empty with NaN, which reveals values that were never written
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _names_of_the_examples(doctest_namespace):
    doctest_namespace.update(np=np, torch=torch)
