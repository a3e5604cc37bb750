"""`semidice export`: the file gives the probabilities of `semidice predict`."""

import json
import re
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from prepared import make_prepared
from start import refused
from start import semidice as command
from trained import make_run, write_network

import semidice
from semidice.integrations import onnx as export
from semidice.networks.predictor import network_probability
from semidice.recipes import Recipe, write_recipe
from semidice.runs.run import open_run

pytestmark = [
    pytest.mark.integrations,
    # torch's exporters warn of their own parts
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
ROOT = Path(__file__).parent.parent.parent
UNET = {"architecture": "unet", "encoder": "resnet18", "weights": "none", "options": {}}
SMALL = {"architecture": "small_unet", "encoder": "none", "weights": "none", "options": {"channels": [8, 16]}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_prepared(
        tmp_path_factory.mktemp("data") / "phantom",
        num_cases=4,
        size=(40, 70),
        cases_per_patient=1,
        num_classes=3,
    )


def new_run(path, dataset, model, *, system="standard", **changes):
    """A run of two folds with random networks; their batch norms have statistics other than 0 and 1."""
    folder = make_run(path, dataset, scored=False, options={"window": [0, 32767]})
    options = open_run(folder).recipe.model_dump(mode="json") | {"model": model, **changes}
    options["system"] |= {"name": system, "num_samples": 2}
    write_recipe(Recipe.model_validate(options), folder.recipe)
    run = open_run(folder)
    for fold in (0, 1):
        torch.manual_seed(fold)
        network = run.new_network().train()
        with torch.no_grad():
            for _ in range(3):
                network(torch.randn(4, 1, 64, 64) + 1)
        write_network(folder, fold, network.eval())
    return folder


def done(*arguments):
    """What a command prints that must end well."""
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    return " ".join(ended.out.split())


def in_onnxruntime(path, image):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["prob"], {"image": image})[0], session.get_modelmeta().custom_metadata_map


def in_torch(path, image):
    facts = {"semidice.json": ""}
    program = torch.export.load(path, extra_files=facts)
    return program.module()(torch.from_numpy(image)).numpy(), json.loads(facts["semidice.json"])


@pytest.mark.parametrize(
    ("model", "suffix", "opened", "folds"),
    [
        (SMALL, ".onnx", in_onnxruntime, [0, 1]),
        (UNET, ".onnx", in_onnxruntime, [1]),
        (UNET, ".pt2", in_torch, [0, 1]),
    ],
    ids=["small_unet_onnx", "unet_onnx", "unet_pt2"],
)
def test_the_file_gives_the_probabilities_of_predict(dataset, tmp_path, model, suffix, opened, folds):
    folder, path = new_run(tmp_path / "run", dataset, model), tmp_path / f"model{suffix}"
    fold = ["--fold", *folds] if len(folds) == 1 else []
    text = done("export", folder.path, "-o", path, *fold)
    found = re.findall(r"largest difference to `semidice predict` on (.*?): (\S+)", text)
    assert [name for name, _ in found] == ["a random image of 70x64", "a random image of 64x131"]
    assert all(float(value) <= 1e-4 for _, value in found)
    # values that the window of the dataset maps to [0, 1] without rounding
    volume = np.random.default_rng(1).integers(0, 32768, (75, 90, 5)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "scan.nii.gz")
    done("predict", folder.path, tmp_path / "scan.nii.gz", "-o", tmp_path / "out", *fold)
    expected = nibabel.load(tmp_path / "out" / "scan_prob.nii.gz").get_fdata()
    prob, facts = opened(path, np.moveaxis(volume, 2, 0)[:, None].astype(np.float32) / 32767)
    assert prob.dtype == np.float32
    np.testing.assert_allclose(prob, np.transpose(expected, (2, 3, 0, 1)), rtol=0, atol=1e-4)
    assert np.ptp(prob) > 0.2
    assert json.loads(facts["classes"]) == ["background", "class1", "class2"]
    assert facts["semidice"] == semidice.__version__
    assert json.loads(facts["folds"]) == folds
    assert json.loads(facts["prepare"])["window"] == [0, 32767]


@pytest.mark.parametrize("system", ["mc_dropout", "multi_head", "softseg", "mrnet", "learned_reliability"])
def test_every_comparison_system_is_exported_for_any_batch_and_size(dataset, tmp_path, system):
    folder = new_run(tmp_path / "run", dataset, SMALL, system=system)
    differences = export.export_run(open_run(folder), [0], tmp_path / "model.onnx")
    assert max(differences.values()) <= 1e-4
    # the command compared on single images
    image = np.random.default_rng(0).random((3, 1, 40, 33), dtype=np.float32)
    prob, _ = in_onnxruntime(tmp_path / "model.onnx", image)
    single = [in_onnxruntime(tmp_path / "model.onnx", image[n : n + 1])[0][0] for n in range(3)]
    np.testing.assert_allclose(prob, single, rtol=0, atol=1e-5)


def test_flips_are_inside(dataset, tmp_path):
    folder = new_run(tmp_path / "run", dataset, SMALL)
    run, image = open_run(folder), np.random.default_rng(0).random((1, 1, 64, 64), dtype=np.float32)
    for name, flips in (("plain", False), ("flips", True)):
        export.export_run(run, [0], tmp_path / f"{name}.onnx", flips=flips)
    mirrored = [image, image[..., ::-1], image[..., ::-1, :], image[..., ::-1, ::-1]]
    plain = [in_onnxruntime(tmp_path / "plain.onnx", np.ascontiguousarray(each))[0] for each in mirrored]
    back = [plain[0], plain[1][..., ::-1], plain[2][..., ::-1, :], plain[3][..., ::-1, ::-1]]
    prob, _ = in_onnxruntime(tmp_path / "flips.onnx", image)
    np.testing.assert_allclose(prob, np.mean(back, axis=0), rtol=0, atol=1e-6)
    assert np.abs(prob - plain[0]).max() > 1e-3


def test_a_file_that_differs_is_not_written(dataset, tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run", dataset, SMALL)
    of_fold = export.Exportable.__init__

    def shifted(self, run, folds, **options):
        of_fold(self, run, folds, **options)
        self.mean += 0.05

    monkeypatch.setattr(export.Exportable, "__init__", shifted)
    made = command("export", folder.path, "--fold", 0, "-o", tmp_path / "model.pt2")
    refused(made, "differs from `semidice predict` by")
    assert not list(tmp_path.glob("*model*"))


def test_a_fixed_size_is_asked_for_where_the_network_needs_it(dataset, tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run", dataset, SMALL)
    monkeypatch.setattr(export, "network_probability", needs_64_pixels)
    arguments = ("export", folder.path, "--fold", 0, "-o", tmp_path / "model.pt2")
    refused(command(*arguments), "this network cannot be exported", "--size 256x256")
    assert "a random image of 40x60" in done(*arguments, "--size", "40x60")
    prob, _ = in_torch(tmp_path / "model.pt2", np.zeros((3, 1, 40, 60), dtype=np.float32))
    assert prob.shape == (3, 3, 40, 60)


def needs_64_pixels(network, image, **options):
    """A probability that is made for padded images of 64 x 64 alone, as with learned positions."""
    return network_probability(network, image + torch.zeros(64, 64), **options)


def test_the_example_of_the_page_runs_and_a_calibrator_is_mentioned(dataset, tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run", dataset, SMALL)
    folder.calibrator.write_bytes(b"")
    assert "calibrator of" in done("export", folder.path, "-o", tmp_path / "model.onnx")
    (example,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), flags=re.DOTALL)
    scope = {}
    monkeypatch.chdir(tmp_path)
    exec(example, scope)
    assert scope["prob"].shape == (2, 3, 70, 95)
    assert json.loads(scope["facts"]["channels"]) == ["channel0"]
