"""Launches of a Triton kernel that find what was compiled for them in a few microseconds.

Triton compiles a kernel anew for every type of its arguments, for pointers that are multiples of 16 or not,
for integers that are 1, multiples of 16 or beyond 32 bits, and for every constant. On each launch it looks at
all of them again: some 25 µs, as long as a small loss takes on the device. A `Launch` fixes grid, integers
and constants when it is made, as well as the types of its tensors, and remembers what was compiled by the
rest: where they are, and how aligned. What it has not seen goes Triton's way, as does everything in the
interpreter and in older versions.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

# what Triton looks at of a pointer: on NVIDIA this alone, on AMD also the size of what it points to
_ALIGNMENT = 16
# the first version in which a compiled kernel takes all arguments of its source, of those tried
_MIN_VERSION = (3, 6)


class Launch:
    """A kernel whose arguments are tensors, integers, floats and constants, in this order.

    Integers, constants and the types of the tensors are those of this launch for good, so that no two
    launches share what was compiled for one; tensors and floats come with each call. Floats are never
    compiled in. `registers` is the most that a thread may have.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        integers: tuple[int, ...],
        *,
        num_warps: int,
        registers: int | None = None,
        **constants: Any,
    ) -> None:
        names = kernel.arg_names[-len(constants) :]
        if set(names) != set(constants):
            raise ValueError(f"constants of the kernel are {', '.join(names)}; got {', '.join(constants)}")
        self._kernel = kernel
        self._options = {"num_warps": num_warps}
        if registers is not None and torch.version.hip is None:
            self._options["maxnreg"] = registers
        self._grid = (*grid, 1, 1)[:3]
        self._integers = tuple(map(int, integers))
        self._constants = tuple(constants[name] for name in names)
        self._numbers = (*self._integers, *self._constants)
        self._one_device = torch.cuda.device_count() <= 1
        self._compiled: dict[Any, Callable[..., None]] = {}

    def __call__(self, first: Tensor, *others: Tensor | None, floats: tuple[float, ...] = ()) -> None:
        """Launch on the device of the first tensor, in its current stream."""
        device = first.get_device()
        # Triton launches on the current device, which need not be that of the tensors
        if not self._one_device and device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(first, *others, floats=floats)
            return
        pointers: list[int | None] = [first.data_ptr()]
        bits = pointers[0] or 0
        as_usual = True
        for tensor in others:
            pointer = None
            if tensor is not None:
                pointer = tensor.data_ptr()
                bits |= pointer
                as_usual = as_usual and tensor.get_device() == device
            pointers.append(pointer)
        # A tensor on another device than was seen here has another key: Triton looks at it, and refuses it.
        key: Any = device
        if not as_usual or bits % _ALIGNMENT:
            key = tuple(t if t is None else (t.get_device(), t.data_ptr() % _ALIGNMENT) for t in others)
            key = (device, first.data_ptr() % _ALIGNMENT, *key)
        # a float that came as an integer would be compiled as one
        rest = (*self._integers, *map(float, floats), *self._constants) if floats else self._numbers
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(*pointers, *rest)
            return
        found = self._kernel[self._grid](first, *others, *rest, **self._options)
        if _can_be_called(found):
            self._compiled[key] = _caller(found, self._grid, device)


def _caller(found: CompiledKernel, grid: tuple[int, ...], device: int) -> Callable[..., None]:
    """What launches a compiled kernel on a device: Triton's way, less its work for hooks if there are none.

    Hooks are what profilers ask to be called around launches; for each Triton looks for them and describes
    the launch, which takes nearly as long as to make it.
    """
    with_hooks, run = found[grid], found.run
    function, metadata = found.function, found.packed_metadata
    current_stream = torch._C._cuda_getCurrentRawStream

    def call(*arguments: Any) -> None:
        knobs = triton.knobs.runtime
        if _is_set(knobs.launch_enter_hook) or _is_set(knobs.launch_exit_hook):
            with_hooks(*arguments)
        else:
            run(*grid, current_stream(device), function, metadata, None, None, None, *arguments)

    return call


def _is_set(hook: Any) -> bool:
    """Whether there is a function to call: a chain of them may be empty."""
    return bool(getattr(hook, "calls", hook))


def _can_be_called(found: object) -> bool:
    """Whether this is a compiled kernel, on NVIDIA, of a version known to take all arguments directly."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return isinstance(found, CompiledKernel) and torch.version.hip is None and version >= _MIN_VERSION
