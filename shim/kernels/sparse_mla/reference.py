"""Sparse MLA in plain torch. Every kernel is judged by it, and the CPU runs it.

For a query token t with heads n and chosen cache rows c_j (576 values: 512 latent, 64 rope):

    s[n, j] = scale * q[t, n] . c_j
    lse[t, n] = ln sum_j exp(s[n, j])
    out[t, n] = sum_j exp(s[n, j] - lse[t, n]) * c_j[:512]

Source: DeepSeek-V3.2 (DSA), and vLLM's contract for `forward_mqa` of a sparse MLA backend.
"""

from __future__ import annotations

import torch

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
GROUP = 128  # latent values that share one fp8 scale
GROUPS = LATENT // GROUP
FP8_ROW_BYTES = LATENT + 4 * GROUPS + 2 * ROPE  # 656: e4m3 latent | fp32 scales | bf16 rope
GATHER_BYTES = 64 << 20  # at most this much of the cache is gathered at a time


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    req_ids: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends from each token to its chosen rows.

    q:           [T, N, 576]
    cache:       [blocks, block_size, 576] of any float, or uint8 [blocks, block_size, 656] (`fp8_ds_mla`); the blocks
                 may lie further apart than their size (`stride(0)`)
    topk:        int32 [T, K], positions within the token's own request; -1, at any place of the row, is no token
    req_ids:     int [T], row of `block_table` for each token
    block_table: int32 [requests, max_blocks]
    scale:       softmax scale, natural-log units
    dtype:       computes in this type

    Returns out [T, N, 512] and the natural-log LSE [T, N], both of `dtype`. A token without chosen rows has 0 and -inf.
    ValueError for shapes that do not fit together.
    """
    _check(q, cache, topk, req_ids)
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, LATENT, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    step = max(1, GATHER_BYTES // max(1, topk.shape[1] * ROW * dtype.itemsize))
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        chosen = topk[part]
        chosen = chosen[:, (chosen >= 0).any(0)]  # drops columns that no token of this part uses
        if chosen.shape[1] == 0:
            continue
        out[part], lse[part] = _attend(q[part].to(dtype), cache, chosen, block_table[req_ids[part].long()], scale)
    return out, lse


def _attend(
    q: torch.Tensor, cache: torch.Tensor, chosen: torch.Tensor, blocks: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = chosen >= 0
    position = chosen.clamp(min=0).long()
    block_size = cache.shape[1]
    block = blocks.gather(1, position // block_size).long().where(valid, 0)
    rows = read_rows(cache[block, position % block_size], q.dtype)  # [t, K, 576]
    rows = rows.masked_fill(~valid[..., None], 0)  # position 0 stands for an absent row, and may be NaN
    scores = torch.einsum("tnd,tkd->tnk", q, rows) * scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(q.dtype).min)[..., None])  # -inf - -inf would be NaN
    return torch.einsum("tnk,tkd->tnd", weights, rows[..., :LATENT]), lse


def read_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cache rows [..., 576], or uint8 [..., 656] as written by `pack_fp8_ds_mla`, as [..., 576] of `dtype`."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    latent, scales, rope = torch.split(rows, [LATENT, 4 * GROUPS, 2 * ROPE], dim=-1)
    latent = latent.contiguous().view(torch.float8_e4m3fn).to(dtype).reshape(*rows.shape[:-1], GROUPS, GROUP)
    latent = latent * scales.contiguous().view(torch.float32).to(dtype)[..., None]
    return torch.cat([latent.flatten(-2), rope.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)


def pack_fp8_ds_mla(rows: torch.Tensor) -> torch.Tensor:
    """Float rows [..., 576] as uint8 [..., 656]: e4m3 latent, one fp32 scale (amax / 448) per 128 values, bf16 rope."""
    latent = rows[..., :LATENT].float().reshape(*rows.shape[:-1], GROUPS, GROUP)
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (latent.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (latent / scales[..., None]).clamp(-largest, largest).to(torch.float8_e4m3fn)
    rope = rows[..., LATENT:].to(torch.bfloat16).contiguous()
    return torch.cat([values.flatten(-2).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def _check(q: torch.Tensor, cache: torch.Tensor, topk: torch.Tensor, req_ids: torch.Tensor) -> None:
    if q.dim() != 3 or q.shape[-1] != ROW:
        raise ValueError(f"q is {list(q.shape)}, expected [T, N, {ROW}]")
    width = FP8_ROW_BYTES if cache.dtype == torch.uint8 else ROW
    if cache.dim() != 3 or cache.shape[-1] != width:
        raise ValueError(f"cache is {list(cache.shape)} of {cache.dtype}, expected [blocks, block_size, {width}]")
    if topk.dim() != 2 or topk.shape[0] != q.shape[0] or req_ids.shape != q.shape[:1]:
        raise ValueError(f"topk {list(topk.shape)} and req_ids {list(req_ids.shape)} do not fit {q.shape[0]} tokens")
