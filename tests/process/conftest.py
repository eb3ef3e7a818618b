"""Real child processes of the Python that runs the tests, with environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean_env(tmp_path: Path) -> dict[str, str]:
    """This environment without anything of the shim's, and with state and cache directories of its own."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("GLM5_SHIM") and k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    return keep | {"GLM5_SHIM_STATE_DIR": str(tmp_path / "state"), "GLM5_SHIM_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def python(clean_env, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """`python(*arguments, executable=..., **env)`: runs it to its end; PYTHONPATH=ROOT unless env says otherwise."""

    def run(*arguments: str, executable: str = sys.executable, **env: str) -> subprocess.CompletedProcess:
        environment = clean_env | {"PYTHONPATH": str(ROOT)} | env
        return subprocess.run([executable, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path)

    return run


@pytest.fixture
def stub_vllm(tmp_path: Path) -> Path:
    """A directory with a package `vllm` that imports in no time and has one real target of the shim."""
    root = tmp_path / "stub site"  # the space is part of the test
    backends = root / "vllm" / "v1" / "attention" / "backends"
    backends.mkdir(parents=True)
    for directory in (root / "vllm", root / "vllm" / "v1", root / "vllm" / "v1" / "attention", backends):
        (directory / "__init__.py").write_text("")
    (backends / "registry.py").write_text(
        "import enum\nclass AttentionBackendEnum(enum.Enum):\n    TRITON_MLA = 'a.B'\n    CUSTOM = None\n"
    )
    return root


@pytest.fixture
def ledgers(tmp_path: Path) -> Callable[[], list[dict]]:
    def read() -> list[dict]:
        return [json.loads(p.read_text()) for p in sorted((tmp_path / "state").glob("*.json"))]

    return read
