"""Every patch on every released vLLM: `python tests/contract/matrix.py [VERSIONS...] [--write]`.

For each release its own .py files (see wheels.py) are imported twice, once with all patches off, once with them on.
Off: what each patch replaces is vLLM's own. Its signature and body are compared with snapshots.json, and one that no
earlier release had is reported as drift. On: each patch is applied and verified, or its probe says why not; every
by-value importer is rebound; the closing gate passes. `--write` puts the result into README and snapshots.json, which
are generated, never typed. Exit 1 if a release has problems and shim/upstream.py does not list it as unsupported, or
the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import wheels

from shim import upstream
from shim.patches import PATCHES

SNAPSHOTS = Path(__file__).with_name("snapshots.json")
README = wheels.ROOT / "README.md"
ELSEWHERE = "other platform"  # a patch for the CPU wheel: nothing on a GPU machine imports its target
GOOD = ("applied", "upstream", "unneeded", ELSEWHERE)
NAMES = [patch.name for patch in PATCHES]

_COMMON = """
import hashlib, inspect
sys.path.insert(0, HERE)
import indexer_surface as surface
surface.install()
import torch
no = torch.library.Library("_C", "FRAGMENT")  # modules call these while they are imported
for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported",
             "cutlass_scaled_mm_supports_fp4"):
    no.define(name + "(int capability) -> bool")
    no.impl(name, lambda capability: False, "CompositeExplicitAutograd")
from shim import upstream
from shim.patches import PATCHES

errors = {}
for target in dict.fromkeys(p.target for p in PATCHES):
    if target.endswith("platforms.cpu"):  # on a GPU machine nothing imports it
        continue
    try:
        importlib.import_module(target)
    except Exception as problem:
        errors[target] = f"{type(problem).__name__}: {problem}"

def present(patch):
    # a probe says what a missing symbol means
    module = sys.modules.get(patch.target)
    return [symbol for symbol in patch.replaces if module is not None and upstream.has(module, symbol)]

def held(patch, symbol):
    found = upstream.raw(sys.modules[patch.target], symbol)
    return getattr(found, "__func__", found)
"""

OFF = (
    _COMMON
    + """
def shape(function):
    source = inspect.getsource(function)
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return [str(inspect.signature(function)), hashlib.sha256("\\n".join(lines).encode()).hexdigest()[:12]]

shapes, ours = {}, []
for patch in PATCHES:
    for symbol in present(patch):
        function = held(patch, symbol)
        if str(getattr(function, "__module__", "")).startswith("shim."):
            ours.append(symbol)
        if inspect.isfunction(inspect.unwrap(function)):
            shapes[f"{patch.target}.{symbol}"] = shape(function)
say({"shapes": shapes, "ours": ours, "errors": errors})
"""
)

ON = (
    _COMMON
    + """
found, details, lost = {}, {}, []
for record in process.engine().records.values():
    patch = record.patch
    found[patch.name], details[patch.name] = record.state.value, record.detail
    if found[patch.name] == "applied":
        lost += [s for s in present(patch) if not str(getattr(held(patch, s), "__module__", "")).startswith("shim.")]
try:
    process.check()  # identity of what was replaced, and of every loaded copy of it
    gate = ""
except Exception as problem:
    gate = str(problem)
