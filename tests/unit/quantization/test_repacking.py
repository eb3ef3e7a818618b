"""Rows of a file in a layer's parameter, and the op that multiplies by them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.quantize import quantize
from shim.kernels.ggml.layout import PLAIN, TYPES, Weight, shape_of
from shim.kernels.ggml.repack import repack
from shim.kernels.gguf_linear import launch
from shim.quantization import ops, repacking
from shim.quantization.repacking import Piece, empty, lay
from shim.quantization.workspaces import Workspaces


def file_rows(type: Type, rows: int, columns: int) -> torch.Tensor:
    values = np.random.default_rng(3).standard_normal((rows, columns), dtype=np.float32)
    if type in PLAIN:
        return torch.from_numpy(values).to(PLAIN[type])
    return torch.from_numpy(np.array(quantize(values, type)))


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["tile by tile", "at once"])
def test_a_piece_of_the_columns_is_what_repack_makes_of_it(type, at_once, monkeypatch):
    monkeypatch.setattr(repacking, "AT_ONCE", at_once)
    rows = file_rows(type, 40, 1024)
    target = empty(type, 64, 512).data
    target.view(torch.uint8).fill_(7)
    lay(target, type, rows, Piece(1, 2))
    half = rows[:, rows.shape[1] // 2 :]
    if type in PLAIN:
        assert torch.equal(target[:40], half) and not target[40:].any()
        return
    assert torch.equal(target[:3], repack(half.contiguous(), type).data)
    assert not target[3:].any()  # rows that the file has not: zeros


def test_a_cut_through_a_block_is_refused():
    rows = file_rows(Type.Q6_K, 16, 256)
    with pytest.raises(ValueError, match="whole blocks of 210"):
        lay(empty(Type.Q6_K, 16, 256).data, Type.Q6_K, rows, Piece(0, 2))
    with pytest.raises(ValueError, match="not 4 equal pieces"):
        lay(empty(Type.Q6_K, 16, 256).data, Type.Q6_K, rows, Piece(0, 4))
    with pytest.raises(ValueError, match="out is"):
        lay(empty(Type.Q6_K, 16, 512).data, Type.Q6_K, rows, Piece())


def test_pieces():
    assert Piece.of(8, 8, 1, 2) == (0, 1)
    assert Piece.of(8, 4, 1, 2) == (1, 2)
    with pytest.raises(ValueError, match="3 of 8 on each of 2 ranks"):
        Piece.of(8, 3, 1, 2)


def test_workspaces_grow_and_leave_what_they_gave():
    found, cpu = Workspaces(), torch.device("cpu")
    found.need("main", cpu, 10, 2)
    found.need("main", cpu, 4, 3)
    sums, counters = found.get("main", cpu)
    assert (sums.numel(), counters.tolist()) == (10, [0, 0, 0])
    assert found.get("main", cpu)[0] is sums
    found.need("main", cpu, 20, 1)
    assert found.get("main", cpu)[0].numel() == 20 and sums.numel() == 10
    found.need("other", cpu, 1, 1)
    assert found.get("other", cpu)[0] is not found.get("main", cpu)[0]


@pytest.fixture
def product(monkeypatch):
    """Two weights of unlike types side by side, and a third that begins at a tile of the second's parameter."""

    def linear(x, weight, out, workspace):
        out.copy_(x @ numbers[weight.data.numpy().tobytes()].T)

    monkeypatch.setattr(launch, "linear", linear)
    numbers = {}
    raw = [file_rows(kind, rows, 512) for kind, rows in ((Type.Q8_0, 24), (Type.Q4_K, 20), (Type.Q4_K, 16))]
    first = repack(raw[0], Type.Q8_0).data
    second = torch.cat([repack(raw[1], Type.Q4_K).data, repack(raw[2], Type.Q4_K).data])
    kinds = (Type.Q8_0, Type.Q4_K, Type.Q4_K)
    dense = [torch.from_numpy(gguf.dequantize(r.numpy(), kind)) for r, kind in zip(raw, kinds, strict=True)]
    for data, values in zip((first, second[:2], second[2:]), dense, strict=True):
        numbers[data.numpy().tobytes()] = values
    scratch = torch.empty(0), torch.zeros(0, dtype=torch.int32)
    arguments = ([first, second, second], [0, 0, 2], [int(k) for k in kinds], [24, 20, 16], 512, *scratch)
    return arguments, torch.cat(dense)


def test_the_op_multiplies_each_weight(product):
    arguments, dense = product
    x = torch.randn(2, 3, 512)
    found = torch.ops.glm5_shim.gguf_linear(x, *arguments)
    assert torch.allclose(found, x @ dense.T, atol=1e-4)
    turned = torch.randn(512, 3).T
    assert torch.allclose(torch.ops.glm5_shim.gguf_linear(turned, *arguments), turned @ dense.T, atol=1e-4)


def test_the_op_is_one_for_torch_compile(product):
    arguments, dense = product
    x = torch.randn(3, 512)
    torch.library.opcheck(
        torch.ops.glm5_shim.gguf_linear, (x, *arguments), test_utils=("test_schema", "test_faketensor")
    )
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    layer = torch.compile(lambda x: torch.ops.glm5_shim.gguf_linear(x, *arguments) + 1, backend=backend, fullgraph=True)
    assert torch.allclose(layer(x), x @ dense.T + 1, atol=1e-4)
    assert torch.ops.glm5_shim.gguf_linear in seen or torch.ops.glm5_shim.gguf_linear.default in seen


def test_the_workspaces_serve_every_number_of_tokens():
    for rows, columns, sms in ((6144, 16384, 132), (576, 6144, 188), (19360, 6144, 188), (16, 256, 132)):
        sums, tiles = launch.most_needs(rows, columns, sms)
        for tokens in (*launch.steps(rows, columns, sms), 1, 7, 8, 9, 16, 17, 31, 33, 47, 48, 255):
            plan = launch.tune.plan(tokens, rows, columns, sms)
            if plan is not None:
                needed = launch.needs(plan, tokens, rows)
                assert needed[0] <= sums and needed[1] <= tiles
        assert sums * 4 < 64 << 20


def test_experts_workspaces_serve_every_number_of_tokens():
    from shim.kernels.gguf_moe import launch as moe

    kind, cpu = Type.Q4_K, torch.device("cpu")
    up = Weight(torch.empty(4, *shape_of(kind, 256, 6144), dtype=torch.uint8), kind, 256, 6144)
    down = Weight(torch.empty(4, *shape_of(kind, 6144, 256), dtype=torch.uint8), kind, 6144, 256)
    experts = moe.Experts(up, up, down)
    sums, tiles = moe.most_needs(8, experts, cpu)
    for tokens, plan in moe.steps(8, experts, cpu):
        if plan.few:
            needed = moe.needs(moe._few(tokens * 8, 8, experts, plan, 1), tokens * 8, 8, experts)
            assert needed[0] <= sums and needed[1] <= tiles
    plans = {plan for _, plan in moe.steps(8, experts, cpu)}
    assert {moe.tune.plan(slots, (12, 0)) for slots in (8, 256, 264, 8192, 1 << 19)} == plans


def test_ops_is_registered_once():
    assert ops._LIBRARY.ns == "glm5_shim"
