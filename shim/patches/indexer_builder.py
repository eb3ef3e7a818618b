"""Target: vllm.v1.attention.backends.mla.indexer, the metadata builder's constructor and its `has_deep_gemm`

Why:    the builder asks DeepGEMM for a schedule, which it does not have for SM120 in many releases ("Unsupported
        architecture"). And a kernel that compiles during graph capture breaks the capture.
How:    the constructor warms our kernels up: it runs last before graph capture, and it knows the limits of the server.
        Where the logits are ours this module finds no DeepGEMM. So it asks for no schedule, and splits speculative
        batches as it does for SM120: rows of one or two tokens.
Delete: when indexer_logits and indexer_topk are deleted (vllm#54929).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = "indexer_builder"
INIT = "DeepseekV32IndexerMetadataBuilder.__init__"
HAS = "has_deep_gemm"  # up to 0.18 the module asks is_deep_gemm_supported, which says no for 12.x


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    problem = upstream.signature_problem(
        module, INIT, ["self", "*args", "**kwargs"], ["self", "*args", "block_table_width", "**kwargs"]
    )
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    build = upstream.raw(module, INIT)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        choice.settle(self.vllm_config)  # already done, unless indexer_logits is off
        logits, topk = choice.logits_are_ours(), choice.topk_is_ours()
        if not (logits or topk):
            ledger.idle(NAME, "the indexer's kernels are vLLM's own")
            return
        from shim.indexer import triton

        process.check(NAME)  # a captured graph would keep whatever runs now
        if topk:
            process.check(choice.TOPK)
        triton.warm_up(self, logits, topk)
        ledger.used(NAME)

    if not upstream.has(module, HAS):
        return {INIT: __init__}
    original = upstream.raw(module, HAS)

    def has_deep_gemm() -> bool:
        return not choice.logits_are_ours() and bool(original())

    return {INIT: __init__, HAS: has_deep_gemm}


PATCH = Patch(
    name=NAME,
    target="vllm.v1.attention.backends.mla.indexer",
    replaces=(INIT, HAS),
    optional=(HAS,),
    why="the indexer's metadata wants a schedule from DeepGEMM, and our kernels must compile before graph capture",
    delete="when indexer_logits and indexer_topk are deleted (vllm#54929)",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
)
