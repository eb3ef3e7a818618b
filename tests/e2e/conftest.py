"""The real engine of the CPU wheel, in child processes, on GGUF files that the tests write themselves.

GLM5_SHIM_ORACLE may name a directory with another GLM-5 GGUF and answers computed elsewhere; test_oracle.py then
judges by those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from child_env import ROOT, ledgers, server_env

HERE = Path(__file__).parent
Answers = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def ask_engine(tmp_path_factory) -> Callable[..., Answers]:
    """`ask_engine(model, jobs, shim=True, path=(), **engine)`: what engine_probe.py found; its ledgers are in
    ["ledgers"]."""

    def run(
        model: Path, jobs: list[dict], *, shim: bool = True, path: tuple[Path, ...] = (), **engine: object
    ) -> Answers:
        place = tmp_path_factory.mktemp("engine")
        request = {"model": str(model), "jobs": jobs, "engine": engine, "out": str(place / "out.npz")}
        pythonpath = os.pathsep.join(map(str, ([ROOT] if shim else []) + list(path)))
        env = server_env(
            PYTHONPATH=pythonpath, GLM5_SHIM_STATE_DIR=str(place / "state"), GLM5_SHIM_CACHE_DIR=str(place / "cache")
        )
        command = [sys.executable, str(HERE / "engine_probe.py"), json.dumps(request)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=place)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        answers: Answers = dict(np.load(place / "out.npz"))
        answers["ledgers"] = ledgers(place / "state")
        return answers

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The first part of a four-part GLM-5 GGUF, quantised like UD-Q4_K_XL."""
    from shim.gguf.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """300 random token ids, none of them special."""
    return np.random.default_rng(7).integers(0, 900, 300).tolist()
