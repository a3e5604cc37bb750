"""What the probes of `oracle` call, as commit f55cdaf spells it: a neutral name for each call and file.

A score has its name in tables of f55cdaf, such as hausdorff_error_mm or dice_score_per_slice; a row of a case
table is (case, patient, fold, seed, method, class, metric, value). Readers return arrays, numbers, texts, and
rows: tuples of texts, then floats. No public function here calls another one, so that `oracle_today` can
replace each of them alone. Frozen; it goes in the last part of the redesign.
"""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

# in a folder of a run, of a comparison, or of predictions; and next to report.html
FILES = {"scores": "cases.parquet", "scores by rule": "decisions.parquet", "volumes": "volumes.csv"}
FILES |= {"tables of a report": "report_files"}


def _of(package: str = "") -> Any:
    # not at the top of the module: a package may move or go later
    return import_module(f"semidice.{package}".rstrip("."))


def _call(path: str) -> Callable[..., Any]:
    package, _, name = path.rpartition(".")
    return lambda *arguments, **options: getattr(_of(package), name)(*arguments, **options)


use_kernels = _call("use_kernels")
dice, jaccard, tversky = _call("dice_loss"), _call("jaccard_loss"), _call("tversky_loss")
cross_entropy = _call("soft_cross_entropy")
overlap, tversky_index = _call("overlap_stats"), _call("tversky_index")
bandwidth, calibration_region = _call("choose_bandwidth"), _call("calibration_region")
foreground_mean, level_masks = _call("metrics.foreground_mean"), _call("metrics.level_masks")
energy_distance = _call("metrics.generalised_energy_distance")
bootstrap, permutation_test = _call("metrics.paired_bootstrap"), _call("metrics.permutation_test")
holm, higher_is_better = _call("metrics.holm"), _call("metrics.higher_is_better")


def loss_module(name: str) -> Callable[..., Any]:
    """name: Dice, Jaccard, Tversky or CalibrationError. Called as the functions are."""
    return lambda prediction, target, valid=None, **options: getattr(_of(), f"{name}Loss")(**options)(
        prediction, target, valid
    )


def mixture(prediction: Any, target: Any, valid: Any = None, *, terms: bool = True, **options: Any) -> Any:
    """The total, with its terms or alone. Options: of the region loss, weights of terms and scales."""
    loss = _of().SegmentationLoss(**options)
    if not terms:
        return loss(prediction, target, valid)
    total, parts = loss(prediction, target, valid, parts=True)
    return {"total": total, **parts}


def distillation(prediction: Any, target: Any, valid: Any, teacher_prob: Any, **options: Any) -> Any:
    """terms: cross_entropy, region: which of them compare with the teacher. Other options: of `mixture`."""
    own = {name: options.pop(name) for name in ("terms", "label_weight")}
    loss = _of().DistillationLoss(_of().SegmentationLoss(**options), **own)
    total, parts = loss(prediction, target, teacher_prob, valid, parts=True)
    left_out = {f"teacher_{name}" for name in ("cross_entropy", "region") if name not in own["terms"]}
    return {"total": total} | {name: part for name, part in parts.items() if name not in left_out}


def teacher(network: Any, image: Any, target: Any, valid: Any, **options: Any) -> Any:
    return _of().Teacher(network, **options)(image, target, valid)


def label(maker: str, masks: Any, **options: Any) -> Any:
    return getattr(_of(), maker)(masks, **options)


def keys(prob: Any, target: Any, number: int, **options: Any) -> Any:
    """Key points: their probabilities, labels and weights."""
    drawn, take = _of().sample_keys(target, number, **options), _of().take_keys
    return {"prob": take(prob, drawn), "target": take(target, drawn), "weight": drawn.weight}


def recalibrated(prob: Any, keys: Mapping[str, Any], **options: Any) -> Any:
    """method: auto, reference or attention. leave_one_out: each point is a key, but not for itself."""
    options["key_weight"] = keys["weight"]
    return _of().kde_recalibrate(prob, keys["prob"], keys["target"], **options)


