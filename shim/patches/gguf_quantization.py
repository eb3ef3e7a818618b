"""Target: vllm.model_executor.model_loader.weight_utils.get_quant_config

Why:    vLLM's GGUF quantisation, in the tree or the plugin's, finds out which layers are quantised by substrings of
        names and by a checkpoint's tensor types. Neither fits GLM-5, whose GGUF has other tensors than vLLM's model
        (kv_b). And up to 0.23 it refuses bf16 from capability 10.0 on.
How:    for our load format with quantisation "gguf" the config is `shim.quantization.config.Glm5GGUFConfig`, which
        corrects both. For any other load format it is vLLM's.
Delete: when vllm-gguf-plugin loads glm-dsa (vllm-gguf-plugin#111).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict
from shim.patches.gguf_engine_args import LOAD_FORMAT, METHOD

NAME = "gguf_quantization"
SYMBOL = "get_quant_config"


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(module, SYMBOL, ["model_config", "load_config"])
    return Verdict.unknown(problem) if problem else Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)

    def get_quant_config(model_config: Any, load_config: Any) -> Any:
        if load_config.load_format != LOAD_FORMAT or model_config.quantization != METHOD:
            ledger.idle(NAME, f"quantisation {model_config.quantization!r} of load format {load_config.load_format!r}")
            return original(model_config, load_config)
        from shim.quantization.config import Glm5GGUFConfig

        ledger.used(NAME)
        return Glm5GGUFConfig()

    return {SYMBOL: get_quant_config}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.model_loader.weight_utils",
    replaces=(SYMBOL,),
    why="vLLM picks quantised layers by parts of names, wrongly for GLM-5; up to 0.23 it refuses bf16 on Blackwell",
    delete="when vllm-gguf-plugin loads glm-dsa (vllm-gguf-plugin#111)",
    tested="an H200 with 0.33.0 and vllm-gguf-plugin 0.0.5; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
)
