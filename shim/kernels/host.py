"""What the host sides of the kernels share. A launch outside a CUDA graph costs the host's time, layer by layer: what
follows from the forms of the arguments alone is therefore checked and planned once for all calls of the same forms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shim.process import log

_new = tuple.__new__  # faster than a NamedTuple's own, which is Python; a launch makes up to nine forms


class Form(NamedTuple):
    """All of a tensor that checks and plans may look at: everything but its values and where it is."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # it begins at whole 16 bytes

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} with strides {self.strides} on {self.device}"

    @property
    def contiguous(self) -> bool:
        step = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True

    @property
    def in_16_bytes(self) -> bool:
        """Its last dimension is contiguous, and may be read 16 bytes at a time: all else is whole 16 bytes."""
        unit = 16 // self.dtype.itemsize
        return self.aligned and self.strides[-1] == 1 and not any(stride % unit for stride in self.strides[:-1])


def form(tensor: torch.Tensor) -> Form:
    return _new(Form, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0))


class Launch(NamedTuple):
    """What calls of the same forms pass to a kernel, but its tensors."""

    programs: int
    numbers: tuple[int, ...]  # the kernel's integer arguments
    options: dict[str, Any]  # its constants, and Triton's own options


class Compiled:
    """The variants of some kernels that this process has compiled. One that compiles after warm-up holds requests up,
    or breaks the capture of a graph."""

    def __init__(self, op: str, *kernels: Any) -> None:
        self.op, self.kernels = op, kernels
        self._caches: list[Any] = []
        self._told = 0

    def warm(self, device: torch.device) -> None:
        """All that serving launches on this device is compiled."""
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            self._caches = [kernel.device_caches[index][0] for kernel in self.kernels]
        except (AttributeError, TypeError, LookupError, AssertionError):  # not shown by this Triton, or not on a GPU
            self._caches = []
        self._told = self.count()

    def count(self) -> int:
        """0 before warm-up."""
        return sum(map(len, self._caches))

    def tell(self, call: object) -> None:
        """Logs what was launched, if a variant compiled for it after warm-up."""
        if (count := self.count()) > self._told:
            self._told = count
            log.warning("%s compiled a variant after warm-up: %s", self.op, call)


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