def kernel_error(prob: Any, target: Any, keys: Mapping[str, Any], **options: Any) -> Any:
    """keys: of `keys`; without them, all voxels are keys."""
    of_keys = {f"key_{name}": part for name, part in keys.items()}
    return _of().kde_calibration_error(prob, target, **of_keys, **options)


def calibrated(name: str, batches: Sequence[Any], prediction: Any, path: Path, **options: Any) -> Any:
    """By a calibrator fitted to batches (prediction, target, valid), and by the one read from its file."""
    kind = _of("calibration").CALIBRATORS[name]
    made = kind(**options)
    for batch_prediction, target, valid in batches:
        made.partial_fit(batch_prediction, target, valid=valid)
    made.save(path)
    fitted, loaded = made.calibrate(prediction), kind.load(path).calibrate(prediction)
    return {"parameters": made.parameters, "fitted": fitted, "loaded": loaded}


def score(name: str, prob: Any, reference: Any, *, rule: str | None = None, **options: Any) -> Any:
    """reference: target, or masks of raters. rule: argmax or threshold:T; None is the default one."""
    if rule is not None:
        options["decision"], _, threshold = rule.partition(":")
        options |= {"threshold": float(threshold)} if threshold else {}
    return getattr(_of("metrics"), name)(prob, reference, **options)


def bins(prob: Any, target: Any, **options: Any) -> Any:
    made = _of("metrics").calibration_bins(prob, target, **options)
    found = {**made.means()._asdict(), "error": made.error(), "cut bound": made.cut_bound()}
    return found | ({"error of all": (made + made).over_cases().error()} if made.error().ndim else {})


def agreement_of_raters(masks: Any, num_classes: int | None) -> Any:
    cases = [(f"case{number}", "someone", each) for number, each in enumerate(masks)]
    table = _of("metrics").rater_agreement_table(cases, num_classes=num_classes)
    return [(row.case, row.method, row.value) for row in table.rows()]


def decided(rule: str, prob: Any, **options: Any) -> Any:
    """Masks by argmax, threshold:T, dice, jaccard, nested or mix:W."""
    name, _, number = rule.partition(":")
    return _of("decisions.decision").RULES[name](prob, *([float(number)] if number else []), **options)


def fitted_rule(cases: Sequence[Any]) -> Any:
    """cases: (prob, target, valid, patient)."""
    found = _of("decisions").fit_decision(cases)
    return {"rule": str(found.decision), **found.scores}


def volumes(prob: Any, masks: Any, num_classes: int, **options: Any) -> Any:
    """In ml, with distribution and interval; masks: of the raters."""
    package = _of("decisions")
    found = {of: package.volume_ml(prob, of=of, **options) for of in ("mask", "probability")}
    found["raters"] = package.rater_volumes_ml(masks, num_channels=num_classes, **options)
    found["quantiles"] = package.volume_quantiles(prob, (0.1, 0.5, 0.9), **options)
    found["interval"] = package.volume_interval(prob, 0.8, **options)
    return found | {"CRPS": package.volume_crps(prob, found["raters"], **options)}


def conformal(low: Any, high: Any, of_raters: Any, patients: Any, coverage: float, expected: Any) -> Any:
    made = _of("decisions").fit_conformal(low, high, of_raters, patients, coverage, expected=expected)
    return {"correction": made.correction, "interval": made.apply(low, high, expected=expected)}


def case_table(rows: Sequence[Any]) -> Any:
    """Joined from two parts."""
    package = _of("metrics")
    made = [package.CaseRow(*row[:3], *row[4:], row[3]) for row in rows]
    return package.concatenate([package.CaseTable.from_rows(part) for part in (made[:10], made[10:])])


def written_and_read(table: Any, path: Path) -> Any:
    _of("metrics").write_cases(table, path)
    return _of("metrics").read_cases(path)


