"""The demonstration, with few images and hardly trained networks."""

import io

import torch
from rich.console import Console

from semidice.demo import METHOD, RULES, run_demo
from semidice.paths import DemoFolder, RunFolder
from semidice.statistics import read_cases


def test_the_demo_also_compares_rules_and_gives_volumes_intervals(tmp_path):
    console, num_threads = Console(file=io.StringIO(), width=200), torch.get_num_threads()
    try:
        run_demo(tmp_path, console, num_cases=20, epochs=1, num_folds=2)
    finally:
        torch.set_num_threads(num_threads)
    printed = console.file.getvalue()
    assert f"{METHOD}: masks by 3 rules" in printed
    assert f"{METHOD}: 90 % intervals of the volume" in printed
    # ten patients in the other fold are enough for a correction
    assert "conformal 0.9" in printed
    folder = DemoFolder(tmp_path)
    runs = [RunFolder(path) for path in sorted(folder.runs.glob("*/seed_*"))]
    assert len(runs) == 4
    for run in runs:
        assert set(read_cases(run.decisions)["method"]) == {"argmax", *RULES}
        assert run.volumes.is_file()
        assert run.fits.is_file()
    assert folder.report.is_file()
