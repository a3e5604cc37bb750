"""`semidice predict RUN INPUT... -o OUT`: probabilities, masks and volumes of new images with a trained run.

    files --inputs--> slices --mean and std of a fold, windows, its network--> mean probability of the folds
         --resample--> the file's grid --threshold or argmax--> mask --outputs--> OUT

If the dataset was resized, the input is resized too, and its probabilities are resized back linearly. If
not, an image with more than `window` pixels per side is predicted in windows. An input that fails does not
stop the others. Inputs that were predicted before are skipped. A warning names the files that the networks
were trained on.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from rich.console import Console
from torch import nn

from ..console import counting_bar, say
from ..data.dataset import Dataset
from ..data.folds import read_folds
from ..data.integrity import enumerated
from ..data.resample import resize_probability
from ..decisions.masks import decided_classes
from ..networks.systems import network_probability
from ..paths import file_hash
from ..runs.run import TrainedRun, manifest_digest, mirrored_axes, open_run
from .inputs import InputCase, InputImage, find_inputs, read_input
from .outputs import OutputFolder
from .windows import windowed_probability


@dataclass(frozen=True)
class PredictOptions:
    """How files are predicted.

    fold: use the network of one fold; None averages all finished folds. flips: mean over mirrored images;
    None takes `validation.flips` of the recipe. threshold: see `decided_classes`.
    window, overlap, batch_size: see `windows.windowed_probability`. slice_axis: of volumes; None takes the
    axis of the dataset. device: None takes a GPU if there is one. overwrite: predict finished inputs again.
    """

    fold: int | None = None
    flips: bool | None = None
    threshold: float | None = None
    window: int = 1024
    overlap: float = 0.25
    batch_size: int = 8
    slice_axis: int | None = None
    device: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must lie in [0, 1); got {self.threshold}")


@dataclass(frozen=True)
class Ensemble:
    """The networks of a run by their folds. Their probabilities are averaged."""

    run: TrainedRun
    networks: Mapping[int, nn.Module]
    device: torch.device
    options: PredictOptions

    def predict(
        self, image: InputImage, on_work: Callable[[float], object]
    ) -> Float32[np.ndarray, "C *space"]:
        """Class probabilities on the grid of the input; on_work(share) is called after each part of it."""
        num_slices, batch_size = len(image.stored), self.options.batch_size
        # half precision makes a GPU faster, but not a CPU
        dtype = "fp32" if self.device.type == "cpu" else self.run.recipe.precision.dtype
        axes = mirrored_axes(self.run.recipe, 2, flips=self.options.flips)
        # after resizing, an image has the size that the network was trained with
        window = self.options.window if self.run.facts.prepare_options.size is None else None
        probs = np.empty((num_slices, len(self.run.facts.class_names), *image.size), dtype=np.float32)
        for first in range(0, num_slices, batch_size):
            slices = slice(first, min(first + batch_size, num_slices))
            part = (slices.stop - first) / num_slices / len(self.networks)
            total = torch.zeros(())
            for fold, network in self.networks.items():
                total = total + windowed_probability(
                    partial(network_probability, network, dtype=dtype, flips=axes),
                    image.normalised(slices, self.run.facts.mean_std(fold)),
                    device=self.device,
                    window=window,
                    overlap=self.options.overlap,
                    batch_size=batch_size,
                    on_batch=lambda share, part=part: on_work(part * share),  # type: ignore[misc]
                )
            prob = (total / len(self.networks)).numpy()
            if not np.isfinite(prob).all():
                raise ValueError(
                    f"{image.case.path}: the networks give NaN in {int((~np.isfinite(prob)).sum())} values: "
                    "its intensities are far from those of the training, or the training diverged"
                )
            probs[slices] = prob if prob.shape[-2:] == image.size else resize_probability(prob, image.size)
        return image.on_file_grid(probs)


def run_predict(
    run: Path, inputs: Sequence[Path], out: Path, options: PredictOptions, *, console: Console
) -> None:
    """Predict files, or folders of files, into `out`; a ValueError lists the inputs that failed."""
    trained = open_run(run)
    cases = find_inputs(inputs, out, trained.facts)
    folds = _chosen_folds(trained, options.fold, console)
    folder = OutputFolder(out, trained.facts.class_names)
    folder.check_settings(_settings(trained, folds, options), overwrite=options.overwrite)
    remaining = [case for case in cases if options.overwrite or not folder.is_done(case)]
    if len(remaining) < len(cases):
        say(console, f"{len(cases) - len(remaining)} of {len(cases)} inputs are predicted already")
    if not remaining:
        return
    trained_on = _training_inputs(trained, folds, remaining)
    if trained_on:
        say(
            console,
            f"warning: the networks were trained on {enumerated(trained_on, 'input')}: their scores would be "
            f"too good; `semidice evaluate {shlex.quote(str(run))}` scores held-out cases",
        )
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    networks = {fold: trained.network(fold, device=device) for fold in folds}
    errors = _predict_all(Ensemble(trained, networks, device, options), remaining, folder, console)
    say(console, f"predicted {len(remaining) - len(errors)} of {len(remaining)} inputs into {out}")
    if errors:
        heading = f"{len(errors)} of {len(remaining)} inputs could not be predicted:"
        raise ValueError("\n".join([heading, *(f"  {error}" for error in errors)]))
    say(console, f"next: semidice report {shlex.quote(str(run))} -o report.html")


def _predict_all(
    ensemble: Ensemble, cases: Sequence[InputCase], folder: OutputFolder, console: Console
) -> list[str]:
    """Predict and write the inputs behind a progress bar; the messages of those that failed."""
    facts, options = ensemble.run.facts, ensemble.options
    errors = []
    try:
        with counting_bar(console, doing="predicting", unit="inputs") as progress:
            bar = progress.add_task("", total=len(cases))
            for number, case in enumerate(cases):
                progress.update(bar, completed=number, description=case.name)
                try:
                    image = read_input(case, facts, slice_axis=options.slice_axis)
                    prob = ensemble.predict(image, lambda share: progress.advance(bar, share))
                    classes = decided_classes(torch.from_numpy(prob)[None], threshold=options.threshold)
                    folder.write(image, prob, classes[0].numpy())
                except torch.OutOfMemoryError:
                    errors.append(
                        f"{case.path}: the device's memory is too small; lower --batch-size or --window"
                    )
                except (ValueError, OSError) as error:
                    errors.append(_message(case, error))
    finally:
        folder.close()
    return errors


def _chosen_folds(run: TrainedRun, fold: int | None, console: Console) -> tuple[int, ...]:
    finished = run.finished_folds
    if fold is not None:
        run.checkpoint_path(fold)
        if fold not in finished:
            say(console, f"fold {fold} of {run.folder.path} is not finished: using its current weights")
        return (fold,)
    if not finished:
        raise ValueError(
            f"{run.folder.path} has no finished fold to predict with: continue with "
            "`semidice train --resume`, or name a fold that has a checkpoint with --fold"
        )
    missing = list(map(str, run.missing_folds))
    if missing:
        say(console, f"predicting without fold {', '.join(missing)}, which is not finished")
    return finished


def _training_inputs(run: TrainedRun, folds: Sequence[int], cases: Sequence[InputCase]) -> list[str]:
    """Names of the inputs with a file that a network of these folds was trained on, by the SHA-256.

    None are named if the dataset of the run is not on this machine, or was prepared again.
    """
    try:
        dataset = Dataset(run.recipe.data.dataset)
        fold_of_case = read_folds(run.folder.folds, dataset)
    except (OSError, ValueError):
        return []
    if manifest_digest(dataset.manifest) != run.facts.manifest_sha256:
        return []
    digests = {
        digest
        for case, held_out in zip(dataset.cases, fold_of_case, strict=True)
        if any(fold != held_out for fold in folds)
        for digest in case.scan.inputs.values()
    }
    names = []
    for case in cases:
        # a file that cannot be read is reported when it is predicted
        with suppress(OSError):
            if any(file_hash(path) in digests for path in case.files):
                names.append(case.name)
    return names


def _settings(run: TrainedRun, folds: Sequence[int], options: PredictOptions) -> dict[str, Any]:
    """Everything that the results depend on, except the inputs and the device."""
    return {
        "method": run.recipe.name,
        "class_names": list(run.facts.class_names),
        "checkpoints": {str(fold): file_hash(run.checkpoint_path(fold)) for fold in folds},
        # of slices, which have two axes
        "flips": mirrored_axes(run.recipe, 2, flips=options.flips) != (),
        "threshold": options.threshold,
        "window": options.window,
        "overlap": options.overlap,
        "slice_axis": options.slice_axis,
    }


def _message(case: InputCase, error: ValueError | OSError) -> str:
    """The error's message, with the name of the file if the message lacks it."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename2 or error.filename or case.path}: {error.strerror}"
    is_named = isinstance(error, OSError) or any(str(path) in text for path in case.files)
    return text if is_named else f"{case.path}: {text}"
