"""Each option of the losses, compared with values computed by hand. Minimising a loss recovers the label."""

import math

import pytest
import torch
from landing import fit_free_logits
from laws import class_map, random_logits, soft_label

import semidice
from semidice import DiceLoss, JaccardLoss, SegmentationLoss, TverskyLoss, dice_loss
from semidice.arrays import downsample_target, one_hot

PAPER = {
    "DML1": {},
    "DML2": {"form": "product"},
    "JML1": {"alpha": 1, "beta": 1},
    "JML2": {"alpha": 1, "beta": 1, "form": "product"},
    "CTL": {"alpha": 0.7, "beta": 0.3},
    "CFTL": {"alpha": 0.7, "beta": 0.3, "gamma": 2.0},
}


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with cross entropy"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", PAPER)
def test_minimising_over_free_logits_recovers_the_soft_label(name, activation, mixed):
    label = soft_label(1, 3, 12)
    weights = {"cross_entropy_weight": 0.25, "region_weight": 0.75} if mixed else {"cross_entropy_weight": 0}
    loss = SegmentationLoss(**PAPER[name], **weights, activation=activation)
    fitted = fit_free_logits(loss, label, steps=300, activation=lambda logits: logits)
    fitted = fitted.softmax(1) if activation == "softmax" else fitted.sigmoid()
    assert (fitted - label).abs().mean() < 1e-3


def test_minimising_the_soft_dice_loss_does_not_recover_the_soft_label():
    label = torch.full((1, 1, 12), 0.5)
    fitted = fit_free_logits(lambda p, y: dice_loss(p, y, form="relaxed"), label, steps=300)
    assert fitted.min() > 0.99


class TestReduction:
    """Two images of three classes with hard predictions, whose statistics are computed by hand."""

    # class 1 is absent from image 0; each image has one wrong voxel
    target = torch.tensor([[0, 0, 2, 2], [0, 1, 2, 2]])
    prediction = torch.tensor([[0, 2, 2, 2], [0, 1, 2, 1]])
    prob = one_hot(prediction, 3).float()
    # Dice of each image and class; class 1 of image 0 is empty in both prediction and target
    dice = torch.tensor([[2 / 3, 1.0, 4 / 5], [1.0, 2 / 3, 2 / 3]])

    def test_over_batch_computes_one_index_per_class(self):
        # tp 2, 1, 3; fp 0, 1, 1; fn 1, 0, 1 over both images
        expected = 1 - torch.tensor([4 / 5, 2 / 3, 6 / 8]).mean()
        torch.testing.assert_close(dice_loss(self.prob, self.target), expected)

    @pytest.mark.parametrize("over", ["image", "class"])
    def test_over_image_and_over_class_are_equal_if_all_classes_are_averaged(self, over):
        torch.testing.assert_close(dice_loss(self.prob, self.target, over=over), 1 - self.dice.mean())

    def test_over_image_averages_the_present_classes_of_each_image_first(self):
        per_image = torch.stack([self.dice[0, [0, 2]].mean(), self.dice[1].mean()])
        loss = dice_loss(self.prob, self.target, over="image", classes="present")
        torch.testing.assert_close(loss, 1 - per_image.mean())

    def test_over_class_averages_each_class_over_the_images_that_contain_it(self):
        per_class = torch.stack([self.dice[:, 0].mean(), self.dice[1, 1], self.dice[:, 2].mean()])
        loss = dice_loss(self.prob, self.target, over="class", classes="present")
        torch.testing.assert_close(loss, 1 - per_class.mean())

    def test_weights_are_normalised_by_their_sum(self):
        weight = torch.tensor([1.0, 0.0, 3.0])
        loss = dice_loss(self.prob, self.target, over="image", class_weight=weight)
        torch.testing.assert_close(loss, 1 - (self.dice @ weight / 4).mean())
        loss = dice_loss(self.prob, self.target, over="class", class_weight=[1.0, 0.0, 3.0])
        torch.testing.assert_close(loss, 1 - (self.dice.mean(0) @ weight / 4))

    def test_background_false_excludes_class_zero(self):
        loss = dice_loss(self.prob, self.target, over="image", background=False)
        torch.testing.assert_close(loss, 1 - self.dice[:, 1:].mean())
        loss = dice_loss(self.prob, self.target, over="image", background=False, class_weight=[9.0, 1.0, 3.0])
        torch.testing.assert_close(loss, 1 - (self.dice[:, 1:] @ torch.tensor([0.25, 0.75])).mean())

    def test_a_present_class_that_is_missed_completely_counts(self):
        nothing = torch.zeros(1, 4, dtype=torch.long)
        loss = dice_loss(one_hot(nothing, 3).float(), self.target[:1], classes="present", background=False)
        assert loss == 1

    def test_an_image_without_a_present_class_is_excluded_from_the_mean(self):
        target = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 2]])
        options = {"over": "image", "classes": "present", "background": False}
        alone = dice_loss(self.prob[1:], target[1:], **options)
        torch.testing.assert_close(dice_loss(self.prob, target, **options), alone)
        assert dice_loss(self.prob[:1], target[:1], **options).item() == 0


