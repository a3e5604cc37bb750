"""The MONAI adapters in the real MONAI: metrics, transforms, errors of newcomers, and the page."""

from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from laws import class_map, soft_label
from start import refused

from semidice import labels
from semidice.arrays import one_hot

pytest.importorskip("monai.metrics")

from monai.data import CacheDataset, MetaTensor
from monai.metrics import CumulativeIterationMetric, DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, Resized, SpatialPadd

from semidice.integrations.monai import (
    BinarizedDiceMetric,
    RandRaterLabeld,
    RaterCalibrationMetric,
    RatersToSoftLabeld,
    ResizeSoftLabeld,
    SoftDiceMetric,
)

BUNDLE = Path(__file__).parents[2] / "docs" / "examples" / "monai_bundle"
METRICS = (SoftDiceMetric, BinarizedDiceMetric, RaterCalibrationMetric)
AFFINE = torch.diag(torch.tensor([0.7, 0.7, 2.5, 1.0], dtype=torch.float64))
AFFINE[:3, 3] = torch.tensor([-10.0, 4.0, 20.0])


def loop_soft_dice(prob, soft):
    """1 - DML1 of each case and class, voxel by voxel."""
    scores = torch.zeros(prob.shape[:2])
    for case, channel in np.ndindex(*prob.shape[:2]):
        pairs = list(
            zip(prob[case, channel].flatten().tolist(), soft[case, channel].flatten().tolist(), strict=True)
        )
        overlap, total = sum(min(pair) for pair in pairs), sum(sum(pair) for pair in pairs)
        scores[case, channel] = 2 * overlap / total
    return scores


def loop_bdice(prob, soft):
    """Dice of both cut at 0.1, ..., 0.9, averaged."""
    dice = []
    for level in np.arange(1, 10) / 10:
        above, wanted = ((part > level).double().flatten(2) for part in (prob, soft))
        total = (above + wanted).sum(2)
        dice.append(torch.where(total > 0, 2 * (above * wanted).sum(2) / total, 1))
    return torch.stack(dice).mean(0).float()


def loop_rater_calibration(prob, masks):
    """The mean over the raters of the signed gaps of ten bins of the top class, then their absolute sum."""
    errors = []
    for case, raters in zip(prob, masks, strict=True):
        confidence, decided = case.flatten(1).max(0)
        gaps = np.zeros(10)
        for sure, label, votes in zip(confidence, decided, raters.flatten(1).T, strict=True):
            share = float((votes == label).float().mean())
            gaps[min(9, int(float(sure) * 10))] += share - float(sure)
        errors.append(np.abs(gaps).sum() / confidence.numel())
    return torch.tensor(errors, dtype=torch.float32).unsqueeze(1)


@pytest.fixture
def scored():
    """Probabilities, raters' class maps and their mean, of four cases of three classes."""
    masks = class_map((4, 3, 5, 6, 4), 3)
    return soft_label(4, 3, 5, 6, 4), masks, labels.mean_label(masks, num_classes=3, batched=True)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("reduction", ["none", "mean", "mean_batch", "mean_channel", "sum", "sum_batch"])
def test_metrics_of_hard_masks_equal_the_dice_of_monai_in_every_reduction(background, reduction):
    drawn = one_hot(class_map((4, 7, 6), 3, seed=1), 3).float()
    target = one_hot(class_map((4, 7, 6), 3, seed=2), 3).float()
    # a class that neither has, and one that only the prediction has: background takes its voxels
    for masks, case, channel in ((drawn, 0, 2), (target, 0, 2), (target, 1, 1)):
        masks[case, 0] += masks[case, channel]
        masks[case, channel] = 0
    options = {"include_background": background, "reduction": reduction}
    expected = DiceMetric(**options, ignore_empty=False)
    expected(drawn, target)
    for metric in (SoftDiceMetric(**options), BinarizedDiceMetric(**options)):
        metric(drawn[:3], target[:3])
        metric(drawn[3:], target[3:])
        torch.testing.assert_close(metric.get_buffer(), expected.get_buffer())
        torch.testing.assert_close(metric.aggregate(), expected.aggregate())
        assert isinstance(metric, CumulativeIterationMetric)


def test_metrics_of_soft_labels_equal_plain_loops_for_batches_and_for_lists_of_decollated_images(scored):
    prob, masks, soft = scored
    expected = (loop_soft_dice(prob, soft), loop_bdice(prob, soft), loop_rater_calibration(prob, masks))
    listed = [[MetaTensor(image) for image in each] for each in (prob, soft)]
    for kind, scores in zip(METRICS, expected, strict=True):
        metric = kind(reduction="none", get_not_nans=True)
        for arguments in ((prob, soft), listed):
            result = metric(*arguments)
            assert type(result) is torch.Tensor
            torch.testing.assert_close(result, scores)
            torch.testing.assert_close(metric.aggregate()[0], scores)
            metric.reset()
        refused(metric.aggregate, f"{kind.__name__} has no scores")


