"""The probes of `oracle`: what is computed, on which inputs, and under which neutral name it is recorded.

A probe gets a record and an adapter, `oracle_f55cdaf` or `oracle_today`, and calls nothing of semidice but
that. It works in an empty folder of its own. This module goes in the last part of the redesign.
"""

import dataclasses
import hashlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import nibabel
import numpy as np
import torch
import yaml
from PIL import Image

# for arrays with more values than LARGEST, the SHA-256 and every 97th value are stored
LARGEST, STRIDE = 1 << 14, 97
FORMS = ("min", "product", "squared", "relaxed")
ACTIVATIONS = ("softmax", "sigmoid", "none")
TVERSKY = {"alpha": 0.7, "beta": 0.3}
LOG_TVERSKY = TVERSKY | {"gamma": 0.75, "log": True}
Options = dict[str, Any]


class Record:
    """Arrays by name."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def put(self, name: str, value: Any) -> None:
        """Store a value: records and sequences by their parts, rows of a table as their texts and numbers."""
        if dataclasses.is_dataclass(value):
            value = vars(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], tuple):
            texts = [" | ".join(str(cell) for cell in row if not isinstance(cell, float)) for row in value]
            numbers = np.array([[cell for cell in row if isinstance(cell, float)] for row in value])
            value = {"rows": np.array(texts), "numbers": numbers}
        elif isinstance(value, list | tuple) and not all(isinstance(part, str) for part in value):
            value = value._asdict() if hasattr(value, "_asdict") else dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.put(f"{name}: {key}", part)
            return
        if isinstance(value, torch.Tensor):
            # numpy has no bfloat16; float32 represents every bfloat16 value exactly
            is_brain = value.dtype == torch.bfloat16
            name, value = f"{name} (bfloat16)" if is_brain else name, value.detach()
            value = (value.float() if is_brain else value).numpy()
        if name in self.values:
            raise RuntimeError(f"the probe has two values {name}")
        array = np.array("none" if value is None else value)
        if array.size > LARGEST:
            self.values[f"{name} SHA-256"] = np.array(hashlib.sha256(array.tobytes()).hexdigest())
            array = array.ravel()[::STRIDE].copy()
        self.values[name] = array

    def attempt(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Store the result of a call, or that it was refused with a ValueError."""
        try:
            value = function(*arguments, **options)
        except ValueError:
            value = "refused"
        self.put(name, value)

    def attempt_loss(self, name: str, loss: Any, prediction: Any, *rest: Any, **options: Any) -> None:
        """`attempt` of a loss of one prediction, or of a list of outputs, with its gradients."""
        several = isinstance(prediction, list)
        parts = prediction if several else [prediction]
        if options.get("activation") == "none":
            parts = [part.softmax(1) for part in parts]

        def value_and_gradients() -> Options:
            inputs = [part.clone().requires_grad_() for part in parts]
            value = loss(inputs if several else inputs[0], *rest, **options)
            total = value["total"] if isinstance(value, dict) else value
            return {"value": value, "gradient": torch.autograd.grad(total, inputs)}

        self.attempt(name, value_and_gradients)


