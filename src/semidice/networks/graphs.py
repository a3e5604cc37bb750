"""CUDA graphs: work on a GPU that is recorded once and replayed, without the time that Python needs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .systems import network_probability

# values of a batch: the time of a larger one is that of the GPU, and a graph keeps memory of its own
_MAX_REPLAYED = 1 << 22


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record the block, without running it; other threads may use the GPU, to write a checkpoint."""
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield


class Predictor:
    """`network_probability` of one network; on a GPU, small batches of the first batch's shape are replayed.

    The first batch is not recorded: libraries choose their algorithms. The weights may change between calls,
    in place. flips: see `network_probability`.
    """

    def __init__(self, network: nn.Module, *, dtype: str, flips: Sequence[int] = ()) -> None:
        self.network, self.dtype, self.flips = network, dtype, tuple(flips)
        self._shape: torch.Size | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        # input and output of the graph
        self._image = self._prob = torch.empty(0)

    def __call__(self, image: Tensor) -> Tensor:
        """Class probabilities of normalised images. The network is left in eval mode."""
        is_first = self._shape is None
        if is_first:
            self._shape = image.shape
        is_small = image.device.type == "cuda" and image.numel() <= _MAX_REPLAYED
        if is_first or not is_small or image.shape != self._shape:
            return self._probability(image)
        self.network.eval()
        if self._graph is None:
            self._graph, self._image = torch.cuda.CUDAGraph(), torch.empty_like(image)
            with recording(self._graph):
                self._prob = self._probability(self._image)
        self._image.copy_(image)
        self._graph.replay()
        # the graph writes to the same memory the next time
        return self._prob.clone()

    def _probability(self, image: Tensor) -> Tensor:
        return network_probability(self.network, image, dtype=self.dtype, flips=self.flips)
