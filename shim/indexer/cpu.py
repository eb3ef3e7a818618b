"""The DSA indexer on the CPU: a cache of unquantised keys, exact scores, exact top-k.

On a GPU the indexer keeps fp8 keys. Here keys keep the model's dtype, because fp8 would cost accuracy and save nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context

from shim.attention.backend import SparseMLABackend
from shim.attention.impl import write_rows
from shim.attention.metadata import SparseMLAMetadata
from shim.kernels.indexer import reference as indexer
from shim.kernels.topk.reference import topk

TOKENS_AT_A_TIME = 256  # bounds the logits held at once to 256 x context


class ReferenceIndexerBackend(SparseMLABackend):
    """Describes the indexer's key cache to vLLM: block size, shape and metadata. It never computes attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "REFERENCE_DSA_INDEXER"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [indexer.DIM]


def choose(op: Any, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Writes the batch's keys, scores every cached key for each token, and leaves the top-k in the op's buffer.

    op:      vLLM's SparseAttnIndexer
    q:       [T, H, 128]
    k:       [T, 128]
    weights: [T, H], already multiplied by the softmax scale and H**-0.5

    Returns `op.topk_indices_buffer`, int32 [max_num_batched_tokens, K]: positions in each token's request, -1 padded.
    """
    buffer: torch.Tensor = op.topk_indices_buffer
    all_metadata: Any = get_forward_context().attn_metadata
    if not isinstance(all_metadata, dict):  # the profiling run
        return buffer
    batch: SparseMLAMetadata = all_metadata[op.k_cache.prefix]
    cache = op.k_cache.kv_cache
    write_rows(cache, batch.slot_mapping, k[: batch.num_actual_tokens])
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        keys, _ = indexer.read_keys(cache, batch.block_table[request], length, torch.float32)
        before = length - last  # a token's position in its request is its index in the batch plus this
        for start in range(first, last, TOKENS_AT_A_TIME):
            part = slice(start, min(start + TOKENS_AT_A_TIME, last))
            visible = torch.arange(part.start, part.stop) + before + 1
            logits = indexer.mqa_logits(q[part], keys, None, weights[part], torch.zeros_like(visible), visible)
            buffer[part, : op.topk_tokens] = topk(logits, visible, op.topk_tokens)
    return buffer
