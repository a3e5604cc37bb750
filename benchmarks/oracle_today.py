"""What the probes of `oracle` call in this checkout: what `oracle_f55cdaf` says, and what has changed since.

Each part of the redesign overrides here, in the same commit, what it changes. A result that differs by
intention has a line in INTENDED. This module goes in the last part of the redesign.
"""

# mypy: disable-error-code="no-redef"
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import oracle_f55cdaf
import torch
from oracle_f55cdaf import *  # noqa: F403
from oracle_f55cdaf import _of

import semidice
from semidice.calibration import CALIBRATORS, Keys, draw_keys

FLOAT64 = "kernel density is always float64; it was float32 above h = 0.005 sqrt(classes)"
# minus log-likelihood, with the penalty: 3e-13 above to 7e-10 below that of Newton, in 460 fits
L_BFGS = "L-BFGS-B and not Newton: other parameters of the same likelihood"
SOFT_BINS = "plain autograd adds the gradients of the two bins of a voxel in another order: one rounding"
BLOCKS = "blocks of the CPU serve softmax alone, without buffers: sums round in another order"
QUANTILES = "quantiles of Student and the normal distribution are SciPy's"
SPLINE = "a temperature by a spline through 61 slopes, not by a cubic through two and their rise"
NO_LINE = "a term that does not compare with the teacher has no line in the log"
ROUNDED = "stored probabilities of three and more classes are differences of rounded sums"
SQUARED = "squared kernel density errors are no longer offered"
# pattern of names (section: name): largest difference of its numbers (inf: anything), and why
INTENDED: dict[str, tuple[float, str]] = {
    "volumes: slices: fold_*: prediction *": (1.6e-5, ROUNDED),
    "evaluation: *volumes: numbers": (0.021, ROUNDED),
    "evaluation: fits: corrections: *": (8e-6, ROUNDED),
    "evaluation: scores, calibrated by temperature: numbers": (7e-6, ROUNDED),
    # an isotonic function has steps
    "evaluation: kept isotonic": (7e-3, ROUNDED),
    "evaluation: kept temperature": (7e-7, ROUNDED),
    # units of 1/65535
    "evaluation: calibrated by isotonic: case*_prob": (900, ROUNDED),
    "evaluation: calibrated by temperature: case*_prob": (1, ROUNDED),
    "volumes: slices: *scores*: numbers": (3e-5, ROUNDED),
    "volumes: slices: fold_*: log: numbers": (2e-8, "validation is scored without what surrounds a case"),
    "calibration: recalibrated *": (4e-5, FLOAT64),
    "calibration: error by keys *": (1e-7, FLOAT64),
    "calibration: kde *": (4e-7, FLOAT64),
    "calibration: error* p=2*": (inf, SQUARED),
    "metrics: * volumes: CRPS": (inf, "the CRPS is a score, in float32"),
    "losses: teacher calibration=kde *": (5e-6, FLOAT64),
    "metrics: * kde_calibration_error *": (3e-7, FLOAT64),
    # those with kernel density
    "evaluation: scores, calibrated by all: numbers": (8e-3, ROUNDED),
    "calibration: bandwidth *: log_likelihood*": (1e-9, "the sum of a point cancels, and is not divided by"),
    "calibration: temperature *": (1e-3, SPLINE),
    "calibration: isotonic *: parameters*": (1e-15, "SciPy's isotonic regression rounds in another order"),
    "calibration: beta *: parameters": (2e-4, L_BFGS),
    "calibration: vector *: parameters": (6e-3, L_BFGS),
    "calibration: vector *: [fl]*ed": (3e-7, L_BFGS),
    "losses: calibration * binning=soft *: gradient*": (1e-7, SOFT_BINS),
    "mixtures: with calibration *: gradient*": (1e-8, SOFT_BINS),
    "distillation: none*: log: *": (inf, NO_LINE),
    "mixtures: *kernels *: value: *": (5e-7, BLOCKS),
    "mixtures: *kernels *: gradient*(bfloat16)*": (2e-9, BLOCKS),
    "mixtures: *kernels *: gradient*": (2e-10, BLOCKS),
    "mixtures: kernels second derivative *": (1e-20, BLOCKS),
    "statistics: *seeds*": (1e-12, QUANTILES),
    # the student of a teacher with a fitted temperature, which is found within 4e-5 of itself
    "distillation: comparison*": (7e-3, SPLINE),
    "distillation: temperature*": (4e-3, SPLINE),
    "statistics: *, texts: * csv": (inf, "columns unit and per, and other names of columns"),
    "statistics: *, texts: means *": (inf, "the unit of a volume stands in brackets"),
    # also: percentiles of HD95 are of float64 numbers
    "evaluation: scores: numbers": (8e-5, ROUNDED),
    "volumes: scores of files: numbers": (1e-5, "percentiles of HD95 are of float64 numbers"),
    "metrics: * kde_calibration_error * kind=[cm]*": (inf, "scores are of the top label alone"),
    "metrics: * kde_calibration_error * p=2*": (inf, "scores are absolute errors"),
    "metrics: * volume_error_ml * of=probability*": (inf, "volume_ml measures probabilities"),
    "metrics: * negative_log_likelihood ones *": (inf, "as defined for labels that do not sum to one, too"),
    "metrics: * negative_log_likelihood *": (5e-7, "computed without the loss: sums round in another order"),
    "metrics: * cut bound": (inf, "the bound on the rounding of equal-mass bins is no longer offered"),
    "metrics: *hausdorff_error_mm*": (1e-5, "percentiles are of float64 numbers"),
    "metrics: (3, 1, 20, 22) * rule=argmax *": (inf, "argmax of one channel is more than 1/2, as a rule is"),
}


