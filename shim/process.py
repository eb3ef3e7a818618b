"""What patches ask about their own process: how the other patches stand, which shim this is, how to speak and to log.

A leaf: nothing here imports a patch or the engine. `activate` puts the engine here when it has armed the hooks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shim import __version__
from shim.patch import State

log = logging.getLogger("vllm.glm5_shim")  # a child of vLLM's logger, so vLLM's handlers print it
PACKAGE = Path(__file__).resolve().parent
_MARK = "glm5-shim-answer "
_CHILD = "import runpy, sys; sys.path.append({root!r}); runpy.run_module({module!r}, run_name='__main__')"


class Engine(Protocol):
    """What a patch may ask of `shim.engine.Engine`."""

    def state(self, name: str) -> State | None:
        """How the patch of this name stands; None if the engine does not have it."""

    def check(self, name: str = "") -> None:
        """ShimError unless the required patches, or the one of this name, are in force."""


_engine: Engine | None = None
_seal = ""


def start(engine: Engine, seal: str) -> None:
    """`activate` armed this engine. `seal`: what every process of one server must have in common."""
    global _engine, _seal
    _engine, _seal = engine, seal


def engine() -> Engine | None:
    """This process's engine; None where the shim is not on."""
    return _engine


def seal() -> str:
    """The seal of this process's engine; "" where the shim is not on."""
    return _seal


def is_applied(name: str) -> bool:
    """Is the patch of this name applied in this process?"""
    return _engine is not None and _engine.state(name) is State.APPLIED


def check(name: str = "") -> None:
    """ShimError unless each required patch whose target is loaded (or the one of this name) is in force right now."""
    if _engine is not None:
        _engine.check(name)


@cache
def identity() -> str:
    """The version and a hash of the shim's own source files: two installations with one identity are the same code."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] != "_bootstrap":  # a wheel has it, a checkout does not
            digest.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"


def say(line: str) -> None:
    """One line on stderr, with the shim's name before it. None where stderr is closed: Python would take stdout."""
    if sys.stderr is not None:
        print(f"glm5-shim: {line}", file=sys.stderr, flush=True)


class ChildProblem(Exception):
    """A child process gave no answer. The message is its last line. `exit_code` is None if it took too long."""

    def __init__(self, line: str, exit_code: int | None) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def ask_child(module: str, question: Any, variables: Mapping[str, str], timeout_s: float | None = None) -> Any:
    """Runs `module` of the shim in a fresh Python with this environment, and returns what it passes to `answer_parent`.

    `question` and the answer are JSON values. ChildProblem if the child ends without an answer or takes longer than
    `timeout_s`; it is ended then, with every process that it started.
    """
    import json  # these four cost every start of Python milliseconds, and most processes ask nothing
    import os
    import signal
    import subprocess

    code = _CHILD.format(root=str(PACKAGE.parent), module=module)
    child = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(question)],
        env=dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except BaseException as problem:
        os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a child that hangs in a driver does not even die
            child.communicate(timeout=10)
        if isinstance(problem, subprocess.TimeoutExpired):
            raise ChildProblem(f"no answer within {timeout_s:.0f} s", None) from None
        raise
    answers = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    if answers and child.returncode == 0:
        return json.loads(answers[-1])
    lines = err.strip().splitlines() or out.strip().splitlines() or [f"exit code {child.returncode}"]
    raise ChildProblem(lines[-1][:300], child.returncode)


def answer_parent(answer: Callable[[Any], Any]) -> None:
    """In the child of `ask_child`: prints what `answer` makes of the question, for the parent to read."""
    import json

    found = answer(json.loads(sys.argv[1]))
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)
