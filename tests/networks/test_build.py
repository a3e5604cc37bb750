"""Networks by name: shapes, seeds, encoder weights from files and from a hub, and error messages."""

import re
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from start import refused

from semidice import SegmentationLoss, mean_label
from semidice.data.phantom import make_phantom
from semidice.networks.build import ModelOptions, Task, build_model

LITE0 = Path(__file__).parents[3] / "shared" / "weights" / "tf_efficientnet_lite0.safetensors"
needs_lite0 = pytest.mark.skipif(not LITE0.is_file(), reason=f"{LITE0.name} is missing")


def build(options):
    """A network; options of the architecture stand beside those of `ModelOptions` and the sizes."""
    task = Task(options.pop("num_channels", 1), options.pop("num_classes", 2))
    names = [options.pop(name, "none") for name in ("architecture", "encoder", "weights")]
    return build_model(ModelOptions(*names, options), task)


def small(**options):
    return build({"architecture": "small_unet", "encoder": "none"} | options)


def unet(encoder="tu-resnet18", weights="none", num_channels=3, **options):
    options = {"architecture": "unet", "encoder": encoder, "weights": str(weights)} | options
    return build(options | {"num_channels": num_channels})


def count_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@cache
def timm_state(name):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return timm.create_model(name).state_dict()


def weights_file(folder, name="resnet18", without=(), **changed):
    """A weights file as on the hub: the complete timm network, with its classifier."""
    state = {key: tensor for key, tensor in timm_state(name).items() if not key.startswith(tuple(without))}
    path = folder / f"{name}.safetensors"
    safetensors.torch.save_file({**state, **changed}, path)
    return path


class TestSmallUNet:
    def test_logits_have_a_channel_for_each_class_and_the_size_of_the_image(self):
        network = small(num_channels=3, num_classes=4)
        assert network(torch.randn(2, 3, 64, 96)).shape == (2, 4, 64, 96)
        assert count_parameters(network) < 400_000

    def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(self):
        states = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            states.append(torch.cat([value.flatten() for value in small().parameters()]))
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])

    def test_it_learns_a_phantom_in_15_steps(self):
        phantom = make_phantom(8, num_raters=3, seed=1)
        label = mean_label(phantom.masks, batched=True)
        network, loss = small(), SegmentationLoss()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(15):
            optimiser.zero_grad()
            losses.append(loss(network(phantom.image), label))
            losses[-1].backward()
            optimiser.step()
        assert losses[-1] < 0.6 * losses[0]

    def test_group_norm_makes_logits_independent_of_the_batch(self):
        images = torch.randn(3, 1, 32, 32)
        difference = {}
        for norm in ("batch", "group"):
            network = small(norm=norm)
            with torch.no_grad():
                difference[norm] = float((network(images)[:1] - network(images[:1])).abs().max())
        assert difference["group"] < 1e-5 < difference["batch"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"encoder": "resnet18"}, "set both to 'none'; got 'resnet18' and 'none'"),
            ({"weights": "imagenet"}, "set both to 'none'; got 'none' and 'imagenet'"),
            ({"chanels": [8]}, "no option of small_unet 'chanels'; did you mean channels?"),
            ({"channels": [8, 12]}, "multiples of 8 up to 2048, one for each level; got [8, 12]"),
            ({"norm": "layer"}, "norm 'batch' or 'group'"),
            ({"num_channels": 0}, "1 or more channels and 2 or more classes; got 0 and 2"),
            ({"num_classes": 1}, "1 or more channels and 2 or more classes; got 1 and 1"),
        ],
    )
    def test_invalid_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            small(**options)

    def test_an_image_size_that_cannot_be_halved_is_refused(self):
        with pytest.raises(ValueError, match=r"multiples of 8; got \(64, 60\)"):
            small()(torch.zeros(1, 1, 64, 60))


