"""`glm5-shim doctor`: is this machine ready? Each check answers ok, warning, problem or skipped, why, and the mend.

A check that raises is reported as a problem. It never ends the command.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from shim import env, process, upstream
from shim.attention import MEMBER
from shim.commands import patches
from shim.commands.output import print_columns
from shim.patch import State
from shim.patches import PATCHES
from shim.patches.backend_choice import HANG

MARKS = {"ok": "[✓]", "warning": "[!]", "problem": "[✗]", "skipped": "[-]"}


@dataclass(frozen=True)
class Finding:
    status: str  # a key of MARKS
    why: str
    mend: str = ""


def examine(names: Sequence[str]) -> dict[str, Any]:
    """Runs the named checks: `{"ok": bool, "checks": [{"name", "status", "why", "mend"}]}`."""
    rows = []
    for name in names:
        try:
            finding = CHECKS[name]()
        except Exception as problem:
            finding = _failure(problem)
        rows.append({"name": name, **asdict(finding)})
    return {"ok": all(row["status"] != "problem" for row in rows), "checks": rows}


def show(found: dict[str, Any]) -> None:
    """Prints what `examine` found, for a person."""
    for check in found["checks"]:
        click.echo(f"{MARKS[check['status']]} {check['name']}: {check['why']}")
        if check["mend"]:
            click.echo(f"    mend: {check['mend']}")
    counts = [f"{len(found['checks'])} checks"]
    for kind in ("problem", "warning"):
        count = sum(check["status"] == kind for check in found["checks"])
        counts.append(f"{count} {kind}{'' if count == 1 else 's'}")
    click.echo(", ".join(counts))


def show_checks() -> None:
    """Prints the name of each check, and what it looks at."""
    print_columns([(name, (check.__doc__ or "").splitlines()[0]) for name, check in CHECKS.items()])


def _failure(problem: Exception) -> Finding:
    if isinstance(problem, ModuleNotFoundError) and problem.name == "torch":
        return Finding("skipped", f"no torch in {sys.prefix}")
    return Finding("problem", f"the check itself failed: {type(problem).__name__}: {problem}")


def check_vllm() -> Finding:
    """Is there a vLLM that the shim supports?"""
    found = upstream.installed()
    if found is None:
        return Finding("problem", f"no vLLM in {sys.prefix}", "pip install vllm, or glm5-shim[cpu] without a GPU")
    refusal = upstream.unsupported(found)
    if refusal:
        return Finding("problem", refusal, "take one of the releases in README's table")
    return Finding("ok", f"vLLM {found} in {sys.prefix}")


def check_environment() -> Finding:
    """Do the GLM5_SHIM_* variables make sense?"""
    try:
        skipped = env.check(tuple(p.name for p in PATCHES))
    except env.EnvProblem as problem:
        return Finding("problem", str(problem), "correct the variable, or unset it")
    if env.off():
        return Finding("warning", "GLM5_SHIM_OFF=1: the shim is switched off", "unset GLM5_SHIM_OFF")
    if env.foreign():
        why = f"GLM5_SHIM_PYTHON={env.foreign()}: the shim stays off in this Python, {env.interpreter()}"
        return Finding("warning", why, "unset GLM5_SHIM_PYTHON; `wrap` sets it")
    if skipped:
        return Finding("warning", f"left out by GLM5_SHIM_SKIP: {', '.join(sorted(skipped))}", "unset GLM5_SHIM_SKIP")
    if env.unknown():
        return Finding("warning", f"not variables of glm5-shim: {', '.join(env.unknown())}", "unset them")
    return Finding("ok", "GLM5_SHIM_* variables make sense")


def check_import_name() -> Finding:
    """Is `import shim` ours? The name is generic, and PyPI has another."""
    spec = importlib.util.find_spec("shim")
    ours = process.PACKAGE
    found = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if found != ours:
        return Finding(
            "problem", f"`import shim` finds {found}, not {ours}", "pip uninstall shim, then reinstall glm5-shim"
        )
    return Finding("ok", f"`import shim` is {ours}")


def check_child() -> Finding:
    """Does a child process started like vLLM's come up with every required patch?"""
    try:
        rows = patches.patch_table()["patches"]
    except env.SwitchedOff as problem:
        return Finding("warning", str(problem), "unset it")
    except env.EnvProblem as problem:  # its mend is check_environment's
        return Finding("skipped", str(problem))
    bad = [r for r in rows if r["required"] and r["state"] in (State.FAILED.value, State.LATE.value)]
    if bad:
        return Finding("problem", "; ".join(f"{r['name']}: {r['detail']}" for r in bad), "glm5-shim patches shows all")
    if all(r["state"] == State.WAITING.value for r in rows):
        if upstream.installed() is None:
            return Finding("skipped", f"no vLLM in {sys.prefix}")
        return Finding("problem", "the shim did not come up in a child process", "run without python -I, -E, -S")
    off = [r["name"] for r in rows if r["required"] and r["state"] == State.OFF.value]
    if off:
        why = f"left out by GLM5_SHIM_SKIP, and GLM-5 needs them unless you know better: {', '.join(off)}"
        return Finding("warning", why, "unset GLM5_SHIM_SKIP")
    states = [r["state"] for r in rows]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    return Finding("ok", f"in a child process: {counts}")


