"""Compiles what serving launches, before a graph is captured or a request waits for it."""

from __future__ import annotations

import time

import torch

from shim import process
from shim.kernels.gguf_linear import launch as linear
from shim.kernels.gguf_moe import launch as moe
from shim.quantization.linear import Glm5GGUFLinear
from shim.quantization.moe import Glm5GGUFExperts


def warm_up(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Runs each form of the model's quantised layers once with each number of tokens that takes another kernel."""
    started = time.monotonic()
    seen: set[object] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Glm5GGUFLinear | Glm5GGUFExperts) and method.form not in seen:
            seen.add(method.form)
            method.warm_up(module, dtype)
    if not seen:
        return
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for compiled in (linear.compiled, moe.compiled):
        compiled.warm(device)
    seconds = time.monotonic() - started
    process.log.info("glm5-shim: kernels of %d forms of quantised layers ready in %.1f s", len(seen), seconds)
