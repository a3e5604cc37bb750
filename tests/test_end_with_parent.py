"""A process ends with the one that started it, and takes along what it started itself."""

import signal
import sys

import pytest
from processes import is_running
from start import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

PARENT = """
import multiprocessing, os, pathlib, sys, time
from semidice.processes import end_with_parent

def work(folder, leads):
    if leads:
        os.setsid()
    end_with_parent((folder / "cleaned").touch)
    if os.fork():
        (folder / f"{os.getpid()}.child").touch()
    else:
        (folder / f"{os.getpid()}.grandchild").touch()
    time.sleep(600)

if __name__ == "__main__":
    method, leads, folder = sys.argv[1], sys.argv[2] == "leads", pathlib.Path(sys.argv[3])
    child = multiprocessing.get_context(method).Process(target=work, args=(folder, leads))
    child.start()
    child.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("leads", ["leads", "follows"])
def test_a_killed_parent_takes_its_child_along_and_the_whole_group_that_it_leads(
    tmp_path, start, method, leads
):
    (tmp_path / "parent.py").write_text(PARENT)
    folder = tmp_path / "pids"
    folder.mkdir()
    parent = start("parent.py", method, leads, folder, cwd=tmp_path)
    parent.wait_until(lambda: len(list(folder.iterdir())) == 2)
    pids = {path.suffix: int(path.stem) for path in folder.iterdir()}
    assert all(map(is_running, pids.values()))
    parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(pids[".child"]))
    assert (folder / "cleaned").exists()
    if leads == "leads":
        wait_until(lambda: not is_running(pids[".grandchild"]))
    else:
        # only a group that the child leads is its own to end
        assert is_running(pids[".grandchild"])
