"""Does a refactoring change a result? One probe runs on two checkouts, and its results are compared by bits.

    python benchmarks/compare_checkouts.py OLD_CHECKOUT NEW_CHECKOUT [--only losses --only training] [--all]

The probe uses what outlives a refactoring: public names of semidice and semidice.metrics, the command line,
recipe keys, and files. Each section runs in a folder of one name, first with the old sources and then with
the new ones, on the CPU with one thread: paths in files must be the same too, and nothing is normalised. A
ValueError is a result, by its type; messages are not compared. Exit code 1 if anything differs.
"""

import argparse
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

# for arrays with more values than LARGEST, the SHA-256 and every 97th value are stored
LARGEST, STRIDE = 1 << 14, 97
# these contain package versions, durations, times of events, wording that may change, and dates
SKIPPED = (
    "*/versions.json",
    "*/arrays.json",
    "*/.checked.json",
    "*/seconds.json",
    "*/jobs.csv",
    "*.tfevents.*",
    "*.html",
    "*.svg",
)
FORMS = ("min", "product", "squared", "relaxed")
ACTIVATIONS = ("softmax", "sigmoid", "none")
# maximum number of differences shown per section without --all
SHOWN = 20
# modules that semidice uses and that take seconds to import
SLOW_TO_IMPORT = ("torch", "torchmetrics", "lightning_fabric", "torch.utils.tensorboard", "timm")


class Record:
    """Values by name, which `probe` writes as one npz file."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def put(self, name: str, value: Any) -> None:
        """Store a value, split recursively into arrays; its type is part of its name."""
        if dataclasses.is_dataclass(value):
            value = vars(value)
        elif isinstance(value, tuple | list):
            value = value._asdict() if hasattr(value, "_asdict") else dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.put(f"{name}.{key}", part)
            return
        name = f"{name} <{type(value).__name__} {getattr(value, 'dtype', '')}>"
        if name in self.values:
            raise RuntimeError(f"the probe has two values {name}")
        if hasattr(value, "detach"):
            # numpy has no bfloat16; float32 represents every bfloat16 value exactly
            value = value.detach()
            value = (value.float() if "bfloat16" in name else value).numpy()
        array = as_text(value) if isinstance(value, str) else np.array([] if value is None else value)
        if array.size > LARGEST:
            self.values[f"{name} SHA-256"] = as_text(hashlib.sha256(array.tobytes()).hexdigest())
            array = array.ravel()[::STRIDE].copy()
        self.values[name] = array

    def attempt(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Store the result of a call, or the fact that it raised a ValueError."""
        try:
            value = function(*arguments, **options)
        except ValueError as error:
            value = f"raised {type(error).__name__}"
        self.put(name, value)


def as_text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def grid(**axes: Any) -> list[dict[str, Any]]:
    """Every combination of the values of the axes."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def batch(*shape: int, seed: int = 0) -> tuple[Any, dict[str, Any], Any]:
    """Logits, a hard and a soft target, and valid.

    In the first image, some classes are absent. In the last image, the soft target equals the prediction at
    every second voxel; with several images, one of its probabilities is exactly 1.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    space, classes = (shape[0], *shape[2:]), max(2, shape[1] - 1)
    first, second = (2 * torch.randn(shape, generator=draw) for _ in range(2))
    if len(first) > 1:
        first[-1].flatten(1)[0, 0] = 200
    prob = first.softmax(1) if shape[1] > 1 else first.sigmoid()
    hard = torch.randint(classes, space, generator=draw)
    hard[0] %= 2
    soft = torch.zeros(shape)
    soft[:, :classes] = second[:, :classes].softmax(1) if shape[1] > 1 else second.sigmoid()
    soft[-1, ..., ::2] = prob[-1, ..., ::2]
    return first, {"hard": hard, "soft": soft}, torch.rand(space, generator=draw) > 0.2


