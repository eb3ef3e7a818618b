"""Arms the import hooks, once per process. Called by sitecustomize, and by vLLM itself as a general plugin.

Ray starts its workers without PYTHONPATH. The plugin reaches them, and so does the seal of an engine config (patch
`worker_seal`), which switches the shim on where it arrives in a Ray worker.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from shim import env, process
from shim.patch import ShimError

_done = False
_NOT_FOR_OTHERS = "GLM5_SHIM_PYTHON"  # names an interpreter of one machine


class Seal(str):
    """`Engine.seal` as plain data that checks itself when it is unpickled in another process."""

    def __reduce__(self) -> tuple[Any, tuple[str, dict[str, str]]]:
        names = (variable.name for variable in env.VARIABLES if variable.name != _NOT_FOR_OTHERS)
        return unseal, (str(self), {name: os.environ[name] for name in names if name in os.environ})


def activate() -> None:
    """Switches the shim on in this process. A second call changes nothing.

    Where that cannot be done (a variable without sense, a broken install) this Python goes on, but importing vLLM in it
    raises `ShimError`, because GLM-5 must not run half patched. A required patch that fails on a module that is loaded
    already raises at once.
    """
    global _done
    if _done:
        return
    _done = True
    try:
        if env.off():
            return
        from shim import ledger, patches
        from shim.engine import Engine
        from shim.gguf import preflight

        skip = env.check(tuple(p.name for p in patches.PATCHES))
        preflight.check_command_line(sys.orig_argv)
        engine = Engine(patches.PATCHES, skip)
    except Exception as problem:
        _refuse_vllm(problem)
        return
    process.start(engine, Seal(engine.seal))
    if engine.left_out() and ledger.role() == "main":
        process.say(engine.left_out())
    os.register_at_fork(after_in_child=ledger.reset_after_fork)
    engine.arm()


def plugin() -> None:
    """The `vllm.general_plugins` entry point: reaches Ray workers, which do not get PYTHONPATH. Inert unless asked.

    `ShimError` if vLLM loads its plugins while it makes a GGUF's engine arguments: it would go on without the shim.
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
    if process.engine() is not None and model is not None:
        raise ShimError(
            f"glm5-shim: GLM5_SHIM=1 alone is too late for {model}: vLLM loads its plugins after it has looked at the "
            "model. Start this process with `glm5-shim wrap python SCRIPT`, or set PYTHONPATH to `glm5-shim path`."
        )


def unseal(value: str, variables: dict[str, str]) -> Seal:
    """The seal again, in a process of the same shim. ShimError in any other: that process must not serve.

    variables: the sender's GLM5_SHIM_*. Those that a Ray worker has itself come first.
    """
    if process.engine() is None and _in_ray_worker():
        for name, setting in variables.items():
            os.environ.setdefault(name, setting)
        activate()
    if process.engine() is None:
        raise ShimError(
            "glm5-shim: this process got a GLM-5 engine config but was started without the shim, so it would compute "
            "wrong answers. Give PYTHONPATH of the parent to every child, or start with `glm5-shim wrap`."
        )
    if process.seal() != value:
        raise ShimError(
            f"glm5-shim: this process runs shim {process.seal()}, its parent runs {value}. Use one installation and "
            "the same GLM5_SHIM_SKIP everywhere."
        )
    return Seal(value)


def _in_ray_worker() -> bool:
    """Is this process a worker of Ray's? Without asking Ray for its context, which starts a cluster where none runs."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _model_in_the_making() -> str | None:
    """The GLM-5 GGUF of the EngineArgs whose `__post_init__` is loading the plugins right now, if that is who calls."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "__post_init__" and frame.f_globals.get("__name__") == "vllm.engine.arg_utils":
            from shim.gguf import preflight

            model = getattr(frame.f_locals.get("self"), "model", None)
            return model if isinstance(model, str) and preflight.is_ours(model) else None
    return None


def _refuse_vllm(problem: Exception) -> None:
    from shim.latch import Latch

    said = str(problem) if isinstance(problem, env.EnvProblem) else f"{type(problem).__name__}: {problem}"
    error = ShimError(
        f"glm5-shim could not come up, so vLLM is not started without it: {said} (GLM5_SHIM_OFF=1 switches it off)"
    )
    if "vllm" in sys.modules:
        raise error from problem
    Latch().refused["vllm"] = error
