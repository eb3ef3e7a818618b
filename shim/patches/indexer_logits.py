"""Target: vllm.model_executor.layers.sparse_attn_indexer, the names that it took from vllm.utils.deep_gemm

Why:    DeepGEMM's MQA logits have no SM120 kernels in the wheels up to 0.24 and in 0.27; the torch fallback of 0.17 and
        0.18 reads the planar key cache as if key and scale lay side by side, and is wrong in decode.
How:    the first indexer of GLM-5 settles whose kernels run (`shim.attention.indexer_choice`: a probe proves DeepGEMM
        first). If ours, the op's own globals lead to them: prefill and paged logits, and `has_deep_gemm`, which its
        constructor demands. In this module alone: quantised layers and other models ask vllm.utils.deep_gemm.
Delete: when every supported release has SM120 logits that the probe accepts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from shim import env, upstream
from shim.attention import indexer_choice
from shim.patch import Patch, Verdict

NAME = indexer_choice.LOGITS
INIT = "SparseAttnIndexer.__init__"
_PREFILL = ["kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke"]
_PAGED = ["weights", "context_lens", "block_tables"]
# name: (the adapter's name, every parameter list that a release has)
FUNCTIONS: dict[str, tuple[str, tuple[list[str], ...]]] = {
    "fp8_mqa_logits": ("mqa_logits", (["q", *_PREFILL, "clean_logits"],)),
    "fp8_mqa_logits_torch": ("mqa_logits", (["q", *_PREFILL],)),
    "fp8_fp4_mqa_logits": ("mqa_logits", (["q", *_PREFILL, "clean_logits"], ["q", *_PREFILL, "max_seqlen_k"])),
    "fp8_paged_mqa_logits": (
        "paged_mqa_logits",
        (["q_fp8", "kv_cache_fp8", *_PAGED, "schedule_metadata", "max_model_len", "clean_logits"],),
    ),
    "fp8_paged_mqa_logits_torch": ("paged_mqa_logits", (["q", "kv_cache", *_PAGED, "max_model_len"],)),
    "fp8_fp4_paged_mqa_logits": (
        "paged_mqa_logits",
        (
            ["q", "kv_cache", *_PAGED, "schedule_metadata", "max_model_len", "clean_logits"],
            ["q", "kv_cache", *_PAGED, "schedule_metadata", "max_model_len", "clean_logits", "indices"],
            ["q", "kv_cache", *_PAGED, "schedule_metadata", "max_model_len", "indices"],
        ),
    ),
}
PAIRS = (("fp8_mqa_logits", "fp8_paged_mqa_logits"), ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"))


def probe(module: ModuleType) -> Verdict:
    env.indexer()
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    if not any(all(hasattr(module, name) for name in pair) for pair in PAIRS):
        expected = " or ".join(" and ".join(pair) for pair in PAIRS)
        return Verdict.unknown(f"{module.__name__} has no {expected}")
    if upstream.parameters(module, INIT) is None:
        return Verdict.unknown(f"{module.__name__}.{INIT} does not exist")
    for name in _present(module):
        problem = upstream.signature_problem(module, name, *FUNCTIONS[name][1])
        if problem:
            return Verdict.unknown(problem)
    return Verdict.apply()


def _present(module: ModuleType) -> list[str]:
    """Which of the functions this release has; it differs, so the engine cannot own them by name."""
    return [name for name in FUNCTIONS if hasattr(module, name)]


def apply(module: ModuleType) -> dict[str, Any]:
    build = upstream.raw(module, INIT)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        verify(module)
        indexer_choice.settle(module.logger)
        build(self, *args, **kwargs)

    for name in _present(module):
        setattr(module, name, _logits(getattr(module, name), FUNCTIONS[name][0]))
    if hasattr(module, "has_deep_gemm"):
        module.has_deep_gemm = _satisfied(module.has_deep_gemm)  # type: ignore[attr-defined]
    return {INIT: __init__}


def _logits(original: Callable[..., Any], adapter: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def logits(*args: Any, **kwargs: Any) -> Any:
        if indexer_choice.logits_are_ours():
            from shim.attention import indexer_triton

            found = getattr(indexer_triton, adapter)(signature.bind(*args, **kwargs).arguments)
            if found is not None:
                return found
        return original(*args, **kwargs)

    return logits


def _satisfied(original: Callable[[], bool]) -> Callable[[], bool]:
    def has_deep_gemm() -> bool:
        return indexer_choice.logits_are_ours() or original()

    return has_deep_gemm


def verify(module: ModuleType) -> None:
    """Also asked whenever an indexer is built: later than that no name of the op's may have changed hands."""
    for name in (*_present(module), "has_deep_gemm"):
        held = getattr(module, name, None)
        if held is not None and getattr(held, "__module__", None) != __name__:
            raise RuntimeError(f"{module.__name__}.{name} is not the shim's")


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.sparse_attn_indexer",
    replaces=(INIT,),
    why="DeepGEMM's indexer logits do not run on SM120 up to 0.24 and in 0.27; the fallback of 0.17 and 0.18 is wrong",
    upstream="vllm#54929: delete when every supported release has SM120 logits that the probe accepts",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
    verify=verify,
)
