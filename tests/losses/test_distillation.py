"""Each term of the distillation loss, and a teacher that neither changes nor is changed."""

import pytest
import torch
from laws import class_map, random_logits, soft_label
from torch import nn

import semidice
from semidice import DiceLoss, DistillationLoss, SegmentationLoss, Teacher, TeacherCalibration
from semidice.data.phantom import make_phantom
from semidice.labels.makers import random_rater_label

LOGITS, LABEL, TEACHER = random_logits(2, 3, 8, 8), class_map((2, 8, 8), 3), soft_label(2, 3, 8, 8)


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 3, 1)
    )


class TestLoss:
    def test_the_loss_is_the_weighted_sum_of_label_and_teacher_losses(self):
        mix = SegmentationLoss()
        expected = 0.5 * mix(LOGITS, LABEL) + 0.5 * mix(LOGITS, TEACHER)
        torch.testing.assert_close(DistillationLoss()(LOGITS, LABEL, TEACHER), expected)
        weighted = DistillationLoss(label_weight=0.2, teacher_weight=1.5)(LOGITS, LABEL, TEACHER)
        torch.testing.assert_close(weighted, 0.2 * mix(LOGITS, LABEL) + 1.5 * mix(LOGITS, TEACHER))

    @pytest.mark.parametrize(
        ("terms", "weights"),
        [(("cross_entropy",), (0.25, 0.0)), (("region",), (0.0, 0.75))],
        ids=str,
    )
    def test_terms_selects_the_teacher_terms_only(self, terms, weights):
        from_teacher = SegmentationLoss().terms(LOGITS, TEACHER)
        expected = weights[0] * from_teacher["cross_entropy"] + weights[1] * from_teacher["region"]
        total = DistillationLoss(terms=terms)(LOGITS, LABEL, TEACHER)
        torch.testing.assert_close(total, 0.5 * SegmentationLoss()(LOGITS, LABEL) + 0.5 * expected)

    def test_the_terms_are_named_and_unweighted_and_have_a_total(self):
        loss = DistillationLoss(SegmentationLoss(calibration_weight=0.1), label_weight=0.2)
        terms = loss.terms(LOGITS, LABEL, TEACHER)
        torch.testing.assert_close(terms["teacher_region"], DiceLoss()(LOGITS, TEACHER))
        torch.testing.assert_close(terms["label_region"], DiceLoss()(LOGITS, LABEL))
        assert "label_calibration" in terms
        assert "teacher_calibration" not in terms
        torch.testing.assert_close(loss.total(terms), loss(LOGITS, LABEL, TEACHER))

    def test_voxels_ignored_in_the_label_are_excluded_from_label_and_teacher_terms(self):
        ignored = LABEL.clone()
        ignored[:, :3] = 255
        loss = DistillationLoss(SegmentationLoss(ignore_index=255))
        expected = DistillationLoss()(LOGITS[:, :, 3:], LABEL[:, 3:], TEACHER[:, :, 3:])
        torch.testing.assert_close(loss(LOGITS, ignored, TEACHER), expected)

    def test_a_soft_label_and_deep_supervision_work(self):
        coarse = random_logits(2, 3, 4, 4)
        soft = soft_label(2, 3, 8, 8, seed=8)
        mix = SegmentationLoss()
        expected = 0.5 * mix([LOGITS, coarse], soft) + 0.5 * mix([LOGITS, coarse], TEACHER)
        torch.testing.assert_close(DistillationLoss()([LOGITS, coarse], soft, TEACHER), expected)

    def test_no_gradient_reaches_the_teacher(self):
        teacher = TEACHER.clone().requires_grad_()
        leaf = LOGITS.clone().requires_grad_()
        DistillationLoss()(leaf, LABEL, teacher).backward()
        assert teacher.grad is None
        assert leaf.grad.abs().sum() > 0


