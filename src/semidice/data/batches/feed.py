"""Batches: the input of a training step, a pure function of seed and step, made on the device.

    feed (case numbers, augmentation, rater: a few bytes)  --to the device-->  make  -->  Batch

The order of the cases is a permutation for each epoch, drawn on the CPU. It is the same on every device, for
any number of processes, and for a resumed run. `make` has static shapes, looks at no value and never waits
for the device, so it can be part of a CUDA graph. If the dataset is not in the memory of the device (see
`Storage`), a feed also carries the stored images and masks, which threads read ahead. Threads suffice,
because reading releases the interpreter; another process would have to send what it read, which takes longer
than reading. Memory then does not depend on the size of the dataset, but for what the manifest says of it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt8
from torch import Tensor

from ...arrays import one_hot
from ...errors import UserError
from .augment import (
    AugmentOptions,
    augment_image,
    draw_augmentation,
    resample,
    resample_label,
    sampling_grid,
)
from .label_making import LabelOptions, LabelTables, smooth_in_space
from .storage import Storage, centred, common_space

Item = TypeVar("Item")
Result = TypeVar("Result")

# voxels per case among which a window on the foreground chooses its centre
_NUM_MARKED = 256
# of feeds that are read ahead, if these are more than two
_MAX_AHEAD_BYTES = 2**30


class Feed(NamedTuple):
    """What one step sends to the device; its shapes are the same at every step.

    case: numbers of the cases. params: their augmentation, (N, 0) without augmentation. rater: whose mask is
    the label, if labels are drawn at random. image, packed: as stored; None if the dataset is resident.
    """

    case: Int64[Tensor, " N"]
    params: Float32[Tensor, "N params"]
    rater: Int64[Tensor, " N"]
    image: Shaped[Tensor, "N channels *space"] | None
    packed: UInt8[Tensor, "N R planes *packed"] | None

    def to(self, device: torch.device | str) -> "Feed":
        """The feed on a device; the host does not wait for a copy from pinned memory."""
        moved = (part if part is None else part.to(device, non_blocking=True) for part in self)
        return Feed(*moved)  # type: ignore[arg-type]


class Batch(NamedTuple):
    """The input of a training step: normalised images, labels that are probabilities, valid voxels.

    raters: the masks of all raters as probabilities, background if a rater did not look at the case;
    present: who looked at the case. Both are None unless `with_raters`.
    """

    image: Float32[Tensor, "N channels *space"]
    target: Float32[Tensor, "N C *space"]
    valid: Bool[Tensor, "N *space"]
    case: Int64[Tensor, " N"]
    raters: Float32[Tensor, "N R C *space"] | None = None
    present: Bool[Tensor, "N R"] | None = None


class CaseBatch(NamedTuple):
    """Whole cases for prediction and scoring: normalised images and the masks of all raters.

    `space` may be larger than a case, which then lies in its middle (`storage.centred`). Outside of a case,
    images and masks are 0 and no voxel is valid. `case` stays on the CPU, which reads it.
    """

    image: Float32[Tensor, "N channels *space"]
    masks: UInt8[Tensor, "N R *space"]
    present: Bool[Tensor, "N R"]
    valid: Bool[Tensor, "N *space"]
    case: Int64[Tensor, " N"]


class Batches:
    """Endless training batches of the cases numbered `cases`.

    batch_size: of all processes together. An epoch has as many full batches as the cases fill; if there are
    fewer cases than a batch holds, they are repeated.
    pieces: in which a step works on the batch, one after the other. Each process takes a contiguous share of
    every piece, so that the processes together work on the pieces of a single process.
    workers: threads that read ahead if the dataset is not resident; 0 reads each feed when it is needed.
    with_raters: whether a batch also has the masks of all raters.
    """

    def __init__(
        self,
        storage: Storage,
        cases: Sequence[int],
        *,
        batch_size: int,
        label: LabelOptions,
        augment: AugmentOptions | None,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        pieces: int = 1,
        workers: int = 0,
        with_raters: bool = False,
    ) -> None:
        self.storage, self.dataset, self.device = storage, storage.dataset, storage.device
        last = len(self.dataset) - 1
        if not cases or not 0 <= min(cases) <= max(cases) <= last:
            raise UserError(f"cases must be numbers from 0 to {last}, at least one; got {list(cases)}")
        if batch_size < 1 or batch_size % (pieces * world_size):
            in_pieces = "" if pieces == 1 else f" times optimiser.accumulate {pieces}"
            raise UserError(
                f"batch_size counts the cases of all {world_size} processes together and must be a multiple "
                f"of their number{in_pieces}; got {batch_size}"
            )
        if not 0 <= rank < world_size:
            raise UserError(f"rank must be from 0 to {world_size - 1}; got {rank}")
        self.cases, self.batch_size, self.augment, self.seed = tuple(cases), batch_size, augment, seed
        self.workers, self.with_raters, self.label = workers, with_raters, label
        self.out_size = storage.space if augment is None or augment.crop is None else augment.crop
        if len(self.out_size) != len(storage.space):
            raise UserError(
                f"augment.crop {self.out_size} does not fit images with {len(storage.space)} spatial axes"
            )
        self.steps_per_epoch = max(1, len(self.cases) // batch_size)
        # rows of the batch that are of this process
        self._share = np.arange(batch_size).reshape(pieces, world_size, -1)[:, rank].ravel()
        self._sizes = storage.sizes.cpu().numpy()
        self._tables = LabelTables(self.dataset, self.cases, label, device=self.device)
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None
        self._looks_for_foreground = augment is not None and augment.foreground > 0
        # of a dataset that is not resident, they are found in the masks that a feed carries
        self._marked = self._all_marked() if self._looks_for_foreground and storage.resident else None

    def feed(self, step: int) -> Feed:
        """The feed of step number `step`, on the CPU; several threads may call this at once."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order, raters = self._epoch(epoch)
        # processes draw for the whole batch and take their share, so together they see what one would see
        batch = order[step_in_epoch * self.batch_size : (step_in_epoch + 1) * self.batch_size]
        case = batch[self._share]
        image, packed = (None, None) if self.storage.resident else self.storage.read(case.tolist())
        params = np.zeros((len(batch), 0), dtype=np.float32)
        if self.augment is not None:
            params = draw_augmentation(
                self.augment,
                self._rng(1, step),
                self._sizes[batch],
                self.out_size,
                foreground=self._foreground_voxels(step, batch, packed),
            )
        return Feed(
            case=torch.from_numpy(case),
            params=torch.from_numpy(params[self._share]),
            rater=torch.from_numpy(raters[case]),
            image=image,
            packed=packed,
        )

    def feeds(self, start: int, stop: int) -> Iterator[Feed]:
        """The feeds of steps start to stop - 1, read ahead, and in pinned memory for a GPU."""
        workers = 0 if self.storage.resident else self.workers
        feed_bytes = len(self._share) * self.storage.bytes_per_case()
        num_ahead = min(2 * workers, max(2, _MAX_AHEAD_BYTES // feed_bytes))
        yield from read_ahead(self._pinned_feed, range(start, stop), workers, num_ahead)

    @torch.no_grad()
    def make(self, feed: Feed) -> Batch:
        """The batch of a feed that is on the device."""
        storage, case = self.storage, feed.case
        stored, packed = storage.stored(case, feed.image, feed.packed)
        valid = storage.valid(case)
        masks = storage.masks(packed)
        label = self._tables(masks, case, rater=feed.rater)
        image = storage.normalised(stored)
        if self.augment is None:
            image = image.mul_(valid.unsqueeze(1)) if storage.is_padded else image
        else:
            sizes, options = storage.sizes[case], self.augment
            grid, valid = sampling_grid(
                feed.params, sizes, options, space=storage.space, out_size=self.out_size
            )
            image = augment_image(
                image, grid, valid, feed.params, options, mean=storage.mean, std=storage.std
            )
            label = resample_label(label, grid, hard=self.label.is_hard)
            if self.with_raters:
                masks = resample(masks.float(), grid, hard=True)
        # without padding, smoothing need not know where an image ends
        is_whole = self.augment is None and not storage.is_padded
        label = smooth_in_space(label, self.label, None if is_whole else valid)
        if not self.with_raters:
            return Batch(image, label, valid, case)
        raters = one_hot(masks.flatten(0, 1), label.shape[1]).float().unflatten(0, masks.shape[:2])
        return Batch(image, label, valid, case, raters, self._tables.present[case])

    @torch.no_grad()
    def labels(self, batch: CaseBatch) -> Float32[Tensor, "N C *space"]:
        """Training labels of whole cases among `cases`.

        If raters are drawn at random, those of the first epoch are taken.
        """
        rater = self._epoch(0)[1][batch.case.cpu().numpy()]
        case = batch.case.to(self.device)
        label = self._tables(batch.masks, case, rater=torch.from_numpy(rater).to(self.device))
        return smooth_in_space(label, self.label, batch.valid)

    def _pinned_feed(self, step: int) -> Feed:
        feed = self.feed(step)
        if self.device.type != "cuda":
            return feed
        return Feed(*(part if part is None else part.pin_memory() for part in feed))  # type: ignore[arg-type]

    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " some"], Int64[np.ndarray, " cases"]]:
        """The order of the cases in an epoch, and a rater for each case of the dataset."""
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            rng, num_rounds = self._rng(0, epoch), math.ceil(self.batch_size / len(self.cases))
            order = np.concatenate([rng.permutation(np.array(self.cases)) for _ in range(num_rounds)])
            # returned from the local variable: another thread may replace the attribute
            self._drawn = drawn = (epoch, order, self._raters(epoch))
        return drawn[1], drawn[2]

    def _foreground_voxels(
        self, step: int, batch: np.ndarray, packed: Tensor | None
    ) -> Int64[np.ndarray, "N axes"] | None:
        """A random voxel of each case which some rater marked; None if windows do not look for them.

        packed: the masks of this process's share, unless the dataset is resident. Other cases have -1 then.
        """
        if not self._looks_for_foreground:
            return None
        chosen = self._rng(3, step).integers(_NUM_MARKED, size=len(batch))
        if self._marked is not None:
            known: np.ndarray = self._marked[batch, chosen].astype(np.int64)
            return known
        assert packed is not None
        voxels = np.full((len(batch), len(self.out_size)), -1)
        for row, masks in zip(self._share, packed.numpy(), strict=True):
            voxels[row] = self._marked_voxels(int(batch[row]), masks)[chosen[row]]
        return voxels

    def _all_marked(self) -> Int32[np.ndarray, "cases marked axes"]:
        """`_marked_voxels` of all cases."""
        marked = np.full((len(self.dataset), _NUM_MARKED, len(self.out_size)), -1, dtype=np.int32)
        for number in self.cases:
            marked[number] = self._marked_voxels(number, self.dataset.stored("masks", number))
        return marked

    def _marked_voxels(
        self, number: int, packed: UInt8[np.ndarray, "R planes *packed"]
    ) -> Int64[np.ndarray, "marked axes"]:
        """Some voxels of a case, with repetition, that a rater marked; -1 for a case without such a voxel."""
        is_marked = np.unpackbits(np.bitwise_or.reduce(packed, axis=(0, 1)), axis=-1)
        voxels = np.flatnonzero(is_marked)
        if not len(voxels):
            return np.full((_NUM_MARKED, is_marked.ndim), -1)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, 4, number))))
        drawn = voxels[rng.integers(len(voxels), size=_NUM_MARKED)]
        return np.stack(np.unravel_index(drawn, is_marked.shape), axis=1)

    def _rng(self, purpose: int, number: int) -> np.random.Generator:
        """A separate random generator for each purpose and each epoch or step."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, purpose, number))))

    def _raters(self, epoch: int) -> Int64[np.ndarray, " cases"]:
        """One of the raters of the label, with equal chances; 0 if the label does not need one."""
        present = self._tables.raters
        if self._tables.options.maker != "random":
            return np.zeros(len(present), dtype=np.int64)
        draw = self._rng(2, epoch).random((len(present), 1))
        nth = np.floor(draw * present.sum(1, keepdims=True))
        # the first rater up to whom more than nth raters are present
        rater: np.ndarray = np.argmax(present.cumsum(1) > nth, axis=1)
        return rater


@torch.no_grad()
def whole_cases(storage: Storage, cases: Sequence[int], *, batch_size: int) -> Iterator[CaseBatch]:
    """The cases numbered `cases` in that order, `batch_size` at a time; the last batch may be smaller.

    All images are padded on all sides to the common size of these cases.
    """
    present = torch.from_numpy(storage.dataset.present).to(storage.device)
    shapes = [storage.dataset.cases[number].shape for number in cases]
    space = common_space(shapes) if shapes else storage.space
    groups = [list(cases[start : start + batch_size]) for start in range(0, len(cases), batch_size)]
    read = storage.read if not storage.resident else lambda _: (None, None)
    for numbers, parts in zip(groups, read_ahead(read, groups, 0 if storage.resident else 1), strict=True):
        case = torch.tensor(numbers).to(storage.device, non_blocking=True)
        image, packed = (None if part is None else part.to(storage.device) for part in parts)
        stored, packed = storage.stored(case, image, packed)
        valid = torch.ones(len(numbers), 1, *storage.space, dtype=torch.bool, device=storage.device)
        yield CaseBatch(
            image=_centred(storage, storage.normalised(stored), numbers, space),
            masks=_centred(storage, storage.masks(packed), numbers, space),
            present=present[case],
            valid=_centred(storage, valid, numbers, space)[:, 0],
            case=torch.tensor(numbers),
        )


def _centred(
    storage: Storage, tensor: Shaped[Tensor, "N any *stored"], cases: Sequence[int], space: Sequence[int]
) -> Tensor:
    """Cases moved from the corner to the middle; 0 around them."""
    shapes = [storage.dataset.cases[number].shape for number in cases]
    if all(shape == space == storage.space for shape in shapes):
        return tensor
    moved = tensor.new_zeros(*tensor.shape[:2], *space)
    for target, source, shape in zip(moved, tensor, shapes, strict=True):
        corner = tuple(slice(side) for side in shape)
        target[(slice(None), *centred(shape, space))] = source[(slice(None), *corner)]
    return moved


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], workers: int, num_ahead: int = 1
) -> Iterator[Result]:
    """`read` of each item in their order, `num_ahead` of them by threads before they are asked for."""
    if workers == 0:
        yield from map(read, items)
        return
    pool = ThreadPoolExecutor(workers)
    remaining = iter(items)
    try:
        ahead = deque(pool.submit(read, item) for item in islice(remaining, num_ahead))
        while ahead:
            result = ahead.popleft().result()
            ahead.extend(pool.submit(read, item) for item in islice(remaining, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
