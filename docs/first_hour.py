"""The walk of a newcomer: README's commands on a folder of new images. Writes docs/first_hour.md.

The images are phantoms, so that the page can be made anywhere. Commands run on the CPU as real processes,
and what they print goes through a pipe.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
from PIL import Image

from semidice.data.phantom import make_phantom

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first_hour.md"
START, END = "<!-- made by docs/first_hour.py -->\n", "<!-- end -->"
NUM_NEW = 2
# the test of the page trains one epoch
SHORT = " --set schedule.epochs=1"


class Step(NamedTuple):
    """A command of the walk and what it printed, standard error included."""

    command: str
    output: str
    status: int


def readme_commands() -> list[str]:
    """The shell lines of README's section for people who have raters, without their comments."""
    section = (ROOT / "README.md").read_text().split("## I have raters")[1].split("\n## ")[0]
    lines = section.split("```\n")[1].splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith("semidice")]


def write_pictures(root: Path, *, num_cases: int = 12, num_raters: int = 3) -> None:
    """Write PNG images and raters' masks to `root/my_scans`, and images without masks to `root/new_scans`."""
    phantom = make_phantom(num_cases + NUM_NEW, size=(48, 56), num_raters=num_raters, seed=3)
    for case in range(num_cases + NUM_NEW):
        image = (255 * phantom.image[case, 0].clamp(0, 1)).byte().numpy()
        _save_picture(image, _image_folder(root, case < num_cases) / f"scan{case:02}.png")
        for rater in range(num_raters) if case < num_cases else ():
            mask = 255 * phantom.masks[case, rater].byte().numpy()
            _save_picture(mask, root / "my_scans" / "raters" / f"reader{rater}" / f"scan{case:02}.png")


def write_volumes(root: Path, *, num_cases: int = 6, num_raters: int = 2, depth: int = 4) -> None:
    """As `write_pictures`, but NIfTI volumes; the slices of a volume are unrelated."""
    phantom = make_phantom((num_cases + NUM_NEW) * depth, size=(32, 40), num_raters=num_raters, seed=4)
    for case in range(num_cases + NUM_NEW):
        slices = slice(case * depth, (case + 1) * depth)
        name = f"scan{case:02}.nii.gz"
        image = phantom.image[slices, 0].permute(1, 2, 0).numpy()
        _save_volume(image, _image_folder(root, case < num_cases) / name)
        for rater in range(num_raters) if case < num_cases else ():
            mask = phantom.masks[slices, rater].permute(1, 2, 0).byte().numpy()
            _save_volume(mask, root / "my_scans" / "raters" / f"reader{rater}" / name)


def _image_folder(root: Path, is_rated: bool) -> Path:
    return root / "my_scans" / "images" if is_rated else root / "new_scans"


def _save_picture(values: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def _save_volume(values: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    volume = nibabel.Nifti1Image(values, np.diag([0.8, 0.8, 2.5, 1.0]))  # type: ignore[no-untyped-call]
    nibabel.save(volume, path)


def environment() -> dict[str, str]:
    """One thread, no GPU and 110 columns: the walk prints the same everywhere."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"}


def program(command: str) -> list[str]:
    """The command as a process of this Python."""
    return [sys.executable, "-m", *command.split()]


def walk(commands: Sequence[str], root: Path) -> list[Step]:
    """Run the commands in `root`, one after the other; stop after the first that fails."""
    steps = []
    for command in commands:
        done = subprocess.run(
            program(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=root,
            env=environment(),
        )
        steps.append(Step(command, done.stdout.replace(f"{root}/", ""), done.returncode))
        if done.returncode != 0:
            break
    return steps


def transcript(steps: Sequence[Step]) -> str:
    """Commands and their output as one block of the page."""
    texts = [f"$ {step.command}\n{step.output.rstrip()}" for step in steps]
    lines = "\n\n".join(texts).splitlines()
    return "```console\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def transcript_in(page: str) -> str:
    """The block that the script wrote to the page."""
    return page.split(START)[1].split(END)[0]


def with_transcript(page: str, block: str) -> str:
    """The page with this block."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{block}{END}{rest.partition(END)[2]}"


def fixed_lines(block: str) -> list[str]:
    """The lines that any machine prints, with # for numbers: no progress, nothing that depends on epochs."""
    lines = [line for line in block.splitlines() if line.strip(" ─━┏┓└┘├┤┼┡┩╇┬┴┌┐") != ""]
    lines = [line for line in lines if not re.match(r"auto: fold|schedule\.epochs|validation\.every", line)]
    lines = [line.replace(SHORT, "") for line in lines]
    return [re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "#", line)).strip() for line in lines]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder))
        steps = walk(readme_commands(), Path(folder))
    if steps[-1].status != 0:
        sys.exit(f"{steps[-1].command}\n{steps[-1].output}")
    PAGE.write_text(with_transcript(PAGE.read_text(), transcript(steps)))


if __name__ == "__main__":
    main()
