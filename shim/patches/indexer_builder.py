"""Target: vllm.v1.attention.backends.mla.indexer, the metadata builder's constructor and its `has_deep_gemm`

Why:    the builder asks DeepGEMM for a schedule, which it does not have for SM120 in many releases ("Unsupported
        architecture"); and a kernel that compiles during graph capture breaks the capture.
How:    the constructor, the last place before graph capture, and one that knows the limits of the server, warms our
        kernels up. Where the logits are ours this module finds no DeepGEMM, so it asks for no schedule, and splits
        speculative batches as it does for SM120: rows of one or two tokens.
Delete: with indexer_logits and indexer_topk.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict
from shim.patches import indexer_topk

NAME = "indexer_builder"
INIT = "DeepseekV32IndexerMetadataBuilder.__init__"


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
        choice.settle(module.logger, self.vllm_config)  # already done, unless indexer_logits is off
        logits, topk = choice.logits_are_ours(), choice.topk_is_ours()
        if not (logits or topk):
            ledger.idle(NAME, "the indexer's kernels are vLLM's own")
            return
        from shim.indexer import triton

        verify(module)
        if topk:
            indexer_topk.verify(sys.modules[indexer_topk.PATCH.target])
        triton.warm_up(self, logits, topk)
        ledger.used(NAME)

    if hasattr(module, "has_deep_gemm"):  # up to 0.18 it asks is_deep_gemm_supported, which says no for 12.x
        original = module.has_deep_gemm

        def has_deep_gemm() -> bool:
            return not choice.logits_are_ours() and bool(original())

        module.has_deep_gemm = has_deep_gemm  # type: ignore[attr-defined]
    return {INIT: __init__}


def verify(module: ModuleType) -> None:
    held = getattr(module, "has_deep_gemm", None)
    if held is not None and getattr(held, "__module__", None) != __name__:
        raise RuntimeError(f"{module.__name__}.has_deep_gemm is not the shim's")


PATCH = Patch(
    name=NAME,
    target="vllm.v1.attention.backends.mla.indexer",
    replaces=(INIT,),
    why="the indexer's metadata wants a schedule from DeepGEMM, and our kernels must compile before graph capture",
    delete="vllm#54929: delete with indexer_logits and indexer_topk",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
    verify=verify,
)
