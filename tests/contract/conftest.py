"""Real wheels as the contract: their own .py files, imported in a child process with the shim on.

`vllm` wheels for CUDA do not run here, but their Python does once the compiled modules have stand-ins: everything
that the patches look at and replace is vLLM's own, unmodified.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "wheels"

_PRELUDE = """
import importlib, json, sys, types
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
for name in STANDINS:
    sys.modules[name] = types.ModuleType(name)
from shim import activate
def say(value):
    print("@@" + json.dumps(value))
def states():
    return {r.patch.name: r.state.value for r in activate.engine().records.values()}
"""


def sources(version: str) -> Path:
    """The .py files of the released wheel vllm==version, fetched by pip once."""
    place = CACHE / version
    if not (place / "vllm").is_dir():
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        fetch += [
            "--platform",
            "manylinux_2_31_x86_64",
            "--platform",
            "manylinux_2_28_x86_64",
            "-d",
            str(place),
            f"vllm=={version}",
        ]
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(fetch, check=True, capture_output=True)
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [n for n in archive.namelist() if n.endswith(".py")])
        wheel.unlink()
    return place


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """`child(code, wheel=None, **env)`: runs `code` with the shim on, on the installed vLLM or on a GPU wheel's
    sources; returns what it passes to `say(...)`."""

    def run(code: str, wheel: str | None = None, **env: str) -> object:
        tmp_path = tmp_path_factory.mktemp("child")
        path = [str(ROOT)] + ([str(sources(wheel))] if wheel else [])
        standins = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C") if wheel else ()
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "GLM5_SHIM_STATE_DIR": str(tmp_path / "state"), **env}
        script = f"STANDINS = {standins!r}\n{_PRELUDE}\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        said = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
        assert said, f"the child said nothing (exit {done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(said[-1])

    return run