def test_focal_and_log_are_applied_to_each_class_before_the_mean():
    prob, target = soft_label(1, 3, 30), soft_label(1, 3, 30, seed=9)
    per_class = torch.stack([dice_loss(prob, target, class_weight=torch.eye(3)[index]) for index in range(3)])
    torch.testing.assert_close(dice_loss(prob, target, gamma=2.5), (per_class**2.5).mean())
    torch.testing.assert_close(dice_loss(prob, target, log=True), -(1 - per_class).log().mean())
    torch.testing.assert_close(
        dice_loss(prob, target, log=True, gamma=0.3), ((-(1 - per_class).log()) ** 0.3).mean()
    )


def test_loss_and_gradient_of_the_log_loss_of_a_missed_class_are_finite():
    prob = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], requires_grad=True)
    loss = dice_loss(prob, torch.tensor([[1, 1]]), log=True)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(1e-7), rel=0.02)
    assert torch.isfinite(prob.grad).all()


def test_the_mixture_is_the_weighted_sum_of_its_parts():
    logits, label = random_logits(2, 3, 8, 8), soft_label(2, 3, 8, 8)
    loss = SegmentationLoss()
    terms = loss.terms(logits.requires_grad_(), label)
    torch.testing.assert_close(terms["region"], DiceLoss()(logits, label))
    torch.testing.assert_close(terms["cross_entropy"], torch.nn.functional.cross_entropy(logits, label))
    torch.testing.assert_close(loss.total(terms), 0.25 * terms["cross_entropy"] + 0.75 * terms["region"])
    totals = loss.total(terms), loss(logits, label)
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(*(torch.autograd.grad(total, logits)[0] for total in totals))


def test_a_term_of_weight_zero_is_excluded():
    logits, label = random_logits(2, 3, 8), soft_label(2, 3, 8)
    region_only = SegmentationLoss(alpha=1, beta=1, cross_entropy_weight=0.0, region_weight=1.0)
    torch.testing.assert_close(region_only(logits, label), JaccardLoss()(logits, label))
    assert region_only.terms(logits, label).keys() == JaccardLoss().terms(logits, label).keys() == {"region"}
    entropy_only = SegmentationLoss(cross_entropy_weight=1.0, region_weight=0.0)
    torch.testing.assert_close(entropy_only(logits, label), torch.nn.functional.cross_entropy(logits, label))


