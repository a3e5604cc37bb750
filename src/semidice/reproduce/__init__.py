"""`semidice reproduce`: the paper's tables run again, and ours beside the paper's, cell by cell.

    paper.yaml   every figure of the paper      methods   the trainings behind the cells, by name
    tables       which training fills which cell          plan    what is to be run on which dataset
    estimate     how long that takes                      scores  our figures from the case tables
    agreement    of raters, without training              conclusions   what the paper says, as named checks

A training is one run folder, OUT/DATASET/METHOD, whichever tables show it.
"""

from .command import ReproduceError, Reproduction, run_reproduce
from .tables import paper_tables

__all__ = ["ReproduceError", "Reproduction", "paper_tables", "run_reproduce"]
