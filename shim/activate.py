"""Arms the import hooks, once per process. Called by sitecustomize, and by vLLM itself as a general plugin."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from shim import env

if TYPE_CHECKING:
    from shim.engine import Engine

_engine: Engine | None = None
_done = False


def activate() -> None:
    """Switches the shim on in this process; a second call changes nothing.

    Where that cannot be done (a variable without sense, a broken install), this Python goes on, but importing vLLM
    in it raises `ShimError`: GLM-5 must not run half patched. A required patch that fails on a module that is loaded
    already raises at once.
    """
    global _engine, _done
    if _done or env.off():
        return
    _done = True
    try:
        from shim import ledger, patches, preflight
        from shim.engine import Engine

        env.assumed_capability()
        preflight.check_command_line(sys.orig_argv)
        engine = Engine(patches.PATCHES, env.skip(tuple(p.name for p in patches.PATCHES)))
    except Exception as problem:
        _refuse_vllm(problem)
        return
    _engine = engine
    os.register_at_fork(after_in_child=ledger.reset_after_fork)
    engine.arm()


def plugin() -> None:
    """The `vllm.general_plugins` entry point: reaches Ray workers, which do not get PYTHONPATH. Inert unless asked."""
    if os.environ.get("GLM5_SHIM") == "1":
        activate()


def engine() -> Engine | None:
    """This process's engine, None where the shim is not on."""
    return _engine


def check() -> None:
    """The closing gate: `ShimError` unless each required patch whose target is loaded is in force in this process."""
    if _engine is not None:
        _engine.check()


def _refuse_vllm(problem: Exception) -> None:
    from shim.latch import Latch, ShimError

    said = str(problem) if isinstance(problem, env.EnvProblem) else f"{type(problem).__name__}: {problem}"
    error = ShimError(
        f"glm5-shim could not come up, so vLLM is not started without it: {said}. GLM5_SHIM_OFF=1 switches it off."
    )
    if "vllm" in sys.modules:
        raise error from problem
    Latch().refused["vllm"] = error
