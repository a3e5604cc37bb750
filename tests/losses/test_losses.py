"""What each option of the losses means, by hand; and that minimising recovers the label."""

import math

import pytest
import torch
from landing import fit_free_logits
from laws import class_map, random_logits, soft_label

import semidice
from semidice import DiceLoss, JaccardLoss, SegmentationLoss, TverskyLoss, dice_loss, tversky_loss
from semidice.arrays import downsample_target, one_hot

PAPER = {
    "DML1": DiceLoss,
    "DML2": lambda **o: DiceLoss(form="product", **o),
    "JML1": JaccardLoss,
    "JML2": lambda **o: JaccardLoss(form="product", **o),
    "CTL": lambda **o: TverskyLoss(alpha=0.7, beta=0.3, **o),
    "CFTL": lambda **o: TverskyLoss(alpha=0.7, beta=0.3, gamma=2.0, **o),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "with cross entropy"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", PAPER)
def test_minimising_over_free_logits_recovers_the_soft_label(name, activation, mixed):
    label = soft_label(1, 3, 12)
    loss = PAPER[name](activation=activation)
    if mixed:
        loss = SegmentationLoss(loss)
    landed = fit_free_logits(loss, label, steps=300, activation=lambda logits: logits)
    landed = landed.softmax(1) if activation == "softmax" else landed.sigmoid()
    assert (landed - label).abs().mean() < 1e-3


def test_minimising_the_soft_dice_loss_does_not():
    label = torch.full((1, 1, 12), 0.5)
    landed = fit_free_logits(lambda p, y: dice_loss(p, y, form="relaxed"), label, steps=300)
    assert landed.min() > 0.99


class TestReduction:
    """Two images, three classes, statistics chosen by hand through hard predictions."""

    # class 1 is absent from image 0 and everything is right in image 1 but for one voxel
    target = torch.tensor([[0, 0, 2, 2], [0, 1, 2, 2]])
    prediction = torch.tensor([[0, 2, 2, 2], [0, 1, 2, 1]])
    prob = one_hot(prediction, 3).float()
    # Dice by image and class, by hand; class 1 of image 0 is empty on both sides
    dice = torch.tensor([[2 / 3, 1.0, 4 / 5], [1.0, 2 / 3, 2 / 3]])

    def test_batch_takes_one_index_a_class(self):
        # tp 2, 1, 3; fp 0, 1, 1; fn 1, 0, 1 over both images
        expected = 1 - torch.tensor([4 / 5, 2 / 3, 6 / 8]).mean()
        torch.testing.assert_close(dice_loss(self.prob, self.target), expected)

    @pytest.mark.parametrize("over", ["image", "class"])
    def test_image_and_class_average_the_same_numbers_when_all_classes_count(self, over):
        torch.testing.assert_close(dice_loss(self.prob, self.target, over=over), 1 - self.dice.mean())

    def test_present_classes_of_an_image_are_averaged_within_it_first(self):
        per_image = torch.stack([self.dice[0, [0, 2]].mean(), self.dice[1].mean()])
        loss = dice_loss(self.prob, self.target, over="image", classes="present")
        torch.testing.assert_close(loss, 1 - per_image.mean())

    def test_over_class_averages_a_class_over_the_images_that_hold_it(self):
        per_class = torch.stack([self.dice[:, 0].mean(), self.dice[1, 1], self.dice[:, 2].mean()])
        loss = dice_loss(self.prob, self.target, over="class", classes="present")
        torch.testing.assert_close(loss, 1 - per_class.mean())

    def test_weights_are_normalised_by_their_sum(self):
        weight = torch.tensor([1.0, 0.0, 3.0])
        loss = dice_loss(self.prob, self.target, over="image", class_weight=weight)
        torch.testing.assert_close(loss, 1 - (self.dice @ weight / 4).mean())
        loss = dice_loss(self.prob, self.target, over="class", class_weight=[1.0, 0.0, 3.0])
        torch.testing.assert_close(loss, 1 - (self.dice.mean(0) @ weight / 4))

    def test_background_out_leaves_class_zero_out(self):
        loss = dice_loss(self.prob, self.target, over="image", background=False)
        torch.testing.assert_close(loss, 1 - self.dice[:, 1:].mean())
        loss = dice_loss(self.prob, self.target, over="image", background=False, class_weight=[9.0, 1.0, 3.0])
        torch.testing.assert_close(loss, 1 - (self.dice[:, 1:] @ torch.tensor([0.25, 0.75])).mean())

    def test_an_image_without_any_counted_class_leaves_the_mean(self):
        target = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 2]])
        options = {"over": "image", "classes": "present", "background": False}
        alone = dice_loss(self.prob[1:], target[1:], **options)
        torch.testing.assert_close(dice_loss(self.prob, target, **options), alone)
        assert dice_loss(self.prob[:1], target[:1], **options).item() == 0


