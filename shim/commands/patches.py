"""`glm5-shim patches`: how each patch stands, and with --ledgers how it stood in the processes that ran.

The states come from a child process that imports vLLM's real modules. The parent itself would prove nothing.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from shim import env, ledger, process, upstream
from shim.commands.output import print_columns
from shim.commands.wrap import environment
from shim.patch import State
from shim.patches import PATCHES

WAITING = State.WAITING.value
CUDA = "vllm.platforms.cuda"


def patch_table() -> dict[str, Any]:
    """`{"vllm": version or None, "patches": [{name, target, state, required, why, detail}]}`.

    EnvProblem if the variables keep the shim from coming up at all.
    """
    env.check(tuple(patch.name for patch in PATCHES))
    env.require_on()
    targets = list(dict.fromkeys(patch.target for patch in PATCHES))
    found, errors = child_ledger(targets)
    recorded = {entry["name"]: entry for entry in found["patches"]} if found else {}
    rows = []
    for patch in PATCHES:
        entry = recorded.get(patch.name, {"state": WAITING, "detail": "the shim did not come up in the child"})
        state, detail = entry["state"], entry["detail"]
        if state == WAITING and patch.target == CUDA and upstream.cpu_wheel():  # nothing in a CPU wheel imports it
            state, detail = State.UNNEEDED.value, "this vLLM is a build for CPUs, without CUDA's platform"
        elif state == WAITING and patch.target in errors:
            detail = f"cannot be imported here: {errors[patch.target]}"
        rows.append(
            {
                "name": patch.name,
                "target": patch.target,
                "state": state,
                "required": patch.required,
                "why": patch.why,
                "detail": detail,
            }
        )
    return {"vllm": found["vllm"] if found else None, "patches": rows}


def child_ledger(targets: list[str]) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The ledger of a child that imported `targets` under `wrap`'s environment (None if it wrote none), and the
    error of each target that could not be imported."""
    with tempfile.TemporaryDirectory() as state:
        variables = environment(os.environ) | {"GLM5_SHIM_STATE_DIR": state}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files importing vLLM takes a minute
        errors: dict[str, str] = {}
        with suppress(process.ChildProblem):  # the ledger has what the child did before it died
            errors = process.ask_child("shim.commands.patches", targets, variables)
        ledgers = ledger.read(Path(state))
    # The oldest ledger is the child's own. Processes that it started may have written the others.
    return (ledgers[0] if ledgers else None), errors


def show(found: dict[str, Any]) -> None:
    """Prints what `patch_table` found, for a person."""
    click.echo(f"vLLM {found['vllm']}")
    print_columns([(p["state"], p["name"], p["detail"] or p["why"]) for p in found["patches"]])


def processes() -> dict[str, Any]:
    """The ledgers in the state directory, oldest process first.

    `{"directory", "processes": [{"pid", "role", "vllm", "running", "states": {state: [patch, ..]}, "used": [patch,
    ..]}]}`; vllm is None where it was not imported. OSError if the state directory is a file or cannot be read.
    """
    rows = []
    with suppress(FileNotFoundError):
        os.listdir(env.state_dir())  # `ledger.read` uses glob, which raises nothing if it cannot list a directory
    for one in ledger.read(env.state_dir()):
        states: dict[str, list[str]] = {}
        for patch in one["patches"]:
            states.setdefault(patch.get("state", "none"), []).append(patch["name"])
        rows.append(
            {
                **{key: one[key] for key in ("pid", "role", "vllm")},
                "running": ledger.running(one["pid"]),
                "states": states,
                "used": [patch["name"] for patch in one["patches"] if patch.get("used")],
            }
        )
    return {"directory": str(env.state_dir()), "processes": rows}


def show_processes(found: dict[str, Any]) -> None:
    """Prints what `processes` found, for a person."""
    served = [one for one in found["processes"] if one["vllm"]]
    for one in served:
        states = ", ".join(
            f"{len(names)} {state}" + (f" ({', '.join(names)})" if state in ("failed", "late", "off") else "")
            for state, names in one["states"].items()
        )
        life = "running" if one["running"] else "ended"
        click.echo(f"{one['pid']} {life}  {one['role']}, vLLM {one['vllm']}: {states}")
        click.echo(f"    acted: {', '.join(one['used']) or 'none'}")
    others = len(found["processes"]) - len(served)
    absent = "" if Path(found["directory"]).is_dir() else " (no such directory)"
    click.echo(f"{found['directory']}{absent}: {len(served)} processes with vLLM, {others} without")


def _import_all(targets: list[str]) -> dict[str, str]:
    """In the child: imports each target on its own, and returns the errors. The ledger has the patches' states."""
    errors = {}
    for target in targets:
        try:
            importlib.import_module(target)
        except Exception as problem:
            errors[target] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    ledger.flush()
    return errors


if __name__ == "__main__":
    process.answer_parent(_import_all)
