"""Every script of this folder, as a test, on a machine that has the GPUs. Each can also be run by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# script: GPUs, and what it needs to be asked for
SCRIPTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "backends.py": (1, ()),
    "compile_cache.py": (1, ()),
    "gguf_steps.py": (1, ()),
    "gguf_weights.py": (1, ("--oracle", os.environ.get("GLM5_SHIM_ORACLE", ""))),
    "indexer_choices.py": (1, ()),
    "ray_executor.py": (2, ()),
    "steps.py": (1, ()),
}
SHARED = {"gguf_real_size.py"}  # a file writer for others


def gpus() -> int:
    """How many NVIDIA GPUs a vLLM for CUDA finds here."""
    torch = pytest.importorskip("torch")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def test_every_script_is_listed():
    assert {path.name for path in HERE.glob("*.py")} == {*SCRIPTS, *SHARED, Path(__file__).name}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script: str) -> None:
    needed, arguments = SCRIPTS[script]
    if gpus() < needed:
        pytest.skip(f"needs {needed} GPUs, found {gpus()}")
    if "" in arguments:
        pytest.skip("GLM5_SHIM_ORACLE names no directory of answers")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, str(HERE / script), *arguments], env=environment)
    assert done.returncode == 0
