"""On the path of a child process: GGUF weights stay quantised on a CPU. The launches of the shim's kernels need a GPU;
here they are dequantisation and torch, and tiles are laid in a way that is easily undone.

Everything else is the shim's own: config, parameters, loaders, methods, workspaces.
"""

import wrapt


@wrapt.when_imported("shim.patches.gguf_engine_args")
def as_on_a_gpu(patch):
    patch.on_nvidia = lambda: True


@wrapt.when_imported("shim.kernels.host")
def sm_count(host):
    host.sm_count = lambda device: 132


@wrapt.when_imported("shim.kernels.ggml.repack")
def plain_tiles(repack):
    def tiles(raw, type, columns):
        """[rows, bytes of a row] -> [row tiles, column tiles, tile bytes]: row by row, each filled up with zeros."""
        held, width = repack.FORMS[type].row_bytes, bytes_of_256(type)
        high, wide = -(-raw.shape[0] // repack.ROWS), -(-columns // repack.COLUMNS)
        filled = raw.new_zeros(high * repack.ROWS, wide * width)
        filled[: raw.shape[0], : raw.shape[1]] = raw
        out = raw.new_zeros(high, wide, repack.ROWS, held)
        out[..., :width] = filled.view(high, repack.ROWS, wide, width).transpose(1, 2)
        return out.flatten(2)

    repack._tiles = tiles


@wrapt.when_imported("shim.kernels.ggml.launch")
def any_activations(launch):
    import torch

    launch.ACTIVATIONS = (*launch.ACTIVATIONS, torch.float32)


@wrapt.when_imported("shim.kernels.gguf_linear.launch")
def linear_in_torch(launch):
    def linear(x, weight, out, workspace, plan=None):
        plan = launch.tune.plan(len(x), weight.rows, weight.columns, 132)
        if plan is not None:
            workspace.check(*launch.needs(plan, len(x), weight.rows))
        out.copy_(x @ values(weight, x.dtype).T)

    launch.linear = linear


@wrapt.when_imported("shim.kernels.gguf_moe.launch")
def moe_in_torch(launch):
    from shim.kernels.gguf_moe import reference

    def moe(x, experts, topk_ids, topk_weights, workspace, plan=None):
        slots, top_k = topk_ids.numel(), topk_ids.shape[1]
        plan = launch.tune.plan(slots, (12, 0))
        if plan.few:
            workspace.check(*launch.needs(launch._few(slots, top_k, experts, plan, 132), slots, top_k, experts))
        weights = (values(weight, x.dtype) for weight in experts)
        return reference.moe(x, *weights, topk_ids, topk_weights, x.dtype)

    launch.moe = moe


def bytes_of_256(type):
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[type]
    return 256 // block * size


seen = {}  # with the data, whose memory then stays its own; to compute it anew takes longer than all else


def values(weight, dtype):
    """What the tiles hold as numbers, [..., rows, columns]."""
    import gguf
    import torch

    from shim.kernels.ggml.layout import PLAIN

    if weight.type in PLAIN:
        return weight.data.to(dtype)
    key = weight.data.data_ptr(), weight.data.shape, weight.type, dtype
    if key not in seen:
        width, block = bytes_of_256(weight.type), gguf.GGML_QUANT_SIZES[weight.type]
        *more, high, wide, _ = weight.data.shape
        rows = weight.data.view(*more, high, wide, 16, -1)[..., :width].transpose(-3, -2)
        raw = rows.reshape(*more, high * 16, wide * width)
        raw = raw[..., : weight.rows, : weight.columns // block[0] * block[1]].contiguous()
        seen[key] = weight.data, torch.from_numpy(gguf.dequantize(raw.numpy(), weight.type)).to(dtype)
    return seen[key][1]