class TestArchitectures:
    @pytest.mark.parametrize(
        ("architecture", "encoder"),
        [
            ("unet", "tu-resnet50"),
            ("unet", "tu-resnet18"),
            ("unet", "tu-efficientnet_b0"),
            ("unet", "tu-mobilenetv2_100"),
            ("deeplabv3plus", "tu-resnet18"),
            ("unet", "mobilenet_v2"),
            ("fpn", "efficientnet-b0"),
            ("unet", "timm-skresnet18"),
            ("segformer", "mit_b0"),
        ],
    )
    def test_logits_have_the_size_of_the_image(self, architecture, encoder):
        network = unet(encoder, architecture=architecture, num_channels=4, num_classes=3).eval()
        with torch.no_grad():
            logits = network(torch.randn(1, 4, 64, 96))
        assert logits.shape == (1, 3, 64, 96)
        # the network ends without softmax or sigmoid
        assert logits.min() < 0 or logits.max() > 1

    @pytest.mark.parametrize("encoder", ["mobilenetv3_small_050", "tu-mobilenetv3_small_050"])
    def test_a_timm_encoder_name_works_with_and_without_its_prefix(self, encoder):
        assert type(unet(encoder).encoder).__name__ == "TimmUniversalEncoder"

    def test_a_name_that_smp_and_timm_share_means_the_encoder_of_smp(self):
        assert type(unet("resnet18").encoder).__name__ == "ResNetEncoder"
        assert type(unet("tu-resnet18").encoder).__name__ == "TimmUniversalEncoder"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"architecture": "DeepLabV3+"},
                "no architecture 'DeepLabV3+'; did you mean deeplabv3 or deeplabv3plus?",
            ),
            ({"architecture": "smal_unet"}, "did you mean small_unet"),
            ({"encoder": "resnet5"}, "no encoder 'resnet5'; did you mean resnet50"),
            ({"encoder": "tf_eficientnet_lite0"}, "did you mean tf_efficientnet_lite0"),
            ({"encoder": "qqqqqqqq"}, "no encoder 'qqqqqqqq'; there are resnet18, resnet34"),
            ({"decoder_chanels": [8]}, "no option of unet 'decoder_chanels'; did you mean decoder_channels"),
            ({"activation": "softmax"}, "no option of unet 'activation'"),
            ({"decoder_channels": [8, 8]}, "unet cannot be built on encoder tu-resnet18 with options {'dec"),
            ({"encoder_options": {"heads": 3}}, "unet cannot be built on encoder tu-resnet18"),
            ({"encoder_options": {"img_size": 64}}, "unet cannot be built on encoder tu-resnet18"),
            ({"encoder_options": [3]}, "model.options.encoder_options must be a mapping"),
            ({"encoder": "tu-resnet18.never_made"}, "cannot be built on encoder tu-resnet18.never_made"),
        ],
    )
    def test_an_unknown_name_or_option_gets_a_helpful_error(self, options, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            unet(**options)


class TestWeightsFromAFile:
    @needs_lite0
    def test_a_real_file_is_loaded_into_the_encoder_and_changes_the_logits(self):
        tensors = safetensors.torch.load_file(LITE0)
        torch.manual_seed(1)
        random = unet("tf_efficientnet_lite0").eval()
        torch.manual_seed(1)
        loaded = unet("tf_efficientnet_lite0", LITE0).eval()
        state = loaded.encoder.model.state_dict()
        assert len(state) == 288
        assert all(torch.equal(state[key], tensors[key]) for key in state)
        decoders = (network.decoder.state_dict() for network in (random, loaded))
        assert all(torch.equal(*pair) for pair in zip(*(d.values() for d in decoders), strict=True))
        image = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            assert not torch.allclose(random(image), loaded(image), atol=1e-2)

    @pytest.mark.parametrize("num_channels", [1, 3, 4])
    @pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mobilenetv3_small_050"])
    def test_the_encoder_equals_that_of_the_loader_of_timm_for_any_number_of_channels(
        self, name, num_channels, tmp_path
    ):
        path = weights_file(tmp_path, name)
        encoder = unet(f"tu-{name}", path, num_channels).encoder
        expected = timm.create_model(
            name,
            pretrained=True,
            pretrained_cfg_overlay={"file": str(path)},
            features_only=True,
            in_chans=num_channels,
            out_indices=tuple(encoder.model.feature_info.out_indices),
        ).state_dict()
        state = encoder.model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)

    @pytest.mark.parametrize("num_channels", [1, 3, 5])
    def test_an_smp_encoder_with_the_same_tensor_names_loads_a_timm_file(self, num_channels, tmp_path):
        state = unet("resnet18", weights_file(tmp_path), num_channels).encoder.state_dict()
        file = timm_state("resnet18")
        assert all(torch.equal(state[key], file[key]) for key in state if key != "conv1.weight")
        rgb = file["conv1.weight"]
        expected = {
            1: rgb.sum(1, keepdim=True),
            3: rgb,
            5: torch.stack([rgb[:, channel] for channel in (0, 1, 2, 0, 1)], dim=1) * (3 / 5),
        }
        torch.testing.assert_close(state["conv1.weight"], expected[num_channels])

    @pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet18"])
    def test_a_shallower_encoder_loads_only_its_own_layers(self, encoder, tmp_path):
        network = unet(encoder, weights_file(tmp_path), encoder_depth=3, decoder_channels=[32, 16, 8])
        state = network.encoder.state_dict()
        key = next(key for key in state if key.endswith("layer2.0.conv1.weight"))
        assert torch.equal(state[key], timm_state("resnet18")["layer2.0.conv1.weight"])
        with torch.no_grad():
            assert network(torch.randn(2, 3, 64, 64)).shape == (2, 2, 64, 64)

    @pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet18"])
    @pytest.mark.parametrize("without", [("fc.",), ("fc.", "bn1.num_batches_tracked")])
    def test_classifier_and_batch_count_may_be_missing_in_the_file(self, encoder, without, tmp_path):
        state = unet(encoder, weights_file(tmp_path, without=without)).encoder.state_dict()
        key = next(key for key in state if key.endswith("layer4.1.conv2.weight"))
        assert torch.equal(state[key], timm_state("resnet18")["layer4.1.conv2.weight"])

    @pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet18"])
    def test_every_tensor_that_does_not_fit_is_named(self, encoder, tmp_path):
        path = weights_file(
            tmp_path,
            without=("bn1.weight", "layer3.1.bn2.bias"),
            **{"extra.bias": torch.zeros(2), "layer1.0.conv1.weight": torch.zeros(64, 64, 5, 5)},
        )
        names = ("bn1.weight", "layer3.1.bn2.bias", "extra.bias", "layer1.0.conv1.weight")
        refused(lambda: unet(encoder, path), f"weights {path} do not fit", *names)

    def test_missing_tensors_are_named_as_in_the_file_even_if_timm_renames_them(self, tmp_path):
        path = weights_file(tmp_path, "convnext_atto", without=("stages.1.blocks.0.norm.bias",))
        with pytest.raises(ValueError, match=r"1 missing: stages\.1\.blocks\.0\.norm\.bias$"):
            unet("tu-convnext_atto", path)

    def test_a_timm_file_for_an_smp_encoder_gets_an_error_that_recommends_the_timm_encoder(self, tmp_path):
        path = weights_file(tmp_path, "mobilenetv2_100")
        with pytest.raises(
            ValueError, match="do not fit smp's mobilenet_v2: for a file from timm, take timm's own encoder"
        ):
            unet("mobilenet_v2", path)

    def test_a_pickle_is_not_opened(self, tmp_path):
        path = tmp_path / "weights.pth"
        torch.save(timm_state("resnet18"), path)
        refused(lambda: unet(weights=path), str(path), ".safetensors file, which cannot run code")

    def test_the_error_names_a_truncated_or_missing_file(self, tmp_path):
        path = weights_file(tmp_path)
        path.write_bytes(path.read_bytes()[:-1000])
        refused(lambda: unet(weights=path), str(path), "download it again")
        refused(lambda: unet(weights=tmp_path / "absent.safetensors"), "absent.safetensors")


