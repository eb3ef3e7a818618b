"""The indexer's kernels against their reference in float64, on a GPU or under the interpreter (..._interpreted.py)."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_indexer_interpreted.py runs this file", allow_module_level=True)
pytest.importorskip("triton")

from indexer_cases import (  # noqa: E402
    DEVICE,
    FORMS,
    FP8,
    LIMIT,
    POISON,
    TYPES,
    causal,
    check,
    paged,
    paged_truth,
    poisoned,
    prefill,
    prefill_truth,
)  # fmt: skip

from shim.kernels.indexer import launch, tune  # noqa: E402

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(params=["fp8 MMA", "fp16 MMA"])
def either_mma(request, monkeypatch):
    """Also the way of cards below 8.9: e4m3 is converted to fp16."""
    if request.param == "fp16 MMA":
        monkeypatch.setattr(launch, "_capability", lambda device: (8, 0))


# --- prefill


def config_of(keep, heads):
    """What 12.x launches for "keys", and 9.0 for "queries"."""
    return tune.prefill(heads, (12, 0) if keep == "keys" else (9, 0))


KEEP = pytest.mark.parametrize("keep", ["keys", "queries"])


def run_prefill(arguments, compressed=None, **options):
    out = poisoned(arguments[0].shape[0], compressed or arguments[1].shape[0], gap=4)
    assert launch.mqa_logits(*arguments, out, compressed, **options) is out
    return out


SOME = [(0, 300), (3, 3), (100, 200), (290, 40), (10, 64), (255, 257), (299, 300)]
CASES = [  # heads, keys, windows, dtype
    (32, 300, SOME, "fp8"),
    (16, 300, SOME, "fp8"),
    (64, 300, SOME, "fp8"),
    (32, 300, SOME, "bf16"),
    (32, 300, SOME, "fp16"),
    (32, 1, [(0, 1), (0, 0)], "fp8"),
    (32, 62, causal(5, 62), "fp8"),
    (32, 64, causal(1, 64), "fp8"),
    (32, 65, causal(9, 65), "fp8"),
    (32, 513, [(0, 200)] * 3 + [(200, 513)] * 3, "fp8"),  # two requests
    (32, 600, [(600, 0)] * 7, "fp8"),  # nothing
]
if GPU:
    CASES += [
        (heads, keys, causal(min(keys, 200), keys), dtype)
        for heads in tune.HEADS
        for keys in (63, 2047, 2048, 2049, 20001)
        for dtype in TYPES
    ]


@pytest.mark.parametrize("heads, keys, windows, dtype", CASES)
@pytest.mark.parametrize("compressed", [False, True])
@KEEP
def test_prefill_equals_reference(heads, keys, windows, dtype, compressed, keep):
    arguments = prefill(len(windows), heads, keys, windows, dtype, seed=keys)
    width = max(1, *(stop - start for start, stop in windows)) if compressed else None
    check(run_prefill(arguments, width, config=config_of(keep, heads)), *prefill_truth(*arguments, width))


@pytest.mark.parametrize("config", [
    tune.Prefill(block_n=32, columns=64, group=4, stages=3, warps=4),
    tune.Prefill(block_n=16, columns=64, group=32, stages=3, warps=4, keep="queries"),
])  # fmt: skip
def test_prefill_in_groups(config):
    """Groups of 4 queries, and of 32 keys."""
    windows = [(0, 3), (10, 60), (0, 0), (60, 0), (37, 70), (69, 70), (0, 70), (31, 33), (32, 33)]
    arguments = prefill(9, 32, 70, windows)
    check(run_prefill(arguments, config=config), *prefill_truth(*arguments))


@given(st.integers(1, 10**4), st.integers(1, 2**21), st.sampled_from(tune.HEADS), st.sampled_from([1, 132, 188]))
def test_a_grid_of_parts_of_keys(queries, keys, heads, sms):
    config = tune.PREFILL_WGMMA
    programs, group = tune.prefill_grid(queries, keys, heads, config, sms)
    tiles = -(-queries * heads // config.columns)
    assert group % config.block_n == 0 and group <= config.group
    assert programs * group >= tiles * keys > (programs - tiles) * group  # all keys, and no program without any
    assert group >= min(tune.LEAST_KEYS, keys) // 2 or programs <= 2 * tiles
    assert programs >= sms or group <= tune.LEAST_KEYS


@KEEP
def test_prefill_on_either_mma(either_mma, keep):
    """With every e4m3 value, subnormals too."""
    arguments = prefill(2, 16, 256, [(0, 256), (7, 250)])
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).to(DEVICE)
    for x in arguments[:2]:
        x.view(torch.uint8)[..., :127] = codes[torch.randint(len(codes), (*x.shape[:-1], 127), device=DEVICE)]
    arguments[1].view(torch.uint8)[:254, 0] = codes
    check(run_prefill(arguments, config=config_of(keep, 16)), *prefill_truth(*arguments))


@KEEP
def test_prefill_of_strided_arguments(keep):
    """The answer is narrower than the windows too: columns that do not fit are left out."""
    q, k, scale, weights, ks, ke = prefill(3, 32, 100, [(0, 100), (10, 90), (99, 100)])
    wide_q, wide_k = q.new_zeros(3, 40, 144), k.new_zeros(100, 160)
    wide_q[:, 4:36, 16:], wide_k[:, :128] = q, k
    arguments = [wide_q[:, 4:36, 16:], wide_k[:, :128], scale, weights.T.contiguous().T, ks, ke]
    want = prefill_truth(q, k, scale, weights, ks, ke, 70)
    check(run_prefill(arguments, 70, config=config_of(keep, 32)), *want)


def test_the_check_can_fail():
    arguments = prefill(3, 32, 50, [(0, 50), (5, 50), (50, 50)])
    want, size = prefill_truth(*arguments)
    good = torch.where(want > -torch.inf, want, POISON).float()
    check(good, want, size)
    for row, column, value in ((0, 3, 0.0), (1, 2, 1.0), (2, 0, torch.nan), (0, 0, POISON), (0, 9, want[0, 9] * 1.1)):
        bad = good.clone()
        bad[row, column] = value
        with pytest.raises(AssertionError):
            check(bad, want, size)


@settings(max_examples=60 if GPU else 8, deadline=None)
@given(
    windows=st.lists(st.tuples(st.integers(0, 320), st.integers(0, 320)), min_size=1, max_size=6),
    heads=st.sampled_from(tune.HEADS),
    compressed=st.sampled_from([None, 1, 320]),
    keep=st.sampled_from(["keys", "queries"]),
    seed=st.integers(0, 99),
)
def test_any_windows(windows, heads, compressed, keep, seed):
    windows = [(start, min(stop, 300)) for start, stop in windows]
    arguments = prefill(len(windows), heads, 300, windows, seed=seed)
    got = run_prefill(arguments, compressed, config=config_of(keep, heads))
    check(got, *prefill_truth(*arguments, compressed))


# --- decode


def run_paged(arguments, max_len, gap=4, **options):
    batch, next_n = arguments[0].shape[:2]
    out = poisoned(batch * next_n, max_len, gap)
    assert launch.paged_mqa_logits(*arguments, max_len, out, **options) is out
    return out


@pytest.mark.parametrize("length", [0, 1, 62, 63, 64, 65, 2047, 2048, 2049])
def test_decode_of_one_request(length):
    arguments = paged([length], seed=length)
    check(run_paged(arguments, 2100), *paged_truth(*arguments, 2100))


@needs_gpu
@pytest.mark.parametrize("length", [131329, 262209, 1048576])
@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_of_long_requests(length, next_n):
    arguments = paged([length, 5, length // 3], next_n=next_n, seed=length)
    check(run_paged(arguments, 1048576), *paged_truth(*arguments, 1048576))


@pytest.mark.parametrize("next_n", range(1, 9))
@pytest.mark.parametrize("form", FORMS)
def test_decode_of_several_tokens(next_n, form):
    for lengths in ([65, 0, next_n - 1], [66]):
        arguments = paged(lengths, next_n=next_n, form=form, seed=next_n)
        check(run_paged(arguments, 70), *paged_truth(*arguments, 70))


@pytest.mark.parametrize("heads", tune.HEADS)
@pytest.mark.parametrize("next_n", [1, 3])
def test_decode_of_all_heads(heads, next_n, either_mma):
    arguments = paged([70, 128], heads, next_n)
    check(run_paged(arguments, 128), *paged_truth(*arguments, 128))


def test_each_row_has_its_own_count():
    for own in ([[5, 70, 0], [0, 0, 0], [64, 1, 130]], [[5, 70, 0]]):
        arguments = paged([max(each) for each in own], next_n=3, form="[B, next_n]", own=own)
        check(run_paged(arguments, 140), *paged_truth(*arguments, 140))


@pytest.mark.parametrize("gap", [16, 8448, 100 * 8448])
def test_blocks_far_apart_in_four_dimensions(gap):
    q, cache, *rest = paged([100, 64], gap=gap)
    check(run_paged([q, cache.unsqueeze(2), *rest], 100), *paged_truth(q, cache, *rest, 100))


@pytest.mark.parametrize("sms", [1, 2, 3, 9])
def test_any_number_of_programs(sms, monkeypatch):
    """More or fewer programs than pages. And more requests than the lengths that are added up at once."""
    monkeypatch.setattr(launch, "sm_count", lambda device: sms)
    monkeypatch.setattr(tune, "SCAN", 2)
    arguments = paged([0, 70, 0, 0, 200, 1, 64, 0], next_n=2)
    config = tune.Paged(columns=32, stages=3, warps=4, per_sm=1)  # two groups of one row
    check(run_paged(arguments, 200, config=config), *paged_truth(*arguments, 200))


def test_lengths_beyond_the_answer_and_the_table():
    """A stale length may be like that. Only what has room is read and written."""
    arguments = paged([200, 100])
    for max_len, blocks in ((90, None), (640, 2)):
        q, cache, weights, lens, table = arguments
        short = [q, cache, weights, lens, table[:, :blocks].contiguous()]
        room = min(max_len, short[4].shape[1] * 64)
        want = paged_truth(q, cache, weights, lens.clamp(max=room), table, max_len)
        check(run_paged(short, max_len), *want)


def test_decode_of_strided_arguments():
    q, cache, weights, lens, table = paged([100, 64], next_n=2, form="[B, next_n]")
    wide_q = q.new_zeros(2, 3, 40, 144)
    wide_q[:, 1:, 4:36, 16:] = q
    wide_table = torch.full((2, table.shape[1] + 3), 10**9, dtype=torch.int32, device=DEVICE)
    wide_table[:, 3:] = table
    strided = [wide_q[:, 1:, 4:36, 16:], cache, weights.T.contiguous().T, lens.T.contiguous().T, wide_table[:, 3:]]
    check(run_paged(strided, 101, gap=3), *paged_truth(q, cache, weights, lens, table, 101))


@settings(max_examples=60 if GPU else 6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    next_n=st.integers(1, 8),
    form=st.sampled_from(FORMS),
    heads=st.sampled_from(tune.HEADS),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths, next_n, form, heads, seed):
    arguments = paged(lengths, heads, next_n, form, seed=seed)
    check(run_paged(arguments, 110), *paged_truth(*arguments, 110))


# --- both


def test_rows_of_the_answer_are_whole_16_bytes():
    arguments = prefill(3, 32, 61, [(0, 61)] * 3)
    for compressed in (None, 62, 3):
        out = launch.mqa_logits(*arguments, compressed_columns=compressed)
        assert out.shape == (3, compressed or 61) and out.stride(0) % 4 == 0 and out.stride(1) == 1
    out = launch.paged_mqa_logits(*paged([61, 5]), 61)
    assert out.shape == (2, 61) and out.stride(0) % 4 == 0


def test_nothing_to_do():
    q, k, scale, weights, ks, ke = prefill(3, 32, 61, [(0, 61)] * 3)
    assert launch.mqa_logits(q[:0], k, scale, weights[:0], ks[:0], ke[:0]).shape == (0, 61)
    assert launch.mqa_logits(q, k[:0], scale[:0], weights, ks, ke).shape == (3, 0)
    assert (run_prefill([q, k[:0], scale[:0], weights, ks, ke], 8) == POISON).all()
    q, cache, weights, lens, table = paged([61])
    assert launch.paged_mqa_logits(q[:0], cache, weights[:0], lens[:0], table[:0], 9).shape == (0, 9)
    assert (run_paged([q, cache, weights, lens, table[:, :0]], 9) == POISON).all()


def test_bad_arguments():
    q, k, scale, weights, ks, ke = prefill(2, 32, 61, [(0, 61)] * 2)
    good = {"q": q, "k": k, "k_scale": scale, "weights": weights, "ks": ks, "ke": ke}
    bad = [
        ("q", q.float()), ("q", q[:, :12]), ("q", q[..., :64]), ("q", q[0]), ("q", q.view(2, 128, 32).mT),
        ("k", k.bfloat16()), ("k", k[:, :64]), ("k", k.T.contiguous().T), ("k_scale", scale[1:]),
        ("k_scale", scale.double()), ("weights", weights.half()), ("weights", weights[:1]), ("ks", ks.long()),
        ("ks", ks[:1]), ("ke", ke[:1]), ("ke", torch.stack([ke, ke], 1)[:, 0]), ("out", weights),
        ("out", torch.empty(61, 2, device=DEVICE).T),
        ("out", torch.empty(1, 61, device=DEVICE).expand(2, 61)), ("out", torch.empty(2, 61, device=DEVICE).half()),
    ]  # fmt: skip
    for name, value in bad:
        with pytest.raises(ValueError, match=f"^{name} "):
            launch.mqa_logits(**(good | {name: value}))
    with pytest.raises(ValueError, match="columns"):
        launch.mqa_logits(**good, compressed_columns=-1)

    q, cache, weights, lens, table = paged([61, 70], next_n=2)
    good = {"q": q, "cache": cache, "weights": weights, "context_lens": lens, "block_table": table, "max_len": 80}
    odd = torch.zeros(3, 64 * 132 + 4, dtype=torch.uint8, device=DEVICE)
    bad = [
        ("q", q.bfloat16()), ("q", q[0]), ("q", q[:, :, :8]), ("q", q[:, :0]), ("q", q.repeat(1, 5, 1, 1)),
        ("cache", cache.view(FP8)), ("cache", cache[:, :32]), ("cache", cache[..., :128]), ("cache", cache[0]),
        ("cache", odd.as_strided((3, 64, 132), (8452, 132, 1))), ("weights", weights[:2]), ("weights", q[:, 0, :, 0]),
        ("context_lens", lens.long()), ("context_lens", lens[:1]), ("context_lens", lens.repeat(3, 1).T),
        ("block_table", table.long()), ("block_table", table[:1]), ("block_table", table.T.contiguous().T),
        ("out", torch.empty(4, 81, device=DEVICE)), ("out", torch.empty(2, 80, device=DEVICE)),
    ]  # fmt: skip
    for name, value in bad:
        with pytest.raises(ValueError, match=f"^{name} "):
            launch.paged_mqa_logits(**(good | {name: value}))


@needs_gpu
def test_cache_of_more_than_2_31_bytes():
    q, small, weights, lens, table = paged([20000, 3000], next_n=2)
    first = 2**31 // (64 * 132) + 10  # block
    cache = torch.full((first + len(small), 64, 132), 255, dtype=torch.uint8, device=DEVICE)
    cache[first:] = small
    moved = torch.where(table < 10**9, table + first, table)
    got = run_paged([q, cache, weights, lens, moved], 20000)
    check(got, *paged_truth(q, small, weights, lens, table, 20000))


@needs_gpu
@KEEP
def test_answer_of_more_than_2_31_values(keep):
    """2,100 rows of 1,048,576 columns. The rows that are checked see few keys."""
    queries, keys = 2100, 2**20
    windows = [(keys - 700 + i % 100, keys - i % 50) for i in range(queries)]
    arguments = prefill(queries, 32, keys, windows)
    out = launch.mqa_logits(*arguments, poisoned(queries, keys), config=config_of(keep, 32))
    q, k, scale, weights, ks, ke = arguments
    some = torch.tensor([0, 1, 1000, 2046, 2047, 2048, 2049, 2099], device=DEVICE)
    want = prefill_truth(q[some], k[-700:], scale[-700:], weights[some], ks[some] - keys + 700, ke[some] - keys + 700)
    check(out[some][:, -700:], *want)
    assert (out[:, :-700] == POISON).all()


@needs_gpu
@pytest.mark.parametrize("next_n", [1, 2, 3, 8])
def test_graph_replay_equals_eager(next_n):
    """Bit for bit, for other lengths than the captured ones. Nothing compiles after warm-up."""
    launch.warm_up(32, 64, next_n, 5000, DEVICE)
    before = variants()
    arguments = paged([5000] * 9, next_n=next_n)
    lens = arguments[3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_paged(arguments, 5000)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        lens.copy_(torch.randint(5001, (9,), generator=g) * (torch.rand(9, generator=g) < 0.8))
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, run_paged(arguments, 5000))
        check(out, *paged_truth(*arguments, 5000))
    run_prefill(prefill(70, 32, 3001, causal(70, 3001)))
    run_prefill(prefill(3, 32, 77, causal(3, 77)), 80)
    assert variants() == before > 0


def variants():
    """How many variants this process has compiled."""
    return sum(len(cache[0]) for k in launch.compiled.kernels for cache in k.device_caches.values())


@needs_gpu
@pytest.mark.parametrize("compressed", [False, True])
def test_prefill_equals_native(compressed):
    from shim.kernels.indexer import bench

    arguments = prefill(300, 32, 5000, causal(300, 5000))
    width = 5000 if compressed else None
    native = bench.native_prefill(*arguments)
    if native is None:
        pytest.skip("no native kernel")
    want, size = prefill_truth(*arguments, width)
    valid = want > -torch.inf
    got = native()[:, :5000]  # every window begins at 0: compressed or not is the same
    difference = torch.where(valid, got - run_prefill(arguments, width), 0).abs()
    assert (difference <= LIMIT * torch.where(valid, size, 0)).all()


@needs_gpu
@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_equals_native(next_n):
    from shim.kernels.indexer import bench

    arguments = paged([5000, 64, 777], next_n=next_n)
    native = bench.native_paged(*arguments, 5056)
    if native is None:
        pytest.skip("no native kernel")
    want, size = paged_truth(*arguments, 5056)
    valid = want > -torch.inf
    difference = torch.where(valid, native()[:, :5056] - run_paged(arguments, 5056), 0).abs()
    assert (difference <= LIMIT * torch.where(valid, size, 0)).all()
