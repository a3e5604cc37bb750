"""Predictions replayed from a CUDA graph are those of the network."""

import pytest
import torch

from semidice.networks.build import ModelOptions, Task, build_model
from semidice.networks.checkpoint import Checkpoint, CheckpointWriter
from semidice.networks.predictor import Predictor, network_probability, recording
from semidice.networks.systems import SystemOptions, build_network

SMALL = ModelOptions("small_unet", "none", "none")


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


@pytest.mark.gpu
def test_a_graph_is_recorded_while_a_checkpoint_is_written(tmp_path):
    network = small_network("cuda")
    image = images(2, device="cuda")[0]
    # more often than PyTorch has streams
    for number in range(70):
        graph, writer = torch.cuda.CUDAGraph(), CheckpointWriter()
        writer.put(tmp_path / "last.safetensors", network, None, {"step": number})
        with recording(graph):
            network(image)
        writer.close()
        graph.replay()
        assert Checkpoint(tmp_path / "last.safetensors").progress["step"] == number
