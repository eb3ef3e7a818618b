"""`glm5-shim selftest`: green on the real kernels; if one kernel is broken, its rows alone are red."""

from __future__ import annotations

import json

import pytest
from command_line import invoke

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from shim import process  # noqa: E402
from shim.commands import selftest  # noqa: E402

KERNELS = {"sparse_mla", "indexer_prefill", "indexer_paged", "topk"}


def test_every_kernel_passes_in_a_child():
    """On the GPU if this machine has one, else in Triton's interpreter."""
    done = invoke(["selftest", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["ok"]) == (0, True), found
    assert {row["name"] for row in found["kernels"]} == KERNELS
    for row in found["kernels"]:
        assert row["rel_error"] <= row["limit"]
        assert (row["median_us"] is not None) is torch.cuda.is_available()


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("breakage", ["zeros", "garbage", "nan", "raises"])
def test_a_broken_kernel_is_red(monkeypatch, name, breakage):
    """The host side of one kernel is replaced. All of its cases must be red."""
    from shim.kernels.indexer import launch as indexer
    from shim.kernels.sparse_mla import launch as sparse_mla
    from shim.kernels.topk import launch as topk

    def answer(*shape: int):
        if breakage == "raises":
            raise RuntimeError("illegal instruction")
        if name == "topk":
            return torch.full(shape, {"zeros": 0, "garbage": 7, "nan": -1}[breakage], dtype=torch.int32)
        made = {"zeros": torch.zeros, "garbage": torch.randn, "nan": lambda *shape: torch.full(shape, torch.nan)}
        return made[breakage](*shape)

    replacements = {
        "sparse_mla": (sparse_mla, "sparse_mla", lambda q, *_, **__: (answer(*q.shape[:2], 512), answer(*q.shape[:2]))),
        "indexer_prefill": (indexer, "mqa_logits", lambda q, k, *_: answer(len(q), len(k))),
        "indexer_paged": (indexer, "paged_mqa_logits", lambda q, c, w, lens, t, length: answer(len(w), length)),
        "topk": (topk, "topk", lambda logits, lengths, k, starts=None: answer(len(logits), k)),
    }
    module, symbol, replacement = replacements[name]
    monkeypatch.setattr(module, symbol, replacement)
    rows = [selftest._judge(c, timed=False) for c in selftest.cases(torch.device("cpu"), large=False) if c.name == name]
    assert rows and not any(row["ok"] for row in rows), rows
    if breakage == "raises":
        assert all(row["error"] == "RuntimeError: illegal instruction" for row in rows)
    json.dumps(rows, allow_nan=False)


def test_a_topk_that_repeats_a_column_is_red(monkeypatch):
    from shim.kernels.topk import launch, reference

    def repeat(logits, lengths, k, starts=None):
        chosen = reference.topk(logits, lengths, k, starts)
        chosen[:, 1] = chosen[:, 0]
        return chosen

    def sound(logits, lengths, k, starts=None):
        return reference.topk(logits, lengths, k, starts)

    for function, ok in ((sound, True), (repeat, False)):
        monkeypatch.setattr(launch, "topk", function)
        rows = [selftest._judge(c, False) for c in selftest.cases(torch.device("cpu"), False) if c.name == "topk"]
        assert [row["ok"] for row in rows] == [ok, ok]


def test_a_red_run_exits_with_1(monkeypatch):
    row = {"name": "topk", "case": "all", "rel_error": 1.0, "limit": 0.0, "ok": False, "median_us": None}
    monkeypatch.setattr(selftest, "selftest", lambda: {"device": "a card", "ok": False, "kernels": [row]})
    done = invoke(["selftest"])
    assert done.exit_code == 1
    assert "BAD  topk  all: relative error 1.0e+00, limit 0e+00" in done.stdout


def test_a_child_that_dies_is_one_line(monkeypatch):
    def died(*_):
        raise process.ChildProblem("exit code -11", -11)

    monkeypatch.setattr(process, "ask_child", died)
    done = invoke(["selftest"])
    assert (done.exit_code, done.stderr) == (
        1,
        "glm5-shim: the kernels could not be tested: exit code -11\n",
    )