def teacher(network: Any, image: Any, target: Any, valid: Any, **options: Any) -> Any:
    own = {each.name for each in fields(semidice.TeacherCalibration)} & options.keys()
    calibration = semidice.TeacherCalibration(**{name: options.pop(name) for name in own})
    return semidice.Teacher(network, calibration, **options)(image, target, valid)


def keys(prob: Any, target: Any, number: int, **options: Any) -> Any:
    drawn = draw_keys(prob, target, number, **options)
    label = drawn.label if target.is_floating_point() else drawn.label.argmax(-1).to(target.dtype)
    found: Any = {"prob": drawn.prob, "target": label, "weight": drawn.weight}
    return found if options.get("per_image") else {name: part[0] for name, part in found.items()}


def _as_keys(keys: Mapping[str, Any]) -> Keys:
    prob, label, weight = keys["prob"], keys["target"], keys["weight"]
    if not label.is_floating_point():
        label = torch.nn.functional.one_hot(label.long(), prob.shape[-1]).to(prob.dtype)
    several = prob.ndim == 3
    made = (part if several or part is None else part.unsqueeze(0) for part in (prob, label, weight))
    return Keys(*made)


def recalibrated(prob: Any, keys: Mapping[str, Any], **options: Any) -> Any:
    """There is one method, which is exact."""
    options.pop("method", None)
    return semidice.kde_recalibrate(prob, _as_keys(keys), **options)


def kernel_error(prob: Any, target: Any, keys: Mapping[str, Any], **options: Any) -> Any:
    if options.pop("p", 1) != 1:
        return None
    of_keys = _as_keys(keys) if keys else None
    return semidice.kde_calibration_error(prob, target, keys=of_keys, **options)


def calibrated(name: str, batches: Sequence[Any], prediction: Any, path: Path, **options: Any) -> Any:
    made: Any = CALIBRATORS[name](**options)
    for batch_prediction, target, valid in batches:
        made.partial_fit(batch_prediction, target, valid=valid)
    made.save(path)
    parameters = made.parameters if hasattr(made, "parameters") else made._fitted()[made.parameter_names[-1]]
    fitted, loaded = made.calibrate(prediction), CALIBRATORS[name].load(path).calibrate(prediction)
    return {"parameters": parameters, "fitted": fitted, "loaded": loaded}


