"""The top-k kernels against torch.topk, on a GPU or under the interpreter (..._interpreted.py).

What may differ is which of equal values are chosen, and the order: the chosen values, sorted, are compared.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_topk_interpreted.py runs this file", allow_module_level=True)
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from shim.kernels.topk import kernel, launch, reference, tune  # noqa: E402

if not GPU:  # the interpreter adds up the threads' counts one thread at a time
    for plans in (tune.SHARED, tune.WHOLE):
        plans.update({sample: replace(config, warps=2) for sample, config in plans.items()})
DEVICE = "cuda" if GPU else "cpu"
SAMPLE = 4096
SHARED = tune.TopKPlan(tune.SHARED[SAMPLE], 3, 0)  # three programs a row
MISSED = tune.CAPACITY + SAMPLE + 500  # what the sample does not see is more than the buffer holds
WHOLE = tune.TopKPlan(tune.WHOLE[SAMPLE], 1, 2)  # two programs in all
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
PATTERNS = (
    "normal", "indexer", "equal", "ties", "ascending", "descending", "one_bin", "denormal", "infinite", "zeros",
    "nan", "any_bits", "masked", "misses_high", "misses_low", "misses_low_equal",
)  # fmt: skip


def sampled(length):
    """The columns that `kernel._sampled` looks at."""
    at = torch.arange(SAMPLE)
    return (at // tune.CHUNK) * (length // tune.CHUNK) // (SAMPLE // tune.CHUNK) * tune.CHUNK + at % tune.CHUNK


def values(pattern, length, seed=0):
    """One row. The samples of the last three mislead: all their logits are larger, or smaller, than the rest."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, generator=g)
    if pattern == "indexer":  # sums of products that are cut at 0
        return (torch.randn(length, 8, generator=g).relu() * torch.randn(8, generator=g).exp()).sum(1)
    if pattern == "equal":
        return torch.full((length,), -1.5)
    if pattern == "ties":
        return (normal * 4).round()
    if pattern in ("ascending", "descending"):
        return normal.sort(descending=pattern == "descending").values
    if pattern == "one_bin":
        return 1 + torch.arange(length)[torch.randperm(length, generator=g)] * 2.0**-23
    if pattern == "denormal":
        return normal * 1e-41
    if pattern == "infinite":
        return torch.where(normal > 1.5, torch.where(normal > 2, torch.inf, normal), -torch.inf)
    if pattern == "zeros":
        return torch.where(normal.abs() < 1, normal.sign() * 0.0, normal)
    if pattern == "nan":
        return torch.where(normal > 2, torch.nan * normal.sign(), torch.where(normal < -2, -torch.nan, normal))
    if pattern == "masked":
        return normal.where(normal > 0.5, -torch.inf)
    if pattern == "any_bits":  # of all sizes, both signs, NaN and inf
        return torch.randint(-(2**31), 2**31, (length,), generator=g).int().view(torch.float32)
    if pattern.startswith("misses") and length > tune.CAPACITY:
        rest = torch.full((length,), 1.0) if pattern.endswith("equal") else 1 + torch.rand(length, generator=g) * 1e-3
        rest[sampled(length)] += 9 if pattern == "misses_high" else -9
        return rest
    return normal


def run(rows, k, starts=None, gap=5, out_gap=3, **options):
    """Our answer, which must overwrite poison. The rows have NaN and inf around them."""
    rows = [r.to(DEVICE) for r in rows]
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32, device=DEVICE)
    first = starts if starts is not None else [0] * len(rows)
    columns = max(max(s + len(r) for s, r in zip(first, rows, strict=True)), 1)
    store = torch.full((len(rows), columns + gap), torch.nan, device=DEVICE)
    store[:, ::2] = torch.inf
    for row, start, r in zip(store, first, rows, strict=True):
        row[start : start + len(r)] = r
    store_out = torch.full((len(rows), k + out_gap), 77, dtype=torch.int32, device=DEVICE)
    out = store_out[:, :k]
    if starts is not None:
        options["starts"] = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    got = launch.topk(store[:, :columns], lengths, k, out=out, **options)
    assert got is out and (store_out[:, k:] == 77).all()
    return out


