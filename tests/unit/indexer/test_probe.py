"""The probe: a child that may fail in every way, and its answer, kept."""

from __future__ import annotations

import json
import sys
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
    asked = []
    monkeypatch.setattr(probe, "_ask", lambda *a: (asked.append(a), (True, "proved", True))[1])
    assert [probe.native_works(HEADS) for _ in range(3)] == [(True, "proved")] * 3
    assert asked == [(3, HEADS)]
    (kept,) = (env.cache_dir() / "indexer").glob("*.json")
    assert json.loads(kept.read_text())["key"]["gpu"] == ["a card", [12, 0]]
    kept.write_text("{")
    probe.native_works(HEADS)
    (directory / "_C.so").write_bytes(b"another binary")
    probe.native_works(HEADS)
    assert len(asked) == 3 and len(list((env.cache_dir() / "indexer").glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("code", "works", "because", "lasting"),
    [
        ("print('noise'); process.answer_parent(lambda question: '2e-07')", True, "within 2.0e-07 of the", True),
        ("process.answer_parent(lambda question: '0.3')", False, "within 3.0e-01", True),
        ("process.answer_parent(lambda question: 'inf')", False, "within inf", True),
        ("process.answer_parent(lambda question: '2e-07'); sys.exit(3)", False, "exit 3", True),
        ("raise RuntimeError('Unsupported architecture')", False, "RuntimeError: Unsupported architecture", True),
        ("pass", False, "exit code 0", True),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate')", False, "out of memory", False),
        ("process.answer_parent(lambda q: sys.exit(str((os.environ['GLM5_SHIM_OFF'], q))))",
         False, "('1', {'device': 0, 'heads': 32})", True),
        ("time.sleep(600)", False, "did not answer within 3 s", False),
    ],
)  # fmt: skip
def test_what_the_child_says(tmp_path, monkeypatch, code, works, because, lasting):
    """A real child, which runs `code` where the probe would run."""
    root = tmp_path / "root"
    (root / "stub_probe").mkdir(parents=True)
    (root / "stub_probe" / "__init__.py").touch()
    (root / "stub_probe" / "probe.py").write_text(
        f"import os, sys, time\nsys.path.append({str(process.PACKAGE.parent)!r})\nfrom shim import process\n{code}\n"
    )
    monkeypatch.setattr(probe, "__name__", "stub_probe.probe")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setattr(probe, "TIMEOUT_S", 3.0 if "sleep" in code else 180.0)
    found = probe._ask(0, HEADS)
    assert (found[0], found[2]) == (works, lasting) and because in found[1]


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
