"""The shim's loader, on the sources of real, unmodified GPU wheels: vLLM's own GLM-5 model is built on the CPU and
filled from a GGUF that stays quantised, into the shim's layers.

A forward pass would need the wheel's kernels. So each layer computes its product alone, with its kernel in torch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from wheels import ROOT, some

WHEELS = some("0.16.0", "0.33.0", more=("0.23.0", "0.26.0"))
SKIP = "cpu_packaging,cpu_linear"
NO_CPU = ",cpu_backend,cpu_indexer,cpu_indexer_op,cpu_rotary"

LOAD = """
import os, runpy, sys
kernels = runpy.run_path(os.environ["KERNELS"])  # stand-ins for those of the shim
import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

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
    model=path, dtype="float32", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True,
    tensor_parallel_size=ranks, enable_expert_parallel=bool(os.environ.get("WHOLE_EXPERTS")),
    **({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if os.environ.get("MTP") else {}),
)
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
methods, wrong, experts, mtp, compiled = {}, [], {}, [], []
def near(got, right):
    return got.shape == right.shape and (got - right).abs().max() < 1e-4 * right.abs().max()

def routed(name, module):
    # The layer's answer, with ids of all ranks' experts and one that is to be skipped.
    layer = name.removesuffix(".routed_experts")
    whole = bool(os.environ.get("WHOLE_EXPERTS")) and ranks > 1
    x = torch.randn(5, module.moe_config.hidden_dim)
    ids = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [-1, 2]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    got = module.quant_method.apply(module, x, weights, ids, shared_experts_input=None)
    right = torch.zeros(5, x.shape[1])
    for token, choice in ((t, c) for t in range(5) for c in range(2)):
        number = int(ids[token, choice])
        if number < 0 or (whole and module.expert_map[number] < 0):
            continue
        axes = (None, None) if whole else (0, 1)
        gate, up = (part([f"{layer}.{number}.{one}_proj.weight"], axes[0]) for one in ("gate", "up"))
        down = part([f"{layer}.{number}.down_proj.weight"], axes[1])
        hidden = torch.nn.functional.silu(x[token] @ gate.T) * (x[token] @ up.T)
        right[token] += weights[token, choice] * (hidden @ down.T)
    return near(got, right)

def examine(model):
    for name, module in model.named_modules():
        stem, _, last = name.rpartition(".")
        stem = stem.replace(".mtp_block", "")
        method = type(getattr(module, "quant_method", None)).__name__
        if last in FUSED and hasattr(module, "input_size"):
            sources, axis = FUSED[last]
            if getattr(module, "disable_tp", False): axis = None
            wanted = part([f"{stem}.{source}.weight" for source in sources], axis)
            x = torch.randn(3, wanted.shape[1])
            if not near(module.quant_method.apply(module, x), x @ wanted.T):
                wrong.append([name, method])
            methods.setdefault(method, []).append(name)
            if last in ("o_proj", "gate_up_proj", "fused_qkv_a_proj") and ".1." in name and ranks == 1:  # as up to 0.28
                traced = torch.compile(module.quant_method.apply, backend="eager", fullgraph=True)
                if not near(traced(module, x), x @ wanted.T):
                    wrong.append([name, "traced"])
                compiled.append(last)
        if method == "Glm5GGUFExperts" and hasattr(module, "w2_qweight"):
            if not routed(name.replace(".mtp_block", ""), module):
                wrong.append([name, method])
            held = module.named_parameters(recurse=False)
            experts[name] = [[len(p), p.numel()] for key, p in held if "qweight" in key]

examine(model)
def head_is_right(head):
    rows = dense["lm_head.weight"].float().chunk(ranks)[rank]
    x = torch.randn(3, rows.shape[1])
    return torch.allclose(head.quant_method.apply(head, x)[:, : len(rows)], x @ rows.T, atol=1e-4)
if not head_is_right(model.lm_head):
    wrong.append(["lm_head"])
rows = dense["model.embed_tokens.weight"].chunk(ranks)[rank]
if not torch.equal(model.model.embed_tokens.weight.data[: len(rows)].float(), rows):
    wrong.append(["embed_tokens"])
