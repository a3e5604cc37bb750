"""The systems for comparison: training, prediction, resuming, their losses and their error messages."""

import json
import math

import pytest
import torch
from case_rows import rows_of
from prepared import make_prepared
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from trained import finished_table, normalised, train_until

from semidice.arrays import one_hot
from semidice.data.batches.augment import AugmentOptions
from semidice.data.batches.feed import Batches, BatchOptions
from semidice.data.batches.label_making import LabelOptions
from semidice.data.batches.storage import Storage
from semidice.data.dataset import Dataset
from semidice.data.folds import read_folds
from semidice.losses.segmentation import SegmentationLoss
from semidice.networks.build import ModelOptions, Task
from semidice.networks.predictor import network_probability
from semidice.networks.systems import System, SystemOptions, TrainingLabels, build_network, rater_confusion
from semidice.networks.systems.mrnet import RaterConvLSTM, draw_weights, fused_label
from semidice.networks.systems.per_rater import rater_losses
from semidice.networks.systems.softseg import adaptive_wing_loss, normalised_relu
from semidice.networks.systems.system import Trunk
from semidice.recipes import Recipe
from semidice.runs.predictions import read_prediction
from semidice.runs.run import FoldRun, open_run
from semidice.runs.start import start_run
from semidice.training.context import Context
from semidice.training.engine import train_fold
from semidice.training.processes import Processes, chosen_device
from semidice.training.teacher import load_teacher

NAMES = ["mc_dropout", "multi_head", "softseg", "mrnet", "learned_reliability"]
SMALL = {"architecture": "small_unet", "encoder": "none", "weights": "none", "options": {"channels": [8, 16]}}


def recipe_for(dataset, name, **changes):
    options = {
        "name": name,
        "data": {"dataset": str(dataset), "num_folds": 2, "folds": [0]},
        "model": SMALL,
        "augment": {"scale": [0.9, 1.1]},
        "system": {"name": name, "num_samples": 3},
        "optimiser": {"name": "adamw", "lr": 0.01},
        "schedule": {"epochs": 8},
        "batch_size": 4,
        "log_every": 1,
        "validation": {"every": 4, "metrics": ["dice_score", "calibration_error"]},
        "workers": 0,
    }
    return Recipe.model_validate(options | changes)


def network_for(name, model=SMALL, seed=0, num_classes=2, num_raters=3, **options):
    torch.manual_seed(seed)
    task = Task(1, num_classes, num_raters)
    return build_network(ModelOptions(**model), SystemOptions(name, **options), task, seed=0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "phantom"
    make_prepared(path, num_cases=12, size=(32, 32), num_raters=3, absent=True)
    return path


def fold_of(recipe, out):
    run = start_run(recipe, out, resume=False)
    opened = Dataset(recipe.data.dataset)
    return FoldRun(run, opened, 0, read_folds(run.folder.folds, opened))


def log_of(folder):
    return [json.loads(line) for line in folder.log.read_text().splitlines()]


@pytest.fixture(scope="module", params=NAMES)
def finished(request, dataset, tmp_path_factory):
    """The name of a system, the folder of an uninterrupted run of it, and its table of scores."""
    recipe = recipe_for(dataset, request.param)
    run = start_run(recipe, tmp_path_factory.mktemp("runs") / request.param, resume=False)
    table = finished_table(run)
    return request.param, run.folder, table


class TestEverySystem:
    def test_the_loss_falls_and_cases_are_scored(self, finished):
        name, folder, table = finished
        losses = [line["loss"] for line in log_of(folder.fold(0)) if "loss" in line]
        assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
        assert len({row.case for row in table.pipe(rows_of)}) == 6
        terms = {
            "mc_dropout": {"cross_entropy", "region"},
            "multi_head": {"cross_entropy", "region"},
            "softseg": {"adaptive_wing"},
            "mrnet": {"coarse", "final", "raters"},
            "learned_reliability": {"cross_entropy", "region", "trace"},
        }
        assert log_of(folder.fold(0))[0].keys() == {"step", "lr", "loss", *terms[name]}

    def test_stored_predictions_are_the_probabilities_of_the_loaded_network(self, finished, dataset):
        _, folder, _ = finished
        opened = Dataset(dataset)
        network = open_run(folder).network(0, device="cpu")
        assert isinstance(network, System)
        folds = read_folds(folder.folds, opened)
        number = folds.index(0)
        prob = network_probability(network, normalised(opened, number, folds), dtype="fp32")[0]
        torch.testing.assert_close(prob.sum(0), torch.ones(32, 32))
        assert prob.min() >= 0
        stored = torch.as_tensor(read_prediction(folder.fold(0).prediction(opened.cases[number].name)))
        # stored probabilities are rounded to multiples of 1/65535
        torch.testing.assert_close(stored, prob, rtol=0, atol=2e-5)

    def test_a_stopped_and_resumed_run_ends_with_the_same_bits(self, finished, dataset, tmp_path):
        name, folder, _ = finished
        fold = fold_of(recipe_for(dataset, name), tmp_path / "stopped")

        train_until(fold, 3)
        train_fold(fold, Context())
        resumed, expected = load_file(fold.folder.last), load_file(folder.fold(0).last)
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[key], expected[key]) for key in resumed)
        assert fold.folder.log.read_text() == folder.fold(0).log.read_text()

    def test_it_trains_in_bf16_with_gradient_accumulation(self, dataset, tmp_path, finished):
        precision = {"dtype": "bf16", "channels_last": True}
        changes = {"schedule": {"epochs": 1}, "optimiser": {"accumulate": 2}, "precision": precision}
        fold = fold_of(recipe_for(dataset, finished[0], **changes), tmp_path / "run")
        train_fold(fold, Context())
        assert math.isfinite(log_of(fold.folder)[-1]["val_dice_score"])