class TestTeacher:
    image = random_logits(2, 1, 8, 8)

    def test_a_teacher_is_not_changed_by_a_module_that_trains(self):
        modules = nn.ModuleDict({"student": network(), "teacher": Teacher(network())})
        before = {name: value.clone() for name, value in modules["teacher"].state_dict().items()}
        modules.train()
        optimiser = torch.optim.SGD(modules.parameters(), lr=0.1, weight_decay=0.1)
        first, second = modules["teacher"](self.image), modules["teacher"](self.image)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert not first.requires_grad
        DistillationLoss()(modules["student"](self.image), LABEL, first).backward()
        optimiser.step()
        for name, value in modules["teacher"].state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    @pytest.mark.parametrize("is_training", [False, True])
    def test_a_network_that_is_also_the_student_learns_on_and_keeps_its_mode(self, is_training):
        student = network().train(is_training)
        student[1].eval()
        modes = [module.training for module in student.modules()]
        teacher = Teacher(student)
        optimiser = torch.optim.SGD(student.parameters(), lr=0.1)
        before = student[0].weight.clone()
        first = teacher(self.image)
        DistillationLoss()(student(self.image), LABEL, first).backward()
        optimiser.step()
        assert [module.training for module in student.modules()] == modes
        assert not torch.equal(student[0].weight, before)
        # it teaches what it has learned, without the dropout of a network in training
        assert not torch.equal(teacher(self.image), first)
        torch.testing.assert_close(teacher(self.image), student.eval()(self.image).softmax(1))

    def test_an_error_inside_the_network_leaves_its_mode(self):
        student = network().train()
        with pytest.raises(RuntimeError):
            Teacher(student)(torch.zeros(2, 3, 8, 8))
        assert all(module.training for module in student.modules())

    def test_the_probabilities_are_those_of_the_network_in_eval_mode(self):
        plain = network().eval()
        expected = plain(self.image).softmax(1)
        torch.testing.assert_close(Teacher(network())(self.image), expected)
        scaled = Teacher(network(), TeacherCalibration("temperature", 3.0))(self.image)
        torch.testing.assert_close(scaled, (plain(self.image) / 3).softmax(1))
        probabilities = nn.Sequential(network(), nn.Softmax(1))
        torch.testing.assert_close(Teacher(probabilities, activation="none")(self.image), expected)

    def test_kde_changes_only_the_region_of_boundaries_and_errors(self):
        target = torch.zeros(2, 32, 32, dtype=torch.long)
        target[:, :16, :] = 1
        image = torch.randn(2, 1, 32, 32)
        plain = Teacher(network())(image)
        teacher = Teacher(network(), TeacherCalibration("kde", bandwidth=0.01, num_keys=64, width=2))
        recalibrated = teacher(image, target)
        region = semidice.calibration_region(plain, target, width=2)
        changed = (recalibrated != plain).any(1)
        assert changed.any()
        assert not (changed & ~region).any()
        torch.testing.assert_close(recalibrated.sum(1), torch.ones(2, 32, 32))

    @pytest.mark.parametrize("per_image", [False, True])
    def test_kde_accepts_soft_labels_one_sigmoid_channel_and_keys_per_image(self, per_image):
        torch.manual_seed(0)
        binary = nn.Conv2d(1, 1, 1)
        calibration = TeacherCalibration("kde", num_keys=32, keys_per_image=per_image)
        soft = (random_logits(2, 1, 8, 8, seed=5) > 0).float()
        prob = Teacher(binary, calibration, activation="sigmoid")(self.image, soft)
        assert prob.shape == (2, 1, 8, 8)
        assert ((prob >= 0) & (prob <= 1)).all()
        prob = Teacher(network(), calibration)(self.image, soft_label(2, 3, 8, 8))
        assert prob.shape == (2, 3, 8, 8)

    def test_reweighted_keys_reduce_the_error_of_a_biased_teacher_on_a_phantom(self):
        phantom = make_phantom(16, num_raters=32, seed=3)
        # logits shifted towards the lesion: the teacher over-segments, and no temperature corrects this
        biased = phantom.prob.clamp(1e-6, 1).log() + torch.tensor([0.0, 1.5]).view(1, 2, 1, 1)
        label = random_rater_label(phantom.masks, batched=True, generator=0)
        region = semidice.calibration_region(biased.softmax(1), label, width=3)

        def error(**options):
            generator = torch.Generator().manual_seed(0)
            calibration = TeacherCalibration("kde", bandwidth=0.01, **options)
            teacher = Teacher(nn.Identity(), calibration, generator=generator)
            return (teacher(biased, label) - phantom.prob).abs()[:, 1][region].mean().item()

        before = (biased.softmax(1) - phantom.prob).abs()[:, 1][region].mean().item()
        assert error(num_keys=4096, keys_from="batch") < 0.5 * before
        # the same number of keys is more useful if they come from the uncertain region
        assert error(num_keys=1024) < error(num_keys=1024, keys_from="batch")
        # the paper's recipe, equal numbers of keys for unequal classes, biases every voxel to the rare class
        assert error(num_keys=4096, keys_from="batch", reweight_keys=False) > before

    @pytest.mark.parametrize("per_image", [False, True])
    def test_images_without_a_calibration_region_are_unchanged(self, per_image):
        certain_logits = torch.tensor([20.0, -20.0, -20.0]).view(1, 3, 1, 1).expand(2, 3, 8, 8).clone()
        target = torch.zeros(2, 8, 8, dtype=torch.long)
        # of two images, one may have a region while the other has none
        target[1, :4] = 1
        calibration = TeacherCalibration("kde", num_keys=16, keys_per_image=per_image)
        teacher = Teacher(nn.Identity(), calibration)
        torch.testing.assert_close(
            teacher(certain_logits[:1], target[:1]), certain_logits[:1].softmax(1), rtol=0, atol=0
        )
        assert torch.equal(teacher(certain_logits, target)[0], certain_logits[0].softmax(0))


@pytest.mark.gpu
def test_a_captured_step_equals_the_eager_one():
    """Student, teacher with KDE and loss in one CUDA graph: no host synchronisation anywhere in the step."""
    torch.manual_seed(0)
    image, target = torch.randn(2, 1, 64, 64, device="cuda"), torch.randint(0, 3, (2, 64, 64), device="cuda")
    student, loss = network().cuda().eval(), DistillationLoss()
    teacher = Teacher(network().cuda(), TeacherCalibration("kde", num_keys=128))

    def step():
        total = loss(student(image), target, teacher(image, target))
        student.zero_grad(set_to_none=True)
        total.backward()
        # detached, because its autograd graph belongs to the stream in which it was created
        return total.detach()

    warmup_stream = torch.cuda.Stream()
    warmup_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup_stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warmup_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gradients = [parameter.grad for parameter in student.parameters()]
    torch.cuda.manual_seed(7)
    graph.replay()
    replayed = captured.clone(), [gradient.clone() for gradient in gradients]
    torch.cuda.manual_seed(7)
    eager = step()
    torch.testing.assert_close(replayed[0], eager)
    for gradient, parameter in zip(replayed[1], student.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
