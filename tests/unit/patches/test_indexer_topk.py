"""indexer_topk on a real torch op namespace: the attribute runs, and passes to vLLM's op what is not ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shim.kernels.topk import reference as topk_reference
from shim.patch import ShimError, State
from shim.patches import indexer_topk

TOPK = indexer_topk.PATCH
CUDA = SimpleNamespace(is_cuda=lambda: True)


@pytest.fixture
def topk_module(stub, real_ops):
    return stub(TOPK, torch=torch, current_platform=CUDA)


def choices():
    """(op, arguments, expected answer) for each op, as vLLM calls it: 2 requests of 3 rows, k = 4."""
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    lens = torch.tensor([30, 2], dtype=torch.int32)
    per_row = torch.tensor([28, 29, 30, 0, 1, 2], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 5, 5, 5], dtype=torch.int32)
    expected = topk_reference.topk(logits, per_row, 4)
    shifted = topk_reference.topk(logits, per_row, 4, starts)
    workspace = torch.empty(1, dtype=torch.uint8)

    def out():
        return torch.full((6, 9), 77, dtype=torch.int32)[:, :4]

    yield "top_k_per_row_prefill", (logits, starts, starts + per_row, out(), 6, 40, 1, 4), shifted
    for seq_lens in (lens, lens[:, None], per_row.view(2, 3)):
        yield "top_k_per_row_decode", (logits, 3, seq_lens, out(), 6, 40, 1, 4), expected
    yield "large_context_topk", (logits, out(), per_row, None), expected
    yield "large_context_topk", (logits, out(), per_row, starts), shifted
    for op in ("persistent_topk", "cooperative_topk"):
        yield op, (logits, per_row.view(2, 3), out(), workspace, 4, 30), expected
        yield op, (logits, lens[:, None], out(), workspace, 4, 30), expected


def test_the_attribute_runs(topk_module, real_ops, switch_on, chosen, kernels):
    engine = switch_on(TOPK)
    assert engine.records["indexer_topk"].state is State.APPLIED
    for op, args, expected in choices():
        assert getattr(torch.ops._C, op)(*args) is None
        assert real_ops.pop() == op and kernels == []
        chosen(logits=False)
        assert getattr(torch.ops._C, op)(*args) is None
        out = next(a for a in args if isinstance(a, torch.Tensor) and a.stride(0) == 9)
        assert torch.equal(out.sort().values, expected.sort().values) and real_ops == []
        chosen(topk=False)
        kernels.clear()


def test_no_rows_and_bf16_and_wide_k(topk_module, real_ops, switch_on, chosen, kernels):
    switch_on(TOPK)
    chosen()
    none, out = torch.empty(0, 5), torch.empty(0, 4, dtype=torch.int32)
    lens = torch.empty(0, dtype=torch.int32)
    torch.ops._C.persistent_topk(none, lens, out, none, 4, 5)
    assert real_ops == [] and kernels == []
    torch.ops._C.persistent_topk(none.bfloat16(), lens, out, none, 4, 5)
    torch.ops._C.persistent_topk(none, lens, out, none, 4096, 5)
    assert real_ops == ["persistent_topk"] * 2


def test_topk_off_and_twice(topk_module, off_and_twice):
    off_and_twice(topk_module, TOPK)


def test_a_release_with_few_ops(stub, switch_on):
    def op(arguments):
        default = SimpleNamespace(_schema=SimpleNamespace(arguments=range(arguments)))
        return SimpleNamespace(overloads=lambda: ["default"], default=default)

    ops = {name: op(8) for name in indexer_topk.ALWAYS}
    namespace = SimpleNamespace(**ops)
    stub(TOPK, torch=SimpleNamespace(ops=SimpleNamespace(_C=namespace)), current_platform=CUDA)
    engine = switch_on(TOPK)
    assert set(vars(namespace)) == set(ops) and all(getattr(namespace, name) is not ops[name] for name in ops)
    engine.check()


@pytest.mark.parametrize("op", indexer_topk.ADAPTERS)
def test_topk_lost(topk_module, switch_on, op):
    engine = switch_on(TOPK)
    engine.check("indexer_topk")
    vars(torch.ops._C).pop(op)  # the next look-up finds vLLM's own again
    with pytest.raises(ShimError, match=f"indexer_topk was undone: .*torch.ops._C.{op} is not the shim's"):
        engine.check("indexer_topk")


def test_topk_unknown(stub, switch_on):
    op = SimpleNamespace(
        overloads=lambda: ["default"], default=SimpleNamespace(_schema=SimpleNamespace(arguments=[1, 2]))
    )
    namespace = SimpleNamespace(**dict.fromkeys(indexer_topk.ALWAYS, op))
    stub(TOPK, torch=SimpleNamespace(ops=SimpleNamespace(_C=namespace)), current_platform=CUDA)
    with pytest.raises(ShimError, match="top_k_per_row_prefill takes 2 arguments, expected 8"):
        switch_on(TOPK)
    stub(TOPK, torch=SimpleNamespace(ops=SimpleNamespace(_C=SimpleNamespace())), current_platform=CUDA)
    with pytest.raises(ShimError, match="top_k_per_row_prefill does not exist"):
        switch_on(TOPK)
