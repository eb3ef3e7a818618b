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
    if _done:
        return
    _done = True
    try:
        if env.off():
            return
        from shim import ledger, patches, preflight
        from shim.engine import Engine

        skip = env.check(tuple(p.name for p in patches.PATCHES))
        preflight.check_command_line(sys.orig_argv)
        engine = Engine(patches.PATCHES, skip)
    except Exception as problem:
        _refuse_vllm(problem)
        return
    _engine = engine
    if engine.left_out() and ledger.role() == "main":
        print(f"glm5-shim: {engine.left_out()}", file=sys.stderr)
    os.register_at_fork(after_in_child=ledger.reset_after_fork)
    engine.arm()


def plugin() -> None:
    """The `vllm.general_plugins` entry point: reaches Ray workers, which do not get PYTHONPATH. Inert unless asked.

    `ShimError` if that is only now, while a GGUF's engine arguments are made: they would go on without the shim.
    """
    try:
        wanted = env.flag("GLM5_SHIM")
    except env.EnvProblem as problem:
        _refuse_vllm(problem)
        return
    if _done or not wanted:
        return
    activate()
    model = _model_in_the_making()
    if _engine is not None and model is not None:
        from shim.latch import ShimError

        raise ShimError(
            f"glm5-shim: GLM5_SHIM=1 alone is too late for {model}: vLLM loads its plugins after it has looked at the "
            "model. Start this process with `glm5-shim wrap python SCRIPT`, or set PYTHONPATH to `glm5-shim path`."
        )


def engine() -> Engine | None:
    """This process's engine, None where the shim is not on."""
    return _engine


def check() -> None:
    """The closing gate: `ShimError` unless each required patch whose target is loaded is in force in this process."""
    if _engine is not None:
        _engine.check()


def _model_in_the_making() -> str | None:
    """The GLM-5 GGUF of the EngineArgs whose `__post_init__` is loading the plugins right now, if that is who calls."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__post_init__" and frame.f_globals.get("__name__") == "vllm.engine.arg_utils":
            from shim import preflight

            model = getattr(frame.f_locals.get("self"), "model", None)
            return model if isinstance(model, str) and preflight.is_ours(model) else None
    return None


def _refuse_vllm(problem: Exception) -> None:
    from shim.latch import Latch, ShimError

    said = str(problem) if isinstance(problem, env.EnvProblem) else f"{type(problem).__name__}: {problem}"
    error = ShimError(
        f"glm5-shim could not come up, so vLLM is not started without it: {said} (GLM5_SHIM_OFF=1 switches it off)"
    )
    if "vllm" in sys.modules:
        raise error from problem
    Latch().refused["vllm"] = error
