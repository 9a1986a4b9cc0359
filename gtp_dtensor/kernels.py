"""Triton kernels, launched without the host time that Triton takes to find what it compiled.

A launch through ``kernel[grid](...)`` looks at every argument, makes a key of them and asks each tensor for its
address: 21 microseconds on the host of an H200. What it returns is the compiled kernel, which can be launched by itself
in 6. Which one fits is then our business.

[Note: what Triton compiles for]
    Of a tensor its dtype and whether its address is a multiple of 16; of an integer whether it is 1, a multiple of 16,
    and how many bits it takes; of a float nothing; of a constant its value; and the device. Our keys hold more:
    integers and constants as they are. So launches with one key are of one compiled kernel, whatever a release makes of
    integers; and there are few keys, since integers are those of a weight's shape.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence

import torch

_ALIGNMENT = 16  # bytes; see [Note: what Triton compiles for]
_Launch = Callable[..., object]


class KeptKernel:
    """One Triton kernel, with those of its compiled forms that were launched. Its arguments are tensors, integers,
    floats and constants, in this order.

    Args:
        load: gives the ``triton.jit`` function; called at the first launch.
        options: ``num_warps`` and the like.

    Attributes:
        kept: by key; None where this Triton does not give compiled kernels away, and each launch goes through it.
    """

    def __init__(self, load: Callable[[], Callable], **options: object) -> None:
        self._load = load
        self._options = options
        self.kept: dict[tuple, _Launch | None] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "kept": {}}  # copies find their own: what was compiled is of this process

    def launch(
        self,
        num_programs: int,
        tensors: Sequence[torch.Tensor],
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[int, ...],
        stream: int,
    ) -> None:
        """Enqueue it on ``stream``, the handle of a stream of the current device, where the tensors are.

        Args:
            num_programs: the grid, of one dim.
            floats: Python floats, not integers.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            num_programs,
            integers,
            constants,
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[address % _ALIGNMENT for address in addresses],
        )
        launch = self.kept.get(key)
        if launch is not None:
            launch(*addresses, *integers, *floats, *constants, stream=stream)
            return
        arguments = (*tensors, *integers, *floats, *constants)
        compiled = self.launch_plainly(num_programs, arguments, stream)
        if key not in self.kept:
            self.kept[key] = _launcher(compiled, num_programs)

    def launch_plainly(self, num_programs: int, arguments: tuple, stream: int) -> object:
        """The same through Triton, which compiles where it has to. Returns what Triton does."""
        with _on(stream, arguments[0].device):
            return self._load()[(num_programs,)](*arguments, **self._options)


def _on(stream: int, device: torch.device) -> contextlib.AbstractContextManager:
    # torch takes an ExternalStream of handle 0, the default stream's, for one of no handle, and gives any of its pool.
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device))


def _launcher(compiled: object, num_programs: int) -> _Launch | None:
    """What launches a compiled kernel, of (its arguments, ``stream=``); None where Triton gave none, as its interpreter
    does, or one that is launched in another way than from release 3.6 on."""
    if not hasattr(type(compiled), "__getitem__"):
        return None
    launch = compiled[(num_programs, 1, 1)]
    return launch if "stream" in inspect.signature(launch).parameters else None