@pytest.mark.parametrize(
    ("name", "architecture"), [*((name, "unet") for name in NAMES), ("mrnet", "deeplabv3plus")]
)
def test_a_system_on_an_smp_network_trains_and_predicts(name, architecture):
    model = {"architecture": architecture, "encoder": "resnet18", "weights": "none"}
    network = network_for(name, model, num_samples=2)
    image, labels = torch.randn(2, 1, 64, 64), random_labels(2, 64)
    output = network(image, labels.present) if network.needs_raters else network(image)
    total, _ = network.losses(output, labels, SegmentationLoss())
    total.backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in network.parameters())
    prob = network_probability(network, image, dtype="fp32")
    assert prob.shape == (2, 2, 64, 64)
    torch.testing.assert_close(prob.sum(1), torch.ones(2, 64, 64))


def random_labels(num_cases, size, num_classes=2):
    raters = torch.rand(num_cases, 3, num_classes, size, size).softmax(2)
    present = torch.ones(num_cases, 3, dtype=torch.bool)
    return TrainingLabels(
        raters.mean(1), torch.ones(num_cases, size, size, dtype=torch.bool), raters, present
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_graph_step_trains_like_an_eager_step(name, dataset, tmp_path):
    context = Context(Processes(chosen_device("cuda")))
    losses = []
    for graph in (True, False):
        fold = fold_of(recipe_for(dataset, name, precision={"graph": graph}), tmp_path / str(graph))
        train_fold(fold, context)
        losses.append(torch.tensor([line["loss"] for line in log_of(fold.folder) if "loss" in line]))
    # the order of additions on a GPU changes from run to run
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-3)


class UncheckedLoss(SegmentationLoss):
    """A cross entropy that reads no value. On a CPU the real loss reads values to refuse invalid labels."""

    def forward(self, logits, target, valid=None):
        return self.total(self.terms(logits, target, valid))

    def terms(self, logits, target, valid=None):
        entropy = -(target * logits.log_softmax(1) * valid.unsqueeze(1)).sum() / valid.sum()
        return {"cross_entropy": entropy}