def check(rows, k, out):
    for row, chosen in zip(rows, out.cpu(), strict=True):
        count = min(k, len(row))
        some = chosen[chosen != -1].long()
        assert len(some) == count and (chosen[:count] != -1).all()
        assert len(some.unique()) == count
        if count:
            assert int(some.min()) >= 0 and int(some.max()) < len(row)
            want = row[reference.topk(row[None], torch.tensor([len(row)]), count)[0].long()]
            torch.testing.assert_close(row[some].sort().values, want.sort().values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", [1, 64, 512, 2047, 2048])
def test_lengths(k):
    rows = [values("normal", n, seed=n) for n in (0, 1, 62, 63, 64, 65, 2047, 2048, 2049, 8192, 8193)]
    check(rows, k, run(rows, k))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern):
    """A row that fits the buffer, and one with a sample, of one program and of several."""
    rows = [values(pattern, 3000), values(pattern, MISSED if pattern.startswith("misses") else 9001)]
    for k, plan in ((2048, WHOLE), (2048, SHARED)):
        check(rows, k, run(rows, k, plan=plan))
    if GPU or pattern in ("normal", "ties") or pattern.startswith("misses"):
        check(rows[1:], 64, run(rows[1:], 64, plan=SHARED))


def test_the_samples_that_miss_do():
    """These rows exist so that `_enough` finds too few logits, or more than the buffer holds."""
    k = 2048
    for pattern in ("misses_high", "misses_low", "misses_low_equal"):
        row = values(pattern, MISSED)
        least = 7 * k * SAMPLE // (4 * MISSED) + 6
        ranked = row[sampled(MISSED)].sort(descending=True).values
        above = [int((row > ranked[r]).sum()) for r in (least - 1, least + least // 8)]
        assert max(above) < k or min(above) > tune.CAPACITY, (pattern, above)


@triton.jit
def threshold(keys, total, least, most, out, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    limit, reached = kernel._threshold(tl.load(keys + tl.arange(0, SIZE)), total, least, most, WIDTH)
    tl.store(out, limit)
    tl.store(out + 1, reached)


@pytest.mark.parametrize("pattern", ["indexer", "ties", "nan", "any_bits", "masked"])
def test_thresholds(pattern):
    """`_threshold` alone. In a kernel `_enough` and `_select_tied` would correct the answer of a wrong threshold."""
    row = torch.cat([values(pattern, 3000), torch.tensor([torch.nan, -torch.inf, 0.0])])
    bits = row.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = torch.where(keys < kernel.LOWEST.value, kernel.HIGHEST.value, keys)
    padded = torch.full((4096,), kernel.OUTSIDE.value, dtype=torch.int32)
    padded[: len(keys)] = keys
    for least, most in ((2048, 2048), (600, 675), (len(keys) - 1, len(keys) - 1)):
        out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        warps = WHOLE.config.warps
        threshold[(1,)](padded.to(DEVICE), len(keys), least, most, out, 4096, 32 * warps, num_warps=warps)
        limit, reached = out.tolist()
        assert reached == int((keys >= limit).sum()) >= least
        assert reached <= most or limit == keys.sort(descending=True).values[least - 1], (least, most, reached)


def test_windows():
    rows = [values("normal", n, seed=n) for n in (0, 3, 500, 9000, 8192)]
    for plan in (WHOLE, SHARED):
        check(rows, 100, run(rows, 100, starts=[9, 0, 3, 1, 401], plan=plan))


def test_a_window_ends_with_its_row():
    logits = torch.arange(12.0, device=DEVICE).view(2, 6)
    lengths = torch.tensor([100, -5], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([4, 2], dtype=torch.int32, device=DEVICE)
    out = launch.topk(logits, lengths, 3, starts=starts).tolist()
    assert sorted(out[0]) == [-1, 0, 1] and out[1] == [-1, -1, -1]


@pytest.mark.parametrize("next_n", range(1, 9) if GPU else (1, 2, 5, 8))
def test_next_n(next_n):
    """One length for next_n rows, which is that of the last row; and a length for each row."""
    g = torch.Generator().manual_seed(next_n)
    lengths = torch.tensor([3, 40, 0], dtype=torch.int32)
    logits = torch.randn(3 * next_n, 50, generator=g)
    own = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0).int()
    rows = [row[:n] for row, n in zip(logits, own.flatten().tolist(), strict=True)]
    for given_lengths in (lengths, lengths[:, None], own):
        out = launch.topk(logits.to(DEVICE), given_lengths.to(DEVICE), 8, next_n=next_n)
        check(rows, 8, out)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), k=st.integers(1, 40))
def test_any_values(data, k):
    floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0])
    rows = [torch.tensor(r) for r in data.draw(st.lists(st.lists(floats, min_size=1, max_size=70), max_size=3))]
    if rows:
        starts = [data.draw(st.integers(0, 9)) for _ in rows]
        check(rows, k, run(rows, k, starts=starts))


