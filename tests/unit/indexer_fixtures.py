"""Fixtures of the indexer's tests: no choice made yet, stand-ins for our launchers, a real torch op namespace."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

import pytest
import torch

from shim.indexer import choice
from shim.indexer.choice import Choice
from shim.kernels.indexer import reference
from shim.kernels.topk import reference as topk_reference
from shim.patches import indexer_topk


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(choice, "_choice", None)
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("GLM5_SHIM_INDEXER", "GLM5_SHIM_ASSUME_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def chosen(monkeypatch):
    def choose(logits=True, topk=True):
        monkeypatch.setattr(choice, "_choice", Choice(logits, topk, "the test says so"))

    return choose


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for both launchers, which take the same arguments as the real ones. The list of their calls."""
    calls = []

    def launcher(name, **functions):
        real = importlib.import_module(f"shim.kernels.{name}.launch")
        functions = {known: noted(f"{name}.{known}", f, getattr(real, known)) for known, f in functions.items()}
        module = ModuleType(f"shim.kernels.{name}.launch")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules[f"shim.kernels.{name}"], "launch", module, raising=False)

    def noted(name, function, real):
        def run(*args, **kwargs):
            inspect.signature(real).bind(*args, **kwargs)
            calls.append((name, args, kwargs))
            return function(*args, **kwargs)

        return run

    def topk(logits, lengths, k, out, starts, next_n, workspace):
        if next_n is not None:
            lengths = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0).flatten()
        return out.copy_(topk_reference.topk(logits, lengths, k, starts))

    def mqa(q, k, k_scale, weights, ks, ke, compressed_columns):
        return reference.mqa_logits(q, k, k_scale, weights, ks, ke)

    paged = reference.paged_mqa_logits
    launcher("indexer", mqa_logits=mqa, paged_mqa_logits=lambda *a: paged(*a), warm_up=lambda *a: None)
    launcher("topk", topk=topk, warm_up=lambda *a: None, Workspace=lambda *a: "workspace")
    monkeypatch.delitem(sys.modules, "shim.indexer.triton", raising=False)
    monkeypatch.delattr(sys.modules["shim.indexer"], "triton", raising=False)
    yield calls
    sys.modules.pop("shim.indexer.triton", None)


@pytest.fixture(scope="module")
def library_of_ops():
    """The ops of 0.24 in torch.ops._C. The list of those that ran."""
    ran = []
    library = torch.library.Library("_C", "FRAGMENT")
    rest = "Tensor ends, Tensor! indices, int rows, int s0, int s1, int k) -> ()"
    flat = "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()"
    for schema in (
        f"top_k_per_row_prefill(Tensor logits, Tensor starts, {rest}",
        f"top_k_per_row_decode(Tensor logits, int next_n, {rest}",
        "large_context_topk(Tensor score, Tensor indices, Tensor lengths, Tensor? starts) -> ()",
        f"persistent_topk{flat}",
        f"cooperative_topk{flat}",
    ):
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, lambda *_, _name=name: ran.append(_name), "CPU")
    yield ran
    library._destroy()


@pytest.fixture
def real_ops(library_of_ops):
    """The ops of `library_of_ops`, as if nobody had looked them up yet, before the test and after it."""

    def forget():
        for name in indexer_topk.ADAPTERS:
            vars(torch.ops._C).pop(name, None)

    forget()
    library_of_ops.clear()
    yield library_of_ops
    forget()