class TestNoSynchronisation:
    """Fake tensors have no values: reading one is an error, as it is during the capture of a CUDA graph."""

    @pytest.mark.parametrize("name", NAMES)
    def test_a_step_reads_no_value(self, name):
        with FakeTensorMode():
            network, labels = network_for(name), random_labels(2, 32)
            image = torch.randn(2, 1, 32, 32)
            output = network(image, labels.present) if network.needs_raters else network(image)
            total, parts = network.losses(output, labels, UncheckedLoss())
            total.backward()
            assert total.shape == ()
            assert parts


class TestBatchesWithRaters:
    def batch(self, dataset, **options):
        options = {"augment": AugmentOptions(scale=(0.8, 1.25)), "with_raters": True} | options
        options = {"label": LabelOptions()} | options
        storage = Storage(Dataset(dataset), "cpu")
        mean_std = storage.dataset.mean_std(range(12))
        batches = Batches(storage, range(12), mean_std, BatchOptions(12, **options))
        return batches.make(batches.feed(0))

    def test_raters_move_with_the_image_stay_hard_and_their_majority_is_the_label(self, dataset):
        batch = self.batch(dataset, label=LabelOptions(maker="majority"))
        assert torch.equal(batch.raters, (batch.raters == 1).float())
        assert torch.equal(batch.raters.sum(2), torch.ones(12, 3, 32, 32))
        votes = torch.einsum("nr,nrhw->nhw", batch.present.float(), batch.raters[:, :, 1])
        majority = 2 * votes > batch.present.sum(1).view(-1, 1, 1)
        assert torch.equal(batch.target[:, 1], majority.float())
        assert majority.any()

    def test_with_raters_does_not_change_the_other_fields_of_a_batch(self, dataset):
        with_raters, without = self.batch(dataset), self.batch(dataset, with_raters=False)
        assert without.raters is without.present is None
        for field, expected in zip(with_raters[:4], without[:4], strict=True):
            assert torch.equal(field, expected)


class TestMCDropout:
    def test_one_sample_differs_from_thirty_and_predictions_are_reproducible(self):
        image = torch.randn(2, 1, 32, 32)
        single, many = (
            network_probability(network_for("mc_dropout", num_samples=count), image, dtype="fp32")
            for count in (1, 30)
        )
        assert (single - many).abs().max() > 1e-3
        rebuilt = network_for("mc_dropout", num_samples=30)
        torch.rand(5)
        assert torch.equal(network_probability(rebuilt, image, dtype="fp32"), many)

    def test_a_prediction_depends_neither_on_its_batch_nor_on_the_global_generator(self):
        network, images = network_for("mc_dropout"), torch.randn(4, 1, 32, 32)
        before = torch.get_rng_state()
        batched = network_probability(network, images, dtype="fp32")
        assert torch.equal(torch.get_rng_state(), before)
        # for one image, convolutions may add in another order
        torch.testing.assert_close(network_probability(network, images[2:3], dtype="fp32"), batched[2:3])

    def test_the_prediction_is_the_mean_of_networks_with_dropped_channels(self):
        network, image = network_for("mc_dropout", num_samples=2).eval(), torch.randn(1, 1, 32, 32)
        probs = []
        for sample in range(2):
            levels = network.trunk.encode(image)
            for number, level in enumerate(levels):
                scale = getattr(network, f"scale{number}")[sample]
                assert set(scale.unique().tolist()) <= {0.0, 2.0}
                level[:, scale == 0] = 0
                level *= 2
            probs.append(network.trunk.predict(network.trunk.decode(levels)).softmax(1))
        prob = network_probability(network, image, dtype="fp32")
        torch.testing.assert_close(prob, torch.stack(probs).mean(0))

    def test_dropout_is_random_in_training_and_off_in_evaluation(self):
        network, image = network_for("mc_dropout"), torch.randn(1, 1, 32, 32)
        assert not torch.equal(network(image), network(image))
        network.eval()
        assert torch.equal(network(image), network(image))