def test_the_check_can_fail():
    rows = [values("normal", 100)]
    good = run(rows, 10)
    check(rows, 10, good)
    worst = int(rows[0].argmin())
    for bad in (good.clone().fill_(3), torch.cat([good[:, 1:], good[:, :1] * 0 - 1], 1), good.clone()):
        bad[0, 0] = worst if torch.equal(bad, good) else bad[0, 0]
        with pytest.raises(AssertionError):
            check(rows, 10, bad)


def test_no_rows_and_bad_arguments():
    logits = torch.zeros(4, 10, device=DEVICE)
    lengths = torch.full((4,), 10, dtype=torch.int32, device=DEVICE)
    assert launch.topk(logits[:0], lengths[:0], 5).shape == (0, 5)
    assert (launch.topk(logits[:, :0], lengths, 5) == -1).all()
    good = {"logits": logits, "lengths": lengths, "k": 5}
    bad = [
        ("logits", logits.half()), ("logits", logits[0]), ("logits", torch.zeros(10, 4, device=DEVICE).T),
        ("k", 0), ("k", 2049), ("lengths", lengths.long()), ("lengths", lengths[:3]), ("lengths", lengths[:, None]),
        ("next_n", 3), ("next_n", 0), ("starts", lengths[:2]), ("starts", lengths.float()),
        ("out", torch.zeros(4, 6, dtype=torch.int32, device=DEVICE)), ("out", torch.zeros(4, 5, device=DEVICE)),
        ("out", torch.zeros(1, 5, dtype=torch.int32, device=DEVICE).expand(4, 5)),
    ]  # fmt: skip
    for name, value in bad:
        with pytest.raises(ValueError, match=f"^{name} "):
            launch.topk(**(good | {name: value}))
    small = launch.Workspace(1, 10, DEVICE)
    with pytest.raises(ValueError, match="^workspace "):
        launch.topk(**good, workspace=small, plan=tune.TopKPlan(WHOLE.config, 1, 4))
    with pytest.raises(ValueError, match="^workspace "):
        launch.topk(**good, workspace=small, plan=SHARED)


def test_a_workspace_serves_again():
    """One call leaves nothing that changes the next: fewer rows, other values. All counters are zero."""
    workspace = launch.Workspace(3, 20_000, DEVICE, sms=132)
    for pattern, lengths in (("normal", (9000, 70, 8500)), ("ties", (9500,)), ("normal", (9000, 70))):
        rows = [values(pattern, n, seed=n) for n in lengths]
        check(rows, 300, run(rows, 300, workspace=workspace, plan=SHARED))
        assert not workspace.counts.any() and not workspace.arrived.any()


@pytest.mark.parametrize("sms", [84, 132, 170, 188])
def test_few_long_rows_are_shared_and_short_or_many_are_not(sms):
    assert tune.plan(1, 131_072, sms).parts == 16 and tune.plan(1, 1 << 20, sms).parts == min(tune.MAX_PARTS, sms)
    assert tune.plan(4096, 65_536, sms).parts == tune.plan(1, tune.CAPACITY, sms).parts == 1


