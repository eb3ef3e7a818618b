"""Inputs for the indexer's kernels, with poison in all that may not be read, and the check of their answers."""

import torch

from shim.kernels.indexer import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
TYPES = {"fp8": FP8, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = ["[B]", "[B, 1]", "[B, next_n]"]  # of context_lens
POISON = -3.25e33
LIMIT = 1e-3
# the fp8 MMA of capability 9.0 adds up in 14 bits, in DeepGEMM too
IMPRECISE = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9


def check(got, want, size):
    """want: -inf for columns that may not be written. size: rounding is relative to this."""
    valid = want > -torch.inf
    assert (got[~valid] == POISON).all()
    assert got[valid].isfinite().all()
    difference = torch.where(valid, got.double() - want, 0)
    assert (difference.abs() <= LIMIT * torch.where(valid, size, 0)).all()
    if not IMPRECISE:
        assert (difference.norm(dim=1) <= LIMIT * torch.where(valid, want, 0).norm(dim=1)).all()
    elif valid.sum() >= 64:
        assert difference.norm() <= LIMIT * torch.where(valid, want, 0).norm()


def sizes(one, q, weights):
    """Sums without cancelling between heads. On 9.0 what relu cuts counts too: rounding may lift it above 0."""
    size = one(q, weights.abs())
    return size + one(-q.float(), weights.abs()) if IMPRECISE else size


def poisoned(rows, columns, gap=0):
    return torch.full((rows, columns + gap), POISON, device=DEVICE)[:, :columns]


def causal(queries, keys):
    return [(0, keys - queries + 1 + i) for i in range(queries)]


def prefill(queries, heads, keys, windows, dtype="fp8", seed=0):
    """Arguments of `mqa_logits`, with NaN in every key and scale that is in no window."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(queries, heads, 128, generator=g), torch.randn(keys, 128, generator=g)
    scale, weights = torch.rand(keys, generator=g) + 0.01, torch.randn(queries, heads, generator=g)
    ks, ke = (torch.tensor([window[i] for window in windows], dtype=torch.int32) for i in (0, 1))
    unseen = torch.ones(keys, dtype=torch.bool)
    for start, stop in windows:
        unseen[start:stop] = False
    k[unseen], scale[unseen] = torch.nan, torch.nan
    return [x.to(DEVICE) for x in (q.to(TYPES[dtype]), k.to(TYPES[dtype]), scale, weights, ks, ke)]


def prefill_truth(q, k, scale, weights, ks, ke, compressed=None):
    """Logits and sizes in float64; of `compressed` columns, if given."""

    def one(q, w):
        full = reference.mqa_logits(q, k, scale, w, ks, ke, torch.float64)
        if compressed is None:
            return full
        column = ks[:, None] + torch.arange(compressed, device=DEVICE)
        rows = full.gather(1, column.clamp(0, k.shape[0] - 1).long())
        return rows.masked_fill(column >= ke[:, None], -torch.inf)

    return one(q, weights), sizes(one, q, weights)


def paged(lengths, heads=32, next_n=1, form="[B]", gap=0, own=None, seed=0):
    """Arguments of `paged_mqa_logits` without `max_len`.

    Blocks are shuffled and `gap` bytes apart. Bytes without a token are 255 (NaN). Table entries behind a request's
    length are no blocks. own: each row's count, for [B, next_n]."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-max(0, n) // 64) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=g)[: sum(counts)]
    store = torch.full((sum(counts) + 2, 64 * 132 + gap), 255, dtype=torch.uint8, device=DEVICE)
    table = torch.full((len(lengths), max(1, *counts) + 3 if len(counts) > 1 else counts[0] + 3), 2 * 10**9)
    used = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count == 0:
            continue
        table[request, :count] = blocks = order[used : used + count]
        used += count
        k, scale = torch.randn(count, 64, 128, generator=g), torch.rand(count, 64, generator=g) + 0.01
        k.view(-1, 128)[length:], scale.view(-1)[length:] = torch.nan, torch.nan
        store[blocks.to(DEVICE), : 64 * 132] = reference.pack_blocks(k.to(FP8), scale).flatten(1).to(DEVICE)
    cache = store.as_strided((len(store), 64, 132), (store.stride(0), 132, 1))
    q = torch.randn(len(lengths), next_n, heads, 128, generator=g).to(FP8)
    weights = torch.randn(len(lengths) * next_n, heads, generator=g)
    lens = torch.tensor(lengths, dtype=torch.int32)
    if form == "[B, 1]":
        lens = lens[:, None]
    elif form == "[B, next_n]":
        lens = torch.tensor(own, dtype=torch.int32) if own else each_row(lens, next_n)
    return [q.to(DEVICE), cache, weights.to(DEVICE), lens.to(DEVICE), table.int().to(DEVICE)]


def each_row(lens, next_n):
    return (lens[:, None] - next_n + 1 + torch.arange(next_n)).int()


def paged_truth(q, cache, weights, lens, table, max_len):
    def one(q, w):
        return reference.paged_mqa_logits(q, cache, w, lens, table, max_len, torch.float64)

    return one(q, weights), sizes(one, q, weights)
