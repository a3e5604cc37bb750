"""One optimiser step, from case numbers to new weights, without waiting for the device.

    feed (CPU) --copy--> batches.make --network--> loss --backward--> clip, update

If the device allows, the step is recorded once as a CUDA graph and replayed. Random numbers come from the
default generators, which are seeded at every step. So a step is a function of the weights, the seed and its
number, whether it is eager, replayed or resumed.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches.feed import Batches, Feed
from ..losses.distillation import DistillationLoss, Teacher
from ..losses.segmentation import SegmentationLoss
from ..networks.predictor import recording
from ..networks.systems import DTYPES, System, TrainingLabels
from ..recipes import Recipe
from .processes import Processes

# eager steps before a graph is recorded: libraries choose their algorithms, optimisers create their state
NUM_WARM_UP = 3


def step_seed(seed: int, fold: int, step: int, rank: int = 0) -> int:
    """A different seed for every step of every fold; step -1 seeds the initial weights.

    >>> step_seed(0, 0, -1) == step_seed(0, 0, -1), step_seed(0, 0, 1) == step_seed(0, 1, 0)
    (True, False)
    """
    mixed = 0x9E3779B97F4A7C15
    for part in (seed, fold, step + 1, rank):
        mixed = ((mixed ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**63


class TrainingStep:
    """`step(feed, number)` returns the loss and its terms on the device, in the order of `names`.

    The returned tensor is valid until the next step. `engine` reads the losses some steps later, and stops
    the training if one is not finite. model: on the device; a system defines its own losses.
    """

    def __init__(
        self,
        recipe: Recipe,
        processes: Processes,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        batches: Batches,
        *,
        teacher: Teacher | None = None,
        fold: int = 0,
    ) -> None:
        self.recipe, self.processes, self.fold = recipe, processes, fold
        self.device = processes.device
        self.system = model if isinstance(model, System) else None
        compiled: Any = torch.compile(model) if recipe.precision.compile else model
        self.network = processes.wrapped(compiled)
        self.optimiser, self.batches, self.teacher = optimiser, batches, teacher
        self.num_steps = recipe.schedule.epochs * batches.steps_per_epoch
        self.names: tuple[str, ...] = ()
        # one index per image needs no other process: gradients are averaged anyway
        sync = processes.number > 1 and recipe.loss.over != "image"
        self.loss = SegmentationLoss(**asdict(recipe.loss), sync=sync).to(self.device)
        if recipe.teacher is not None:
            self.distillation_loss = DistillationLoss(
                self.loss,
                label_weight=recipe.teacher.label_weight,
                teacher_weight=recipe.teacher.teacher_weight,
                terms=recipe.teacher.terms,
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.precision.dtype == "fp16")
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_eager = 0
        self._feed: Feed | None = None
        self._parts = torch.zeros(0, device=self.device)

    def __call__(self, feed: Feed, number: int) -> Tensor:
        self._set_rate(number)
        seed = step_seed(self.recipe.seed, self.fold, number, self.processes.rank)
        torch.manual_seed(seed)
        self._feed = self._on_device(feed)
        if self._graph is None and self._uses_graph() and self._num_eager >= NUM_WARM_UP:
            self._graph = torch.cuda.CUDAGraph()
            with recording(self._graph):
                self._parts = self._run()
            # recording runs nothing, but it may have advanced the generators
            torch.manual_seed(seed)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._num_eager += 1
            self._parts = self._run()
        return self._parts

    def rate(self, number: int) -> float:
        """Learning rate of a step: linear warm-up, then (1 - step / steps) ** power."""
        schedule = self.recipe.schedule
        warm = min(1.0, (number + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
        fall = float((1 - number / self.num_steps) ** schedule.power)
        return self.recipe.optimiser.lr * warm * fall

    def _set_rate(self, number: int) -> None:
        for group in self.optimiser.param_groups:
            rate = self.rate(number) * group["lr_factor"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _on_device(self, feed: Feed) -> Feed:
        if self.device.type == "cpu":
            return feed
        if self._feed is None:
            return feed.to(self.device)
        # the same memory at every step: a graph reads the memory it was recorded with
        for target, part in zip(self._feed, feed, strict=True):
            if target is not None and part is not None:
                target.copy_(part, non_blocking=True)
        return self._feed

    def _uses_graph(self) -> bool:
        possible = self.device.type == "cuda" and self.processes.number == 1 and not self.scaler.is_enabled()
        return possible and self.recipe.precision.graph == "auto"

    def _autocast(self) -> torch.autocast:
        dtype = DTYPES[self.recipe.precision.dtype]
        # no cache: a graph would replay without a cast that was cached before the recording
        return torch.autocast(self.device.type, dtype, dtype != torch.float32, cache_enabled=False)

    def _run(self) -> Tensor:
        assert self._feed is not None
        batch = self.batches.make(self._feed)
        accumulate = self.recipe.optimiser.accumulate
        tensors = [batch.image, batch.target, batch.valid]
        tensors += [tensor for tensor in (batch.raters, batch.present) if tensor is not None]
        pieces = zip(*(tensor.chunk(accumulate) for tensor in tensors), strict=True)
        values: list[Tensor] = []
        self.optimiser.zero_grad(set_to_none=True)
        for number, piece in enumerate(pieces):
            with self._sync_gradients(number == accumulate - 1):
                total, parts = self._losses(*piece)
                (self.scaler.scale(total) / accumulate).backward()
            values.append(torch.stack([total.detach(), *parts.values()]).float())
            self.names = ("loss", *parts)
        self._update()
        return torch.stack(values).mean(0)

    def _losses(
        self,
        image: Tensor,
        target: Tensor,
        valid: Tensor,
        raters: Tensor | None = None,
        present: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.recipe.precision.channels_last:
            image = image.to(memory_format=torch.channels_last)
        with self._autocast():
            logits = self.network(image) if present is None else self.network(image, present)
        if self.system is not None:
            return self.system.losses(logits, TrainingLabels(target, valid, raters, present), self.loss)
        if self.teacher is None:
            terms = self.loss.terms(logits, target, valid)
            total = self.loss.total(terms)
        else:
            with self._autocast():
                soft_target = self.teacher(image, target, valid)
            terms = self.distillation_loss.terms(logits, target, soft_target, valid)
            total = self.distillation_loss.total(terms)
        return total, {name: term.detach() for name, term in terms.items()}

    def _sync_gradients(self, sync: bool) -> AbstractContextManager[object]:
        """Whether a backward pass adds up the gradients of all processes; only the last piece does."""
        several: Any = self.network
        return nullcontext() if sync or self.processes.number == 1 else several.no_sync()

    def _update(self) -> None:
        clip = self.recipe.optimiser.clip_norm
        if clip is not None:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()


def build_optimiser(recipe: Recipe, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW over all parameters; on a GPU fused, with the rate in GPU memory for a graph."""
    options = recipe.optimiser
    on_gpu = device.type == "cuda"
    groups = parameter_groups(
        model,
        decoder_lr_factor=options.decoder_lr_factor,
        decay_one_dimensional=options.decay_one_dimensional,
    )
    for group in groups:
        rate = options.lr * group["lr_factor"]
        group["lr"] = torch.tensor(rate, device=device) if on_gpu else rate
        group["weight_decay"] = options.weight_decay if group.pop("decays") else 0.0
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=on_gpu)
    return torch.optim.AdamW(groups, lr=options.lr, capturable=on_gpu, fused=on_gpu)


def parameter_groups(
    model: nn.Module, *, decoder_lr_factor: float, decay_one_dimensional: bool
) -> list[dict[str, Any]]:
    """Parameters that share `lr_factor` and `decays`, for an optimiser; empty groups are left out.

    A parameter is of the encoder if a part of its name is "encoder", or "down" in a small_unet. All others
    have the factor of the decoder. One-dimensional parameters are biases and the weights of normalisations.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        in_encoder = bool({"encoder", "down"} & set(name.split(".")))
        factor = 1.0 if in_encoder else decoder_lr_factor
        decays = decay_one_dimensional or parameter.ndim > 1
        groups.setdefault((factor, decays), []).append(parameter)
    return [
        {"params": parameters, "lr_factor": factor, "decays": decays}
        for (factor, decays), parameters in groups.items()
    ]
