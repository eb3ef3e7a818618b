"""The sparse MLA reference against dense, masked softmax attention in numpy's float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.kernels.sparse_mla import reference
from shim.kernels.sparse_mla.reference import pack_fp8_ds_mla, read_rows, sparse_mla

BLOCK = 64
SCALE = 256**-0.5


def paged(lengths: list[int], generator: torch.Generator, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor, list]:
    """A cache of shuffled blocks, `gap` rows apart, with NaN in every row without a token; block table; plain rows."""
    per_request = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(per_request) + 3, generator=generator).tolist()
    cache = torch.full((len(order), BLOCK + gap, 576), torch.nan)[:, :BLOCK]
    table = torch.full((len(lengths), max(per_request) + 1), 10**6, dtype=torch.int32)
    rows = []
    for request, (length, blocks) in enumerate(zip(lengths, per_request, strict=True)):
        rows.append(torch.randn(length, 576, generator=generator))
        for b in range(blocks):
            block = table[request, b] = order.pop()
            part = rows[-1][b * BLOCK : (b + 1) * BLOCK]
            cache[block, : len(part)] = part
    return cache, table, rows


def dense(q: torch.Tensor, rows: list[torch.Tensor], topk: torch.Tensor, req_ids: torch.Tensor) -> tuple:
    """Scores all rows of the request in numpy's float64. Rows that are not chosen get weight 0."""
    out, lse = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], -np.inf)
    for t in range(len(q)):
        k = rows[int(req_ids[t])].double().numpy()
        weight = np.zeros(len(k))
        weight[[p for p in topk[t].tolist() if p >= 0]] = 1
        if weight.any():
            score = q[t].double().numpy() @ k.T * SCALE
            top = score.max(-1, keepdims=True)
            e = np.exp(score - top) * weight
            lse[t] = np.log(e.sum(-1)) + top[:, 0]
            out[t] = e @ k[:, :512] / e.sum(-1, keepdims=True)
    return torch.from_numpy(out), torch.from_numpy(lse)


def choose(length: int, width: int, pattern: str, generator: torch.Generator) -> torch.Tensor:
    count = {"full": min(width, length), "none": 0}.get(pattern, min(width, length) // 2)
    picked = torch.randperm(length, generator=generator)[:count].int()
    row = torch.full((width,), -1, dtype=torch.int32)
    if pattern == "last":
        row[width - count :] = picked
    elif pattern == "scattered":
        row[torch.randperm(width, generator=generator)[:count]] = picked
    else:
        row[:count] = picked
    return row


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 62, 63, 64, 65, 130]), min_size=1, max_size=3),
    patterns=st.lists(st.sampled_from(["full", "first", "last", "scattered", "none"]), min_size=1, max_size=5),
    heads=st.sampled_from([1, 8]),
    width=st.sampled_from([1, 16, 64, 100]),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**31),
)
def test_equals_dense_attention(lengths, patterns, heads, width, gap, seed):
    g = torch.Generator().manual_seed(seed)
    cache, table, rows = paged(lengths, g, gap)
    req_ids = torch.randint(len(lengths), (len(patterns),), generator=g)
    topk = torch.stack([choose(lengths[r], width, p, g) for r, p in zip(req_ids.tolist(), patterns, strict=True)])
    q = torch.randn(len(patterns), heads, 576, generator=g)
    want_out, want_lse = dense(q, rows, topk, req_ids)
    out, lse = sparse_mla(q, cache, topk, req_ids, table, SCALE, dtype=torch.float64)
    torch.testing.assert_close(out, want_out, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-11)
    out, lse = sparse_mla(q, cache, topk, req_ids, table, SCALE)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_a_token_without_rows_gives_zero_and_minus_infinity():
    cache, table, _ = paged([64], torch.Generator().manual_seed(1))
    topk = torch.tensor([[-1, -1], [3, -1]], dtype=torch.int32)
    out, lse = sparse_mla(torch.randn(2, 4, 576), cache, topk, torch.zeros(2, dtype=torch.int32), table, SCALE)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_one_row_is_its_own_answer():
    cache, table, rows = paged([65], torch.Generator().manual_seed(2))
    q = torch.randn(1, 2, 576)
    topk = torch.tensor([[-1, 64]], dtype=torch.int32)
    out, lse = sparse_mla(q, cache, topk, torch.zeros(1, dtype=torch.long), table, SCALE)
    torch.testing.assert_close(out[0], rows[0][64, :512].expand(2, 512))
    torch.testing.assert_close(lse[0], q[0] @ rows[0][64] * SCALE)


def test_an_absent_token_is_not_read():
    cache, table, rows = paged([65], torch.Generator().manual_seed(7))
    cache[table[0, 0], 0] = torch.nan  # the row that a careless clamp of -1 would read
    topk = torch.tensor([[-1, 64, -1], [-1, -1, -1], [2, -1, 64]], dtype=torch.int32)
    out, lse = sparse_mla(torch.randn(3, 2, 576), cache, topk, torch.zeros(3, dtype=torch.long), table, SCALE)
    assert out.isfinite().all() and lse[[0, 2]].isfinite().all()
    torch.testing.assert_close(out[0], rows[0][64, :512].expand(2, 512))
    garbage = torch.cat([table, torch.full_like(table, 10**8)])  # a request that has no token yet
    requests = torch.tensor([0, 1, 0])
    again, _ = sparse_mla(torch.ones(3, 2, 576), cache, topk, requests, garbage, SCALE)
    assert (again[1] == 0).all() and again.isfinite().all()


