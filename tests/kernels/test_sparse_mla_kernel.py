"""The sparse MLA kernel against its reference in float64, on a GPU or under the interpreter (..._interpreted.py)."""

import logging
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_sparse_mla_interpreted.py runs this file", allow_module_level=True)
pytest.importorskip("triton")

from shim.kernels.sparse_mla import launch, reference, tune  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SCALE = 576**-0.5
PAGE = 64
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def problem(tokens, heads, columns, kv="bf16", q="bf16", patterns=("full",), lengths=(200, 300), gap=2, seed=0):
    """Arguments of `sparse_mla`: shuffled blocks, `gap` rows apart, NaN in every row that no request has."""
    g = torch.Generator().manual_seed(seed)
    per_request = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(per_request) + 2, generator=g).tolist()
    width, dtype = (656, torch.uint8) if kv == "fp8" else (576, TYPES[kv])
    store = torch.full((len(order), PAGE + gap, width), 255 if kv == "fp8" else torch.nan, dtype=dtype)
    cache = store[:, :PAGE]
    table = torch.full((len(lengths), max(per_request) + 1), 10**8, dtype=torch.int32)
    for r, (length, blocks) in enumerate(zip(lengths, per_request, strict=True)):
        rows = torch.randn(length, 576, generator=g)
        rows = reference.pack_fp8_ds_mla(rows) if kv == "fp8" else rows.to(dtype)
        for b in range(blocks):
            block = table[r, b] = order.pop()
            part = rows[b * PAGE : (b + 1) * PAGE]
            cache[block, : len(part)] = part
    req_ids = torch.arange(tokens, dtype=torch.int32) % len(lengths)
    topk = torch.stack([choose(lengths[r], columns, patterns[t % len(patterns)], g) for t, r in enumerate(req_ids)])
    query = torch.randn(tokens, heads, 576, generator=g).to(TYPES[q])
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return [x.to(DEVICE) for x in (query, store)], [x.to(DEVICE) for x in (topk, req_ids, table, seq_lens)]


