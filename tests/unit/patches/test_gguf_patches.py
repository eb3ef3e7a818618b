"""gguf_engine_args, gguf_loader and gguf_quantization on stand-ins with vLLM's signatures, and real GGUF files."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shim import ledger
from shim.gguf.files import GGUFProblem
from shim.patch import ShimError, State
from shim.patches import gguf_engine_args, gguf_loader, gguf_quantization


def engine_args(*, without: str = ""):
    fields = [
        ("model", str, "m"),
        ("model_loader_extra_config", dict, dataclasses.field(default_factory=dict)),
        ("load_format", str, "auto"),
        ("served_model_name", object, None),
    ]
    fields += [(name, object, None) for name in ("hf_config_path", "tokenizer", "quantization", "speculative_config")]
    fields += [
        ("additional_config", dict, dataclasses.field(default_factory=dict)),
        ("tensor_parallel_size", int, 1),
        ("data_parallel_size", int, 1),
        ("enable_expert_parallel", bool, False),
        ("enable_eplb", bool, False),
        ("all2all_backend", str, "allgather_reducescatter"),
    ]

    def __post_init__(self):
        self.seen_by_vllm = self.model

    return dataclasses.make_dataclass(
        "EngineArgs", [f for f in fields if f[0] != without], namespace={"__post_init__": __post_init__}
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """gpu(True): this machine has an NVIDIA GPU. It has none by default."""

    def pretend(has_gpu):
        monkeypatch.setattr(gguf_engine_args, "on_nvidia", lambda: has_gpu)

    pretend(False)
    monkeypatch.setitem(sys.modules, "shim.quantization.config", SimpleNamespace())  # imports vLLM
    return pretend


@pytest.fixture
def args(stub, switch_on):
    module = stub(gguf_engine_args.PATCH, EngineArgs=engine_args())
    switch_on(gguf_engine_args.PATCH)
    return module.EngineArgs


def entry(name: str) -> dict:
    return next(e for e in ledger.entries() if e["name"] == name)


@pytest.mark.parametrize("part", [1, 3])
def test_any_part_becomes_a_directory_and_weights(args, tiny, cache, part):
    named = tiny.with_name(tiny.name.replace("-00001-", f"-0000{part}-"))
    made = args(model=str(named))
    assert Path(made.model).parent == cache
    assert made.seen_by_vllm == made.model
    assert made.model_loader_extra_config == {"gguf": str(tiny)}
    assert made.load_format == "glm5_gguf"
    assert made.served_model_name == [str(named)]
    assert json.loads((Path(made.model) / "config.json").read_text())["model_type"] == "glm_moe_dsa"
    assert (Path(made.model) / "tokenizer.json").exists()
    assert entry("gguf_engine_args")["used"]


def test_what_the_user_set_stays(args, tiny):
    made = args(
        model=str(tiny), served_model_name="glm", tokenizer="/theirs", hf_config_path="/config", load_format="dummy"
    )
    assert (made.served_model_name, made.tokenizer, made.hf_config_path, made.load_format) == (
        "glm",
        "/theirs",
        "/config",
        "dummy",
    )


def test_other_models_are_not_touched(args, tmp_path):
    made = args(model="org/name", load_format="safetensors")
    assert (made.model, made.model_loader_extra_config, made.load_format, made.served_model_name) == (
        "org/name",
        {},
        "safetensors",
        None,
    )
    assert "org/name is not a GGUF" in entry("gguf_engine_args")["idle"]


def test_weights_stay_quantised_on_a_gpu(args, tiny, gpu):
    assert args(model=str(tiny)).quantization is None
    assert args(model=str(tiny), quantization="gguf").quantization is None
    with pytest.raises(GGUFProblem, match="--quantization glm5_gguf needs an NVIDIA GPU"):
        args(model=str(tiny), quantization="glm5_gguf")
    gpu(True)
    for asked in (None, "gguf", "glm5_gguf"):
        assert args(model=str(tiny), quantization=asked).quantization == "glm5_gguf"


def test_the_types_are_in_what_vllm_hashes(args, tiny, gpu):
    from shim.gguf.files import open_model
    from shim.gguf.quantised_layers import types_digest

    assert args(model=str(tiny)).additional_config == {}
    gpu(True)
    theirs = {"of the user": 1}
    made = args(model=str(tiny), additional_config=theirs).additional_config
    assert made == {"of the user": 1, "glm5_gguf_types": types_digest(open_model(tiny))} and len(theirs) == 1


def test_weights_do_not_stay_quantised_for_a_16_bit_file_or_another_setting(args, tiny, tmp_path, gpu):
    from shim.gguf.tiny import write_tiny

    gpu(True)
    assert args(model=str(write_tiny(tmp_path, mix="bf16", parts=1))).quantization is None
    assert args(model=str(tiny), quantization="fp8").quantization == "fp8"
    assert args(model=str(tiny), load_format="dummy").quantization is None


def test_a_tensor_parallel_size_that_cuts_a_block(args, tiny, gpu):
    assert args(model=str(tiny), tensor_parallel_size=2).quantization is None
    gpu(True)
    with pytest.raises(GGUFProblem, match=r"size 2 cuts blk\.1\.ffn_down_exps.*Q6_K's block of 256.*that work: 1$"):
        args(model=str(tiny), tensor_parallel_size=2)
    made = args(model=str(tiny), tensor_parallel_size=2, enable_expert_parallel=True)
    assert made.quantization == "glm5_gguf"
    with pytest.raises(GGUFProblem, match="size 2 cuts"):
        args(model=str(tiny), data_parallel_size=2)
    assert args(model=str(tiny), tensor_parallel_size=2, quantization="fp8").quantization == "fp8"


def test_modes_that_move_experts_or_tokens(args, tiny, gpu):
    asked = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "deepep_high_throughput"}
    assert args(model=str(tiny), enable_eplb=True, **asked).quantization is None
    gpu(True)
    with pytest.raises(GGUFProblem, match="--enable-eplb"):
        args(model=str(tiny), enable_eplb=True)
    with pytest.raises(GGUFProblem, match="--all2all-backend deepep_high_throughput"):
        args(model=str(tiny), **asked)


def test_mtp_needs_a_nextn_block(args, tiny, tmp_path):
    from shim.gguf.tiny import write_tiny

    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    assert args(model=str(tiny), speculative_config=mtp).load_format == "glm5_gguf"
    with pytest.raises(GGUFProblem, match="has no NextN block"):
        args(model=str(write_tiny(tmp_path, nextn=0, parts=1)), speculative_config=mtp)


def test_a_missing_part_is_named(args, tiny, tmp_path):
    for part in tiny.parent.glob("*.gguf"):
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / tiny.name.replace("-00001-", "-00002-")).unlink()
    with pytest.raises(GGUFProblem, match="-00002-of-00004.gguf"):
        args(model=str(tmp_path / tiny.name))


def test_engine_args_off_by_skip(stub, switch_on, tiny):
    module = stub(gguf_engine_args.PATCH, EngineArgs=engine_args())
    switch_on(gguf_engine_args.PATCH, skip=frozenset({"gguf_engine_args"}))
    assert module.EngineArgs(model=str(tiny)).model == str(tiny)


def test_engine_args_without_a_field(stub, switch_on):
    stub(gguf_engine_args.PATCH, EngineArgs=engine_args(without="model_loader_extra_config"))
    with pytest.raises(ShimError, match="EngineArgs has no field model_loader_extra_config"):
        switch_on(gguf_engine_args.PATCH)


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def download_model(self, model_config):
        raise NotImplementedError

    def load_weights(self, model, model_config):
        raise NotImplementedError

    def load_model(self, vllm_config, model_config, prefix=""):
        self.load_weights(self.model, model_config)
        return self.model


@pytest.fixture
def loaders(stub):
    table = {}

    def register_model_loader(load_format):
        return lambda cls: table.setdefault(load_format, cls)

    return stub(
        gguf_loader.PATCH,
        BaseModelLoader=BaseModelLoader,
        register_model_loader=register_model_loader,
        get_model_loader=lambda load_config: table[load_config.load_format](load_config),
        table=table,
    )


class Model:
    """Loads every weight that it gets. `more` names parameters that it has besides."""

    def __init__(self, more=()):
        self.got = {}
        self.more = more

    def load_weights(self, weights):
        self.got = {name: tuple(tensor.shape) for name, tensor in weights}
        return set(self.got)

    def named_parameters(self):
        return [(name, None) for name in (*self.got, *self.more)]


def config(**more):
    return SimpleNamespace(**{"quantization": None, "runner_type": "generate", "dtype": torch.float32, **more})


def load_config(path):
    return SimpleNamespace(load_format="glm5_gguf", model_loader_extra_config={"gguf": str(path)})


def test_the_loader_is_one_of_vllms_and_fills_the_model(loaders, switch_on, tiny):
    switch_on(gguf_loader.PATCH)
    loader = loaders.get_model_loader(load_config(tiny))
    assert isinstance(loader, BaseModelLoader)
    model = Model()
    loader.load_weights(model, config())
    assert model.got["model.layers.0.self_attn.kv_b_proj.weight"] == (8 * (192 + 256), 512)
    assert model.got["model.layers.1.mlp.experts.7.down_proj.weight"] == (256, 256)
    assert not any(name.startswith("model.layers.4.") for name in model.got)  # the NextN block
    assert entry("gguf_loader")["used"]


def test_a_draft_model_gets_the_nextn_block(loaders, switch_on, tiny):
    switch_on(gguf_loader.PATCH)
    model = Model()
    loader = loaders.get_model_loader(load_config(tiny))
    loader.model = model
    draft = config(runner_type="draft")
    loader.load_model(SimpleNamespace(model_config=draft), draft)
    assert all(name.startswith("model.layers.4.") for name in model.got)
    assert model.got["model.layers.4.eh_proj.weight"] == (256, 512)
    assert model.got["model.layers.4.shared_head.head.weight"] == model.got["model.layers.4.embed_tokens.weight"]


def test_a_parameter_without_a_weight_is_an_error(tiny):
    with pytest.raises(GGUFProblem, match="1 parameters of the model are not set by the file: lm_head.extra"):
        gguf_loader.load(Model(more=("lm_head.extra",)), config(), str(tiny))


def test_loader_off_by_skip(loaders, switch_on):
    switch_on(gguf_loader.PATCH, skip=frozenset({"gguf_loader"}))
    assert loaders.table == {}


def test_loader_unknown_signature(stub, switch_on):
    stub(gguf_loader.PATCH, BaseModelLoader=BaseModelLoader, register_model_loader=lambda name, cls: cls)
    with pytest.raises(ShimError, match=r"register_model_loader takes \(name, cls\), expected \(load_format\)"):
        switch_on(gguf_loader.PATCH)


def test_a_failed_registration_is_found(loaders, switch_on):
    loaders.get_model_loader = lambda load_config: BaseModelLoader(load_config)
    with pytest.raises(ShimError, match="load format glm5_gguf gives BaseModelLoader"):
        switch_on(gguf_loader.PATCH)


def test_a_second_activation_registers_once(loaders, switch_on):
    engine = switch_on(gguf_loader.PATCH)
    first = loaders.table["glm5_gguf"]
    engine.arm()
    assert loaders.table["glm5_gguf"] is first
    assert engine.records["gguf_loader"].state is State.APPLIED


@pytest.fixture
def weight_utils(stub):
    return stub(gguf_quantization.PATCH, get_quant_config=lambda model_config, load_config: "vLLM's")


def test_the_quantisation_is_ours_for_our_load_format_only(weight_utils, switch_on, monkeypatch, tiny):
    from gguf import GGMLQuantizationType as Type

    ours = type("Glm5GGUFConfig", (), {"__init__": lambda self, plan: setattr(self, "plan", plan)})
    monkeypatch.setitem(sys.modules, "shim.quantization.config", SimpleNamespace(Glm5GGUFConfig=ours))
    switch_on(gguf_quantization.PATCH)

    def ask(load_format, quantization):
        return weight_utils.get_quant_config(
            SimpleNamespace(quantization=quantization),
            SimpleNamespace(load_format=load_format, model_loader_extra_config={"gguf": str(tiny)}),
        )

    assert ask("gguf", "gguf") == ask("glm5_gguf", "fp8") == ask("auto", None) == "vLLM's"
    found = ask("glm5_gguf", "glm5_gguf")
    assert isinstance(found, ours) and found.plan.layers["lm_head"] == (Type.Q8_0,)
    assert entry("gguf_quantization")["used"]


def test_quantisation_off_by_skip_and_once(weight_utils, off_and_twice):
    off_and_twice(weight_utils, gguf_quantization.PATCH)


def test_quantisation_unknown_signature(stub, switch_on):
    stub(gguf_quantization.PATCH, get_quant_config=lambda model_config: None)
    with pytest.raises(ShimError, match=r"get_quant_config takes \(model_config\), expected"):
        switch_on(gguf_quantization.PATCH)