def probe_losses(record: Record) -> None:
    """Values and gradients, below and above 2^19 logits, where the CPU starts to process blocks."""
    import torch

    semidice = importlib.import_module("semidice")
    way = "small"

    def attempt(name: str, loss: Callable[..., Any], prediction: Any, *rest: Any, **options: Any) -> None:
        def value_and_gradients() -> dict[str, Any]:
            inputs = [part.clone().requires_grad_() for part in prediction]
            value = loss(inputs if len(inputs) > 1 else inputs[0], *rest, **options)
            total = value[0] if isinstance(value, tuple) else value
            return {"value": value, "gradient": torch.autograd.grad(total, inputs)}

        prediction = prediction if isinstance(prediction, list) else [prediction]
        if options.get("activation") == "none":
            prediction = [part.softmax(1) for part in prediction]
        record.attempt(f"{way} {name}", value_and_gradients)

    tversky = {"alpha": 0.7, "beta": 0.3}
    functions = {
        "dice": (semidice.dice_loss, {}),
        "focal jaccard": (semidice.jaccard_loss, {"gamma": 2.0}),
        "tversky": (semidice.tversky_loss, tversky),
        "log tversky": (semidice.tversky_loss, tversky | {"gamma": 0.75, "log": True}),
    }
    logits, targets, valid = batch(2, 4, 6, 5)
    indices = grid(
        over=("batch", "image", "class"),
        classes=("all", "present"),
        background=(True, False),
        smooth=(0.0, 1.0),
    )
    options = [a | b for a, b in product(grid(form=FORMS, activation=ACTIVATIONS), indices)]
    for (name, (loss, more)), kind, each in product(functions.items(), targets, options):
        attempt(f"{name} {kind} {each}", loss, logits, targets[kind], **each, **more)
    for dtype, space in product(("float64", "float32", "bfloat16", "float16"), ((7,), (5, 4), (4, 3, 2))):
        logits, targets, valid = batch(2, 3, *space, seed=1)
        logits = logits.to(getattr(torch, dtype))
        masks = {"all": {}, "valid": {"valid": valid}, "ignored": {"ignore_index": 1}}
        for (mask, more), kind, each in product(
            masks.items(), targets, grid(activation=ACTIVATIONS, class_weight=(None, [0.2, 1.0, 0.5]))
        ):
            name = f"{dtype} {len(space)}D {mask} {kind} {each}"
            attempt(f"CE {name}", semidice.soft_cross_entropy, logits, targets[kind], **each, **more)
            for form in FORMS:
                options = each | more | {"form": form}
                attempt(f"{form} {name}", semidice.dice_loss, logits, targets[kind], **options)
    # sizes below and at the threshold, with one class, with many classes, and channels last
    sizes = {
        (1, 2, 512, 511): ("min",),
        (1, 2, 512, 512): FORMS,
        (2, 1, 512, 512): ("min", "relaxed"),
        (2, 13, 143, 142): FORMS,
        (1, 13, 202, 202): ("min", "squared"),
        (3, 2, 300, 400): ("min", "squared"),
    }
    for kernels in (True, False):
        semidice.use_kernels(kernels)
        way = "kernels" if kernels else "definition"
        for shape, forms in sizes.items():
            logits, targets, valid = batch(*shape, seed=2)
            logits = logits.to(memory_format=torch.channels_last) if shape[0] == 3 else logits
            for each, kind, masked, dtype in product(
                grid(form=forms, activation=ACTIVATIONS), targets, (False, True), ("float32", "bfloat16")
            ):
                loss = semidice.SegmentationLoss(semidice.DiceLoss(**each))
                prediction = logits.softmax(1) if each["activation"] == "none" else logits
                arguments = prediction.to(getattr(torch, dtype)), targets[kind], valid if masked else None
                attempt(f"{shape} {each} {kind} {masked} {dtype}", loss, *arguments, parts=True)
        for shape in ((2, 3, 16, 16), (1, 3, 424, 424)):
            logits, targets, valid = batch(*shape, seed=3)
            teacher_prob, outputs = logits.flip(-1).softmax(1), [logits, logits[..., ::2, ::2].contiguous()]
            regions = {
                "jaccard": semidice.JaccardLoss(form="product", smooth=1.0),
                "tversky": semidice.TverskyLoss(**tversky, gamma=2.0, over="image", classes="present"),
                "weighted": semidice.DiceLoss(class_weight=[0.2, 1.0, 0.5], ignore_index=1, background=False),
            }
            for (name, region), kind in product(regions.items(), targets):
                name = f"{shape} {name} {kind}"
                attempt(f"module {name}", region, logits, targets[kind], valid)
                mix = semidice.SegmentationLoss(region, cross_entropy_weight=0.5, scale_weights=(0.7, 0.3))
                attempt(f"deep {name}", mix, outputs, targets[kind], valid, parts=True)
                attempt(f"deep plain {name}", semidice.SegmentationLoss(region), outputs, targets[kind])
                for terms in (("cross_entropy",), ("cross_entropy", "region")):
                    distil = semidice.DistillationLoss(mix, label_weight=0.4, terms=terms)
                    arguments = targets[kind], teacher_prob, valid
                    attempt(f"distil {name} {terms}", distil, logits, *arguments, parts=True)
        for name, form, activation, size in product(("dice", "log tversky"), FORMS, ACTIVATIONS, (8, 520)):
            logits, targets, _ = batch(1, 2, size, size, seed=4)
            x = (logits.softmax(1) if activation == "none" else logits).double().requires_grad_()
            loss, more = functions[name]
            if form == "squared" and "alpha" in more:
                continue
            value = loss(x, targets["soft"].double(), form=form, activation=activation, **more)
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            again = torch.autograd.grad((gradient * x.detach().cos()).sum(), x)
            record.put(f"{way} second derivative {name} {form} {activation} {size}", again)
    semidice.use_kernels(True)
    logits, targets, valid = batch(2, 3, 16, 16, seed=5)
    for form, kind in product(FORMS, targets):
        stats = semidice.overlap_stats(logits.softmax(1), targets[kind], form=form, valid=valid)
        record.put(f"overlap {form} {kind}", [stats, semidice.tversky_index(stats, **tversky, smooth=0.1)])
    for form in FORMS:
        soft = targets["soft"].clone().requires_grad_()
        value = semidice.dice_loss(logits.softmax(1), soft, form=form)
        record.put(f"gradient in the target {form}", torch.autograd.grad(value, soft))
    torch.manual_seed(0)
    network = torch.nn.Conv2d(1, 3, 3, padding=1)
    keys = grid(keys_per_image=(False, True), keys_from=("region", "batch"), reweight_keys=(True, False))
    temperatures = grid(calibration=("none", "temperature", "kde"), temperature=(1.0, 1.5))
    for each in [a | b for a, b in product(temperatures, keys)]:
        draw = torch.Generator().manual_seed(1)
        teacher = semidice.Teacher(network, num_keys=64, bandwidth=0.01, generator=draw, **each)
        record.attempt(f"teacher {each}", teacher, logits[:, :1], targets["hard"], valid)


