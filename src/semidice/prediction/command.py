"""`semidice predict RUN INPUT... -o OUT`: probabilities, masks and volumes of new images with a trained run.

    files --inputs--> slices --mean and std of a fold, windows, its network--> mean probability of the folds
         --calibrator of the run, if it has one--> probabilities
         --resample--> the file's grid --rule over the whole volume--> mask --outputs--> OUT

If the dataset was resized, the input is resized too, and its probabilities are resized back linearly. If
not, an image with more than `window` pixels per side is predicted in windows. An input that fails does not
stop the others. Inputs that were predicted before are skipped. A warning names the files that the networks
were trained on.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from rich.console import Console
from torch import nn

from ..console import progress_bar, say
from ..data.dataset import Dataset
from ..data.folds import read_folds
from ..data.resample import resize_probability
from ..decisions.decision import Decision
from ..decisions.masks import decide_classes
from ..decisions.volumes import check_level
from ..errors import UserError, given, listing
from ..locks import locked
from ..networks.predictor import Predictor
from ..networks.windows import windowed_probability
from ..paths import PredictionFolder, file_hash
from ..recipes.options import FITTED, checked_rule
from ..runs.calibration import KeptCalibrator, kept_calibrator
from ..runs.fits import current_fits
from ..runs.held_out import ALL_FOLDS
from ..runs.run import TrainedRun, mirrored_axes, open_run
from .inputs import InputCase, InputImage, find_inputs, read_input
from .options import PredictOptions
from .outputs import IntervalOptions, OutputFolder


class Ensemble:
    """The networks of a run by their folds. Their probabilities are averaged."""

    def __init__(
        self,
        run: TrainedRun,
        networks: Mapping[int, nn.Module],
        options: PredictOptions,
        device: torch.device,
        calibrator: KeptCalibrator | None = None,
    ) -> None:
        self.run, self.options, self.device, self.calibrator = run, options, device, calibrator
        # half precision makes a GPU faster, but not a CPU
        dtype = "fp32" if device.type == "cpu" else run.recipe.precision.dtype
        flips = mirrored_axes(run.recipe, run.facts.num_axes, flips=options.flips)
        self.predictors = {
            fold: Predictor(network, dtype=dtype, flips=flips) for fold, network in networks.items()
        }

    def predict(
        self, image: InputImage, on_work: Callable[[float], object]
    ) -> Float32[np.ndarray, "C *space"]:
        """Class probabilities on the grid of the input; on_work(share) is called after each part of it."""
        num_slices, batch_size = len(image.stored), self.options.batch_size
        # after resizing, an image has the size that the network was trained with
        window = self.options.window if self.run.facts.options.size is None else None
        probs = np.empty((num_slices, len(self.run.facts.class_names), *image.space), dtype=np.float32)
        for first in range(0, num_slices, batch_size):
            slices = slice(first, min(first + batch_size, num_slices))
            part = (slices.stop - first) / num_slices / len(self.predictors)
            total = torch.zeros(())
            for fold, predictor in self.predictors.items():
                total = total + windowed_probability(
                    predictor,
                    image.normalised(slices, self.run.facts.mean_std(fold)),
                    device=self.device,
                    window=window,
                    batch_size=batch_size,
                    on_batch=lambda share, part=part: on_work(part * share),  # type: ignore[misc]
                )
            mean = total / len(self.predictors)
            if not bool(torch.isfinite(mean).all()):
                raise UserError(
                    f"{image.case.path}: the networks give NaN in {int((~torch.isfinite(mean)).sum())} "
                    "values: its intensities are far from those of the training, or the training diverged"
                )
            prob = (mean if self.calibrator is None else self.calibrator.calibrate(mean)).numpy()
            if prob.shape[2:] != image.space:
                # a dataset is resized along two axes
                height, width = image.space
                prob = resize_probability(prob, (height, width))
            probs[slices] = prob
        return image.on_file_grid(probs)


def run_predict(
    run: Path, inputs: Sequence[Path], out: Path, options: PredictOptions, *, console: Console
) -> None:
    """Predict files, or folders of files, into `out`; a UserError lists the inputs that failed."""
    trained, device = open_run(run), _device(options.device)
    cases = find_inputs(inputs, out, trained.facts)
    folds = chosen_folds(trained, options.fold, console)
    calibrator = kept_calibrator(trained, console) if options.calibrate else None
    decision = _decision(trained, options, calibrator, console)
    interval = _interval(trained, options, calibrator, console)
    settings = _settings(trained, folds, options, calibrator) | {
        "decision": str(decision),
        "interval": interval and asdict(interval),
    }
    name = shlex.quote(str(trained.folder.path))
    errors: list[str] = []
    with locked(PredictionFolder(out), "semidice predict"):
        folder = OutputFolder(out, trained.facts.class_names, interval, uncertainty=options.uncertainty)
        folder.open(settings, overwrite=options.overwrite)
        remaining = folder.remaining(cases, overwrite=options.overwrite)
        if len(remaining) < len(cases):
            say(console, f"{len(cases) - len(remaining)} of {len(cases)} inputs are predicted already")
        if remaining:
            _warn_of_training_inputs(trained, folds, remaining, console)
            if calibrator is not None:
                say(console, f"calibrating by {calibrator.name}; --no-calibrate leaves it out")
            networks = {fold: trained.network(fold, device=device) for fold in folds}
            ensemble = Ensemble(trained, networks, options, device, calibrator)
            errors = _predict_all(ensemble, decision, remaining, folder, console)
            say(console, f"predicted {len(remaining) - len(errors)} of {len(remaining)} inputs into {out}")
    if errors:
        heading = f"{len(errors)} of {len(remaining)} inputs could not be predicted:"
        raise UserError("\n".join([heading, *(f"  {error}" for error in errors)]))
    say(console, f"next: semidice report {name} -o report.html")


def _device(name: str | None) -> torch.device:
    """The named device; None takes a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError:
        raise UserError(f"--device must be cpu or cuda; got {name!r}") from None
    if device.type == "cuda" and not has_gpu:
        raise UserError(f"--device is {name}, but PyTorch finds no CUDA device: use --device cpu")
    return device


