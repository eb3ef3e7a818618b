"""On the path of a child process: vllm-gguf-plugin's kernels, which need a GPU, as dequantisation and torch.

Everything else of the plugin is its own: parameters, their loaders, linear, MoE and embedding methods. Batches of up to
64 tokens only, since above that the plugin sorts tokens by expert with an op of the CUDA wheel.
"""

import wrapt


@wrapt.when_imported("vllm_gguf_plugin.ops")
def in_torch(ops):
    import gguf
    import torch
    from gguf import GGMLQuantizationType

    seen = {}  # with the weight, whose memory then stays its own; to compute it anew takes longer than all else

    def dequantised(weight, kind, dtype):
        key = weight.data_ptr(), weight.shape, weight.stride(), int(kind), dtype
        if key not in seen:
            values = gguf.dequantize(weight.contiguous().numpy(), GGMLQuantizationType(int(kind)))
            seen[key] = weight, torch.from_numpy(values).to(dtype)
        return seen[key][1]

    def mul_mat(weight, x, kind, row):
        return x @ dequantised(weight, kind, x.dtype).T

    def moe(x, weight, experts, top_k, kind, row, tokens):
        out = x.new_empty(tokens * top_k, row)
        chosen = experts.flatten()
        for expert in chosen.unique().tolist():
            places = (chosen == expert).nonzero().flatten()
            out[places] = x[places // top_k] @ dequantised(weight[expert], kind, x.dtype).T
        return out

    ops.ggml_dequantize = lambda weight, kind, m, n, dtype: dequantised(weight, kind, dtype)
    ops.ggml_mul_mat_a8 = ops.ggml_mul_mat_vec_a8 = mul_mat
    ops.ggml_moe_a8_vec = moe
    ops.moe_sum = lambda parts, out: out.copy_(parts.sum(dim=1))
