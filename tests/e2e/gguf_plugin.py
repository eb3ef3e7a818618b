"""Fixtures: vllm-gguf-plugin on the path of a child, and gguf_probe.py in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_env import ROOT, ledgers, server_env
from wheels import gguf_plugin

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def plugin() -> tuple[Path, ...]:
    """What makes the plugin, on a CPU, part of a child's path."""
    kernels = HERE / "plugin_on_cpu"
    if find_spec("vllm_gguf_plugin"):
        return (kernels,)
    return kernels, gguf_plugin()


@pytest.fixture(scope="module")
def probe(plugin, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """`probe(runs, shim=True)`: what gguf_probe.py found, with the plugin; its ledgers are in ["ledgers"]."""

    def ask(runs: dict[str, Any], *, shim: bool = True) -> dict[str, Any]:
        place = tmp_path_factory.mktemp("probe")
        env = server_env(
            PYTHONPATH=os.pathsep.join(map(str, [ROOT, *plugin] if shim else plugin)),
            GLM5_SHIM_STATE_DIR=str(place / "state"),
            GLM5_SHIM_CACHE_DIR=str(place / "cache"),
        )
        request = json.dumps({"runs": runs, "out": str(place / "out.npz")})
        command = [sys.executable, str(HERE / "gguf_probe.py"), request]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=place)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return {**np.load(place / "out.npz"), "ledgers": ledgers(place / "state")}

    return ask
