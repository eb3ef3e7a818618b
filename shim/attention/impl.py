"""Sparse MLA as the MLA layer calls it, for every vLLM from 0.16.0 to 0.33.0.

The layer multiplies the query by W_UK before the call, and the answer by W_UV after it. So queries and cache rows have
576 values (kv_lora_rank 512 and 64 of rope), and answers have 512.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention import backend as vllm_backend

from shim.attention.metadata import SparseMLAMetadata
from shim.kernels.sparse_mla import reference

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # [T, N, 576], or latent [T, N, 512] and rope [T, N, 64]
# 0.16-0.25 know a sparse implementation by this base class. 0.26 removed it and looks at `is_sparse`
_Base: Any = getattr(vllm_backend, "SparseMLAAttentionImpl", None) or vllm_backend.MLAAttentionImpl


class SparseMLAImpl(_Base):
    """Everything but the arithmetic, which a subclass gives as `attend`."""

    is_sparse: ClassVar[bool] = True  # 0.26 and later
    supports_dense_mha_prefill: bool = False  # 0.26 and later; prefill takes the top-k path too
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
        topk_indices_buffer: torch.Tensor | None = None,  # 0.24 and later; up to 0.23 only the indexer has it
        **mla: Any,  # MLA's ranks and sizes, `kv_b_proj`, and from 0.30 on `index_group_builder`
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
        """int32 [max_num_batched_tokens, K], positions in each token's request. ValueError if there is no buffer.

        It is looked up at each call, because from 0.30 on vLLM gives a draft model's indexer the buffer of its target
        after construction. A layer that shares indices has no indexer.
        """
        buffer = self._topk_indices_buffer if self.indexer is None else self.indexer.topk_indices_buffer
        if not isinstance(buffer, torch.Tensor):
            raise ValueError("a sparse MLA layer has neither an indexer nor a top-k buffer")
        return buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        """vLLM gives the layers of a draft model the buffer of its target."""
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
        """Returns out [T, N, 512] and natural-log LSE [T, N] for queries q [T, N, 576], or q as (latent, rope)."""
        tokens = (q if isinstance(q, torch.Tensor) else q[0]).shape[0]
        return self.attend(q, kv_c_and_k_pe_cache, self.topk_indices_buffer[:tokens], attn_metadata)

    def attend(
        self, q: Query, cache: torch.Tensor, topk: torch.Tensor, metadata: SparseMLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The arithmetic of `forward_mqa`. topk: int32 [T, K], positions in each token's request, -1 padded."""
        raise NotImplementedError

    # 0.30 and later call these two, so that a backend translates indices once for a group of layers; `attend` does it

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
        """Writes this batch's rows. 0.17 and later; in 0.16 the layer writes them by a CUDA op."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        rows = torch.cat([kv_c_normed, k_pe.reshape(-1, reference.ROPE)], dim=-1)[: slots.shape[0]]
        write_rows(kv_cache, slots, reference.pack_fp8_ds_mla(rows) if kv_cache_dtype == "fp8_ds_mla" else rows)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [T, C] to their slots in a cache [blocks, block_size, C].

    slots: int64 [T], block * block_size + offset; -1 for a row that is not written
    """
    written = slots >= 0
    slots = slots[written]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows[written].to(cache.dtype)
