"""On the path of a child process: the kernels of vllm-gguf-plugin's linear layers, which need a GPU, as dequantisation
and torch. Everything else of the plugin is its own."""

import wrapt


@wrapt.when_imported("vllm_gguf_plugin.ops")
def in_torch(ops):
    import gguf
    import torch
    from gguf import GGMLQuantizationType

    def dequantised(weight, kind, dtype):
        values = gguf.dequantize(weight.contiguous().numpy(), GGMLQuantizationType(int(kind)))
        return torch.from_numpy(values).to(dtype)

    def mul_mat(weight, x, kind, row):
        return x @ dequantised(weight, kind, x.dtype).T

    ops.ggml_dequantize = lambda weight, kind, m, n, dtype: dequantised(weight, kind, dtype)
    ops.ggml_mul_mat_a8 = ops.ggml_mul_mat_vec_a8 = mul_mat
