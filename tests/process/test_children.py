"""Every kind of child that vLLM starts, on the real wheel: each comes up with the shim and writes its own ledger."""

from __future__ import annotations

from pathlib import Path

PARENT = """
import multiprocessing, os, subprocess, sys

def work():
    import vllm.v1.attention.backends.registry as registry
    assert "TRITON_MLA_SPARSE" in registry.AttentionBackendEnum.__members__

if __name__ == "__main__":
    work()
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=work, name="child by " + method)
        child.start()
        child.join()
        assert child.exitcode == 0, method
    subprocess.run([sys.executable, "-m", "vllm.v1.attention.backends.registry"], check=True)
"""


def test_every_child_has_a_ledger_with_the_patch(python, ledgers, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = python(str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    modules, others = ([one for one in ledgers() if ("-m" in one["argv"]) == is_module] for is_module in (True, False))
    states = {one["role"]: {p["name"]: p["state"] for p in one["patches"]} for one in others}
    # a fork is named by multiprocessing only after it has written
    for role in ("main", "fork", "child by spawn", "child by forkserver"):
        assert states[role]["backend_member"] == "applied", (role, states.keys())
        assert states[role]["cpu_packaging"] in ("applied", "unneeded")
    # as __main__ the target itself has no import to hook, but vLLM's package was imported, and patched
    assert [p["state"] for p in modules[0]["patches"] if p["name"] == "cpu_packaging"] in (["applied"], ["unneeded"])
