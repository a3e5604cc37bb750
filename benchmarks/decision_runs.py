"""What each rule and the correction of intervals change on finished runs, as a table for docs/decisions.md.

    semidice evaluate RUN --decide dice --decide nested --decide fitted --interval 0.9      # for each run
    python benchmarks/decision_runs.py RUN... --docs docs/decisions.md

Reads decisions.parquet and volumes.csv of the runs. Dice is against the majority of the raters; p-values are
paired by patient and corrected for the number of rules.
"""

import argparse
from pathlib import Path

from doc_tables import write_between_markers

from semidice.data.dataset import Dataset
from semidice.report.decisions import INTERVALS, read_volumes
from semidice.runs.run import open_run
from semidice.statistics import compare_cases, holm, read_cases
from semidice.statistics.tables import p_text

BASELINE, RULES = "argmax", ("dice", "nested", "fitted")
HEADER = [
    "dataset",
    "run",
    "p > 0.5",
    *(f"`{rule}`" for rule in RULES),
    "raters in 90 % interval",
    "corrected",
    "width / volume",
    "corrected",
]


def cells(path: Path) -> list[str]:
    """The row of one run."""
    run = open_run(path)
    dataset = Dataset(run.recipe.data.dataset)
    comparison = compare_cases(read_cases(run.folder.decisions), "dice_score", drop=True)
    pairs = comparison.pairs.loc[[(rule, BASELINE) for rule in RULES]]
    shown = [f"{100 * comparison.means.loc[BASELINE, 'mean']:.2f}"]
    corrected = holm(pairs["p_single"].to_numpy()).tolist()
    for difference, p in zip(pairs["difference"], corrected, strict=True):
        gain = 100 * float(difference)
        text = "±0.00" if abs(gain) < 0.005 else f"{gain:+.2f}"
        shown.append(f"**{text}** (p {_relation(p)})" if p < 0.05 else text)
    volumes = read_volumes({run.recipe.name: run.folder}, dataset)[0]
    mean = volumes.table["expected"].mean()
    shown += [f"{100 * volumes.coverage(interval):.1f} %" for interval in INTERVALS.values()]
    shown += [f"{volumes.width(interval) / mean:.2f}" for interval in INTERVALS.values()]
    return [dataset.folder.path.name, run.recipe.name, *shown]


def _relation(p: float) -> str:
    text = p_text(p)
    return text if text.startswith("<") else f"= {text}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, help="page to write the table into")
    args = parser.parse_args()
    rows = [HEADER, ["---"] * 2 + ["---:"] * (len(HEADER) - 2), *(cells(path) for path in args.runs)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    print(table)
    if args.docs is not None:
        write_between_markers(args.docs, "decisions of runs", table)


if __name__ == "__main__":
    main()