def test_large_scores_do_not_overflow():
    cache, table, rows = paged([64], torch.Generator().manual_seed(3))
    q = 1e4 * torch.randn(1, 1, 576)
    topk = torch.arange(64, dtype=torch.int32)[None]
    out, lse = sparse_mla(q, cache, topk, torch.zeros(1, dtype=torch.long), table, SCALE)
    best = (rows[0] @ q[0, 0]).argmax()
    torch.testing.assert_close(out[0, 0], rows[0][best, :512])
    assert lse.isfinite().all()


def test_parts_give_what_the_whole_gives(monkeypatch):
    g = torch.Generator().manual_seed(4)
    cache, table, _ = paged([130], g)
    q, req_ids = torch.randn(7, 2, 576, generator=g), torch.zeros(7, dtype=torch.long)
    topk = torch.stack([choose(130, 64, p, g) for p in ["full", "none", "last", "scattered", "none", "first", "full"]])
    whole = sparse_mla(q, cache, topk, req_ids, table, SCALE, torch.float64)
    monkeypatch.setattr(reference, "GATHER_BYTES", 2 * 64 * 576 * 8)  # two tokens at a time
    for one, other in zip(whole, sparse_mla(q, cache, topk, req_ids, table, SCALE, torch.float64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_count_as_what_they_hold(dtype):
    g = torch.Generator().manual_seed(5)
    cache, table, rows = paged([65], g)
    topk, req_ids = choose(65, 32, "scattered", g)[None], torch.zeros(1, dtype=torch.long)
    q = torch.randn(1, 8, 576, generator=g).to(dtype)
    want, _ = dense(q, [r.to(dtype) for r in rows], topk, req_ids)
    out, _ = sparse_mla(q, cache.to(dtype), topk, req_ids, table, SCALE, torch.float64)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-11)


def fp8_row(latent: np.ndarray, scales: np.ndarray, rope: torch.Tensor) -> bytes:
    """The 656 bytes of a row. `latent` has bit patterns of e4m3."""
    return latent.tobytes() + scales.astype("<f4").tobytes() + rope.view(torch.uint8).numpy().tobytes()


def e4m3(bits: np.ndarray) -> np.ndarray:
    """e4m3fn decoded from its definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign, exponent, mantissa = bits >> 7, (bits >> 3 & 15).astype(int), (bits & 7).astype(float)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(sign == 1, -value, value)


def test_fp8_ds_mla_rows_with_arbitrary_scales():
    rng, g = np.random.default_rng(6), torch.Generator().manual_seed(6)
    length = 65
    bits = rng.integers(0, 255, (length, 512), dtype=np.uint8)
    bits[(bits & 127) == 127] = 0  # the two NaNs of e4m3fn
    scales = rng.uniform(1e-3, 3.7e-3, (length, 4)).astype(np.float32)  # no powers of two
    rope = torch.randn(length, 64, generator=g).to(torch.bfloat16)
    latent = e4m3(bits) * np.repeat(scales, 128, axis=1).astype(np.float64)
    rows = torch.cat([torch.from_numpy(latent), rope.double()], dim=1)
    cache = torch.full((3, BLOCK, 656), 255, dtype=torch.uint8)  # 255: NaN in e4m3, bf16 and fp32
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    for i in range(length):
        raw = fp8_row(bits[i], scales[i], rope[i])
        cache[table[0, i // BLOCK], i % BLOCK] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    topk = torch.stack([choose(length, 40, p, g) for p in ("scattered", "none", "full")])
    q, req_ids = torch.randn(3, 8, 576, generator=g), torch.zeros(3, dtype=torch.long)
    want_out, want_lse = dense(q, [rows], topk, req_ids)
    out, lse = sparse_mla(q, cache, topk, req_ids, table, SCALE, torch.float64)
    torch.testing.assert_close(out, want_out, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(magnitude=st.floats(-6, 4), seed=st.integers(0, 2**31))
def test_packing_keeps_values_to_fp8_precision(magnitude, seed):
    rows = 10.0**magnitude * torch.randn(5, 576, generator=torch.Generator().manual_seed(seed))
    rows[0, :128] = 0  # a group without any value
    back = read_rows(pack_fp8_ds_mla(rows), torch.float64)
    group = rows[:, :512].abs().unflatten(1, (4, 128)).amax(-1).repeat_interleave(128, dim=1).double()
    error = (back[:, :512] - rows[:, :512].double()).abs()
    bound = rows[:, :512].abs().double() / 16 + group / 448 * 2.0**-9  # half an e4m3 step, normal and subnormal
    assert (error <= bound * 1.001).all()
    torch.testing.assert_close(back[:, 512:], rows[:, 512:].bfloat16().double(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8, 512)}, "q is"),
        ({"cache": torch.zeros(1, 64, 656)}, "cache is"),
        ({"cache": torch.zeros(1, 64, 576, dtype=torch.uint8)}, "cache is"),
        ({"topk": torch.zeros(3, 4, dtype=torch.int32)}, "do not fit 2 tokens"),
        ({"req_ids": torch.zeros(3, dtype=torch.int32)}, "do not fit 2 tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    good = {
        "q": torch.zeros(2, 8, 576),
        "cache": torch.zeros(1, 64, 576),
        "topk": torch.zeros(2, 4, dtype=torch.int32),
        "req_ids": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
    }
    sparse_mla(**good, scale=1.0)
    with pytest.raises(ValueError, match=message):
        sparse_mla(**(good | change), scale=1.0)
