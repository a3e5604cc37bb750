"""Files of calibrators that a stranger wrote: each wrong value is named, and nothing is run."""

import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from semidice.calibration import CALIBRATORS, load_calibrator


def saved(name, path, *, num_classes=3):
    """A file of a fitted calibrator, and its content."""
    generator = torch.Generator().manual_seed(0)
    prob = torch.randn(200, num_classes, generator=generator).softmax(1)
    target = torch.multinomial(prob, 1, generator=generator).squeeze(1)
    CALIBRATORS[name]().fit(prob, target).save(path)
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calibrator.safetensors"


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_every_tensor_is_checked(name, num_classes, path):
    tensors, metadata = saved(name, path, num_classes=num_classes)
    load_calibrator(path)
    for key, tensor in tensors.items():
        for damaged in (None, tensor.flatten()[:0], tensor.to(torch.int8), tensor.unsqueeze(0)):
            changed = {**tensors, key: damaged} if damaged is not None else {**tensors}
            if damaged is None:
                del changed[key]
            save_file(changed, path, metadata=metadata)
            with pytest.raises(ValueError, match=r"is not a valid \w+: .*; fit it again"):
                load_calibrator(path)
        if tensor.is_floating_point():
            for value in (float("nan"), float("inf")):
                save_file({**tensors, key: torch.full_like(tensor, value)}, path, metadata=metadata)
                with pytest.raises(ValueError, match=f"{key} has values that are not finite"):
                    load_calibrator(path)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_every_setting_is_checked(name, path):
    tensors, metadata = saved(name, path)
    for key in metadata:
        for value in (None, "", "nan", "-1", "inf", "tanh", "9" * 4000):
            if key == "seed" and value == "-1":
                continue
            changed = {**metadata, key: value} if value is not None else {**metadata}
            if value is None:
                del changed[key]
            save_file(tensors, path, metadata=changed)
            with pytest.raises(ValueError, match=r"is not a valid|must hold one of"):
                load_calibrator(path)


WRONG_VALUES = {
    ("temperature", "temperature"): (0.0, 1e3),
    ("kde", "chosen_bandwidth"): (0.0, -1.0),
    ("kde", "prob"): (-0.1, 1.1),
    ("kde", "class_of"): (-1, 3),
    ("kde", "draw"): (-1, 2**32),
    ("kde", "seen"): (-1, 0),
    ("kde", "generator"): (255,),
    ("vector", "label"): (-0.1, 1.1),
    ("vector", "class_of"): (-1, 3),
    ("isotonic", "place"): (-1, 0, 3 * 65536),
    ("isotonic", "count"): (-1.0, 0.0, 1e300),
    ("isotonic", "label"): (-1.0, 1e9),
    ("isotonic", "parameters"): (-0.1, 1.1),
    ("beta", "parameters"): (-1.0,),
}


@pytest.mark.parametrize(("name", "key"), WRONG_VALUES)
def test_values_that_no_fit_gives_are_refused(name, key, path):
    tensors, metadata = saved(name, path)
    for value in WRONG_VALUES[name, key]:
        save_file({**tensors, key: torch.full_like(tensors[key], value)}, path, metadata=metadata)
        with pytest.raises(ValueError, match="is not a valid"):
            load_calibrator(path)


def test_a_decreasing_function_is_refused(path):
    tensors, metadata = saved("isotonic", path)
    save_file({**tensors, "parameters": tensors["parameters"].flip(1).contiguous()}, path, metadata=metadata)
    with pytest.raises(ValueError, match="parameters must increase"):
        load_calibrator(path)


def test_a_file_of_another_kind_is_named(path):
    save_file({"weights": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"must hold one of TemperatureScaling, .*; got no calibrator"):
        load_calibrator(path)
    save_file({"weights": torch.zeros(3)}, path, metadata={"kind": "Calibrator"})
    with pytest.raises(ValueError, match="got Calibrator"):
        load_calibrator(path)
    with pytest.raises(ValueError, match="there is no calibrator"):
        load_calibrator(path.with_name("missing"))
    for content in (b"", b"\x00" * 100, pickle.dumps({"kind": "KDECalibrator"})):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a complete file of a calibrator"):
            load_calibrator(path)


def test_a_number_in_the_file_reserves_no_memory(path):
    tensors, metadata = saved("isotonic", path)
    save_file(tensors, path, metadata=metadata | {"num_classes": "1000000000"})
    with pytest.raises(ValueError, match="num_classes must be at most"):
        load_calibrator(path)