def grid(**axes: Any) -> list[Options]:
    """Every combination of the values of the axes."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def shown(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(*shape: int, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """Logits, a hard and a soft target, and which voxels are valid: all, or some.

    In the first image, some classes are absent. In the last image, the soft target equals the prediction at
    every second voxel; with several images, one of its probabilities is exactly 1.
    """
    draw, space, classes = drawn(seed), (shape[0], *shape[2:]), max(2, shape[1] - 1)
    first, second = (2 * torch.randn(shape, generator=draw) for _ in range(2))
    if len(first) > 1:
        first[-1].flatten(1)[0, 0] = 200
    prob = first.softmax(1) if shape[1] > 1 else first.sigmoid()
    hard = torch.randint(classes, space, generator=draw)
    hard[0] %= 2
    soft = torch.zeros(shape)
    soft[:, :classes] = second[:, :classes].softmax(1) if shape[1] > 1 else second.sigmoid()
    soft[-1, ..., ::2] = prob[-1, ..., ::2]
    valid = torch.rand(space, generator=draw) > 0.2
    return first, {"hard": hard, "soft": soft}, {"all": None, "valid": valid}


def probe_losses(record: Record, api: Any) -> None:
    """Options, types and masks on small batches; overlap; teachers."""
    losses: dict[str, tuple[Any, Options]] = {
        "dice": (api.dice, {}),
        "focal jaccard": (api.jaccard, {"gamma": 2.0}),
        "tversky": (api.tversky, TVERSKY),
        "log tversky": (api.tversky, LOG_TVERSKY),
    }
    means = {"over": ("batch", "image", "class"), "classes": ("all", "present"), "background": (True, False)}
    logits, targets, masks = batch(2, 4, 6, 5)
    options = grid(form=FORMS, activation=ACTIVATIONS, smooth=(0.0, 1.0), **means)
    for (name, (loss, more)), target, each in product(losses.items(), targets, options):
        record.attempt_loss(f"{name} {target} {shown(each)}", loss, logits, targets[target], **each, **more)
    options = grid(activation=ACTIVATIONS, binning=("hard", "soft"), num_bins=(5, 20), **means)
    for target, each in product(targets, options):
        arguments: Any = api.loss_module("CalibrationError"), logits, targets[target], masks["valid"]
        record.attempt_loss(f"calibration {target} {shown(each)}", *arguments, **each)
    for dtype, space in product(("float64", "float32", "bfloat16", "float16"), ((7,), (5, 4), (4, 3, 2))):
        logits, targets, masks = batch(2, 3, *space, seed=1)
        logits = logits.to(getattr(torch, dtype))
        counted = {"all": {}, "valid": {"valid": masks["valid"]}, "ignored": {"ignore_index": 1}}
        options = grid(activation=ACTIVATIONS, class_weight=(None, [0.2, 1.0, 0.5]))
        for mask, target, each in product(counted, targets, options):
            name, used = f"{dtype} {len(space)}D {mask} {target} {shown(each)}", each | counted[mask]
            record.attempt_loss(f"cross entropy {name}", api.cross_entropy, logits, targets[target], **used)
            for form in FORMS:
                used["form"] = form
                record.attempt_loss(f"dice {form} {name}", api.dice, logits, targets[target], **used)
    logits, targets, masks = batch(2, 3, 16, 16, seed=5)
    for form, target in product(FORMS, targets):
        sums = api.overlap(logits.softmax(1), targets[target], form=form, valid=masks["valid"])
        record.put(f"overlap {form} {target}", [sums, api.tversky_index(sums, **TVERSKY, smooth=0.1)])
    for form in FORMS:
        soft = targets["soft"].clone().requires_grad_()
        gradient = torch.autograd.grad(api.dice(logits.softmax(1), soft, form=form), soft)
        record.put(f"gradient in the target {form}", gradient)
    torch.manual_seed(0)
    arguments = torch.nn.Conv2d(1, 3, 3, padding=1), logits[:, :1], targets["hard"], masks["valid"]
    draws = grid(keys_per_image=(False, True), keys_from=("region", "batch"), reweight_keys=(True, False))
    kinds = grid(calibration=("none", "temperature", "kde"), temperature=(1.0, 1.5))
    for each in [a | b for a, b in product(kinds, draws)]:
        used = each | {"num_keys": 64, "bandwidth": 0.01, "generator": drawn(1)}
        record.attempt(f"teacher {shown(each)}", api.teacher, *arguments, **used)


def probe_mixtures(record: Record, api: Any) -> None:
    """Losses by kernels and by definition, below and above 2^19 logits, where a CPU processes blocks."""
    sizes = {
        (1, 2, 512, 511): ("min",),
        (1, 2, 512, 512): FORMS,
        (2, 1, 512, 512): ("min", "relaxed"),
        (2, 13, 143, 142): FORMS,
        (1, 13, 202, 202): ("min", "squared"),
        # channels last
        (3, 2, 300, 400): ("min", "squared"),
    }
    regions: dict[str, Options] = {
        "Jaccard": {"form": "product", "smooth": 1.0},
        "Tversky": TVERSKY | {"gamma": 2.0, "over": "image", "classes": "present"},
        "Dice": {"class_weight": [0.2, 1.0, 0.5], "ignore_index": 1, "background": False},
    }
    for way in ("kernels", "definition"):
        api.use_kernels(way == "kernels")
        for shape, forms in sizes.items():
            logits, targets, masks = batch(*shape, seed=2)
            logits = logits.to(memory_format=torch.channels_last) if shape[0] == 3 else logits
            axes = grid(form=forms, activation=ACTIVATIONS), targets, masks, ("float32", "bfloat16")
            for each, target, mask, dtype in product(*axes):
                name = f"{way} {shape} {shown(each)} {target} {mask} {dtype}"
                arguments: Any = logits.to(getattr(torch, dtype)), targets[target], masks[mask]
                record.attempt_loss(name, api.mixture, *arguments, **each)
        for shape in ((2, 3, 16, 16), (1, 3, 424, 424)):
            logits, targets, masks = batch(*shape, seed=3)
            outputs, prob = [logits, logits[..., ::2, ::2].contiguous()], logits.flip(-1).softmax(1)
            for kind, (target, label) in product(regions, targets.items()):
                name, rest, options = f"{way} {shape} {kind} {target}", (label, masks["valid"]), regions[kind]
                record.attempt_loss(f"region {name}", api.loss_module(kind), logits, *rest, **options)
                options = options | ({"alpha": 1.0, "beta": 1.0} if kind == "Jaccard" else {})
                record.attempt_loss(f"total {name}", api.mixture, outputs, label, terms=False, **options)
                options = options | {"cross_entropy_weight": 0.5}
                used = options | {"scale_weights": (0.7, 0.3)}
                record.attempt_loss(f"deep {name}", api.mixture, outputs, *rest, **used)
                used = options | {"calibration_weight": 0.3, "calibration_binning": "soft"}
                record.attempt_loss(f"with calibration {name}", api.mixture, logits, *rest, **used)
                for terms in (("cross_entropy",), ("cross_entropy", "region")):
                    used, arguments = options | {"terms": terms, "label_weight": 0.4}, (logits, *rest, prob)
                    record.attempt_loss(f"distillation {terms} {name}", api.distillation, *arguments, **used)
        twice: list[tuple[str, Any, Options]] = [(form, api.dice, {}) for form in FORMS]
        twice += [(form, api.tversky, LOG_TVERSKY) for form in FORMS if form != "squared"]
        for (form, loss, more), activation, size in product(twice, ACTIVATIONS, (8, 520)):
            logits, targets, _ = batch(1, 2, size, size, seed=4)
            x = (logits.softmax(1) if activation == "none" else logits).double().requires_grad_()
            value = loss(x, targets["soft"].double(), form=form, activation=activation, **more)
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            again = torch.autograd.grad((gradient * x.detach().cos()).sum(), x)
            name = f"{way} second derivative {form} {activation} {size} {shown(more)}"
            record.put(name, again)


def probe_labels(record: Record, api: Any) -> None:
    """Labels from masks of two and of three classes, numpy and torch, one case and several."""
    draw = np.random.default_rng(0)
    truth = draw.random((3, 1, 12, 10)) + 0.3 * draw.random((3, 4, 12, 10))
    present = np.array([[True] * 4, [True, False, True, True], [False, True, False, False]])
    makers = "majority_label mean_label random_rater_label dice_weights dice_weighted_label staple"
    makers += " staple_label rater_agreement"
    ways = [("smooth_label", each) for each in grid(eps=(0.0, 0.1, 1.0))]
    ways += [("boundary_smooth_label", each) for each in grid(width=(1, 3, 4, 5), valid=(False, True))]
    ways += [("spatially_smooth_label", each) for each in grid(sigma=(0.0, 0.7, 2.0), valid=(False, True))]
    libraries: dict[str, Any] = {"numpy": np.asarray, "torch": torch.from_numpy}
    flags = (False, True)
    for num_classes, library, batched, absent in product((None, 3), libraries, flags, flags):
        masks = truth > 0.8 if num_classes is None else (truth * 2.2).astype(np.uint8)
        every = masks, truth[:, 0] > 0.3, present
        arrays = [libraries[library](np.array(each if batched else each[1])) for each in every]
        options: Options = {"num_classes": num_classes, "batched": batched}
        options |= {"present": arrays[2]} if absent else {}
        name = f"{num_classes or 2} classes {library} batched={batched} absent={absent}"
        for maker in makers.split():
            more = {"generator": 5} if maker == "random_rater_label" else {}
            record.attempt(f"{maker} {name}", api.label, maker, arrays[0], **options, **more)
        label = api.label("mean_label", arrays[0], **options)
        for way, each in ways:
            used = each | {"batched": batched}
            used |= {"valid": arrays[1] if each["valid"] else None} if "valid" in each else {}
            record.attempt(f"{way} {shown(each)} {name}", api.label, way, label, **used)


def probe_calibration(record: Record, api: Any) -> None:
    """Key points, kernel density, bandwidths, and calibrators before and after saving and loading."""
    methods = grid(bandwidth=(1e-3, 1e-2, 0.1), method=("auto", "reference", "attention"))
    errors = grid(bandwidth=(1e-3, 0.1), kind=("canonical", "marginal", "top_label"), p=(1, 2))
    calibrators = ("temperature", "vector", "isotonic", "beta", "kde")
    for classes, kind in product((2, 3), ("hard", "soft")):
        logits, targets, masks = batch(2, classes, 24, 24, seed=classes)
        prob, target, valid, name = logits.softmax(1), targets[kind], masks["valid"], f"{classes} {kind}"
        for per_image, mask in product((False, True), masks):
            keys = api.keys(prob, target, 50, valid=masks[mask], generator=drawn(0), per_image=per_image)
            keyed = f"{name} {'per image' if per_image else 'of batch'} {mask}"
            record.put(f"keys {keyed}", keys)
            for each in methods:
                used = each | {"region": masks[mask]}
                record.attempt(f"recalibrated {keyed} {shown(each)}", api.recalibrated, prob, keys, **used)
            for each in errors:
                used, what = each | {"valid": masks[mask]}, f"{keyed} {shown(each)}"
                record.attempt(f"error {what}", api.kernel_error, prob, target, {}, **used)
                record.attempt(f"error by keys {what}", api.kernel_error, prob, target, keys, **each)
        for number in (300, 2048):
            choice = api.bandwidth(prob, target, num_points=number, valid=valid, generator=drawn(0))
            record.put(f"bandwidth {name} {number}", choice)
        for width in (0, 1, 3):
            region = api.calibration_region(prob, target, width=width, valid=valid)
            record.put(f"region {name} {width}", region)
        points = prob.movedim(1, -1).reshape(-1, classes)[:200].requires_grad_()
        own = {"prob": points, "target": points.detach(), "weight": None}
        value = api.recalibrated(points, own, bandwidth=0.01, leave_one_out=True)
        record.put(f"without own {name}", [value, torch.autograd.grad(value.square().sum(), points)])
        for activation, calibrator in product(("none", "softmax"), calibrators):
            prediction = prob if activation == "none" else logits
            batches = [(prediction, target, valid), (prediction.flip(-1), target, None)]
            path, options = Path(f"{calibrator} {name} {activation}"), {"num_keys": 128, "seed": 3}
            used = {"activation": activation} | (options if calibrator == "kde" else {})
            record.attempt(str(path), api.calibrated, calibrator, batches, prediction, path, **used)


def probe_metrics(record: Record, api: Any) -> None:
    """Scores of images and volumes, decisions, volumes and their intervals."""
    spacing, sides = {"spacing_mm": (0.7, 0.8, 2.5)}, (0.7, 0.8, 2.5)
    binned = grid(num_bins=(10, 15), binning=("equal_width", "equal_mass"))
    ruled = grid(rule=(None, "argmax", "threshold:0.3"), empty=(1.0, np.nan))
    plain = "binarized_dice_score soft_dice_score brier_error negative_log_likelihood"
    scores: dict[str, list[Options]] = {name: [{}] for name in plain.split()}
    scores |= {"dice_score": ruled, "iou_score": ruled}
    scores |= {"calibration_error": binned, "classwise_calibration_error": binned}
    scores["kde_calibration_error"] = grid(kind=("canonical", "marginal", "top_label"), p=(1, 2))
    scores["volume_error_ml"] = [{"of": of, **spacing} for of in ("mask", "probability")]
    of_raters: dict[str, Any] = {"rater_dice_score": {}, "volume_coverage_score": {}}
    of_raters |= {"volume_crps_error_ml": spacing, "volume_width_ml": spacing}
    rules = ("argmax", "threshold:0.3", "dice", "jaccard", "nested", "mix:0.4")
    for shape in ((3, 1, 20, 22), (3, 2, 20, 22), (2, 3, 8, 10, 12)):
        logits, targets, masks = batch(*shape, seed=6)
        # with one channel, the probabilities lie on thresholds and edges of bins
        prob = logits.softmax(1) if shape[1] > 1 else logits.sigmoid().mul(10).round().div(10)
        targets["ones"], valid = (logits.flip(-1) > 0).float(), masks["valid"]
        for name in ("hausdorff_error_mm", "surface_dice_score"):
            scores[name] = [{"spacing_mm": sides[: len(shape) - 2]}]
        for (name, options), target, mask in product(scores.items(), targets, masks):
            for each in options:
                what, used = f"{shape} {name} {target} {mask} {shown(each)}", each | {"valid": masks[mask]}
                record.attempt(what, api.score, name, prob, targets[target], **used)
        several = grid(confidence=("top_class", "classwise"), per_case=(True, False))
        for target, each in product(targets, [*several, *binned]):
            used = each | {"valid": valid}
            record.attempt(f"{shape} bins {target} {shown(each)}", api.bins, prob, targets[target], **used)
        raters, present = api.level_masks(prob.flip(0), num_samples=4), [[True, True, False, True]] * shape[0]
        more: Options = {"num_classes": shape[1] if shape[1] > 2 else None, "valid": valid}
        record.put(f"{shape} agreement", api.agreement_of_raters(raters, more["num_classes"]))
        more["present"] = torch.tensor(present)
        distance = api.energy_distance(api.level_masks(prob, num_samples=5), raters, **more)
        mean = api.foreground_mean(prob.flatten(2).mean(2))
        record.put(f"{shape}", {"raters": raters, "energy distance": distance, "foreground mean": mean})
        for name, used in of_raters.items():
            record.attempt(f"{shape} {name}", api.score, name, prob, raters, **more, **used)
        for rule, mask, exclusive in product(rules, masks, (True, False)):
            what, used = f"{shape} {rule} {mask} exclusive={exclusive}", {"valid": masks[mask]}
            record.attempt(what, api.decided, rule, prob, exclusive=exclusive, **used)
        record.put(f"{shape} volumes", api.volumes(prob, raters, shape[1], valid=valid, **spacing))
        cases = list(zip(prob, targets["hard"], valid, map(str, range(shape[0])), strict=True))
        record.attempt(f"{shape} fitted rule", api.fitted_rule, cases)
    draw = np.random.default_rng(2)
    expected = draw.uniform(5, 50, (30, 2))
    volumes = expected[..., None] * draw.uniform(0.5, 1.6, (30, 2, 3))
    volumes[3, :, 1] = np.nan
    ends, patients = (0.8 * expected, 1.1 * expected), [f"p{number // 2}" for number in range(30)]
    record.put("conformal", api.conformal(*ends, volumes, patients, 0.8, expected=expected))


def probe_statistics(record: Record, api: Any) -> None:
    """Comparisons of methods with patients, gaps and seeds, as numbers, texts and files; the tests alone."""
    draw = np.random.default_rng(1)
    middles, gains = {"dice_score": 0.8, "volume_error_ml": 3.0}, {"SDL": 0.0, "DML1": 0.05, "a_b%": 0.04}

    def rows(num_cases: int, per_patient: int = 1, seeds: Sequence[int] = (-1,)) -> list[tuple[Any, ...]]:
        return [
            (f"c{case}", f"p{case // per_patient}", case % 3, seed, method, "mean", metric, float(value))
            for metric, middle in middles.items()
            for method, gain in gains.items()
            # SDL has one training
            for seed in (seeds if method != "SDL" else (-1,))
            for case, value in enumerate(middle + gain + 0.1 * draw.random(num_cases))
        ]

    tables = {"cases": rows(24), "patients": rows(24, 2), "few": rows(5), "seeds": rows(24, 1, (0, 1, 4))}
    tables |= {"patients and seeds": rows(30, 3, (0, 1)), "gaps": rows(24, 2), "equal": rows(12)}
    for number in (5, 40):
        tables["gaps"][number] = (*tables["gaps"][number][:-1], float("nan"))
    tables["equal"] = [(*row[:-1], 0.5) if row[4] != "DML1" else row for row in tables["equal"]]
    ways: list[Options] = [{}, {"baseline": "SDL"}, {"cover_seeds": False}, {"level": 0.2}]
    for name, of_table in tables.items():
        table = api.case_table(of_table)
        for metric, each in product(middles, ways):
            record.put(f"{name}, {metric} {shown(each)}", api.compared(table, metric, **each))
        record.put(f"{name}, texts", api.texts(table, list(middles)))
        for path in (Path(f"{name}.csv"), Path(f"{name}.parquet")):
            again = api.written_and_read(table, path)
            record.put(f"file {path}", api.case_rows(path))
            record.put(f"read {path}", api.compared(again, "dice_score"))
    values, groups = draw.normal(0.1, 1, (30, 4)), [f"g{number // 3}" for number in range(30)]
    options = {"num_resamples": 500, "level": 0.1}
    record.put("bootstrap", [api.bootstrap(values, groups=each, **options) for each in (None, groups)])
    for number in (30, 8):
        record.put(f"permutation of {number}", api.permutation_test(values[:number], seed=2))
    record.put("holm", api.holm(np.array([0.01, 0.04, 0.03, 0.5])))
    for name in ("dice_score", "volume_error_ml", "surface_dice_score_2mm", "volume_ml"):
        record.attempt(f"higher is better: {name}", api.higher_is_better, name)


def run_forked(function: Callable[..., None], *arguments: Any) -> bool:
    """Whether a call succeeds in a forked process, where slow imports are already done."""
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def _main(*arguments: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["semidice", *arguments]
    runpy.run_module("semidice", run_name="__main__", alter_sys=True)


def semidice(api: Any, *line: str, recipe: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Run a command in a new process; raise an error if it fails."""
    arguments = api.command(*line, recipe=api.recipe_options(recipe or {}), **options)
    if not run_forked(_main, *arguments):
        raise RuntimeError(f"failed: semidice {' '.join(arguments)}")


