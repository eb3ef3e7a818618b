"""vLLM's calls of the DSA indexer's kernels, answered by ours.

Each function takes what the release passes to its own. None or False means that our kernels cannot serve the call, and
that vLLM's own must run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shim.kernels.indexer import launch as indexer
from shim.kernels.indexer.reference import BLOCK, DIM, FP8_TOKEN_BYTES
from shim.kernels.topk import launch as topk

MAX_K = 2048  # of our top-k
_warm = False
_workspace: topk.Workspace | None = None


def mqa_logits(given: Mapping[str, Any]) -> torch.Tensor | None:
    """`fp8_mqa_logits`, `fp8_mqa_logits_torch` and `fp8_fp4_mqa_logits` of every release.

    given: the arguments by name. All releases begin with q, (k, k_scale), weights, cu_seqlen_ks, cu_seqlen_ke

    Returns fp32 logits [M, N]. With `max_seqlen_k` (0.33) row i begins with key `cu_seqlen_ks[i]`. None for fp4 or MX
    inputs and for `clean_logits`.
    """
    q, (k, k_scale), weights, ks, ke = list(given.values())[:5]
    q = _plain(q)
    fp8 = q is not None and k.dtype == torch.float8_e4m3fn and k_scale.dtype == torch.float32
    if q is None or not fp8 or k.shape[-1] != DIM or given.get("clean_logits"):
        return None
    k_scale = k_scale if k_scale.dim() == 1 else k_scale.reshape(-1)
    return indexer.mqa_logits(q, k, k_scale, weights, ks, ke, compressed_columns=given.get("max_seqlen_k"))


def paged_mqa_logits(given: Mapping[str, Any]) -> torch.Tensor | None:
    """`fp8_paged_mqa_logits`, `fp8_paged_mqa_logits_torch` and `fp8_fp4_paged_mqa_logits` of every release.

    given: the arguments by name. All releases begin with q, cache, weights, context_lens, block_table.
           DeepGEMM's schedule is not read; `indices` (0.28) is for SM100 only

    Returns fp32 logits [B * next_n, max_model_len]. None for fp4 or MX inputs, another cache, `indices` and
    `clean_logits`.
    """
    q, cache, weights, context_lens, block_table = list(given.values())[:5]
    q = _plain(q)
    known = cache.dtype == torch.uint8 and cache.shape[1] == BLOCK and cache.shape[-1] == FP8_TOKEN_BYTES
    if q is None or not known or given.get("clean_logits") or given.get("indices") is not None:
        return None
    batch = q.shape[0]
    context_lens, block_table = _first(context_lens, batch), _first(block_table, batch)
    return indexer.paged_mqa_logits(q, cache, weights, context_lens, block_table, given["max_model_len"])


def _plain(q: Any) -> torch.Tensor | None:
    """The fp8 query, whose scale is in the weights; None for fp4 or MX scales."""
    if isinstance(q, tuple):
        q, q_scale = q
        if q_scale is not None:
            return None
    return q if q.dtype == torch.float8_e4m3fn and q.shape[-1] == DIM else None


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Its first `rows` rows. Mostly these are all. Then no slice is made, because it costs a quarter of a launch."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
) -> bool:
    """Writes positions relative to `row_starts` into `indices`, -1 where a row has fewer than k. False: not served."""
    return _choose(_first(logits, num_rows), row_ends - row_starts, _first(indices, num_rows), k, starts=row_starts)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
) -> bool:
    return _choose(_first(logits, num_rows), seq_lens, _first(indices, num_rows), k)


def large_context_topk(
    logits: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor | None
) -> bool:
    return _choose(logits, lengths, indices, indices.shape[1], starts=row_starts)


def persistent_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    indices: torch.Tensor,
    workspace: torch.Tensor,
    k: int,
    max_seq_len: int,
) -> bool:
    """Also `cooperative_topk`. Our kernel does not need their workspace and `max_seq_len`."""
    return _choose(logits, lengths, indices, k)


def _choose(
    logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor, k: int, starts: torch.Tensor | None = None
) -> bool:
    """Writes the top-k of each row into `indices`. False if our kernel cannot: not fp32, or k above MAX_K.

    lengths: one a row; or one a request ([B] or [B, 1]), whose last row sees all its keys, and each row before one less
    """
    if logits.dtype != torch.float32 or k > MAX_K:
        return False
    rows = logits.shape[0]
    if rows:
        next_n = None if lengths.numel() == rows else rows // lengths.numel()
        lengths = lengths if lengths.dim() == 1 else lengths.reshape(-1)
        topk.topk(logits, lengths, k, out=indices, starts=starts, next_n=next_n, workspace=_workspace)
    return True


def warm_up(builder: Any, logits: bool, top: bool) -> None:
    """Compiles what serving can launch, once per process, so that nothing compiles during graph capture.

    builder:     vLLM's metadata builder of the indexer, just constructed
    logits, top: True if these kernels are ours
    """
    global _warm, _workspace
    if _warm:
        return
    _warm = True
    vllm_config, device = builder.vllm_config, builder.device
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    config = model.hf_text_config
    speculative = vllm_config.speculative_config
    next_n = 1 + (speculative.num_speculative_tokens if speculative else 0)
    requests = scheduler.max_num_seqs
    if logits:
        indexer.warm_up(config.index_n_heads, requests, next_n, model.max_model_len, device)
    if top:
        rows = max(requests * next_n, scheduler.max_num_batched_tokens)
        columns = max(model.max_model_len, builder.max_prefill_buffer_size)  # prefill has keys of several requests
        topk.warm_up(config.index_topk, rows, columns, device)
        # with dual-batch overlap two streams run at once, so each call makes its own workspace
        if not getattr(vllm_config.parallel_config, "enable_dbo", False):
            _workspace = topk.Workspace(rows, columns, device)