class TestDeepSupervision:
    def test_equal_outputs_have_the_loss_of_one_output(self):
        logits, label = random_logits(2, 3, 8, 8), soft_label(2, 3, 8, 8)
        torch.testing.assert_close(
            SegmentationLoss()([logits, logits, logits], label), SegmentationLoss()(logits, label)
        )

    def test_each_coarser_scale_has_half_the_weight_and_an_averaged_label(self):
        fine, coarse, label = random_logits(1, 2, 8, 8), random_logits(1, 2, 4, 4), soft_label(1, 2, 8, 8)
        coarse_label = label.view(1, 2, 4, 2, 4, 2).mean((3, 5))
        loss = SegmentationLoss()
        expected = (2 * loss(fine, label) + loss(coarse, coarse_label)) / 3
        torch.testing.assert_close(loss([fine, coarse], label), expected)
        coarse_only = SegmentationLoss(scale_weights=[0.0, 1.0])
        torch.testing.assert_close(coarse_only([fine, coarse], label), loss(coarse, coarse_label))

    @pytest.mark.parametrize("space", [(7,), (6, 9), (5, 4, 6)], ids=str)
    def test_coarse_class_indices_become_probabilities_of_the_voxels_not_ignored(self, space):
        index = class_map((2, *space), 3)
        index[:, 0] = 255
        size = tuple(length // 2 for length in space)
        target, valid = downsample_target(index, index != 255, torch.Size([2, 3, *size]))
        torch.testing.assert_close(target.sum(1)[valid], torch.ones_like(target.sum(1)[valid]))
        loss = SegmentationLoss(ignore_index=255)
        logits = [random_logits(2, 3, *space), random_logits(2, 3, *size)]
        expected = (2 * loss(logits[0], index) + SegmentationLoss()(logits[1], target, valid)) / 3
        torch.testing.assert_close(loss(logits, index), expected)

    def test_a_coarse_voxel_is_the_mean_of_its_valid_fine_voxels(self):
        label = torch.tensor([[[0.2, 0.9, 0.4, 0.6]]])
        valid = torch.tensor([[True, False, False, False]])
        target, coarse_valid = downsample_target(label, valid, torch.Size([1, 1, 2]))
        assert target.flatten().tolist() == pytest.approx([0.2, 0.0])
        assert coarse_valid.tolist() == [[True, False]]


class TestCrossEntropy:
    logits = random_logits(2, 3, 5, 4)
    index = class_map((2, 5, 4), 3)

    def test_cross_entropy_of_class_indices_with_weights_and_ignored_voxels_equals_torch(self):
        index = self.index.clone()
        index[0, 0] = -100
        weight = torch.tensor([0.2, 1.0, 3.0])
        actual = semidice.soft_cross_entropy(
            self.logits, index, activation="softmax", ignore_index=-100, class_weight=weight
        )
        expected = torch.nn.functional.cross_entropy(self.logits, index, weight, ignore_index=-100)
        torch.testing.assert_close(actual, expected)

    def test_softmax_and_sigmoid_cross_entropy_of_soft_labels_equal_torch(self):
        label = soft_label(2, 3, 5, 4)
        actual = semidice.soft_cross_entropy(self.logits, label, activation="softmax")
        torch.testing.assert_close(actual, torch.nn.functional.cross_entropy(self.logits, label))
        actual = semidice.soft_cross_entropy(self.logits, label, activation="sigmoid")
        expected = torch.nn.functional.binary_cross_entropy_with_logits(self.logits, label)
        torch.testing.assert_close(actual, expected)

    def test_cross_entropy_of_probabilities_equals_that_of_logits(self):
        actual = semidice.soft_cross_entropy(self.logits.softmax(1), self.index)
        torch.testing.assert_close(actual, torch.nn.functional.cross_entropy(self.logits, self.index))

    def test_class_weights_of_sigmoid_channels_give_a_weighted_mean(self):
        label, weight = soft_label(2, 3, 5, 4), torch.tensor([1.0, 0.0, 2.0])
        per_voxel = torch.nn.functional.binary_cross_entropy_with_logits(self.logits, label, reduction="none")
        expected = per_voxel.mean((0, 2, 3)) @ weight / 3
        actual = semidice.soft_cross_entropy(self.logits, label, activation="sigmoid", class_weight=weight)
        torch.testing.assert_close(actual, expected)

    def test_loss_and_gradient_of_a_probability_of_zero_are_finite(self):
        prob = torch.tensor([[[0.0], [1.0]]], requires_grad=True)
        loss = semidice.soft_cross_entropy(prob, torch.tensor([[0]]))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(prob.grad).all()


def test_class_weights_move_with_the_module_and_are_not_saved():
    loss = SegmentationLoss(class_weight=[1.0, 2.0])
    assert not loss.state_dict()
    assert loss.double().class_weight.dtype == torch.float64
    assert torch.isfinite(loss(random_logits(1, 2, 4), soft_label(1, 2, 4)))


def test_repr_shows_the_options_of_a_loss():
    loss = TverskyLoss(alpha=0.7, beta=0.3, gamma=2, class_weight=[1, 2], ignore_index=255)
    for option in ("alpha=0.7, beta=0.3", "gamma=2", "class_weight=(1.0, 2.0)", "ignore_index=255"):
        assert option in repr(loss)
    assert repr(SegmentationLoss(calibration_weight=0.5)).count("=") == 2
