"""The host side of sparse MLA: checks, plan, launch. No host sync, and no allocation when every buffer is given."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton

from shim.kernels.sparse_mla import interpret, kernel, tune
from shim.kernels.sparse_mla.reference import FP8_ROW_BYTES, LATENT, ROPE, ROW

log = logging.getLogger(__name__)
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_TYPES = (torch.bfloat16, torch.float16)
_compiled = -1  # how many variants there were after warm-up; -1: no warm-up yet

if triton.knobs.runtime.interpret:
    interpret.install()


class Workspace:
    """What the shares of a row leave for the merge: fp32, one address for as long as graphs are replayed."""

    def __init__(
        self,
        max_tokens: int,
        heads: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        columns: int = 2048,
        sms: int | None = None,
    ) -> None:
        """Large enough for every call of up to `max_tokens` tokens. ValueError comes from `take`, if it is not."""
        device = torch.device(device)
        count = sms or sm_count(device)
        rows = 0
        for tokens in range(1, max_tokens + 1):
            splits = tune.configuration(tokens, heads, cache_dtype, count, columns).splits
            rows = max(rows, tokens * splits * heads if splits > 1 else 0)
        self.out = torch.empty(rows * LATENT, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)

    def take(self, tokens: int, splits: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """out [tokens, splits, heads, 512] and lse [tokens, splits, heads]."""
        rows = tokens * splits * heads
        if rows > self.lse.numel():
            raise ValueError(f"workspace has {self.lse.numel()} rows, {tokens} tokens x {splits} x {heads} need {rows}")
        shape = (tokens, splits, heads)
        return self.out[: rows * LATENT].view(*shape, LATENT), self.lse[:rows].view(shape)


def sparse_mla(
    q: Query,
    cache: torch.Tensor,
    topk: torch.Tensor,
    req_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    plan: tune.Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends from each token to its chosen rows: `reference.sparse_mla`, on a GPU.

    q:           [T, N, 576] bf16 or fp16, or (latent [T, N, 512], rope [T, N, 64]); any strides of whole 16 bytes
    cache:       [blocks, page, 576] of q's dtype, or uint8 [blocks, page, 656] (`fp8_ds_mla`); rows and blocks may lie
                 further apart than their size
    topk:        int32 [T, K], positions within the token's own request; -1, anywhere, is no token, and so is a
                 position that is not below the request's `seq_lens` (padded rows hold stale ones)
    req_ids:     int32 [T], row of `block_table` and `seq_lens` for each token
    block_table: int32 [R, blocks of a request]
    seq_lens:    int32 [R]
    scale:       softmax scale, natural-log units
    out, lse:    [T, N, 512] of q's dtype and fp32 [T, N], to be written
    workspace:   for T that are split; without it memory is allocated
    plan:        another than `tune.configuration`'s (tuning, tests)

    Returns out and the natural-log LSE. A token with no chosen row: 0 and -inf. ValueError names an argument that does
    not fit.
    """
    latent, rope = (q[..., :LATENT], q[..., LATENT:]) if isinstance(q, torch.Tensor) else q
    _check(latent, rope, cache, topk, req_ids, block_table, seq_lens)
    tokens, heads, _ = latent.shape
    columns = topk.shape[1]
    if out is None:
        out = torch.empty(tokens, heads, LATENT, dtype=latent.dtype, device=latent.device)
    if lse is None:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=latent.device)
    _check_output(out, lse, latent)
    if tokens == 0 or heads == 0:
        return out, lse
    plan = plan or tune.configuration(tokens, heads, cache.dtype, sm_count(latent.device), columns)
    config = plan.config
    tiles = max(1, -(-columns // config.block_k))
    span = -(-tiles // plan.splits) * config.block_k
    splits = max(1, -(-columns // span))
    if splits == 1:
        shares, share_lse = out.unsqueeze(1), lse.unsqueeze(1)
    elif workspace is not None:
        shares, share_lse = workspace.take(tokens, splits, heads)
    else:
        shares = torch.empty(tokens, splits, heads, LATENT, dtype=torch.float32, device=latent.device)
        share_lse = torch.empty(tokens, splits, heads, dtype=torch.float32, device=latent.device)

    unit = 16 // cache.element_size()
    kernel.attend[(tokens * splits * -(-heads // config.block_n),)](
        latent, rope, cache, topk, req_ids, block_table, seq_lens, shares, share_lse,
        scale, heads, columns, span, splits,
        latent.stride(0) // 8, latent.stride(1) // 8, rope.stride(0) // 8, rope.stride(1) // 8,
        cache.stride(0) // unit, cache.stride(1) // unit, topk.stride(0), block_table.stride(0),
        shares.stride(0) // 8, shares.stride(1) // 8, shares.stride(2) // 8, *share_lse.stride(),
        **constants(config, cache.dtype, cache.shape[1], _converts(latent.device)), num_warps=config.warps,
    )  # fmt: skip
    if splits > 1:
        kernel.merge[(tokens * heads, LATENT // tune.MERGE_D)](
            shares, share_lse, out, lse, heads, splits, out.stride(0) // 8, out.stride(1) // 8, *lse.stride(),
            **MERGE_CONSTANTS, num_warps=tune.MERGE_WARPS,
        )  # fmt: skip
    if _compiled >= 0:
        _tell_if_compiled(tokens, heads, latent.dtype, cache, plan)
    return out, lse


MERGE_CONSTANTS = {"MAX_SPLITS": tune.MAX_SPLITS, "STEP": tune.MERGE_STEP, "BLOCK_D": tune.MERGE_D}


@lru_cache
def constants(config: tune.Config, cache_dtype: torch.dtype, page: int, cvt: bool) -> dict[str, Any]:
    """What `kernel.attend` is compiled for. `cvt`: this GPU converts e4m3 by itself (8.9 and up)."""
    return {
        "PAGE": page, "BLOCK_K": config.block_k, "BLOCK_N": config.block_n, "TILE": config.tile,
        "PIECES": LATENT // config.tile, "FP8": cache_dtype == torch.uint8, "CVT": cvt, "SCAN": tune.SCAN,
        "STAGES": config.stages,
    }  # fmt: skip


def variants(
    heads: int, cache_dtype: torch.dtype, max_tokens: int, sms: int, columns: int = 2048
) -> Iterator[tuple[int, tune.Plan]]:
    """One token count, with its plan, for everything of its own that calls of up to `max_tokens` tokens compile."""
    seen = set()
    for tokens in range(1, max_tokens + 1):
        plan = tune.configuration(tokens, heads, cache_dtype, sms, columns)
        if (key := (plan.config, plan.splits > 1)) not in seen:
            seen.add(key)
            yield tokens, plan


def warm_up(
    heads: int,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page: int,
    max_tokens: int,
    device: torch.device | str,
    columns: int = 2048,
) -> int:
    """Launches each variant once, so that it is compiled and loaded before a graph is captured. Returns how many."""
    global _compiled
    device = torch.device(device)
    width = FP8_ROW_BYTES if cache_dtype == torch.uint8 else ROW
    cache = torch.zeros(1, page, width, dtype=cache_dtype, device=device)
    one = torch.ones(1, 1, dtype=torch.int32, device=device)
    count = 0
    for tokens, plan in variants(heads, cache_dtype, max_tokens, sm_count(device), columns):
        q = torch.ones(tokens, heads, ROW, dtype=q_dtype, device=device)
        topk = torch.full((tokens, columns), -1, dtype=torch.int32, device=device)
        req_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        sparse_mla(q, cache, topk, req_ids, one - 1, one[0], 1.0, plan=plan)
        count += 1
    _compiled = _variants_compiled()
    return count


@lru_cache
def _converts(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _variants_compiled() -> int:
    """Variants of our kernels in this process; 0 where this Triton does not show them."""
    try:
        caches = [c for k in (kernel.attend, kernel.merge) for c in k.device_caches.values()]
        return sum(len(cache[0]) for cache in caches)
    except (AttributeError, TypeError, IndexError):
        return 0


def _tell_if_compiled(tokens: int, heads: int, q_dtype: torch.dtype, cache: torch.Tensor, plan: tune.Plan) -> None:
    global _compiled
    if (count := _variants_compiled()) > _compiled:
        _compiled = count
        log.warning(
            "sparse_mla compiled a variant after warm-up: %d tokens, %d heads, q %s, cache %s, page %d, %s",
            tokens, heads, q_dtype, cache.dtype, cache.shape[1], plan,
        )  # fmt: skip


def _check(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    req_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    if latent.dim() != 3 or latent.shape[2] != LATENT or rope.shape != (*latent.shape[:2], ROPE):
        raise ValueError(
            f"q is {list(latent.shape)} and {list(rope.shape)}, expected [T, N, {LATENT}] and ditto {ROPE}"
        )
    if latent.dtype not in _TYPES or rope.dtype != latent.dtype:
        raise ValueError(f"q is {latent.dtype} and {rope.dtype}, expected bfloat16 or float16")
    fp8 = cache.dtype == torch.uint8
    width = FP8_ROW_BYTES if fp8 else ROW
    if cache.dim() != 3 or cache.shape[2] != width or not (fp8 or cache.dtype == latent.dtype):
        raise ValueError(
            f"cache is {list(cache.shape)} of {cache.dtype}, expected [blocks, page, {width}] of q's dtype "
            f"({latent.dtype}), or uint8 [blocks, page, {FP8_ROW_BYTES}]"
        )
    tokens = latent.shape[0]
    for name, tensor, shape in (
        ("topk", topk, (tokens, topk.shape[-1])),
        ("req_ids", req_ids, (tokens,)),
        ("block_table", block_table, (block_table.shape[0], block_table.shape[-1])),
        ("seq_lens", seq_lens, block_table.shape[:1]),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or (tensor.numel() > 1 and tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}, expected int32 "
                f"{list(shape)}, its last dimension contiguous"
            )
    for name, tensor in (("q", latent), ("q", rope), ("cache", cache)):
        _check_alignment(name, tensor)
    for name, tensor in (
        ("q", rope), ("cache", cache), ("topk", topk), ("req_ids", req_ids), ("block_table", block_table),
        ("seq_lens", seq_lens),
    ):  # fmt: skip
        if tensor.device != latent.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {latent.device}")


def _check_output(out: torch.Tensor, lse: torch.Tensor, latent: torch.Tensor) -> None:
    if out.shape != latent.shape or out.dtype != latent.dtype or out.device != latent.device:
        raise ValueError(f"out is {list(out.shape)} of {out.dtype}, expected {list(latent.shape)} of {latent.dtype}")
    if lse.shape != latent.shape[:2] or lse.dtype != torch.float32 or lse.device != latent.device:
        raise ValueError(f"lse is {list(lse.shape)} of {lse.dtype}, expected {list(latent.shape[:2])} of float32")
    _check_alignment("out", out)


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Rows are read and written 16 bytes at a time."""
    unit = 16 // tensor.element_size()
    first, second, last = tensor.stride()
    if last != 1 or (first | second) % unit or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} has strides {tensor.stride()} and offset {tensor.storage_offset()}: its last dimension must be "
            f"contiguous, all else whole 16 bytes"
        )
