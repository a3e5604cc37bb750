"""`semidice predict RUN INPUT... -o OUT`: probabilities, masks and volumes of new images with a trained run.

    files --inputs--> slices --windows, networks of the folds--> mean probability
         --resample--> the file's grid --threshold or argmax--> mask --outputs--> OUT

Where the dataset was resized, so is the input, and its probabilities are resized back linearly; where it was
not, an image above `window` pixels a side is predicted in windows. An input that fails does not stop the
others. What is there already is not made again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from rich.console import Console
from torch import Tensor, nn

from ..console import counting_bar, say
from ..data.resample import resize_probability
from ..runs.run import CheckpointKind, TrainedRun, checkpoint_path, load_fold, network_probability, read_run
from .inputs import InputCase, InputImage, find_inputs, read_input
from .outputs import OutputFolder, enumerated_errors
from .windows import windowed_probability


@dataclass(frozen=True)
class Ensemble:
    """Networks of a run's folds; the probability is the mean of theirs."""

    run: TrainedRun
    networks: Sequence[nn.Module]
    device: torch.device
    window: int = 1024
    overlap: float = 0.25
    batch_size: int = 8

    def __call__(self, image: Tensor) -> Tensor:
        """Mean probability of a normalised batch on the device."""
        # half precision is for speed on a GPU; on a CPU it has none to give
        dtype = "fp32" if self.device.type == "cpu" else self.run.recipe.precision.dtype
        probs = [network_probability(network, image, dtype=dtype) for network in self.networks]
        return torch.stack(probs).mean(0)

    def predict(
        self, image: InputImage, *, on_work: Callable[[float], object] = lambda _: None
    ) -> Float32[np.ndarray, "C *space"]:
        """Class probabilities on the grid of the input; on_work(share) after that share of it."""
        num_slices = len(image.stored)
        # after resizing, an image has the size that the network was trained at
        window = self.window if self.run.facts.prepare_options.size is None else None
        whole = np.empty((num_slices, len(self.run.facts.class_names), *image.size), dtype=np.float32)
        for first in range(0, num_slices, self.batch_size):
            slices = slice(first, min(first + self.batch_size, num_slices))
            prob = windowed_probability(
                self,
                image.normalised(slices, self.run.facts),
                device=self.device,
                window=window,
                overlap=self.overlap,
                batch_size=self.batch_size,
                on_batch=partial(_pass_on, on_work, (slices.stop - first) / num_slices),
            ).numpy()
            whole[slices] = prob if prob.shape[-2:] == image.size else resize_probability(prob, image.size)
        return image.in_place(whole)


def decide_classes(
    prob: Float32[np.ndarray, "C *space"], threshold: float | None
) -> UInt8[np.ndarray, "*space"]:
    """The most probable class, the lowest at a tie; or, with a threshold, foreground where it is passed.

    With a threshold, a voxel whose foreground classes together have more than it gets the most probable of
    them. Of two classes, argmax is the threshold 0.5.

    >>> prob = np.array([[0.5, 0.6, 0.2], [0.1, 0.1, 0.5], [0.4, 0.3, 0.3]], dtype=np.float32)
    >>> decide_classes(prob, None), decide_classes(prob, 0.45)
    (array([0, 0, 1], dtype=uint8), array([2, 0, 1], dtype=uint8))
    """
    chosen: np.ndarray = prob.argmax(0)
    if threshold is not None:
        chosen = np.where(prob[1:].sum(0) > threshold, 1 + prob[1:].argmax(0), 0)
    return chosen.astype(np.uint8)


def _pass_on(on_work: Callable[[float], object], weight: float, share: float) -> None:
    on_work(weight * share)


