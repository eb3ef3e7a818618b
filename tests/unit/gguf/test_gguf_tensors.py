from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.tensors import dense, kv_b, weights
from shim.gguf.tiny import tiny_tensors

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
HEADS, NOPE, V, LORA = 2, 192, 256, 256


def fused_by_hand(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """k [H, lora, nope], v [H, v, lora] -> [H * (nope + v), lora], one head after the other."""
    return np.concatenate([np.concatenate([k[head].T, v[head]]) for head in range(len(k))])


def test_names_and_shapes_are_those_of_the_checkpoint(tiny_model):
    """Against transformers' own model: every parameter, experts apart, exactly once."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from shim.gguf.config import hf_config

    with torch.device("meta"):
        wanted = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**hf_config(tiny_model))).state_dict()
    plain = {name: tuple(tensor.shape) for name, tensor in wanted.items() if ".experts." not in name}
    got = [(name, tuple(tensor.shape)) for name, tensor in weights(tiny_model)]
    assert len(got) == len(dict(got))
    experts = {name: shape for name, shape in got if ".experts." in name}
    assert dict(got).items() - experts.items() == plain.items()
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight": (256, 256)
        for layer in (1, 2, 3)
        for expert in range(8)
        for projection in ("gate", "up", "down")
    }


def test_values_are_the_dequantised_ones(tiny_model):
    got = dict(weights(tiny_model))
    for name, hf in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.3.exp_probs_b.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("blk.2.indexer.attn_k.weight", "model.layers.2.self_attn.indexer.wk.weight"),
    ):
        tensor = tiny_model.tensors[name]
        assert got[hf].dtype == torch.float32
        assert np.array_equal(got[hf].numpy(), gguf.dequantize(tensor.raw(), tensor.type))
    for projection in ("gate", "up", "down"):
        stacked = tiny_model.tensors[f"blk.2.ffn_{projection}_exps.weight"]
        whole = gguf.dequantize(stacked.raw(), stacked.type)
        for expert in (0, 3, 7):
            name = f"model.layers.2.mlp.experts.{expert}.{projection}_proj.weight"
            assert np.array_equal(got[name].numpy(), whole[expert])


def test_quantised_weights_are_close_to_the_ones_written(tiny_model):
    from shim.gguf.tiny import Shape

    written = tiny_tensors(Shape(), seed=0)
    for name in (
        "blk.1.ffn_gate_exps.weight",
        "blk.1.ffn_down_exps.weight",
        "blk.2.ffn_down_exps.weight",
        "output.weight",
    ):
        values, _ = written[name]
        error = dense(tiny_model.tensors[name]).numpy() - values
        assert np.sqrt((error**2).mean()) < 0.08 * values.std()


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q5_0])
def test_kv_b_is_rebuilt_bit_for_bit(make, small_tensors, kind):
    k, v = (small_tensors[f"blk.0.attn_{half}_b.weight"][0] for half in "kv")
    halves = {"blk.0.attn_k_b.weight": (k, kind), "blk.0.attn_v_b.weight": (v, kind)}
    got = dict(weights(open_model(make(tensors=halves))))[KV_B].float().numpy()
    k, v = (gguf.dequantize(gguf.quantize(x, kind), kind).reshape(x.shape) for x in (k, v))
    assert got.shape == (HEADS * (NOPE + V), LORA)
    assert np.array_equal(got, fused_by_hand(k, v))


def test_kv_b_of_two_types(make, small_tensors):
    k, v = (small_tensors[f"blk.0.attn_{half}_b.weight"][0] for half in "kv")
    halves = {"blk.0.attn_k_b.weight": (k, Type.Q5_1), "blk.0.attn_v_b.weight": (v, Type.BF16)}
    got = kv_b(open_model(make(tensors=halves)), 0)
    k, v = (gguf.dequantize(gguf.quantize(x, t), t).reshape(x.shape) for x, t in ((k, Type.Q5_1), (v, Type.BF16)))
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), fused_by_hand(k, v))


def test_legacy_fused_kv_b(make, small_tensors):
    k, v = (small_tensors[f"blk.0.attn_{half}_b.weight"][0] for half in "kv")
    fused = fused_by_hand(k, v)
    tensors = {
        "blk.0.attn_k_b.weight": None,
        "blk.0.attn_v_b.weight": None,
        "blk.0.attn_kv_b.weight": (fused, Type.F32),
    }
    names = [name for name, _ in weights(open_model(make(tensors=tensors)))]
    assert names.count(KV_B) == 1
    assert np.array_equal(dict(weights(open_model(make(tensors=tensors))))[KV_B].numpy(), fused)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F32, torch.float32), (Type.F16, torch.float16), (Type.BF16, torch.bfloat16)]
)
def test_plain_types_stay_as_they_are(make, kind, dtype):
    values = np.random.default_rng(1).standard_normal((512, 256)).astype(np.float32)
    got = dict(weights(open_model(make(tensors={"output.weight": (values, kind)}))))["lm_head.weight"]
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(values).to(dtype))


def test_nextn_is_left_out_unless_asked_for(tiny_model):
    main = {name for name, _ in weights(tiny_model)}
    every = {name for name, _ in weights(tiny_model, nextn=True)}
    extra = every - main
    assert not any(name.startswith("model.layers.4.") for name in main)
    assert all(name.startswith("model.layers.4.") for name in extra)
    wanted = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.kv_b_proj", "mlp.experts.7.down_proj")
    assert {f"model.layers.4.{name}.weight" for name in wanted} <= extra


def test_shared_layers_hand_over_no_indexer(make):
    """unsloth's GLM-5.2 files carry one on every layer; GLM-5.2's checkpoint and model do not."""
    model = open_model(make(metadata={"glm-dsa.attention.indexer.types": [True, False]}))
    layers = {name.split(".")[2] for name, _ in weights(model, nextn=True) if ".indexer." in name}
    assert layers == {"0", "2"}


def test_experts_are_dequantised_one_at_a_time(tiny_model, monkeypatch):
    sizes = []
    real = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: sizes.append(data.shape) or real(data, kind))
    for name, _ in weights(tiny_model):
        if ".experts." in name:
            assert len(sizes[-1]) == 2


def test_tensors_own_their_memory(make):
    """A view of the file would die, or change, with it."""
    path = make()
    model = open_model(path)
    norm = dense(model.tensors["output_norm.weight"])
    norm += 1
    assert not np.array_equal(norm.numpy(), model.tensors["output_norm.weight"].raw())


def test_an_incomplete_file_fails_before_the_first_tensor(make):
    model = open_model(make(tensors={"blk.1.ffn_up_exps.weight": None}))
    with pytest.raises(GGUFProblem, match=r"blk\.1\.ffn_up_exps\.weight"):
        next(weights(model))


def test_a_wrong_shape_fails_before_the_first_tensor(make):
    model = open_model(make(tensors={"blk.0.attn_q_a.weight": (np.zeros((128, 256), np.float32), Type.F32)}))
    with pytest.raises(GGUFProblem, match=r"blk\.0\.attn_q_a\.weight has shape \(128, 256\), expected \(256, 256\)"):
        next(weights(model))
