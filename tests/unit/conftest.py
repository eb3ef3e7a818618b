"""What the unit tests share: stand-in modules in a real import system, and a ledger of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from shim import ledger, upstream
from shim.engine import Engine
from shim.patch import Patch, State


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(ledger, "_entries", {})
    yield ledger._entries


@pytest.fixture(autouse=True)
def own_import_system() -> Iterator[None]:
    """Finders and modules that a test adds are gone after it."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    added = [name for name in sys.modules if name not in modules]
    for name in added:
        if name.split(".")[0].startswith("stub"):
            del sys.modules[name]
    for finder in [f for f in sys.meta_path if f not in finders]:
        if type(finder).__name__ == "Latch":
            sys.meta_path.remove(finder)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes an importable module below sys.path and returns its name."""
    root = tmp_path / "modules"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def write(name: str, source: str) -> str:
        path = root / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    return write


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`stub(patch, a=..., b=...)`: a module with these attributes in the place of the patch's target."""

    def make(patch: Patch, **attributes: object) -> ModuleType:
        module = ModuleType(patch.target)
        module.__spec__ = ModuleSpec(patch.target, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, patch.target, module)
        return module

    return make


@pytest.fixture
def switch_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`switch_on(patch, ...)`: the process's engine, armed with these patches; their targets are stubs already."""
    from shim import process
    from shim.activate import Seal

    def on(*patches: Patch, skip: frozenset[str] = frozenset()) -> Engine:
        engine = Engine(patches, skip)
        monkeypatch.setattr(process, "_engine", engine)
        monkeypatch.setattr(process, "_seal", Seal(engine.seal))
        engine.arm()
        return engine

    return on


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first part of a four-part GLM-5 GGUF."""
    from shim.gguf.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def other_architecture(tmp_path: Path) -> Path:
    """A sound GGUF of another architecture."""
    import numpy as np
    from gguf import GGMLQuantizationType

    from shim.gguf.tiny import write_gguf

    weights = {"token_embd.weight": (np.zeros((8, 32), dtype=np.float32), GGMLQuantizationType.F32)}
    return write_gguf(tmp_path, "llama", {"general.architecture": "llama"}, weights)


@pytest.fixture
def off_and_twice(switch_on: Callable[..., Engine]) -> Callable[..., None]:
    """`off_and_twice(module, patch, *needs)`: by its switch the patch leaves the stub as it was; armed twice it is
    applied once."""

    def symbols(module: ModuleType, patch: Patch) -> dict[str, object]:
        present = [symbol for symbol in patch.replaces if upstream.has(module, symbol)]  # others are `optional`
        return {symbol: upstream.raw(module, symbol) for symbol in present}

    def check(module: ModuleType, patch: Patch, *needs: Patch) -> None:
        stock = symbols(module, patch)
        engine = switch_on(*needs, patch, skip=frozenset({patch.name}))
        assert engine.records[patch.name].state is State.OFF
        assert symbols(module, patch) == stock
        engine = switch_on(*needs, patch)
        assert engine.records[patch.name].state is State.APPLIED
        ours = symbols(module, patch)
        assert all(ours[symbol] is not stock[symbol] for symbol in stock)
        engine.arm()
        assert symbols(module, patch) == ours
        engine.check()

    return check


@pytest.fixture
def python_code() -> Callable[[str], str]:
    """`python_code(code)`: what a fresh Python prints that runs it. The code must not fail."""

    def run(code: str, **env: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
