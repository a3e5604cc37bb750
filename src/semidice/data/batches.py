"""Batches: what a training step needs, as a pure function of seed and step, made on the device.

    feed (case numbers, augmentation, rater: a few bytes)  --to the device-->  make  -->  Batch

The order of cases is a permutation for each epoch, drawn on the CPU and the same on every device, for every
number of processes and for a run that was resumed. `make` has static shapes, looks at no value and waits for
nothing, so it can be part of a CUDA graph. Where the dataset does not fit on the device (see `Storage`), a
feed also carries the stored images and masks. Threads read them ahead: copying from a mapped file leaves the
interpreter free, and another process would have to hand over what it read, which takes longer than reading.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int64, Shaped, UInt8
from torch import Tensor

from ..arrays import SIZE_MULTIPLE
from .augment import AugmentOptions, augment, draw_augmentation
from .dataset import Dataset
from .label_making import LabelOptions, LabelTables
from .storage import CaseReader, Storage, common_space, inside


class Feed(NamedTuple):
    """What travels to the device for one step; the shapes are the same at every step.

    case: which cases. params: their augmentation, (N, 0) without. rater: whose drawing each label is, if
    labels are drawn at random. image, packed: as stored, None where the dataset is on the device.
    """

    case: Int64[Tensor, " N"]
    params: Float32[Tensor, "N params"]
    rater: Int64[Tensor, " N"]
    image: Shaped[Tensor, "N channels *space"] | None
    packed: UInt8[Tensor, "N R planes *packed"] | None

    def to(self, device: torch.device | str) -> "Feed":
        """The same on a device; the host goes on while pinned memory is copied."""
        moved = (part if part is None else part.to(device, non_blocking=True) for part in self)
        return Feed(*moved)  # type: ignore[arg-type]


class Batch(NamedTuple):
    """What a network is trained on: normalised images, labels that are probabilities, voxels that count.

    raters: what each of them drew, as the label is, background where one did not look; present: who looked.
    Both None unless they were asked for.
    """

    image: Float32[Tensor, "N channels *space"]
    target: Float32[Tensor, "N C *space"]
    valid: Bool[Tensor, "N *space"]
    case: Int64[Tensor, " N"]
    raters: Float32[Tensor, "N R C *space"] | None = None
    present: Bool[Tensor, "N R"] | None = None


class CaseBatch(NamedTuple):
    """Whole cases to predict and judge: normalised images and what each rater drew.

    `space` may be larger than a case: beyond it nothing is valid, images are 0 and masks background. `case`
    stays on the CPU, where it is read.
    """

    image: Float32[Tensor, "N channels *space"]
    masks: UInt8[Tensor, "N R *space"]
    present: Bool[Tensor, "N R"]
    valid: Bool[Tensor, "N *space"]
    case: Int64[Tensor, " N"]


class Batches:
    """Training batches of the cases numbered `cases`, without end.

    batch_size: of all processes together; each takes its contiguous share. An epoch has as many whole batches
    as there are cases for; fewer cases than a batch holds are repeated.
    resident: whether the dataset is kept on the device; None: if it takes at most half of its free memory.
    resident_of: other batches of the dataset on that device, whose memory to share.
    workers: threads that read ahead where it is not; 0 reads when a feed is asked for.
    with_raters: whether a batch also has what each rater drew.
    """

    def __init__(
        self,
        dataset: Dataset,
        cases: Sequence[int],
        *,
        batch_size: int,
        label: LabelOptions,
        augment: AugmentOptions | None,
        seed: int,
        device: torch.device | str,
        resident: bool | None = None,
        resident_of: "Batches | None" = None,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        with_raters: bool = False,
    ) -> None:
        _check(dataset, cases, batch_size, rank, world_size)
        self.with_raters = with_raters
        self.dataset, self.cases, self.augment = dataset, tuple(cases), augment
        self.storage: Storage = (
            resident_of.storage if resident_of else Storage(dataset, device, resident=resident)
        )
        self.device, self.workers = self.storage.device, workers
        space = self.storage.space
        self.out_size = space if augment is None or augment.crop is None else augment.crop
        if len(self.out_size) != len(space):
            raise ValueError(
                f"augment.crop {self.out_size} does not fit images with {len(space)} axes of space"
            )
        self._tables = LabelTables(dataset, self.cases, label, device=self.device)
        self._feeds = _Feeds(
            self.storage.reader,
            self.cases,
            batch_size=batch_size,
            share=slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size),
            augment=augment,
            out_size=self.out_size,
            draws_raters=label.maker == "random",
            reads=not self.storage.resident,
            seed=seed,
        )
        self.steps_per_epoch = self._feeds.steps_per_epoch

    def feed(self, step: int) -> Feed:
        """What step number `step` needs, on the CPU."""
        return self._feeds[step]

    def feeds(self, start: int, stop: int) -> Iterator[Feed]:
        """The feeds of steps start to stop - 1 in their order, read ahead, in pinned memory for a GPU."""
        if self.storage.resident or self.workers == 0:
            yield from (self._pinned_feed(step) for step in range(start, stop))
            return
        num_ahead = 2 * self.workers
        pool = ThreadPoolExecutor(self.workers)
        try:
            ahead = deque(
                pool.submit(self._pinned_feed, step) for step in range(start, min(stop, start + num_ahead))
            )
            for step in range(start + num_ahead, stop + num_ahead):
                feed = ahead.popleft().result()
                if step < stop:
                    ahead.append(pool.submit(self._pinned_feed, step))
                yield feed
        finally:
            pool.shutdown(cancel_futures=True)

    def _pinned_feed(self, step: int) -> Feed:
        feed = self.feed(step)
        if self.device.type != "cuda":
            return feed
        return Feed(*(part if part is None else part.pin_memory() for part in feed))  # type: ignore[arg-type]

    @torch.no_grad()
    def make(self, feed: Feed) -> Batch:
        """The batch of a feed that is on the device."""
        storage, case = self.storage, feed.case
        stored, packed = storage.stored(case, feed.image, feed.packed)
        valid = storage.valid(case)
        # a label need not know where its image ends if it fills its place
        ends = valid if storage.is_padded else None
        masks = storage.masks(packed)
        label = self._tables(masks, case, rater=feed.rater, valid=ends)
        num_classes = label.shape[1]
        if self.with_raters:
            # further classes of the label, so that all of them move with the image at once
            label = torch.cat([label, _foreground(masks, num_classes)], 1)
        image = storage.normalised(stored, case)
        if self.augment is None:
            image = image.mul_(valid.unsqueeze(1)) if storage.is_padded else image
        else:
            image, label, valid = augment(
                image,
                label,
                storage.sizes[case],
                feed.params,
                self.augment,
                out_size=self.out_size,
                mean=storage.mean,
                std=storage.std,
            )
        if not self.with_raters:
            return Batch(image, label, valid, case)
        target = _with_background(label[:, 1:num_classes], 1)
        raters = _with_background(label[:, num_classes:].unflatten(1, (-1, num_classes - 1)), 2)
        return Batch(image, target, valid, case, raters, self._tables.present[case])

    @torch.no_grad()
    def labels(
        self, masks: UInt8[Tensor, "N R *space"], case: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N C *space"]:
        """Labels of whole cases among `cases`, whose masks are as in a `CaseBatch`, by the maker of training.

        Where raters are drawn at random, it is those of the first epoch.
        """
        rater = self._feeds.epoch(0)[1][case.cpu().numpy()]
        case = case.to(self.device)
        valid = inside(self.storage.sizes[case], masks.shape[2:])
        return self._tables(masks, case, rater=torch.from_numpy(rater).to(self.device), valid=valid)


class WholeCases:
    """The cases numbered `cases` in that order, as they are, `batch_size` at a time and the rest last.

    multiple: all images are padded to one size, a multiple of this. resident_of: batches of the same dataset
    and device, whose memory to share; otherwise cases are read from the files.
    """

    def __init__(
        self,
        dataset: Dataset,
        cases: Sequence[int],
        *,
        batch_size: int,
        device: torch.device | str,
        multiple: int = SIZE_MULTIPLE,
        resident_of: Batches | None = None,
    ) -> None:
        self.cases, self.batch_size = tuple(cases), batch_size
        self.storage = resident_of.storage if resident_of else Storage(dataset, device, resident=False)
        self._present = torch.from_numpy(dataset.present).to(self.storage.device)
        shapes = [dataset.cases[number].shape for number in self.cases]
        self.space = common_space(shapes, multiple) if shapes else self.storage.space

    def __len__(self) -> int:
        return math.ceil(len(self.cases) / self.batch_size)

    @torch.no_grad()
    def __iter__(self) -> Iterator[CaseBatch]:
        for start in range(0, len(self.cases), self.batch_size):
            yield self._batch(self.cases[start : start + self.batch_size])

    def _batch(self, cases: Sequence[int]) -> CaseBatch:
        storage = self.storage
        numbers = torch.tensor(cases)
        case = numbers.to(storage.device, non_blocking=True)
        image, packed = (None, None)
        if not storage.resident:
            image, packed = (part.to(storage.device) for part in storage.reader.read(cases))
        stored, packed = storage.stored(case, image, packed)
        valid = inside(storage.sizes[case], self.space)
        return CaseBatch(
            image=_fit(storage.normalised(stored, case), self.space) * valid.unsqueeze(1),
            masks=_fit(storage.masks(packed), self.space),
            present=self._present[case],
            valid=valid,
            case=numbers,
        )


class _Feeds:
    """The CPU's part of batches; several threads may ask for feeds at once."""

    def __init__(
        self,
        reader: CaseReader,
        cases: Sequence[int],
        *,
        batch_size: int,
        share: slice,
        augment: AugmentOptions | None,
        out_size: Sequence[int],
        draws_raters: bool,
        reads: bool,
        seed: int,
    ) -> None:
        self.reader, self.cases, self.batch_size, self.share = reader, np.array(cases), batch_size, share
        self.augment, self.out_size, self.seed = augment, out_size, seed
        self.draws_raters, self.reads = draws_raters, reads
        self.present = reader.dataset.present
        self.sizes = np.array([case.shape for case in reader.dataset.cases])
        self.steps_per_epoch = max(1, len(cases) // batch_size)
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

    def __getitem__(self, step: int) -> Feed:
        epoch, within = divmod(step, self.steps_per_epoch)
        order, raters = self.epoch(epoch)
        # everything is drawn for the whole batch and then shared, so processes together see what one would
        batch = order[within * self.batch_size : (within + 1) * self.batch_size]
        params = np.zeros((len(batch), 0), dtype=np.float32)
        if self.augment is not None:
            params = draw_augmentation(self.augment, self._rng(1, step), self.sizes[batch], self.out_size)
        # a copy: what is drawn for the epoch stays as it is whatever becomes of the feed
        case = batch[self.share].copy()
        image, packed = self.reader.read(case.tolist()) if self.reads else (None, None)
        return Feed(
            case=torch.from_numpy(case),
            params=torch.from_numpy(params[self.share]),
            rater=torch.from_numpy(raters[case]),
            image=image,
            packed=packed,
        )

    def epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " some"], Int64[np.ndarray, " cases"]]:
        """The order of the cases in an epoch, and a rater for each case of the dataset."""
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            # another thread may be at another epoch, so nothing is read back
            self._drawn = drawn = (epoch, self._order(epoch), self._raters(epoch))
        return drawn[1], drawn[2]

    def _rng(self, purpose: int, number: int) -> np.random.Generator:
        """Random numbers of their own for each purpose and epoch or step."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, purpose, number))))

    def _order(self, epoch: int) -> Int64[np.ndarray, " some"]:
        rng = self._rng(0, epoch)
        num_rounds = math.ceil(self.batch_size / len(self.cases))
        return np.concatenate([rng.permutation(self.cases) for _ in range(num_rounds)])

    def _raters(self, epoch: int) -> Int64[np.ndarray, " cases"]:
        """One of the raters present, with equal chances; 0 where the label does not need one."""
        if not self.draws_raters:
            return np.zeros(len(self.present), dtype=np.int64)
        draw = self._rng(2, epoch).random((len(self.present), 1))
        nth = np.floor(draw * self.present.sum(1, keepdims=True))
        # the first rater with more than nth present up to him
        rater: np.ndarray = np.argmax(self.present.cumsum(1) > nth, axis=1)
        return rater


def _foreground(masks: UInt8[Tensor, "N R *space"], num_classes: int) -> Float32[Tensor, "N drawings *space"]:
    """What the raters drew, a channel a class but the background, one rater after the other."""
    return torch.stack([masks == number for number in range(1, num_classes)], 2).flatten(1, 2).float()


def _with_background(foreground: Tensor, axis: int) -> Tensor:
    """Classes along an axis, and before them what they leave, the background."""
    rest = 1 - foreground.sum(axis, keepdim=True).clamp_(max=1)
    return torch.cat([rest, foreground], axis)


def _fit(tensor: Tensor, space: Sequence[int]) -> Tensor:
    """The corner of a tensor (N, C, *any) of size `space`, zeros where it ends before."""
    if tensor.shape[2:] == tuple(space):
        return tensor
    missing = [want - side for want, side in zip(space, tensor.shape[2:], strict=True)]
    return F.pad(tensor, [number for side in reversed(missing) for number in (0, side)])


def _check(dataset: Dataset, cases: Sequence[int], batch_size: int, rank: int, world_size: int) -> None:
    if not cases or not 0 <= min(cases) <= max(cases) < len(dataset):
        raise ValueError(
            f"cases must be numbers from 0 to {len(dataset) - 1}, at least one; got {list(cases)}"
        )
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size is of all processes together, a multiple of their number {world_size}; "
            f"got {batch_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}; got {rank}")