class Hub:
    """What the client of the hub does: a cache, and files by repository, or no connection."""

    def __init__(self):
        self.files, self.cached, self.asked, self.is_connected = {}, {}, [], True

    def try_to_load_from_cache(self, repository, filename, revision=None):
        return self.cached.get(repository)

    def get_hf_file_metadata(self, url, timeout):
        assert timeout <= 30
        self.asked.append(url)
        if not self.is_connected or not any(f"/{repository}/" in url for repository in self.files):
            raise ConnectionError(url)

    def hf_hub_download(self, repository, filename, revision=None):
        assert filename == "model.safetensors"
        self.cached[repository] = str(self.files[repository])
        return self.cached[repository]


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    for name in ("try_to_load_from_cache", "get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", getattr(hub, name))
    return hub


class TestWeightsFromTheHub:
    def test_weights_are_downloaded_once_and_then_loaded_without_a_connection(self, hub, tmp_path):
        hub.files["timm/resnet18.a1_in1k"] = weights_file(tmp_path)
        key = "layer4.1.conv2.weight"
        for is_connected in (True, False):
            hub.is_connected = is_connected
            state = unet(weights="imagenet").encoder.model.state_dict()
            assert torch.equal(state[key], timm_state("resnet18")[key])
            assert bool(hub.asked) == is_connected
            hub.asked.clear()

    @pytest.mark.parametrize(
        ("encoder", "repository"),
        [("tu-resnet18", "timm/resnet18.a1_in1k"), ("resnet18", "smp-hub/resnet18.imagenet")],
    )
    def test_without_a_connection_the_error_lists_three_ways_out(self, hub, encoder, repository):
        hub.is_connected = False
        refused(
            lambda: unet(encoder, "imagenet"),
            f"encoder {encoder} are not on this machine",
            "connect once",
            f"model.safetensors of {repository}",
            "set weights to none",
        )

    @pytest.mark.parametrize(
        ("encoder", "weights", "known"),
        [("resnet18", "imagnet", "imagenet, ssl, swsl, none"), ("tu-resnet18", "swsl", "imagenet, none")],
    )
    def test_an_unknown_name_of_weights_is_refused_without_a_request(self, hub, encoder, weights, known):
        refused(lambda: unet(encoder, weights), known, repr(weights))
        assert hub.asked == []
