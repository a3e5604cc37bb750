"""Batches of a dataset that is not resident need little memory, however many bytes of it were read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import numpy as np
import bench_large
from semidice.data.batches import Batches
from semidice.data.dataset import Dataset
from semidice.data.label_making import LabelOptions
from semidice.data.storage import Storage
from semidice.data.stored import StoredArray

path = Path(sys.argv[1])
bench_large.write_stand_in(path, 2)
if sys.argv[2] == "kept maps":
    kept = []

    def read(self, row, *, out=None):
        kept.append(np.lib.format.open_memmap(self.path, mode="r")[row])
        out = np.empty_like(kept[-1]) if out is None else out
        out[...] = kept[-1]
        return out

    StoredArray.read = read
before = bench_large.memory_mb("VmRSS")
dataset = Dataset(path)
options = dict(batch_size=8, label=LabelOptions(), augment=None, seed=0, workers=2)
batches = Batches(Storage(dataset, "cpu", resident=False), range(len(dataset)), **options)
num_read = 0
for step, feed in enumerate(batches.feeds(0, 200)):
    num_read += feed.image.nbytes + feed.packed.nbytes
    if step < 4:
        batches.make(feed)
peak = bench_large.memory_mb("VmHWM") - before
disk = sum(file.stat().st_blocks * 512 for file in path.rglob("*.npy"))
print(json.dumps(dict(grown=peak, read=num_read / 2**20, disk=disk / 2**20)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc/self/status exists only on Linux")
@pytest.mark.parametrize(("reading", "is_bounded"), [("as it is", True), ("kept maps", False)])
def test_reading_a_gigabyte_does_not_need_a_gigabyte(tmp_path, reading, is_bounded):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "data"), reading]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result = json.loads(done.stdout)
    assert result["disk"] < 1
    assert result["read"] > 900
    # feeds that are read ahead, and the tensors of a batch
    assert (result["grown"] < 300) == is_bounded, result
