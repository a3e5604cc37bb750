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


def segformer(num_labels=3):
    """A SegFormer with random weights that takes a millisecond."""
    config = transformers.SegformerConfig(
        num_labels=num_labels,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    torch.manual_seed(0)
    return transformers.SegformerForSemanticSegmentation(config)


def images_and_labels(num=4, *, soft=True):
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


def trained(folder, dataset, *, function=compute_loss_func, steps=2, model=None, **options):
    """A Trainer after some steps, and the gradients of them."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=0,
        dataloader_pin_memory=False,
        **{"per_device_train_batch_size": len(dataset), "learning_rate": 1e-2, **options},
    )
    recorder = Recorder()
    trainer = transformers.Trainer(
        model=segformer() if model is None else model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        compute_loss_func=function,
        callbacks=[recorder],
    )
    trainer.train()
    return trainer, recorder.gradients


def plain_gradients(dataset, loss=None, ignore=None):
    """Gradients of the plain loss of the logits in the size of the labels, without Trainer."""
    model, loss = segformer().train(), SegmentationLoss() if loss is None else loss
    images, labels = (torch.stack([each[name] for each in dataset]) for name in ("pixel_values", "labels"))
    logits = F.interpolate(model(images).logits, labels.shape[-2:], mode="bilinear", align_corners=False)
    loss(logits, labels, ignore).backward()
    return {name: each.grad for name, each in model.named_parameters()}


class TestTrainer:
    def test_the_gradient_is_that_of_the_plain_loss_of_the_upsampled_logits(self, tmp_path):
        dataset = images_and_labels()
        _, gradients = trained(tmp_path, dataset)
        assert len(gradients) == 2
        assert_close(gradients[0], plain_gradients(dataset))

    def test_ignored_voxels_of_class_indices(self, tmp_path):
        dataset = images_and_labels(soft=False)
        for each in dataset:
            each["labels"][:5] = 255
        ignored = torch.stack([each["labels"] for each in dataset]) == 255
        function = partial(compute_loss_func, loss=DiceLoss())
        _, gradients = trained(tmp_path, dataset, function=function, steps=1)
        for each in dataset:
            each["labels"][:5] = 1
        assert_close(gradients[0], plain_gradients(dataset, DiceLoss(), ~ignored))

    def test_accumulated_batches_count_by_their_share(self, tmp_path):
        """With one index per image, a batch of two images and one of one are a batch of three."""
        function = partial(compute_loss_func, loss=DiceLoss(over="image"))
        gradients = []
        for batches in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}):
            model = segformer()
            # its statistics are those of a batch
            model.decode_head.batch_norm = torch.nn.Identity()
            options = {"function": function, "steps": 1, "model": model, **batches}
            gradients += trained(tmp_path, images_and_labels(3, soft=False), **options)[1]
        assert len(gradients) == 2
        assert_close(gradients[1], gradients[0])


def test_a_batch_that_is_accumulated_twice_has_the_gradient_of_one_and_that_of_transformers_is_double(
    tmp_path,
):
    for function, factor in ((None, 2), (compute_loss_func, 1)):
        dataset = images_and_labels(2, soft=False)
        _, once = trained(tmp_path, dataset, function=function, steps=1)
        # not shuffled: each batch has both images
        twice = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        twice["train_sampling_strategy"] = "sequential"
        _, accumulated = trained(tmp_path, [*dataset, *dataset], function=function, steps=1, **twice)
        name = "decode_head.classifier.weight"
        assert_close(accumulated[0][name], factor * once[0][name])


class TestLoss:
    LOGITS, LABELS, SOFT = random_logits(2, 3, 4, 4), class_map((2, 16, 16), 3), soft_label(2, 3, 16, 16)

    def loss(self, labels, **options):
        return compute_loss_func({"logits": self.LOGITS}, labels, **options)

    def test_the_target_can_be_averaged_to_the_size_of_the_logits(self):
        blocks = self.SOFT.view(2, 3, 4, 4, 4, 4).mean((3, 5))
        assert_close(self.loss(self.SOFT, resize="target"), SegmentationLoss()(self.LOGITS, blocks))
        hot = F.one_hot(self.LABELS, 3).permute(0, 3, 1, 2).float()
        assert_close(self.loss(self.LABELS, resize="target"), self.loss(hot, resize="target"))

    @pytest.mark.parametrize("resize", ["logits", "target"])
    def test_ignored_voxels_of_soft_labels_are_those_of_class_indices(self, resize):
        ignored = torch.rand(2, 16, 16) > 0.7
        index = self.LABELS.masked_fill(ignored, 255)
        hot = F.one_hot(self.LABELS, 3).permute(0, 3, 1, 2).float().masked_fill(ignored[:, None], 255)
        assert_close(self.loss(hot, resize=resize), self.loss(index, resize=resize))
        moved = self.LABELS.masked_fill(ignored, -100)
        assert_close(self.loss(moved, resize=resize, ignore_index=-100), self.loss(index, resize=resize))

    @pytest.mark.parametrize("resize", ["logits", "target"])
    def test_one_channel_with_a_sigmoid(self, resize):
        logits, mask = self.LOGITS[:, :1], self.LABELS.clamp_max(1)
        loss = SegmentationLoss(activation="sigmoid")
        actual = compute_loss_func({"logits": logits}, mask, loss=loss, resize=resize)
        if resize == "logits":
            expected = loss(F.interpolate(logits, (16, 16), mode="bilinear"), mask[:, None].float())
        else:
            expected = loss(logits, F.avg_pool2d(mask[:, None].float(), 4))
        assert_close(actual, expected)

    def test_the_share_of_a_batch(self):
        whole, num_labels = self.loss(self.LABELS), self.LABELS.numel()
        assert_close(self.loss(self.LABELS, num_items_in_batch=torch.tensor(4 * num_labels)), whole / 4)
        assert_close(self.loss(self.LABELS, num_items_in_batch=num_labels), whole)
        # DataParallel: the number for each of two GPUs; Trainer multiplies the loss by two
        twice = torch.tensor([[num_labels], [num_labels]])
        assert_close(2 * self.loss(self.LABELS, num_items_in_batch=twice), whole)

    def test_what_is_missing_is_named(self):
        refused(lambda: self.loss(None), "the dataset needs a column `labels`")
        refused(lambda: compute_loss_func(("a",), self.SOFT), "must return logits", "tuple")
        refused(lambda: compute_loss_func({"masks_queries_logits": 1}, self.SOFT), "as SegFormer does")


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


class TestHub:
    def test_a_loaded_network_gives_the_probabilities_of_the_fold(self, dataset, run, saved):
        loaded = HubNetwork.from_pretrained(saved)
        network, folds = open_run(run.path).network(1, device="cpu"), read_folds(run.folds, dataset)
        for number in range(len(dataset)):
            if folds[number] != 1:
                continue
            image = torch.from_numpy(np.array(dataset.image(number)))[None]
            padded = F.pad(normalised(dataset, number, folds), (8, 8, 12, 12))
            expected = network_probability(network, padded, dtype="fp32")[..., 12:52, 8:56]
            assert_close(loaded(image), expected)
        assert loaded.class_names == tuple(dataset.manifest.class_names)
        assert not loaded.training

    def test_the_config_has_recipe_classes_and_normalisation_and_no_folder_of_this_machine(self, saved, run):
        config, facts = json.loads((saved / "config.json").read_text()), open_run(run.path).facts
        assert config["recipe"]["model"]["options"] == {"channels": [8, 16], "norm": "group"}
        assert config["dataset"]["class_names"] == list(facts.class_names)
        assert config["dataset"]["fold_mean"] == [list(facts.fold_mean[1])]
        assert config["dataset"]["fold_std"] == [list(facts.fold_std[1])]
        assert {path.name for path in saved.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        for name in ("README.md", "config.json"):
            assert "secret" not in (saved / name).read_text()
        assert "library_name: semidice" in (saved / "README.md").read_text()

    def test_a_second_save_has_the_same_files(self, saved, tmp_path):
        HubNetwork.from_pretrained(saved).save_pretrained(tmp_path / "again")
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()

    def test_push_to_hub_uploads_these_files(self, run, saved, monkeypatch):
        uploaded = {}

        class Api:
            def __init__(self, token=None):
                pass

            def create_repo(self, repo_id, **_):
                return type("Repository", (), {"repo_id": repo_id})

            def upload_folder(self, *, repo_id, folder_path, **_):
                uploaded[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

        monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
        HubNetwork.from_run(run.path, fold=1).push_to_hub("me/lesions")
        assert uploaded == {"me/lesions": {path.name: path.read_bytes() for path in saved.iterdir()}}

    def test_from_pretrained_downloads_only_these_files(self, saved, monkeypatch):
        asked = []

        def download(*, repo_id, filename, **_):
            asked.append((repo_id, filename))
            return str(saved / filename)

        monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
        monkeypatch.setattr(huggingface, "hf_hub_download", download)
        assert_close(
            HubNetwork.from_pretrained("me/lesions").state_dict(),
            HubNetwork.from_pretrained(saved).state_dict(),
        )
        assert asked == [("me/lesions", "config.json"), ("me/lesions", "model.safetensors")]

    def test_a_wrong_number_of_channels_is_refused(self, saved):
        with pytest.raises(ValueError, match=r"image needs the channels"):
            HubNetwork.from_pretrained(saved)(torch.zeros(1, 1, 32, 32))


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

    def change(self, saved, key, value):
        config = json.loads((saved / "config.json").read_text())
        node = config
        *sections, name = key.split(".")
        for section in sections:
            node = node[section]
        node[name] = value
        (saved / "config.json").write_text(json.dumps(config))

    def test_weights_of_the_encoder_are_not_read(self, payload, saved):
        self.change(saved, "recipe.model.weights", str(payload))
        HubNetwork.from_pretrained(saved)

    @pytest.mark.parametrize(
        ("key", "value", "word"),
        [
            ("recipe.modl", {}, "modl"),
            ("recipe.model.encoder", "hf-hub:a/b", "an address or a folder"),
            ("recipe.model.options", {"encoder_options": {"checkpoint_path": "x.pth"}}, "checkpoint_path"),
            ("recipe.model.options", {"decoder_interpolation": "x/y.pth"}, "a number or one word"),
            ("dataset.std", [0.0, 1.0], "std above 0"),
            ("dataset", 3, "config.json"),
        ],
    )
    def test_a_wrong_config_is_refused(self, key, value, word, saved):
        if key.startswith("recipe.model."):
            # of a network that has options of files
            unet = {"architecture": "unet", "encoder": "tu-resnet18", "weights": "none", "options": {}}
            self.change(saved, "recipe.model", unet)
        self.change(saved, key, value)
        refused(lambda: HubNetwork.from_pretrained(saved), word)

    def test_a_pickle_is_not_read_and_neither_is_a_repository_without_a_config(self, payload, saved):
        load = partial(HubNetwork.from_pretrained, saved)
        (saved / "model.safetensors").unlink()
        payload.rename(saved / "pytorch_model.bin")
        refused(load, "has no model.safetensors")
        (saved / "pytorch_model.bin").rename(saved / "model.safetensors")
        refused(load, "has no model.safetensors")
        (saved / "config.json").unlink()
        refused(load, "has no config.json")

    def test_weights_of_another_network_are_refused(self, saved):
        tensors = safetensors.torch.load_file(saved / "model.safetensors")
        tensors.popitem()
        safetensors.torch.save_file(tensors, saved / "model.safetensors")
        with pytest.raises(ValueError, match="Missing key"):
            HubNetwork.from_pretrained(saved)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dml1").symlink_to(run.path)
    scope = {}
    blocks = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        exec(compile(block, f"huggingface.md example {number + 1}", "exec"), scope)
