"""Batches: the input of a training step, a pure function of seed and step, made on the device.

    feed (case numbers, augmentation, rater: a few bytes)  --to the device-->  make  -->  Batch

The order of the cases is a permutation for each epoch, drawn on the CPU. It is the same on every device, for
any number of processes, and for a resumed run. `make` has static shapes, looks at no value and never waits
for the device, so it can be part of a CUDA graph. If the dataset is not in the memory of the device (see
`Storage`), a feed also carries the stored images and masks, which threads read ahead. Threads suffice,
because reading releases the interpreter; another process would have to send what it read, which takes longer
than reading. Memory then does not depend on the size of the dataset, but for what the manifest says of it
(and 1 KB per case if windows look for the foreground).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt8
from torch import Tensor

from ...arrays import one_hot
from ...errors import UserError
from ..intensities import MeanStd
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

    `space` may be larger than a case, which then lies in its middle, at its entry of `places`. Outside of a
    case, images and masks are 0 and no voxel is valid. `case` stays on the CPU, which reads it.
    """

    image: Float32[Tensor, "N channels *space"]
    masks: UInt8[Tensor, "N R *space"]
    present: Bool[Tensor, "N R"]
    valid: Bool[Tensor, "N *space"]
    case: Int64[Tensor, " N"]
    places: tuple[tuple[slice, ...], ...]


@dataclass(frozen=True)
class BatchOptions:
    """What a batch holds, and the seed that draws it.

    batch_size: of all processes together. with_raters: whether a batch also has the masks of all raters.
    """

    batch_size: int
    label: LabelOptions = field(default_factory=LabelOptions)
    augment: AugmentOptions | None = None
    seed: int = 0
    with_raters: bool = False


@dataclass(frozen=True)
class Share:
    """The part of each batch that one of several processes makes.

    pieces: in which a step works on the batch, one after the other. Each process takes a contiguous share of
    every piece, so that the processes together work on the pieces of a single process.
    """

    rank: int = 0
    world_size: int = 1
    pieces: int = 1

    def rows(self, batch_size: int) -> Int64[np.ndarray, " rows"]:
        """The rows of the batch that are of this process."""
        if batch_size < 1 or batch_size % (self.pieces * self.world_size):
            in_pieces = "" if self.pieces == 1 else f" times optimiser.accumulate {self.pieces}"
            raise UserError(
                f"batch_size counts the cases of all {self.world_size} processes together and must be a "
                f"multiple of their number{in_pieces}; got {batch_size}"
            )
        rows: np.ndarray = np.arange(batch_size).reshape(self.pieces, self.world_size, -1)[:, self.rank]
        return rows.ravel()


ONE_PROCESS = Share()


