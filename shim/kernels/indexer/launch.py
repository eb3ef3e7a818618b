"""The host side of the indexer's scores: checks, plan, launch. No host sync, and no allocation but the answer.

Grids depend on shapes alone, so a captured graph serves any lengths.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shim.kernels import interpreter
from shim.kernels.host import Compiled, Form, Launch, form, sm_count
from shim.kernels.indexer import kernel, tune
from shim.kernels.indexer.reference import BLOCK, DIM, FP8_TOKEN_BYTES

FP8 = torch.float8_e4m3fn
INTERPRETED = (12, 0)  # the capability of a CPU with the interpreter
interpreter.mend()
compiled = Compiled("indexer", kernel.mqa_keep_keys, kernel.mqa_keep_queries, kernel.paged_mqa)


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

    q:       [M, H, 128] e4m3, bf16 or fp16; H is 16, 32 or 64; strides are multiples of 16 bytes
    k:       [N, 128] of q's dtype; strides as those of q
    k_scale: fp32 [N]
    weights: fp32 [M, H], any strides
    ks, ke:  int32 [M], row m sees keys ks <= n < ke
    out:     fp32 [M, columns], any row stride
    compressed_columns: None: N columns, column n is key n. W: W columns, column j of row m is key ks[m] + j
    config:  in place of `tune.prefill`'s (tuning, tests)

    Returns fp32 [M, columns]; without `out` its row stride is a multiple of 16 bytes. Only what a row sees is written,
    the rest stays as it was. ValueError names an argument that does not fit.
    """
    function, launch = _prefill(
        form(q), form(k), form(k_scale), form(weights), form(ks), form(ke), None if out is None else form(out),
        compressed_columns, config, sm_count(q.device),
    )  # fmt: skip
    if out is None:
        out = _answer(q.shape[0], k.shape[0] if compressed_columns is None else compressed_columns, q.device)
    if launch.programs:
        function[(launch.programs,)](
            _operand(q), _operand(k), k_scale, weights, ks, ke, out, *launch.numbers, out.stride(0), **launch.options
        )
        compiled.tell(launch)
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

    q:            [B, next_n, H, 128] e4m3, next_n 1 to 8; H is 16, 32 or 64; strides are multiples of 16 bytes
    cache:        uint8 [blocks, 64, 132] or [blocks, 64, 1, 132], planar (`reference.read_blocks`); blocks may lie
                  further apart than their size, by a multiple of 16 bytes
    weights:      fp32 [B * next_n, H], any strides
    context_lens: int32 [B] or [B, 1]: row j sees len - next_n + 1 + j keys; or [B, next_n]: each row's own count.
                  Nothing is read or written for a row that sees no key
    block_table:  int32 [B, blocks of a request]; entries behind a request's length are not read
    max_len:      columns of the answer
    out:          fp32 [B * next_n, max_len], any row stride
    config:       in place of `tune.paged`'s (tuning, tests)

    Returns fp32 [B * next_n, max_len]; without `out` its row stride is a multiple of 16 bytes. Only what a row sees is
    written, the rest stays as it was. ValueError names an argument that does not fit.
    """
    launch = _paged(
        form(q), form(cache), form(weights), form(context_lens), form(block_table), None if out is None else form(out),
        max_len, config, sm_count(q.device),
    )  # fmt: skip
    if out is None:
        out = _answer(q.shape[0] * q.shape[1], max_len, q.device)
    if launch.programs:
        kernel.paged_mqa[(launch.programs,)](
            _operand(q), _operand(cache.view(FP8)), weights, context_lens, block_table, out,
            *launch.numbers, out.stride(0), **launch.options,
        )  # fmt: skip
        compiled.tell(launch)
    return out


def warm_up(heads: int, max_requests: int, next_n: int, max_len: int, device: torch.device | str) -> None:
    """Launches every variant that fp8 serving with up to `next_n` tokens a request can use. So all are compiled and
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
    compiled.warm(device)


@lru_cache(maxsize=512)  # the forms of a prefill are those of one step, in all layers
def _prefill(
    q: Form,
    k: Form,
    k_scale: Form,
    weights: Form,
    ks: Form,
    ke: Form,
    out: Form | None,
    compressed_columns: int | None,
    config: tune.Prefill | None,
    sms: int,
) -> tuple[Any, Launch]:
    """Checks and plans `mqa_logits`: the kernel, and its launch."""
    heads = _check_query("q", q, 3, (FP8, torch.bfloat16, torch.float16))
    queries = q.shape[0]
    if len(k.shape) != 2 or k.shape[1] != DIM or k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"k is {k}, expected [N, {DIM}] of {q.dtype} on {q.device}, as q")
    _check_alignment("k", k)
    keys = k.shape[0]
    _check("k_scale", k_scale, torch.float32, (keys,), q.device)
    _check("weights", weights, torch.float32, (queries, heads), q.device, strided=True)
    _check("ks", ks, torch.int32, (queries,), q.device)
    _check("ke", ke, torch.int32, (queries,), q.device)
    width = keys if compressed_columns is None else compressed_columns
    _check_answer(out, queries, width, q.device)
    config = config or tune.prefill(heads, _capability(q.device))
    programs, group = tune.prefill_grid(queries, keys, heads, config, sms)
    unit = 16 // q.dtype.itemsize
    function, constants = prefill_kernel(config, heads)
    return function, Launch(
        programs if width else 0,
        (
            queries, keys, width, int(compressed_columns is not None),
            q.strides[0] // unit, q.strides[1] // unit, k.strides[0] // unit, *weights.strides,
        ),
        constants
        | ({"group": group} if config.keep == "queries" else {})
        | {"num_warps": config.warps, "enable_fp_fusion": True},
    )  # fmt: skip


