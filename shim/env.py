"""Every GLM5_SHIM_* variable: its name, default, meaning and parser. README's table is made from `VARIABLES`."""

from __future__ import annotations

import os
import sys
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
# the compute capabilities of NVIDIA's GPUs that vLLM runs on
CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")


class EnvProblem(ValueError):
    """A variable has a value that makes no sense. The message says which variable, and what is expected."""


class SwitchedOff(EnvProblem):
    """GLM5_SHIM_OFF is set."""


def check(patches: tuple[str, ...]) -> frozenset[str]:
    """Looks at every variable, and returns the names in GLM5_SHIM_SKIP. `patches`: the names of all patches.

    EnvProblem for a value that makes no sense, and for an unknown name that is close to the name of a variable.
    """
    for name, nearest in unknown().items():
        if nearest:
            raise EnvProblem(f"{name} is not a variable of glm5-shim; did you mean {nearest}?")
    flag("GLM5_SHIM")
    off()
    assumed_capability()
    indexer()
    foreign()
    for name in ("GLM5_SHIM_STATE_DIR", "GLM5_SHIM_CACHE_DIR"):
        if os.environ.get(name) and not os.path.isabs(os.path.expanduser(os.environ[name])):
            raise EnvProblem(
                f"{name} is {os.environ[name]!r}; expected an absolute path: the processes of a server may work in "
                "several directories"
            )
    cache = cache_dir()  # the state directory is not looked at: ledger.py goes on where it cannot write
    if os.path.exists(cache) and not os.path.isdir(cache):
        raise EnvProblem(f"GLM5_SHIM_CACHE_DIR is {os.fspath(cache)!r}; expected a directory")
    chosen = bool(os.environ.get("GLM5_SHIM_CACHE_DIR"))
    if not chosen and os.path.isdir(cache) and _owner(cache) not in (os.getuid(), 0):
        raise EnvProblem(f"{os.fspath(cache)} belongs to another user; set GLM5_SHIM_CACHE_DIR to a directory of yours")
    return skip(patches)


def unknown() -> dict[str, str]:
    """Each GLM5_SHIM_* name that is set and is no variable, with the variable of the closest name, or ""."""
    prefix = VARIABLES[0].name
    known = [variable.name.removeprefix(prefix) for variable in VARIABLES]
    ends = sorted(name.removeprefix(prefix) for name in os.environ if name.startswith(prefix))
    strange = [end for end in ends if end not in known]
    if not strange:
        return {}
    from difflib import get_close_matches  # most processes save this import

    return {prefix + end: "".join(prefix + near for near in get_close_matches(end, known, 1, 0.7)) for end in strange}


def flag(name: str) -> bool:
    """Is this switch on? EnvProblem for a value that is neither yes nor no."""
    value = os.environ.get(name, "")
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("", "0", "false", "no", "off"):
        return False
    raise EnvProblem(f"{name} is {value!r}; expected 1 (on) or 0 (off)")


def off() -> bool:
    return flag("GLM5_SHIM_OFF")


def require_on() -> None:
    """SwitchedOff if GLM5_SHIM_OFF is set."""
    if off():
        raise SwitchedOff("GLM5_SHIM_OFF is set: the shim is off in every process")


def interpreter() -> str:
    """This Python in the form of GLM5_SHIM_PYTHON: prefix, colon, major.minor."""
    return f"{sys.prefix}:{sys.version_info[0]}.{sys.version_info[1]}"


def foreign() -> str:
    """The Python that GLM5_SHIM_PYTHON names if it is not this one, else "". EnvProblem if no such Python exists."""
    value = os.environ.get("GLM5_SHIM_PYTHON", "")
    if value in ("", interpreter()):
        return ""
    prefix, _, version = value.rpartition(":")
    if not prefix or not os.path.exists(f"{prefix}/bin/python{version}"):  # sitecustomize.py asks the same
        raise EnvProblem(
            f"GLM5_SHIM_PYTHON is {value!r}; expected PREFIX:MAJOR.MINOR of a Python that exists, for example "
            f"{interpreter()}: unset it, because `wrap` sets it"
        )
    return value


def skip(known: tuple[str, ...]) -> frozenset[str]:
    """The patches to leave out. EnvProblem if a name is not in `known`."""
    names = frozenset(n.strip() for n in os.environ.get("GLM5_SHIM_SKIP", "").split(",") if n.strip())
    unknown = sorted(names - set(known))
    if unknown:
        raise EnvProblem(f"GLM5_SHIM_SKIP names {', '.join(unknown)}; the patches are: {', '.join(known)}")
    return names


def state_dir() -> Path:
    """Where ledgers go. See `_directory`."""
    return _directory("GLM5_SHIM_STATE_DIR", "XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """Where the directories that stand in for GGUF files go, and the indexer probe's answer. See `_directory`."""
    return _directory("GLM5_SHIM_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


def assumed_capability() -> tuple[int, int] | None:
    """(major, minor) from GLM5_SHIM_ASSUME_CAPABILITY, None if unset. EnvProblem if no GPU has it."""
    text = os.environ.get("GLM5_SHIM_ASSUME_CAPABILITY", "")
    try:
        return capability("GLM5_SHIM_ASSUME_CAPABILITY", text) if text else None
    except ValueError as problem:
        raise EnvProblem(str(problem)) from None


def capability(name: str, text: str) -> tuple[int, int]:
    """(major, minor) of a compute capability that GPUs have. ValueError, with the argument's name, for all else."""
    if text not in CAPABILITIES:
        raise ValueError(f"{name} is {text!r}; expected major.minor, one of {', '.join(CAPABILITIES)}")
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def indexer() -> str:
    """native, triton or auto. EnvProblem for anything else."""
    value = os.environ.get("GLM5_SHIM_INDEXER") or "auto"
    if value not in ("native", "triton", "auto"):
        raise EnvProblem(f"GLM5_SHIM_INDEXER is {value!r}; expected native, triton or auto")
    return value


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _directory(name: str, xdg: str, fallback: str) -> Path:
    """Where the variable `name` points. Without it "glm5-shim" in the XDG directory, or in the home directory.

    The XDG specification wants a relative value to be ignored. A user without a home directory (no HOME and no passwd
    entry, as in some containers) gets a directory among the temporary ones.
    """
    if os.environ.get(name):
        return Path(os.path.expanduser(os.environ[name]))
    base = os.environ.get(xdg, "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), fallback)
    if os.path.isabs(base):
        return Path(base, "glm5-shim")
    from tempfile import gettempdir

    return Path(gettempdir(), f"glm5-shim-{os.getuid()}", fallback.rpartition("/")[2].removeprefix("."))