class Batches:
    """Endless training batches of the cases numbered `cases`.

    An epoch has as many full batches as the cases fill; if there are fewer cases than a batch holds, they are
    repeated.
    mean_std: of the training cases, to normalise images with.
    workers: threads that read ahead if the dataset is not resident; 0 reads each feed when it is needed.
    """

    def __init__(
        self,
        storage: Storage,
        cases: Sequence[int],
        mean_std: MeanStd,
        options: BatchOptions,
        share: Share = ONE_PROCESS,
        workers: int = 0,
    ) -> None:
        self.storage, self.dataset, self.device = storage, storage.dataset, storage.device
        last = len(self.dataset) - 1
        if not cases or not 0 <= min(cases) <= max(cases) <= last:
            raise UserError(f"cases must be numbers from 0 to {last}, at least one; got {list(cases)}")
        self.cases, self.options, self.workers = tuple(cases), options, workers
        self.batch_size, augment = options.batch_size, options.augment
        self.out_size = storage.space if augment is None or augment.crop is None else augment.crop
        if len(self.out_size) != len(storage.space):
            raise UserError(
                f"augment.crop {self.out_size} does not fit images with {len(storage.space)} spatial axes"
            )
        self.steps_per_epoch = max(1, len(self.cases) // self.batch_size)
        self._rows = share.rows(self.batch_size)
        self._sizes = storage.sizes.cpu().numpy()
        self._normalised = storage.normaliser(mean_std)
        self._tables = LabelTables(self.dataset, self.cases, options.label, device=self.device)
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None
        # voxels that some rater marked, as positions in the flattened case
        self._marked: dict[int, Int32[np.ndarray, " marked"]] = {}

    def feed(self, step: int) -> Feed:
        """The feed of step number `step`, on the CPU; several threads may call this at once."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order, raters = self._epoch(epoch)
        # processes draw for the whole batch and take their share, so together they see what one would see
        batch = order[step_in_epoch * self.batch_size : (step_in_epoch + 1) * self.batch_size]
        case = batch[self._rows]
        image, packed = self.storage.read(case.tolist())
        params = np.zeros((len(batch), 0), dtype=np.float32)
        augment = self.options.augment
        if augment is not None:
            voxels = self._foreground_voxels(step, batch) if augment.foreground > 0 else None
            sizes = self._sizes[batch]
            params = draw_augmentation(augment, self._rng(1, step), sizes, self.out_size, foreground=voxels)
        return Feed(
            case=torch.from_numpy(case),
            params=torch.from_numpy(params[self._rows]),
            rater=torch.from_numpy(raters[case]),
            image=image,
            packed=packed,
        )

    def feeds(self, start: int, stop: int) -> Iterator[Feed]:
        """The feeds of steps start to stop - 1, read ahead, and in pinned memory for a GPU."""
        workers = 0 if self.storage.resident else self.workers
        feed_bytes = len(self._rows) * self.storage.bytes_per_case()
        num_ahead = min(2 * workers, max(2, _MAX_AHEAD_BYTES // feed_bytes))
        yield from read_ahead(self._pinned_feed, range(start, stop), workers, num_ahead)

    @torch.no_grad()
    def make(self, feed: Feed) -> Batch:
        """The batch of a feed that is on the device."""
        storage, case, options = self.storage, feed.case, self.options
        stored, packed = storage.stored(case, feed.image, feed.packed)
        valid = storage.valid(case)
        masks = storage.masks(packed)
        label = self._tables(masks, case, rater=feed.rater)
        image = self._normalised(stored)
        if options.augment is None:
            image = image.mul_(valid.unsqueeze(1)) if storage.is_padded else image
        else:
            grid, valid = sampling_grid(
                feed.params, storage.sizes[case], options.augment, space=storage.space, out_size=self.out_size
            )
            mean, std = self._normalised.mean, self._normalised.std
            image = augment_image(image, grid, valid, feed.params, options.augment, mean=mean, std=std)
            label = resample_label(label, grid, hard=options.label.is_hard)
            if options.with_raters:
                masks = resample(masks.float(), grid, hard=True)
        # without padding, smoothing need not know where an image ends
        is_whole = options.augment is None and not storage.is_padded
        label = smooth_in_space(label, options.label, None if is_whole else valid)
        if not options.with_raters:
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
        return smooth_in_space(label, self.options.label, batch.valid)

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

    def _foreground_voxels(self, step: int, batch: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, "N axes"]:
        """A random voxel of each case that some rater marked; -1 without one, or if not of this process."""
        chosen = self._rng(3, step).integers(_NUM_MARKED, size=len(batch))
        voxels = np.full((len(batch), len(self.out_size)), -1)
        for row in self._rows:
            number = int(batch[row])
            marked = self._marked_voxels(number)
            if len(marked):
                voxels[row] = np.unravel_index(marked[chosen[row]], self.dataset.cases[number].shape)
        return voxels

    def _marked_voxels(self, number: int) -> Int32[np.ndarray, " marked"]:
        """Some voxels of a case, with repetition, that a rater marked; found once, when first needed."""
        if number not in self._marked:
            packed = np.bitwise_or.reduce(self.dataset.stored("masks", number), axis=(0, 1))
            width = self.dataset.cases[number].shape[-1]
            voxels = np.flatnonzero(np.unpackbits(packed, axis=-1, count=width))
            chosen = self._rng(4, number).integers(len(voxels), size=_NUM_MARKED) if len(voxels) else slice(0)
            self._marked[number] = voxels[chosen].astype(np.int32)
        return self._marked[number]

    def _rng(self, purpose: int, number: int) -> np.random.Generator:
        """A separate random generator for each purpose and each epoch or step."""
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self.options.seed, purpose, number)))
        )

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
def whole_cases(
    storage: Storage, cases: Sequence[int], mean_std: MeanStd, *, batch_size: int
) -> Iterator[CaseBatch]:
    """The cases numbered `cases` in that order, `batch_size` at a time; the last batch may be smaller.

    mean_std: to normalise images with. All images are padded on all sides to the common size of these cases.
    """
    present, normalised = torch.from_numpy(storage.dataset.present), storage.normaliser(mean_std)
    shapes = [storage.dataset.cases[number].shape for number in cases]
    space = common_space(shapes) if shapes else storage.space
    groups = [list(cases[start : start + batch_size]) for start in range(0, len(cases), batch_size)]
    all_parts = read_ahead(storage.read, groups, 0 if storage.resident else 1)
    for numbers, parts in zip(groups, all_parts, strict=True):
        case = torch.tensor(numbers)
        on_device = case.to(storage.device, non_blocking=True)
        stored, packed = storage.stored(
            on_device, *(None if part is None else part.to(storage.device) for part in parts)
        )
        sizes = [storage.dataset.cases[number].shape for number in numbers]
        whole = partial(_centred, shapes=sizes, space=space)
        yield CaseBatch(
            image=whole(normalised(stored)),
            masks=whole(storage.masks(packed)),
            present=present[case].to(storage.device),
            valid=whole(storage.valid(on_device).unsqueeze(1))[:, 0],
            case=case,
            places=tuple(centred(size, space) for size in sizes),
        )


def _centred(
    tensor: Shaped[Tensor, "N any *stored"], shapes: Sequence[tuple[int, ...]], space: tuple[int, ...]
) -> Tensor:
    """Cases of these shapes moved from the corner to the middle of `space`; 0 around them."""
    if all(shape == space == tensor.shape[2:] for shape in shapes):
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
