"""The real engine of the CPU wheel, in child processes, on GGUF files that the tests write themselves.

GLM5_SHIM_ORACLE may name a directory with another GLM-5 GGUF and answers computed elsewhere; test_oracle.py then
judges by those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from child_env import ROOT, ledgers, server_env
from wheels import gguf_plugin

HERE = Path(__file__).parent
Answers = dict[str, np.ndarray]


class Probe:
    """A process of engine_probe.py with this PYTHONPATH."""

    def __init__(self, place: Path, pythonpath: str) -> None:
        self.log = place / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_probe.py")],
                env=server_env(PYTHONPATH=pythonpath, GLM5_SHIM_STATE_DIR=str(place / "state")),
                cwd=place,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, place: Path, **request: object) -> Answers:
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(request | {"place": str(place)}), file=self.process.stdin, flush=True)
            code = self.process.stdout.readline().strip()
        except BrokenPipeError:
            code = ""
        log = place / "log"
        assert code == "0", f"exit code {code}\n{(log if log.exists() else self.log).read_text()[-8000:]}"
        return {**np.load(place / "out.npz"), "ledgers": ledgers(place / "state")}


@pytest.fixture(scope="session")
def ask_engine(tmp_path_factory) -> Iterator[Callable[..., Answers]]:
    """`ask_engine(model, jobs, shim=True, path=(), **engine)`: what an engine of engine_probe.py, in a process of its
    own, found; its ledgers are in ["ledgers"]."""
    probes: dict[str, Probe] = {}

    def run(
        model: Path, jobs: list[dict], *, shim: bool = True, path: tuple[Path, ...] = (), **engine: object
    ) -> Answers:
        pythonpath = os.pathsep.join(map(str, ([ROOT] if shim else []) + list(path)))
        if pythonpath not in probes:
            probes[pythonpath] = Probe(tmp_path_factory.mktemp("probe"), pythonpath)
        return probes[pythonpath].ask(tmp_path_factory.mktemp("engine"), model=str(model), jobs=jobs, engine=engine)

    yield run
    for probe in probes.values():
        probe.process.communicate()


@pytest.fixture(scope="session")
def kernels() -> tuple[Path, ...]:
    """What makes quantised weights, on a CPU, part of a child's path."""
    return (HERE / "kernels_on_cpu",)


@pytest.fixture(scope="session")
def plugin() -> tuple[Path, ...]:
    """What makes vllm-gguf-plugin, on a CPU, part of a child's path: for other models' GGUFs."""
    stand_in = HERE / "plugin_on_cpu"
    return (stand_in,) if find_spec("vllm_gguf_plugin") else (stand_in, gguf_plugin())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The first part of a four-part GLM-5 GGUF, quantised like UD-Q4_K_XL."""
    from shim.gguf.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """300 random token ids, none of them special."""
    return np.random.default_rng(7).integers(0, 900, 300).tolist()
