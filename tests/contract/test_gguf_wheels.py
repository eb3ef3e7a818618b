"""The shim's loader, on the sources of real, unmodified GPU wheels: vLLM's own GLM-5 model is built on the CPU and
filled from a GGUF that stays quantised, into the GGUF layers of the tree (up to 0.23) or of vllm-gguf-plugin.

A forward pass would need the wheel's kernels. So each layer computes its product alone, with its kernel in torch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from wheels import gguf_plugin, some

WHEELS = some("0.23.0", "0.33.0", more=("0.16.0", "0.26.0"))
IN_TREE = ("0.16.0", "0.23.0")
SKIP = "cpu_packaging,cpu_linear"
NO_CPU = ",cpu_backend,cpu_indexer,cpu_indexer_op,cpu_rotary"

LOAD = """
import os, sys
sys.path[:0] = os.environ["MORE_PATH"].split(os.pathsep) if os.environ["MORE_PATH"] else []
import gguf, numpy as np, torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
from gguf import GGMLQuantizationType
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

def dequantised(weight, kind, dtype):
    return torch.from_numpy(gguf.dequantize(weight.contiguous().numpy(), GGMLQuantizationType(int(kind)))).to(dtype)
def mul_mat(weight, x, kind, row):
    return x @ dequantised(weight, kind, x.dtype).T

import vllm.model_executor.models.registry as registry
registry._run_in_subprocess = lambda function: function()  # a child of this child would lack the stand-ins
torch.accelerator.empty_cache = lambda: None
if not hasattr(torch.ops._C, "silu_and_mul"):
    torch.library.define("_C::silu_and_mul", "(Tensor! out, Tensor x) -> ()")
if "0.16.0" in vllm.__path__[0]:  # the shim runs no CPU engine of that age
    backend = "shim.attention.backend.ReferenceMLASparseBackend"
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: backend)
try:  # the dense prefill's kernels, which are never called
    import vllm.v1.attention.backends.fa_utils as kernels
    kernels.compile_flash_attn_varlen_func_from_specs = None
    kernels.flash_attn_varlen_func = lambda *args, **kwargs: None
    import vllm.v1.attention.backends.mla.prefill.flash_attn as prefill
    prefill.flash_attn_varlen_func = kernels.flash_attn_varlen_func
except ImportError:
    pass

path, rank, ranks = os.environ["GGUF"], int(os.environ.get("RANK", 0)), int(os.environ.get("RANKS", 1))
arguments = EngineArgs(
    model=path, dtype="float32", quantization="gguf", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True,
    tensor_parallel_size=ranks,
)
try:
    from vllm_gguf_plugin import ops
except ImportError:
    from vllm import _custom_ops as ops
ops.ggml_mul_mat_a8 = ops.ggml_mul_mat_vec_a8 = mul_mat
config = arguments.create_engine_config()
from vllm.model_executor.model_loader import get_model
with set_current_vllm_config(config):
    init_distributed_environment(ranks, rank, "file://" + os.environ["MEETING"], rank, "gloo")
    initialize_model_parallel(ranks, 1)
    model = get_model(vllm_config=config)

from shim.gguf.files import open_model
from shim.gguf.tensors import weights
dense = dict(weights(open_model(path)))
def part(names, axis):
    pieces = [dense[name].float() for name in names]
    if axis is not None:
        pieces = [piece.chunk(ranks, dim=axis)[rank] for piece in pieces]
    return torch.cat(pieces)

FUSED = {
    "fused_qkv_a_proj": (("q_a_proj", "kv_a_proj_with_mqa"), None), "gate_up_proj": (("gate_proj", "up_proj"), 0),
    "q_b_proj": (("q_b_proj",), 0), "o_proj": (("o_proj",), 1), "down_proj": (("down_proj",), 1),
    "wq_b": (("wq_b",), None), "kv_b_proj": (("kv_b_proj",), 0),
    "wk_weights_proj": (("wk", "weights_proj"), None), "wk": (("wk",), None), "weights_proj": (("weights_proj",), None),
}
methods, wrong, experts = {}, [], {}
for name, module in model.named_modules():
    stem, _, last = name.rpartition(".")
    method = type(getattr(module, "quant_method", None)).__name__
    if last in FUSED and hasattr(module, "input_size"):
        sources, axis = FUSED[last]
        if getattr(module, "disable_tp", False): axis = None
        wanted = part([f"{stem}.{source}.weight" for source in sources], axis)
        x = torch.randn(3, wanted.shape[1])
        got = module.quant_method.apply(module, x)
        right = x @ wanted.T
        if got.shape != right.shape or not (got - right).abs().max() < 1e-4 * right.abs().max():
            wrong.append([name, method])
        methods.setdefault(method, []).append(name)
    if hasattr(module, "w13_qweight"):
        layer = name.removesuffix(".routed_experts")
        for number in range(module.w13_qweight.shape[0]):
            for parameter, kinds, sources, axis in (
                ("w13_qweight", "w13_qweight_type", ("gate_proj", "up_proj"), 0),
                ("w2_qweight", "w2_qweight_type", ("down_proj",), 1),
            ):
                wanted = part([f"{layer}.{number}.{source}.weight" for source in sources], axis)
                kind = GGMLQuantizationType(int(getattr(module, kinds).weight_type))
                got = dequantised(getattr(module, parameter)[number].data, kind, torch.float32)
                if got.shape != wanted.shape or not torch.equal(got, wanted):
                    wrong.append([name, parameter, number])
        experts[name] = [list(module.w13_qweight.shape), list(module.w2_qweight.shape)]