class TestRaterLosses:
    def test_an_absent_rater_contributes_nothing(self):
        labels = random_labels(2, 16)
        present = torch.tensor([[True, True, False], [True, False, False]])
        logits = torch.randn(2, 3, 2, 16, 16, requires_grad=True)
        results = []
        for junk in (0.0, 1.0):
            raters = torch.where(present.view(2, 3, 1, 1, 1), labels.raters, junk)
            logits.grad = None
            total, _ = rater_losses(logits, raters, present, labels.valid, SegmentationLoss())
            total.backward()
            results.append((total.detach(), logits.grad.clone()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert (results[0][1].abs().amax((2, 3, 4)) > 0).equal(present)

    def test_the_loss_is_the_mean_over_raters_weighted_by_their_number_of_cases(self):
        labels, loss = random_labels(2, 16), SegmentationLoss()
        present = torch.tensor([[True, True, False], [True, False, False]])
        logits = torch.randn(2, 3, 2, 16, 16)
        total, parts = rater_losses(logits, labels.raters, present, labels.valid, loss)
        first = loss(logits[:, 0], labels.raters[:, 0])
        second = loss(logits[:1, 1], labels.raters[:1, 1])
        torch.testing.assert_close(total, (2 * first + second) / 3)
        torch.testing.assert_close(total, 0.25 * parts["cross_entropy"] + 0.75 * parts["region"])

    def test_labels_without_raters_are_refused(self):
        labels = random_labels(1, 8)._replace(raters=None)
        with pytest.raises(ValueError, match="with_raters=True"):
            network_for("multi_head").losses(torch.randn(1, 3, 2, 8, 8), labels, SegmentationLoss())


def test_each_head_learns_its_own_rater():
    """The raters draw regions above different thresholds; rater 2 draws only in the left half."""
    torch.manual_seed(0)
    image = torch.nn.functional.avg_pool2d(torch.randn(8, 1, 36, 36), 5, 1) * 5
    masks = torch.stack([image[:, 0] > -0.8, image[:, 0] > 0.8, image[:, 0] > 0], 1)
    masks[:, 2, :, 16:] = False
    raters = torch.stack([~masks, masks], 2).float()
    labels = TrainingLabels(
        raters.mean(1), torch.ones(8, 32, 32, dtype=torch.bool), raters, masks.new_ones(8, 3)
    )
    network = network_for("multi_head")
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.02)
    for _ in range(30):
        optimiser.zero_grad()
        network.losses(network(image, labels.present), labels, SegmentationLoss())[0].backward()
        optimiser.step()
    heads = network.eval()(image).argmax(2) == 1
    dice = [[2 * (h & m).sum() / (h.sum() + m.sum()) for m in masks.unbind(1)] for h in heads.unbind(1)]
    agreement = torch.tensor(dice)
    assert agreement.argmax(1).tolist() == [0, 1, 2]
    assert agreement.argmax(0).tolist() == [0, 1, 2]
    prob = network_probability(network, image, dtype="fp32")
    torch.testing.assert_close(prob, network(image).softmax(2).mean(1))


class TestSoftSeg:
    @pytest.mark.parametrize(
        ("prob", "target"), [(0.1, 0.0), (0.9, 0.0), (0.5, 1.0), (0.2, 1.0), (0.45, 0.5), (0.0, 0.7)]
    )
    def test_the_loss_equals_the_formula_of_the_paper(self, prob, target):
        alpha, omega, epsilon, theta = 2.1, 14, 1, 0.5
        power, distance = alpha - target, abs(prob - target)
        if distance < theta:
            expected = omega * math.log(1 + (distance / epsilon) ** power)
        else:
            edge = theta / epsilon
            a = omega * (1 / (1 + edge**power)) * power * edge ** (power - 1) / epsilon
            c = theta * a - omega * math.log(1 + edge**power)
            expected = a * distance - c
        loss = adaptive_wing_loss(*(torch.tensor(value, dtype=torch.float64) for value in (prob, target)))
        assert float(loss) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("target", [0.0, 0.25, 0.5])
    def test_value_and_gradient_are_continuous_where_the_linear_part_begins(self, target):
        soft = torch.full((2,), target, dtype=torch.float64)
        prob = (soft + 0.5 + torch.tensor([-1e-9, 1e-9], dtype=torch.float64)).requires_grad_()
        loss = adaptive_wing_loss(prob, soft)
        loss.sum().backward()
        assert float((loss[1] - loss[0]).detach()) == pytest.approx(0, abs=1e-7)
        assert float(prob.grad[0]) == pytest.approx(float(prob.grad[1]), rel=1e-7)
        assert float(prob.grad[0]) > 1

    def test_the_loss_is_minimal_at_a_soft_target(self):
        prob = torch.rand(50, dtype=torch.float64, requires_grad=True)
        loss = adaptive_wing_loss(prob, prob.detach())
        loss.sum().backward()
        assert loss.abs().max() == prob.grad.abs().max() == 0

    def test_the_activation_is_relu_divided_by_the_maximum_of_its_image(self):
        values = torch.tensor([[[-1.0, 2.0, 4.0]], [[0.5, -3.0, 0.1]], [[-1.0, -2.0, 0.0]]])
        expected = torch.tensor([[[0.0, 0.5, 1.0]], [[1.0, 0.0, 0.2]], [[0.0, 0.0, 0.0]]])
        torch.testing.assert_close(normalised_relu(values), expected)

    def test_classes_with_a_sum_above_one_are_divided_by_it(self):
        prob = normalised_relu(torch.tensor([[[4.0, 1.0], [4.0, 2.0]]]))
        torch.testing.assert_close(prob, torch.tensor([[[0.5, 0.25], [0.5, 0.5]]]))

    def test_gradients_of_an_image_without_foreground_are_zero(self):
        values = torch.tensor([[[-1.0, -2.0]], [[1e-20, -1.0]]], requires_grad=True)
        normalised_relu(values).sum().backward()
        assert values.grad.isfinite().all()
        assert values.grad[0].abs().max() == 0

    @pytest.mark.parametrize(("architecture", "num_seeds"), [("small_unet", 20), ("unet", 4), ("fpn", 4)])
    def test_every_image_has_a_gradient_at_the_start(self, architecture, num_seeds):
        encoder = "none" if architecture == "small_unet" else "resnet18"
        model = {"architecture": architecture, "encoder": encoder, "weights": "none"}
        image, labels = torch.randn(3, 1, 64, 64), random_labels(3, 64)
        for seed in range(num_seeds):
            network = network_for("softseg", model, seed=seed)
            output = network(image).detach().requires_grad_()
            network.losses(output, labels, SegmentationLoss())[0].backward()
            share = (output.grad[:, 1] != 0).float().mean((1, 2))
            assert share.min() > 0.1, f"seed {seed}"

    def test_invalid_voxels_do_not_count(self):
        network, labels = network_for("softseg"), random_labels(2, 16)
        output = torch.randn(2, 2, 16, 16)
        valid = labels.valid.clone()
        valid[:, 8:] = False
        loss, _ = network.losses(output, labels._replace(valid=valid), SegmentationLoss())
        prob = normalised_relu(output[:, 1:])
        expected = adaptive_wing_loss(prob, labels.target[:, 1:])[:, :, :8].mean()
        torch.testing.assert_close(loss, expected)


class TestMRNet:
    def test_shapes_with_three_weightings_in_training_and_one_in_prediction(self):
        network, image = network_for("mrnet"), torch.randn(2, 1, 32, 32)
        for num_weightings in (3, 1):
            output = network(image)
            assert output.weight.shape == (num_weightings, 2, 3)
            assert output.coarse.shape == output.final.shape == (2 * num_weightings, 2, 32, 32)
            assert output.raters.shape == (2 * num_weightings, 3, 2, 32, 32)
            network.eval()
        torch.testing.assert_close(output.weight, torch.full((1, 2, 3), 1 / 3))
        torch.testing.assert_close(network.probability(image), output.final.softmax(1))

    def test_the_weights_of_the_raters_change_the_prediction(self):
        network, image = network_for("mrnet").eval(), torch.randn(1, 1, 32, 32)
        first, last = (network.probability(image, torch.eye(3)[r : r + 1]) for r in (0, 2))
        assert (first - last).abs().max() > 1e-5
        coarse = network.weighted(image, torch.eye(3).unsqueeze(1)).coarse
        assert (coarse[0] - coarse[2]).abs().max() > 1e-5

    def test_the_images_of_a_batch_have_their_own_weights(self):
        network, image = network_for("mrnet").eval(), torch.randn(2, 1, 32, 32)
        weight = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
        both = network.probability(image, weight)
        alone = torch.cat([network.probability(image[n : n + 1], weight[n : n + 1]) for n in range(2)])
        torch.testing.assert_close(both, alone)

    def test_at_a_single_position_the_convlstm_is_an_lstm_cell_with_the_weights_as_state(self):
        """Where the features have one position, a 3 x 3 convolution uses only its centre."""
        torch.manual_seed(0)
        recurrent, features = RaterConvLSTM(8, 3), torch.randn(4, 8)
        weight = torch.rand(4, 3).softmax(1)
        cell = torch.nn.LSTMCell(8, 8)
        gates, bias = recurrent.gates.weight[:, :, 1, 1], recurrent.gates.bias
        # ours are input, forget, output, new; LSTMCell has input, forget, new, output
        i, f, o, g = range(8), range(8, 16), range(16, 24), range(24, 32)
        order = [*i, *f, *g, *o]
        with torch.no_grad():
            cell.weight_ih.copy_(gates[order, :8])
            cell.weight_hh.copy_(gates[order, 8:])
            cell.bias_ih.copy_(bias[order])
            cell.bias_hh.zero_()
        state = weight @ recurrent.embed.weight[:, :, 1, 1].T + recurrent.embed.bias
        expected, _ = cell(features, (state, state))
        output = recurrent(features[:, :, None, None], weight)[:, :, 0, 0]
        torch.testing.assert_close(output, expected)

    def test_weights_sum_to_one_and_are_zero_for_absent_raters(self):
        present = torch.tensor(
            [[True, True, True, True], [False, True, False, True], [False, False, True, False]]
        )
        chosen = torch.zeros_like(present)
        for seed in range(50):
            torch.manual_seed(seed)
            equal, random, single = draw_weights(present)
            for weight in (equal, random, single):
                torch.testing.assert_close(weight.sum(1), torch.ones(3))
                assert (weight[~present] == 0).all()
            assert ((equal > 0) == present).all()
            assert ((random > 0) == present).all()
            assert (single.amax(1) == 1).all()
            chosen |= single > 0
        assert chosen.equal(present)

    def test_the_fused_label_is_the_weighted_mean_of_the_raters(self):
        raters, weight = random_labels(2, 8).raters, torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
        fused = fused_label(raters, weight)
        torch.testing.assert_close(fused[1], raters[1, 0])
        torch.testing.assert_close(fused[0], 0.2 * raters[0, 0] + 0.3 * raters[0, 1] + 0.5 * raters[0, 2])

    def test_each_module_learns_from_its_own_loss(self):
        network, labels = network_for("mrnet"), random_labels(2, 32)
        output = network(torch.randn(2, 1, 32, 32), labels.present)
        modules = {
            "trunk": "coarse",
            "inference": "coarse",
            "reconstruction": "raters",
            "perception": "final",
        }
        for name in set(modules.values()):
            network.zero_grad()
            getattr(output, name).square().sum().backward(retain_graph=True)
            trained = {
                key.split(".")[0] for key, value in network.named_parameters() if value.grad is not None
            }
            assert trained == {module for module, output_name in modules.items() if output_name == name}

    def test_the_mask_of_an_absent_rater_does_not_change_the_loss(self):
        network, labels = network_for("mrnet"), random_labels(2, 32)
        labels = labels._replace(present=torch.tensor([[True, True, False], [True, False, True]]))
        output = network(torch.randn(2, 1, 32, 32), labels.present)
        junk = torch.where(labels.present.view(2, 3, 1, 1, 1), labels.raters, 1.0)
        expected, with_junk = (
            network.losses(output, training_labels, SegmentationLoss())[0]
            for training_labels in (labels, labels._replace(raters=junk))
        )
        assert torch.equal(expected, with_junk)

    def test_the_losses_of_the_three_sets_of_weights_count_a_half_a_third_and_a_sixth(self):
        network, labels, loss = network_for("mrnet"), random_labels(2, 32), SegmentationLoss()
        output = network(torch.randn(2, 1, 32, 32), labels.present)
        total, terms = network.losses(output, labels, loss)
        for name in ("coarse", "final"):
            single = [
                loss(logits, fused_label(labels.raters, weight), labels.valid)
                for logits, weight in zip(getattr(output, name).chunk(3), output.weight, strict=True)
            ]
            # otherwise other shares would give the same sum
            assert len({round(each.item(), 4) for each in single}) == 3
            torch.testing.assert_close(terms[name], single[0] / 2 + single[1] / 3 + single[2] / 6)
        torch.testing.assert_close(total.detach(), sum(terms.values()))


# row: the true class, column: what the rater draws
CONFUSIONS = {
    2: [[[0.98, 0.02], [0.05, 0.95]], [[0.95, 0.05], [0.45, 0.55]], [[0.7, 0.3], [0.1, 0.9]]],
    3: [
        [[0.95, 0.03, 0.02], [0.05, 0.9, 0.05], [0.02, 0.08, 0.9]],
        [[0.9, 0.1, 0.0], [0.4, 0.5, 0.1], [0.0, 0.1, 0.9]],
        [[0.65, 0.35, 0.0], [0.05, 0.9, 0.05], [0.0, 0.3, 0.7]],
    ],
}


def unreliable_raters(num_classes):
    """Images, their true classes, the labels of raters with known confusion, and that confusion."""
    torch.manual_seed(0)
    image = torch.nn.functional.avg_pool2d(torch.randn(8, 1, 36, 36), 5, 1) * 5
    truth = torch.bucketize(image[:, 0], torch.tensor([0.0, 1.0][: num_classes - 1]))
    confusion = torch.tensor(CONFUSIONS[num_classes])
    drawn = [torch.multinomial(rows[truth.flatten()], 1).view_as(truth) for rows in confusion]
    raters = torch.stack([one_hot(classes, num_classes).float() for classes in drawn], 1)
    valid = torch.ones(8, 32, 32, dtype=torch.bool)
    return image, truth, TrainingLabels(raters.mean(1), valid, raters, valid[:, :3, 0]), confusion


class TestLearnedReliability:
    entropy = SegmentationLoss(cross_entropy_weight=1.0, region_weight=0.0)

    def fitted(self, num_classes, loss):
        """A network after training, and the mean error of its matrices divided by that at the start."""
        image, _, labels, confusion = unreliable_raters(num_classes)
        network = network_for("learned_reliability", num_classes=num_classes)
        start = (rater_confusion(network) - confusion).abs().mean()
        optimiser = torch.optim.AdamW(network.parameters(), lr=0.03)
        for _ in range(60):
            optimiser.zero_grad()
            network.losses(network(image, labels.present), labels, loss)[0].backward()
            optimiser.step()
        return network, float((rater_confusion(network) - confusion).abs().mean() / start)

    @pytest.mark.parametrize("num_classes", [2, 3])
    def test_training_recovers_the_confusion_of_simulated_raters_and_beats_their_majority(self, num_classes):
        network, error = self.fitted(num_classes, self.entropy)
        assert error < 0.5
        image, truth, labels, _ = unreliable_raters(num_classes)
        learned = network_probability(network, image, dtype="fp32").argmax(1) == truth
        majority = labels.target.argmax(1) == truth
        assert learned.float().mean() > majority.float().mean()

    @pytest.mark.parametrize("num_classes", [2, 5])
    def test_matrices_start_near_the_identity_with_rows_that_sum_to_one(self, num_classes):
        confusion = rater_confusion(network_for("learned_reliability", num_classes=num_classes))
        torch.testing.assert_close(confusion.sum(2), torch.ones(3, num_classes))
        torch.testing.assert_close(confusion.diagonal(dim1=1, dim2=2), torch.full((3, num_classes), 0.9))

    def test_the_loss_is_the_cross_entropy_of_each_rater_and_the_trace(self):
        network, labels = network_for("learned_reliability", trace_weight=0.3), random_labels(2, 8)
        labels = labels._replace(present=torch.tensor([[True, True, False], [True, False, False]]))
        torch.nn.init.normal_(network.confusion)
        logits = torch.randn(2, 2, 8, 8)
        output = network(torch.zeros(2, 1, 8, 8))._replace(logits=logits)
        total, parts = network.losses(output, labels, self.entropy)
        prob, confusion = logits.softmax(1), rater_confusion(network)
        expected = {}
        for rater, cases in {0: [0, 1], 1: [0]}.items():
            terms = [
                -labels.raters[n, rater, :, h, w] @ (prob[n, :, h, w] @ confusion[rater]).log()
                for n in cases
                for h in range(8)
                for w in range(8)
            ]
            expected[rater] = torch.stack(terms).mean() + 0.3 * confusion[rater].trace()
        torch.testing.assert_close(total, (2 * expected[0] + expected[1]) / 3)
        torch.testing.assert_close(total, parts["cross_entropy"] + 0.3 * parts["trace"])

    def test_an_absent_rater_changes_neither_the_loss_nor_its_own_matrix(self):
        network, labels = network_for("learned_reliability"), random_labels(2, 16)
        labels = labels._replace(present=torch.tensor([[True, True, False], [True, False, False]]))
        output = network(torch.randn(2, 1, 16, 16), labels.present)
        junk = torch.where(labels.present.view(2, 3, 1, 1, 1), labels.raters, 1.0)
        totals = [
            network.losses(output, part, self.entropy)[0] for part in (labels, labels._replace(raters=junk))
        ]
        assert torch.equal(*totals)
        totals[0].backward()
        assert (network.confusion.grad.abs().amax((1, 2)) > 0).tolist() == [True, True, False]

    def test_the_probability_is_that_of_the_network_alone(self):
        network, image = network_for("learned_reliability").eval(), torch.randn(2, 1, 32, 32)
        expected = network.network(image).softmax(1)
        torch.nn.init.normal_(network.confusion)
        torch.testing.assert_close(network.probability(image), expected)

    @pytest.mark.parametrize("finished", ["learned_reliability"], indirect=True)
    def test_the_matrices_are_stored_with_the_weights_of_a_run(self, finished):
        _, folder, _ = finished
        confusion = rater_confusion(open_run(folder).network(0, device="cpu"))
        start = rater_confusion(network_for("learned_reliability"))
        assert confusion.shape == (3, 2, 2)
        assert (confusion - start).abs().max() > 1e-3

    def test_other_systems_have_no_matrices(self):
        with pytest.raises(
            ValueError, match=r"got a MultiHead: train with .*system\.name=learned_reliability"
        ):
            rater_confusion(network_for("multi_head"))


class TestRefusals:
    def test_students_and_teachers_must_be_standard(self, dataset, tmp_path, finished):
        name, folder, _ = finished
        with pytest.raises(ValueError, match=rf"system\.name standard; got {name}"):
            recipe_for(dataset, name, teacher={"run": "somewhere"})
        student = recipe_for(dataset, "standard", teacher={"run": str(folder.path)})
        fold = fold_of(student, tmp_path / "student")
        batches = Batches(Storage(fold.dataset, "cpu"), range(12), fold.mean_std, BatchOptions(4))
        with pytest.raises(ValueError, match=rf"has system\.name {name}, which has no logits"):
            load_teacher(fold, batches, torch.device("cpu"))

    def test_systems_that_need_several_raters_refuse_other_datasets(self):
        for name in ("mrnet", "learned_reliability"):
            with pytest.raises(ValueError, match=f"{name}.*two or more"):
                network_for(name, num_raters=1)

    def test_an_architecture_without_encoder_and_decoder_is_refused(self):
        with pytest.raises(ValueError, match="got Linear"):
            Trunk(torch.nn.Linear(1, 1))


def test_the_standard_system_is_the_network_itself():
    network = network_for("standard")
    assert not isinstance(network, System)
    assert type(network).__name__ == "SmallUNet"
