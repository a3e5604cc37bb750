"""A trained run as one file that needs no semidice: ONNX, or a program of torch.export (.pt2).

    image (N, channels, H, W), intensities in [0, 1]
      --mean and std of a fold, padding, network, activation--> mean of the folds: prob (N, C, H, W)

These are the probabilities of `semidice predict` in float32, before a calibrator, for an image that is not
cut into windows. N, H and W are free. Not inside: the scaling of raw values to [0, 1], `data.intensities`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor, nn

from .. import __version__
from ..arrays import SIZE_MULTIPLE
from ..data.geometry import Grid
from ..data.intensities import INTENSITY_UNITS
from ..errors import UserError
from ..extras import need
from ..networks.predictor import network_probability
from ..paths import atomic_write
from ..prediction.command import Ensemble
from ..prediction.inputs import InputCase, InputImage
from ..prediction.options import PredictOptions
from ..runs.run import TrainedRun, mirrored_axes

# the largest allowed difference of a probability between the file and `semidice predict`
TOLERANCE = 1e-4
Size = tuple[int, int]


class Exportable(nn.Module):
    """The mean probability of the networks of some folds, from intensities in [0, 1]."""

    def __init__(self, run: TrainedRun, folds: Sequence[int], *, flips: bool | None = None) -> None:
        super().__init__()
        self.networks = nn.ModuleList(run.network(fold, device="cpu") for fold in folds)
        mean, std = zip(*(run.facts.mean_std(fold) for fold in folds), strict=True)
        self.register_buffer("mean", torch.tensor(mean)[:, :, None, None])
        self.register_buffer("std", torch.tensor(std)[:, :, None, None])
        self.flips = mirrored_axes(run.recipe, 2, flips=flips)

    def forward(self, image: Float32[Tensor, "N channels H W"]) -> Float32[Tensor, "N C H W"]:
        rows, columns = (-length % SIZE_MULTIPLE for length in image.shape[-2:])
        # the image is in the middle, as in `data.batches.storage.centred`
        top, left = (rows + 1) // 2, (columns + 1) // 2
        around = [left, columns - left, top, rows - top]
        folds = zip(self.networks, self.get_buffer("mean"), self.get_buffer("std"), strict=True)
        probs = [
            network_probability(network, F.pad((image - mean) / std, around), dtype="fp32", flips=self.flips)
            for network, mean, std in folds
        ]
        # a negative padding crops
        return F.pad(torch.stack(probs).mean(0), [-count for count in around])


def export_run(
    run: TrainedRun, folds: Sequence[int], out: Path, *, flips: bool | None = None, size: Size | None = None
) -> dict[str, float]:
    """Write the mean of the folds to `out`; the largest difference to `semidice predict`, by image.

    If it exceeds `TOLERANCE`, nothing is written. flips: see `PredictOptions`. size: of images; None for any.
    """
    writers = {".onnx": _write_onnx, ".pt2": _write_pt2}
    if out.suffix not in writers:
        raise UserError(f"a network is exported to a file with {' or '.join(writers)}; got {out}")
    for package in ("onnx", "onnxscript", "onnxruntime") if out.suffix == ".onnx" else ():
        need(package, "the export to ONNX")
    model = Exportable(run, folds, flips=flips).eval()
    program = _exported_program(model, len(run.facts.channels), size)
    facts = {
        "semidice": __version__,
        "recipe": run.recipe.name,
        "folds": json.dumps(list(folds)),
        "classes": json.dumps(run.facts.class_names),
        "channels": json.dumps(run.facts.channels),
        "input": "(N, channels, H, W): intensities in [0, 1], scaled as in the options `prepare`",
        "prepare": run.facts.options.model_dump_json(),
    }
    networks = dict(zip(folds, model.networks, strict=True))
    options = PredictOptions(flips=flips, window=SIZE_MULTIPLE * 10**6)
    ensemble = Ensemble(run, networks, options, torch.device("cpu"))
    with atomic_write(out) as path:
        exported, differences = writers[out.suffix](program, path, facts), {}
        generator = np.random.default_rng(0)
        for height, width in [size] if size else [(70, 64), (64, 131)]:
            name = f"a random image of {height}x{width}"
            stored = generator.integers(0, 32768, (1, len(run.facts.channels), height, width), dtype=np.int16)
            prob = exported(torch.from_numpy(stored) * torch.tensor(INTENSITY_UNITS["int16"]))
            image = InputImage(InputCase(name, (out,)), stored, Grid((height, width)), None)
            differences[name] = float(np.abs(prob[0] - ensemble.predict(image, bool)).max())
            # the condition is also false for NaN
            if not differences[name] <= TOLERANCE:
                raise UserError(
                    f"the exported network differs from `semidice predict` by {differences[name]:.2g} on "
                    f"{name}; expected at most {TOLERANCE:g}; {out} was not written: export another fold"
                )
    return differences


@torch.no_grad()
def _exported_program(model: nn.Module, num_channels: int, size: Size | None) -> Any:
    shapes = (dict.fromkeys([0] if size else [0, 2, 3], torch.export.Dim.AUTO),)
    # sizes that are padded, so that the padding is recorded
    image = torch.rand(2, num_channels, *(size or (3 * SIZE_MULTIPLE - 7, 4 * SIZE_MULTIPLE - 11)))
    try:
        return torch.export.export(model, (image,), dynamic_shapes=shapes)
    except Exception as error:  # of many kinds
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        remedy = "choose another network" if size else "name the size of its images, such as --size 256x256"
        raise UserError(f"this network cannot be exported: {reason}; {remedy}") from error


def _write_onnx(program: Any, path: Path, facts: dict[str, str]) -> Callable[[Tensor], np.ndarray]:
    import onnx
    import onnxruntime

    names: Any = {"input_names": ["image"], "output_names": ["prob"], "verbose": False}
    model = cast(Any, torch.onnx.export(program, dynamo=True, **names)).model_proto
    onnx.helper.set_model_props(model, facts)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda image: session.run(["prob"], {"image": image.numpy()})[0]


def _write_pt2(program: Any, path: Path, facts: dict[str, str]) -> Callable[[Tensor], np.ndarray]:
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={"semidice.json": json.dumps(facts)})
    with path.open("rb") as file:
        exported = torch.export.load(file).module()
    return lambda image: exported(image).numpy()
