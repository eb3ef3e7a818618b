"""The way in of glm5-shim: Python's `site` runs this file in every interpreter that has its directory on PYTHONPATH.

First the sitecustomize that this one shadows, as if we were not here; then the shim, if it is wanted and vLLM is
installed. Standard library only, nothing on stdout; no Exception of ours leaves this file.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.realpath(__file__))


def chain() -> None:
    """Runs the user's, the distribution's or virtualenv's sitecustomize, under its own name."""
    ours = sys.modules[__name__]
    seen = vars(sys).setdefault("_glm5_shim_dirs", set())  # a second copy of this file must not chain back to the first
    seen.add(HERE)
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry or ".") not in seen]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = theirs = module_from_spec(spec)
    try:
        spec.loader.exec_module(theirs)
    except BaseException:
        sys.modules["sitecustomize"] = ours  # `site` reads the name back
        raise


def wanted() -> bool:
    """On PYTHONPATH or asked for by name, in the interpreter that `wrap` was called for, and where there is a vLLM."""
    on = {n for n in ("GLM5_SHIM", "GLM5_SHIM_OFF") if os.environ.get(n, "").lower() in ("1", "true", "yes", "on")}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "GLM5_SHIM_OFF" in on or sys.flags.ignore_environment:  # -E, -I
        return False
    if "GLM5_SHIM" not in on and not any(os.path.realpath(p) == HERE for p in path if p):
        return False  # an editable install puts this directory on sys.path, and that alone is no wish
    meant = os.environ.get("GLM5_SHIM_PYTHON")
    if meant and meant != f"{sys.prefix}:{sys.version_info[0]}.{sys.version_info[1]}":
        prefix, _, version = meant.rpartition(":")
        if prefix and os.path.exists(f"{prefix}/bin/python{version}"):
            return False  # a Python that does not exist is a mistake, see shim/env.py
    return PathFinder.find_spec("vllm") is not None


def switch_on() -> None:
    if wanted():
        from shim.activate import activate

        activate()


for step, failure in ((chain, "the sitecustomize behind ours failed"), (switch_on, "not active")):
    try:
        step()
    except Exception as problem:
        if sys.stderr is not None:  # where it is closed, print would take stdout
            print(f"glm5-shim: {failure}: {type(problem).__name__}: {problem}", file=sys.stderr)
