"""The module in which nnU-Net finds our trainers: every name `SemidiceTrainer_NAME` is a class of it."""

from semidice.nnunet.options import TRAINER_PREFIX
from semidice.nnunet.trainer import SemidiceTrainer


def __getattr__(name: str) -> type[SemidiceTrainer]:
    if not name.startswith(TRAINER_PREFIX) or name == TRAINER_PREFIX:
        raise AttributeError(name)
    return type(name, (SemidiceTrainer,), {"__module__": SemidiceTrainer.__module__})
