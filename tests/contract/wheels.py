"""Real wheels as the contract: their own .py files, imported in a child process with the shim on.

`vllm` wheels for CUDA do not run here, but their Python files do, with stand-ins for the compiled modules. Everything
that the patches look at and replace is vLLM's own, unmodified.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "wheels"
PLUGIN = "vllm-gguf-plugin==0.0.5"
OLDEST = (0, 16, 0)

_idle: list[subprocess.Popen[str]] = []  # wheel_child.py's, one for each child at a time

_PRELUDE = """
import importlib, json, sys, types
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
for name in STANDINS:
    sys.modules[name] = types.ModuleType(name)
from shim import activate, process
def say(value):
    print("@@" + json.dumps(value))
def states():
    return {r.patch.name: r.state.value for r in process.engine().records.values()}
"""


def some(*ci: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Releases to test: `ci`, and with GLM5_SHIM_EVERY_RELEASE=1 `more` of them (a child takes 10 to 20 s)."""
    every = set(ci) | (set(more) if os.environ.get("GLM5_SHIM_EVERY_RELEASE") == "1" else set())
    return tuple(sorted(every, key=as_tuple))


def released() -> list[str]:
    """Every final release of vLLM from the oldest supported on, oldest first, as pip knows them."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("Available versions: ")]
    found = line.removeprefix("Available versions: ").split(", ")
    return sorted((v for v in found if "post" not in v and as_tuple(v) >= OLDEST), key=as_tuple)


def as_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def sources(version: str) -> Path:
    """The .py files of the released wheel vllm==version, fetched by pip once."""
    options = ["--only-binary=:all:"]
    for tag in ("2_35", "2_31", "2_28", "2_24"):
        options += ["--platform", f"manylinux_{tag}_x86_64"]
    return _unpacked(CACHE / version, f"vllm=={version}", "vllm", options, lambda name: name.endswith(".py"))


def gguf_plugin() -> Path:
    """vllm-gguf-plugin without its CUDA library, fetched by pip once."""
    return _unpacked(CACHE / PLUGIN, PLUGIN, "vllm_gguf_plugin", [], lambda name: not name.endswith(".so"))


def _unpacked(place: Path, wheel: str, package: str, options: list[str], wanted: Callable[[str], bool]) -> Path:
    """Unpacks all or nothing, and in one test process, while others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / package).is_dir():
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", scratch, wheel]
            subprocess.run(fetch, check=True, capture_output=True)
            (file,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(file) as archive:
                archive.extractall(Path(scratch, "files"), [n for n in archive.namelist() if wanted(n)])
            Path(scratch, "files").rename(place)
    return place


def child(code: str, place: Path, source: Path | None = None, **env: str) -> object:
    """Runs `code` with the shim on and `place` as its working directory, on the installed vLLM or on a GPU wheel's
    sources; returns what it passes to `say(...)`."""
    path = [str(ROOT)] + ([str(source)] if source else [])
    standins = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C") if source else ()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "GLM5_SHIM_STATE_DIR": str(place / "state"), **env}
    script = f"STANDINS = {standins!r}\n{_PRELUDE}\n{code}"
    fork = _idle.pop() if _idle else _start()
    assert fork.stdin and fork.stdout
    print(json.dumps([script, environment, str(place)]), file=fork.stdin, flush=True)
    exit_code = fork.stdout.readline().strip()
    _idle.append(fork)
    out, err = ((place / name).read_text() for name in ("stdout", "stderr"))
    answers = [line[2:] for line in out.splitlines() if line.startswith("@@")]
    assert answers, f"the child gave no answer (exit {exit_code}):\n{out[-2000:]}\n{err[-4000:]}"
    return json.loads(answers[-1])


def _start() -> subprocess.Popen[str]:
    """Ends with this process, which holds the other end of its stdin."""
    command = [sys.executable, str(Path(__file__).with_name("wheel_child.py"))]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