def compared(table: Any, metric: str, **options: Any) -> Any:
    """Means and pairs by name. Options: baseline, cover_seeds, level. Cases without a score are left out."""
    options = {"num_resamples": 2000, "seed": 7} | options
    result = _of("metrics").compare_scores(table.paired(metric, missing="drop"), **options)
    names = ("num_cases", "num_patients", "num_dropped", "seeds", "seed_means", "covers_seeds")
    found = {name: getattr(result, name) for name in names} | {"best": result.best()}
    for i, method in enumerate(result.methods):
        for name in ("mean", "mean_low", "mean_high", "seed_spread"):
            found[f"{method}: {name}"] = getattr(result, name)[i]
    of_pairs = "difference low high p low_holm high_holm p_holm p_permutation pair_spread"
    for (i, first), (j, second) in combinations(enumerate(result.methods), 2):
        for name in of_pairs.split() if not np.isnan(result.difference[i, j]) else ():
            found[f"{first} - {second}: {name}"] = getattr(result, name)[i, j]
    return found


def texts(table: Any, metrics: Sequence[str]) -> Any:
    """The table of means, and of the pairs of the first metric."""
    package, options = _of("metrics"), {"missing": "drop", "num_resamples": 2000, "seed": 7}
    found = [package.compare_cases(table, metric, **options) for metric in metrics]
    tables = {"means": package.means_table(found), "pairs": package.pairs_table(found[0])}
    ways = ("markdown", "latex", "csv")
    return {f"{name} {way}": getattr(each, way)() for name, each in tables.items() for way in ways}


def recipe_options(options: Mapping[str, Any]) -> Any:
    """The keys of a recipe: alpha and beta of the region loss come without a family."""
    found = dict(options)
    if (options.get("loss.alpha"), options.get("loss.beta")) == (1, 1):
        del found["loss.alpha"], found["loss.beta"]
        found["loss.family"] = "jaccard"
    return found | ({"loss.family": "tversky"} if "loss.alpha" in found else {})


def grid_text(recipe: str, variants: Mapping[str, Any], *, seeds: int) -> str:
    """The file of a grid. variants: `recipe_options` by name; teacher.run names a variant."""
    return json.dumps({"recipe": recipe, "seeds": seeds, "variants": variants})


def command(verb: str, *arguments: str, recipe: Mapping[str, Any], **options: Any) -> list[str]:
    """Arguments of semidice; a list is a repeated option, a tuple its several values, True a flag."""
    fixed = {"prepare": ["--workers", "1"], "predict": ["--device", "cpu"]}
    fixed |= {name: ["--accelerator", "cpu"] for name in ("train", "compare")}
    line = [verb, *arguments, *fixed.get(verb, [])]
    settings = {"set": [f"{key}={json.dumps(value)}" for key, value in recipe.items()]}
    for name, value in (settings | options).items():
        for each in value if isinstance(value, list) else [value]:
            values = each if isinstance(each, tuple) else () if each is True else (each,)
            line += [f"--{name}", *map(str, values)]
    return line