def make_folder(root: str, *space: int, suffix: str, cases: int = 4) -> None:
    """Write images of a ball in a ball and different masks of three raters; one rater misses a case."""
    draw, nifti = np.random.default_rng(len(space)), cast(Any, nibabel.Nifti1Image)
    axes = np.stack(np.meshgrid(*(np.linspace(-1, 1, side) for side in space), indexing="ij"))
    for case in range(cases):
        centre = draw.uniform(-0.2, 0.2, (len(space), *[1] * len(space)))
        radius = np.sqrt(((axes - centre) ** 2).sum(0))
        pictures = {"images": 40 + 80.0 * (radius < 0.6) + 80 * (radius < 0.3) + draw.normal(0, 10, space)}
        for rater in (0.5, 0.6, 0.7):
            pictures[f"raters/{rater}"] = (radius < rater) + 1.0 * (radius < rater / 2)
        if case == 1:
            del pictures["raters/0.7"]
        for home, picture in pictures.items():
            path = Path(root) / home / f"case{case}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = picture.clip(0, 255).astype(np.uint8)
            if suffix == ".png":
                Image.fromarray(stored).save(path)
            else:
                nibabel.save(nifti(stored, np.diag([0.7, 0.8, 2.5, 1])), path)
    # the last two cases are of one patient
    lines = [f"case{case},patient{min(case, cases - 2)}" for case in range(cases)]
    (Path(root) / "cases.csv").write_text("\n".join(["case,patient", *lines, ""]))