def _predict_all(
    ensemble: Ensemble,
    decision: Decision,
    cases: Sequence[InputCase],
    folder: OutputFolder,
    console: Console,
) -> list[str]:
    """Predict and write the inputs behind a progress bar; the messages of those that failed."""
    facts, options = ensemble.run.facts, ensemble.options
    errors = []
    try:
        with progress_bar(console, "predicting", "inputs", total=len(cases)) as bar:
            for number, case in enumerate(cases):
                bar.name, bar.done = f"predicting {case.name}", number
                try:
                    image = read_input(case, facts, slice_axis=options.slice_axis)
                    prob = ensemble.predict(image, bar.advance)
                    classes = decide_classes(torch.from_numpy(prob)[None], decision)[0]
                    folder.write(image, prob, classes.numpy())
                except torch.OutOfMemoryError:
                    errors.append(
                        f"{case.path}: the device's memory is too small; lower --batch-size or --window"
                    )
                except UserError as error:
                    text = str(error)
                    is_named = any(str(path) in text for path in case.files)
                    errors.append(text if is_named else f"{case.path}: {text}")
    finally:
        folder.close()
    return errors


def _decision(
    run: TrainedRun, options: PredictOptions, calibrator: KeptCalibrator | None, console: Console
) -> Decision:
    """The rule that the options ask for, or argmax; `fitted` is that for new scans."""
    fits = current_fits(run)
    fitted = None if fits is None else fits.rules.get(ALL_FOLDS)
    if options.decide is None and fitted is not None and calibrator is None:
        say(console, f"masks are by argmax; --decide fitted uses the fitted rule {fitted.decision}")
    if options.decide != FITTED:
        with given("--decide"):
            return Decision.parse(checked_rule(options.decide or str(Decision())))
    if calibrator is not None:
        raise UserError(
            f"the rule of {run.folder.path} is fitted to its predictions as they are, but they would be "
            f"calibrated by {calibrator.name}: leave that out with --no-calibrate, or name another rule, "
            "such as --decide dice"
        )
    if fitted is None:
        raise UserError(
            f"the rule of {run.folder.path} is not fitted to its predictions: run "
            f"`semidice evaluate {shlex.quote(str(run.folder.path))} --decide fitted`, or name another rule "
            "with --decide"
        )
    return Decision.parse(fitted.decision)