def run_predict(
    run: Path,
    inputs: Sequence[Path],
    out: Path,
    *,
    fold: int | None = None,
    which: CheckpointKind | None = None,
    threshold: float | None = None,
    window: int = 1024,
    overlap: float = 0.25,
    batch_size: int = 8,
    slice_axis: int | None = None,
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console,
) -> None:
    """Predict files, or folders of them, into `out`; a ValueError lists the inputs that failed.

    fold: the network of one fold; None takes the mean of all finished ones. which: their last or best
    checkpoint, None as the recipe says. threshold: see `decide_classes`. window, overlap, batch_size: see
    `windows.windowed_probability`. slice_axis: of volumes, instead of the dataset's. device: None takes a
    GPU if there is one. overwrite: make again what is there.
    """
    if threshold is not None and not 0 <= threshold < 1:
        raise ValueError(f"threshold must lie in [0, 1); got {threshold}")
    trained = read_run(run)
    cases = find_inputs(inputs, out, trained.facts)
    folds = _chosen_folds(trained, fold, console)
    folder = OutputFolder(out, trained.facts.class_names)
    folder.check_settings(
        _settings(trained, folds, which, threshold, window, overlap, slice_axis), overwrite=overwrite
    )
    due = [case for case in cases if overwrite or not folder.is_done(case)]
    if len(due) < len(cases):
        say(console, f"{len(cases) - len(due)} of {len(cases)} inputs are predicted already")
    if not due:
        return
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    networks = [load_fold(trained, number, which=which, device=device) for number in folds]
    ensemble = Ensemble(trained, networks, device, window, overlap, batch_size)
    errors: list[str] = []
    try:
        with counting_bar(console, doing="predicting", unit="inputs") as progress:
            bar = progress.add_task("", total=len(due))
            for number, case in enumerate(due):
                progress.update(bar, completed=number, description=case.name)
                try:
                    image = read_input(case, trained.facts, slice_axis=slice_axis)
                    prob = ensemble.predict(image, on_work=lambda share: progress.advance(bar, share))
                    folder.write(image, prob, decide_classes(prob, threshold))
                except torch.OutOfMemoryError:
                    errors.append(
                        f"{case.path}: the device's memory is too small; lower --batch-size or --window"
                    )
                except (ValueError, OSError) as error:
                    errors.append(_told(case, error))
    finally:
        folder.close()
    say(console, f"predicted {len(due) - len(errors)} of {len(due)} inputs into {out}")
    if errors:
        raise ValueError(enumerated_errors(errors, len(due)))


def _chosen_folds(run: TrainedRun, fold: int | None, console: Console) -> tuple[int, ...]:
    finished = run.finished_folds
    if fold is not None:
        checkpoint_path(run, fold)
        if fold not in finished:
            say(console, f"fold {fold} of {run.folder.path} is not finished: taking it as it is now")
        return (fold,)
    if not finished:
        raise ValueError(
            f"{run.folder.path} has no finished fold to predict with: go on with `semidice train --resume`, "
            "or name a fold that has a checkpoint with --fold"
        )
    missing = [str(number) for number in run.folds if number not in finished]
    if missing:
        say(console, f"without fold {', '.join(missing)}, which is not finished")
    return finished


def _settings(
    run: TrainedRun,
    folds: Sequence[int],
    which: CheckpointKind | None,
    threshold: float | None,
    window: int,
    overlap: float,
    slice_axis: int | None,
) -> dict[str, Any]:
    """All that the files depend on but the inputs and the device."""
    digests = {}
    for fold in folds:
        with checkpoint_path(run, fold, which=which).open("rb") as file:
            digests[str(fold)] = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "method": run.recipe.name,
        "class_names": list(run.facts.class_names),
        "checkpoints": digests,
        "threshold": threshold,
        "window": window,
        "overlap": overlap,
        "slice_axis": slice_axis,
    }


def _told(case: InputCase, error: ValueError | OSError) -> str:
    """The message, with the file if it does not say it."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename2 or error.filename or case.path}: {error.strerror}"
    is_named = isinstance(error, OSError) or any(str(path) in text for path in case.files)
    return text if is_named else f"{case.path}: {text}"