def probe_labels(record: Record) -> None:
    """Label makers on masks of two and of three classes, numpy and torch, one case and several."""
    import torch

    semidice = importlib.import_module("semidice")
    draw = np.random.default_rng(0)
    truth = draw.random((3, 1, 12, 10)) + 0.3 * draw.random((3, 4, 12, 10))
    present = np.array([[True] * 4, [True, False, True, True], [False, True, False, False]])
    makers = "majority_label mean_label random_rater_label dice_weights dice_weighted_label staple"
    makers += " staple_label rater_agreement"
    flags = (False, True)
    for num_classes, library, batched, absent in product((None, 3), ("numpy", "torch"), flags, flags):
        masks = truth > 0.8 if num_classes is None else (truth * 2.2).astype(np.uint8)
        of_case: Any = slice(None) if batched else 1
        convert: Any = torch.from_numpy if library == "torch" else np.asarray
        masks = convert(np.array(masks[of_case]))
        options: dict[str, Any] = {"num_classes": num_classes, "batched": batched}
        options |= {"present": convert(np.array(present[of_case]))} if absent else {}
        name = f"{num_classes} {library} {batched} {absent}"
        for maker in makers.split():
            more = {"generator": 5} if maker == "random_rater_label" else {}
            record.attempt(f"{maker} {name}", getattr(semidice, maker), masks, **options, **more)
        label = semidice.mean_label(masks, **options)
        valid = convert(np.array(truth[:, 0][of_case] > 0.3))
        for eps in (0.0, 0.1, 1.0):
            record.put(f"smooth {eps} {name}", semidice.smooth_label(label, eps=eps, batched=batched))
        for each in grid(valid=(None, valid), batched=(batched,)):
            masked = f"{name} {each['valid'] is not None}"
            for width in (1, 3, 4, 5):
                smooth = semidice.boundary_smooth_label
                record.attempt(f"boundary {width} {masked}", smooth, label, width=width, **each)
            for sigma in (0.0, 0.7, 2.0):
                smooth = semidice.spatially_smooth_label
                record.attempt(f"spatial {sigma} {masked}", smooth, label, sigma=sigma, **each)


