"""Looks at the command line of a vLLM process before anything heavy is imported: a GGUF that cannot be served should
cost a second, not the minute that vLLM takes to come to the same end."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def check_command_line(argv: list[str]) -> None:
    """Ends the process with one line and exit code 1 if `argv` starts vLLM on a GGUF that the shim cannot serve."""
    path = gguf_argument(argv)
    if path is None:
        return
    problem = problem_with(path)
    if problem:
        print(f"glm5-shim: {problem}", file=sys.stderr, flush=True)
        os._exit(1)  # an exception out of sitecustomize, SystemExit too, ends in a "Fatal Python error" and a traceback


def gguf_argument(argv: list[str]) -> str | None:
    """The GGUF that a `vllm` command line names, or None. Both `vllm serve X` and `python -m vllm... --model=X`
    count."""
    starts_vllm = any(os.path.basename(a) == "vllm" or a.startswith("vllm.entrypoints") for a in argv[:4])
    if not starts_vllm:
        return None
    values = [a.partition("=")[2] if a.startswith("--") else a for a in argv]
    return next((v for v in values if v.endswith(".gguf")), None)


def problem_with(path: str) -> str | None:
    """One line on why the GGUF at `path` cannot be served; None if it can, or if it is somebody else's to serve."""
    from shim.gguf.files import GGUFProblem, WrongArchitecture, open_model
    from shim.gguf.names import require_complete

    try:
        require_complete(open_model(path))
    except WrongArchitecture as problem:
        return None if others_serve_gguf() else str(problem)
    except GGUFProblem as problem:
        return str(problem)
    return None


def others_serve_gguf() -> bool:
    """Does this environment have a GGUF loader of its own (vllm-gguf-plugin, or vLLM up to 0.23)? Then other
    architectures are its business."""
    if PathFinder.find_spec("vllm_gguf_plugin"):
        return True
    vllm = PathFinder.find_spec("vllm")
    places = vllm.submodule_search_locations if vllm else None
    return any(Path(p, "model_executor/model_loader/gguf_loader.py").exists() for p in places or ())
