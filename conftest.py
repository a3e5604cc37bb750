"""Settings of every test: memory that was not written is NaN, and randomness is seeded."""

import numpy as np
import pytest
import torch
from hypothesis import settings

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
