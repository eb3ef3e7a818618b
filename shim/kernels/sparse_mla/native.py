"""vLLM's own sparse MLA kernels, called as its backends call them (0.26.0). `bench.py` compares with them.

Each function takes q [T, N, 576], the cache [blocks, page, C] and slots int32 [T, K] (global rows: the backends'
conversion of indices is not timed). It returns a function that returns out [T, N, 512]. It raises if the kernel does
not take this case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], torch.Tensor]


def fa3(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> Run:
    """FLASH_ATTN_MLA_SPARSE: FlashAttention 3 with pages of one row."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    if cache.dtype == torch.uint8:
        raise ValueError("bf16 and fp16 only")
    tokens, columns = slots.shape
    rope, latent = q[..., 512:].contiguous(), q[..., :512].contiguous()
    k = cache[:, :, 512:].view(-1, 1, 1, 64)
    v = cache[:, :, :512].view(-1, 1, 1, 512)
    ends = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
    counts = torch.full((tokens,), columns, dtype=torch.int32, device=q.device)

    def run() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            q=rope, k=k, v=v, q_v=latent, max_seqlen_q=1, cu_seqlens_q=ends, max_seqlen_k=columns, seqused_k=counts,
            block_table=slots, softmax_scale=scale, causal=True, fa_version=3,
        )  # fmt: skip
        return out

    return run


def flash_mla(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> Run:
    """FLASHMLA_SPARSE: the prefill kernel for bf16, the decode kernel (all tokens as one batch) for fp8.

    Both take at least 64 heads. Fewer are padded, as the backend does, and that is timed."""
    from vllm.v1.attention.ops import flashmla

    ops: Any = flashmla
    tokens, heads, _ = q.shape
    padded = 64 if heads <= 64 else 128

    def widen() -> torch.Tensor:
        if heads == padded:
            return q
        wide = q.new_zeros(tokens, padded, q.shape[2])
        wide[:, :heads] = q
        return wide

    if cache.dtype == torch.uint8:
        metadata, _ = ops.get_mla_metadata()
        lengths = torch.full((1,), cache.shape[0] * cache.shape[1], dtype=torch.int32, device=q.device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)

        def run() -> torch.Tensor:
            out, _ = ops.flash_mla_with_kvcache(
                q=widen()[None], k_cache=cache.unsqueeze(-2), block_table=table, head_dim_v=512, cache_seqlens=lengths,
                tile_scheduler_metadata=metadata, is_fp8_kvcache=True, indices=slots[None], softmax_scale=scale,
            )  # fmt: skip
            answer: torch.Tensor = out[0, :, :heads]
            return answer

    else:
        counts = torch.full((tokens,), slots.shape[1], dtype=torch.int32, device=q.device)

        def run() -> torch.Tensor:
            rows = cache.view(-1, 1, cache.shape[-1])
            out = ops.flash_mla_sparse_fwd(widen(), rows, slots[:, None], scale, topk_length=counts)[0]
            answer: torch.Tensor = out[:, :heads]
            return answer

    return run


KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Run]] = {
    "fa3": fa3,
    "flashmla": flash_mla,
}
