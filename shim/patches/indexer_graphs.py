"""Target: vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerMetadataBuilder.get_cudagraph_support

Why:    0.18 answers NEVER where DeepGEMM is not supported, because its torch fallback synchronises. Then no decode
        batch of the whole server runs as a full graph.
How:    where the logits are ours the answer is UNIFORM_BATCH, as in 0.18 with DeepGEMM, and always in 0.17 and 0.19.
Delete: when 0.18 is no longer supported.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = "indexer_graphs"
SYMBOL = "DeepseekV32IndexerMetadataBuilder.get_cudagraph_support"


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    problem = upstream.signature_problem(module, SYMBOL, ["cls", "vllm_config", "kv_cache_spec"])
    if problem:
        return Verdict.unknown(problem)
    if "is_deep_gemm_supported" not in upstream.raw(module, SYMBOL).__func__.__code__.co_names:
        return Verdict.unneeded("graphs do not depend on DeepGEMM in this release")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL).__func__

    def get_cudagraph_support(cls: type, vllm_config: Any, kv_cache_spec: Any) -> Any:
        if not choice.logits_are_ours():
            ledger.idle(NAME, "the indexer's logits are vLLM's own")
            return original(cls, vllm_config, kv_cache_spec)
        ledger.used(NAME)
        return module.AttentionCGSupport.UNIFORM_BATCH

    return {SYMBOL: classmethod(get_cudagraph_support)}


PATCH = Patch(
    name=NAME,
    target="vllm.v1.attention.backends.mla.indexer",
    replaces=(SYMBOL,),
    why="0.18 switches CUDA graphs off where DeepGEMM is not supported",
    delete="when 0.18 is no longer supported: 0.19 does not ask for DeepGEMM here",
    tested="sources of 0.18.1",
    probe=probe,
    apply=apply,
)
