"""`semidice reproduce`: run the tables of the paper again and compare every cell with the paper.

    paper.yaml          every number of the paper's tables
    paper               numbers and marks of a table, ours or the paper's, and the training behind each cell
    protocols           options of the paper's text, and of the configuration that its authors released
    plan                which trainings are needed, and how long they take
    scores              our numbers, from the scores of each case
    conclusions         the paper's conclusions as checks
    comparison_tables   our numbers next to the paper's, as tables

A training has one run folder, OUT/DATASET/METHOD. Tables share run folders; protocols do not.
"""

from .command import ReproduceError, run_reproduce
from .paper import paper_tables

__all__ = ["ReproduceError", "paper_tables", "run_reproduce"]
