"""docs/results.md: every generated part and figure, from the stored scores of docs/results.

python docs/results_page.py                                            the page itself
python docs/results_page.py results_out/stored -o build/results.md     with the scores of another folder
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import results_figures
from matplotlib.figure import Figure
from result_files import RESULTS
from results_study import STUDIES
from results_tables import DIFFERENCES, Results, Row, difference_rows, means_rows, run_text, total_text

Maker = Callable[[], list[Row] | str]
PAGE = Path(__file__).parent / "results.md"


def makers(results: Results) -> dict[str, Maker]:
    """The function of every generated part of the page, by its marker."""
    made: dict[str, Maker] = {"total": partial(total_text, results)}
    made |= {f"{study}_run": partial(run_text, results, study) for study in STUDIES}
    made |= {f"{file}_means": partial(means_rows, results, file) for file in (*STUDIES, "labels_decisions")}
    made |= {name: partial(difference_rows, results, name) for name in DIFFERENCES}
    made |= {f"{name}_figure": partial(results_figures.link, results, name) for name in results_figures.DRAW}
    return made


def figures(results: Results) -> dict[str, Callable[[], Figure]]:
    """The figures of the studies that were run."""
    return {
        name: partial(draw, results)
        for name, (study, draw, _) in results_figures.DRAW.items()
        if results.has(study)
    }


_STORED = Results(RESULTS)
TABLES: Mapping[str, Maker] = makers(_STORED)
FIGURES = figures(_STORED)


def write_page(results: Results, out: Path) -> None:
    """Write the page, and its figures into the folder `figures` next to it."""
    from make_figures import part_text, save_compact, with_table

    page = PAGE.read_text()
    for name, maker in makers(results).items():
        page = with_table(page, name, part_text(maker()))
    (out.parent / "figures").mkdir(parents=True, exist_ok=True)
    for name, draw in figures(results).items():
        save_compact(draw(), out.parent / "figures" / f"{name}.png")
    out.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/results.md and its figures.")
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="folder of stored scores")
    parser.add_argument("-o", "--out", type=Path, default=PAGE, help="page to write")
    options = parser.parse_args()
    write_page(Results(options.folder), options.out)


if __name__ == "__main__":
    main()
