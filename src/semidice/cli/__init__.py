"""The command line. Each command reads a folder and writes a folder, and can be run again on its own.

A command imports what it needs when it runs, so that --help and shell completion answer without delay.
Commands are listed in the order in which their modules are imported here.
"""

# isort: off
from .application import app
from . import data, train, evaluate, compare, nnunet

# isort: on

__all__ = ["app", "compare", "data", "evaluate", "nnunet", "train"]
