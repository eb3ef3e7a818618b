"""Target: vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerMetadataBuilder.build

Why:    up to 0.18 the logits of all queries of a prefill chunk against all its keys are held at once: 8,192 queries
        of a 1M context are 32 GiB.
How:    cuts the builder's chunks by query rows, so that the logits of each part stay under LOGITS_BYTES. The keys of a
        chunk are gathered again for each part. 0.19 and later do it themselves (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB).
Delete: when 0.18 is no longer supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = "indexer_chunks"
SYMBOL = "DeepseekV32IndexerMetadataBuilder.build"
CHUNK = "DeepseekV32IndexerPrefillChunkMetadata"
FIELDS = {
    "block_table",
    "cu_seqlen_ks",
    "cu_seqlen_ke",
    "cu_seq_lens",
    "token_to_seq",
    "total_seq_lens",
    "token_start",
    "token_end",
    "num_reqs",
}
LOGITS_BYTES = 512 << 20  # the default of VLLM_SPARSE_INDEXER_MAX_LOGITS_MB


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    import vllm.envs

    if "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB" in vllm.envs.environment_variables:
        return Verdict.unneeded("vLLM bounds the logits itself (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)")
    problem = upstream.signature_problem(
        module, SYMBOL, ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    )
    if problem:
        return Verdict.unknown(problem)
    found = {field.name for field in dataclasses.fields(getattr(module, CHUNK))}
    if found != FIELDS:
        return Verdict.unknown(f"{module.__name__}.{CHUNK} has {sorted(found)}, expected {sorted(FIELDS)}")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = original(self, *args, **kwargs)
        if not choice.logits_are_ours():
            ledger.idle(NAME, "the indexer's logits are vLLM's own")
        elif metadata.prefill is not None:
            metadata.prefill.chunks = [part for chunk in metadata.prefill.chunks for part in cut(chunk)]
            ledger.used(NAME)
        return metadata

    return {SYMBOL: build}


def cut(chunk: Any) -> Iterator[Any]:
    """`chunk` in parts of consecutive query rows, each of at most LOGITS_BYTES of fp32 logits, or of one row."""
    rows = chunk.token_end - chunk.token_start
    step = max(1, LOGITS_BYTES // (4 * max(1, int(chunk.total_seq_lens))))
    if rows <= step:
        yield chunk
        return
    for start in range(0, rows, step):
        end = min(start + step, rows)
        yield dataclasses.replace(
            chunk,
            cu_seqlen_ks=chunk.cu_seqlen_ks[start:end],
            cu_seqlen_ke=chunk.cu_seqlen_ke[start:end],
            token_start=chunk.token_start + start,
            token_end=chunk.token_start + end,
        )


PATCH = Patch(
    name=NAME,
    target="vllm.v1.attention.backends.mla.indexer",
    replaces=(SYMBOL,),
    why="up to 0.18 the indexer's logits of a whole prefill chunk are held at once: 32 GiB at 1M tokens",
    delete="when 0.18 is no longer supported: 0.19 has VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
    tested="sources of 0.16.0 and 0.18.1",
    probe=probe,
    apply=apply,
)