def label(maker: str, masks: Any, **options: Any) -> Any:
    """The weights are those of `dice_weighted_label`."""
    if maker == "dice_weights":
        return semidice.rater_agreement(masks, **options).majority.nan_to_num(0)
    return getattr(semidice, maker)(masks, **options)


def decided(rule: str, prob: Any, **options: Any) -> Any:
    return _of("decisions").decide(prob, rule, **options)


def volumes(prob: Any, masks: Any, num_classes: int, **options: Any) -> Any:
    package = _of("decisions")
    found = {"mask": package.volume_ml(package.decide(prob), **options)}
    found["probability"] = package.volume_ml(prob, **options)
    found["raters"] = package.rater_volumes_ml(masks, num_channels=num_classes, **options)
    found["quantiles"] = package.volume_quantiles(prob, (0.1, 0.5, 0.9), **options)
    found["interval"] = package.volume_interval(prob, 0.8, **options)
    crps = import_module("semidice.metrics").volume_crps_error_ml
    return found | {"CRPS": crps(prob, masks, **options)}


def conformal(low: Any, high: Any, of_raters: Any, patients: Any, coverage: float, expected: Any) -> Any:
    intervals = _of("decisions").Intervals(low, high, expected)
    made = _of("decisions").fit_conformal(intervals, of_raters, patients, coverage)
    return {"correction": made.correction, "interval": made.apply(intervals)}


def loss_module(name: str) -> Callable[..., Any]:
    def call(prediction: Any, target: Any, valid: Any = None, **options: Any) -> Any:
        if name == "CalibrationError":
            of_bins = {"num_bins": "calibration_bins", "binning": "calibration_binning"}
            options = {of_bins.get(each, each): value for each, value in options.items()}
        return getattr(semidice, f"{name}Loss")(**options)(prediction, target, valid)

    return call


def mixture(prediction: Any, target: Any, valid: Any = None, *, terms: bool = True, **options: Any) -> Any:
    loss = semidice.SegmentationLoss(**options)
    total = loss(prediction, target, valid)
    return {"total": total, **loss.terms(prediction, target, valid)} if terms else total


def distillation(prediction: Any, target: Any, valid: Any, teacher_prob: Any, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("terms", "label_weight")}
    loss = semidice.DistillationLoss(semidice.SegmentationLoss(**options), **own)
    total = loss(prediction, target, teacher_prob, valid)
    return {"total": total, **loss.terms(prediction, target, teacher_prob, valid)}


def recipe_options(options: Mapping[str, Any]) -> Any:
    return dict(options)


def score(name: str, prob: Any, reference: Any, *, rule: str | None = None, **options: Any) -> Any:
    """reference: target, or masks of raters. rule: argmax or threshold:T; None is the default one."""
    if rule is not None and rule.startswith("threshold:"):
        prob = prob > float(rule.partition(":")[2])
    references = [reference]
    if name.startswith(("volume_c", "volume_w", "rater_")):
        del options["num_classes"]
    # of no command
    options = {each: value for each, value in options.items() if each not in ("kind", "p", "of")}
    if name == "volume_width_ml":
        del options["present"]
        references = []
    return getattr(import_module("semidice.metrics"), name)(prob, *references, **options)


def bins(prob: Any, target: Any, **options: Any) -> Any:
    made = import_module("semidice.metrics").calibration_bins(prob, target, **options)
    found = {**made.means()._asdict(), "error": made.error()}
    return found | ({"error of all": (made + made).over_cases().error()} if made.error().ndim else {})


