"""The host side of the indexer's scores: checks and launch. No host sync, nothing allocated but the answer, and grids
that depend on shapes alone, so that a captured graph serves any lengths."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from shim.kernels.indexer import kernel, tune
from shim.kernels.indexer.reference import BLOCK, DIM, FP8_TOKEN_BYTES
from shim.kernels.sparse_mla.launch import sm_count  # and bf16 under the interpreter

FP8 = torch.float8_e4m3fn
INTERPRETED = (12, 0)  # what a CPU under the interpreter counts as


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor | None = None,
    compressed_columns: int | None = None,
    config: tune.Prefill | None = None,
) -> torch.Tensor:
    """Scores of queries against one run of keys (prefill): `reference.mqa_logits`, on a GPU.

    q:       [M, H, 128] e4m3, bf16 or fp16; H is 16, 32 or 64; strides of whole 16 bytes, as of k
    k:       [N, 128] of q's dtype
    k_scale: fp32 [N]
    weights: fp32 [M, H], any strides
    ks, ke:  int32 [M], row m sees keys ks <= n < ke
    out:     fp32 [M, columns], any row stride
    compressed_columns: None: N columns, column n is key n. W: W columns, column j of row m is key ks[m] + j
    config:  another than `tune.prefill`'s (tuning, tests)

    Returns fp32 [M, columns] with a row stride of whole 16 bytes. Only what a row sees is written, the rest is left as
    it was. ValueError names an argument that does not fit.
    """
    heads = _check_query("q", q, 3, (FP8, torch.bfloat16, torch.float16))
    queries = q.shape[0]
    if k.dim() != 2 or k.shape[1] != DIM or k.dtype != q.dtype:
        raise ValueError(f"k is {list(k.shape)} of {k.dtype}, expected [N, {DIM}] of q's {q.dtype}")
    _check_alignment("k", k)
    keys = k.shape[0]
    _check("k_scale", k_scale, torch.float32, (keys,), q.device)
    _check("weights", weights, torch.float32, (queries, heads), q.device, strided=True)
    _check("ks", ks, torch.int32, (queries,), q.device)
    _check("ke", ke, torch.int32, (queries,), q.device)
    width = keys if compressed_columns is None else compressed_columns
    out = _answer(out, queries, width, q.device)
    if out.numel() == 0 or keys == 0:
        return out
    capability = _capability(q.device)
    config = config or tune.prefill(heads, capability)
    grid = triton.cdiv(keys, config.block_n) * triton.cdiv(queries, config.group)
    unit = 16 // q.element_size()
    kernel.mqa[(grid,)](
        _operand(q, capability), _operand(k, capability), k_scale, weights, ks, ke, out,
        queries, keys, width, int(compressed_columns is not None),
        q.stride(0) // unit, q.stride(1) // unit, k.stride(0) // unit,
        weights.stride(0), weights.stride(1), out.stride(0),
        HEADS=heads, BLOCK_N=config.block_n, COLUMNS=config.columns, GROUP=config.group,
        STAGES=config.stages, num_warps=config.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    out: torch.Tensor | None = None,
    config: tune.Paged | None = None,
) -> torch.Tensor:
    """Scores of each request's newest `next_n` tokens against its cached keys (decode): `reference.paged_mqa_logits`.

    q:            [B, next_n, H, 128] e4m3, next_n 1 to 8; H is 16, 32 or 64; strides of whole 16 bytes
    cache:        uint8 [blocks, 64, 132] or [blocks, 64, 1, 132], planar (`reference.read_blocks`); blocks may lie
                  further apart than their size, by whole 16 bytes
    weights:      fp32 [B * next_n, H], any strides
    context_lens: int32 [B] or [B, 1]: row j sees len - next_n + 1 + j keys; or [B, next_n]: each row's own count. A row
                  that sees none is neither read for nor written
    block_table:  int32 [B, blocks of a request]; entries behind a request's length are not read
    max_len:      columns of the answer
    out:          fp32 [B * next_n, max_len], any row stride
    config:       another than `tune.paged`'s (tuning, tests)

    Returns fp32 [B * next_n, max_len] with a row stride of whole 16 bytes. Only what a row sees is written, the rest is
    left as it was. ValueError names an argument that does not fit.
    """
    heads = _check_query("q", q, 4, (FP8,))
    batch, next_n = q.shape[:2]
    if not 1 <= next_n <= 8:
        raise ValueError(f"q is {list(q.shape)}: next_n is {next_n}, expected 1 to 8")
    planar = cache.squeeze(2) if cache.dim() == 4 else cache
    if planar.shape[1:] != (BLOCK, FP8_TOKEN_BYTES) or cache.dtype != torch.uint8 or cache.device != q.device:
        raise ValueError(
            f"cache is {list(cache.shape)} of {cache.dtype} on {cache.device}, expected uint8 "
            f"[blocks, {BLOCK}, {FP8_TOKEN_BYTES}] on {q.device}"
        )
    if planar.stride()[1:] != (FP8_TOKEN_BYTES, 1) or planar.stride(0) % 16 or planar.data_ptr() % 16:
        raise ValueError(f"cache has strides {cache.stride()}: blocks must be contiguous, and whole 16 bytes apart")
    _check("weights", weights, torch.float32, (batch * next_n, heads), q.device, strided=True)
    counts = next_n if context_lens.dim() == 2 and context_lens.shape[1] == next_n else 1
    shape = (batch,) if context_lens.dim() == 1 else (batch, counts)
    _check("context_lens", context_lens, torch.int32, shape, q.device, strided=True)
    _check("block_table", block_table, torch.int32, (batch, block_table.shape[-1]), q.device)
    out = _answer(out, batch * next_n, max_len, q.device)
    limit = min(max_len, block_table.shape[1] * BLOCK)
    if batch == 0 or limit == 0:
        return out
    capability = _capability(q.device)
    config = config or tune.paged(capability)
    columns = tune.paged_columns(heads, next_n, config)
    groups = triton.cdiv(next_n, columns // heads)
    shares = max(1, min(batch * triton.cdiv(limit, BLOCK), sm_count(q.device) * config.per_sm // groups))
    kernel.paged_mqa[(groups * shares,)](
        _operand(q, capability), _operand(planar.view(FP8), capability), weights, context_lens, block_table, out,
        batch, next_n, counts, limit, groups,
        q.stride(0) // 16, q.stride(1) // 16, q.stride(2) // 16, planar.stride(0) // 16,
        weights.stride(0), weights.stride(1),
        context_lens.stride(0), context_lens.stride(1) if counts > 1 else 0, block_table.stride(0), out.stride(0),
        HEADS=heads, COLUMNS=columns, SCAN=tune.SCAN, STAGES=config.stages, num_warps=config.warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def warm_up(heads: int, max_requests: int, next_n: int, max_len: int, device: torch.device | str) -> None:
    """Launches every variant that fp8 serving with up to `next_n` tokens a request can pick, so that it is compiled and
    loaded before a graph is captured. No variant depends on `max_requests` or `max_len`, so the launches are small."""
    device = torch.device(device)
    length = min(BLOCK, max_len)
    one = torch.ones(1, 1, dtype=torch.int32, device=device)
    cache = torch.zeros(1, BLOCK, FP8_TOKEN_BYTES, dtype=torch.uint8, device=device)
    for rows in range(1, next_n + 1):
        q = torch.zeros(1, rows, heads, DIM, device=device).to(FP8)
        weights = torch.zeros(rows, heads, device=device)
        paged_mqa_logits(q, cache, weights, one[0], one - 1, length)
    k = torch.zeros(1, DIM, device=device).to(FP8)
    mqa_logits(q[0, :1], k, weights[0, :1], weights[:1], one[0] - 1, one[0])


def _answer(out: torch.Tensor | None, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    if columns < 0:
        raise ValueError(f"the answer has {columns} columns")
    if out is None:  # top-k wants rows of whole 16 bytes
        return torch.empty(rows, triton.cdiv(columns, 4) * 4, dtype=torch.float32, device=device)[:, :columns]
    _check("out", out, torch.float32, (rows, columns), device)
    return out


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED


def _operand(x: torch.Tensor, capability: tuple[int, int]) -> torch.Tensor:
    """As bytes, for the kernel to convert to fp16, where the MMA does not take fp8."""
    return x.view(torch.uint8) if x.dtype == FP8 and capability < (8, 9) else x


def _check_query(name: str, q: torch.Tensor, dims: int, dtypes: tuple[torch.dtype, ...]) -> int:
    if q.dim() != dims or q.shape[-1] != DIM or q.shape[-2] not in tune.HEADS or q.dtype not in dtypes:
        raise ValueError(
            f"{name} is {list(q.shape)} of {q.dtype}, expected {dims} dimensions, the last two heads (one of "
            f"{tune.HEADS}) and {DIM}, of {' or '.join(map(str, dtypes))}"
        )
    _check_alignment(name, q)
    return q.shape[-2]


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Rows are read 16 bytes at a time."""
    unit = 16 // tensor.element_size()
    if tensor.stride(-1) != 1 or any(s % unit for s in tensor.stride()[:-1]) or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} has strides {tensor.stride()} and offset {tensor.storage_offset()}: its last dimension must be "
            f"contiguous, all else whole 16 bytes"
        )


def _check(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    strided: bool = False,
) -> None:
    contiguous = strided or tensor.shape[-1:].numel() <= 1 or tensor.stride(-1) == 1
    if tensor.dtype != dtype or tensor.shape != shape or not contiguous or tensor.device != device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()} on {tensor.device}, "
            f"expected {dtype} {list(shape)} on {device}{'' if strided else ', its last dimension contiguous'}"
        )
