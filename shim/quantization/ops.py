"""The product of a linear layer as a custom op: vLLM up to 0.28 traces linear layers, and Dynamo must not see kernels.

The types of a file are constants of a traced graph. So what vLLM hashes for its cache of graphs has a digest of them
(patch gguf_engine_args).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml.layout import Weight, shape_of
from shim.kernels.gguf_linear import launch

_LIBRARY: Any = torch.library.Library("glm5_shim", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "gguf_linear(Tensor x, Tensor[] weights, int[] starts, int[] types, int[] rows, int columns, Tensor sums, "
    "Tensor counters) -> Tensor"
)


def _gguf_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    starts: Sequence[int],
    types: Sequence[int],
    rows: Sequence[int],
    columns: int,
    sums: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """x [..., columns] times several weights, side by side: [..., sum of rows].

    weights: what `shim.kernels.ggml.layout.Weight.data` is; a product's begins at tile (or plain row) `starts` of it
    types: GGML's numbers. sums, counters: scratch, whose contents mean nothing between calls (counters are zero)
    """
    flat = x.reshape(-1, columns)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = flat.new_empty(flat.shape[0], sum(rows))
    workspace = launch.Workspace.holding(sums, counters)
    at = 0
    for data, start, number, count in zip(weights, starts, types, rows, strict=True):
        type = Type(number)
        share = data[start : start + shape_of(type, count, columns)[0]]
        launch.linear(flat, Weight(share, type, count, columns), out[:, at : at + count], workspace)
        at += count
    return out.view(*x.shape[:-1], at)


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    starts: Sequence[int],
    types: Sequence[int],
    rows: Sequence[int],
    columns: int,
    sums: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(rows))


_LIBRARY.impl("gguf_linear", _gguf_linear, "CompositeExplicitAutograd")
torch.library.register_fake("glm5_shim::gguf_linear", _fake, lib=_LIBRARY)
