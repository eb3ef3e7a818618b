"""Read-only questions to vLLM. Patches ask here by looking, never by comparing version strings."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from shim import env

GLM5 = "glm_moe_dsa"  # the model_type of GLM-5, 5.1 and 5.2


def raw(module: ModuleType, symbol: str) -> Any:
    """The object stored under `symbol` ("f" or "Class.f"), unbound: a classmethod stays one. AttributeError if
    absent."""
    owner: Any = module
    *path, last = symbol.split(".")
    for name in path:
        owner = getattr(owner, name)
    return inspect.getattr_static(owner, last)


def parameters(module: ModuleType, symbol: str) -> list[str] | None:
    """Parameter names of `symbol`, with `*`/`**` before the variadic ones; None if there is no such symbol."""
    try:
        found = raw(module, symbol)
    except AttributeError:
        return None
    function = getattr(found, "__func__", found)
    marks = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [marks.get(p.kind.name, "") + p.name for p in inspect.signature(function).parameters.values()]


def signature_problem(module: ModuleType, symbol: str, *expected: list[str]) -> str | None:
    """None if `symbol` has one of the `expected` parameter lists; else one line: what was found, what was expected."""
    found = parameters(module, symbol)
    if found is None:
        return f"{module.__name__}.{symbol} does not exist"
    if found in expected:
        return None
    wanted = " or ".join("(" + ", ".join(names) + ")" for names in expected)
    return f"{module.__name__}.{symbol} takes ({', '.join(found)}), expected {wanted}"


def is_glm5(hf_config: Any) -> bool:
    """Is this Hugging Face config one of GLM-5's? The text config of a wrapped one counts."""
    text = getattr(hf_config, "text_config", None) or hf_config
    return getattr(text, "model_type", None) == GLM5


def not_glm5(hf_config: Any) -> str:
    """Why a patch stands aside for this model, for the ledger."""
    return f"model_type {getattr(hf_config, 'model_type', None)!r} is not {GLM5}"


def capability(found: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that patches act on: GLM5_SHIM_ASSUME_CAPABILITY if set, else the one that vLLM found."""
    return env.assumed_capability() or found
