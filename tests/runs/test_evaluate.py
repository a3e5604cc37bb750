"""The table of means that `train` and `evaluate` print."""

import io
import re

from rich.console import Console

from semidice.metrics import CaseRow, CaseTable
from semidice.runs.evaluate import scores_table


def test_the_printed_interval_of_a_share_stays_between_0_and_100_percent():
    # nearly all scores are close to 1, so the interval of their mean would exceed 1
    scores = [1.0, 1.0, 0.98, 1.0, 0.99, 1.0, 0.97, 1.0, 0.7, 0.99, 1.0, 0.98]
    rows = [
        CaseRow(f"c{case}", f"c{case}", 0, "m", "mean", metric, value)
        for case, score in enumerate(scores)
        for metric, value in (("dice_score", score), ("volume_error_ml", 100 * score))
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(scores_table(CaseTable.from_rows(rows), title="m"))
    ends = {
        metric: (float(low), float(high))
        for metric, low, high in re.findall(
            r"(dice_score|volume_error_ml).* ([\d.]+) to ([\d.]+)", console.file.getvalue()
        )
    }
    assert ends["dice_score"][1] == 100
    assert ends["volume_error_ml"][1] > 100
    assert ends["dice_score"][0] == ends["volume_error_ml"][0]