def check_directories() -> Finding:
    """Can ledgers and the GGUF cache be written?"""
    cache = _unwritable("GLM5_SHIM_CACHE_DIR", env.cache_dir(), "problem")
    state = _unwritable("GLM5_SHIM_STATE_DIR", env.state_dir(), "warning")
    return cache or state or Finding("ok", f"{env.state_dir()} and {env.cache_dir()} can be written")


def _unwritable(name: str, path: Path, status: str) -> Finding | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as problem:
        return Finding(status, f"{path}: {problem.strerror}", f"set {name} to a directory that can be written")


def check_gpu() -> Finding:
    """Which GPU is there, and what does this version of the shim do on it?"""
    import torch

    if not torch.cuda.is_available():
        return Finding("skipped", "no NVIDIA GPU is visible: GLM-5 runs with reference kernels, for demo and tests")
    found = torch.cuda.get_device_capability()
    gpu = f"{torch.cuda.get_device_name()}, capability {found[0]}.{found[1]}"
    if found < (8, 0):
        return Finding("problem", f"{gpu}: TRITON_MLA_SPARSE needs 8.0", "use a newer GPU")
    if upstream.capability(found)[0] != 12:
        return Finding("ok", f"{gpu}: vLLM's own backends come first; --attention-backend {MEMBER} takes the shim's")
    indexer = {
        "triton": "the indexer is the shim's",
        "native": "the indexer is vLLM's own (GLM5_SHIM_INDEXER=native)",
        "auto": "the indexer is vLLM's where a probe proves it, else the shim's",
    }[env.indexer()]
    why = f"{gpu}: {MEMBER} comes first; {indexer}. Nothing of this has run on SM120 hardware yet"
    return Finding("warning", why, f"glm5-shim selftest runs the kernels here; {HANG}")


def check_gguf() -> Finding:
    """Do GGUF weights stay quantised here?"""
    import torch

    if not torch.cuda.is_available():
        return Finding("skipped", "no NVIDIA GPU is visible: weights are dequantised, as demo and tests have them")
    if torch.cuda.get_device_capability() < (8, 0):
        return Finding("problem", "the kernels for quantised weights need capability 8.0", "use a newer GPU")
    return Finding("ok", "weights stay quantised, in the shim's own layers; vllm-gguf-plugin is not needed for GLM-5")


def check_compiler() -> Finding:
    """Is there a C++ compiler for torch.compile? Without one vLLM's CPU sampler dies at the first request."""
    if shutil.which("g++") or shutil.which("clang++"):
        return Finding("ok", "a C++ compiler is there")
    return Finding(
        "warning", "no C++ compiler: vLLM dies at the first request", "apt install g++, or TORCHDYNAMO_DISABLE=1"
    )


def check_bytecode() -> Finding:
    """May Python write .pyc files? Without them every start of vLLM takes minutes."""
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return Finding("warning", "PYTHONDONTWRITEBYTECODE is set: every start takes minutes", "unset it")
    return Finding("ok", "bytecode is cached")


CHECKS: dict[str, Callable[[], Finding]] = {
    "vllm": check_vllm,
    "environment": check_environment,
    "import_name": check_import_name,
    "directories": check_directories,
    "compiler": check_compiler,
    "bytecode": check_bytecode,
    "gpu": check_gpu,
    "gguf": check_gguf,
    "child": check_child,
}