def choose(length, columns, pattern, g):
    """A row of positions: full (some may repeat), few, first (begins with -1), last, scattered, stale, none."""
    row = torch.randint(length, (columns,), generator=g, dtype=torch.int32)
    at = torch.arange(columns)
    if pattern == "few":
        row[5:] = -1
    elif pattern == "first":
        row[: columns // 2] = -1
    elif pattern == "last":
        row[columns // 2 :] = -1
    elif pattern == "scattered":
        row[torch.rand(columns, generator=g) < 0.5] = -1
    elif pattern == "stale":
        row = torch.where(at % 3 == 0, row + length, row)
    elif pattern == "none":
        row[:] = -1
    return row


def run(inputs, indices, split_q=False, **options):
    """Our answer, which must overwrite poison."""
    query, store = inputs
    tokens, heads, _ = query.shape
    out = torch.full((tokens, heads, 512), torch.nan, dtype=query.dtype, device=DEVICE)
    lse = torch.full((tokens, heads), torch.nan, device=DEVICE)
    if split_q:  # as in the MLA layer: the latent comes from a batched product over heads, rope from a wider tensor
        latent = query[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        query = (latent, torch.cat([query[..., :64], query[..., 512:]], -1)[..., 64:])
    topk, req_ids, table, seq_lens = indices
    got = launch.sparse_mla(query, store[:, :PAGE], topk, req_ids, table, seq_lens, SCALE, out, lse, **options)
    assert got[0] is out and got[1] is lse
    return out, lse


def truth(inputs, indices):
    topk, req_ids, table, seq_lens = indices
    topk = torch.where(topk < seq_lens[req_ids.long()][:, None], topk, -1)
    return reference.sparse_mla(inputs[0], inputs[1][:, :PAGE], topk, req_ids, table, SCALE, dtype=torch.float64)


def check(got, want):
    (out, lse), (want_out, want_lse) = got, want
    assert not out.isnan().any() and not lse.isnan().any()
    empty = want_lse.isinf()
    assert (lse.isinf() == empty).all() and (lse[empty] < 0).all() and (out[empty] == 0).all()
    some = ~empty
    if some.any():
        assert (out.double() - want_out).norm() <= 1e-2 * want_out.norm()
        by_row = (out.double() - want_out)[some].norm(dim=-1) / want_out[some].norm(dim=-1)
        assert by_row.max() < 3e-2
        assert ((lse.double() - want_lse)[some].abs() / (1 + want_lse[some].abs())).max() < 1e-5


MIXED = ("full", "first", "last", "scattered", "none", "stale", "few")
CASES = [  # tokens, heads, columns, kv, q, patterns
    (1, 8, 64, "bf16", "bf16", ("full",)),
    (3, 8, 64, "fp16", "fp16", ("first", "stale", "scattered")),
    (3, 8, 64, "fp8", "bf16", ("scattered", "last", "first")),
    (3, 8, 64, "fp8", "fp16", ("full", "none", "stale")),
    (62, 8, 64, "bf16", "bf16", ("few", "none", "none", "none")),
    (64, 8, 64, "fp8", "bf16", ("few", "none", "none", "none")),
    (65, 8, 64, "fp16", "fp16", ("few", "none", "none", "none")),
    (3, 16, 64, "bf16", "bf16", ("full", "scattered", "none")),
    (1, 16, 64, "fp8", "bf16", ("first",)),
    (3, 64, 64, "bf16", "bf16", ("last", "scattered", "none")),
    (1, 64, 64, "fp16", "fp16", ("stale",)),
    (1, 64, 64, "fp8", "bf16", ("full",)),
    (1, 12, 50, "bf16", "bf16", ("full",)),  # heads and columns that fill no tile
    (1, 32, 64, "bf16", "bf16", ("full",)),
    (1, 8, 2048, "bf16", "bf16", ("full",)),
    (1, 8, 2048, "fp8", "bf16", ("scattered",)),
    (1, 16, 2048, "fp16", "fp16", ("first",)),
]
if GPU:
    CASES += [
        (t, n, 2048, kv, "bf16", MIXED) for t in (1, 3, 62, 64, 65) for n in (8, 16, 64, 128) for kv in ("bf16", "fp8")
    ]


@pytest.mark.parametrize("tokens, heads, columns, kv, q, patterns", CASES)
def test_equals_reference(tokens, heads, columns, kv, q, patterns):
    inputs, indices = problem(tokens, heads, columns, kv, q, patterns, seed=tokens + heads)
    check(run(inputs, indices), truth(inputs, indices))


def test_the_check_can_fail():
    inputs, indices = problem(2, 8, 64)
    want = truth(inputs, indices)
    good = want[0].bfloat16(), want[1].float()
    check(good, want)
    for out, lse in ((good[0] * 0, good[1]), (good[0], good[1] * 1.0001), (good[0] * torch.nan, good[1])):
        with pytest.raises(AssertionError):
            check((out, lse), want)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_any_number_of_shares(kv, splits):
    inputs, indices = problem(3, 8, 80, kv, patterns=("full", "few", "none"))
    plan = tune.AttentionPlan(tune.config_for(8, inputs[1].dtype), splits)
    workspace = launch.Workspace(16, 8, inputs[1].dtype, DEVICE, sms=16)
    for buffer in (workspace.out, workspace.lse):
        buffer.fill_(torch.nan)
    check(run(inputs, indices, plan=plan, workspace=workspace), truth(inputs, indices))


@pytest.mark.parametrize("heads, kv", [(64, "bf16"), (40, "fp16")])
@pytest.mark.parametrize("splits", [1, 2])
def test_heads_as_rows_of_the_second_product(heads, kv, splits):
    """What 9.0 launches for 64 heads. The interpreter runs it on any machine."""
    if GPU and not launch.is_large(torch.device("cuda", 0)):
        pytest.skip("needs the shared memory of 9.0")
    inputs, indices = problem(3, heads, 80, kv, kv, ("full", "scattered", "none"))
    assert not tune.HUGE.swap
    workspace = launch.Workspace(16, heads, inputs[1].dtype, DEVICE, sms=16)
    got = run(inputs, indices, plan=tune.AttentionPlan(tune.HUGE, splits), workspace=workspace)
    check(got, truth(inputs, indices))


def test_query_in_two_tensors_gives_the_same_bits():
    inputs, indices = problem(3, 8, 64, patterns=("full", "scattered"))
    for whole, two in zip(run(inputs, indices), run(inputs, indices, split_q=True), strict=True):
        assert torch.equal(whole, two)


@pytest.mark.parametrize("q", ["bf16", "fp16"])
def test_every_e4m3_value_and_any_scale(q):
    inputs, indices = problem(1, 8, 64, "fp8", q, lengths=(64,), gap=0)
    g = torch.Generator().manual_seed(1)
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    rows = codes[torch.randint(len(codes), (3 * PAGE, 512), generator=g)]
    rows[:, 100:356] = torch.cat([codes, codes[:2]])  # every value, also subnormals, in every row
    scales = (torch.rand(3 * PAGE, 4, generator=g) * 3e-3 + 1e-4).float()
    store = inputs[1].view(-1, 656)
    store[:, :512] = rows[: len(store)].to(DEVICE)
    store[:, 512:528] = scales[: len(store)].view(torch.uint8).to(DEVICE)
    store[:, 528:] = torch.randn(len(store), 64, generator=g).bfloat16().view(torch.uint8).to(DEVICE)
    check(run(inputs, indices), truth(inputs, indices))


POSITIONS = st.lists(st.one_of(st.integers(-5, 320), st.integers(-(2**31), 2**31 - 1), st.just(-1)), max_size=40)


@settings(max_examples=60 if GPU else 12, deadline=None)
@given(rows=st.lists(POSITIONS, min_size=1, max_size=2), kv=st.sampled_from(["bf16", "fp8"]), seed=st.integers(0, 99))
def test_any_index_pattern(rows, kv, seed):
    inputs, (topk, *rest) = problem(len(rows), 8, 40, kv, seed=seed)
    for row, values in zip(topk, rows, strict=True):
        row[:] = -1
        row[: len(values)] = torch.tensor(values, dtype=torch.int32)
    indices = (topk, *rest)
    check(run(inputs, indices), truth(inputs, (topk.clamp(min=-1), *rest)))


def test_no_tokens_and_bad_arguments():
    inputs, (topk, req_ids, table, seq_lens) = problem(2, 8, 64)
    query, cache = inputs[0], inputs[1][:, :PAGE]
    out, lse = launch.sparse_mla(query[:0], cache, topk[:0], req_ids[:0], table, seq_lens, SCALE)
    assert out.shape == (0, 8, 512) and lse.shape == (0, 8)
    good = {"q": query, "cache": cache, "topk": topk, "req_ids": req_ids, "block_table": table, "seq_lens": seq_lens}
    bad = [
        ("q", query.float()), ("q", query[..., 1:]), ("q", (query[..., :512], query[..., :512])),
        ("cache", cache.half()), ("cache", cache[..., :512]), ("topk", topk.long()), ("topk", topk[:1]),
        ("topk", topk.T.contiguous().T), ("req_ids", req_ids.long()), ("req_ids", req_ids[:1]),
        ("block_table", table[0]), ("seq_lens", seq_lens[:1]),
        ("out", torch.empty(2, 8, 512, device=DEVICE)), ("lse", torch.empty(2, 8, 1, device=DEVICE)),
    ]  # fmt: skip
    for name, value in bad:
        with pytest.raises(ValueError, match=f"^{name} "):
            launch.sparse_mla(**(good | {name: value}), scale=SCALE)
    with pytest.raises(ValueError, match="0 splits"):
        launch.sparse_mla(**good, scale=SCALE, plan=tune.AttentionPlan(tune.NARROW, 0))
    small = launch.Workspace(1, 8, cache.dtype, DEVICE, columns=32)
    with pytest.raises(ValueError, match="workspace"):
        launch.sparse_mla(**good, scale=SCALE, workspace=small, plan=tune.AttentionPlan(tune.NARROW, 2))


@pytest.mark.parametrize("sms", [84, 132, 170, 188])
def test_plans(sms):
    """Few tokens are split until the GPU is full, many are not. `variants` has everything that serving launches."""
    for heads in (1, 8, 16, 64, 128):
        for dtype in (torch.bfloat16, torch.uint8):
            plans = {t: tune.configuration(t, heads, dtype, sms) for t in (1, 8, 64, 512, 4096, 8192)}
            assert plans[1].splits >= 16 and plans[8192].splits == 1
            assert all(1 <= plan.splits <= tune.MAX_SPLITS for plan in plans.values())
            found = {plan for _, plan in launch.variants(heads, dtype, 4096, sms)}
            assert {plan for t, plan in plans.items() if t <= 4096} <= found


@needs_gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_offsets_past_2_31(kv):
    """4,096 tokens use the last blocks of a cache of more than 2^31 values."""
    width, dtype = (656, torch.uint8) if kv == "fp8" else (576, torch.bfloat16)
    blocks = 2**31 // (PAGE * width) + 600
    store = torch.empty(blocks, PAGE, width, dtype=dtype, device=DEVICE)
    g = torch.Generator().manual_seed(0)
    used = 512
    rows = torch.randn(used * PAGE, 576, generator=g)
    rows = reference.pack_fp8_ds_mla(rows) if kv == "fp8" else rows.to(dtype)
    store[-used:] = rows.view(used, PAGE, width).to(DEVICE)
    table = (torch.randperm(used, generator=g) + blocks - used).int().to(DEVICE)[None]
    topk = torch.randint(used * PAGE, (4096, 2048), generator=g, dtype=torch.int32).to(DEVICE)
    query = torch.randn(4096, 8, 576, generator=g).bfloat16().to(DEVICE)
    lengths = torch.tensor([used * PAGE], dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    got = run((query, store), (topk, ids, table, lengths))
    some = torch.arange(0, 4096, 64, device=DEVICE)
    want = truth((query[some], store), (topk[some], ids[some], table, lengths))
    check((got[0][some], got[1][some]), want)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_graph_replay_equals_eager(tokens, kv):
    """Bit for bit, also for other indices than the captured ones. Nothing compiles after warm-up."""
    inputs, indices = problem(tokens, 8, 2048, kv, lengths=(5000, 3000))
    launch.warm_up(8, torch.bfloat16, inputs[1].dtype, PAGE, 512, DEVICE)
    before = launch.compiled.count()
    workspace = launch.Workspace(512, 8, inputs[1].dtype, DEVICE)
    topk, *rest = indices
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(inputs, indices, workspace=workspace)
    for seed in range(3):
        for row, pattern in zip(topk, MIXED * tokens, strict=False):
            row.copy_(choose(3000, 2048, pattern, torch.Generator().manual_seed(seed)))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        for buffer in (workspace.out, workspace.lse):
            buffer.fill_(torch.nan)
        graph.replay()
        eager = run(inputs, (topk, *rest))
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        check((out, lse), truth(inputs, (topk, *rest)))
    assert launch.compiled.count() == before > 0


@needs_gpu
def test_a_variant_after_warm_up_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM sets it to False, and caplog needs it
    launch.warm_up(8, torch.bfloat16, torch.bfloat16, PAGE, 512, DEVICE)
    inputs, indices = problem(1, 8, 96)
    odd = tune.Config(block_k=16, block_n=8, tile=128, stages=4, warps=2, per_sm=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            run(inputs, indices)
            run(inputs, indices, plan=tune.AttentionPlan(odd, 1))
    late = [r for r in caplog.records if "after warm-up" in r.message and "block_k=16" in r.message]
    assert len(late) == 1