def prefill_kernel(config: tune.Prefill, heads: int) -> tuple[Any, dict[str, int]]:
    """The kernel that `config` belongs to, and its constants."""
    constants = {"HEADS": heads, "BLOCK_N": config.block_n, "COLUMNS": config.columns, "STAGES": config.stages}
    if config.keep == "keys":
        return kernel.mqa_keep_keys, constants | {"GROUP": config.group}
    return kernel.mqa_keep_queries, constants


@lru_cache(maxsize=512)
def _paged(
    q: Form,
    cache: Form,
    weights: Form,
    context_lens: Form,
    block_table: Form,
    out: Form | None,
    max_len: int,
    config: tune.Paged | None,
    sms: int,
) -> Launch:
    """Checks and plans `paged_mqa_logits`."""
    heads = _check_query("q", q, 4, (FP8,))
    batch, next_n = q.shape[:2]
    if not 1 <= next_n <= 8:
        raise ValueError(f"q is {q}: next_n is {next_n}, expected 1 to 8")
    blocks = ((BLOCK, FP8_TOKEN_BYTES), (BLOCK, 1, FP8_TOKEN_BYTES))
    if cache.shape[1:] not in blocks or cache.dtype != torch.uint8 or cache.device != q.device:
        raise ValueError(f"cache is {cache}, expected uint8 [blocks, {BLOCK}, {FP8_TOKEN_BYTES}] on {q.device}")
    if (cache.strides[1], cache.strides[-1]) != (FP8_TOKEN_BYTES, 1) or cache.strides[0] % 16 or not cache.aligned:
        raise ValueError(f"cache has strides {cache.strides}: blocks must be contiguous, and whole 16 bytes apart")
    _check("weights", weights, torch.float32, (batch * next_n, heads), q.device, strided=True)
    counts = next_n if context_lens.shape[1:] == (next_n,) else 1
    shape = (batch,) if len(context_lens.shape) == 1 else (batch, counts)
    _check("context_lens", context_lens, torch.int32, shape, q.device, strided=True)
    _check("block_table", block_table, torch.int32, (batch, block_table.shape[-1]), q.device)
    _check_answer(out, batch * next_n, max_len, q.device)
    limit = min(max_len, block_table.shape[1] * BLOCK)
    config = config or tune.paged(_capability(q.device))
    columns = tune.paged_columns(heads, next_n, config)
    groups = -(-next_n // (columns // heads))
    shares = min(batch * -(-limit // BLOCK), max(1, sms * config.per_sm // groups))
    return Launch(
        groups * shares,
        (
            batch, next_n, counts, limit, groups,
            q.strides[0] // 16, q.strides[1] // 16, q.strides[2] // 16, cache.strides[0] // 16, *weights.strides,
            context_lens.strides[0], context_lens.strides[1] if counts > 1 else 0, block_table.strides[0],
        ),
        {
            "HEADS": heads, "COLUMNS": columns, "SCAN": tune.SCAN, "STAGES": config.stages,
            "num_warps": config.warps, "enable_fp_fusion": True,
        },
    )  # fmt: skip


def _answer(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """New memory whose rows are multiples of 16 bytes apart, as top-k needs them."""
    whole = torch.empty(rows, -(-columns // 4) * 4, dtype=torch.float32, device=device)
    return whole if whole.shape[1] == columns else whole[:, :columns]


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED


def _operand(x: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes if this GPU's MMA does not take e4m3: the kernel converts them to fp16."""
    return x.view(torch.uint8) if x.dtype == FP8 and _capability(x.device) < (8, 9) else x


def _check_query(name: str, q: Form, dims: int, dtypes: tuple[torch.dtype, ...]) -> int:
    if len(q.shape) != dims or q.shape[-1] != DIM or q.shape[-2] not in tune.HEADS or q.dtype not in dtypes:
        raise ValueError(
            f"{name} is {q}, expected {dims} dimensions, the last two heads (one of {tune.HEADS}) and {DIM}, of "
            f"{' or '.join(map(str, dtypes))}"
        )
    _check_alignment(name, q)
    return q.shape[-2]


def _check_alignment(name: str, found: Form) -> None:
    if not found.in_16_bytes:
        raise ValueError(
            f"{name} has strides {found.strides}, begins at {'' if found.aligned else 'no '}whole 16 bytes: its last "
            f"dimension must be contiguous, all else whole 16 bytes"
        )


def _check_answer(out: Form | None, rows: int, columns: int, device: torch.device) -> None:
    if columns < 0:
        raise ValueError(f"the answer has {columns} columns")
    if out is not None:
        _check("out", out, torch.float32, (rows, columns), device)
        if rows > 1 and out.strides[0] < columns:
            raise ValueError(f"out has strides {out.strides}: its rows of {columns} columns overlap")


def _check(
    name: str, found: Form, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, strided: bool = False
) -> None:
    contiguous = strided or found.shape[-1:].numel() <= 1 or found.strides[-1] == 1
    if found.dtype != dtype or found.shape != shape or not contiguous or found.device != device:
        raise ValueError(
            f"{name} is {found}, expected {dtype} {list(shape)} on {device}"
            f"{'' if strided else ', its last dimension contiguous'}"
        )
