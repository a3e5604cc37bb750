"""`make test-wheel`: build sdist and wheel, compare their files with the sources, and use the wheel.

    python tests/support/check_wheel.py --parent SITE_PACKAGES
    python tests/support/check_wheel.py --extra monai --extra dicom     these extras alone, or all

The wheel is installed without its dependencies in an empty environment. The environment finds them in
`--parent`, the folder of an environment that has them, but semidice itself must come from the wheel.

Then each extra is installed alone, with what pip resolves for it, in an empty environment without a parent:
what an extra forgets to name is missing there. An environment with torch has 6 GB, so there is one at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NOT_SHIPPED = ("__pycache__", ".pyc", ".part")

SMOKE = """
import sys, semidice, torch
from pathlib import Path
assert Path(semidice.__file__).is_relative_to(sys.prefix), semidice.__file__
logits = torch.randn(2, 3, 8, 8, requires_grad=True)
semidice.SegmentationLoss()(logits, torch.rand(2, 3, 8, 8).softmax(1)).backward()
assert logits.grad.abs().sum() > 0
"""


# what somebody who installs only this extra imports first
EXTRAS = {
    "": "import semidice; [getattr(semidice, name) for name in semidice.__all__]",
    "train": "import semidice.training.command, semidice.prediction.command, semidice.report, semidice.demo",
    "statistics": "from semidice.statistics import compare_cases, read_cases",
    "monai": "import semidice.integrations.monai",
    "nnunet": "import semidice.nnunet.collect, semidice.nnunet.trainer",
    "lightning": "import semidice.integrations.lightning",
    "huggingface": "import transformers.trainer, semidice.integrations.huggingface",
    "onnx": "import onnx, onnxruntime, onnxscript, semidice.integrations.onnx",
    "mlflow": "import mlflow; from semidice.integrations.loggers import new_loggers; new_loggers(['mlflow'])",
    "wandb": "import wandb; from semidice.integrations.loggers import new_loggers; new_loggers(['wandb'])",
    "ray": "import ray, semidice.training.ray_pool",
    "dicom": "import highdicom, semidice.data.sources.dicom, semidice.prediction.dicom_outputs",
}


def source_files(root: Path = ROOT) -> set[str]:
    """Files of the package, relative to src."""
    paths = (root / "src" / "semidice").rglob("*")
    return {
        path.relative_to(root / "src").as_posix()
        for path in paths
        if path.is_file() and not any(part in str(path) for part in NOT_SHIPPED)
    }


def wheel_files(wheel: Path) -> set[str]:
    """Files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("semidice/")}


def sdist_files(sdist: Path) -> set[str]:
    """Files of a source distribution, without the folder that holds all of them."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def problems(wheel: Path, sdist: Path, root: Path = ROOT) -> list[str]:
    """What is missing in the wheel or the sdist, or should not be there."""
    sources, shipped, archived = source_files(root), wheel_files(wheel), sdist_files(sdist)
    found = [f"the wheel has no {name}" for name in sorted(sources - shipped)]
    found += [f"the wheel has {name}, which is not in src" for name in sorted(shipped - sources)]
    found += [
        f"the sdist has no src/{name}"
        for name in sorted(sources - {n.removeprefix("src/") for n in archived})
    ]
    top = (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "Makefile",
        "conftest.py",
    )
    return found + [f"the sdist has no {name}" for name in top if name not in archived]


def new_environment(folder: Path) -> Path:
    """The `bin` of an empty environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def install(python: str | Path, *arguments: str | Path) -> str:
    """What pip prints."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check_extra(extra: str, wheel: Path) -> bool:
    """Whether the extra alone brings what its users import first."""
    with tempfile.TemporaryDirectory() as folder:
        python = new_environment(Path(folder)) / "python"
        install(python, "--no-compile", f"{wheel}[{extra}]" if extra else wheel)
        done = subprocess.run([python, "-c", EXTRAS[extra]], cwd=folder, env=outside(), check=False)
    print(f"semidice[{extra}] {'works alone' if done.returncode == 0 else 'FAILED'}", flush=True)
    return done.returncode == 0


def resolve_together(wheel: Path) -> None:
    """Let pip look for versions that fit all extras; an error if there are none.

    nnU-Net allows a single version of timm, and so may we with the next lower bound.
    """
    extras = ",".join(filter(None, EXTRAS))
    report = install(sys.executable, "--dry-run", "--ignore-installed", "--report", "-", f"{wheel}[{extras}]")
    names = [each["metadata"] for each in json.loads(report)["install"]]
    (timm,) = (each["version"] for each in names if each["name"] == "timm")
    print(f"all extras fit together: {len(names)} packages, with timm {timm}", flush=True)


def outside() -> dict[str, str]:
    """The environment variables without what would show the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def use(scripts: Path, work: Path) -> None:
    """Call the library and every step of the command line in `work`, where no source is."""

    def run(*arguments: str | Path) -> None:
        print("+", *(Path(arguments[0]).name, *arguments[1:]), flush=True)
        subprocess.run(arguments, cwd=work, env=outside(), check=True)

    run(scripts / "python", "-W", "error", "-c", SMOKE)
    semidice = scripts / "semidice"
    run(semidice, "--version")
    run(semidice, "prepare", "phantom", "data", "--cases", "6", "--size", "32x32", "--workers", "0")
    sets = ["data.dataset=data", "schedule.epochs=1", "data.num_folds=2", "workers=0", "batch_size=2"]
    options = [part for option in sets for part in ("--set", option)]
    run(semidice, "train", "quick", "-o", "run", "--accelerator", "cpu", *options)
    run(semidice, "evaluate", "run")
    run(semidice, "report", "run", "-o", "report.html")


def use_wheel(wheel: Path, parent: str) -> None:
    """Use the wheel in an empty environment, with the other packages of `parent`."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder) / "venv", Path(folder) / "work"
        scripts = new_environment(environment)
        paths = {"base": str(environment), "platbase": str(environment)}
        (Path(sysconfig.get_path("purelib", "venv", vars=paths)) / "parent.pth").write_text(f"{parent}\n")
        # the dist-info of an editable semidice in `parent` must not count as installed
        install(scripts / "python", "--no-deps", "--force-reinstall", wheel)
        work.mkdir()
        use(scripts, work)
    print("the wheel works in an empty environment", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parent", help="site-packages with torch and the other dependencies")
    parser.add_argument("--extra", action="append", choices=EXTRAS, help="default: all")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the two files")
    options = parser.parse_args()
    for old in options.dist.glob("semidice-*"):
        old.unlink()
    # first the sdist, then the wheel from the sdist
    subprocess.run([sys.executable, "-m", "build", "--outdir", options.dist, ROOT], check=True)
    (wheel,), (sdist,) = (list(options.dist.glob(f"semidice-*{suffix}")) for suffix in (".whl", ".tar.gz"))
    found = problems(wheel, sdist)
    if found:
        sys.exit("\n".join(found))
    print(f"{wheel.name} and {sdist.name} have the {len(source_files())} files of the sources")
    if options.parent is not None:
        use_wheel(wheel, options.parent)
    resolve_together(wheel)
    failed = [extra for extra in options.extra or EXTRAS if not check_extra(extra, wheel)]
    if failed:
        sys.exit(f"these extras do not work alone: {', '.join(failed)}")


if __name__ == "__main__":
    main()
