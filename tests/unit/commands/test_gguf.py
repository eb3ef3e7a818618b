from __future__ import annotations

import json

import numpy as np
from gguf import GGMLQuantizationType as Type

from shim.commands.gguf import report
from shim.gguf.config import hf_config
from shim.gguf.files import open_model
from shim.gguf.quantised_layers import layer_kind


def test_shape_of_the_answer(tiny_model):
    answer = json.loads(json.dumps(report(tiny_model)))
    assert {"arch", "config", "parts", "quant_types", "tensors", "memory", "problems"} <= set(answer)
    assert answer["arch"] == "glm-dsa" and answer["problems"] == []
    assert answer["config"] == hf_config(tiny_model)
    assert [set(part) for part in answer["parts"]] == [{"path", "tensors", "bytes"}] * 4
    assert answer["quant_types"] == {"Q8_0": 58, "F32": 47, "Q4_K": 8, "Q5_K": 3, "Q6_K": 1}
    assert answer["tensors"] == {"mapped": 117, "unmapped": [], "missing": []}
    assert set(answer["memory"]["per_gpu"]) == {"1", "2", "4", "8"}


def test_memory_by_hand(make, small_tensors):
    """All tensors are F32, so every size is plain arithmetic. What vLLM does not quantise counts as bf16, and what it
    replicates counts in full."""
    model = open_model(make(tensors={name: (values, Type.F32) for name, (values, _) in small_tensors.items()}))
    memory = report(model, tp=(1, 4))["memory"]
    sharded = replicated = nextn = 0
    for name, (values, _) in small_tensors.items():
        bf16 = any(part in name for part in ("token_embd", "k_b.", "v_b.", "attn_k.", "indexer.proj.", "eh_proj"))
        size = values.size * (2 if bf16 or layer_kind(name) else 4)
        if name.startswith("blk.2."):
            nextn += size
        elif any(part in name for part in ("norm", "gate_inp", "exp_probs_b", "indexer", "attn_q_a.", "kv_a_mqa")):
            replicated += size
        else:
            sharded += size
    assert memory["weights_bytes"] == sharded + replicated == memory["per_gpu"]["1"]
    assert memory["nextn_bytes"] == nextn
    assert memory["per_gpu"]["4"] == replicated + sharded // 4


def test_other_gpu_counts(tiny_model):
    assert set(report(tiny_model, tp=(16,))["memory"]["per_gpu"]) == {"16"}


def test_missing_unmapped_and_misshapen_tensors_are_problems(make):
    model = open_model(
        make(
            tensors={
                "blk.1.attn_norm.weight": None,
                "blk.1.attn_sinks.weight": (np.zeros(8, np.float32), Type.F32),
                "output_norm.weight": (np.zeros(8, np.float32), Type.F32),
            }
        )
    )
    answer = report(model)
    assert answer["tensors"]["unmapped"] == ["blk.1.attn_sinks.weight"]
    assert answer["tensors"]["missing"] == ["model.layers.1.input_layernorm.weight (blk.1.attn_norm.weight)"]
    assert answer["problems"] == [
        "tensor blk.1.attn_sinks.weight has no place in GLM-5",
        "tensor model.layers.1.input_layernorm.weight (blk.1.attn_norm.weight) is missing",
        "output_norm.weight has shape (8,), expected (256,)",
    ]


def test_memory_counts_tiles(make, small_tensors):
    """Q8_0 holds 34 bytes of 32 columns; a rank's 128 columns take as much as 256. TQ1_0 is held as TQ2_0."""
    name = "blk.1.ffn_down_exps.weight"
    kinds = {size: {name: (small_tensors[name][0], kind)} for size, kind in ((0, Type.BF16), (34 * 8, Type.Q8_0))}
    kinds[66] = {name: (small_tensors[name][0], Type.TQ1_0)}
    found = {size: report(open_model(make(tensors=kind)), tp=(1, 2))["memory"] for size, kind in kinds.items()}
    values = small_tensors[name][0].size
    for size in (34 * 8, 66):
        assert found[size]["weights_bytes"] - found[0]["weights_bytes"] == values // 256 * size - 2 * values
        assert found[size]["per_gpu"]["2"] - found[0]["per_gpu"]["2"] == values // 256 * size - values


def test_any_mixture_is_fine(make, small_tensors):
    mixed = {"blk.0.attn_q_a.weight": Type.Q6_K, "blk.0.ffn_up.weight": Type.BF16}
    mixed |= {"blk.1.ffn_up_exps.weight": Type.Q6_K, "blk.1.ffn_down_exps.weight": Type.F16}
    changed = {name: (small_tensors[name][0], kind) for name, kind in mixed.items()}
    assert report(open_model(make(tensors=changed)))["problems"] == []


def test_tensor_parallel_sizes(tiny_model, make):
    assert report(tiny_model)["tensor_parallel"] == [1]  # experts are 256 wide, one block
    assert report(open_model(make(tensors={"output_norm.weight": None})))["tensor_parallel"] == []


def test_a_corrupt_number_of_heads_does_not_make_it_count_for_ever(make):
    answer = report(open_model(make(metadata={"glm-dsa.attention.head_count": 2**32 - 1})))
    assert answer["tensor_parallel"] == [] and any("attn_q_b.weight has shape" in line for line in answer["problems"])
