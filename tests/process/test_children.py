"""Every kind of child that vLLM starts, on the real wheel: each comes up with the shim and writes its own ledger."""

from __future__ import annotations

import json
from pathlib import Path

from shim.patches import PATCHES

PARENT = """
import importlib, multiprocessing, os, subprocess, sys
from shim.patches import PATCHES

def work():
    for target in dict.fromkeys(p.target for p in PATCHES):
        if target != "vllm.platforms.cuda":  # needs CUDA
            importlib.import_module(target)
    from shim import activate, ledger, process
    process.check()
    ledger.flush()
    return os.getpid()

if __name__ == "__main__":
    print("main", work())
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=work, name="child by " + method)
        child.start()
        child.join()
        assert child.exitcode == 0, method
        print(method, child.pid)
    from vllm.model_executor.models.registry import _run_in_subprocess
    print("inspection", _run_in_subprocess(work))
    subprocess.run([sys.executable, "-m", "vllm.v1.attention.backends.registry"], check=True)
"""


def test_every_child_has_a_ledger_with_every_required_patch(python, ledgers, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = python(str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    pids = dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1)
    assert set(pids) >= {"main", "fork", "spawn", "forkserver", "inspection"}, done.stdout
    by_pid = {one["pid"]: one for one in ledgers()}
    for role in ("main", "fork", "spawn", "forkserver", "inspection"):
        one = by_pid[int(pids[role])]
        states = {p["name"]: p["state"] for p in one["patches"]}
        for patch in PATCHES:
            if patch.required and patch.target != "vllm.platforms.cuda":
                assert states[patch.name] in ("applied", "unneeded", "upstream"), (role, patch.name, states[patch.name])
        for name in ("backend_member", "cpu_rotary", "cpu_indexer", "worker_seal", "closing_gate"):
            assert states[name] == "applied", (role, name)
    assert by_pid[int(pids["inspection"])]["role"] == "model inspection"
    # as __main__ the target itself has no import to hook, but vLLM's package was imported, and patched
    (module,) = [one for one in by_pid.values() if "vllm.v1.attention.backends.registry" in one["command"]]
    assert [p["state"] for p in module["patches"] if p["name"] == "cpu_packaging"] in (["applied"], ["unneeded"])


PLUGIN = """
import json, os, sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
from vllm.engine import arg_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm.v1.attention.backends.registry as registry
before = arg_utils.EngineArgs.__post_init__.__module__
os.environ.update(json.loads(sys.argv[1]))
arg_utils.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # what `vllm serve` does first
after = arg_utils.EngineArgs.__post_init__.__module__
print(json.dumps([before, after, "TRITON_MLA_SPARSE" in registry.AttentionBackendEnum.__members__]))
"""


def test_the_plugin_reaches_a_server_before_its_arguments_are_read(python):
    """GLM5_SHIM=1 without PYTHONPATH, for modules that are loaded already; inert without it."""
    for variables, owner, known in (
        ({"GLM5_SHIM": "1"}, "shim.patches.gguf_engine_args", True),
        ({}, "vllm.engine.arg_utils", False),
    ):
        done = python("-c", PLUGIN, json.dumps(variables), PYTHONPATH="")
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == ["vllm.engine.arg_utils", owner, known]


WORKER_BASE = """
class WorkerWrapperBase:
    def initialize_from_config(self, kv_cache_configs):
        return "stock"
"""

TWICE = """
import sys
import vllm.v1.worker.worker_base as first
del sys.modules[first.__name__]
import vllm.v1.worker.worker_base as second
from shim import process
assert first is not second
try:
    process.check()
    print("passes")
except RuntimeError as problem:
    print(problem)
"""


def test_a_target_that_is_imported_twice_is_never_served_unpatched(python, stub_vllm):
    """A second copy of a module, which the import hook does not see: the gate finds vLLM's own function there."""
    worker = stub_vllm / "vllm" / "v1" / "worker"
    worker.mkdir()
    (worker / "__init__.py").write_text("")
    (worker / "worker_base.py").write_text(WORKER_BASE)
    done = python("-c", TWICE, PYTHONPATH=f"{Path(__file__).parents[2]}:{stub_vllm}")
    assert done.stdout.startswith("glm5-shim: closing_gate was undone: vllm.v1.worker.worker_base."), done