def _key(name: str) -> tuple[str, str, str]:
    """Score, unit and level of a name of f55cdaf."""
    per = "slice" if name.endswith("_per_slice") else "scan"
    name = name.removesuffix("_per_slice")
    tolerance = re.fullmatch(r"surface_dice_score_([\d.]+)(mm|voxels)", name)
    if tolerance:
        return "surface_dice_score", f"share within {tolerance[1]} {tolerance[2]}", per
    ending = re.fullmatch("(.*)_(mm|ml|voxels)", name)
    if ending:
        return ending[1], ending[2], per
    return name, import_module("semidice.metrics.registry").default_unit(name), per


def _name(metric: str, unit: str, per: str) -> str:
    """The name that f55cdaf gave a score."""
    if metric == "surface_dice_score":
        metric += "_" + unit.removeprefix("share within ").replace(" ", "")
    elif unit in ("mm", "ml", "voxels"):
        metric += f"_{unit}"
    return f"{metric}_per_slice" if per == "slice" else metric


def case_table(rows: Any) -> Any:
    """Joined from two parts."""
    package = import_module("semidice.statistics")
    names = ("case", "patient", "fold", "seed", "method", "class", "metric", "unit", "per", "value")
    made = [dict(zip(names, (*row[:6], *_key(row[6]), row[7]), strict=True)) for row in rows]
    return package.concatenate([package.case_table(part) for part in (made[:10], made[10:])])


def written_and_read(table: Any, path: Path) -> Any:
    import_module("semidice.statistics").write_cases(table, path)
    return import_module("semidice.statistics").read_cases(path)


def _read_parquet(path: Path) -> Any:
    return import_module("pyarrow.parquet").read_table(path).to_pylist()


def case_rows(path: Path) -> Any:
    """Sorted rows of a case table in a file."""
    is_csv = path.suffix == ".csv"
    records = oracle_f55cdaf._records(path) if is_csv else _read_parquet(path)
    names = ("case", "patient", "fold", "seed", "method", "class")
    return sorted(
        (
            *(str(row[name]) for name in names),
            _name(row["metric"], row["unit"], row["per"]),
            float("nan" if row["value"] is None else row["value"]),
        )
        for row in records
    )


def compared(table: Any, metric: str, **options: Any) -> Any:
    """Means and pairs by name. Options: baseline, cover_seeds, level. Cases without a score are left out."""
    package = import_module("semidice.statistics")
    options = {"num_resamples": 2000, "seed": 7} | options
    options |= {"alpha": options.pop("level")} if "level" in options else {}
    key = import_module("semidice.metrics").ScoreKey(*_key(metric))
    result = package.compare_scores(package.paired(table, key, drop=True), **options)
    names = ("num_cases", "num_patients", "num_dropped", "seeds", "seed_means", "covers_seeds", "best")
    found = {name: getattr(result, name) for name in names}
    # f55cdaf asked for the best set at 0.05, whatever the level of the intervals
    worse = result.pairs["difference"] * (1 if key.higher_is_better else -1) < 0
    beaten = set(result.pairs.index.get_level_values("first")[worse & (result.pairs["p"] < 0.05)])
    found["best"] = tuple(name for name in result.methods if name not in beaten)
    if not result.seeds:
        found["seed_means"] = np.empty((0, 0))
    for method, row in result.means.iterrows():
        for name, column in {"mean_low": "low", "mean_high": "high", "seed_spread": "spread"}.items():
            found[f"{method}: {name}"] = np.float64(row[column])
        found[f"{method}: mean"] = np.float64(row["mean"])
    columns = {f"{name}_holm": name for name in ("low", "high", "p")}
    columns |= {name: f"{name}_single" for name in ("low", "high", "p")}
    columns |= {"difference": "difference", "p_permutation": "p_flips", "pair_spread": "spread"}
    for (first, second), row in result.pairs.iterrows():
        if result.methods.index(first) < result.methods.index(second):
            for name, column in columns.items():
                found[f"{first} - {second}: {name}"] = np.float64(row[column])
    return found


