"""The script that compares two checkouts must be able to find a difference."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

_PATH = Path(__file__).parents[1] / "benchmarks" / "compare_checkouts.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_checkouts", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folders(tmp_path):
    """Two folders that hold the same: a text, NaN in an array, and a calibrator's kind of file."""
    for side in ("old", "new"):
        folder = tmp_path / side
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "recipe.yaml").write_text("name: quick\nseed: 0\n")
        np.savez(folder / "values.npz", loss=np.array([0.5, np.nan]), none=np.array([]))
        _write_tensors(folder / "weights.safetensors", {"kind": "a", "seed": "0"}, b"\x00\x01")
    return tmp_path / "old", tmp_path / "new"


def _write_tensors(path, metadata, data):
    header = {"__metadata__": metadata, "w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    text = repr(header).replace("'", '"').encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_same_folders_have_no_difference(script, folders):
    # recipe.yaml, two arrays with a NaN in one, a header and a tensor
    assert script.compare_folders(*folders) == (3, 5, [])


def test_changed_byte_is_shown(script, folders):
    (folders[1] / "run" / "recipe.yaml").write_text("name: quick\nseed: 1\n")
    _, _, (line,) = script.compare_folders(*folders)
    assert line.startswith("run/recipe.yaml: bytes: byte 18: was ")
    assert "seed: 0" in line
    assert "seed: 1" in line


def test_missing_and_extra_files_are_named(script, folders):
    (folders[1] / "run" / "recipe.yaml").rename(folders[1] / "run" / "other.yaml")
    _, _, lines = script.compare_folders(*folders)
    assert lines == ["run/other.yaml: was not there before", "run/recipe.yaml: is missing now"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": np.array([0.5, 0.25]), "none": np.array([])}, "loss: value 1: was nan, is 0.25"),
        ({"loss": np.array([0.5]), "none": np.array([])}, "loss: was float64 (2,), is float64 (1,)"),
        ({"loss": np.array([0.5, np.nan])}, "none: is missing now"),
    ],
)
def test_changed_value_is_shown(script, folders, values, expected):
    np.savez(folders[1] / "values.npz", **values)
    assert script.compare_folders(*folders)[2] == [f"values.npz: {expected}"]


def test_last_bit_and_sign_of_zero_count(script):
    for old, new in ((1.0, np.nextafter(1.0, 2)), (0.0, -0.0)):
        assert script.first_difference(np.array(old), np.array(new)).startswith("value 0: was ")
    assert script.first_difference(np.array(np.nan), np.array(np.nan)) is None


def test_order_of_metadata_does_not_count_but_tensors_do(script, folders):
    _write_tensors(folders[1] / "weights.safetensors", {"seed": "0", "kind": "a"}, b"\x00\x01")
    assert script.compare_folders(*folders)[2] == []
    _write_tensors(folders[1] / "weights.safetensors", {"seed": "0", "kind": "a"}, b"\x00\x02")
    assert script.compare_folders(*folders)[2][0].startswith("weights.safetensors: w: byte 1: was ")


def test_files_that_differ_between_equal_runs_are_skipped(script, folders):
    (folders[1] / "run" / "versions.json").write_text("{}")
    (folders[1] / "run" / "events.out.tfevents.1.host").write_text("")
    assert script.compare_folders(*folders)[2] == []


def test_record_tells_types_and_large_arrays_apart(script):
    def raising():
        raise ValueError("how it is said may change")

    records = [script.Record() for _ in range(2)]
    for record, last in zip(records, (0, 1), strict=True):
        large = torch.zeros(script.LARGEST + 2, dtype=torch.bfloat16)
        # not among the values that are kept of a large array
        large[-1] = last
        record.put("large", {"gradient": large})
        record.attempt("refused", raising)
    old, new = (record.values for record in records)
    assert [name for name in old if script.first_difference(old[name], new[name])] == [
        "large.gradient <Tensor torch.bfloat16> SHA-256"
    ]
    assert bytes(old["refused <str >"]) == b"raised ValueError"
