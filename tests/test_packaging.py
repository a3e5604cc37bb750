"""The core has few dependencies, the command line names a missing one, and the examples in pages run."""

import io
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from check_wheel import problems, source_files
from doc_commands import Command, problem

import semidice

ROOT = Path(__file__).parent.parent

# Only the standard library, semidice and the dependencies of the core can be imported.
HIDE = """
import sys

ALLOWED = set({allowed!r}) | set(sys.stdlib_module_names) | {{"semidice"}}

class Filtered:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target) if name.partition(".")[0] in ALLOWED else None
    def find_distributions(self, *args, **kwargs):
        return getattr(self.finder, "find_distributions", lambda *a, **k: ())(*args, **kwargs)

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


def importable_core():
    core = required_distributions("semidice", set())
    by_module = metadata.packages_distributions()
    return sorted(
        module for module, owners in by_module.items() if {o.lower().replace("_", "-") for o in owners} & core
    )


def run_with_core_only(code):
    program = HIDE.format(allowed=importable_core()) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_core_works_without_any_other_package():
    code = """
import torch, semidice
logits = torch.randn(2, 3, 8, 8, requires_grad=True)
semidice.SegmentationLoss()(logits, torch.randint(0, 3, (2, 8, 8))).backward()
assert logits.grad.abs().sum() > 0
for name in semidice.__all__:
    getattr(semidice, name)
print("core", len(semidice.__all__))
"""
    done = run_with_core_only(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("core")


@pytest.mark.parametrize("module", ["matplotlib", "monai", "scipy", "typer", "rich", "beartype"])
def test_a_hidden_module_cannot_be_imported(module):
    assert f"No module named '{module}'" in run_with_core_only(f"import {module}").stderr


def test_the_command_line_without_its_extra_prints_one_line_that_says_what_to_install():
    done = run_with_core_only("from semidice.__main__ import main; main()")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "semidice: the command line needs typer; run: pip install 'semidice[train]'"
    )


def test_importing_the_package_loads_no_large_optional_package():
    heavy = ("matplotlib", "typer", "monai", "triton")
    code = f"import sys, semidice; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_arguments_are_refused_without_the_type_checks_of_pytest():
    messages = {
        "dice_loss(torch.rand(1, 2, 3), numpy.zeros((1, 3)))": "target must be a tensor; got a numpy array",
        "DiceLoss(form='l2')": "form must be one of 'min', 'product', 'squared', 'relaxed'; got 'l2'",
        "DiceLoss(activation='relu')": "activation must be one of 'softmax', 'sigmoid', 'none'; got 'relu'",
    }
    code = f"""
import numpy, torch
from semidice import DiceLoss, dice_loss
for call in {list(messages)}:
    try:
        eval(call)
    except ValueError as error:
        print(str(error).splitlines()[0])
    else:
        print("accepted:", call)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for line, message in zip(done.stdout.splitlines(), messages.values(), strict=True):
        assert line.startswith(message), done.stderr


def test_shapes_in_annotations_are_checked_under_pytest():
    from semidice.overlap.forms import form_sums
    from semidice.overlap.stats import unchecked_overlap_stats

    assert form_sums(torch.ones(1, 2, 3), torch.ones(1, 2, 3), "min")[0].tolist() == [[3.0, 3.0]]
    with pytest.raises(TypeError, match="Type-check error"):
        unchecked_overlap_stats(torch.zeros(3), torch.zeros(3), form="min", valid=None)


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name
)
def test_the_examples_in_a_page_run(page):
    # a page whose framework is not installed here has a test that runs its examples
    if elsewhere := re.search(r"<!-- the examples are run by (\S+) -->", page.read_text()):
        assert page.name in (ROOT / elsewhere[1]).read_text()
        pytest.skip(f"{elsewhere[1]} runs the examples of {page.name}")
    scope: dict[str, object] = {}
    for number, block in enumerate(python_blocks(page)):
        exec(compile(block, f"{page.name} example {number + 1}", "exec"), scope)


def test_the_readme_has_examples():
    assert len(python_blocks(ROOT / "README.md")) >= 2


def test_public_names_are_loaded_on_first_use():
    code = """
import sys, semidice
assert "torch" not in sys.modules
assert "dice_loss" in dir(semidice)
from semidice import *
assert dice_loss is semidice.dice_loss
try:
    semidice.dise_loss
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "module 'semidice' has no attribute 'dise_loss'"


def write_distributions(folder, *, without=()):
    """A wheel and an sdist of all sources and top files, except those of `without`."""
    wheel, sdist = folder / "semidice-0-py3-none-any.whl", folder / "semidice-0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in source_files() - set(without):
            archive.write(ROOT / "src" / name, name)
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "sdist"
    ]
    # the build backend adds pyproject.toml
    files = ["pyproject.toml", *(name for name in include["include"] if (ROOT / name).is_file())]
    files += [f"src/{name}" for name in source_files()]
    with tarfile.open(sdist, "w:gz") as archive:
        for name in set(files) - set(without):
            archive.addfile(tarfile.TarInfo(f"semidice-0/{name}"), io.BytesIO())
    return wheel, sdist


def test_a_file_that_is_not_in_the_wheel_or_the_sdist_is_named(tmp_path):
    assert problems(*write_distributions(tmp_path)) == []
    left_out = (
        "semidice/py.typed",
        "semidice/recipes/shipped/auto.yaml",
        "src/semidice/console.py",
        "LICENSE",
    )
    assert problems(*write_distributions(tmp_path, without=left_out)) == [
        "the wheel has no semidice/py.typed",
        "the wheel has no semidice/recipes/shipped/auto.yaml",
        "the sdist has no src/semidice/console.py",
        "the sdist has no LICENSE",
    ]


def test_the_sources_have_the_files_that_are_no_modules():
    files = source_files()
    for name in ("py.typed", "report/page/assets/template.html", "reproduce/paper.yaml"):
        assert f"semidice/{name}" in files
    assert "semidice/nnunet/trainers/semidice_trainers.py" in files
    assert not [name for name in files if "__pycache__" in name]


def test_the_version_is_the_same_in_package_changelog_and_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == semidice.__version__
    assert f"## {semidice.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    paper = citation["preferred-citation"]
    assert paper["authors"][0]["family-names"] == "Wang"
    assert " ".join((ROOT / "README.md").read_text().split()).count(paper["title"]) == 1


def workflow_commands(path):
    """The commands of all steps of a workflow."""
    workflow = yaml.safe_load(path.read_text())
    # YAML reads the key `on` as true
    assert {"name", True, "jobs"} <= set(workflow), path
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            yield from step.get("run", "").splitlines()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_the_commands_of_a_workflow_are_valid(path):
    for text in workflow_commands(path):
        if text.split()[0] in ("make", "semidice"):
            assert problem(Command(text, complete=True)) is None, text


def test_the_workflow_runs_all_supported_versions_of_python():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [name.rpartition(" ")[2] for name in classifiers if ":: Python ::" in name]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported


def test_every_package_of_an_extra_has_a_tested_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if "==" in line}
    named = {
        re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for extra in extras.values() for text in extra
    }
    # nnU-Net is pinned by the Makefile, because it needs another timm
    assert named - pinned == {"semidice", "nnunetv2"}
