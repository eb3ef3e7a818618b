"""y = x . W^T in plain torch on weights as gguf-py dequantises them: the truth that the kernels are judged by."""

from __future__ import annotations

import gguf
import torch


def weights(raw: torch.Tensor, type: gguf.GGMLQuantizationType) -> torch.Tensor:
    """uint8 [..., rows, bytes of a row], as a GGUF file has it -> fp32 [..., rows, columns]."""
    values = gguf.dequantize(raw.cpu().numpy(), type)
    return torch.from_numpy(values).float().to(raw.device)


def linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float64, between: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] and weight [N, K] -> [T, N] of `dtype`, in which it computes.

    between: what operands and the answer are rounded to, as a layer of 16 bits does; None: nothing
    """

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if between is None else value.to(between).to(dtype)

    return rounded(rounded(x) @ rounded(weight).T)