head = model.lm_head
rows = dense["lm_head.weight"].float().chunk(ranks)[rank]
x = torch.randn(3, rows.shape[1])
if not torch.allclose(head.quant_method.apply(head, x)[:, : len(rows)], x @ rows.T, atol=1e-4):
    wrong.append(["lm_head"])
embed = model.model.embed_tokens
if not torch.equal(embed.weight.data[: len(rows)].float(), dense["model.embed_tokens.weight"].chunk(ranks)[rank]):
    wrong.append(["embed_tokens"])
say({"methods": {m: len(n) for m, n in methods.items()}, "wrong": wrong, "experts": experts,
     "head": type(head.quant_method).__name__, "dtypes": str(config.quant_config.get_supported_act_dtypes())})
"""


@pytest.fixture(scope="session")
def plugin() -> Path:
    return gguf_plugin()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Half-quantised and differently quantised pairs among whole ones; experts wide enough to be cut in two."""
    from gguf import GGMLQuantizationType as Type

    from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

    shape = Shape(layers=3, nextn=1, experts=4, ffn=1024, moe_ffn=512)
    tensors = tiny_tensors(shape, 1, "ud")
    for name, kind in {
        "blk.0.attn_q_a.weight": Type.Q6_K,
        "blk.1.attn_q_a.weight": Type.BF16,
        "blk.0.ffn_up.weight": Type.Q5_K,
        "blk.2.ffn_up_shexp.weight": Type.F16,
    }.items():
        tensors[name] = (tensors[name][0], kind)
    return write_gguf(tmp_path_factory.mktemp("tiny"), "tiny", tiny_metadata(shape), tensors, 2)


@pytest.fixture(scope="module")
def load(child, plugin, tiny, tmp_path_factory):
    """load(version, ranks): what each rank found, all of them at the same time."""

    def run(version: str, ranks: int = 1) -> list:
        common = {
            "GGUF": str(tiny),
            "MORE_PATH": "" if version in IN_TREE else str(plugin),
            "MEETING": str(tmp_path_factory.mktemp("meeting") / "file"),
            "GLM5_SHIM_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
            "GLM5_SHIM_SKIP": SKIP + (NO_CPU if version == "0.16.0" else ""),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "RANKS": str(ranks),
        }
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(lambda rank: child(LOAD, version, RANK=str(rank), **common), range(ranks)))

    return run


@pytest.fixture(scope="module", params=WHEELS)
def loaded(request, load):
    return load(request.param)[0]


@pytest.mark.parametrize("version", some("0.33.0", more=("0.23.0", "0.26.0")))
def test_each_of_two_ranks_holds_its_share(load, version):
    first, second = load(version, 2)
    assert first["wrong"] == []
    assert second["wrong"] == []
    assert first["experts"] == second["experts"]
    for up, down in first["experts"].values():
        assert up == [4, 512, 144] and down[:2] == [4, 256] and down[2] in (176, 210)


def test_every_layer_computes_the_product_with_the_dequantised_weights(loaded):
    assert loaded["wrong"] == []


def test_the_layers_are_vllms_own_quantised_ones(loaded):
    """3 layers: qkv_a (1 half-quantised), q_b, o, wq_b; 1 dense gate_up and down; 2 shared gate_up (1 so) and down."""
    assert loaded["methods"]["GGUFLinearMethod"] == (3 - 1) + 3 + 3 + 3 + 2 + (2 - 1) + 2
    assert loaded["head"] == "GGUFEmbeddingMethod"
    assert len(loaded["experts"]) == 2
    (first, second), *_ = loaded["experts"].values()
    assert first == [4, 1024, 144] and second == [4, 256, 2 * 210]  # Q4_K rows of 256, Q6_K rows of 512


def test_bf16_is_accepted(loaded):
    assert "bfloat16" in loaded["dtypes"]
