"""The table of bad inputs of the library: how each is made, and the part of the message that helps.

Every row must end in a ValueError whose text matches `message`: what is wrong, and the way out. A new row is
one line. The rows of the commands are in `bad_commands`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from laws import class_map, random_logits, soft_label

from semidice import calibration, labels, losses, metrics, overlap
from semidice.arrays import check_all_values
from semidice.kernels import use_kernels
from semidice.report.curves import read_log

NAN, INF = float("nan"), float("inf")
PROB, LOGITS, INDEX = soft_label(2, 3, 4, 5), random_logits(2, 3, 4, 5), class_map((2, 4, 5), 3)
ONE = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0))
BYTES, NINE_TENTHS = INDEX.to(torch.uint8), torch.full((2, 3, 4, 5), 0.9)
COARSE = LOGITS[:, :, ::2, ::2]
MASKS = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) > 0.5
LABEL = labels.mean_label(MASKS)
IMAGE = torch.ones(1, 1, 8, 8)


class Row(NamedTuple):
    """One bad input. make: a function that uses it, called with an empty folder."""

    what: str
    make: Callable[[Any], object]
    message: str


# what is not a usable tensor, for an argument of that name
NO_TENSOR = {
    "None": (lambda tensor: None, "NAME must be a tensor; got NoneType"),
    "a text": (lambda tensor: "x", "NAME must be a tensor; got str: use torch.as_tensor"),
    "numpy": (
        lambda tensor: tensor.numpy(),
        r"NAME must be a tensor; got a numpy array of .*torch\.as_tensor",
    ),
    "float8": (lambda tensor: tensor.to(torch.float8_e4m3fn), r"NAME .*float8_e4m3fn.*use \.float\(\)"),
    "uint16": (lambda tensor: tensor.to(torch.uint16), r"NAME .*uint16 .*use \.long\(\)"),
    "complex": (lambda tensor: tensor + 0j, "NAME .*complex64"),
    "sparse": (lambda tensor: tensor.to_sparse(), r"NAME is sparse, .*use \.to_dense\(\)"),
    "meta": (
        lambda tensor: tensor.to("meta"),
        "NAME is on (the device meta and has no values|meta but prediction on cpu)",
    ),
}
SCORED = (
    losses.dice_loss, losses.soft_cross_entropy, overlap.overlap_stats, metrics.dice_score,
    metrics.soft_dice_score, metrics.brier_error, metrics.calibration_error, metrics.kde_calibration_error,
)  # fmt: skip


def _of_each_function() -> list[Row]:
    rows = []
    for function in SCORED:
        for kind, (change, message) in NO_TENSOR.items():
            name = f"{function.__name__} of a prediction that is {kind}"
            rows.append(
                Row(
                    name,
                    lambda _, f=function, c=change: f(c(PROB), INDEX),
                    message.replace("NAME", "prediction"),
                )
            )
            name = f"{function.__name__} of a target that is {kind}"
            target = PROB if kind in ("float8", "complex") else INDEX
            rows.append(
                Row(
                    name,
                    lambda _, f=function, c=change, t=target: f(PROB, c(t)),
                    message.replace("NAME", "target"),
                )
            )
        for value in (1.5, "0", True):
            rows.append(
                Row(
                    f"{function.__name__} with ignore_index {value!r}",
                    lambda _, f=function, v=value: f(PROB, INDEX, ignore_index=v),
                    "ignore_index must be a whole number; got",
                )
            )
        for value in (256, -1, -100):
            rows.append(
                Row(
                    f"{function.__name__} of bytes with ignore_index {value}",
                    lambda _, f=function, v=value: f(PROB, BYTES, ignore_index=v),
                    rf"ignore_index={value} cannot occur in a target of uint8.*0 to 255: use target\.long",
                )
            )
        rows.append(
            Row(
                f"{function.__name__} with a text as valid",
                lambda _, f=function: f(PROB, INDEX, valid="x"),
                r"valid must be bool \(2, 4, 5\).*got str",
            )
        )
    return rows


# fmt: off
LOSSES = [
    Row("gamma inf", lambda _: losses.DiceLoss(gamma=INF), "gamma must be a finite number; got inf"),
    Row("gamma NaN", lambda _: losses.DiceLoss(gamma=NAN), "gamma must be a finite number; got nan"),
    Row("gamma 0", lambda _: losses.DiceLoss(gamma=0), "gamma must be greater than 0; got 0"),
    Row("gamma as text", lambda _: losses.DiceLoss(gamma="2"), "gamma must be a finite number; got '2'"),
    Row("smooth inf", lambda _: losses.DiceLoss(smooth=INF), "smooth must be a finite number; got inf"),
    Row("smooth -1", lambda _: losses.DiceLoss(smooth=-1), "smooth must be 0 or more; got -1"),
    Row("smooth None", lambda _: losses.DiceLoss(smooth=None), "smooth must be a finite number; got None"),
    Row("alpha NaN", lambda _: losses.TverskyLoss(alpha=NAN, beta=1.0), "alpha must be a finite number; got nan"),
    Row("alpha inf", lambda _: losses.TverskyLoss(alpha=INF, beta=1.0), "alpha must be a finite number; got inf"),
    Row("alpha and beta 0", lambda _: losses.TverskyLoss(alpha=0, beta=0), "alpha and beta are both 0.*greater than 0"),
    Row("form of another library", lambda _: losses.DiceLoss(form="soft"), "form must be one of 'min'.*got 'soft'"),
    Row("form as a list", lambda _: losses.DiceLoss(form=["min"]), "form must be one of 'min'"),
    Row("over None", lambda _: losses.DiceLoss(over=None), "over must be one of 'batch'"),
    Row("class_weight empty", lambda _: losses.DiceLoss(class_weight=[]), "class_weight must be finite, 0 or more and not all 0"),
    Row("class_weight all 0", lambda _: losses.DiceLoss(class_weight=[0, 0, 0]), "class_weight must be .*not all 0"),
    Row("class_weight negative", lambda _: losses.DiceLoss(class_weight=[1, -1, 1]), "class_weight must be .*0 or more"),
    Row("class_weight NaN", lambda _: losses.DiceLoss(class_weight=[1, NAN, 1]), "class_weight must be finite"),
    Row("class_weight inf", lambda _: losses.DiceLoss(class_weight=[1, INF, 1]), "class_weight must be finite"),
    Row("class_weight as text", lambda _: losses.DiceLoss(class_weight="balanced"), "class_weight must be numbers; got 'balanced'"),
    Row("class_weight of two classes for three", lambda _: losses.DiceLoss(class_weight=[1, 2])(LOGITS, INDEX), "one number for each of the 3 classes"),
    Row("ignore_index as text", lambda _: losses.DiceLoss(ignore_index="255"), "ignore_index must be a whole number; got '255'"),
    Row("cross_entropy_weight inf", lambda _: losses.SegmentationLoss(cross_entropy_weight=INF), "cross_entropy_weight must be a finite number"),
    Row("cross_entropy_weight NaN", lambda _: losses.SegmentationLoss(cross_entropy_weight=NAN), "cross_entropy_weight must be a finite number"),
    Row("region_weight -1", lambda _: losses.SegmentationLoss(region_weight=-1), "region_weight must be 0 or more; got -1"),
    Row("region_weight as text", lambda _: losses.SegmentationLoss(region_weight="x"), "region_weight must be a finite number; got 'x'"),
    Row("both weights 0", lambda _: losses.SegmentationLoss(cross_entropy_weight=0, region_weight=0), "all 0: nothing would be learned"),
    Row("scale_weights empty", lambda _: losses.SegmentationLoss(scale_weights=[]), r"scale_weights must be a list with one number per output; got \[\]"),
    Row("scale_weights all 0", lambda _: losses.SegmentationLoss(scale_weights=[0, 0]), "scale_weights are all 0"),
    Row("scale_weights negative", lambda _: losses.SegmentationLoss(scale_weights=[1, -1]), r"scale_weights\[1\] must be 0 or more; got -1"),
    Row("scale_weights NaN", lambda _: losses.SegmentationLoss(scale_weights=[NAN, 1]), r"scale_weights\[0\] must be a finite number"),
    Row("scale_weights as text", lambda _: losses.SegmentationLoss(scale_weights="ab"), "scale_weights must be a list .*got 'ab'"),
    Row("one scale_weight for two outputs", lambda _: losses.SegmentationLoss(scale_weights=[1])([LOGITS, COARSE], INDEX), "one number per output; got 1 for 2"),
    Row("coarse outputs and a class that does not exist", lambda _: losses.SegmentationLoss()([COARSE], INDEX + 7), "class indices 7 to 9, but there are 3 classes"),
    Row("coarse outputs and a target that does not sum to one", lambda _: losses.SegmentationLoss()([COARSE], NINE_TENTHS), "must sum to one over its classes.*from 2.7 to 2.7"),
    Row("coarse outputs and a fractional valid", lambda _: losses.SegmentationLoss()([COARSE], INDEX, torch.rand(2, 4, 5)), r"valid must be bool \(2, 4, 5\).*got float32"),
    Row("outputs with the coarse one first", lambda _: losses.SegmentationLoss()([COARSE, LOGITS], INDEX), r"finest first; got sizes \[\(2, 3\), \(4, 5\)\]: reverse the list"),
    Row("outputs with other channels", lambda _: losses.SegmentationLoss()([LOGITS, random_logits(2, 4, 2, 2)], INDEX), r"output 1 is float32 \(2, 4, 2, 2\), but output 0 is .*same images, channels"),
    Row("outputs with other axes", lambda _: losses.SegmentationLoss()([LOGITS, random_logits(2, 3, 2)], INDEX), "output 1 is .*number of axes"),
    Row("an output that is None", lambda _: losses.SegmentationLoss()([LOGITS, None], INDEX), "output 1 must be a tensor; got NoneType"),
    Row("no output", lambda _: losses.SegmentationLoss()([], INDEX), "one number per output; got 0 for 0 outputs"),
    Row("a softmax target that sums to 2.7", lambda _: losses.DiceLoss()(LOGITS, NINE_TENTHS), r"must sum to one over its classes; got float32 \(2, 3, 4, 5\) with sums from 2.7 to 2.7: divide"),
    Row("a softmax target with one voxel of zeros", lambda _: losses.DiceLoss()(LOGITS, _zeros_at_one_voxel()), "sums from 0 to 1: divide it by its sum, mark padding in valid, or use activation='sigmoid'"),
    Row("cross entropy of a target that sums to 2.7", lambda _: losses.soft_cross_entropy(LOGITS, NINE_TENTHS, activation="softmax"), "must sum to one"),
    Row("the teacher's probabilities sum to 2.7", lambda _: losses.DistillationLoss()(LOGITS, INDEX, NINE_TENTHS), "must sum to one"),
    Row("no teacher's probabilities", lambda _: losses.DistillationLoss()(LOGITS, INDEX, None), "teacher_prob must be a tensor; got NoneType"),
    Row("the teacher's classes", lambda _: losses.DistillationLoss()(LOGITS, INDEX, INDEX), r"teacher_prob must be probabilities; got int64 \(2, 4, 5\): call Teacher"),
    Row("the teacher's probabilities of one image", lambda _: losses.DistillationLoss()(LOGITS, INDEX, PROB[:1]), r"images or channels; got target float32 \(1, 3, 4, 5\)"),
    Row("label_weight inf", lambda _: losses.DistillationLoss(label_weight=INF), "label_weight must be a finite number"),
    Row("teacher_weight as text", lambda _: losses.DistillationLoss(teacher_weight="x"), "teacher_weight must be a finite number"),
    Row("label and teacher with weight 0", lambda _: losses.DistillationLoss(label_weight=0, teacher_weight=0), "both 0: nothing would be learned"),
    Row("no term for the teacher", lambda _: losses.DistillationLoss(terms=()), "terms is empty: name cross_entropy"),
    Row("an unknown term", lambda _: losses.DistillationLoss(terms=("dice",)), "terms must be one of 'cross_entropy', 'region'; got 'dice'"),
    Row("temperature inf", lambda _: _teacher(temperature=INF), "temperature must be a finite number"),
    Row("temperature as text", lambda _: _teacher(temperature="hot"), "temperature must be a finite number; got 'hot'"),
    Row("bandwidth 0", lambda _: _teacher(bandwidth=0.0), "bandwidth must be above 0; got 0"),
    Row("half a key", lambda _: _teacher(num_keys=1.5), "num_keys must be a whole number; got 1.5"),
    Row("width -1", lambda _: _teacher(width=-1), "width must be 0 or more; got -1"),
    Row("a teacher without a network", lambda _: losses.Teacher(None), r"network must be a torch\.nn\.Module; got NoneType"),
    Row("kde without a target", lambda _: _teacher()(IMAGE), "calibration='kde' needs the target of the batch"),
    Row("index of something else", lambda _: overlap.tversky_index(None, alpha=0.5, beta=0.5), "stats must come from overlap_stats; got NoneType"),
    Row("index with alpha NaN", lambda _: overlap.tversky_index(overlap.overlap_stats(PROB, INDEX), alpha=NAN, beta=0.5), "alpha must be a finite number"),
    Row("kernels turned off by a text", lambda _: use_kernels("no"), "use_kernels takes True or False; got 'no'"),
    Row("checks turned on by a text", lambda _: check_all_values("yes"), "check_all_values takes True or False; got 'yes'"),
]

LABELS = [
    *(Row(f"{maker.__name__} of {what}", lambda _, m=maker, v=value: m(v), message)
      for maker in (labels.mean_label, labels.majority_label, labels.dice_weighted_label, labels.staple_label, labels.rater_agreement)
      for what, value, message in (
          ("None", None, "masks must be an array, or a list with one per rater; got NoneType"),
          ("a text", "masks", "masks must be an array, or a list with one per rater; got str"),
          ("a list of None", [None], "each mask must be a tensor; got NoneType: use numpy.asarray"),
          ("an empty list", [], "masks of one case need one shape; got an empty list"),
          ("probabilities", np.ones((2, 3)), "masks must be bool, or integers.*float64.*use masks > 0.5"),
          ("texts", np.array(["a"]), "masks must be bool, or integers"),
          ("sparse masks", MASKS.to_sparse(), r"masks is sparse, bool \(3, 4, 5\): use \.to_dense"),
          ("masks without values", MASKS.to("meta"), "masks is on the device meta"),
          ("masks of 0 and 255", np.array([[0, 255]], dtype=np.uint8), "uint8 .* with values 0, 255: use masks > 0"),
      )),
    Row("num_classes as text", lambda _: labels.mean_label(MASKS, num_classes="2"), "num_classes must be a whole number; got '2'"),
    Row("num_classes 1", lambda _: labels.mean_label(MASKS, num_classes=1), "num_classes must be 2 or more"),
    Row("class 3 of 3", lambda _: labels.mean_label(np.array([[3]]), num_classes=3), "class indices 3 to 3, but there are 3 classes"),
    Row("masks of two shapes", lambda _: labels.mean_label([MASKS[0], MASKS[0, :2]]), r"one shape; got shapes \(4, 5\), \(2, 5\): resample"),
    Row("present as text", lambda _: labels.mean_label(MASKS, present="abc"), "present must be bool, one flag per rater; got 'abc'"),
    Row("nobody present", lambda _: labels.mean_label(MASKS, present=[False] * 3), "present has no rater: leave out cases"),
    Row("a rater without a seed", lambda _: labels.random_rater_label(MASKS, generator=None), r"generator must be a seed or a torch\.Generator; got None"),
    *(Row(f"{function.__name__} of {what}", lambda _, f=function, v=value, o=options: f(v, **o), message)
      for function, options in ((labels.smooth_label, {"eps": 0.1}), (labels.boundary_smooth_label, {}), (labels.spatially_smooth_label, {}))
      for what, value, message in (
          ("None", None, "label must be a tensor; got NoneType: use numpy.asarray"),
          ("a list", [1.0], "label must be a tensor; got list: use numpy.asarray"),
          ("a sparse label", LABEL.to_sparse(), r"label is sparse.*use \.to_dense"),
          ("a class map", np.zeros((4, 5), dtype=int), r"label must be floats \(C, \*space\).*got .*int64"),
          ("a label that does not sum to one", LABEL * 0.5, "label must sum to one over its class axis.*0.5"),
      )),
    Row("eps 2", lambda _: labels.smooth_label(LABEL, eps=2), r"eps must lie in \[0, 1\]; got 2"),
    Row("eps as text", lambda _: labels.smooth_label(LABEL, eps="a"), "eps must be a finite number; got 'a'"),
    Row("sigma 0", lambda _: labels.spatially_smooth_label(LABEL, sigma=0), "sigma must be above 0 and at most 1000 voxels; got 0"),
    Row("sigma a billion", lambda _: labels.spatially_smooth_label(LABEL, sigma=1e9), "sigma must be .* at most 1000 voxels"),
    Row("sigma NaN", lambda _: labels.spatially_smooth_label(LABEL, sigma=NAN), "sigma must be a finite number"),
    Row("an even width", lambda _: labels.boundary_smooth_label(LABEL, width=2), "width must be odd and 1 or more.*got 2"),
    Row("half a width", lambda _: labels.boundary_smooth_label(LABEL, width=2.5), "width must be a whole number; got 2.5"),
]

METRICS = [
    Row("a soft target for a hard score", lambda _: metrics.dice_score(PROB, PROB), "dice_score needs a hard target.*majority_label"),
    Row("logits in a score", lambda _: metrics.dice_score(LOGITS, INDEX), "apply softmax or sigmoid to logits"),
    Row("threshold NaN", lambda _: metrics.dice_score(ONE, ONE > 0.5, threshold=NAN), "threshold must be a finite number"),
    Row("threshold 2", lambda _: metrics.dice_score(ONE, ONE > 0.5, threshold=2), r"threshold must lie in \[0, 1\]; got 2"),
    Row("empty as text", lambda _: metrics.dice_score(PROB, INDEX, empty="x"), "empty, the score of two empty masks, must be a number or NaN; got 'x'"),
    Row("no thresholds", lambda _: metrics.binarized_dice_score(PROB, PROB, thresholds=[]), "thresholds must be one or more numbers"),
    Row("thresholds as text", lambda _: metrics.binarized_dice_score(PROB, PROB, thresholds="x"), "thresholds must be numbers; got 'x'"),
    Row("0 bins", lambda _: metrics.calibration_error(PROB, INDEX, num_bins=0), "num_bins must be 1 to 10000; got 0"),
    Row("ten billion bins", lambda _: metrics.calibration_error(PROB, INDEX, num_bins=10**10), "num_bins must be 1 to 10000"),
    Row("half a bin", lambda _: metrics.calibration_error(PROB, INDEX, num_bins=1.5), "num_bins must be a whole number"),
    Row("an unknown binning", lambda _: metrics.calibration_error(PROB, INDEX, binning="x"), "binning must be one of"),
    Row("ECE bandwidth NaN", lambda _: metrics.kde_calibration_error(PROB, INDEX, bandwidth=NAN), "bandwidth must be a finite number"),
    Row("ECE bandwidth 0", lambda _: metrics.kde_calibration_error(PROB, INDEX, bandwidth=0), "bandwidth must be above 0"),
    Row("ECE seed as text", lambda _: metrics.kde_calibration_error(PROB, INDEX, seed="x"), "seed must be a whole number; got 'x'"),
    Row("spacing of a 2D image", lambda _: metrics.volume_error_ml(PROB, INDEX, spacing_mm=(1, 1)), "spacing_mm needs three positive sides.*slice thickness"),
    Row("spacing 0", lambda _: metrics.volume_error_ml(PROB, INDEX, spacing_mm=(1, 1, 0)), "spacing_mm needs three positive sides"),
    Row("spacing inf", lambda _: metrics.volume_error_ml(PROB, INDEX, spacing_mm=(1, 1, INF)), "spacing_mm needs three positive sides"),
    Row("spacing NaN", lambda _: metrics.volume_error_ml(PROB, INDEX, spacing_mm=(1, 1, NAN)), "spacing_mm needs three positive sides"),
    Row("spacing as text", lambda _: metrics.volume_error_ml(PROB, INDEX, spacing_mm="abc"), "spacing_mm must be numbers; got 'abc'"),
    Row("tolerance -1", lambda _: metrics.surface_dice_score(PROB, INDEX, spacing_mm=(1, 1), tolerance_mm=-1), "tolerance_mm must be 0 mm or more; got -1"),
    Row("tolerance as text", lambda _: metrics.surface_dice_score(PROB, INDEX, spacing_mm=(1, 1), tolerance_mm="x"), "tolerance_mm must be a finite number"),
    Row("surfaces with spacing None", lambda _: metrics.hausdorff_error_mm(PROB, INDEX, spacing_mm=None), "spacing_mm must be numbers; got None"),
    Row("percentile 101", lambda _: metrics.hausdorff_error_mm(PROB, INDEX, spacing_mm=(1, 1), percentile=101), "percentile must .*101"),
    Row("mean of None", lambda _: metrics.foreground_mean(None), "scores must be a tensor; got NoneType"),
    Row("mean of one axis", lambda _: metrics.foreground_mean(torch.rand(3)), "scores must be one row per case"),
    Row("samples None", lambda _: metrics.generalised_energy_distance(None, MASKS[None]), "samples"),
    Row("0 samples", lambda _: metrics.level_masks(PROB, num_samples=0), "num_samples must be 1 or more; got 0"),
    Row("Dice of raters without a prediction", lambda _: metrics.rater_dice_score(None, MASKS[None]), "prediction must be a tensor; got NoneType"),
    Row("a score of unknown direction", lambda _: metrics.higher_is_better("overlap"), "end it in _score or _error"),
    Row("differences None", lambda _: metrics.paired_bootstrap(None), "differences must be a numpy array of numbers.*got NoneType"),
    Row("differences as a list", lambda _: metrics.paired_bootstrap([[1.0]]), "got list: use numpy.asarray"),
    Row("differences as texts", lambda _: metrics.permutation_test(np.array([["a"]])), "differences must be a numpy array of numbers"),
    Row("differences NaN", lambda _: metrics.paired_bootstrap(np.array([[NAN], [1.0]])), "1 that are not finite: leave such cases out"),
    Row("one case", lambda _: metrics.paired_bootstrap(np.array([[1.0]])), "needs two or more cases or patients; got 1"),
    Row("ten resamples", lambda _: metrics.paired_bootstrap(np.ones((3, 1)), num_resamples=10), "num_resamples must be 100 to 1000000; got 10"),
    Row("a trillion resamples", lambda _: metrics.paired_bootstrap(np.ones((3, 1)), num_resamples=10**12), "num_resamples must be 100 to 1000000"),
    Row("level 2", lambda _: metrics.paired_bootstrap(np.ones((3, 1)), level=2), "level must lie between 0 and 1; got 2"),
    Row("seed -1", lambda _: metrics.paired_bootstrap(np.ones((3, 1)), seed=-1), "seed must be 0 or more; got -1"),
    Row("p-value 2", lambda _: metrics.holm(np.array([2.0, 0.5])), "p must be p-values, numbers from 0 to 1"),
    Row("p-value NaN", lambda _: metrics.holm(np.array([NAN])), "p must be p-values"),
    Row("Dice 1.5 in a table", lambda _: _table(1.5), "dice_score of case c0 and method a is 1.5 in row 0; it must be 0 to 1.*divide percentages by 100"),
    Row("Dice -1 in a table", lambda _: _table(-1.0), "dice_score of case c0 .*is -1 in row 0"),
    Row("an infinite calibration error in a table", lambda _: _table(INF, "calibration_error"), "calibration_error .*is inf in row 0; it must be 0 to 1"),
    Row("a text as score", lambda _: _table("good"), "column value of a case table must hold numbers: .*good"),
    Row("a row of two cells", lambda _: metrics.CaseTable.from_rows([("a", "b")]), r"row 0 must be a CaseRow \(case, patient"),
    Row("a table of None", lambda _: metrics.CaseTable(None), "case table must be a dict of numpy arrays; got None: use from_rows"),
    Row("a table of lists", lambda _: metrics.CaseTable({"case": ["a"]}), "must be a dict of numpy arrays"),
    Row("a negative seed of a table", lambda _: metrics.CaseTable.from_rows([metrics.CaseRow("c0", "p0", 0, "a", "mean", "dice_score", 0.5, -2)]), r"seed must be -1 \(one training\) or more; got -2"),
    Row("a seed of words in a CSV", lambda w: metrics.read_cases(_file(w / "t.csv", _CSV[:-1] + b",seed\nc0,p0,0,a,mean,dice_score,0.5,first\n")), "line 2: seed must be a number; got 'first'"),
    Row("methods without a common seed", lambda _: metrics.compare_cases(metrics.CaseTable.from_rows(metrics.CaseRow(f"c{case}", f"c{case}", 0, method, "mean", "dice_score", 0.5, seed) for case in range(6) for method, seed in (("a", 0), ("b", 1))), "dice_score"), "no seed is common to all methods: a has 0; b has 1"),
    Row("an unknown score of a table", lambda _: metrics.compare_cases(_table(0.5), "dise_score"), "dise_score.*it has metrics dice_score"),
    Row("no tables", lambda _: metrics.concatenate([]), "needs at least one case table"),
    Row("one score twice", lambda _: metrics.concatenate([_table(0.5), _table(0.5)]), "rows 0 and 1 score the same thing twice"),
    Row("a table as .txt", lambda folder: metrics.read_cases(folder / "cases.txt"), "a case table is a .parquet or a .csv file; got .*cases.txt"),
    Row("a table that is no Parquet file", lambda folder: metrics.read_cases(_file(folder / "cases.parquet", b"PAR1")), "cases.parquet is not a Parquet file, or is damaged"),
    Row("a table with other columns", lambda folder: metrics.read_cases(_file(folder / "cases.csv", b"a,b\n1,2\n")), "cases.csv must have the columns case, .*it lacks case"),
    Row("a table with a short line", lambda folder: metrics.read_cases(_file(folder / "cases.csv", _CSV + b"a,b\n")), "line 2: expected 7 cells, got 2"),
    Row("a table with a word as score", lambda folder: metrics.read_cases(_file(folder / "cases.csv", _CSV + b"c,p,0,m,mean,dice_score,good\n")), "line 2: value must be a number; got 'good'"),
    Row("a table with percentages", lambda folder: metrics.read_cases(_file(folder / "cases.csv", _CSV + b"c,p,0,m,mean,dice_score,87.5\n")), "cases.csv: dice_score of case c and method m is 87.5 .*divide percentages by 100"),
    Row("a log that is not text", lambda folder: read_log(_file(folder / "log.jsonl", b"\xff\xfe")), "log.jsonl is not a log of a training: it is not UTF-8 text"),
    Row("a log with a line that is cut", lambda folder: read_log(_file(folder / "log.jsonl", b'{"step": 1}\n{"ste')), "log.jsonl, line 2 must be a JSON object with a step"),
    Row("a log of lists", lambda folder: read_log(_file(folder / "log.jsonl", b"[1]\n")), "log.jsonl, line 1 must be a JSON object"),
    Row("a log with words", lambda folder: read_log(_file(folder / "log.jsonl", b'{"step": 1, "loss": "x"}\n')), "log.jsonl, line 1 must be .*numbers"),
    Row("a table that is not text", lambda folder: metrics.read_cases(_file(folder / "cases.csv", b"\xff\xfe\x00")), "cases.csv .*UTF-8"),
]

CALIBRATION = [
    *(row
      for calibrator in (calibration.KDECalibrator, calibration.TemperatureScaling)
      for row in (
          Row(f"{calibrator.__name__} fitted to None", lambda _, c=calibrator: c().fit(None, INDEX), "prediction must be a tensor"),
          Row(f"{calibrator.__name__} fitted without a target", lambda _, c=calibrator: c().fit(PROB, None), "target must be a tensor"),
          Row(f"{calibrator.__name__} not fitted", lambda _, c=calibrator: c().calibrate(PROB), "has seen no data: call fit"),
          Row(f"{calibrator.__name__} of an unknown activation", lambda _, c=calibrator: c(activation="relu"), "activation must be one of 'softmax'"),
          Row(f"{calibrator.__name__} of a damaged file", lambda folder, c=calibrator: c.load(_file(folder / "bad.safetensors", b"not a file")), "bad.safetensors is not a complete file of a calibrator.*save it again"),
          Row(f"{calibrator.__name__} of a file without its numbers", lambda folder, c=calibrator: c.load(_calibrator(folder, c.__name__)), "is not a valid .*; got None; fit it again"),
          Row(f"{calibrator.__name__} of another kind", lambda folder, c=calibrator: c.load(_calibrator(folder, "Other")), "must hold a .*; got Other: load it with load_calibrator"),
      )),
    Row("key points 0", lambda _: calibration.KDECalibrator(num_keys=0), "num_keys must be 1 or more; got 0"),
    Row("key points as text", lambda _: calibration.KDECalibrator(num_keys="x"), "num_keys must be a whole number; got 'x'"),
    Row("calibrator bandwidth inf", lambda _: calibration.KDECalibrator(bandwidth=INF), "bandwidth must be a finite number"),
    Row("recalibrate None", lambda _: calibration.kde_recalibrate(None, PROB, PROB, bandwidth=0.1), "prob must be a tensor; got NoneType"),
    Row("recalibrate without keys", lambda _: calibration.kde_recalibrate(PROB, None, None, bandwidth=0.1), "key_target must be a tensor"),
    Row("keys of None", lambda _: calibration.sample_keys(None, 3), "target must be a tensor"),
    Row("no key", lambda _: calibration.sample_keys(INDEX, 0), "num_keys must be 1 or more; got 0"),
    Row("values at no keys", lambda _: calibration.take_keys(PROB, None), "keys must come from sample_keys; got NoneType"),
    Row("no bandwidths to choose from", lambda _: calibration.choose_bandwidth(PROB, INDEX, bandwidths=[]), "bandwidths is empty: name one or more"),
    Row("a negative bandwidth to choose from", lambda _: calibration.choose_bandwidth(PROB, INDEX, bandwidths=[-1.0]), "bandwidth must be above 0"),
    Row("probabilities that do not sum to one", lambda _: calibration.choose_bandwidth(NINE_TENTHS, INDEX), "must sum to one over its 3 classes"),
]
# fmt: on

_CSV = ",".join(metrics.cases.COLUMNS).encode() + b"\n"


def _teacher(**options):
    return losses.Teacher(torch.nn.Conv2d(1, 3, 1), calibration="kde", **options)


def _zeros_at_one_voxel():
    target = PROB.clone()
    target[1, :, 2, 3] = 0
    return target


def _table(value, metric="dice_score"):
    return metrics.CaseTable.from_rows([metrics.CaseRow("c0", "p0", 0, "a", "mean", metric, value)])


def _file(path, content):
    path.write_bytes(content)
    return path


def _calibrator(folder, kind):
    path = folder / "calibrator.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata={"kind": kind})
    return path


LIBRARY = [*_of_each_function(), *LOSSES, *LABELS, *METRICS, *CALIBRATION]