def test_voxels_that_do_not_count_and_a_case_without_voxels_leave_no_trace(scored):
    prob, _, soft = scored
    valid = torch.rand(4, 5, 6, 4, generator=torch.Generator().manual_seed(1)) < 0.7
    valid[3] = False
    metric = SoftDiceMetric(reduction="mean_channel")
    metric(prob, torch.where(valid.unsqueeze(1), soft, 0), valid=valid)
    kept = [
        loop_soft_dice(prob[case][:, valid[case]][None], soft[case][:, valid[case]][None])
        for case in range(3)
    ]
    torch.testing.assert_close(metric.aggregate()[:3], torch.cat(kept).mean(1))
    # MONAI's reduction calls the mean of nothing 0
    assert metric.aggregate()[3].isnan()
    torch.testing.assert_close(metric.aggregate("mean"), torch.cat(kept).mean().reshape(1))


@pytest.mark.parametrize("maker", ["majority", "mean", "dice_weighted", "staple"])
@pytest.mark.parametrize("layout", ["one key", "one key per rater"])
def test_raters_become_the_label_of_the_maker_with_the_affine_of_the_masks(maker, layout):
    masks = class_map((3, 6, 5, 4), 3)
    # MONAI reads files as floats
    read = [MetaTensor(mask[None].float(), affine=AFFINE) for mask in masks]
    data = {"image": torch.zeros(1), **{f"rater{number}": mask for number, mask in enumerate(read)}}
    keys = list(data)[1:]
    if layout == "one key":
        data, keys = {"raters": MetaTensor(masks.float(), affine=AFFINE)}, "raters"
    made = RatersToSoftLabeld(keys, "soft", maker, num_classes=3)(data)
    assert list(made) == [*data, "soft"]
    assert torch.equal(made["soft"].affine, AFFINE)
    expected = getattr(labels, f"{maker}_label")(masks, num_classes=3)
    torch.testing.assert_close(made["soft"].as_tensor(), expected)
    one_channel = RatersToSoftLabeld(keys, "soft", maker, num_classes=3, background=False)(data)["soft"]
    torch.testing.assert_close(one_channel.as_tensor(), expected[1:])


def test_a_rater_whose_key_is_missing_did_not_look_and_a_function_may_be_the_maker():
    masks = np.random.default_rng(0).random((3, 1, 8, 8)) > 0.5
    data = {"a": masks[0], "c": masks[2]}
    label = RatersToSoftLabeld(["a", "b", "c"], allow_missing_keys=True)(data)["label"]
    np.testing.assert_allclose(label[1], masks[[0, 2], 0].mean(0))
    with pytest.raises(KeyError, match="b"):
        RatersToSoftLabeld(["a", "b", "c"])(data)
    with pytest.raises(ValueError, match="a case has none of the raters' keys d, e"):
        RatersToSoftLabeld(["d", "e"], allow_missing_keys=True)(data)

    def smoothed(masks, num_classes):
        return labels.smooth_label(labels.mean_label(masks, num_classes=num_classes), eps=0.2)

    label = RatersToSoftLabeld(["a", "c"], maker=smoothed)(data)["label"]
    np.testing.assert_allclose(label[1], 0.8 * masks[[0, 2], 0].mean(0) + 0.1, rtol=1e-6)


def test_a_random_rater_is_drawn_again_at_every_call_also_from_a_cache_and_follows_the_seed():
    masks = torch.stack([torch.full((2, 2), number) for number in range(4)])
    cases = [{"raters": masks}] * 30

    def drawn(seed):
        transform = Compose([RandRaterLabeld("raters", num_classes=4)]).set_random_state(seed)
        dataset = CacheDataset(cases, transform, progress=False)
        return [[int(dataset[index]["label"][:, 0, 0].argmax()) for index in range(30)] for _ in range(2)]

    first, second = drawn(1)
    assert set(first) == {0, 1, 2, 3}
    assert first != second
    assert drawn(1) == [first, second]


@pytest.mark.parametrize("size", [(4, 6, 4), (13, 15, 4), (5, 14, 9), (-1, 3, -1)], ids=str)
def test_a_resized_label_stays_a_probability_on_the_grid_of_monais_resize(size):
    soft = soft_label(1, 3, 9, 12, 4)[0]
    data = {"label": MetaTensor(soft, affine=AFFINE), "image": MetaTensor(soft[:1].clone(), affine=AFFINE)}
    resized = ResizeSoftLabeld("label", size)(data)["label"]
    expected = Resized("image", size, mode="area")(data)["image"]
    assert resized.shape[1:] == expected.shape[1:]
    torch.testing.assert_close(resized.affine, expected.affine)
    torch.testing.assert_close(resized.as_tensor().sum(0), torch.ones(resized.shape[1:]))
    assert resized.min() >= 0
    pairs = ResizeSoftLabeld("label", (9, 6, 4))(data)["label"].as_tensor()
    torch.testing.assert_close(pairs, soft.reshape(3, 9, 6, 2, 4).mean(3))