activate.activate()
say({"states": found, "details": details, "lost": lost, "gate": gate, "errors": errors, "again": states() == found})
"""
)


def examine(version: str, source: Path | None = None) -> dict[str, Any]:
    """`{"cells": {patch: cell}, "problems": [line], "shapes": {symbol: [signature, body hash]}}` of one release, or of
    edited sources in its place."""
    source = source or wheels.sources(version)
    here = f"HERE = {str(Path(__file__).parent)!r}\n"
    with tempfile.TemporaryDirectory() as place:
        off: Any = wheels.child(here + OFF, Path(place), source, GLM5_SHIM_SKIP=",".join(NAMES))
        # the CPU wheel lies beside these sources; without cpu_packaging its metadata does not count
        on: Any = wheels.child(here + ON, Path(place), source, GLM5_SHIM_SKIP="cpu_packaging")
    cells = {n: ELSEWHERE if n.startswith("cpu_") and s in ("off", "waiting") else s for n, s in on["states"].items()}
    problems = [f"{n} is {cell}: {on['details'][n]}" for n, cell in cells.items() if cell not in GOOD]
    problems += [f"{target} cannot be imported: {error}" for target, error in {**off["errors"], **on["errors"]}.items()]
    problems += [f"{symbol} is not vLLM's with every patch off" for symbol in off["ours"]]
    problems += [f"{symbol} is not the shim's" for symbol in on["lost"]]
    problems += [f"the closing gate: {on['gate']}"] * bool(on["gate"])
    problems += ["a second activation changed a state"] * (not on["again"])
    return {"cells": cells, "problems": problems, "shapes": off["shapes"]}


def known() -> dict[str, dict[str, dict[str, list[str]]]]:
    """snapshots.json: symbol: signature: body hash: releases."""
    return json.loads(SNAPSHOTS.read_text()) if SNAPSHOTS.exists() else {}


def drift(version: str, shapes: dict[str, list[str]], snapshots: dict[str, Any]) -> list[str]:
    """What of this release the snapshots have not seen in it or, if they do not know it, in any other."""
    seen = any(version in r for one in snapshots.values() for bodies in one.values() for r in bodies.values())
    lines = []
    for symbol, (signature, body) in shapes.items():
        bodies = snapshots.get(symbol, {})
        if signature not in bodies:
            before = " or ".join(bodies) or "none"
            lines.append(f"{symbol}{signature}: signature is new; known: {before}")
        elif body not in bodies[signature] or (seen and version not in bodies[signature][body]):
            lines.append(f"{symbol}: body {body} is new; known: {', '.join(bodies[signature])}")
    return lines


def merge(snapshots: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The snapshots, with what they had of these releases replaced by `found`."""
    fresh: dict[str, Any] = {}

    def add(symbol: str, signature: str, body: str, releases: list[str]) -> None:
        place = fresh.setdefault(symbol, {}).setdefault(signature, {}).setdefault(body, [])
        place[:] = sorted({*place, *releases}, key=wheels.as_tuple)

    for symbol, signatures in snapshots.items():
        for signature, bodies in signatures.items():
            for body, releases in bodies.items():
                kept = [r for r in releases if r not in found]
                if kept:
                    add(symbol, signature, body, kept)
    for version, one in found.items():
        for symbol, (signature, body) in one["shapes"].items():
            add(symbol, signature, body, [version])
    return {symbol: fresh[symbol] for symbol in sorted(fresh)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each patch, a column for each run of releases whose cells are the same."""

    def column(version: str) -> tuple[str, ...]:
        return tuple(found[version]["cells"][name] for name in NAMES)

    runs = [(list(versions), cells) for cells, versions in groupby(found, key=column)]
    heads = [v[0] if len(v) == 1 else f"{v[0]} to {v[-1]}" for v, _ in runs]
    lines = ["| patch | " + " | ".join(heads) + " |", "|---" * (len(runs) + 1) + "|"]
    for number, name in enumerate(NAMES):
        lines.append(f"| `{name}` | " + " | ".join(cells[number] for _, cells in runs) + " |")
    lines.append("")
    lines.append(f"{len(found)} releases: {', '.join(found)}.")
    for version, one in found.items():
        if one["problems"]:
            lines.append(f"{version} is refused by `wrap`: {'; '.join(one['problems'])}.")
    return "\n".join(lines)


def write(found: dict[str, dict[str, Any]]) -> None:
    SNAPSHOTS.write_text(json.dumps(merge(known(), found), indent=1) + "\n")
    text = README.read_text()
    marked = f"<!-- versions -->\n{table(found)}\n<!-- /versions -->"
    README.write_text(re.sub(r"<!-- versions -->.*<!-- /versions -->", lambda _: marked, text, flags=re.DOTALL))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", help="default: every release from 0.16.0 on that pip knows")
    parser.add_argument("--write", action="store_true", help="into README and snapshots.json; only for all releases")
    given = parser.parse_args(argv)
    if given.write and given.versions:
        parser.error("--write is for all releases: name none")
    versions = given.versions or wheels.released()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(versions, pool.map(examine, versions), strict=True))
    bad = False
    for version, one in found.items():
        refused = upstream.unsupported(version)
        cells = list(one["cells"].values())
        print(f"{version}: " + ", ".join(f"{cells.count(c)} {c}" for c in dict.fromkeys(cells)), flush=True)
        for line in one["problems"]:
            print(f"  PROBLEM {line}")
        for line in drift(version, one["shapes"], known()) if known() else ():
            print(f"  drift: {line}")
        if bool(one["problems"]) != bool(refused):
            print(f"  BAD: shim/upstream.py {'refuses' if refused else 'does not refuse'} {version}")
            bad = True
    if given.write:
        write(found)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
