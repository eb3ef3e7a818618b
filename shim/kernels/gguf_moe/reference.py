"""Experts in plain torch on dequantised weights: the truth that the kernels are judged by."""

from __future__ import annotations

import torch


def moe(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    between: torch.dtype | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    x: [T, K]; gate, up: [E, I, K]; down: [E, K, I]; topk_ids: int [T, top_k], -1 is skipped; topk_weights: [T, top_k]
    between: what operands, products and shares of the answer are rounded to, as a layer of 16 bits does; None: nothing

    Returns [T, K] of `dtype`, in which it computes.
    """

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if between is None else value.to(between).to(dtype)

    out = torch.zeros(x.shape[0], down.shape[1], dtype=dtype, device=x.device)
    for expert in range(gate.shape[0]):
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        if len(token):
            rows = rounded(x[token])
            a, b = rows @ rounded(gate[expert]).T, rows @ rounded(up[expert]).T
            hidden = rounded(torch.nn.functional.silu(a) * b)
            share = hidden @ rounded(down[expert]).T * topk_weights[token, choice, None].to(dtype)
            out.index_add_(0, token, rounded(share))
    return rounded(out)
