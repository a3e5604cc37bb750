"""Probabilities of batches, cases and windows: softmax, mean over mirrored images, replayed graphs."""

import numpy as np
import pytest
import torch
from prepared import make_prepared
from start import refused
from torch import nn

from semidice.data.batches.feed import whole_cases
from semidice.data.batches.storage import Storage
from semidice.networks.build import ModelOptions, Task, build_model
from semidice.networks.predictor import Predictor, network_probability
from semidice.networks.systems import SystemOptions, build_network
from semidice.networks.windows import windowed_probability

SMALL = ModelOptions("small_unet", "none", "none", {"channels": [8, 16]})
SYSTEMS = ["standard", "mc_dropout", "multi_head", "softseg"]
# mirrored axes of space, and those of each image (N, C, H, W) of the mean
AXES = {"both": ((0, 1), [(), (2,), (3,), (2, 3)]), "columns": ((1,), [(), (3,)])}


def small_network(device="cpu"):
    torch.manual_seed(0)
    return build_model(SMALL, Task(1, 2)).to(device)


def images(*sizes, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 1, 64, 64, generator=generator).to(device) for size in sizes]


@pytest.mark.parametrize("flips", [(), (0, 1)])
def test_a_predictor_is_the_probability_of_the_network(flips):
    network = small_network()
    predictor = Predictor(network, dtype="fp32", flips=flips)
    for image in images(3, 3, 2, 3):
        expected = network_probability(network, image, dtype="fp32", flips=flips)
        assert torch.equal(predictor(image), expected)


def test_the_probability_of_a_case_is_cut_out_of_its_batch(tmp_path):
    dataset = make_prepared(tmp_path / "set", num_cases=5, sizes=[(20, 33), (40, 17)])
    storage, mean_std = Storage(dataset, "cpu", resident=False), dataset.mean_std(range(5))
    network = nn.Conv2d(1, 2, 1)
    batches = whole_cases(storage, [4, 0, 3], mean_std, batch_size=2)
    found = dict(Predictor(network, dtype="fp32").cases(batches))
    assert list(found) == [4, 0, 3]
    for number, prob in found.items():
        image = (torch.from_numpy(dataset.image(number)) - mean_std.mean[0]) / mean_std.std[0]
        torch.testing.assert_close(prob, network(image[None]).softmax(1)[0].detach())


def test_probability_is_softmax_of_the_logits_without_gradient():
    module = nn.Conv2d(1, 3, 1).train()
    image = torch.randn(2, 1, 4, 4)
    prob = network_probability(module, image, dtype="fp32")
    assert not module.training
    assert not prob.requires_grad
    torch.testing.assert_close(prob, module(image).softmax(1))
    half = network_probability(module, image, dtype="bf16")
    assert half.dtype == torch.float32
    # bfloat16 keeps eight bits of a logit
    torch.testing.assert_close(half, prob, atol=2e-2, rtol=0)
    assert not torch.equal(half, prob)
    with pytest.raises(ValueError, match="fp32, bf16, fp16; got 'float'"):
        network_probability(module, image, dtype="float")


def network_of(system="standard"):
    torch.manual_seed(0)
    return build_network(SMALL, SystemOptions(system, num_samples=3), Task(1, 3, 2), seed=0)