def probe_calibration(record: Record) -> None:
    """Kernel densities, key points, bandwidths, and calibrators before and after saving and loading."""
    import torch

    semidice = importlib.import_module("semidice")
    for classes, kind in product((2, 3), ("hard", "soft")):
        logits, targets, valid = batch(2, classes, 24, 24, seed=classes)
        prob, target, name = logits.softmax(1), targets[kind], f"{classes} {kind}"
        for per_image, masked in product((False, True), (None, valid)):
            draw = torch.Generator().manual_seed(0)
            keys = semidice.sample_keys(target, 50, valid=masked, generator=draw, per_image=per_image)
            keyed = f"{name} {per_image} {masked is not None}"
            key_prob, key_target = (semidice.take_keys(side, keys) for side in (prob, target))
            record.put(f"keys {keyed}", [keys, key_prob, key_target])
            for each in grid(bandwidth=(1e-3, 1e-2, 0.1), method=("auto", "reference", "attention")):
                arguments = (prob, key_prob, key_target)
                options = each | {"key_weight": keys.weight, "region": masked}
                record.attempt(f"recalibrate {keyed} {each}", semidice.kde_recalibrate, *arguments, **options)
            for each in grid(bandwidth=(1e-3, 0.1), kind=("canonical", "marginal", "top_label"), p=(1, 2)):
                error = semidice.kde_calibration_error
                record.attempt(f"error {keyed} {each}", error, prob, target, valid=masked, **each)
                of_keys = {"key_prob": key_prob, "key_target": key_target, "key_weight": keys.weight}
                record.attempt(f"error of keys {keyed} {each}", error, prob, target, **of_keys, **each)
        for likelihood, num_points in product(("label", "density"), (300, 2048)):
            options = {"likelihood": likelihood, "num_points": num_points, "valid": valid}
            options["generator"] = torch.Generator().manual_seed(0)
            choice = semidice.choose_bandwidth(prob, target, **options)
            record.put(f"bandwidth {name} {likelihood} {num_points}", choice)
        for width in (0, 1, 3):
            region = semidice.calibration_region(prob, target, width=width, valid=valid)
            record.put(f"region {name} {width}", region)
        points = prob.movedim(1, -1).reshape(-1, classes)[:200].requires_grad_()
        loo = semidice.kde_recalibrate(points, points, points.detach(), bandwidth=0.01, leave_one_out=True)
        record.put(f"leave one out {name}", [loo, torch.autograd.grad(loo.square().sum(), points)])
        for activation in ("none", "softmax"):
            prediction = prob if activation == "none" else logits
            kde = semidice.KDECalibrator(num_keys=128, activation=activation, seed=3)
            scaling = semidice.TemperatureScaling(activation=activation)
            for calibrator in (kde, scaling):
                calibrator.fit(prediction, target, valid=valid)
                calibrator.partial_fit(prediction.flip(-1), target)
                path = f"{type(calibrator).__name__}_{classes}_{kind}_{activation}.safetensors"
                calibrator.save(path)
                for which in (calibrator, type(calibrator).load(path)):
                    again = "loaded" if which is not calibrator else "fitted"
                    record.put(f"{path} {again}", which.calibrate(prediction))
            record.put(f"fitted {name} {activation}", [kde.bandwidth, kde.key_weight, scaling.temperature])


