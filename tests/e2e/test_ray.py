"""Two real Ray workers without PYTHONPATH: vLLM's plugin loading switches the shim on there, and only where asked.

Ray is large and not among the test requirements: `pip install ray` beside a shim that is installed, not editable, runs
this.
vLLM's own Ray executor takes no CPU, so the workers do what its workers do first: copy the driver's variables, load
the general plugins, receive the engine config.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from shim import wrap  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head node started by hand, as on a second machine: nothing of the shim in its environment."""
    place = tmp_path_factory.mktemp("ray")
    env = {k: v for k, v in os.environ.items() if not k.startswith("GLM5_SHIM") and k != "PYTHONPATH"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=4"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory=100000000", f"--temp-dir={place}"]
    head = subprocess.Popen(command, env=env, cwd=place, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        ray.init(address=f"127.0.0.1:{port}", logging_level="error", log_to_driver=False)
        yield place
    finally:
        ray.shutdown()
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


@ray.remote(num_cpus=1)
class Worker:
    """Runs in a process of Ray's."""

    def before(self) -> dict:
        import os
        import sys

        return {"pid": os.getpid(), "pythonpath": os.environ.get("PYTHONPATH"), "shim": "shim.activate" in sys.modules}

    def start(self, variables: dict[str, str]) -> dict:
        """What vLLM's RayWorkerWrapper does, in its order."""
        import os
        import sys

        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules.setdefault(name, None)
        os.environ.update(variables)
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        import vllm.model_executor.models.deepseek_v2
        import vllm.v1.worker.worker_base  # noqa: F401

        from shim import activate

        engine = activate.engine()
        if engine is None:
            return {}
        activate.check()
        return {name: record.state.value for name, record in engine.records.items() if record.patch.required}

    def receive(self, config: bytes) -> str:
        import pickle

        return str(pickle.loads(config))


def copied(environment: dict[str, str]) -> dict[str, str]:
    """What vLLM's Ray executor copies to its workers of a driver's environment."""
    from unittest import mock

    from vllm.ray.ray_env import get_env_vars_to_copy

    with mock.patch.dict(os.environ, environment, clear=True):
        return {name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}


def test_two_workers_come_up_patched_without_pythonpath(cluster):
    from shim.engine import Engine
    from shim.patches import PATCHES
    from shim.patches.worker_seal import Seal

    variables = copied(wrap.environment(dict(os.environ)) | {"GLM5_SHIM_STATE_DIR": str(cluster / "state")})
    assert "PYTHONPATH" not in variables
    workers = [Worker.remote() for _ in range(2)]
    before = ray.get([w.before.remote() for w in workers])
    assert len({one["pid"] for one in before}) == 2
    assert all(one["pythonpath"] is None and not one["shim"] for one in before), before
    states = ray.get([w.start.remote(variables) for w in workers])
    for state in states:
        assert {"backend_member", "cpu_indexer", "cpu_rotary", "closing_gate"} <= {
            n for n, s in state.items() if s == "applied"
        }
        assert set(state.values()) <= {"applied", "unneeded", "upstream", "waiting"}
    assert len(list((cluster / "state").glob("*.json"))) == 2
    seal = Seal(Engine(PATCHES).seal)
    assert ray.get([w.receive.remote(pickle.dumps(seal)) for w in workers]) == [str(seal)] * 2


def test_a_worker_that_was_not_asked_stays_vllms_and_refuses_the_config(cluster):
    from shim.patches.worker_seal import Seal

    worker = Worker.remote()
    assert ray.get(worker.start.remote({})) == {}
    with pytest.raises(Exception, match="started without the shim"):
        ray.get(worker.receive.remote(pickle.dumps(Seal("any"))))
