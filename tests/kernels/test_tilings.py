"""The tuner writes the tables of tilings, and replaces a tiling only if another is clearly faster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from semidice.kernels import tiling_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# runs in a separate process, because modules of benchmarks and tests share names
PROGRAM = """
import json
import sys
import tune_tilings as tuner
from tune_tilings import Result, Tiling

current, candidate = Tiling(64, 1, 4), Tiling(32, 2, 4)
table = ((4, Tiling(1024, 4, 4)), (28, current), (8192, tuner.BLOCK_GRADIENT))

def updated(ratios):
    # ratios: number of classes -> (time of current, time of candidate), for two-byte logits
    results = {
        (num_classes, 2): [Result(a, current, True), Result(b, candidate, False)]
        for num_classes, (a, b) in ratios.items()
    }
    return tuner.updated_table(table, results)

json.dump({
    "text": tuner.tables_source(tuner.current_tables()),
    "untried": updated({}) == table,
    "slower": updated({14: (1.0, 1.2), 20: (1.0, 1.1)}) == table,
    "hardly faster": updated({14: (1.0, 0.995)}) == table,
    "faster once": updated({14: (1.0, 0.9), 20: (1.0, 1.2)}) == table,
    "faster": updated({14: (1.0, 0.9), 20: (1.0, 1.05)}) == (table[0], (28, candidate, current), table[2]),
}, sys.stdout)
"""


def test_the_tuner_writes_the_tables():
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=BENCHMARKS
    )
    answers = json.loads(process.stdout)
    assert answers.pop("text") == Path(tiling_tables.__file__).read_text()
    assert answers == dict.fromkeys(answers, True)