def _records(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def dataset_arrays(folder: Path) -> Any:
    """Facts and arrays of a prepared dataset."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {name: manifest[name] for name in ("class_names", "raters", "channels", "mean", "std")}
    facts = ("patient", "slices", "shape", "spacing_mm", "affine", "raw_shape", "raters", "mean", "std")
    for scan in manifest["scans"]:
        arrays = {kind: np.load(folder / kind / f"{scan['name']}.npy") for kind in scan["arrays"]}
        found[scan["name"]] = {name: scan[name] for name in facts} | arrays
    return found


def run_folders(folder: Path) -> dict[str, Path]:
    """The folder of each method and seed of a comparison; seed 0 is not named."""
    runs = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    return {" ".join(run.relative_to(folder).parts).removesuffix(" seed_0"): run for run in runs}


def fold_folders(run: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(run.glob("fold_*"))}


def run_facts(run: Path) -> Any:
    """The fold of each case, and how the images of each fold are normalised."""
    dataset, folds = (json.loads((run / name).read_text()) for name in ("dataset.json", "folds.json"))
    return {"fold of": folds["fold_of_case"], "mean": dataset["fold_mean"], "std": dataset["fold_std"]}


def fold_content(fold: Path) -> Any:
    """Weights by name, rows (step, name, value) of the log, and stored probabilities (C, *space) by case."""
    tensors = import_module("safetensors.numpy").load_file(fold / "last.safetensors")
    found: dict[str, Any] = {name: each for name, each in tensors.items() if name.startswith("model/")}
    lines = [json.loads(line) for line in (fold / "log.jsonl").read_text().splitlines()]
    rows = [(line["step"], name, float(value)) for line in lines for name, value in line.items()]
    found["log"] = sorted(row for row in rows if row[1] != "step")
    for path in (fold / "predictions").iterdir():
        units = np.load(path)["foreground"]
        background = 65535 - units.sum(axis=0, dtype=np.int64, keepdims=True)
        found[f"prediction {path.stem}"] = np.concatenate([background, units]).astype(
            np.float32
        ) / np.float32(65535)
    return found


def case_rows(path: Path) -> Any:
    """Sorted rows of a case table in a file."""
    is_csv = path.suffix == ".csv"
    records = _records(path) if is_csv else import_module("pyarrow.parquet").read_table(path).to_pylist()
    names = ("case", "patient", "fold", "seed", "method", "class", "metric")
    rows = [{"seed": -1} | record for record in records]
    return sorted((*(str(row[name]) for name in names), float(row["value"])) for row in rows)


def fits(run: Path) -> Any:
    """Fitted rules with their scores, and corrections of intervals, by fold or `all`."""
    stored = json.loads((run / "decision.json").read_text())
    rules = {fold: {"rule": each["decision"], **each["scores"]} for fold, each in stored["rules"].items()}
    return {"rules": rules, "corrections": stored["intervals"]}


def kept_calibrator(run: Path, prob: Any) -> Any:
    """Probabilities by the calibrator that was kept for new scans."""
    return _of("calibration").load_calibrator(run / "calibrator.safetensors").calibrate(prob)


def volume_rows(path: Path) -> Any:
    """Rows (case, class, column, value) of the volumes of a run, or of predictions of new scans."""
    texts = {"case", "class", "patient", "fold", "unit", "level", "interval", "spacing_mm"}
    rows = [(row, name) for row in _records(path) for name in row.keys() - texts]
    return sorted((row["case"], row["class"], name, float(row[name] or "nan")) for row, name in rows)


def comparison_numbers(folder: Path) -> Any:
    """Numbers of the tables of means and pairs of a comparison, or of a report, by name."""
    found = {}
    for row in [row for path in folder.glob("[mp]*s*.csv") for row in _records(path)]:
        methods = f"{row['first']} - {row['second']}" if "first" in row else row["method"]
        for name in row.keys() - {"method", "first", "second", "metric", "class"}:
            value = float(row[name]) if re.match(r"-?\d|-?inf|nan", row[name]) else row[name]
            found[f"{row['metric']} {row['class']} {methods}: {name}"] = value
    return found


def predicted(folder: Path) -> Any:
    """Masks, foreground probabilities and uncertainty of new scans by name, as they are in the files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        name = re.fullmatch(r"(.+_(?:mask|prob|uncertainty)).*\.(nii\.gz|png|tif)", path.name)
        if name is not None:
            load = import_module("nibabel").load if name[2] == "nii.gz" else import_module("PIL.Image").open
            image = load(path)
            # a picture has one file of probabilities per class
            found.setdefault(name[1], []).append(np.asarray(getattr(image, "dataobj", image)))
    return {name: np.stack(arrays) for name, arrays in found.items()}
