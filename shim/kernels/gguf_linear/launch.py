"""The host side of quantised linear layers: checks, plan, launch. No host sync; grids depend on shapes alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shim.kernels.ggml.launch import ACTIVATIONS, Operand, check_weight, dequantize, operand, operand_width
from shim.kernels.ggml.layout import PLAIN, Weight
from shim.kernels.gguf_linear import kernel, tune
from shim.kernels.host import Compiled, Form, form, sm_count

compiled = Compiled("gguf_linear", kernel.product)


class Workspace:
    """What programs that share a product leave for the last of them: at one address for as long as graphs are replayed.
    Calls that may run at the same time need one each."""

    def __init__(self, sums: int, tiles: int, device: torch.device | str) -> None:
        """sums: fp32 numbers; tiles: counters, which every launch leaves at zero."""
        self.partial = torch.empty(sums, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, plan: tune.Plan, tokens: int, rows: int, device: torch.device) -> Workspace:
        return cls(*needs(plan, tokens, rows), device)

    @classmethod
    def holding(cls, partial: torch.Tensor, arrived: torch.Tensor) -> Workspace:
        """Of memory that is there: fp32 sums, and counters that are zero."""
        made = cls.__new__(cls)
        made.partial, made.arrived = partial, arrived
        return made

    def check(self, sums: int, tiles: int) -> None:
        if sums > self.partial.numel() or tiles > self.arrived.numel():
            raise ValueError(
                f"workspace has {self.partial.numel()} sums and {self.arrived.numel()} counters, this call needs "
                f"{sums} and {tiles}"
            )


def needs(plan: tune.Plan, tokens: int, rows: int) -> tuple[int, int]:
    """Sums and counters of a workspace."""
    if plan.splits == 1:
        return 0, 0
    tiles = -(-rows // plan.config.block_n) * -(-tokens // plan.config.tokens)
    return plan.splits * tokens * rows, tiles


@lru_cache
def most_needs(rows: int, columns: int, sms: int) -> tuple[int, int]:
    """Sums and counters of a workspace that serves any number of tokens."""
    plans = ((tokens, tune.plan(tokens, rows, columns, sms)) for tokens in range(1, tune.MANY))
    found = [needs(plan, tokens, rows) for tokens, plan in plans if plan is not None]
    return max(sums for sums, _ in found), max(tiles for _, tiles in found)


@lru_cache
def steps(rows: int, columns: int, sms: int) -> list[int]:
    """The numbers of tokens from which on another kernel runs: between them they launch all."""
    plans = [tune.plan(tokens, rows, columns, sms) for tokens in range(1, tune.MANY + 1)]
    found: dict[tune.Plan | None, int] = {}
    for tokens, plan in enumerate(plans, 1):
        found.setdefault(plan, tokens)
    return list(found.values())


def linear(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    plan: tune.Plan | None = None,
) -> torch.Tensor:
    """y = x . W^T.

    x:         [T, K] bf16 or fp16, rows contiguous and any distance apart
    weight:    [N, K], of `ggml.repack.repack`
    out:       [T, N] of x's dtype to be written, rows contiguous and any distance apart
    workspace: without it memory is allocated, and cleared, where programs share a product
    plan:      another than `tune.plan`'s (tuning, tests)

    Returns [T, N] of x's dtype, summed in fp32. ValueError names an argument that does not fit.
    """
    tokens = x.shape[0]
    w = operand(weight)
    _check(form(x), form(weight.data), weight.type, weight.rows, weight.columns, None if out is None else form(out))
    if out is None:
        out = torch.empty(tokens, weight.rows, dtype=x.dtype, device=x.device)
    if tokens == 0 or weight.rows == 0:
        return out
    if plan is None:
        plan = tune.plan(tokens, weight.rows, weight.columns, sm_count(x.device))
    if plan is None or (w.type == "" and weight.data.dtype == x.dtype):
        return _in_16_bits(x, weight, out)
    if workspace is None:
        workspace = Workspace.of(plan, tokens, weight.rows, x.device)
    workspace.check(*needs(plan, tokens, weight.rows))
    _launch(x, weight, w, out, workspace, plan)
    return out


def _launch(x: torch.Tensor, weight: Weight, w: Operand, out: torch.Tensor, space: Workspace, plan: tune.Plan) -> None:
    config = plan.config
    grid = (-(-weight.rows // config.block_n) * plan.splits, -(-x.shape[0] // config.tokens))
    kernel.product[grid](
        x, w.data, w.table, out, space.partial, space.arrived, x.shape[0], weight.rows, weight.columns, w.tiles,
        x.stride(0), out.stride(0), **constants(config, w.type, w.bytes, plan.splits, operand_width(x.device)),
    )  # fmt: skip
    compiled.tell(plan)


def constants(config: tune.Config, type: str, bytes: int, splits: int, width: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "TYPE": type, "BYTES": bytes, "BLOCK_N": config.block_n, "TOKENS": config.tokens, "SPLITS": splits,
        "STAGES": config.stages, "WARPS": config.warps, "WIDTH": width, "num_warps": config.warps,
        "maxnreg": config.registers,
    }  # fmt: skip


def _in_16_bits(x: torch.Tensor, weight: Weight, out: torch.Tensor) -> torch.Tensor:
    """A slice of the weights is dequantised and multiplied, then the next takes its place."""
    if weight.type in PLAIN and weight.data.dtype == x.dtype:
        return torch.matmul(x, weight.data.T, out=out)
    step = max(1, tune.WORKSPACE_BYTES // (2 * weight.columns))
    slices = torch.empty(min(step, weight.rows), weight.columns, dtype=x.dtype, device=x.device)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        dense = dequantize(weight, x.dtype, first, count, slices[:count])
        if count == weight.rows:
            torch.matmul(x, dense.T, out=out)
        else:
            out[:, first : first + count] = torch.matmul(x, dense.T)
    return out


@lru_cache(maxsize=512)
def _check(x: Form, data: Form, type: Any, rows: int, columns: int, out: Form | None) -> None:
    if len(x.shape) != 2 or x.shape[1] != columns or x.dtype not in ACTIVATIONS or x.strides[1] not in (0, 1):
        raise ValueError(f"x is {x}, expected [T, {columns}] of {' or '.join(map(str, ACTIVATIONS))}, rows contiguous")
    check_weight("weight", Weight(_Shaped(data), type, rows, columns))  # type: ignore[arg-type]
    if data.device != x.device:
        raise ValueError(f"weight is on {data.device}, x on {x.device}")
    if out is not None:
        shape = (x.shape[0], rows)
        if out.shape != shape or out.dtype != x.dtype or out.device != x.device or out.strides[1] not in (0, 1):
            raise ValueError(f"out is {out}, expected {list(shape)} of {x.dtype} on {x.device}, rows contiguous")
        if shape[0] > 1 and out.strides[0] < rows:
            raise ValueError(f"out has strides {out.strides}: its rows of {rows} overlap")


class _Shaped:
    """A form, where a tensor's shape, dtype and strides are asked."""

    def __init__(self, data: Form) -> None:
        self.shape, self.dtype, self._strides = data.shape, data.dtype, data.strides

    def stride(self) -> tuple[int, ...]:
        return self._strides