@pytest.mark.parametrize(("most_rows", "most_columns"), [(8, 20_480), (64, 20_480), (64, 8192), (512, 1 << 20)])
def test_warm_up_and_workspace_cover_all_that_serving_launches(most_rows, most_columns):
    """Also for a small server, which shares all rows but the short ones."""
    for sms in (84, 132, 170, 188):
        warm = {(plan.config, plan.parts > 1) for _, _, plan in launch.variants(most_rows, most_columns, sms)}
        workspace = launch.Workspace(most_rows, most_columns, "meta", sms)
        for rows in {1, 2, 8, most_rows // 2, most_rows}:
            for columns in (1, 512, 8192, 8193, 20_000, 65_537, 131_073, 262_145, 1 << 20):
                if columns <= most_columns:
                    plan = tune.plan(rows, columns, sms)
                    assert (plan.config, plan.parts > 1) in warm, (rows, columns, sms)
                    workspace.check(plan, rows, torch.device("meta"))


@needs_gpu
@pytest.mark.parametrize("length", [131_329, 262_209, 1_048_576])
@pytest.mark.parametrize("pattern", ["normal", "indexer", "ties", "equal", "ascending", "one_bin"])
def test_long_rows(length, pattern):
    for count in (1, 7):
        rows = [values(pattern, length - 1000 * i, seed=i) for i in range(count)]
        for k in (1, 2048):
            check(rows, k, run(rows, k))
    rows = [values(pattern, length), values(pattern, 5000)]
    check(rows, 2048, run(rows, 2048, plan=WHOLE))


@needs_gpu
def test_many_rows():
    rows = [values("normal", 1 + (37 * i) % 20_000, seed=i) for i in range(1500)]
    check(rows, 2048, run(rows, 2048, starts=[i % 7 for i in range(1500)]))


@needs_gpu
@pytest.mark.parametrize("rows", [2, 2100])
def test_offsets_past_2_31(rows):
    """The last rows of more than 2^31 logits."""
    stride = (1 << 31) + 24 if rows == 2 else 1 << 20
    store = torch.empty((rows - 1) * stride + (1 << 20), device=DEVICE)
    logits = store.as_strided((rows, 1 << 20), (stride, 1))
    lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    lengths[-1] = 100_001
    logits[-1] = torch.randn(1 << 20, device=DEVICE)
    out = launch.topk(logits, lengths, 2048)
    assert (out[:-1] == -1).all()
    check([logits[-1, :100_001].cpu()], 2048, out[-1:])


@needs_gpu
@pytest.mark.parametrize("rows, columns", [(1, 1 << 20), (8, 131_072), (64, 65_536), (64, 8192), (600, 20_000)])
def test_graph_replay_equals_eager(rows, columns):
    """Inputs change from replay to replay. Nothing compiles after warm-up, and every counter is zero again."""
    launch.warm_up(2048, 600, 1 << 20, DEVICE)
    before = launch.compiled.count()
    workspace = launch.Workspace(600, 1 << 20, DEVICE)
    logits = torch.zeros(rows, columns, device=DEVICE)
    lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.topk(logits, lengths, 2048, workspace=workspace)
    for seed in range(20):
        g = torch.Generator(DEVICE).manual_seed(seed)
        logits.normal_(generator=g)
        if seed % 3 == 1:
            logits.mul_(4).round_()
        lengths.random_(0, columns + 1, generator=g)
        if seed == 5:
            lengths.fill_(columns)
        out.fill_(77)
        graph.replay()
        eager = launch.topk(logits, lengths, 2048)
        assert not workspace.counts.any() and not workspace.arrived.any()
        some = range(0, rows, max(1, rows // 8))
        check([logits[r, : lengths[r]].cpu() for r in some], 2048, out[list(some)])
        for answer in (out, eager):  # all rows at once
            bits = logits.view(torch.int32).gather(1, answer.clamp(min=0).long())
            answer.copy_(bits.where(answer >= 0, -1).sort(1).values)
        assert torch.equal(out, eager)
    assert launch.compiled.count() == before > 0


@needs_gpu
def test_an_empty_rest_costs_nothing():
    """5,000 columns take about the same time in rows that could hold 1,048,576 and 8,192."""
    times = []
    lengths = torch.tensor([5000], dtype=torch.int32, device=DEVICE)
    for columns in (8192, 1 << 20):
        logits = torch.randn(1, columns, device=DEVICE)
        workspace = launch.Workspace(1, columns, DEVICE)
        run_once = lambda: launch.topk(logits, lengths, 2048, workspace=workspace)  # noqa: B023, E731
        times.append(launch_time(run_once))
    assert times[1] < 1.5 * times[0] + 5, times


def launch_time(function):
    """Microseconds of one of 20 launches in a graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / 20