def probe_prepare(record: Record, api: Any) -> None:
    """Prepared phantoms and folders of pictures and of volumes, and a contact sheet."""
    make_folder("pictures", 40, 36, suffix=".png")
    make_folder("volumes", 20, 24, 6, suffix=".nii")
    semidice(api, "prepare", "phantom", "two classes", cases=5, size="32x48")
    semidice(api, "prepare", "phantom", "three classes", cases=4, classes=3, raters=5, seed=3)
    semidice(api, "prepare", "folder", "pictures", "as they are")
    semidice(api, "prepare", "folder", "pictures", "resized", size="64x32", window=(20, 220))
    semidice(api, "prepare", "folder", "volumes", "slices")
    semidice(api, "prepare", "folder", "volumes", "foreground", slices="foreground", size="32x32")
    semidice(api, "prepare", "folder", "volumes", "whole", slices="none")
    for name in ("two classes", "three classes", "as they are", "resized", "slices", "foreground", "whole"):
        record.put(name, api.dataset_arrays(Path(name)))
    semidice(api, "check", "resized", out="sheet.png")
    record.put("contact sheet", np.array(Image.open("sheet.png")))


# options of all trainings, and of the variants of two grids
SMALL: Options = {"batch_size": 4, "model.options.channels": [8, 16], "data.num_folds": 2}
SMALL |= {"schedule.epochs": 30, "optimiser.lr": 0.2, "log_every": 5}
SYSTEMS = """
mc_dropout: {system.name: mc_dropout, system.num_samples: 3}
multi_head: {system.name: multi_head}
softseg: {system.name: softseg, validation.flips: true}
mrnet: {system.name: mrnet}
learned_reliability: {system.name: learned_reliability}
random: {label.maker: random, precision.dtype: bf16, augment.rotate_degrees: 20, augment.gamma: 0.2}
weighted: {label.maker: dice_weighted, label.smoothing: spatial, optimiser.name: adamw}
staple: {label.maker: staple, loss.alpha: 0.7, loss.beta: 0.3, loss.gamma: 2, optimiser.clip_norm: 1}
boundary: {label.maker: majority, label.smoothing: boundary, loss.over: image, optimiser.accumulate: 2}
jaccard: {loss.alpha: 1, loss.beta: 1, loss.form: product, augment.noise: 0.1, label.raters: [0, 1]}
relaxed: {loss.form: relaxed, loss.class_weight: [0.3, 1], loss.calibration_weight: 0.2}
"""
STUDENTS = """
teacher: {label.maker: majority}
none: {teacher.run: teacher, teacher.calibration: none, teacher.terms: [cross_entropy]}
temperature: {teacher.run: teacher, teacher.calibration: temperature, teacher.label_weight: 0.3}
kde: {teacher.run: teacher, teacher.calibration: kde}
batch: {teacher.run: teacher, teacher.calibration: kde, teacher.keys_from: batch}
"""