def test_padding_does_not_reach_a_resized_label_and_is_resized_with_it():
    soft = soft_label(1, 2, 8, 8)[0]
    data = SpatialPadd(["label", "valid"], (8, 12), method="end")(
        {"label": soft, "valid": torch.ones(1, 8, 8)}
    )
    assert data["label"][:, :, 8:].sum() == 0
    resized = ResizeSoftLabeld("label", (4, 6), valid_key="valid")(data)
    assert resized["valid"].shape == (1, 4, 6)
    assert resized["valid"].dtype == torch.bool
    assert torch.equal(resized["valid"][0, 0], torch.tensor([True] * 4 + [False] * 2))
    expected = ResizeSoftLabeld("label", (4, 4))({"label": soft})["label"]
    torch.testing.assert_close(resized["label"].as_tensor()[:, :, :4], expected)
    assert torch.equal(resized["label"][:, 0, 5].as_tensor(), torch.tensor([1.0, 0.0]))


def test_what_would_be_misread_is_refused(scored):
    prob, _, soft = scored
    mask = torch.ones(1, 4, 4)
    moved = {"a": MetaTensor(mask, affine=AFFINE), "b": MetaTensor(mask, affine=2 * AFFINE)}
    refused(lambda: SoftDiceMetric()(10 * prob, soft), "apply softmax or sigmoid to logits")
    refused(lambda: RatersToSoftLabeld("r")({"r": mask / 3}), "'r'", "mode='nearest'")
    refused(lambda: RatersToSoftLabeld(["a", "b"])(moved), "'b' and 'a'", "ResampleToMatchd")
    refused(lambda: ResizeSoftLabeld("label", 8)({"label": mask.long()}), "'label'", "floats")


def test_a_missing_package_is_one_line_that_says_what_to_install(start):
    code = "import importlib.util\nfind = importlib.util.find_spec\n"
    code += "importlib.util.find_spec = lambda name, *of: None if name == 'monai' else find(name, *of)\n"
    said = start("-c", code + "import semidice.integrations.monai").end().err.strip().splitlines()[-1]
    assert said.endswith("semidice.integrations.monai needs monai; run: pip install 'semidice[monai]'")


def write_nifti(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, AFFINE.numpy()), path)


@pytest.mark.integrations
def test_monais_bundle_trains_with_our_loss_and_its_evaluator_writes_the_scores_of_plain_loops(
    tmp_path, start
):
    """The bundle, run by `monai.bundle run` on five volumes of two or three raters."""
    root = tmp_path
    rng = np.random.default_rng(0)
    for case in range(5):
        image = rng.random((16, 24, 16), dtype=np.float32)
        image[4:12, 6:16, 4:12] += 1
        write_nifti(root / f"images/case{case}.nii.gz", image)
        for rater in range(3 - case % 2):
            mask = image + 0.3 * rng.standard_normal(image.shape) > 1
            write_nifti(root / f"raters/rater{rater}/case{case}.nii.gz", mask.astype(np.uint8))
    arguments = ["--config_file", "configs/train.yaml", "--data_dir", root, "--output_dir", root / "out"]
    arguments += ["--epochs", 4, "--spatial_size", "[8, 12, 8]"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = start("-m", "monai.bundle", "run", *arguments, cwd=BUNDLE, env=hidden).end()
    assert done.code == 0, done.err[-3000:]
    (weights,) = (root / "out").glob("model_final*.pt")
    network = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2)).eval()
    state = torch.load(weights, weights_only=True)
    network.load_state_dict(state.get("model", state))
    expected = {"soft_dice": [], "binarized_dice": [], "rater_calibration": []}
    for case in ("case3", "case4"):
        image = nibabel.load(root / f"images/{case}.nii.gz").get_fdata()
        image = (image - image.min()) / (image.max() - image.min())
        files = sorted(root.glob(f"raters/*/{case}.nii.gz"))
        share = np.mean([nibabel.load(file).get_fdata() for file in files], axis=0)
        small = torch.tensor(
            np.stack([part.reshape(8, 2, 12, 2, 8, 2).mean((1, 3, 5)) for part in (image, share)]),
            dtype=torch.float32,
        )
        with torch.no_grad():
            prob = network(small[None, :1]).softmax(1)
        soft = torch.stack([1 - small[1], small[1]])[None]
        expected["soft_dice"].append(float(loop_soft_dice(prob, soft)[0, 1]))
        expected["binarized_dice"].append(float(loop_bdice(prob, soft)[0, 1]))
        confidence, decided = prob.max(1, keepdim=True)
        gap = (soft.gather(1, decided) - confidence).flatten().double()
        bins = (confidence.flatten() * 10).long().clamp(max=9)
        sums = torch.zeros(10, dtype=torch.float64).index_add(0, bins, gap)
        expected["rater_calibration"].append(float(sums.abs().sum() / len(gap)))
    means = pd.read_csv(root / "out/metrics.csv", header=None, index_col=0)[1]
    for name, scores in expected.items():
        rows = pd.read_csv(root / f"out/{name}_raw.csv")
        assert [Path(name).name for name in rows["filename"]] == ["case3.nii.gz", "case4.nii.gz"]
        np.testing.assert_allclose(rows["mean"], scores, rtol=1e-4)
        assert means[name] == pytest.approx(np.mean(scores), rel=1e-4)
