"""Random bytes that are sound blocks of any type, for tests and benchmarks. On any device, in torch."""

from __future__ import annotations

import gguf
import torch
from gguf import GGMLQuantizationType as Type

from shim.kernels.ggml.layout import PLAIN

# Where in a block its fp16 numbers lie (ggml-common.h); IQ1_M spreads one over the top bits of its last four uint16
_NUMBERS: dict[Type, tuple[int, ...]] = {
    **dict.fromkeys((Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S), (0,)),
    **dict.fromkeys((Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS), (0,)),
    **dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}


def random_blocks(
    shape: tuple[int, ...], type: Type, device: torch.device | str = "cpu", seed: int = 0, spread: float = 0.02
) -> torch.Tensor:
    """uint8 [..., bytes of a row] of weights [..., columns] with a standard deviation of about `spread`."""
    g = torch.Generator(device=device).manual_seed(seed)
    if type in PLAIN:
        values = torch.randn(shape, generator=g, device=device) * spread
        return values.to(PLAIN[type]).contiguous().view(torch.uint8)
    block, size = gguf.GGML_QUANT_SIZES[type]
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=torch.uint8, device=device, generator=g)
    if type in (Type.MXFP4, Type.NVFP4):  # exponents, and e4m3 scales, of that size
        count, least = (1, 117) if type is Type.MXFP4 else (4, 24)
        raw[..., :count] = raw[..., :count] % (4 if type is Type.MXFP4 else 32) + least
        return raw.flatten(-2)
    _scale(raw, type, torch.ones((), device=device))
    sample = gguf.dequantize(raw.reshape(-1, size)[:64].cpu().numpy(), type)
    jitter = torch.rand((*raw.shape[:-1],), generator=g, device=device) + 0.5
    _scale(raw, type, jitter * (spread / float(sample.std())))
    return raw.flatten(-2)


def _scale(raw: torch.Tensor, type: Type, scale: torch.Tensor) -> None:
    scale = scale.expand(raw.shape[:-1]).half().unsqueeze(-1).contiguous()
    if type is Type.IQ1_M:
        words = raw[..., -8:].contiguous().view(torch.int16).int() & 0x0FFF
        quarter = torch.tensor([12, 8, 4, 0], device=raw.device)
        words |= (scale.view(torch.int16).int() << quarter) & 0xF000
        raw[..., -8:] = words.to(torch.int16).view(torch.uint8)
        return
    for place in _NUMBERS[type]:
        raw[..., place : place + 2] = scale.view(torch.uint8)