def compare_grid(
    record: Record, api: Any, name: str, variants: str, seeds: int, recipe: Options, **options: Any
) -> None:
    """Train the variants that are not trained yet, and compare them."""
    of_variants = {name: api.recipe_options(each) for name, each in yaml.safe_load(variants).items()}
    Path("grid.yaml").write_text(api.grid_text("quick", of_variants, seeds=seeds))
    semidice(api, "compare", "data", "grid.yaml", out="out", recipe=SMALL | recipe, **options)
    record.put(name, api.comparison_numbers(Path("out")))
    record.put(f"{name}: scores", api.case_rows(Path("out") / api.FILES["scores"]))


def put_runs(record: Record, api: Any, folder: str) -> None:
    """Everything that trainings leave."""
    for name, run in api.run_folders(Path(folder)).items():
        record.put(name, api.run_facts(run))
        record.put(f"{name}: scores", api.case_rows(run / api.FILES["scores"]))
        for fold, path in api.fold_folders(run).items():
            record.put(f"{name}: {fold}", api.fold_content(path))
            record.put(f"{name}: {fold}: scores", api.case_rows(path / api.FILES["scores"]))


def probe_training(record: Record, api: Any) -> None:
    """A run in two parts, and a grid of systems, labels, losses, optimisers and augmentations."""
    semidice(api, "prepare", "phantom", "data", cases=12, size="32x32", raters=3)
    options = SMALL | {"data.dataset": "data"}
    semidice(api, "train", "quick", out="runs/quick", recipe=options | {"data.folds": [0]})
    semidice(api, "train", "quick", out="runs/quick", recipe=options, resume=True)
    put_runs(record, api, "runs")
    compare_grid(record, api, "comparison", SYSTEMS, 1, {"data.folds": [1]})
    put_runs(record, api, "out")
    semidice(api, "report", "out", out="report.html")
    record.put("report", api.comparison_numbers(Path(api.FILES["tables of a report"])))


