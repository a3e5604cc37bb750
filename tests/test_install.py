"""What an installation needs: the core without extras, and semidice without Triton and POSIX."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import semidice

ROOT = Path(__file__).parent.parent
# modules of the standard library that Windows does not have
POSIX = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
HIDE = """
import sys
class Filtered:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        return self.finder.find_spec(name, path, target) if {condition} else None
    def find_distributions(self, *arguments, **options):
        return getattr(self.finder, "find_distributions", lambda *a, **k: ())(*arguments, **options)
sys.meta_path = [Filtered(finder) for finder in sys.meta_path]
"""


def required_distributions(name, seen):
    """Names of all distributions that `name` requires without extras."""
    for requirement in metadata.requires(name) or []:
        dependency = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
        if "extra ==" in requirement or dependency in seen:
            continue
        seen.add(dependency)
        try:
            required_distributions(dependency, seen)
        except metadata.PackageNotFoundError:
            continue
    return seen


@pytest.fixture
def with_core_only(start):
    """Run a program that can import the standard library, semidice and what its core requires."""
    core = required_distributions("semidice", set())
    modules = {
        module
        for module, owners in metadata.packages_distributions().items()
        if {owner.lower().replace("_", "-") for owner in owners} & core
    }
    hide = HIDE.format(condition=f"top in {sorted({'semidice', *modules})} or top in sys.stdlib_module_names")
    return lambda code: start("-c", hide + code).end()


def test_the_core_works_without_any_other_package(with_core_only):
    code = """
import torch, semidice
logits = torch.randn(2, 3, 8, 8, requires_grad=True)
semidice.SegmentationLoss()(logits, torch.randint(0, 3, (2, 8, 8))).backward()
assert logits.grad.abs().sum() > 0
for name in semidice.__all__:
    getattr(semidice, name)
print("core", len(semidice.__all__))
"""
    ended = with_core_only(code)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("core")


@pytest.mark.parametrize("module", ["matplotlib", "monai", "typer", "pydantic"])
def test_a_hidden_module_cannot_be_imported(with_core_only, module):
    # otherwise the test above could not fail
    assert f"No module named '{module}'" in with_core_only(f"import {module}").err


def test_public_names_are_loaded_on_first_use(start):
    code = """
import sys, semidice
assert "torch" not in sys.modules
assert "dice_loss" in dir(semidice)
from semidice import *
assert dice_loss is semidice.dice_loss
print([name for name in ("matplotlib", "typer", "monai", "triton") if name in sys.modules])
semidice.dise_loss
"""
    ended = start("-c", code).end()
    assert ended.out.strip() == "[]"
    assert "has no attribute 'dise_loss'" in ended.err


def test_the_version_is_the_same_in_package_changelog_and_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == semidice.__version__
    assert f"## {semidice.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_package_of_an_extra_has_a_tested_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if "==" in line}
    named = {
        re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for extra in extras.values() for text in extra
    }
    # nnU-Net is pinned by the Makefile, because it needs another timm
    assert named - pinned == {"semidice", "nnunetv2"}


@pytest.mark.slow
def test_prepare_train_and_predict_run_without_triton_and_posix(start, tmp_path):
    # POSIX modules are hidden from semidice and filelock alone: other packages may use them on Linux
    code = f"""
import builtins
plain_import = builtins.__import__
def hiding_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {{}}).get("__name__", "").partition(".")[0]
    if importer == "semidice" and level == 0 and name in {POSIX}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return plain_import(name, globals, locals, fromlist, level)
builtins.__import__ = hiding_import
import nibabel, numpy
from semidice.cli import app
from semidice.data.dataset import Dataset
sets = ["data.dataset=data", "schedule.epochs=1", "data.num_folds=2", "batch_size=2", "workers=0"]
sets = [part for option in sets for part in ("--set", option)]
def run(*arguments):
    assert not app([str(argument) for argument in arguments], standalone_mode=False), arguments
run("prepare", "phantom", "data", "--cases", 4, "--size", "32x32", "--workers", 0)
run("train", "quick", "-o", "run", "--accelerator", "cpu", *sets)
nibabel.save(nibabel.Nifti1Image(Dataset("data").image(0)[0][..., None], numpy.eye(4)), "image.nii")
run("predict", "run", "image.nii", "-o", "predictions", "--device", "cpu")
assert "triton" not in sys.modules
"""
    ended = start("-c", HIDE.format(condition="top != 'triton'") + code, cwd=tmp_path).end()
    assert ended.code == 0, ended.err
    assert (tmp_path / "predictions" / "volumes.csv").is_file()