def test_focal_and_log_act_on_each_class_before_the_mean():
    prob, target = soft_label(1, 3, 30), soft_label(1, 3, 30, seed=9)
    each = torch.stack([dice_loss(prob, target, class_weight=torch.eye(3)[index]) for index in range(3)])
    torch.testing.assert_close(dice_loss(prob, target, gamma=2.5), (each**2.5).mean())
    torch.testing.assert_close(dice_loss(prob, target, log=True), -(1 - each).log().mean())
    torch.testing.assert_close(
        dice_loss(prob, target, log=True, gamma=0.3), ((-(1 - each).log()) ** 0.3).mean()
    )


def test_the_log_loss_of_a_missed_class_is_large_but_finite_with_a_finite_gradient():
    prob = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], requires_grad=True)
    loss = dice_loss(prob, torch.tensor([[1, 1]]), log=True)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(1e-7), rel=0.02)
    assert torch.isfinite(prob.grad).all()


def test_smoothing_gives_an_empty_label_a_slope():
    prob = torch.full((1, 1, 8), 0.25, requires_grad=True)
    dice_loss(prob, torch.zeros(1, 1, 8), smooth=1.0).backward()
    assert (prob.grad > 0).all()


def test_the_mixture_is_its_parts_weighted():
    logits, label = random_logits(2, 3, 8, 8), soft_label(2, 3, 8, 8)
    total, parts = SegmentationLoss()(logits, label, parts=True)
    torch.testing.assert_close(parts["region"], DiceLoss()(logits, label))
    entropy = torch.nn.functional.cross_entropy(logits, label)
    torch.testing.assert_close(parts["cross_entropy"], entropy)
    torch.testing.assert_close(total, 0.25 * entropy + 0.75 * parts["region"])
    torch.testing.assert_close(SegmentationLoss()(logits, label), total)


def test_a_term_of_weight_zero_is_left_out():
    logits, label = random_logits(2, 3, 8), soft_label(2, 3, 8)
    only = SegmentationLoss(JaccardLoss(), cross_entropy_weight=0.0, region_weight=1.0)
    torch.testing.assert_close(only(logits, label), JaccardLoss()(logits, label))
    entropy = SegmentationLoss(cross_entropy_weight=1.0, region_weight=0.0)
    torch.testing.assert_close(entropy(logits, label), torch.nn.functional.cross_entropy(logits, label))


