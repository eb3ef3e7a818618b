"""How the patches stand in a real child process that imports vLLM's real modules. The parent would prove nothing."""

from __future__ import annotations

import importlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from shim import env, ledger, process
from shim.commands.wrap import environment
from shim.patches import PATCHES


def patch_table() -> dict[str, Any]:
    """`{"vllm": version or None, "patches": [{name, target, state, required, why, detail}]}`. EnvProblem if the
    variables keep the shim from coming up at all."""
    env.require_on()
    env.skip(tuple(patch.name for patch in PATCHES))
    env.assumed_capability()
    targets = list(dict.fromkeys(patch.target for patch in PATCHES))
    found, errors = child_ledger(targets)
    stated = {entry["name"]: entry for entry in found["patches"]} if found else {}
    rows = []
    for patch in PATCHES:
        entry = stated.get(patch.name, {"state": "waiting", "detail": "the shim did not come up in the child"})
        detail = entry["detail"]
        if entry["state"] == "waiting" and patch.target in errors:
            detail = f"cannot be imported here: {errors[patch.target]}"
        rows.append(
            {
                "name": patch.name,
                "target": patch.target,
                "state": entry["state"],
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
        with suppress(process.ChildProblem):  # then the ledger tells how far it came
            errors = process.ask_child("shim.commands.patches", targets, variables)
        ledgers = ledger.read(Path(state))
    # the child itself is the first to have come up; children of its own may have written too
    return (ledgers[0] if ledgers else None), errors


def _import_all(targets: list[str]) -> dict[str, str]:
    """In the child: imports each target on its own. How the patches stand goes to the ledger."""
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
