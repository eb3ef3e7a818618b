"""The indexer's reference scores against loops over bytes and heads."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.kernels.indexer import reference
from shim.kernels.indexer.reference import mqa_logits, pack_blocks, paged_mqa_logits, read_blocks

FP8 = torch.float8_e4m3fn


def brute(q, k, scale, weights):
    """[M, N] in float64, one head after the other."""
    q, k, weights = q.double(), k.double(), weights.double()
    logits = torch.zeros(len(q), len(k), dtype=torch.float64)
    for h in range(q.shape[1]):
        logits += weights[:, h, None] * (q[:, h] @ k.T).clamp(min=0)
    return logits * scale.double()


def inside(logits, ks, ke):
    keep = torch.zeros(logits.shape, dtype=torch.bool)
    for m in range(len(logits)):
        keep[m, int(ks[m]) : int(ke[m])] = True
    return keep


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.sampled_from([1, 62, 64, 65, 200]),
    heads=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 2**31),
)
def test_prefill_equals_loops(m, n, heads, seed):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(m, heads, 128, generator=g).to(FP8), torch.randn(n, 128, generator=g).to(FP8)
    scale, weights = torch.rand(n, generator=g) + 0.1, torch.randn(m, heads, generator=g)
    ks = torch.randint(0, n, (m,), generator=g)
    ke = torch.randint(0, n + 1, (m,), generator=g)  # some windows are empty
    logits = mqa_logits(q, k, scale, weights, ks, ke, torch.float64)
    keep = inside(logits, ks, ke)
    torch.testing.assert_close(logits[keep], brute(q, k, scale, weights)[keep], rtol=1e-10, atol=1e-10)
    assert (logits[~keep] == -torch.inf).all()


def test_prefill_in_parts_equals_the_whole(monkeypatch):
    g = torch.Generator().manual_seed(0)
    arguments = (
        torch.randn(50, 4, 128, generator=g),
        torch.randn(70, 128, generator=g),
        None,
        torch.randn(50, 4, generator=g),
        torch.zeros(50, dtype=torch.int32),
        torch.arange(21, 71),
    )
    whole = mqa_logits(*arguments)
    monkeypatch.setattr(reference, "PRODUCT_BYTES", 3 * 4 * 70 * 4)  # three rows at a time
    torch.testing.assert_close(mqa_logits(*arguments), whole, rtol=1e-6, atol=1e-4)


def test_garbage_outside_the_window_does_not_leak():
    k = torch.randn(8, 128)
    k[0], k[7] = torch.nan, torch.inf
    logits = mqa_logits(torch.randn(1, 2, 128), k, None, torch.ones(1, 2), torch.tensor([1]), torch.tensor([7]))
    assert logits[0, 1:7].isfinite().all() and (logits[0, [0, 7]] == -torch.inf).all()


def poisoned_cache(lengths, g, gap=0):
    """A planar fp8 cache, written byte by byte. Bytes without a token are 255 (NaN as e4m3 and as fp32)."""
    block_of = torch.randperm(8 * len(lengths), generator=g).tolist()
    raw = torch.full((len(block_of), 64 * 132 + gap), 255, dtype=torch.uint8)
    table = torch.full((len(lengths), 8), -7, dtype=torch.int32)
    keys, scales = [], []
    for request, length in enumerate(lengths):
        keys.append(torch.randn(length, 128, generator=g).to(FP8))
        scales.append(torch.rand(length, generator=g) + 0.01)
        for i in range(length):
            if i % 64 == 0:
                table[request, i // 64] = block_of.pop()
            block, slot = raw[table[request, i // 64]], i % 64
            block[slot * 128 : slot * 128 + 128] = keys[-1][i].view(torch.uint8)
            scale = struct.pack("<f", float(scales[-1][i]))
            block[8192 + slot * 4 : 8192 + slot * 4 + 4] = torch.frombuffer(bytearray(scale), dtype=torch.uint8)
    cache = raw.as_strided((len(raw), 64, 132), (raw.stride(0), 132, 1))
    return cache, table, keys, scales


@pytest.mark.parametrize("gap", [0, 132])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("per_row", [False, True])
def test_decode_reads_the_planar_cache(gap, next_n, per_row):
    g = torch.Generator().manual_seed(gap + next_n)
    lengths = [62, 64, 65, 200]
    cache, table, keys, scales = poisoned_cache(lengths, g, gap)
    q = torch.randn(4, next_n, 8, 128, generator=g).to(FP8)
    weights = torch.randn(4 * next_n, 8, generator=g)
    sees = torch.tensor(lengths, dtype=torch.int32)[:, None] - next_n + 1 + torch.arange(next_n)
    context_lens = sees.int() if per_row else torch.tensor(lengths, dtype=torch.int32)
    logits = paged_mqa_logits(q, cache, weights, context_lens, table, 256, torch.float64)
    for b in range(4):
        rows = slice(b * next_n, (b + 1) * next_n)
        want = brute(q[b], keys[b], scales[b], weights[rows])
        for j in range(next_n):
            n = int(sees[b, j])
            torch.testing.assert_close(logits[rows][j, :n], want[j, :n], rtol=1e-10, atol=1e-10)
            assert (logits[rows][j, n:] == -torch.inf).all()


def test_decode_accepts_the_four_dimensional_cache_and_idle_rows():
    cache, table, keys, scales = poisoned_cache([65, 1], torch.Generator().manual_seed(9))
    q, weights = torch.randn(2, 1, 4, 128).to(FP8), torch.randn(2, 4)
    lens = torch.tensor([[65], [0]], dtype=torch.int32)
    logits = paged_mqa_logits(q, cache.unsqueeze(2), weights, lens, table, 100, torch.float64)
    torch.testing.assert_close(logits[:1, :65], brute(q[0], keys[0], scales[0], weights[:1]), rtol=1e-10, atol=1e-10)
    assert (logits[1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_reads_unquantised_keys(dtype):
    g = torch.Generator().manual_seed(11)
    keys = torch.randn(70, 128, generator=g).to(dtype)
    cache = torch.full((4, 64, 128), torch.nan, dtype=dtype)
    cache[3], cache[1, :6] = keys[:64], keys[64:]
    q, weights = torch.randn(1, 1, 4, 128, generator=g), torch.randn(1, 4, generator=g)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    logits = paged_mqa_logits(q, cache, weights, torch.tensor([70]), table, 70, torch.float64)
    torch.testing.assert_close(logits, brute(q[0], keys, torch.ones(70), weights), rtol=1e-10, atol=1e-10)


def test_packing_is_undone_by_reading():
    g = torch.Generator().manual_seed(12)
    k, scale = torch.randn(3, 64, 128, generator=g).to(FP8), torch.rand(3, 64, generator=g)
    blocks = pack_blocks(k, scale)
    assert blocks.shape == (3, 64, 132) and blocks.dtype == torch.uint8
    assert (blocks.flatten(1)[:, :8192] == k.flatten(1).view(torch.uint8)).all()
    back, back_scale = read_blocks(blocks)
    assert (back.view(torch.uint8) == k.view(torch.uint8)).all() and (back_scale == scale).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        mqa_logits(torch.zeros(2, 4, 128), torch.zeros(3, 64), None, torch.zeros(2, 4), torch.zeros(2), torch.zeros(2))
