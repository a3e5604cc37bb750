"""The module in which nnU-Net finds our trainers: every name `SemidiceTrainer_NAME` is a class of it."""

from typing import Any

from semidice.nnunet.trainer import trainer_class


def __getattr__(name: str) -> Any:
    return trainer_class(name)
