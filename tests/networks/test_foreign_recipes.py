"""A recipe of a stranger cannot make smp or timm open a file, an address or a pickle."""

import inspect
import json
import re

import pytest
import segmentation_models_pytorch as smp
import timm
import torch

from semidice.networks.build import _ENCODER_NAME, ModelOptions, Task, build_model


def network(encoder="tu-resnet18", architecture="unet", weights="none", **options):
    return build_model(ModelOptions(architecture, encoder, weights, options), Task(3, 2))


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def payload(tmp_path):
    """A pickle that creates the second path when it is read."""
    weights, created = tmp_path / "weights.pth", tmp_path / "code_was_run"
    torch.save({"state_dict": Payload(created)}, weights)
    return weights, created


def arguments_of_timm():
    """Every argument of timm's functions that build a network."""
    from timm.models import _builder, _factory

    functions = (_factory.create_model, _builder.build_model_with_cfg)
    names = {name for each in functions for name in inspect.signature(each).parameters}
    return sorted(names - {"kwargs"})


@pytest.mark.parametrize(
    "name", [*arguments_of_timm(), "features_only", "out_indices", "feature_cls", "pruned"]
)
def test_no_argument_with_which_timm_builds_a_network_can_be_set(name):
    with pytest.raises(ValueError, match=f"option '{name}' of an encoder cannot be set"):
        network(encoder_options={name: "a"})


@pytest.mark.parametrize(
    "name",
    ["encoder_name", "encoder_weights", "in_channels", "classes", "activation", "aux_params", "kwargs"],
)
def test_no_argument_that_semidice_sets_can_be_set_again(name):
    with pytest.raises(ValueError, match=f"there is no option of unet '{name}'"):
        network(**{name: "a"})


@pytest.mark.parametrize("value", ["/etc/passwd", "../a", "a.pth", "hf-hub:a/b", "http://a", "a b", ""])
@pytest.mark.parametrize("option", ["decoder_interpolation", "decoder_use_norm", "act_layer"])
def test_a_value_that_could_be_a_path_or_an_address_is_refused(option, value):
    options = {option: {"type": value} if option == "decoder_use_norm" else value}
    if option == "act_layer":
        options = {"encoder_options": options}
    with pytest.raises(ValueError, match=re.escape(f"or one word, such as bilinear; got {value!r}")):
        network(**options)


@pytest.mark.parametrize(
    "encoder",
    [
        "hf-hub:timm/resnet18.a1_in1k",
        "hf_hub:timm/resnet18",
        "local-dir:/tmp/model",
        "tu-hf-hub:timm/resnet18",
        "tu-local-dir:model",
        "resnet18.hf-hub:timm/resnet18",
        "/tmp/resnet18",
        "http://host/resnet18",
        "resnet18\n",
    ],
)
def test_an_encoder_that_is_an_address_or_a_folder_is_refused(encoder):
    with pytest.raises(ValueError, match="an address or a folder cannot be an encoder"):
        network(encoder)


def test_every_encoder_of_smp_and_timm_has_an_allowed_name():
    for name in (*smp.encoders.encoders, *timm.list_models(), *timm.list_models(pretrained=True)):
        assert _ENCODER_NAME.fullmatch(name), name


def test_options_that_are_numbers_and_words_are_passed_on():
    made = network(
        "tu-convnext_atto",
        decoder_channels=[64, 32, 32, 16, 16],
        decoder_attention_type="scse",
        decoder_use_norm={"type": "instancenorm", "affine": True},
        encoder_options={"drop_path_rate": 0.5, "act_layer": "relu"},
    )
    assert type(made.decoder.blocks[0].attention1.attention).__name__ == "SCSEModule"
    kinds = {type(module).__name__ for module in made.encoder.modules()}
    assert {"ReLU", "DropPath"} <= kinds
    assert "GELU" not in kinds
    assert "InstanceNorm2d" in {type(module).__name__ for module in made.decoder.modules()}


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_options": {"checkpoint_path": "WEIGHTS"}},
        {"encoder_options": {"pretrained": True, "pretrained_cfg": {"file": "WEIGHTS"}}},
        {"encoder_options": {"pretrained_cfg_overlay": {"file": "WEIGHTS"}}},
        {"checkpoint_path": "WEIGHTS"},
    ],
)
def test_an_option_that_names_a_pickle_is_refused_and_runs_no_code(options, payload):
    weights, created = payload
    options = json.loads(json.dumps(options).replace("WEIGHTS", str(weights)))
    with pytest.raises(ValueError, match="option"):
        network(**options)
    assert not created.exists()


def test_weights_that_are_a_pickle_are_refused_and_not_read(payload):
    weights, created = payload
    with pytest.raises(ValueError, match=r"weights must be a \.safetensors file"):
        network(weights=str(weights))
    renamed = weights.rename(weights.with_suffix(".safetensors"))
    with pytest.raises(ValueError, match="complete safetensors file"):
        network(weights=str(renamed))
    assert not created.exists()
