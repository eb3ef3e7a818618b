"""What the host sides of the kernels share.

A launch outside a CUDA graph costs host time in every layer. So a call is checked and planned by the forms of its
arguments alone, once for all calls of the same forms.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shim.process import log

new = tuple.__new__  # for NamedTuples of each launch: their own __new__ is Python, and slower


class Form(NamedTuple):
    """What checks and plans may know of a tensor: everything but its values and its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # its address is a multiple of 16 bytes

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
        """Can it be read 16 bytes at a time? Its last dimension is contiguous, all else is a multiple of 16 bytes."""
        unit = 16 // self.dtype.itemsize
        return self.aligned and self.strides[-1] == 1 and not any(stride % unit for stride in self.strides[:-1])


def form(tensor: torch.Tensor) -> Form:
    return new(Form, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0))


class Launch(NamedTuple):
    """What all calls of the same forms pass to a kernel, besides tensors."""

    programs: int
    numbers: tuple[int, ...]  # the kernel's integer arguments
    options: dict[str, Any]  # its constants, and Triton's own options


class Compiled:
    """The variants of some kernels that this process has compiled.

    A variant that compiles after warm-up delays requests, or breaks the capture of a graph."""

    def __init__(self, op: str, *kernels: Any) -> None:
        self.op, self.kernels = op, kernels
        self._caches: list[Any] = []
        self._reported = 0

    def warm(self, device: torch.device) -> None:
        """Call it when everything that serving launches on this device is compiled."""
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            self._caches = [kernel.device_caches[index][0] for kernel in self.kernels]
        except (AttributeError, TypeError, LookupError, AssertionError):  # no such attribute in this Triton, or no GPU
            self._caches = []
        self._reported = self.count()

    def count(self) -> int:
        """How many variants there are; 0 before warm-up."""
        return sum(map(len, self._caches))

    def tell(self, call: object) -> None:
        """Logs this call, if a variant was compiled for it after warm-up."""
        if (count := self.count()) > self._reported:
            self._reported = count
            log.warning("%s compiled a variant after warm-up: %s", self.op, call)


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
