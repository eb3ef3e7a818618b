"""Experts of every type against gguf-py's numbers in float64, on a GPU or under the interpreter
(test_gguf_moe_interpreted.py)."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_gguf_moe_interpreted.py runs this file", allow_module_level=True)
pytest.importorskip("triton")

from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf_cases import DEVICE, check, weight  # noqa: E402

from shim.kernels.ggml.layout import TYPES  # noqa: E402
from shim.kernels.gguf_moe import launch, reference, tune  # noqa: E402
from shim.kernels.gguf_moe.tune import Config, Plan  # noqa: E402

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NAN = float("nan")
# Large blocks: the interpreter is as fast with 256 rows as with 16
FEW = Plan(Config(256, 8, 1, 4, 1), Config(256, 8, 1, 4, 1), few=True)
SPLIT = Plan(Config(256, 8, 1, 4, 64), Config(256, 8, 1, 4, 64), few=True)
MANY = Plan(Config(256, 16, 1, 4), Config(256, 16, 1, 4), few=False)
UNLIKE = Plan(Config(256, 16, 1, 4), Config(256, 32, 1, 4), few=False)  # other blocks of slots for down
DENSE = Plan(Config(128, 16, 1, 4), Config(128, 32, 1, 4), few=False, dense=True)


def layer(kinds, experts=4, width=256, hidden=256):
    """Experts of these types of gate, up and down; and their numbers."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    made = [weight(k, experts, *s, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True))]
    return launch.Experts(*(w for w, _ in made)), [n for _, n in made]


def routed(tokens, experts, top_k, absent=0.2):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape) < absent] = -1
    return ids.to(DEVICE), torch.rand(tokens, top_k).to(DEVICE)


def run(weights, numbers, ids, share, plan, dtype=torch.float16, workspace=None):
    """One step into a poisoned answer whose rows lie apart, checked."""
    hidden = weights.gate.columns
    x = torch.randn(len(ids), hidden + 16, device=DEVICE).to(dtype)[:, :hidden]
    whole = torch.full((len(ids), hidden + 5), NAN, dtype=dtype, device=DEVICE)
    out = launch.moe(x, weights, ids, share, whole[:, :hidden], workspace, plan)
    assert whole[:, hidden:].isnan().all()
    want = reference.moe(x, *numbers, ids, share)
    if not want.any():
        assert not out.any()
        return
    check(out, want, reference.moe(x, *numbers, ids, share, torch.float32, dtype))


@pytest.mark.parametrize("first", range(0, len(TYPES), 3))
def test_every_type_and_mixes(first):
    kinds = [TYPES[(first + i) % len(TYPES)] for i in range(3)]
    run(*layer(kinds), *routed(2, 4, 2), FEW)


HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize("plan, dtype, hidden", [
    (SPLIT, HALF, 512), (MANY, HALF, 256), (MANY, BRAIN, 256), (UNLIKE, HALF, 256), (DENSE, HALF, 256),
], ids=["split", "many", "many in bf16", "unlike", "dense"])  # fmt: skip
def test_every_way(plan, dtype, hidden):
    """Also more slots of an expert than a program takes at a time."""
    run(*layer((Type.Q4_K, Type.Q6_K, Type.IQ3_XXS), 2, hidden=hidden), *routed(10, 2, 2, 0.1), plan, dtype)


@pytest.mark.parametrize("plan", [FEW, MANY, DENSE], ids=["few", "many", "dense"])
def test_tails_of_columns_and_odd_rows(plan):
    """Of one tile of 256 and a bit; widths that no block of rows divides."""
    run(*layer((Type.Q8_0, Type.Q5_1, Type.MXFP4), width=32, hidden=288), *routed(3, 4, 3), plan)


@pytest.mark.parametrize("plan", [FEW, MANY], ids=["few", "many"])
def test_all_tokens_to_one_expert_and_none(plan):
    weights, numbers = layer((Type.Q8_0,) * 3, width=32, hidden=64)
    _, share = routed(10, 4, 2)
    ids = torch.full((10, 2), -1, dtype=torch.int32, device=DEVICE)
    run(weights, numbers, ids, share, plan)
    ids[:, 1] = 2
    run(weights, numbers, ids, share, plan)