if os.environ.get("MTP"):
    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        draft = get_model(vllm_config=config, model_config=draft_config)
    dense = dict(weights(open_model(path), nextn=True))
    examine(draft)
    mtp = [name for name, module in draft.named_modules() if type(getattr(module, "quant_method", None)).__name__
           == "Glm5GGUFLinear"]
    heads = [module for name, module in draft.named_modules() if name.endswith("shared_head.head")]
    if not all(map(head_is_right, heads)) or len(heads) != 1:
        wrong.append(["shared_head.head"])
before = config.compute_hash()
assert "glm5_gguf_types" in config.additional_config
config.additional_config = config.additional_config | {"glm5_gguf_types": "of another file"}
hashed = config.compute_hash() != before
import pickle
again = pickle.loads(pickle.dumps(type(config.quant_config)(config.quant_config.plan)))
say({"methods": {m: len(n) for m, n in methods.items()}, "wrong": wrong, "experts": experts, "mtp": len(mtp),
     "head": type(model.lm_head.quant_method).__name__, "dtypes": str(config.quant_config.get_supported_act_dtypes()),
     "name": config.model_config.quantization, "pickles": again.plan == config.quant_config.plan,
     "hashed": hashed, "compiled": sorted(compiled)})
"""


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
        "blk.1.ffn_up_exps.weight": Type.IQ3_S,
        "blk.2.ffn_down_exps.weight": Type.F16,
        "blk.2.ffn_up_shexp.weight": Type.F16,
    }.items():
        tensors[name] = (tensors[name][0], kind)
    return write_gguf(tmp_path_factory.mktemp("tiny"), "tiny", tiny_metadata(shape), tensors, 2)


@pytest.fixture(scope="module")
def load(child, tiny, tmp_path_factory):
    """load(version, ranks, **environment): what each rank found, all of them at the same time."""

    def run(version: str, ranks: int = 1, **more: str) -> list:
        common = {
            "GGUF": str(tiny),
            "KERNELS": str(ROOT / "tests/e2e/kernels_on_cpu/sitecustomize.py"),
            "MEETING": str(tmp_path_factory.mktemp("meeting") / "file"),
            "GLM5_SHIM_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
            "GLM5_SHIM_SKIP": SKIP + (NO_CPU if version == "0.16.0" else ""),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "RANKS": str(ranks),
            **more,
        }
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(lambda rank: child(LOAD, version, RANK=str(rank), **common), range(ranks)))

    return run


@pytest.fixture(scope="module", params=WHEELS)
def loaded(request, load):
    return load(request.param, MTP="1")[0]


@pytest.mark.parametrize("version", some("0.33.0", more=("0.16.0", "0.23.0", "0.26.0")))
def test_each_of_two_ranks_holds_its_share(load, version):
    first, second = load(version, 2)
    assert first["wrong"] == second["wrong"] == []
    assert first["experts"] == second["experts"]
    assert {count for held in first["experts"].values() for count, _ in held} == {4}


@pytest.mark.parametrize("version", some("0.33.0", more=("0.16.0", "0.23.0", "0.26.0")))
def test_each_of_two_ranks_holds_whole_experts(load, version):
    first, second = load(version, 2, WHOLE_EXPERTS="1")
    assert first["wrong"] == second["wrong"] == []
    assert {count for held in first["experts"].values() for count, _ in held} == {2}


def test_every_layer_computes_what_the_dequantised_file_says(loaded):
    assert loaded["wrong"] == []


def test_every_layer_that_can_be_is_ours(loaded):
    """4 layers with the draft's: qkv_a, q_b, o, wq_b; 1 dense gate_up and down; 3 shared gate_up and down."""
    assert loaded["methods"]["Glm5GGUFLinear"] == 4 * 4 + 2 + 3 * 2
    assert loaded["head"] == "Glm5GGUFLinear"
    assert len(loaded["experts"]) == 3 and loaded["mtp"] == 4 + 2 + 1


def test_the_config(loaded):
    assert loaded["name"] == "glm5_gguf" and loaded["pickles"]
    assert loaded["hashed"]  # two files of one config and other types have compiled graphs of their own
    assert loaded["compiled"] == ["fused_qkv_a_proj", "gate_up_proj", "o_proj"]
    assert "bfloat16" in loaded["dtypes"] and "float16" in loaded["dtypes"]
