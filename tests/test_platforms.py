"""semidice without Triton and without modules that only Linux and macOS have, as on Windows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from semidice import locks

PACKAGE = Path(locks.__file__).parent
# modules of the standard library that Windows does not have
POSIX_MODULES = ("crypt", "fcntl", "grp", "nis", "ossaudiodev", "posix", "pty", "pwd", "resource", "spwd")
POSIX_MODULES += ("syslog", "termios", "tty")
# functions of `os` that Windows does not have; some of them are missing on macOS too
POSIX_FUNCTIONS = ("chroot", "ctermid", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid")
POSIX_FUNCTIONS += ("getgroups", "getloadavg", "getpgid", "getpgrp", "getsid", "getuid", "killpg", "lchown")
POSIX_FUNCTIONS += ("mkfifo", "nice", "openpty", "pipe2", "posix_fadvise", "posix_fallocate", "pread")
POSIX_FUNCTIONS += ("pwrite", "sched_getaffinity", "sched_setaffinity", "sendfile", "setsid", "setuid")
POSIX_FUNCTIONS += ("statvfs", "sync", "sysconf", "sysconf_names", "ttyname", "uname", "wait3", "wait4")

# Triton cannot be found at all. The rest is hidden from semidice alone: on Linux other packages may use it.
HIDE = f"""
import builtins, os, sys, types

class WithoutTriton:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)
    def find_distributions(self, *args, **kwargs):
        return getattr(self.finder, "find_distributions", lambda *a, **k: ())(*args, **kwargs)

sys.meta_path = [WithoutTriton(finder) for finder in sys.meta_path]
hidden_os = types.ModuleType("os")
hidden_os.__dict__.update({{k: v for k, v in vars(os).items() if k not in {POSIX_FUNCTIONS!r}}})
plain_import = builtins.__import__

def hiding_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "")
    if importer.partition(".")[0] == "semidice" and level == 0:
        if name in {POSIX_MODULES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        if name == "os":
            return hidden_os
    return plain_import(name, globals, locals, fromlist, level)

builtins.__import__ = hiding_import
"""


def run_hidden(code):
    done = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_is_imported_without_triton_and_posix_or_names_a_package_of_an_extra():
    code = """
import importlib, pkgutil, semidice
for info in pkgutil.walk_packages(semidice.__path__, "semidice."):
    if info.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(info.name)
    except ModuleNotFoundError as error:
        print(info.name, error.name)
    except ImportError as error:
        print(info.name, "too_old")
"""
    missing = dict(line.split() for line in run_hidden(code).splitlines())
    rooms = {name: module.split(".")[1] for module, name in missing.items()}
    # kernels that run on a CUDA device alone, the classes of nnU-Net, and adapters of other frameworks
    allowed = {"kernels", "nnunet", "integrations"}
    assert set(rooms.values()) <= allowed, missing
    assert missing["semidice.kernels.tile"] == "triton"
    assert {name for name, room in rooms.items() if room == "kernels"} == {"triton"}
    assert not set(rooms) & set(POSIX_MODULES)


def test_prepare_train_and_predict_run_without_triton_and_posix(tmp_path):
    code = f"""
import sys
from pathlib import Path
import nibabel, numpy
from semidice.cli import app
from semidice.data.dataset import Dataset

work = Path({str(tmp_path)!r})
sets = ["data.dataset=" + str(work / "data"), "schedule.epochs=1", "data.num_folds=2", "batch_size=2"]
sets.append("workers=0")
sets = [part for option in sets for part in ("--set", option)]

def run(*arguments):
    code = app([str(argument) for argument in arguments], standalone_mode=False)
    assert not code, arguments

run("--help")
run("prepare", "phantom", work / "data", "--cases", 4, "--size", "32x32", "--workers", 0)
run("train", "quick", "-o", work / "run", "--accelerator", "cpu", *sets)
image = Dataset(work / "data").image(0)[0][..., None]
nibabel.save(nibabel.Nifti1Image(image, numpy.eye(4)), work / "image.nii")
run("predict", work / "run", work / "image.nii", "-o", work / "predictions", "--device", "cpu")
assert "triton" not in sys.modules
"""
    run_hidden(code)
    assert (tmp_path / "predictions" / "volumes.csv").is_file()


def test_what_is_hidden_cannot_be_used_by_semidice():
    code = """
def attempt(code):
    try:
        exec(code, {"__name__": "semidice.new"})
    except Exception as error:
        print(type(error).__name__)
attempt("import fcntl")
attempt("import triton")
attempt("from os import fork")
attempt("import os; os.getuid()")
attempt("import os; os.getpid()")
"""
    assert run_hidden(code).split() == [
        "ModuleNotFoundError",
        "ModuleNotFoundError",
        "ImportError",
        "AttributeError",
    ]


def unix_only_uses(source):
    """Functions of `os` that Windows lacks and that a source uses, unless it asks for them by `hasattr`."""
    tree = ast.parse(source)
    asked = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr")
        if isinstance(node.args[1], ast.Constant)
    }
    # sysconf_names is there if sysconf is
    asked |= {"sysconf"} if "sysconf_names" in asked else set()
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os"
    }
    return sorted(used & set(POSIX_FUNCTIONS) - asked)


def test_functions_that_windows_lacks_are_asked_for_before_they_are_used():
    problems = {
        str(path.relative_to(PACKAGE)): unix_only_uses(path.read_text()) for path in PACKAGE.rglob("*.py")
    }
    assert {name: used for name, used in problems.items() if used} == {}
    assert unix_only_uses("import os\nos.getuid()\nos.getpid()") == ["getuid"]
    assert unix_only_uses("import os\nhasattr(os, 'getuid') and os.getuid()") == []


def test_a_lock_on_windows_sends_no_signal(monkeypatch):
    def kill(*_):
        pytest.fail("signal 0 is an interrupt on Windows")

    owner = locks.Owner.this_process("semidice train")
    assert owner.is_gone() is False
    monkeypatch.setattr(locks.platform, "system", lambda: "Windows")
    monkeypatch.setattr(locks.os, "kill", kill)
    assert owner.is_gone() is None
