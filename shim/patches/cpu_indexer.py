"""Target: vllm.model_executor.models.deepseek_v2, the model that vLLM runs GLM-5 with on a CPU

Why:    the indexer quantises its queries to fp8 in Triton ("module 'triton' has no attribute 'next_power_of_2'"), and
        has a key cache of fp8 bytes whose backend builds metadata for CUDA kernels.
How:    GLM-5's key cache is built with rows of 128 values in the model's dtype, and answers our indexer backend.
        Queries pass unchanged, with scale 1.
Delete: when vLLM's own CPU sparse indexer, today DeepSeek-V4's, runs glm_moe_dsa.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_indexer"
BUILD = "DeepseekV32IndexerCache.__init__"
BACKEND = "DeepseekV32IndexerCache.get_attn_backend"
QUANTISE = "per_token_group_quant_fp8"


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cpu():
        return Verdict.unneeded("not on the CPU platform")
    problem = upstream.signature_problem(
        module, BUILD, ["self", "head_dim", "dtype", "prefix", "cache_config"]
    ) or upstream.signature_problem(module, BACKEND, ["self"])
    if problem is None and (upstream.parameters(module, QUANTISE) or [])[:2] != ["x", "group_size"]:
        problem = f"{module.__name__}.{QUANTISE} does not begin with (x, group_size)"
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    build = upstream.raw(module, BUILD)
    backend = upstream.raw(module, BACKEND)
    quantise = upstream.raw(module, QUANTISE)
    serves_glm5 = False  # then no other sparse model is in this process: on a CPU vLLM refuses them all

    def __init__(self: Any, head_dim: int, dtype: Any, prefix: str, cache_config: Any) -> None:
        nonlocal serves_glm5
        model = module.get_current_vllm_config().model_config
        if upstream.is_glm5(model.hf_config):
            serves_glm5 = True
            head_dim, dtype = model.hf_text_config.index_head_dim, model.dtype
            ledger.used(NAME)
        else:
            ledger.idle(NAME, upstream.not_glm5(model.hf_config))
        build(self, head_dim, dtype, prefix, cache_config)

    def get_attn_backend(self: Any) -> Any:
        import torch

        if self.dtype == torch.uint8:
            return backend(self)
        from shim.indexer.cpu import ReferenceIndexerBackend

        return ReferenceIndexerBackend

    def per_token_group_quant_fp8(x: Any, group_size: int, *args: Any, **kwargs: Any) -> Any:
        if not serves_glm5:
            return quantise(x, group_size, *args, **kwargs)
        return x, x.new_ones(*x.shape[:-1], x.shape[-1] // group_size)

    return {BUILD: __init__, BACKEND: get_attn_backend, QUANTISE: per_token_group_quant_fp8}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.models.deepseek_v2",
    replaces=(BUILD, BACKEND, QUANTISE),
    why="the indexer's fp8 quantisation and key cache need a GPU",
    delete="when vLLM's own CPU sparse indexer runs glm_moe_dsa",
    tested="0.28.0, 0.32.0",
    needs=("cpu_indexer_op",),
    probe=probe,
    apply=apply,
)
