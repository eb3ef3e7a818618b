"""The top-k reference against sorting in Python."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.kernels.topk.reference import topk

values = st.floats(-1e6, 1e6, width=32) | st.just(-math.inf)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), columns=st.integers(1, 40), k=st.integers(1, 50))
def test_the_chosen_values_are_the_largest_of_the_window(data, columns, k):
    rows = data.draw(st.lists(st.lists(values, min_size=columns, max_size=columns), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, columns - 1)) for _ in rows]
    lengths = [data.draw(st.integers(0, columns - s)) for s in starts]
    logits = torch.tensor(rows)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        logits[row, :start] = logits[row, start + length :] = torch.nan
    chosen = topk(logits, torch.tensor(lengths), k, torch.tensor(starts))
    assert chosen.shape == (len(rows), k) and chosen.dtype == torch.int32
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        picked = [c for c in chosen[row].tolist() if c != -1]
        assert len(picked) == len(set(picked)) == min(k, length)
        assert all(0 <= c < length for c in picked)
        window = rows[row][start : start + length]
        assert sorted(window[c] for c in picked) == sorted(window)[length - len(picked) :]


def test_without_starts_every_window_begins_at_column_zero():
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0], [5.0, 4.0, 9.0, 9.0]])
    chosen = topk(logits, torch.tensor([3, 1]), 2)
    assert sorted(chosen[0].tolist()) == [1, 2]
    assert sorted(chosen[1].tolist()) == [-1, 0]


def test_equal_logits_are_cut_to_k():
    chosen = topk(torch.zeros(1, 100), torch.tensor([100]), 64)
    assert len(set(chosen[0].tolist())) == 64 and int(chosen.min()) >= 0


def test_infinite_garbage_beside_the_window_is_not_chosen():
    logits = torch.tensor([[math.inf, 1.0, 2.0, math.inf]])
    assert sorted(topk(logits, torch.tensor([2]), 3, torch.tensor([1]))[0].tolist()) == [-1, 0, 1]