def random_image(*space):
    return torch.randn(2, 1, *space, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_mirrored_image_has_exactly_the_mirrored_probability(system, dtype):
    network, image = network_of(system), random_image(32, 64)
    prob = network_probability(network, image, dtype=dtype, flips=(0, 1))
    assert prob.dtype == torch.float32
    torch.testing.assert_close(prob.sum(1), torch.ones(2, 32, 64))
    plain = network_probability(network, image, dtype=dtype)
    for axes in AXES["both"][1][1:]:
        mirrored = image.flip(axes)
        assert torch.equal(network_probability(network, mirrored, dtype=dtype, flips=(0, 1)), prob.flip(axes))
        assert not torch.equal(network_probability(network, mirrored, dtype=dtype), plain.flip(axes))


def test_volumes_are_mirrored_along_three_axes():
    torch.manual_seed(0)
    network, image = nn.Conv3d(1, 2, 3, padding=1), random_image(4, 5, 6)
    flips = (0, 1, 2)
    prob = network_probability(network, image, dtype="fp32", flips=flips)
    for axes in [(2,), (3,), (4,), (2, 4), (2, 3, 4)]:
        assert torch.equal(
            network_probability(network, image.flip(axes), dtype="fp32", flips=flips), prob.flip(axes)
        )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", AXES)
def test_the_probability_is_the_mean_over_mirrored_images(name, system):
    network, image = network_of(system), random_image(32, 32)
    flips, mirrors = AXES[name]
    probs = []
    for axes in mirrors:
        mirrored = torch.from_numpy(np.flip(image.numpy(), axes).copy())
        probs.append(np.flip(network_probability(network, mirrored, dtype="fp32").numpy(), axes))
    prob = network_probability(network, image, dtype="fp32", flips=flips)
    np.testing.assert_allclose(prob.numpy(), np.mean(probs, 0, dtype=np.float64), atol=1e-6)
    assert np.abs(prob.numpy() - probs[0]).max() > 1e-3


def test_images_are_padded_with_zeros_on_all_sides_and_cropped_after_prediction():
    batches = []

    def network(image):
        batches.append(image)
        return image

    image = torch.rand(2, 1, 33, 40) + 1
    prob = windowed_probability(network, image, device="cpu", window=None, batch_size=2)
    torch.testing.assert_close(prob, image)
    assert batches[0].shape == (2, 1, 64, 64)
    assert torch.equal(batches[0][:, :, 16:49, 12:52], image)
    assert (batches[0] != 0).sum() == image.numel()


def pointwise(image: torch.Tensor) -> torch.Tensor:
    return torch.cat([image.sigmoid(), (-image).sigmoid()], 1)


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((96, 96), 64),
        ((97, 130), 64),
        ((50, 200), 64),
        ((70, 300), (96, 64)),
        ((33, 70, 40), (64, 32, 32)),
        ((100,), 64),
    ],
)
def test_windows_give_the_same_as_the_full_image_for_a_pointwise_network(size, window):
    image, spaces = torch.randn(2, 1, *size), []

    def network(batch):
        spaces.append(batch.shape[2:])
        assert len(batch) <= 3
        return pointwise(batch)

    prob = windowed_probability(network, image, device="cpu", window=window, batch_size=3)
    torch.testing.assert_close(prob, pointwise(image))
    limits = (window,) * len(size) if isinstance(window, int) else window
    assert all(side <= limit for space in spaces for side, limit in zip(space, limits, strict=True))
    assert len(spaces) > 1


def test_an_image_that_fits_into_the_window_is_predicted_at_once():
    torch.manual_seed(1)
    blur = nn.Conv2d(1, 2, 9, padding=4)
    image = torch.randn(1, 1, 64, 50)
    with torch.no_grad():
        prob = windowed_probability(lambda batch: blur(batch).softmax(1), image, device="cpu", window=64)
        expected = blur(nn.functional.pad(image, (7, 7))).softmax(1)[..., 7:57]
    assert torch.equal(prob, expected)


def test_a_window_must_fit_the_network():
    image = torch.randn(1, 1, 64, 64)
    refused(lambda: windowed_probability(pointwise, image, device="cpu", window=50), "multiple of 32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("system", ["standard", "mc_dropout"])
def test_a_replayed_prediction_is_that_of_the_network_also_after_its_weights_changed(dtype, system):
    network = build_network(SMALL, SystemOptions(system, num_samples=3), Task(1, 2), seed=0).cuda()
    predictor = Predictor(network, dtype=dtype)
    kept = []
    for image in images(3, 3, 2, 3, 3, device="cuda"):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.1)
        network.train()
        kept.append((predictor(image), network_probability(network, image, dtype=dtype)))
        assert not network.training
    # none of them was overwritten by a later replay
    for actual, expected in kept:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 if dtype == "fp32" else 1e-2)
