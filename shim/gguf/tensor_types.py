"""The types of tensors that the shim accepts in a GGUF. All others are refused, by the name of the tensor."""

from __future__ import annotations

from gguf import GGMLQuantizationType as Type

# gguf-py can dequantise these, and shim.kernels.ggml has kernels for them. Others (ik_llama's) are refused.
PLAIN_TYPES = (Type.F32, Type.F16, Type.BF16)
QUANT_TYPES = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S),
    *(Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4),
)