def test_counters_are_left_at_zero():
    weights, numbers = layer((Type.Q8_0,) * 3, width=32, hidden=512)
    ids, share = routed(2, 4, 2, absent=0)
    space = launch.Workspace.of(ids.numel(), 2, weights, ids.device, SPLIT)
    assert space.partial.numel() and space.arrived.numel()
    for _ in range(2):
        run(weights, numbers, ids, share, SPLIT, workspace=space)
        assert not space.arrived.any()
    with pytest.raises(ValueError, match="workspace has 0 sums"):
        run(weights, numbers, ids, share, SPLIT, workspace=launch.Workspace(0, 0, DEVICE))


def test_in_slices_of_the_answer_and_of_the_experts(monkeypatch):
    monkeypatch.setattr(tune, "PARTS_BYTES", 2 * 10 * 256)
    monkeypatch.setattr(tune, "WORKSPACE_BYTES", 2 * 32 * 512 * 2)
    weights, numbers = layer((Type.Q8_0,) * 3, experts=3, width=32, hidden=512)
    for plan in (MANY, DENSE):
        run(weights, numbers, *routed(5, 3, 2), plan)


def test_gate_and_up_in_one():
    both, numbers = weight(Type.Q8_0, 3, 64, 128)
    down, more = weight(Type.Q5_0, 3, 128, 32)
    parts = [numbers[:, :32], numbers[:, 32:], more]
    for plan in (FEW, DENSE):
        run(launch.Experts.stacked(both, down), parts, *routed(4, 3, 2), plan)


@pytest.mark.parametrize("slots, experts, tokens", [(1, 1, 8), (300, 5, 16), (64, 300, 32)])
def test_sorted(slots, experts, tokens):
    ids = torch.randint(-1, experts, (slots, 1), dtype=torch.int32)
    ids[ids == 1] = -1  # an empty one
    order, plan = (t.cpu() for t in launch.sort(ids.to(DEVICE), experts, tokens))
    seen = []
    for expert, first, end in plan.tolist():
        if expert >= 0:
            assert 0 < end - first <= tokens
            mine = order[first:end].tolist()
            assert (ids[mine] == expert).all()
            seen += mine
    assert sorted(seen) == torch.nonzero(ids[:, 0] >= 0)[:, 0].tolist()


def test_what_does_not_fit_is_refused():
    weights, _ = layer((Type.Q8_0,) * 3, width=32, hidden=64)
    ids, share = routed(2, 4, 2)
    x = torch.zeros(2, 64, dtype=torch.float16, device=DEVICE)
    for arguments, message in (
        ((x.float(), weights, ids, share), "x is .*float32"),
        ((x, weights._replace(down=weights.up), ids, share), "gate is 32 x 64, up 32 x 64, down 32 x 64"),
        ((x, weights._replace(up=weights.up._replace(rows=64)), ids, share), "up has data"),
        ((x, weights, ids.long(), share), "topk_ids is .*int64"),
        ((x, weights, ids[:1], share), "topk_ids is"),
        ((x, weights, ids, share.half()), "topk_weights is"),
        ((x, weights, ids, share[:, :1].contiguous()), "topk_weights is"),
        ((x, weights, ids, share, x.bfloat16()), "out is"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.moe(*arguments)


@needs_gpu
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("tokens", [1, 16, 130, 1500])
def test_large(kind, tokens):
    """As launched: few, sorted, and dequantised first."""
    run(*layer((kind, kind, Type.Q6_K), 16, 256, 1024), *routed(tokens, 16, 6), None, torch.bfloat16)


@needs_gpu
def test_offsets_past_2_to_the_31():
    """Experts of 4.5 GB: the last answers as the first, of which it is a copy."""
    weights, _ = layer((Type.Q8_0,) * 3, 1, 2048, 2048)
    many = launch.Experts(*(w._replace(data=w.data.repeat(1000, 1, 1, 1)) for w in weights))
    for tokens in (1, 200):
        ids, share = routed(tokens, 1, 1, absent=0)
        x = torch.randn(tokens, 2048, device=DEVICE).bfloat16()
        assert torch.equal(launch.moe(x, many, ids + 999, share), launch.moe(x, many, ids, share))
