"""Images to class probabilities: by one network, over mirrored images, and replayed from a CUDA graph.

A CUDA graph is work on a GPU that is recorded once and replayed, without the time that Python needs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from ..data.batches.feed import CaseBatch
from ..errors import UserError
from .systems import DTYPES, System

# values of a batch: the time of a larger one is that of the GPU, and a graph keeps memory of its own
_MAX_REPLAYED = 1 << 22


def network_probability(
    network: nn.Module,
    image: Float[Tensor, "N channels *space"],
    *,
    dtype: str,
    flips: Sequence[int] = (),
) -> Float32[Tensor, "N C *space"]:
    """Class probabilities of normalised images: `System.probability`, or the softmax of the logits.

    The network is left in eval mode. dtype: of the network, fp32, bf16 or fp16; the softmax is in float32.
    flips: axes of space, 0, 1, ... The result is the mean over the image mirrored along each combination of
    them, mirrored back; d axes cost 2^d predictions, one after the other.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    network.eval()
    return _mean_over_flips(
        lambda mirrored: _unflipped_probability(network, mirrored, dtype=dtype),
        image,
        [axis + 2 for axis in flips],
    )


def _mean_over_flips(predictor: Callable[[Tensor], Tensor], image: Tensor, axes: Sequence[int]) -> Tensor:
    if not axes:
        return predictor(image)
    first, *others = axes
    prob = _mean_over_flips(predictor, image, others)
    mirrored = _mean_over_flips(predictor, image.flip(first), others).flip(first)
    # in pairs: a sum of two does not depend on their order, so a mirrored image gives the same bits
    return (prob + mirrored) / 2


def _unflipped_probability(network: nn.Module, image: Tensor, *, dtype: str) -> Tensor:
    precision = DTYPES[dtype]
    with torch.no_grad(), torch.autocast(image.device.type, precision, enabled=precision != torch.float32):
        if isinstance(network, System):
            return network.probability(image)
        logits = network(image)
    return logits.float().softmax(1)  # type: ignore[no-any-return]


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

    def cases(self, batches: Iterable[CaseBatch]) -> Iterator[tuple[int, Float32[Tensor, "C *space"]]]:
        """The number and the class probabilities of each case, on its device.

        The device computes one batch ahead of the one that is used.
        """
        previous: tuple[CaseBatch, Tensor] | None = None
        for batch in chain(batches, [None]):
            probs = None if batch is None else (batch, self(batch.image))
            if previous is not None:
                before, padded = previous
                for number, prob, place in zip(before.case.tolist(), padded, before.places, strict=True):
                    yield number, prob[(slice(None), *place)]
            previous = probs

    def _probability(self, image: Tensor) -> Tensor:
        return network_probability(self.network, image, dtype=self.dtype, flips=self.flips)