def _interval(
    run: TrainedRun, options: PredictOptions, calibrator: KeptCalibrator | None, console: Console
) -> IntervalOptions | None:
    """The interval that the options ask for, corrected if the run has a correction of its level."""
    if options.interval is None:
        return None
    with given("--interval"):
        check_level(options.interval)
    level, correction = f"{options.interval:g}", None
    why = (
        f"`semidice evaluate {shlex.quote(str(run.folder.path))} --interval {level}` fits the correction"
        if calibrator is None
        else "corrections are fitted to predictions that are not calibrated; --no-calibrate uses them"
    )
    fits = current_fits(run) if calibrator is None else None
    if fits is not None:
        correction = fits.intervals.get(level, {}).get(ALL_FOLDS)
    if correction is None:
        say(console, f"intervals of volumes are not corrected: {why}")
    return IntervalOptions(options.interval, correction)


def chosen_folds(run: TrainedRun, fold: int | None, console: Console) -> tuple[int, ...]:
    """The fold, or all finished ones; a ValueError if there is none. Says which ones are missing."""
    finished = run.finished_folds
    if fold is not None:
        run.checkpoint_path(fold)
        if fold not in finished:
            say(console, f"fold {fold} of {run.folder.path} is not finished: using its current weights")
        return (fold,)
    if not finished:
        raise UserError(
            f"{run.folder.path} has no finished fold to predict with: continue with "
            "`semidice train --resume`, or name a fold that has a checkpoint with --fold"
        )
    missing = list(map(str, run.missing_folds))
    if missing:
        say(console, f"without fold {', '.join(missing)}, which is not finished")
    return finished


def _warn_of_training_inputs(
    run: TrainedRun, folds: Sequence[int], cases: Sequence[InputCase], console: Console
) -> None:
    """Name the inputs with a file that a network of these folds was trained on, by its SHA-256.

    None are named if the dataset of the run is not on this machine, or was prepared again.
    """
    try:
        dataset = Dataset(run.recipe.data.dataset)
        fold_of_case = read_folds(run.folder.folds, dataset)
    except UserError:
        return
    if dataset.manifest_sha256 != run.facts.manifest_sha256:
        return
    trained_on = {
        digest
        for case, held_out in zip(dataset.cases, fold_of_case, strict=True)
        if any(fold != held_out for fold in folds)
        for digest in case.scan.inputs.values()
    }
    names = []
    for case in cases:
        # a file that cannot be read is reported when it is predicted
        with suppress(OSError):
            if any(file_hash(path) in trained_on for path in case.files):
                names.append(case.name)
    if names:
        say(
            console,
            f"warning: the networks were trained on {listing(names, 'input')}: their scores would be too "
            f"good; `semidice evaluate {shlex.quote(str(run.folder.path))}` scores held-out cases",
        )


def _settings(
    run: TrainedRun, folds: Sequence[int], options: PredictOptions, calibrator: KeptCalibrator | None
) -> dict[str, Any]:
    """Everything that the results depend on, except the inputs and the device."""
    return {
        "method": run.recipe.name,
        "trained_on": run.facts.manifest_sha256,
        "class_names": list(run.facts.class_names),
        "checkpoints": {str(fold): file_hash(run.checkpoint_path(fold)) for fold in folds},
        "flips": mirrored_axes(run.recipe, run.facts.num_axes, flips=options.flips) != (),
        "uncertainty": options.uncertainty,
        "window": options.window,
        "slice_axis": options.slice_axis,
        "calibrator": calibrator and {"name": calibrator.name, "sha256": calibrator.sha256},
    }