def probe_metrics(record: Record) -> None:
    """Scores of images and volumes, tables of cases, and tests of which method is better."""
    import torch

    metrics = importlib.import_module("semidice.metrics")
    decisions = importlib.import_module("semidice.decisions")
    plain = "dice_score iou_score binarized_dice_score soft_dice_score brier_error negative_log_likelihood"
    plain += " calibration_error classwise_calibration_error kde_calibration_error calibration_bins"
    binned = grid(num_bins=(10, 15), binning=("equal_width", "equal_mass"))
    options: dict[str, list[dict[str, Any]]] = {name: [{}] for name in plain.split()}
    for name in ("dice_score", "iou_score"):
        options[name] = grid(decision=(None, "argmax", "threshold"), threshold=(0.3,), empty=(1.0, np.nan))
    options["calibration_error"] = options["classwise_calibration_error"] = binned
    options["calibration_bins"] = grid(confidence=("top_class", "classwise"), per_case=(True, False))
    options["kde_calibration_error"] = grid(kind=("canonical", "marginal", "top_label"), p=(1, 2))
    options["volume_error_ml"] = grid(of=("mask", "probability"), spacing_mm=((0.7, 0.8, 2.5),))
    for shape in ((3, 1, 20, 22), (3, 2, 20, 22), (2, 3, 8, 10, 12)):
        logits, targets, valid = batch(*shape, seed=6)
        # with one channel, the probabilities lie on thresholds and edges of bins
        prob = logits.softmax(1) if shape[1] > 1 else logits.sigmoid().mul(10).round().div(10)
        targets["ones"] = (logits.flip(-1) > 0).float()
        sides = (0.7, 0.8, 2.5)[: len(shape) - 2]
        for name in ("hausdorff_error_mm", "surface_dice_score"):
            options[name] = [{"spacing_mm": sides}]
        for (name, several), kind, masked in product(options.items(), targets, (None, valid)):
            for each in several:
                what = f"{shape} {name} {kind} {masked is not None} {each}"
                record.attempt(what, getattr(metrics, name), prob, targets[kind], valid=masked, **each)
        for of in ("mask", "probability"):
            record.put(f"{shape} volume {of}", decisions.volume_ml(prob, spacing_mm=(0.7, 0.8, 2.5), of=of))
        means = metrics.foreground_mean(prob.flatten(2).mean(2))
        record.put(f"{shape} decided", [decisions.decide(prob), means])
        bins = metrics.calibration_bins(prob, targets["soft"], binning="equal_mass")
        record.put(f"{shape} bins", [bins.means(), bins.cut_bound(), (bins + bins).over_cases().error()])
        samples = metrics.level_masks(prob, num_samples=5)
        masks = metrics.level_masks(prob.flip(0), num_samples=4)
        present = torch.tensor([[True, True, False, True]]).expand(shape[0], -1)
        more = {"num_classes": shape[1] if shape[1] > 2 else None, "present": present, "valid": valid}
        record.put(f"{shape} energy", [samples, metrics.generalised_energy_distance(samples, masks, **more)])
        record.put(f"{shape} rater dice", metrics.rater_dice_score(prob, masks, **more))
        cases = [(f"case{number}", "someone", each) for number, each in enumerate(masks)]
        agreement = metrics.rater_agreement_table(cases, num_classes=more["num_classes"])
        record.put(f"{shape} agreement", list(agreement.rows()))
    draw = np.random.default_rng(1)
    scores = {"dice_score": 0.8, "volume_error_ml": 3.0}
    rows = [
        metrics.CaseRow(f"c{case}", f"p{case // 2}", case % 3, method, "mean", metric, float(value))
        for metric, middle in scores.items()
        for method, gain in (("SDL", 0.0), ("DML1", 0.05), ("a_b%", 0.04))
        for case, value in enumerate(middle + gain + 0.1 * draw.random(24))
    ]
    rows[5] = rows[5]._replace(value=float("nan"))
    table = metrics.concatenate([metrics.CaseTable.from_rows(part) for part in (rows[:50], rows[50:])])
    record.put("rows", [list(table.sorted().rows()), table.methods, table.metrics])
    for suffix in ("csv", "parquet"):
        metrics.write_cases(table, f"cases.{suffix}")
        record.put(f"read {suffix}", list(metrics.read_cases(f"cases.{suffix}").rows()))
    for each in grid(unit=("case", "patient"), interval=("studentised", "percentile", "bca")):
        each |= {"num_resamples": 2000, "seed": 7}
        found = [metrics.compare_cases(table, metric, missing="drop", **each) for metric in scores]
        again = metrics.compare_scores(table.paired("volume_error_ml"), **each)
        means, pairs = metrics.means_table(found), metrics.pairs_table(found[0], correction="none")
        texts = [(shown.markdown(), shown.latex(), shown.csv(), shown.note) for shown in (means, pairs)]
        record.put(f"compare {each}", [found, again, texts, [one.best() for one in found]])
    values, groups = draw.normal(0.1, 1, (30, 4)), [f"g{number // 3}" for number in range(30)]
    record.put("bootstrap", metrics.paired_bootstrap(values, groups=groups, num_resamples=500, level=0.1))
    record.put("permutation", [metrics.permutation_test(part, seed=2) for part in (values, values[:8])])
    record.put("holm", metrics.holm(np.array([0.01, 0.04, 0.03, 0.5])))
    for name in (*options, "volume_ml"):
        record.attempt(f"direction of {name}", metrics.higher_is_better, name)


