"""A decision has a text, and a fitted one is chosen by scores of other cases."""

import numpy as np
import pytest
import torch
from rules import RULES, random_prob

from semidice.decisions import Decision, decide, fit_decision
from semidice.decisions.fitting import CANDIDATES
from semidice.metrics import dice_score


class TestText:
    @pytest.mark.parametrize("text", [*RULES, *CANDIDATES, "threshold:0", "mix:1"])
    def test_a_decision_is_its_text(self, text):
        assert str(Decision.parse(text)) == text


def cases_of(num_patients, *, noise=0.0, num_classes=2, seed=0):
    """Cases whose target is class c where its probability exceeds 0.3, with some voxels flipped."""
    rng = np.random.default_rng(seed)
    for number in range(num_patients):
        prob = random_prob(1, 6, 6, seed=number, power=2).float()
        foreground = prob[0] > 0.3
        target = foreground.long()
        target[torch.from_numpy(rng.random((6, 6)) < noise)] = 0
        if num_classes == 3:
            prob = torch.cat([1 - prob, 0.8 * prob, 0.2 * prob])
        yield prob, target, None, f"patient {number}"


class TestFit:
    def test_the_threshold_that_made_the_targets_is_found(self):
        fitted = fit_decision(cases_of(8))
        assert str(fitted.decision) == "threshold:0.3"
        assert fitted.scores["threshold:0.3"] == 1
        assert fitted.num_cases == 8
        assert list(fitted.scores) == list(CANDIDATES)

    @pytest.mark.parametrize("num_classes", [2, 3])
    def test_scores_are_the_mean_dice_of_patients(self, num_classes):
        cases = list(cases_of(5, noise=0.2, num_classes=num_classes))
        # two cases of one patient count as one
        cases = [
            (prob, target, None, "same" if number < 2 else name)
            for number, (prob, target, _, name) in enumerate(cases)
        ]
        valid = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.8
        cases[4] = (*cases[4][:2], valid, "other")
        fitted = fit_decision(cases)
        for text, score in fitted.scores.items():
            scores = []
            for prob, target, counted, _ in cases:
                counted = None if counted is None else counted[None]
                masks = decide(prob[None], text, valid=counted).float()
                wanted = target[None, None].float() if len(prob) == 1 else target[None]
                dice = dice_score(masks, wanted, valid=counted)[0]
                scores.append(float(dice if len(prob) == 1 else dice[1:].mean()))
            expected = np.mean([np.mean(scores[:2]), *scores[2:]])
            assert score == pytest.approx(expected, abs=1e-6), text

    def test_a_gain_within_one_standard_error_keeps_argmax(self):
        # a threshold of 0.3 helps three patients and harms one: a gain of 0.3, and a standard error of 0.3
        prob = torch.tensor([[0.9, 0.4, 0.4, 0.4]])
        helped, harmed = torch.tensor([1, 1, 1, 1]), torch.tensor([1, 0, 0, 0])
        cases = [
            (prob, helped, None, "a"),
            (prob, harmed, None, "b"),
            (prob, helped, None, "c"),
            (prob, helped, None, "d"),
        ]
        fitted = fit_decision(cases, ["threshold:0.3"])
        assert fitted.scores["threshold:0.3"] > fitted.scores["argmax"] + 0.2
        assert str(fitted.decision) == "argmax"
        surely = [(prob, helped, None, name) for name in "abcd"]
        assert str(fit_decision(surely, ["threshold:0.3"]).decision) == "threshold:0.3"

    def test_argmax_is_kept_at_equal_scores_and_with_one_patient(self):
        hard = (torch.tensor([[1.0, 0.0]]), torch.tensor([1, 0]), None)
        assert str(fit_decision([(*hard, "a"), (*hard, "b")]).decision) == "argmax"
        assert str(fit_decision(list(cases_of(1))).decision) == "argmax"

    def test_an_empty_class_in_mask_and_target_scores_one(self):
        empty = (torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64), None, "a")
        assert set(fit_decision([empty]).scores.values()) == {1.0}
