"""Every GLM5_SHIM_* variable: its name, default and meaning. README's table is made from this one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("GLM5_SHIM", "", "1 switches the shim on where PYTHONPATH cannot reach (Ray workers); `wrap` sets it"),
    Variable("GLM5_SHIM_OFF", "", "1 switches the shim off, whatever else is set"),
    Variable("GLM5_SHIM_SKIP", "", "patches to leave out, by name: a,b (an unknown name is an error)"),
    Variable("GLM5_SHIM_STATE_DIR", "~/.local/state/glm5-shim", "where each process writes <pid>.json, its ledger"),
    Variable(
        "GLM5_SHIM_CACHE_DIR",
        "~/.cache/glm5-shim",
        "where config and tokenizer made from a GGUF, and the indexer probe's answer, are kept",
    ),
    Variable("GLM5_SHIM_ASSUME_CAPABILITY", "", "12.0 makes the patches treat any GPU as that compute capability"),
    Variable(
        "GLM5_SHIM_INDEXER",
        "auto",
        "whose indexer kernels run: native (vLLM's), triton (ours), auto (on 12.x vLLM's where a probe proves them)",
    ),
    Variable("GLM5_SHIM_PYTHON", "", "set by `wrap`: the interpreter that it serves; any other Python declines"),
)


class EnvProblem(ValueError):
    """A variable has a value that cannot be meant; the message says which, and what is expected."""


def off() -> bool:
    return os.environ.get("GLM5_SHIM_OFF", "").lower() in ("1", "true", "yes", "on")


def skip(known: tuple[str, ...]) -> frozenset[str]:
    """Patch names to leave out. EnvProblem if one is not in `known`."""
    names = frozenset(n.strip() for n in os.environ.get("GLM5_SHIM_SKIP", "").split(",") if n.strip())
    unknown = sorted(names - set(known))
    if unknown:
        raise EnvProblem(f"GLM5_SHIM_SKIP names {', '.join(unknown)}; the patches are: {', '.join(known)}")
    return names


def state_dir() -> Path:
    return _directory("GLM5_SHIM_STATE_DIR", "XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    return _directory("GLM5_SHIM_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


def assumed_capability() -> tuple[int, int] | None:
    """(major, minor) from GLM5_SHIM_ASSUME_CAPABILITY, None if unset. EnvProblem if it is no version."""
    text = os.environ.get("GLM5_SHIM_ASSUME_CAPABILITY", "")
    if not text:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise EnvProblem(f"GLM5_SHIM_ASSUME_CAPABILITY is {text!r}; expected major.minor, for example 12.0")
    return int(major), int(minor)


def indexer() -> str:
    """native, triton or auto. EnvProblem for anything else."""
    value = os.environ.get("GLM5_SHIM_INDEXER") or "auto"
    if value not in ("native", "triton", "auto"):
        raise EnvProblem(f"GLM5_SHIM_INDEXER is {value!r}; expected native, triton or auto")
    return value


def _directory(name: str, xdg: str, fallback: str) -> Path:
    if os.environ.get(name):
        return Path(os.path.expanduser(os.environ[name]))
    base = os.environ.get(xdg) or os.path.join(os.path.expanduser("~"), fallback)
    return Path(base) / "glm5-shim"
