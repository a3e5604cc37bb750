"""Case tables compared: one score per row, paired by case; every comparison, table and figure is made of it.

    batches, processes --collect--> case table --pairing--> scores --compare--> comparison --tables--> text

A case table is a pandas frame: `pd.read_parquet("cases.parquet")`. `case_table` checks one of your own.
Needs the extra: pip install 'semidice[statistics]'.
"""

from .agreement import agreement_rows
from .cases import COLUMNS, NEEDED, case_table, concatenate, read_cases, write_cases
from .collect import CaseScores
from .compare import Comparison, compare_cases, compare_scores, holm
from .pairing import PairedScores, paired
from .resampling import ALPHA, paired_test
from .tables import means_table, pairs_table

__all__ = [
    "ALPHA",
    "COLUMNS",
    "NEEDED",
    "CaseScores",
    "Comparison",
    "PairedScores",
    "agreement_rows",
    "case_table",
    "compare_cases",
    "compare_scores",
    "concatenate",
    "holm",
    "means_table",
    "paired",
    "paired_test",
    "pairs_table",
    "read_cases",
    "write_cases",
]
