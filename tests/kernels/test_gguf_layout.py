"""Re-laying weights: bits are moved, and nothing else; in parts as in one; what does not fit is refused."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml import repack
from shim.kernels.ggml.blocks import random_blocks
from shim.kernels.ggml.layout import FORMS, PLAIN, TYPES, Weight, shape_of

BITS = torch.arange(8, dtype=torch.uint8)


def test_every_type_that_gguf_dequantises_is_known():
    known = {Type.F32, Type.F16, *gguf.quants._type_traits}
    assert set(TYPES) == known


@pytest.mark.parametrize("kind", [t for t in FORMS if t is not Type.TQ1_0], ids=lambda t: t.name)
def test_bits_are_moved_and_none_is_lost(kind):
    """Of blocks with one bit set each differs from that of zeros in one bit, another for each: there is an inverse."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = size * (256 // block)
    assert FORMS[kind].row_bytes == count
    raw = torch.zeros(count * 8, 1, count, dtype=torch.uint8)
    raw.view(count, 8, count)[torch.arange(count), :, torch.arange(count)] = 1 << BITS
    zero = repack.repack(torch.zeros(1, 1, count, dtype=torch.uint8), kind).data.flatten()
    moved = repack.repack(raw, kind).data.flatten(1) ^ zero
    at = moved.nonzero()
    assert len(at) == count * 8 and (at[:, 0] == torch.arange(count * 8)).all()
    value = moved[at[:, 0], at[:, 1]]
    assert (value & (value - 1) == 0).all()
    assert len(set(zip(at[:, 1].tolist(), value.tolist(), strict=True))) == count * 8


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0, Type.IQ1_M, Type.TQ1_0], ids=lambda t: t.name)
def test_in_parts_as_in_one(kind, monkeypatch):
    raw = random_blocks((2, 70, 768), kind)
    want = repack.repack(raw, kind)
    monkeypatch.setattr(repack, "AT_ONCE", 20_000)
    out = torch.full_like(want.data, 99)
    got = repack.repack(raw, kind, out)
    assert got.data is out and torch.equal(out, want.data)
    assert got[1:] == (kind, 70, 768) and want.bytes == raw[0].numel()
    assert want.data.shape == (2, *shape_of(kind, 70, 768))


def test_odd_rows_and_columns_are_filled_with_zeros():
    raw = random_blocks((17, 288), Type.Q8_0)
    data = repack.repack(raw, Type.Q8_0).data
    assert data.shape == (2, 2, 16 * 272)
    full = torch.zeros(32, 512 // 32 * 34, dtype=torch.uint8)
    full[:17, : raw.shape[1]] = raw
    assert torch.equal(data, repack.repack(full, Type.Q8_0).data)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda t: t.name)
def test_plain_types_stay(kind):
    raw = random_blocks((3, 40), kind)
    weight = repack.repack(raw, kind)
    assert isinstance(weight, Weight) and weight.data.dtype == PLAIN[kind] and weight.data.shape == (3, 40)
    assert torch.equal(weight.data.view(torch.uint8), raw)


@pytest.mark.parametrize("raw, kind, out, message", [
    (torch.zeros(4, 144), Type.Q4_K, None, "raw is .*float32, expected uint8"),
    (torch.zeros(144, dtype=torch.uint8), Type.Q4_K, None, "raw is"),
    (torch.zeros(4, 143, dtype=torch.uint8), Type.Q4_K, None, "rows of 143 bytes, expected whole blocks of 144"),
    (torch.zeros(4, 292, dtype=torch.uint8), Type.Q8_K, None, "type is Q8_K, expected one of"),
    (torch.zeros(4, 144, dtype=torch.uint8), Type.Q4_K, torch.zeros(3, dtype=torch.uint8), "out is"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(raw, kind, out, message):
    with pytest.raises(ValueError, match=message):
        repack.repack(raw, kind, out)
