"""The demonstration: the paper's main result on phantoms, whose true probability is known.

The shipped grid `demo` trains a small UNet with four combinations of label and loss over the same folds.
Their predictions of cases that they never saw are compared case by case. Then the rules that make masks are
compared, and volumes get intervals. An interrupted demo can be started again; it skips the finished folds.
"""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from .compare import comparisons_of
from .console import progress_bar, say
from .data.dataset import Dataset
from .data.phantom import PhantomOptions
from .data.prepare import prepare_dataset
from .data.sources import find_datasets
from .errors import writing
from .paths import DatasetFolder, DemoFolder
from .recipes.grid import read_variants
from .report.page import PageOptions, build_page
from .runs.evaluate import EvaluateOptions, run_evaluate
from .statistics.cases import write_cases
from .statistics.compare import Comparison
from .statistics.tables import means_table, p_text
from .training.grid import train_grid

# the two variants of the grid that are compared in words
BASELINE, METHOD = "majority + SDL", "uniform + DML1"
# rules that make masks, besides argmax
RULES = ("dice", "fitted")
# Three raters, as in the smaller tasks of QUBIQ. They differ more from case to case than by habit, so nobody
# can predict their majority, and a network that is certain of it is wrong (docs/metrics.md, "against whom").
PHANTOM = PhantomOptions(num_raters=3, bias=0.6, offset=1.6, wobble=1.2, miss=0.02)


def run_demo(out: Path, console: Console, *, num_cases: int, epochs: int, num_folds: int) -> None:
    """Prepare, train, compare and draw; finished steps are skipped."""
    # for images this small, a second thread is hardly faster, and slower if other programs use the cores
    torch.set_num_threads(1)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    folder = DemoFolder(out)
    if not DatasetFolder(folder.dataset).manifest.exists():
        (raw,) = find_datasets("phantom", replace(PHANTOM, num_cases=num_cases))
        prepare_dataset(raw, folder.dataset, workers=1)
    dataset = Dataset(folder.dataset)
    overrides = [
        f"data.num_folds={num_folds}",
        f"schedule.epochs={epochs}",
        f"validation.every={max(1, epochs // 4)}",
    ]
    variants = read_variants(["demo"], dataset=folder.dataset, out=folder.runs, overrides=overrides)
    say(
        console,
        f"{len(dataset)} phantom slices, {len(dataset.manifest.raters)} raters each; "
        f"{len(variants)} recipes x {num_folds} folds x {epochs} epochs of a small UNet",
    )
    outcome = train_grid(variants, console)
    outcome.raise_if_failed()
    table = outcome.table()
    write_cases(table, folder.cases)
    comparisons = comparisons_of(table, [*variants[0].recipe.validation.metrics, "truth_error"])
    title = f"Mean over {len(dataset)} cases, each predicted by a network that never saw it"
    console.print(means_table(list(comparisons.values()), intervals=False, title=title))
    for comparison in comparisons.values():
        say(console, _difference_text(comparison))
    for name, run in outcome.runs.items():
        # the report shows all of them
        shown = console if name == METHOD else Console(quiet=True)
        run_evaluate(run.folder.path, EvaluateOptions(rules=RULES, interval=0.9), shown)
    with progress_bar(console, "writing the report page"):
        build_page(outcome.runs, dataset, folder.report, PageOptions(figures=False))
    _print_files(folder, console)


def _difference_text(comparison: Comparison) -> str:
    """The difference between `METHOD` and `BASELINE` in one line."""
    pair = comparison.pairs.loc[(METHOD, BASELINE)]
    difference, low, high = (comparison.key.scale * pair[name] for name in ("difference", "low", "high"))
    return (
        f"{METHOD} against {BASELINE}, {comparison.key}: "
        f"{difference:+.2f} [{low:+.2f}, {high:+.2f}], p {p_text(pair.p)}"
    )


def _print_files(folder: DemoFolder, console: Console) -> None:
    for path, text in {
        folder.report: "everything on one page: open it in a browser",
        folder.cases: "every score of every case",
        folder.runs: "recipes, logs, weights and predictions; tensorboard --logdir shows the curves",
        folder.dataset: "the dataset, as semidice prepare writes it",
    }.items():
        say(console, f"{path}  {text}")
    say(
        console,
        "next, with your own data:\n"
        "  semidice prepare folder RAW_DIR data    # RAW_DIR/images and RAW_DIR/raters/NAME\n"
        "  semidice check data\n"
        "  semidice train auto --set data.dataset=data -o runs/first",
    )
