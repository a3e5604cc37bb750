"""One process on a CPU, for every test of a training."""

import pytest
from lightning_fabric import Fabric


@pytest.fixture(scope="session")
def fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric
