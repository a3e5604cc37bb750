"""Our losses in the real Trainer, and networks that go to the hub and come back."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from laws import class_map, random_logits, soft_label
from prepared import make_prepared
from start import refused
from torch.testing import assert_close
from trained import make_run, normalised

from semidice import DiceLoss, SegmentationLoss
from semidice.data.folds import read_folds
from semidice.networks.predictor import network_probability
from semidice.runs.run import open_run

pytestmark = pytest.mark.integrations
transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("semidice.integrations.huggingface")
compute_loss_func, HubNetwork = huggingface.compute_loss_func, huggingface.HubNetwork
PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def segformer():
    """A SegFormer of three classes with random weights that takes a millisecond."""
    config = transformers.SegformerConfig(
        num_labels=3,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    torch.manual_seed(0)
    model = transformers.SegformerForSemanticSegmentation(config)
    # its statistics are those of a batch
    model.decode_head.batch_norm = torch.nn.Identity()
    return model


def images_and_labels(num, *, soft):
    """Images whose channels show the classes of 32 x 32 voxels, and labels."""
    index = class_map((num, 8, 8), 3).repeat_interleave(4, 1).repeat_interleave(4, 2)
    hot = F.one_hot(index, 3).permute(0, 3, 1, 2).float()
    labels = 0.8 * hot + 0.2 / 3 if soft else index
    return [
        {"pixel_values": 4 * image - 1, "labels": label} for image, label in zip(hot, labels, strict=True)
    ]


class Recorder(transformers.TrainerCallback):
    """The gradients of each step, before the optimiser changes them."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})


def first_gradients(folder, dataset, *, function=compute_loss_func, **options):
    """The gradients of a Trainer's first step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=0,
        dataloader_pin_memory=False,
        **{"per_device_train_batch_size": len(dataset), **options},
    )
    recorder = Recorder()
    transformers.Trainer(
        segformer(), arguments, train_dataset=dataset, compute_loss_func=function, callbacks=[recorder]
    ).train()
    return recorder.gradients[0]


def plain_gradients(dataset, loss, valid=None):
    """Gradients of the plain loss of the logits in the size of the labels, without Trainer."""
    model = segformer().train()
    images, labels = (torch.stack([each[name] for each in dataset]) for name in ("pixel_values", "labels"))
    logits = F.interpolate(model(images).logits, labels.shape[-2:], mode="bilinear", align_corners=False)
    loss(logits, labels, valid).backward()
    return {name: each.grad for name, each in model.named_parameters()}


class TestTrainer:
    def test_the_gradient_is_that_of_the_plain_loss_of_the_upsampled_logits(self, tmp_path):
        dataset = images_and_labels(4, soft=True)
        assert_close(first_gradients(tmp_path, dataset), plain_gradients(dataset, SegmentationLoss()))

    def test_ignored_voxels_of_class_indices(self, tmp_path):
        dataset = images_and_labels(4, soft=False)
        for each in dataset:
            each["labels"][:5] = 255
        ignored = torch.stack([each["labels"] for each in dataset]) == 255
        gradients = first_gradients(tmp_path, dataset, function=partial(compute_loss_func, loss=DiceLoss()))
        for each in dataset:
            each["labels"][:5] = 1
        assert_close(gradients, plain_gradients(dataset, DiceLoss(), ~ignored))

    def test_accumulated_batches_count_by_their_share(self, tmp_path):
        """With one index per image, a batch of two images and one of one are a batch of three."""
        work = partial(first_gradients, tmp_path, images_and_labels(3, soft=False))
        function = partial(compute_loss_func, loss=DiceLoss(over="image"))
        batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        assert_close(work(function=function, **batches), work(function=function))


class TestLoss:
    LOGITS, LABELS, SOFT = random_logits(2, 3, 4, 4), class_map((2, 16, 16), 3), soft_label(2, 3, 16, 16)

    def loss(self, labels, **options):
        return compute_loss_func({"logits": self.LOGITS}, labels, **options)

    def test_the_target_can_be_averaged_to_the_size_of_the_logits(self):
        blocks = self.SOFT.view(2, 3, 4, 4, 4, 4).mean((3, 5))
        assert_close(self.loss(self.SOFT, resize="target"), SegmentationLoss()(self.LOGITS, blocks))

    @pytest.mark.parametrize("resize", ["logits", "target"])
    def test_ignored_voxels_of_soft_labels_are_those_of_class_indices(self, resize):
        ignored = torch.rand(2, 16, 16) > 0.7
        index = self.LABELS.masked_fill(ignored, 255)
        hot = F.one_hot(self.LABELS, 3).permute(0, 3, 1, 2).float().masked_fill(ignored[:, None], 255)
        assert_close(self.loss(hot, resize=resize), self.loss(index, resize=resize))
        moved = self.LABELS.masked_fill(ignored, -100)
        assert_close(self.loss(moved, resize=resize, ignore_index=-100), self.loss(index, resize=resize))

    def test_one_channel_with_a_sigmoid(self):
        logits, mask = self.LOGITS[:, :1], self.LABELS.clamp_max(1)
        loss = SegmentationLoss(activation="sigmoid")
        expected = loss(F.interpolate(logits, (16, 16), mode="bilinear"), mask[:, None].float())
        assert_close(compute_loss_func({"logits": logits}, mask, loss=loss), expected)

    def test_the_share_of_a_batch(self):
        whole, num_labels = self.loss(self.LABELS), self.LABELS.numel()
        assert_close(self.loss(self.LABELS, num_items_in_batch=torch.tensor(4 * num_labels)), whole / 4)
        # DataParallel: the number for each of two GPUs; Trainer multiplies the loss by two
        twice = torch.tensor([[num_labels], [num_labels]])
        assert_close(2 * self.loss(self.LABELS, num_items_in_batch=twice), whole)

    def test_what_is_missing_is_named(self):
        refused(lambda: self.loss(None), "the dataset needs a column `labels`")
        refused(lambda: compute_loss_func({"masks_queries_logits": 1}, self.SOFT), "must return logits")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("hub") / "secret" / "data", size=(40, 48), num_channels=2)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "run", dataset, scored=False)


@pytest.fixture
def saved(run, tmp_path):
    HubNetwork.from_run(run.path, fold=1).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def test_a_loaded_network_gives_the_probabilities_of_the_fold(dataset, run, saved):
    loaded = HubNetwork.from_pretrained(saved)
    network, folds = open_run(run.path).network(1, device="cpu"), read_folds(run.folds, dataset)
    for number in (number for number in range(len(dataset)) if folds[number] == 1):
        image = torch.from_numpy(np.array(dataset.image(number)))[None]
        padded = F.pad(normalised(dataset, number, folds), (8, 8, 12, 12))
        expected = network_probability(network, padded, dtype="fp32")[..., 12:52, 8:56]
        assert_close(loaded(image), expected)
    assert loaded.class_names == tuple(dataset.manifest.class_names)
    assert not loaded.training
    refused(lambda: loaded(torch.zeros(1, 1, 32, 32)), "image needs the channels")


def test_what_is_saved_has_recipe_classes_and_normalisation_and_no_folder_of_this_machine(saved, run):
    config, facts = json.loads((saved / "config.json").read_text()), open_run(run.path).facts
    assert config["recipe"]["model"]["options"] == {"channels": [8, 16], "norm": "group"}
    assert config["dataset"]["class_names"] == list(facts.class_names)
    assert config["dataset"]["fold_mean"] == [list(facts.fold_mean[1])]
    assert {path.name for path in saved.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    for name in ("README.md", "config.json"):
        assert "secret" not in (saved / name).read_text()
    assert "library_name: semidice" in (saved / "README.md").read_text()


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class TestForeignRepositories:
    """A repository of a stranger runs no code: it is refused with one line."""

    @pytest.fixture
    def payload(self, tmp_path):
        weights, created = tmp_path / "weights.pth", tmp_path / "code_was_run"
        torch.save({"state_dict": Payload(created)}, weights)
        yield weights
        assert not created.exists()

    @pytest.mark.parametrize(
        ("section", "changes", "word"),
        [
            ("model", {"encoder": "hf-hub:a/b"}, "an address or a folder"),
            ("model", {"options": {"encoder_options": {"checkpoint_path": "x.pth"}}}, "checkpoint_path"),
            ("modl", {}, "modl"),
        ],
    )
    def test_a_wrong_config_is_refused(self, section, changes, word, saved):
        config = json.loads((saved / "config.json").read_text())
        # of a network that has options of files
        unet = {"architecture": "unet", "encoder": "tu-resnet18", "weights": "none", "options": {}}
        config["recipe"][section] = unet | changes
        (saved / "config.json").write_text(json.dumps(config))
        refused(lambda: HubNetwork.from_pretrained(saved), word)

    def test_a_pickle_is_not_read_and_neither_are_weights_of_the_encoder(self, payload, saved, monkeypatch):
        config = json.loads((saved / "config.json").read_text())
        config["recipe"]["model"]["weights"] = str(payload)
        (saved / "config.json").write_text(json.dumps(config))
        HubNetwork.from_pretrained(saved)
        files = {"config.json": saved / "config.json", "pytorch_model.bin": payload}

        def download(*, filename, **_):
            if filename not in files:
                raise huggingface_hub.errors.EntryNotFoundError(filename)
            return str(files[filename])

        huggingface_hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
        refused(partial(HubNetwork.from_pretrained, "me/lesions"), "has no model.safetensors", "pickle")
        payload.rename(saved / "model.safetensors")
        refused(partial(HubNetwork.from_pretrained, saved), "has no model.safetensors")
        (saved / "config.json").unlink()
        refused(partial(HubNetwork.from_pretrained, saved), "config.json")

    def test_weights_of_another_network_are_refused(self, saved):
        tensors = safetensors.torch.load_file(saved / "model.safetensors")
        tensors.popitem()
        safetensors.torch.save_file(tensors, saved / "model.safetensors")
        refused(lambda: HubNetwork.from_pretrained(saved), "Missing key")


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dml1").symlink_to(run.path)
    scope = {}
    blocks = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        exec(compile(block, f"huggingface.md example {number + 1}", "exec"), scope)