def texts(table: Any, metrics: Any) -> Any:
    """The table of means, and of the pairs of the first metric."""
    package, options = import_module("semidice.statistics"), {"drop": True, "num_resamples": 2000, "seed": 7}
    keys = [import_module("semidice.metrics").ScoreKey(*_key(metric)) for metric in metrics]
    found = [package.compare_cases(table, key, **options) for key in keys]
    tables = {"means": package.means_table(found), "pairs": package.pairs_table(found[0])}
    ways = ("markdown", "latex", "csv")
    return {f"{name} {way}": getattr(each, way)() for name, each in tables.items() for way in ways}


def bootstrap(values: Any, *, groups: Any = None, num_resamples: int, level: float) -> Any:
    test = import_module("semidice.statistics").paired_test
    return test(values, groups=groups, num_resamples=num_resamples, alpha=level)[:4]


def permutation_test(values: Any, *, seed: int) -> Any:
    return import_module("semidice.statistics").paired_test(values, seed=seed).p_flips


def holm(p: Any) -> Any:
    return import_module("semidice.statistics").holm(p)


def higher_is_better(name: str) -> Any:
    return import_module("semidice.metrics").higher_is_better(_key(name)[0])


def agreement_of_raters(masks: Any, num_classes: int | None) -> Any:
    cases = [(f"case{number}", "someone", each) for number, each in enumerate(masks)]
    names, rows = [f"rater {number + 1}" for number in range(masks.shape[1])], []
    for case, patient, each in cases:
        dice = import_module("semidice.labels").rater_agreement(each, num_classes=num_classes).majority
        rows += import_module("semidice.statistics").agreement_rows(case, patient, names, dice)
    return [(row["case"], row["method"], row["value"]) for row in rows]


def command(verb: str, *arguments: str, recipe: Any, **options: Any) -> list[str]:
    """Arguments of semidice; a list is a repeated option, a tuple its several values, True a flag."""
    if verb == "predict" and arguments == ("runs/slices", "pictures/images"):
        # pictures need the name of an axis where a run was trained on NIfTI
        options["slice-axis"] = 2
    if "metric" in options:
        options["metric"] = [_key(name)[0] for name in options["metric"]]
    metrics = "validation.metrics"
    recipe = recipe | ({metrics: [_key(name)[0] for name in recipe[metrics]]} if metrics in recipe else {})
    return oracle_f55cdaf.command(verb, *arguments, recipe=recipe, **options)


def comparison_numbers(folder: Path) -> Any:
    """Numbers of the tables of means and pairs of a comparison, or of a report, by name."""
    found = {}
    for row in [row for path in folder.glob("[mp]*s*.csv") for row in oracle_f55cdaf._records(path)]:
        methods = f"{row['first']} - {row['second']}" if "first" in row else row["method"]
        was = {f"{name}_single": name for name in ("low", "high", "p")}
        was |= {name: f"{name}_holm" for name in ("low", "high", "p")} if "first" in row else {}
        was |= {"p_flips": "p_permutation"}
        which = {"method", "first", "second", "metric", "unit", "per", "class"}
        metric = _name(row["metric"], row["unit"], row["per"])
        for name in row.keys() - which:
            value = float(row[name]) if re.match(r"-?\d|-?inf|nan", row[name]) else row[name]
            found[f"{metric} {row['class']} {methods}: {was.get(name, name)}"] = value
    return found


def dataset_arrays(folder: Path) -> Any:
    """Facts and arrays of a prepared dataset; the distance of slices is a field of its own."""
    found = oracle_f55cdaf.dataset_arrays(folder)
    for scan in json.loads((folder / "manifest.json").read_text())["scans"]:
        if scan["thickness_mm"] is not None:
            found[scan["name"]]["spacing_mm"] = [*scan["spacing_mm"], scan["thickness_mm"]]
    return found


def fits(run: Path) -> Any:
    """Fitted rules with their scores, and corrections of intervals, by fold or `all`."""
    stored = json.loads((run / "fits.json").read_text())
    rules = {fold: {"rule": each["decision"], **each["scores"]} for fold, each in stored["rules"].items()}
    return {"rules": rules, "corrections": stored["intervals"]}
