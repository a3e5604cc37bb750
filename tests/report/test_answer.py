"""The raters' own scores, and the warning about methods that are far below them."""

import numpy as np
import pytest
import torch
from pages import build, tables_of
from prepared import make_prepared
from sklearn.metrics import f1_score
from synthetic_runs import write_runs

from semidice.data.dataset import Dataset
from semidice.metrics import ScoreKey, binarized_dice_score
from semidice.report.answer import raters_of, raters_warning
from semidice.statistics import compare_scores
from semidice.statistics.agreement import raters_own_scores
from semidice.statistics.pairing import PairedScores


def class_maps(num_cases=4, num_raters=3, num_classes=3):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, num_classes, (num_cases, 1, 9, 8))
    noise = rng.integers(0, num_classes, (num_cases, num_raters, 9, 8))
    return np.where(rng.random(noise.shape) < 0.3, noise, truth).astype(np.uint8)


def f1(first, second, number):
    return f1_score((first == number).ravel(), (second == number).ravel())


def test_a_rater_is_scored_against_the_majority_and_against_the_other_raters():
    masks = class_maps()
    scores = raters_own_scores(
        masks, class_names=("background", "a", "b"), metrics=("dice_score", "rater_dice_score", "brier_error")
    )
    votes = (masks[:, :, None] == np.arange(3)[:, None, None]).sum(1)
    majority = votes.argmax(1)
    dice = np.array(
        [
            [[f1(mask, vote, number) for number in (1, 2)] for mask in case]
            for case, vote in zip(masks, majority, strict=True)
        ]
    )
    pairs = [
        f1(case[i], case[j], number)
        for case in masks
        for i in range(3)
        for j in range(3)
        if i != j
        for number in (1, 2)
    ]
    assert scores == pytest.approx(
        {
            ("dice_score", "a"): dice[..., 0].mean(),
            ("dice_score", "b"): dice[..., 1].mean(),
            ("dice_score", "mean"): dice.mean(),
            ("rater_dice_score", "all"): np.mean(pairs),
        }
    )


def test_bdice_of_a_rater_is_against_the_mean_of_the_raters():
    masks = class_maps(num_classes=2)
    scores = raters_own_scores(masks, class_names=("background", "a"), metrics=("binarized_dice_score",))
    soft = torch.from_numpy(masks).float().mean(1, keepdim=True)
    expected = [
        binarized_dice_score(torch.from_numpy(masks[:, rater : rater + 1]).float(), soft).mean()
        for rater in range(3)
    ]
    assert scores["binarized_dice_score", "mean"] == pytest.approx(float(np.mean(expected)))


def test_raters_who_draw_nothing_agree_and_a_case_with_one_rater_is_left_out():
    empty, alone = np.zeros((2, 4, 4), np.uint8), np.ones((1, 4, 4), np.uint8)
    names = ("background", "lesion")
    assert raters_own_scores([empty, alone], class_names=names, metrics=["dice_score"]) == {
        ("dice_score", "lesion"): 1.0,
        ("dice_score", "mean"): 1.0,
    }
    assert raters_own_scores([alone], class_names=names, metrics=["dice_score"]) == {}


DICE, PER_SLICE = ScoreKey("dice_score"), ScoreKey("dice_score", per="slice")


def compared(best, *, metric="dice_score"):
    values = np.stack([np.full(6, best), np.full(6, best / 2)], 1)
    cases = tuple(f"c{number}" for number in range(6))
    return compare_scores(PairedScores(ScoreKey(metric), "mean", cases, cases, ("a", "b"), values, 0))


def test_a_best_method_far_below_the_raters_is_warned_about():
    raters = {(ScoreKey("dice_score"), "mean"): 0.88}
    warning = raters_warning([compared(0.1, metric="brier_error"), compared(0.51)], raters)
    assert "51.00 %" in warning
    assert "88.00 %" in warning
    assert raters_warning([compared(0.8)], raters) is None
    assert raters_warning([compared(0.51, metric="brier_error")], raters) is None


def test_without_raters_only_networks_that_learned_nothing_are_named():
    assert raters_warning([compared(0.51)], {}) is None
    assert "0.00 %" in raters_warning([compared(0.0)], {})


def test_the_page_shows_the_raters_agreement_and_warns_of_untrained_networks_in_place_of_a_winner(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    # probabilities of mere noise, and of the distorted truth
    styles = {"untrained": (0.0, 0.0, 3.0, "mean", "min"), "trained": (1.0, 0.0, 0.1, "mean", "min")}
    metrics = ("dice_score", "binarized_dice_score", "brier_error")
    runs = write_runs(dataset, tmp_path / "runs", methods=styles, metrics=metrics)
    own = raters_of(dataset, {case.name for case in dataset.cases}, list(map(ScoreKey, metrics)))
    page = build({"untrained": runs["untrained"]}, dataset, tmp_path / "untrained.html").page
    assert '<p class="verdict">The best dice_score is ' in page.read_text(encoding="utf-8")
    page = build(runs, dataset, tmp_path / "both.html").page
    assert '<p class="verdict">trained is best' in page.read_text(encoding="utf-8")
    bdice = own[ScoreKey("binarized_dice_score"), "mean"]
    expected = [f"{100 * own[DICE, 'mean']:.2f}", f"{100 * bdice:.2f}", "–"]
    answers, means, *_ = tables_of(page)["answer"]
    assert [row[-1] for row in answers[1:4]] == means[-1][1:4] == expected


def test_the_page_of_one_method_has_no_stars(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, cases_per_patient=1)
    runs = write_runs(dataset, tmp_path / "runs", methods=("uniform + DML1",), metrics=("dice_score",))
    text = build(runs, dataset, tmp_path / "report.html").page.read_text(encoding="utf-8")
    body = text.partition("<body>")[2]
    assert "★" not in body
    assert "best set" not in body.partition('id="about"')[0]
    assert "Which is best" not in body


def test_one_rater_has_no_agreement(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_raters=1)
    assert raters_of(Dataset(dataset.folder.path), {"scan000"}, [DICE]) == {}


def test_raters_are_scored_over_scans_or_over_slices_as_the_methods_are(tmp_path):
    dataset = make_prepared(tmp_path / "data", num_cases=6, slices_per_scan=3)
    cases = {"scan000", "scan001", *(case.name for case in dataset.cases)}
    own = raters_of(dataset, cases, [DICE, PER_SLICE])

    def dice(masks):
        majority = (masks == 1).sum(0) >= 2
        overlaps = [2 * (mask & majority).sum() / (mask.sum() + majority.sum()) for mask in masks == 1]
        return np.mean(overlaps)

    volumes = [np.stack([dataset.masks(3 * scan + row) for row in range(3)], -1) for scan in range(2)]
    assert own[DICE, "mean"] == pytest.approx(np.mean([dice(volume) for volume in volumes]))
    slices = [dice(dataset.masks(number)) for number in range(6)]
    assert own[PER_SLICE, "mean"] == pytest.approx(np.mean(slices))
    assert own[DICE, "mean"] != pytest.approx(own[PER_SLICE, "mean"], abs=1e-6)
