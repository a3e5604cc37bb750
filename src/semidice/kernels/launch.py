"""Launches of a Triton kernel that find its compiled code in a few microseconds.

Triton compiles a kernel separately for every type of its arguments, for pointers that are multiples of 16 or
not, for integers that are 1, multiples of 16 or beyond 32 bits, and for every constant. On each launch it
inspects all arguments again: about 25 µs, as long as a small loss takes on the device. A `Launch` fixes grid,
integers, constants and the types of its tensors when it is made. It remembers the compiled code by the rest:
devices and alignment of the tensors.

The remembered code is called through Triton's private launcher. That is done only on NVIDIA, in the versions
of Triton in which it was tested, and if the compiled kernel has the attributes that it needs. Otherwise every
launch is Triton's public one.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

# Triton inspects the alignment of a pointer; on AMD also the size of the tensor
_ALIGNMENT = 16
# versions of Triton in which the private launcher was tested; others may take other arguments
_MIN_VERSION, _MAX_VERSION = (3, 6), (3, 9)


class Launch:
    """A kernel whose arguments are tensors, integers, floats and constants, in this order.

    Tensors and floats come with each call. The types of the tensors, and which of them are None, must be the
    same in every call. Floats are never constants. `registers` is the most that a thread may have.
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
        self._has_one_device = torch.cuda.device_count() <= 1
        self._callers: dict[Any, Callable[..., None]] = {}

    def __call__(self, first: Tensor, *others: Tensor | None, floats: tuple[float, ...] = ()) -> None:
        """Launch on the device of the first tensor, in its current stream."""
        device = first.get_device()
        # Triton launches on the current device, which need not be that of the tensors
        if not self._has_one_device and device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(first, *others, floats=floats)
            return
        pointers: list[int | None] = [first.data_ptr()]
        all_bits = pointers[0] or 0
        on_one_device = True
        for tensor in others:
            pointer = None
            if tensor is not None:
                pointer = tensor.data_ptr()
                all_bits |= pointer
                on_one_device = on_one_device and tensor.get_device() == device
            pointers.append(pointer)
        key: Any = device
        if not on_one_device or all_bits % _ALIGNMENT:
            # A tensor on another device than before gives another key: Triton inspects and refuses it.
            key = tuple(t if t is None else (t.get_device(), t.data_ptr() % _ALIGNMENT) for t in others)
            key = (device, first.data_ptr() % _ALIGNMENT, *key)
        # float(): Triton would compile for an integer if one came
        numbers = (*self._integers, *map(float, floats), *self._constants) if floats else self._numbers
        caller = self._callers.get(key)
        if caller is not None:
            caller(*pointers, *numbers)
            return
        compiled = self._kernel[self._grid](first, *others, *numbers, **self._options)
        caller = _direct_caller(compiled, self._grid, device)
        if caller is not None:
            self._callers[key] = caller


def _direct_caller(compiled: object, grid: tuple[int, ...], device: int) -> Callable[..., None] | None:
    """A function that launches a compiled kernel through the private launcher; None if that was not tested.

    Profilers register hooks around launches. For every launch Triton looks for hooks and describes the launch
    to them, which takes nearly as long as the launch. Here that work is done only if there are hooks.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    is_tested = torch.version.hip is None and _MIN_VERSION <= version <= _MAX_VERSION
    if not is_tested or not isinstance(compiled, CompiledKernel):
        return None
    try:
        with_hooks, run = compiled[grid], compiled.run
        function, metadata = compiled.function, compiled.packed_metadata
        knobs = triton.knobs.runtime
        _has_hooks(knobs)
        current_stream = torch._C._cuda_getCurrentRawStream
    except AttributeError:
        return None

    def call(*arguments: Any) -> None:
        if _has_hooks(knobs):
            with_hooks(*arguments)
        else:
            run(*grid, current_stream(device), function, metadata, None, None, None, *arguments)

    return call


def _has_hooks(knobs: Any) -> bool:
    """Whether a function is registered; a chain of hooks may be empty."""
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