def run_command(*arguments: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["semidice", *arguments]
    runpy.run_module("semidice", run_name="__main__", alter_sys=True)


def semidice_command(line: str) -> None:
    """Run `python -m semidice` in a new process; raise an error if it fails."""
    if not run_forked(run_command, *line.split()):
        raise RuntimeError(f"failed: semidice {line}")


def run_forked(function: Callable[..., None], *arguments: Any) -> bool:
    """Whether a call succeeds in a forked process, where slow imports are already done."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def make_folder(root: str, *space: int, suffix: str) -> None:
    """Write images of a ball in a ball and different masks of three raters; one rater misses a case."""
    from PIL import Image

    nibabel = importlib.import_module("nibabel")
    draw = np.random.default_rng(len(space))
    axes = np.stack(np.meshgrid(*(np.linspace(-1, 1, side) for side in space), indexing="ij"))
    for case in range(4):
        centre = draw.uniform(-0.2, 0.2, (len(space), *[1] * len(space)))
        radius = np.sqrt(((axes - centre) ** 2).sum(0))
        image = 40 + 80.0 * (radius < 0.6) + 80 * (radius < 0.3) + draw.normal(0, 10, space)
        drawn = {
            f"raters/{rater}": (radius < rater).astype(int) + (radius < rater / 2)
            for rater in (0.5, 0.6, 0.7)
        }
        for home, picture in ({"images": image} | drawn).items():
            path = Path(root) / home / f"case{case}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = picture.clip(0, 255).astype(np.uint8)
            if case == 1 and home == "raters/0.7":
                continue
            if suffix == ".png":
                Image.fromarray(stored).save(path)
            else:
                nibabel.save(nibabel.Nifti1Image(stored, np.diag([0.7, 0.8, 2.5, 1])), path)
    (Path(root) / "cases.csv").write_text("case,patient\ncase0,a\ncase1,b\ncase2,c\ncase3,c\n")


def probe_prepare(record: Record) -> None:
    """Prepared phantoms and folders of pictures and of volumes, and a contact sheet."""
    make_folder("pictures", 40, 36, suffix=".png")
    make_folder("volumes", 20, 24, 6, suffix=".nii")
    for line in (
        "phantom two_classes --cases 5 --size 32x48",
        "phantom three_classes --cases 4 --classes 3 --raters 5 --seed 3",
        "folder pictures from_pictures",
        "folder pictures resized --size 64x32 --window 20 220",
        "folder volumes slices",
        "folder volumes foreground --slices foreground --size 32x32",
        "folder volumes whole --slices none",
    ):
        semidice_command(f"prepare {line} --workers 1")
    semidice_command("check resized -o sheet.png")


def probe_training(record: Record) -> None:
    """Runs, comparisons of labels, losses, systems and teachers, and the files made from them."""
    small = "batch_size=4 model.options.channels=[8,16] data.num_folds=2 schedule.epochs=2"
    options = " ".join(f"--set {each}" for each in small.split()) + " --accelerator cpu"
    semidice_command("prepare phantom data --cases 12 --size 32x32 --raters 3 --workers 1")
    quick = f"train quick --set data.dataset=data {options} -o runs/quick"
    semidice_command(f"{quick} --set data.folds=[0]")
    semidice_command(f"{quick} --resume")
    names = "dice_score iou_score binarized_dice_score soft_dice_score calibration_error brier_error"
    names += " kde_calibration_error classwise_calibration_error rater_calibration_error"
    names += " negative_log_likelihood generalised_energy_distance rater_dice_score"
    scores = " ".join(f"--metric {name}" for name in names.split())
    semidice_command(f"evaluate runs/quick {scores} -o scores.csv")
    adam = {"optimiser.name": "adamw", "optimiser.clip_norm": 1, "optimiser.accumulate": 2}
    focal = {"loss.family": "tversky", "loss.alpha": 0.7, "loss.beta": 0.3, "loss.gamma": 2}
    augment = {"augment.rotate_degrees": 20, "augment.gamma": 0.2, "augment.noise": 0.1}
    variants: dict[str, dict[str, Any]] = {
        name: {"system.name": name, "system.num_samples": 3}
        for name in ("mc_dropout", "multi_head", "softseg", "mrnet")
    }
    variants["random"] = {"label.maker": "random", "precision.dtype": "bf16", **augment}
    variants["weighted"] = {"label.maker": "dice_weighted", "label.smoothing": "spatial", **adam}
    variants["staple"] = {"label.maker": "staple", "validation.checkpoint": "best", **focal}
    variants["boundary"] = {"label.maker": "majority", "label.smoothing": "boundary", "loss.over": "image"}
    Path("grid.yaml").write_text(json.dumps({"recipe": "quick", "variants": variants}))
    semidice_command(f"compare data grid.yaml -o systems {options} --set data.folds=[1]")
    semidice_command(f"compare data distillation -o distilled {options}")
    semidice_command("report systems -o report/report.html")
    make_folder("scans", 64, 64, 5, suffix=".nii")
    semidice_command("prepare folder scans slices --workers 1")
    semidice_command(f"train quick --set data.dataset=slices {options} -o runs/slices")
    semidice_command("predict runs/slices scans/images -o volumes --fold 1 --device cpu")
    make_folder("pictures", 100, 80, suffix=".png")
    semidice_command("predict runs/slices pictures/images -o predicted --window 64 --device cpu")


def probe_reproduce(record: Record) -> None:
    """Show the list of tables; raise an error on failure. Its output contains times and is not compared."""
    semidice_command("reproduce --list")
    record.put("finished", True)


PROBES: dict[str, Callable[[Record], None]] = {
    name.removeprefix("probe_"): value for name, value in list(globals().items()) if name.startswith("probe_")
}


def probe(sections: Sequence[str], checkout: Path) -> None:
    """Write the results of each section to a folder of the same name in the working directory."""
    spec = importlib.util.find_spec("semidice")
    if spec is None or not Path(str(spec.origin)).is_relative_to(checkout / "src"):
        raise RuntimeError(f"semidice must be that of {checkout}; found {spec and spec.origin}")
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    for section in sections:
        start = time.monotonic()
        ended_well = run_forked(run_section, section)
        took = f"{time.monotonic() - start:.0f} s"
        print(f"{checkout}: {section} {'done' if ended_well else 'FAILED'}, {took}", flush=True)


def run_section(section: str) -> None:
    Path(section).mkdir()
    os.chdir(section)
    record = Record()
    PROBES[section](record)
    # written last: if this file is missing, the section has failed
    np.savez("values.npz", **record.values)  # type: ignore[arg-type]


def contents(path: Path) -> dict[str, np.ndarray]:
    """The values in an npz, Parquet or safetensors file by name; for any other file, its bytes."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    if path.suffix == ".parquet":
        table = importlib.import_module("pyarrow.parquet").read_table(path)
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        for name, part in columns.items():
            columns[name] = as_text("\n".join(part)) if part.dtype == object else part
        return columns | {"schema": as_text(str(table.schema))}
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        # a JSON header, whose order of metadata varies between processes, then the bytes of the tensors
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        found = {"header": as_text(json.dumps(header, sort_keys=True))}
        header.pop("__metadata__", None)
        for name, part in header.items():
            first, last = part["data_offsets"]
            found[name] = np.frombuffer(data[end + first : end + last], np.uint8)
        return found
    return {"bytes": np.frombuffer(data, np.uint8)}


def first_difference(old: np.ndarray, new: np.ndarray) -> str | None:
    """The first difference, or None. NaN equals NaN, and 0 does not equal -0."""
    if (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes()):
        return None
    if old.dtype == new.dtype == np.uint8 and old.ndim == new.ndim == 1:
        length = min(old.size, new.size)
        place = int(np.append(old[:length] != new[:length], True).argmax())
        around = slice(max(0, place - 20), place + 40)
        return f"byte {place}: was {old[around].tobytes()!r}, is {new[around].tobytes()!r}"
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"was {old.dtype} {old.shape}, is {new.dtype} {new.shape}"
    values = [part.ravel().view((np.uint8, part.itemsize)) for part in (old, new)]
    place = int((values[0] != values[1]).any(1).argmax())
    return f"value {place}: was {old.flat[place].item()!r}, is {new.flat[place].item()!r}"


def compare_folders(old: Path, new: Path) -> tuple[int, int, list[str]]:
    """The numbers of compared files and values, and one line per difference."""
    names: list[set[str]] = [
        {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and not any(path.match(pattern) for pattern in SKIPPED)
        }
        for folder in (old, new)
    ]
    differences, num_values = [], 0
    for name in sorted(names[0] | names[1]):
        if name not in names[0] or name not in names[1]:
            differences.append(f"{name}: {'is missing now' if name in names[0] else 'was not there before'}")
            continue
        before, now = contents(old / name), contents(new / name)
        for key in sorted(before.keys() | now.keys()):
            num_values += 1
            if key not in before or key not in now:
                found: str | None = "is missing now" if key in before else "was not there before"
            else:
                found = first_difference(before[key], now[key])
            if found is not None:
                differences.append(f"{name}: {key}: {found}")
    return len(names[0] | names[1]), num_values, differences


def leave_results(sections: Sequence[str], checkout: Path, results: Path) -> None:
    """Run the probe in a folder with the same name for every checkout, then move the folder to `results`."""
    work = results.with_name("work")
    work.mkdir()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, (str(checkout / "src"), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, __file__, "--probe", str(checkout), *(f"--only={section}" for section in sections)],
        cwd=work,
        env=os.environ | threads | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    work.rename(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="OLD_CHECKOUT NEW_CHECKOUT")
    parser.add_argument("--only", action="append", choices=PROBES, help="a section; repeatable")
    parser.add_argument("--all", action="store_true", help=f"show all differences, not {SHOWN} a section")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sections = arguments.only or list(PROBES)
    checkouts = [path.resolve() for path in arguments.checkouts]
    if arguments.probe:
        probe(sections, checkouts[0])
        return
    if len(checkouts) != 2:
        parser.error("two checkouts are needed: OLD_CHECKOUT NEW_CHECKOUT")
    totals, start = np.zeros(3, dtype=int), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare_checkouts_") as temporary:
        folders = [Path(temporary) / side for side in ("old", "new")]
        for checkout, folder in zip(checkouts, folders, strict=True):
            leave_results(sections, checkout, folder)
        for section in sections:
            old, new = (folder / section for folder in folders)
            num_files, num_values, differences = compare_folders(old, new)
            failed = [folder.parent.name for folder in (old, new) if not (folder / "values.npz").exists()]
            differences = [*(f"the probe failed on {side}" for side in failed), *differences]
            totals += num_files, num_values, len(differences)
            print(f"{section}: {num_files} files, {num_values} values, {len(differences)} differences")
            shown = differences if arguments.all else differences[:SHOWN]
            if len(shown) < len(differences):
                shown.append(f"and {len(differences) - SHOWN} more; --all shows them")
            print("".join(f"  {line}\n" for line in shown), end="")
    told = "NOT THE SAME" if totals[2] else "the same"
    took = f"in {time.monotonic() - start:.0f} s"
    print(f"{told}: {totals[0]} files, {totals[1]} values, {totals[2]} differences, {took}")
    raise SystemExit(1 if totals[2] else 0)


if __name__ == "__main__":
    main()
