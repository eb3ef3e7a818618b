"""The probe: a child that may fail in every way, its answer, and when that is kept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from types import ModuleType

import pytest
import torch

from shim import env, process
from shim.indexer import probe
from shim.kernels.indexer import reference

HEADS = 32


def library(tmp_path, monkeypatch, kernels):
    directory = tmp_path / "deep_gemm"
    impls = directory / "include" / "deep_gemm" / "impls"
    impls.mkdir(parents=True, exist_ok=True)
    (impls / "sm90_fp8_mqa_logits.cuh").touch()
    (directory / "_C.so").write_bytes(b"binary")
    if kernels:
        (impls / "sm120_fp8_mqa_logits.cuh").touch()
    monkeypatch.setattr(probe, "deep_gemm_directory", lambda: directory)
    return directory


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(probe.importlib.metadata, "version", lambda name: "0.26.0")


def test_without_kernels_no_child_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_ask", lambda *_: pytest.fail("a child was started"))
    monkeypatch.setattr(probe, "deep_gemm_directory", lambda: None)
    assert probe.native_works(HEADS) == (False, "there is no DeepGEMM")
    library(tmp_path, monkeypatch, kernels=False)
    assert probe.native_works(HEADS) == (False, "this release's DeepGEMM has no SM120 kernels")


def test_the_answer_is_kept_until_the_library_changes(tmp_path, monkeypatch, gpu):
    directory = library(tmp_path, monkeypatch, kernels=True)
    calls = []
    monkeypatch.setattr(probe, "_ask", lambda *a: (calls.append(a), (True, "proved", True))[1])
    assert [probe.native_works(HEADS) for _ in range(3)] == [(True, "proved")] * 3
    assert calls == [(3, HEADS)]
    (kept,) = (env.cache_dir() / "indexer").glob("*.json")
    assert json.loads(kept.read_text())["key"]["gpu"] == ["a card", [12, 0]]
    kept.write_text("{")
    probe.native_works(HEADS)
    (directory / "_C.so").write_bytes(b"another binary")
    probe.native_works(HEADS)
    assert len(calls) == 3 and len(list((env.cache_dir() / "indexer").glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("code", "works", "because", "proved"),
    [
        ("print('noise'); process.answer_parent(lambda question: '2e-07')", True, "within 2.0e-07 of the", True),
        ("process.answer_parent(lambda question: '0.3')", False, "within 3.0e-01", True),
        ("process.answer_parent(lambda question: 'inf')", False, "within inf", True),
        ("process.answer_parent(lambda question: '2e-07'); sys.exit(3)", False, "exit 3", True),
        ("raise RuntimeError('Unsupported architecture')", False, "RuntimeError: Unsupported architecture", True),
        ("pass", False, "exit code 0", True),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate')", False, "out of memory", False),
        ("raise SystemExit('CUDA error: all CUDA-capable devices are busy or unavailable')", False, "busy", False),
        ("os.kill(os.getpid(), 9)", False, "exit -9", False),
        ("os.kill(os.getpid(), 15)", False, "exit -15", False),
        ("os.kill(os.getpid(), 11)", False, "exit -11", True),
        ("process.answer_parent(lambda q: sys.exit(str((os.environ['GLM5_SHIM_OFF'], q))))",
         False, "('1', {'device': 0, 'heads': 32})", True),
        ("time.sleep(600)", False, "did not answer within 3 s", False),
    ],
)  # fmt: skip
def test_every_end_of_the_child(tmp_path, monkeypatch, code, works, because, proved):
    """A real child, which runs `code` where the probe would run."""
    monkeypatch.setattr(probe, "__name__", "stub_probe.probe")
    monkeypatch.setenv("PYTHONPATH", stub_probe(tmp_path, code))
    monkeypatch.setattr(probe, "TIMEOUT_S", 3.0 if "sleep" in code else 180.0)
    found = probe._ask(0, HEADS)
    assert (found[0], found[2]) == (works, proved) and because in found[1]


def stub_probe(tmp_path, code):
    """A directory with the module stub_probe.probe, which runs `code`."""
    package = tmp_path / "root" / "stub_probe"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "probe.py").write_text(
        f"import os, sys, time\nsys.path.append({str(process.PACKAGE.parent)!r})\nfrom shim import process\n{code}\n"
    )
    return str(package.parent)


def test_the_last_line_of_the_child_names_the_error(monkeypatch):
    """CUDA's errors have several lines, and the parent sees the last one."""
    advice = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"

    def set_device(device):
        raise RuntimeError(advice)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(SystemExit) as stopped:
        probe._answer({"device": 0, "heads": HEADS})
    (line,) = stopped.value.code.splitlines()
    assert line.startswith("RuntimeError: CUDA error: out of memory Compile with")


def test_after_an_answer_that_proves_nothing_the_next_server_runs_a_child_again(tmp_path, monkeypatch, gpu):
    library(tmp_path, monkeypatch, kernels=True)
    answers = [(False, "DeepGEMM did not answer within 180 s", False), (True, "fine now", True)]
    calls = []
    monkeypatch.setattr(probe, "_ask", lambda *a: (calls.append(a), answers[len(calls) - 1])[1])
    assert probe.native_works(HEADS) == (False, "DeepGEMM did not answer within 180 s")
    assert probe.native_works(HEADS) == (True, "fine now")
    assert probe.native_works(HEADS) == (True, "fine now")
    assert len(calls) == 2


