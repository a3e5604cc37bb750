"""decisions.parquet, volumes.csv and fits.json of a run, from its stored predictions with numpy."""

import csv

import numpy as np
from case_rows import CaseRow, rows_of, table_of

from semidice.runs.fits import Fits
from semidice.runs.predictions import read_prediction
from semidice.runs.run import open_run
from semidice.runs.stamp import digest_of
from semidice.statistics import read_cases, write_cases

RULES = ("argmax", "fitted", "threshold:0.3", "threshold:0.7")


def write_decision_files(dataset, run, *, level=0.9, corrected=True):
    """Rules are thresholds of the foreground; "fitted" is 0.4. Intervals count voxels at two thresholds."""
    rules, volumes = [], []
    folds = {row.case: row.fold for row in read_cases(run.cases).pipe(rows_of)}
    for number, case in enumerate(dataset.cases):
        name, patient, fold = case.name, case.patient, folds[case.name]
        prob = read_prediction(run.fold(fold).prediction(name))
        masks, present = dataset.masks(number), dataset.present[number]
        drawn = np.stack([masks[present] == index for index in range(dataset.num_classes)])
        majority = drawn.mean(1).argmax(0)
        for rule in RULES:
            dice = [_dice(mask, majority == index) for index, mask in enumerate(decided(prob, rule)) if index]
            rules.append(CaseRow(name, patient, fold, rule, "mean", "dice_score", float(np.mean(dice))))
            error = [
                abs(int(mask.sum()) - int((majority == at).sum()))
                for at, mask in enumerate(decided(prob, rule))
            ]
            rules.append(
                CaseRow(
                    name,
                    patient,
                    fold,
                    rule,
                    "mean",
                    "volume_error",
                    float(np.mean(error[1:])),
                    unit="voxels",
                )
            )
        for index, class_name in enumerate(dataset.manifest.class_names):
            if index == 0:
                continue
            low, high = (int((prob[index] > threshold).sum()) for threshold in (0.7, 0.3))
            ends = [f"{prob[index].sum():.6g}", low, high]
            ends += [max(0, low - 5), high + 5] if corrected else ["", ""]
            of_raters = [
                int((mask == index).sum()) if is_present else ""
                for mask, is_present in zip(masks, present, strict=True)
            ]
            volumes.append([name, patient, fold, class_name, "voxels", level, *ends, *of_raters])
    write_cases(table_of(rules), run.decisions)
    ends = ("expected", "low", "high", "conformal_low", "conformal_high")
    raters = [f"rater {name}" for name in dataset.manifest.raters]
    with run.volumes.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [["case", "patient", "fold", "class", "unit", "level", *ends, *raters], *volumes]
        )
    fits = Fits(digest=digest_of(open_run(run).stamps()), intervals={f"{level:g}": {}})
    run.fits.write_text(fits.model_dump_json())


def decided(prob, rule):
    """Masks of all classes: foreground where its probability exceeds a threshold, of the likeliest class."""
    if rule == "argmax":
        classes = prob.argmax(0)
    else:
        threshold = 0.4 if rule == "fitted" else float(rule.partition(":")[2])
        classes = np.where(prob[1:].sum(0) > threshold, prob[1:].argmax(0) + 1, 0)
    return np.stack([classes == index for index in range(len(prob))])


def _dice(mask, target):
    total = mask.sum() + target.sum()
    return 2 * (mask & target).sum() / total if total else 1.0
