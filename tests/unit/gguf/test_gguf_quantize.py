from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shim.gguf.quantize import SCALES, STAND_INS, quantize, random_blocks

# Largest error in units of a block's range (Q4_K, Q5_K: max - min, zero included) or peak (Q6_K): half a step, plus
# what rounding scale and minimum to 6 (8) bits and d to fp16 can add.
BOUNDS = {Type.Q4_K: 0.052, Type.Q5_K: 0.034, Type.Q6_K: 0.022}


def unit(block: np.ndarray, kind: Type) -> float:
    if kind is Type.Q6_K:
        return float(np.abs(block).max())
    return float(max(block.max(), 0) - min(block.min(), 0))


@pytest.mark.parametrize("kind", BOUNDS)
@settings(max_examples=60, deadline=None)
@given(
    x=arrays(np.float32, (2, 256), elements=st.floats(-1, 1, width=32)),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
)
def test_error_stays_within_the_format(kind, x, scale):
    x[:, 0] = 1  # keeps d out of fp16's subnormals, where it is coarse
    x = x * np.float32(scale)
    packed = quantize(x, kind)
    assert packed.dtype == np.uint8 and packed.shape == (2, gguf.GGML_QUANT_SIZES[kind][1])
    back = gguf.dequantize(packed, kind)
    for row in range(2):
        assert np.abs(back[row] - x[row]).max() <= BOUNDS[kind] * unit(x[row], kind)


@pytest.mark.parametrize(("kind", "limit"), [(Type.Q4_K, 0.08), (Type.Q5_K, 0.04), (Type.Q6_K, 0.02)])
def test_root_mean_square_error_on_gaussian_weights(kind, limit):
    x = (np.random.default_rng(0).standard_normal((8, 64, 512)) * 0.0625).astype(np.float32)
    back = gguf.dequantize(quantize(x, kind), kind)
    assert back.shape == x.shape
    assert np.sqrt(((back - x) ** 2).mean()) < limit * 0.0625


@pytest.mark.parametrize("kind", BOUNDS)
def test_every_position_lands_where_it_came_from(kind):
    """A layout mistake swaps positions: a single one that stands out must stay in place."""
    x = np.zeros((256, 256), dtype=np.float32)
    np.fill_diagonal(x, 1.0)
    back = gguf.dequantize(quantize(x, kind), kind)
    assert np.array_equal(back.argmax(axis=1), np.arange(256))
    assert np.abs(back - x).max() < 0.05


@pytest.mark.parametrize("kind", BOUNDS)
def test_zeros_stay_zeros(kind):
    assert not gguf.dequantize(quantize(np.zeros((1, 256), np.float32), kind), kind).any()


@pytest.mark.parametrize("kind", BOUNDS)
def test_rows_must_fill_blocks(kind):
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize(np.zeros((2, 192), np.float32), kind)


def test_other_types_are_gguf_pys():
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    assert np.array_equal(quantize(x, Type.Q8_0), gguf.quantize(x, Type.Q8_0))


@pytest.mark.parametrize("kind", SCALES)
def test_random_blocks_are_sound_and_of_the_spread_asked_for(kind):
    drawn = random_blocks((8, 16, 512), kind, 0.05, np.random.default_rng(1))
    values = gguf.dequantize(drawn, kind)
    assert values.shape == (8, 16, 512) and np.isfinite(values).all()
    assert values.std() == pytest.approx(0.05, rel=0.07 if kind is Type.NVFP4 else 0.02)  # its scales have 3 bits
    assert len(np.unique(drawn)) > 200
    with pytest.raises(ValueError, match="needs rows of a multiple of"):
        random_blocks((2, 100), kind, 1.0, np.random.default_rng(1))


@pytest.mark.parametrize("kind", STAND_INS)
def test_stand_ins_follow_the_values_they_stand_for(kind):
    x, y = np.random.default_rng(2).standard_normal((2, 4, 256)).astype(np.float32)
    assert np.array_equal(quantize(x, kind), quantize(x, kind))
    assert not np.array_equal(quantize(x, kind), quantize(y, kind))