def probe_distillation(record: Record, api: Any) -> None:
    """A teacher and its students with two seeds, compared by two rules."""
    semidice(api, "prepare", "phantom", "data", cases=12, size="32x32", raters=3)
    compare_grid(record, api, "comparison", STUDENTS, 2, {})
    put_runs(record, api, "out")
    compare_grid(record, api, "comparison by rules", STUDENTS, 2, {}, decide=["dice", "fitted"])


def put_predicted(record: Record, api: Any, run: str, inputs: str, out: str, **options: Any) -> None:
    semidice(api, "predict", run, inputs, out=out, **options)
    record.put(out, api.predicted(Path(out)))
    record.put(f"{out}: volumes", api.volume_rows(Path(out) / api.FILES["volumes"]))


def probe_evaluation(record: Record, api: Any) -> None:
    """Scores, rules, intervals and calibrators of a run, and new scans predicted with them."""
    make_folder("pictures", 32, 32, suffix=".png", cases=12)
    semidice(api, "prepare", "folder", "pictures", "data")
    semidice(api, "train", "quick", out="run", recipe=SMALL | {"data.dataset": "data"})
    names = "dice_score iou_score binarized_dice_score soft_dice_score calibration_error brier_error"
    names += " kde_calibration_error classwise_calibration_error rater_calibration_error volume_error_ml"
    names += " negative_log_likelihood generalised_energy_distance rater_dice_score hausdorff_error_mm"
    names += " surface_dice_score volume_crps_error_ml volume_coverage_score volume_width_ml"
    semidice(api, "evaluate", "run", metric=names.split(), out="scores.csv")
    record.put("scores", api.case_rows(Path("scores.csv")))
    semidice(api, "evaluate", "run", decide=["dice", "fitted"], interval=0.8)
    run = Path("run")
    record.put("scores by rule", api.case_rows(run / api.FILES["scores by rule"]))
    record.put("volumes", api.volume_rows(run / api.FILES["volumes"]))
    record.put("fits", api.fits(run))
    predicted = record, api, "run", "pictures/images"
    put_predicted(*predicted, "plain", flips=True)
    put_predicted(*predicted, "by fitted rule", decide="fitted", interval=0.8, uncertainty=True)
    for keep, by in {"isotonic": "all", "temperature": "temperature"}.items():
        semidice(api, "calibrate", "run", by=by, keep=keep, out=f"{by}.csv")
        record.put(f"scores, calibrated by {by}", api.case_rows(Path(f"{by}.csv")))
        record.put(f"kept {keep}", api.kept_calibrator(run, batch(1, 3, 16, 16)[0].softmax(1)))
        put_predicted(*predicted, f"calibrated by {keep}", decide="dice")


