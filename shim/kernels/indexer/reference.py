"""The DSA indexer's scores in plain torch. Every kernel is judged by them, and the CPU runs them.

    logit[m, n] = k_scale[n] * sum_h w[m, h] * relu(q[m, h] . k[n])

w includes the softmax scale, heads**-0.5 and q's own scale. Source: DeepSeek-V3.2's `fp8_index`. The interface is that
of DeepGEMM's `fp8_mqa_logits` and `fp8_paged_mqa_logits`.
"""

from __future__ import annotations

import torch

DIM = 128
BLOCK = 64  # tokens per block of the fp8 cache
FP8_TOKEN_BYTES = DIM + 4
PRODUCT_BYTES = 64 << 20  # at most this much of q . k, over all heads, is held at a time


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of queries against one run of keys (prefill).

    q:       [M, H, 128], fp8 or any float
    k:       [N, 128], fp8 or any float
    k_scale: [N], or None for keys that were never quantised
    weights: [M, H]
    ks, ke:  int [M], row m sees keys ks <= n < ke
    dtype:   computes in this type

    Returns [M, N] of `dtype`, -inf outside the window. ValueError for shapes that do not fit together.
    """
    if q.dim() != 3 or k.dim() != 2 or q.shape[-1] != k.shape[-1] or weights.shape != q.shape[:2]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and weights {list(weights.shape)} do not fit together")
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    column = torch.arange(k.shape[0], device=k.device)
    logits = torch.empty(q.shape[0], k.shape[0], dtype=dtype, device=q.device)
    step = max(1, PRODUCT_BYTES // max(1, q.shape[1] * k.shape[0] * dtype.itemsize))
    for start in range(0, q.shape[0], step):
        part = slice(start, start + step)
        product = torch.einsum("mhd,nd->mhn", q[part], k).relu_()
        scores = torch.einsum("mh,mhn->mn", weights[part], product)
        if k_scale is not None:
            scores = scores * k_scale.to(dtype)
        outside = (column < ks[part, None]) | (column >= ke[part, None])
        logits[part] = scores.masked_fill(outside, -torch.inf)
    return logits


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of the newest `next_n` tokens of each request against its cached keys (decode).

    q:            [B, next_n, H, 128], fp8 or any float
    cache:        uint8 [blocks, 64, 132] or [blocks, 64, 1, 132], planar (`read_blocks`); or unquantised keys [blocks,
                  block_size, 128]
    weights:      [B * next_n, H]
    context_lens: int [B] or [B, 1]: row j sees len - next_n + 1 + j keys; or [B, next_n]: each row's own count
    block_table:  int32 [B, max_blocks]
    max_len:      columns of the answer

    Returns [B * next_n, max_len] of `dtype`, -inf for columns without a key.
    """
    batch, next_n = q.shape[:2]
    lens = context_lens.reshape(batch, -1)
    if lens.shape[1] != next_n:
        lens = lens - next_n + 1 + torch.arange(next_n, device=lens.device)
    logits = torch.full((batch * next_n, max_len), -torch.inf, dtype=dtype, device=q.device)
    for b in range(batch):
        length = int(lens[b].max())
        if length <= 0:
            continue
        rows = slice(b * next_n, (b + 1) * next_n)
        k, k_scale = read_keys(cache, block_table[b], length, dtype)
        scores = mqa_logits(q[b], k, k_scale, weights[rows], torch.zeros_like(lens[b]), lens[b], dtype)
        logits[rows, :length] = scores
    return logits


def read_keys(
    cache: torch.Tensor, blocks: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first `length` keys, [length, 128], of the request with these blocks, and their scales (or None)."""
    block_size = cache.shape[1]
    held = cache[blocks[: -(-length // block_size)].long()]
    if cache.dtype != torch.uint8:
        return held.reshape(-1, cache.shape[-1])[:length].to(dtype), None
    k, k_scale = read_blocks(held)
    return k.flatten(0, 1)[:length].to(dtype), k_scale.flatten()[:length].to(dtype)


def read_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole uint8 blocks [B, 64, 132] as fp8 keys [B, 64, 128] and fp32 scales [B, 64].

    The shape suggests 132 bytes a token. But a block is planar: 64 keys of 128 bytes, then 64 scales of 4 bytes.
    """
    planes = blocks.reshape(blocks.shape[0], BLOCK * FP8_TOKEN_BYTES)
    k, k_scale = torch.split(planes, [BLOCK * DIM, BLOCK * 4], dim=1)
    k = k.contiguous().view(torch.float8_e4m3fn).view(-1, BLOCK, DIM)
    return k, k_scale.contiguous().view(torch.float32)


def pack_blocks(k: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `read_blocks`: fp8 [B, 64, 128] and fp32 [B, 64] as uint8 [B, 64, 132]."""
    planes = torch.cat([k.flatten(1).view(torch.uint8), k_scale.contiguous().view(torch.uint8)], dim=1)
    return planes.view(-1, BLOCK, FP8_TOKEN_BYTES)