class TestDeepSupervision:
    def test_outputs_of_one_size_average_to_the_plain_loss(self):
        logits, label = random_logits(2, 3, 8, 8), soft_label(2, 3, 8, 8)
        torch.testing.assert_close(
            SegmentationLoss()([logits, logits, logits], label), SegmentationLoss()(logits, label)
        )

    def test_scales_halve_in_weight_and_see_the_label_averaged_by_area(self):
        fine, coarse, label = random_logits(1, 2, 8, 8), random_logits(1, 2, 4, 4), soft_label(1, 2, 8, 8)
        blocks = label.view(1, 2, 4, 2, 4, 2).mean((3, 5))
        loss = SegmentationLoss()
        expected = (2 * loss(fine, label) + loss(coarse, blocks)) / 3
        torch.testing.assert_close(loss([fine, coarse], label), expected)
        own = SegmentationLoss(scale_weights=[0.0, 1.0])
        torch.testing.assert_close(own([fine, coarse], label), loss(coarse, blocks))

    @pytest.mark.parametrize("space", [(7,), (6, 9), (5, 4, 6)], ids=str)
    def test_class_indices_become_probabilities_and_ignored_voxels_leave_the_average(self, space):
        index = class_map((2, *space), 3)
        index[:, 0] = 255
        size = tuple(length // 2 for length in space)
        target, valid = downsample_target(index, index != 255, torch.Size([2, 3, *size]))
        torch.testing.assert_close(target.sum(1)[valid], torch.ones_like(target.sum(1)[valid]))
        loss = SegmentationLoss(DiceLoss(ignore_index=255))
        logits = [random_logits(2, 3, *space), random_logits(2, 3, *size)]
        expected = (2 * loss(logits[0], index) + SegmentationLoss()(logits[1], target, valid)) / 3
        torch.testing.assert_close(loss(logits, index), expected)

    def test_a_coarse_label_is_the_mean_of_the_valid_voxels_under_it(self):
        label = torch.tensor([[[0.2, 0.9, 0.4, 0.6]]])
        valid = torch.tensor([[True, False, False, False]])
        target, coarse_valid = downsample_target(label, valid, torch.Size([1, 1, 2]))
        assert target.flatten().tolist() == pytest.approx([0.2, 0.0])
        assert coarse_valid.tolist() == [[True, False]]

    def test_an_output_finer_than_the_target_is_refused(self):
        with pytest.raises(ValueError, match="finer than the target"):
            SegmentationLoss()([random_logits(1, 2, 8), random_logits(1, 2, 16)], soft_label(1, 2, 8))

    def test_weights_must_match_the_outputs(self):
        with pytest.raises(ValueError, match="got 1 for 2 outputs"):
            SegmentationLoss(scale_weights=[1.0])([random_logits(1, 2, 8)] * 2, soft_label(1, 2, 8))
        with pytest.raises(ValueError, match="0 outputs"):
            SegmentationLoss()([], soft_label(1, 2, 8))


class TestCrossEntropy:
    logits = random_logits(2, 3, 5, 4)
    index = class_map((2, 5, 4), 3)

    def test_it_equals_torch_on_class_indices_with_weights_and_ignored_voxels(self):
        index = self.index.clone()
        index[0, 0] = -100
        weight = torch.tensor([0.2, 1.0, 3.0])
        ours = semidice.soft_cross_entropy(
            self.logits, index, activation="softmax", ignore_index=-100, class_weight=weight
        )
        theirs = torch.nn.functional.cross_entropy(self.logits, index, weight, ignore_index=-100)
        torch.testing.assert_close(ours, theirs)

    def test_it_equals_torch_on_soft_labels_and_on_channels(self):
        label = soft_label(2, 3, 5, 4)
        ours = semidice.soft_cross_entropy(self.logits, label, activation="softmax")
        torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(self.logits, label))
        ours = semidice.soft_cross_entropy(self.logits, label, activation="sigmoid")
        theirs = torch.nn.functional.binary_cross_entropy_with_logits(self.logits, label)
        torch.testing.assert_close(ours, theirs)

    def test_probabilities_and_logits_give_the_same_number(self):
        ours = semidice.soft_cross_entropy(self.logits.softmax(1), self.index)
        torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(self.logits, self.index))

    def test_channel_weights_are_a_weighted_mean(self):
        label, weight = soft_label(2, 3, 5, 4), torch.tensor([1.0, 0.0, 2.0])
        each = torch.nn.functional.binary_cross_entropy_with_logits(self.logits, label, reduction="none")
        expected = each.mean((0, 2, 3)) @ weight / 3
        ours = semidice.soft_cross_entropy(self.logits, label, activation="sigmoid", class_weight=weight)
        torch.testing.assert_close(ours, expected)

    def test_a_probability_of_zero_costs_a_finite_amount(self):
        prob = torch.tensor([[[0.0], [1.0]]], requires_grad=True)
        loss = semidice.soft_cross_entropy(prob, torch.tensor([[0]]))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(prob.grad).all()


def test_class_weights_move_with_the_module_and_are_not_saved():
    loss = SegmentationLoss(DiceLoss(class_weight=[1.0, 2.0]))
    assert not loss.state_dict()
    assert loss.double().region.class_weight.dtype == torch.float64
    assert torch.isfinite(loss(random_logits(1, 2, 4), soft_label(1, 2, 4)))


def test_a_loss_says_what_it_is():
    assert repr(TverskyLoss(alpha=0.7, beta=0.3, gamma=2.0, class_weight=[1.0, 2.0], ignore_index=255)) == (
        "TverskyLoss(alpha=0.7, beta=0.3, activation='softmax', form='min', gamma=2.0, "
        "class_weight=[1.0, 2.0], ignore_index=255)"
    )


def test_the_gradient_reaches_only_the_prediction_unless_the_target_asks():
    logits, label = random_logits(1, 2, 8).requires_grad_(), soft_label(1, 2, 8)
    (gradient,) = torch.autograd.grad(tversky_loss(logits.softmax(1), label, alpha=1.0, beta=1.0), logits)
    assert gradient.abs().sum() > 0
    assert not label.requires_grad
