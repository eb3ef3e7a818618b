"""Sparse MLA as the MLA layer calls it, for every vLLM from 0.16.0 to 0.33.0.

The layer absorbs W_UK into the query before, and applies W_UV after: an impl sees only queries and cache rows of 576
values, and answers 512.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention import backend as vllm_backend

from shim.attention.metadata import SparseMLAMetadata
from shim.kernels.sparse_mla import reference

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [T, N, 576], or latent [T, N, 512] and rope [T, N, 64]
# 0.16-0.25 recognise a sparse impl by this base class; 0.26 removed it and looks at `is_sparse`
_Base: Any = getattr(vllm_backend, "SparseMLAAttentionImpl", None) or vllm_backend.MLAAttentionImpl


class SparseMLAImpl(_Base):
    """All but the arithmetic. A subclass gives `attend`."""

    is_sparse: ClassVar[bool] = True  # 0.26 and later
    supports_dense_mha_prefill: bool = False  # 0.26 and later: prefill takes the top-k path too
    masked_mha_available: bool = False  # 0.27 and later
    supports_quant_query_input: bool = False
    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False  # the default is True from 0.26 on
    supports_dcp: bool = False  # the default is True up to 0.29

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,  # 0.24 and later; before, only the indexer has it
        **mla: Any,  # MLA's ranks and sizes, `kv_b_proj`; from 0.30 on `index_group_builder`
    ) -> None:
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != "decoder":
            raise NotImplementedError("sparse MLA has no ALiBi, sliding window, logits soft cap or encoder attention")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """int32 [max_num_batched_tokens, K], request-local positions. Looked up per call: from 0.30 on a draft model's
        indexer is pointed at its target's buffer after construction; a layer that shares indices has no indexer."""
        buffer = self._topk_indices_buffer if self.indexer is None else self.indexer.topk_indices_buffer
        if not isinstance(buffer, torch.Tensor):
            raise ValueError("a sparse MLA layer has neither an indexer nor a top-k buffer")
        return buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        """A draft model's layers are pointed at its target's buffer."""
        self._topk_indices_buffer = buffer
        if self.indexer is not None:
            self.indexer.topk_indices_buffer = buffer

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [T, N, 576], or as (latent, rope), to out [T, N, 512] and natural-log LSE [T, N]."""
        tokens = (q if isinstance(q, torch.Tensor) else q[0]).shape[0]
        return self.attend(q, kv_c_and_k_pe_cache, self.topk_indices_buffer[:tokens], attn_metadata)

    def attend(
        self, q: Query, cache: torch.Tensor, topk: torch.Tensor, metadata: SparseMLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    # called by 0.30 and later, whose backends translate indices once for a group of layers; ours do it in `attend`

    def record_logical_topk_ready(self) -> None:
        pass

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        pass


class ReferenceMLASparseImpl(SparseMLAImpl):
    """Plain torch: `shim.kernels.sparse_mla.reference`."""

    def attend(
        self, q: Query, cache: torch.Tensor, topk: torch.Tensor, metadata: SparseMLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = q if isinstance(q, torch.Tensor) else torch.cat(q, dim=-1)
        out, lse = reference.sparse_mla(q, cache, topk, metadata.req_ids, metadata.block_table, self.scale)
        return out.to(q.dtype), lse

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [T, 512]
        k_pe: torch.Tensor,  # [T, 1, 64] or [T, 64]
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,  # -1: no slot
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # 0.33
    ) -> None:
        """Writes this batch's rows. 0.17 and later; before, the layer writes them by a CUDA op."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        rows = torch.cat([kv_c_normed, k_pe.reshape(-1, reference.ROPE)], dim=-1)[: slots.shape[0]]
        write_rows(kv_cache, slots, reference.pack_fp8_ds_mla(rows) if kv_cache_dtype == "fp8_ds_mla" else rows)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Puts rows [T, C] at their slots (block * block_size + offset; -1: nowhere) of a cache [blocks, block_size, C]."""
    real = slots >= 0
    slots = slots[real]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows[real].to(cache.dtype)