@pytest.mark.parametrize("kept", ["{", "null", "[]", "{}", '{"proved": true}', '{"proved": false, "at": "now"}'])
def test_a_damaged_answer_is_replaced(tmp_path, monkeypatch, gpu, kept):
    library(tmp_path, monkeypatch, kernels=True)
    monkeypatch.setattr(probe, "_ask", lambda *_: (True, "proved", True))
    probe.native_works(HEADS)
    (file,) = (env.cache_dir() / "indexer").glob("*.json")
    whole = json.loads(file.read_text())
    file.write_text(kept)
    assert probe.native_works(HEADS) == (True, "proved")
    assert json.loads(file.read_text()).keys() == whole.keys()


def test_the_cache_is_the_users_own(tmp_path, monkeypatch, gpu):
    library(tmp_path, monkeypatch, kernels=True)
    monkeypatch.setattr(probe, "_ask", lambda *_: (True, "proved", True))
    probe.native_works(HEADS)
    directory = env.cache_dir() / "indexer"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("broken", ["directory", "lock", "flock"])
def test_without_a_lock_or_a_cache_the_child_still_answers(tmp_path, monkeypatch, gpu, broken):
    def no_locks(*_):
        raise OSError("no locks here")

    library(tmp_path, monkeypatch, kernels=True)
    monkeypatch.setattr(probe, "_ask", lambda *_: (True, "proved", True))
    if broken == "directory":
        env.cache_dir().mkdir()
        (env.cache_dir() / "indexer").touch()
    elif broken == "lock":
        monkeypatch.setattr(probe.os, "open", no_locks)
    else:
        monkeypatch.setattr(probe.fcntl, "flock", no_locks)
    assert [probe.native_works(HEADS) for _ in range(2)] == [(True, "proved")] * 2


WORKER = """
import os, sys, time
from pathlib import Path
from types import ModuleType, SimpleNamespace
place, ROOT, TIMEOUT_S = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
sys.path.append(ROOT)
torch = sys.modules["torch"] = ModuleType("torch")
torch.cuda = SimpleNamespace(current_device=lambda: int(sys.argv[4]), get_device_name=lambda d: "a card",
                             get_device_capability=lambda d: (12, 0))
from shim.indexer import probe
probe.deep_gemm_directory, probe.has_sm120_kernels = lambda: place, lambda directory: True
probe.importlib.metadata.version = lambda name: "0.33.0"
probe.__name__, probe.TIMEOUT_S = "stub_probe.probe", TIMEOUT_S
(place / f"ready.{sys.argv[4]}").touch()
while not (place / "go").exists():
    time.sleep(0.01)
print(probe.native_works(32))
"""
COUNT = "import pathlib; pathlib.Path(os.environ['PLACE'], f'child.{os.getpid()}').touch(); "


@pytest.mark.parametrize(
    ("code", "timeout_s", "expected"),
    [
        ("time.sleep(1); process.answer_parent(lambda q: '2e-07')", 60.0, "(True, \"DeepGEMM's logits on this GPU"),
        ("time.sleep(600)", 2.0, "(False, 'DeepGEMM did not answer within 2 s')"),
    ],
)
def test_eight_workers_at_once_start_one_child(tmp_path, code, timeout_s, expected):
    """Real processes. All get the answer of the one child, also if it proves nothing."""
    variables = {
        "PYTHONPATH": stub_probe(tmp_path, COUNT + code),
        "PLACE": str(tmp_path),
        "GLM5_SHIM_CACHE_DIR": str(tmp_path / "cache"),
    }
    arguments = [str(tmp_path), str(process.PACKAGE.parent), str(timeout_s)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments, str(number)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("ready.*"))) < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "go").touch()
        answers = {worker.communicate(timeout=120)[0].strip() for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
    (answer,) = answers
    assert answer.startswith(expected)
    assert len(list(tmp_path.glob("child.*"))) == 1


def native_module(monkeypatch, compressed=False, spoil=1.0, old=False):
    """A vllm.utils.deep_gemm whose logits are the reference's, times `spoil`."""
    module = ModuleType("vllm.utils.deep_gemm")

    def prefill(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits):
        q = q if old else q[0]
        return reference.mqa_logits(q, *kv, weights, cu_seqlen_ks, cu_seqlen_ke).nan_to_num(0) * spoil

    def prefill_compressed(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
        full = reference.mqa_logits(q[0], *kv, weights, cu_seqlen_ks, cu_seqlen_ke)
        rows = [full[m, int(s) : int(s) + max_seqlen_k] for m, s in enumerate(cu_seqlen_ks)]
        return torch.stack([torch.nn.functional.pad(r, (0, max_seqlen_k - len(r)), value=7.0) for r in rows]) * spoil

    def paged(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits):
        assert schedule_metadata == "schedule" and context_lens.dim() == (1 if old else 2)
        q = q if old else q[0]
        return reference.paged_mqa_logits(q, kv_cache, weights, context_lens, block_tables, max_model_len) * spoil

    module.get_paged_mqa_logits_metadata = lambda lens, block, sms: "schedule"
    if old:
        module.fp8_mqa_logits, module.fp8_paged_mqa_logits = prefill, paged
    else:
        module.fp8_fp4_mqa_logits = prefill_compressed if compressed else prefill
        module.fp8_fp4_paged_mqa_logits = paged
    utils = ModuleType("vllm.utils")
    utils.deep_gemm = module
    for name, stand_in in (("vllm", ModuleType("vllm")), ("vllm.utils", utils), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, stand_in)


@pytest.mark.parametrize("form", [{}, {"compressed": True}, {"old": True}])
@pytest.mark.parametrize(("spoil", "good"), [(1.0, True), (1.01, False), (float("nan"), False)])
def test_the_probe_judges_every_form(monkeypatch, form, spoil, good):
    native_module(monkeypatch, spoil=spoil, **form)
    worst = probe.worst_error(HEADS, torch.device("cpu"), blocks=8)
    assert (worst < probe.TOLERANCE) is good
