"""The metadata of one batch, for sparse MLA and for the indexer's reference cache."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """T tokens of R requests. All take the top-k path, so every request counts as a decode for vLLM."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R], tokens of each request, with those of this batch
    block_table: torch.Tensor  # int32 [R, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T], -1 for padding
    req_ids: torch.Tensor  # int32 [T], the request of each token
    topk_tokens: int  # read by the MLA layer of 0.26

    # from 0.26 on the MLA layer asserts that these are not None
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None  # 0.27 and later; without dense-MHA prefill the indexer scores every batch


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):
    """Builds the metadata. It needs no sorted batch (`reorder_batch_threshold` stays None), and reads nothing back from
    the device."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.topk_tokens: int = vllm_config.model_config.hf_text_config.index_topk
        self._position = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self._req_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)  # a graph needs a fixed address

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMLAMetadata:
        common = common_attn_metadata
        tokens, reqs = common.num_actual_tokens, common.num_reqs
        req_ids = self._req_ids[:tokens]
        # The device's query_start_loc, because from 0.28 on the CPU's copy may be an upper bound. The end of the last
        # request is left out, so that padding belongs to that request.
        starts = common.query_start_loc[1:reqs]
        torch.searchsorted(starts, self._position[:tokens], right=True, out_int32=True, out=req_ids)
        return SparseMLAMetadata(
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc[: reqs + 1],
            seq_lens=common.seq_lens[:reqs],
            block_table=common.block_table_tensor[:reqs],
            slot_mapping=common.slot_mapping[:tokens],
            req_ids=req_ids,
            topk_tokens=self.topk_tokens,
            num_decodes=reqs,
            num_decode_tokens=tokens,
        )
