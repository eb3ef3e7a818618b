"""Two real Ray workers, started without the shim, load a GLM-5 through vLLM's own worker classes.

Ray is large and not among the test requirements: `pip install ray` beside a shim that is installed, not editable, runs
this. vLLM's Ray executors take no CPU, so `ray_driver.py` makes the calls that they make. tests/gpu/ray_executor.py
runs the executors themselves, on two GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from child_env import server_env

from shim.gguf.tiny import write_tiny

pytest.importorskip("ray")
DRIVER = Path(__file__).with_name("ray_driver.py")
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}  # else a token that an earlier `ray start` left in ~/.ray is asked for


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def address(place):
    """A head node started by hand, as on a second machine: nothing of the shim in its environment."""
    # a torchvision that was built against another torch, see the patch cpu_packaging; vLLM comes before the shim here
    companions = "import sys; sys.modules.update(dict.fromkeys(('torchvision', 'torchaudio', 'torchcodec')))"
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(companions)
    path = os.pathsep.join([str(place / "site"), os.environ.get("PYTHONPATH", "")])
    env = server_env(PYTHONPATH=path, **NO_TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory=100000000", f"--temp-dir={place}", "--num-cpus=4"]
    head = subprocess.Popen(command, env=env, cwd=place, start_new_session=True, stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}"
    os.killpg(head.pid, signal.SIGKILL)
    head.wait()


def _python_path() -> dict[str, str]:
    """Where Ray and the installed shim are, if that is told by PYTHONPATH; never the shim's own directory."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)}


@pytest.mark.parametrize("kind", ["RayWorkerWrapper", "RayWorkerProc"])
def test_workers_that_were_started_without_the_shim_load_the_model_with_it(place, address, kind):
    model = write_tiny(place / kind)
    env = server_env(GLM5_SHIM_STATE_DIR=str(place / f"state-{kind}"), RAY_ADDRESS=address, **NO_TOKEN)
    env |= _python_path()
    command = [sys.executable, "-m", "shim.commands.cli", "wrap", sys.executable, str(DRIVER), kind, str(model)]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    for one in before:
        assert not one["shim"] and "GLM5_SHIM" not in one["environment"], one
    assert len({one["pid"] for one in after}) == 2
    for one in after:
        loaded = {"cpu_indexer", "cpu_rotary"} if kind == "RayWorkerWrapper" else set()  # with the model
        assert {"backend_member", "closing_gate"} | loaded <= set(one["applied"]), one
        assert one["environment"]["GLM5_SHIM_STATE_DIR"] == env["GLM5_SHIM_STATE_DIR"]
        used = json.loads((place / f"state-{kind}" / f"{one['pid']}.json").read_text())
        assert kind == "RayWorkerProc" or any(p["name"] == "gguf_loader" and p.get("used") for p in used["patches"])


def test_a_process_that_is_no_ray_worker_refuses(place):
    code = "import pickle, sys; from shim.patches.worker_seal import unseal; unseal('any', {'GLM5_SHIM': '1'})"
    done = subprocess.run([sys.executable, "-c", "import ray; " + code], cwd=place, capture_output=True, text=True)
    assert done.returncode == 1
    assert "started without the shim" in done.stderr
