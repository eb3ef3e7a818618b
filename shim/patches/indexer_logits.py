"""Target: vllm.model_executor.layers.sparse_attn_indexer, the names that it took from vllm.utils.deep_gemm

Why:    DeepGEMM's MQA logits have no SM120 kernels in the wheels up to 0.24 and in 0.27. The torch fallback of 0.17
        and 0.18 is wrong in decode: it reads the key cache as if each key lay beside its scale, but the cache is
        planar.
How:    the first indexer of GLM-5 settles whose kernels run (`shim.indexer.choice`: a probe tests DeepGEMM first). If
        they are ours, prefill logits, paged logits and `has_deep_gemm`, which the op's constructor demands, lead to
        them. This module alone changes: quantised layers and other models ask vllm.utils.deep_gemm.
Delete: when every supported release has SM120 logits that the probe accepts (vllm#54929).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from shim import env, process, upstream
from shim.indexer import choice
from shim.patch import Patch, Verdict

NAME = choice.LOGITS
INIT = "SparseAttnIndexer.__init__"
HAS = "has_deep_gemm"  # 0.19 and later
_PREFILL = ["kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke"]
_PAGED = ["weights", "context_lens", "block_tables"]
# vLLM's function: (our function in shim.indexer.triton, each parameter list that a release has)
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
# each release has one of these pairs
PAIRS = (("fp8_mqa_logits", "fp8_paged_mqa_logits"), ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"))


def probe(module: ModuleType) -> Verdict:
    env.indexer()
    if not module.current_platform.is_cuda():
        return Verdict.unneeded("not on the CUDA platform")
    if not any(all(upstream.has(module, name) for name in pair) for pair in PAIRS):
        expected = " or ".join(" and ".join(pair) for pair in PAIRS)
        return Verdict.unknown(f"{module.__name__} has no {expected}")
    if not upstream.has(module, INIT):
        return Verdict.unknown(f"{module.__name__}.{INIT} does not exist")
    for name, (_, known) in FUNCTIONS.items():
        problem = upstream.signature_problem(module, name, *known) if upstream.has(module, name) else None
        if problem:
            return Verdict.unknown(problem)
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    build = upstream.raw(module, INIT)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        process.check(NAME)  # the op must not run with a name that somebody has taken back
        choice.settle()
        build(self, *args, **kwargs)

    replacements: dict[str, Any] = {INIT: __init__}
    for name, (adapter, _) in FUNCTIONS.items():
        if upstream.has(module, name):
            replacements[name] = _logits(upstream.raw(module, name), adapter)
    if upstream.has(module, HAS):
        replacements[HAS] = _has_deep_gemm(upstream.raw(module, HAS))
    return replacements


def _logits(original: Callable[..., Any], adapter: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def logits(*args: Any, **kwargs: Any) -> Any:
        if choice.logits_are_ours():
            from shim.indexer import triton

            answer = getattr(triton, adapter)(signature.bind(*args, **kwargs).arguments)
            if answer is not None:
                return answer
        return original(*args, **kwargs)

    return logits


def _has_deep_gemm(original: Callable[[], bool]) -> Callable[[], bool]:
    def has_deep_gemm() -> bool:
        return choice.logits_are_ours() or original()

    return has_deep_gemm


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.sparse_attn_indexer",
    replaces=(INIT, *FUNCTIONS, HAS),
    optional=(*FUNCTIONS, HAS),
    why="DeepGEMM's indexer logits do not run on SM120 up to 0.24 and in 0.27; the fallback of 0.17 and 0.18 is wrong",
    delete="when every supported release has SM120 logits that the probe accepts (vllm#54929)",
    tested="an H200 with 0.26.0, 0.33.0; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
)