def probe_volumes(record: Record, api: Any) -> None:
    """A run on slices of volumes; scores of scans, of slices and of files; new volumes and pictures."""
    make_folder("scans", 64, 64, 5, suffix=".nii")
    make_folder("pictures", 100, 80, suffix=".png")
    semidice(api, "prepare", "folder", "scans", "slices")
    semidice(api, "train", "quick", out="runs/slices", recipe=SMALL | {"data.dataset": "slices"})
    put_runs(record, api, "runs")
    names = "dice_score hausdorff_error_mm surface_dice_score volume_error_ml rater_dice_score"
    for unit in ("scan", "slice"):
        out = f"{unit}.csv"
        semidice(api, "evaluate", "runs/slices", metric=names.split(), unit=unit, tolerance=2, out=out)
        record.put(f"scores of each {unit}", api.case_rows(Path(out)))
    files: Options = {"predictions": "scans/raters/0.5", "dataset": "slices", "name": "rater"}
    semidice(api, "evaluate", out="files.csv", metric=names.split(), **files)
    record.put("scores of files", api.case_rows(Path("files.csv")))
    put_predicted(record, api, "runs/slices", "scans/images", "volumes", fold=1)
    put_predicted(record, api, "runs/slices", "pictures/images", "windows", window=64)


def probe_paper(record: Record, api: Any) -> None:
    """The list of the paper's tables. Its output contains times and is not compared."""
    semidice(api, "reproduce", list=True)
    record.put("finished", True)


PROBES: dict[str, Callable[[Record, Any], None]] = {
    name.removeprefix("probe_"): value for name, value in list(globals().items()) if name.startswith("probe_")
}
