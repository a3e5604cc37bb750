"""`make test-wheel`: build sdist and wheel, compare their files with the sources, and use the wheel.

    python tests/support/check_wheel.py --parent SITE_PACKAGES

The wheel is installed without its dependencies in an empty environment. The environment finds them in
`--parent`, the folder of an environment that has them, but semidice itself must come from the wheel.
"""

import argparse
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


def new_environment(folder: Path, wheel: Path, parent: str) -> Path:
    """The `bin` of an empty environment with the wheel; other packages are those of `parent`."""
    venv.create(folder, with_pip=True)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    paths = {"base": str(folder), "platbase": str(folder)}
    (Path(sysconfig.get_path("purelib", "venv", vars=paths)) / "parent.pth").write_text(f"{parent}\n")
    pip = [scripts / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    # the dist-info of an editable semidice in `parent` must not count as installed
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    return scripts


def use(scripts: Path, work: Path) -> None:
    """Call the library and every step of the command line in `work`, where no source is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str | Path) -> None:
        print("+", *(Path(arguments[0]).name, *arguments[1:]), flush=True)
        subprocess.run(arguments, cwd=work, env=environment, check=True)

    run(scripts / "python", "-W", "error", "-c", SMOKE)
    semidice = scripts / "semidice"
    run(semidice, "--version")
    run(semidice, "prepare", "phantom", "data", "--cases", "6", "--size", "32x32", "--workers", "0")
    sets = ["data.dataset=data", "schedule.epochs=1", "data.num_folds=2", "workers=0", "batch_size=2"]
    options = [part for option in sets for part in ("--set", option)]
    run(semidice, "train", "quick", "-o", "run", "--accelerator", "cpu", *options)
    run(semidice, "evaluate", "run")
    run(semidice, "report", "run", "-o", "report.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parent", required=True, help="site-packages with torch and the other dependencies")
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
    with tempfile.TemporaryDirectory() as folder:
        scripts = new_environment(Path(folder) / "venv", wheel, options.parent)
        work = Path(folder) / "work"
        work.mkdir()
        use(scripts, work)
    print("the wheel works in an empty environment")


if __name__ == "__main__":
    main()
