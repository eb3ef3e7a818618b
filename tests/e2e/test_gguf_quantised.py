"""GLM-5 whose weights stay quantised: the shim's layers in the engine of the CPU wheel, only their kernels in torch,
against transformers in fp32 on the same weights dequantised.

Each file is another mixture of what converters and quantisers do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hf_reference import argmax_agreement, kl, logits

from shim.gguf.tiny import Shape, Tensors, tiny_metadata, tiny_tensors, write_gguf

SHAPE = Shape(layers=3)
TOKENS = 128  # twice the top-k


@dataclass(frozen=True)
class File:
    mix: str
    shape: Shape = SHAPE
    parts: int = 1
    empty_first: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)  # None drops a key
    kinds: dict[str, Type] = field(default_factory=dict)  # by the end of a name
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors

    def write(self, directory: Path) -> Path:
        metadata = {**tiny_metadata(self.shape, "file"), **self.metadata}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        tensors = self.change(tiny_tensors(self.shape, 5, self.mix))
        for end, kind in self.kinds.items():
            tensors |= {name: (values, kind) for name, (values, _) in tensors.items() if name.endswith(end)}
        return write_gguf(directory, "file", metadata, tensors, self.parts, empty_first=self.empty_first)


def backwards(tensors: Tensors) -> Tensors:
    return dict(reversed(tensors.items()))


def without_shared_indexers(tensors: Tensors) -> Tensors:
    return {name: held for name, held in tensors.items() if not name.startswith("blk.2.indexer")}


SHARED = {"glm-dsa.attention.indexer.types": [True, True, False, True]}
FILES = {
    "UD, 4 parts, kv_a before q_a": File("ud", parts=4),
    "K-quants, one file, q_a before kv_a, no NextN, no gating key": File(
        "k", replace(SHAPE, nextn=0), change=backwards, metadata={"glm-dsa.expert_gating_func": None}
    ),
    "Q2_K and Q3_K, 3 parts with tensors in the first": File("low", parts=3, empty_first=False),
    "IQ types, a shared indexer with its tensors, indexer.proj quantised": File(
        "iq", metadata=SHARED, kinds={"indexer.proj.weight": Type.Q8_0}
    ),
    "Q8_0, a shared indexer without tensors": File("q8_0", metadata=SHARED, change=without_shared_indexers),
    "half-quantised pairs, one layer of BF16 experts, a plain head": File(
        "ud",
        kinds={
            **{"attn_q_a.weight": Type.BF16, "0.ffn_up.weight": Type.F16, "1.ffn_gate_shexp.weight": Type.Q5_0},
            **{f"blk.2.ffn_{part}_exps.weight": Type.BF16 for part in ("gate", "up", "down")},
            **{"attn_k_b.weight": Type.Q5_0, "attn_v_b.weight": Type.BF16, "output.weight": Type.F16},
        },
    ),
    "gate unlike up, plain beside quantised experts, ternary and FP4": File(
        "ud",
        kinds={
            **{"0.ffn_gate.weight": Type.Q4_1, "0.ffn_up.weight": Type.TQ2_0, "0.ffn_down.weight": Type.MXFP4},
            **{"1.ffn_gate_exps.weight": Type.IQ1_S, "1.ffn_up_exps.weight": Type.MXFP4},
            **{"1.ffn_down_exps.weight": Type.TQ1_0, "2.ffn_gate_exps.weight": Type.BF16},
            **{"2.ffn_up_exps.weight": Type.IQ2_XXS, "2.ffn_down_exps.weight": Type.F16},
            **{"attn_kv_a_mqa.weight": Type.NVFP4, "1.attn_output.weight": Type.F32, "2.attn_q_b.weight": Type.NVFP4},
        },
    ),
    "BF16, 2 parts with tensors in the first": File("bf16", parts=2, empty_first=False),
    "F16": File("f16"),
    "F32": File("f32"),
}


PLAIN = ("BF16, 2 parts with tensors in the first", "F16", "F32")


@pytest.mark.parametrize("name", FILES)
def test_quantised(name, ask_engine, kernels, tokens, tmp_path):
    path = FILES[name].write(tmp_path)
    job = {"name": "teacher", "prompts": [tokens[:TOKENS]], "keep": "prompt"}
    found = ask_engine(path, [job], path=kernels, dtype="float32", max_num_batched_tokens=64)
    expected, got = logits(path, tokens[:TOKENS])[:-1], found["teacher/0"]
    divergence = kl(expected, got)
    print(f"\n{name}: KL {divergence:.1e}, argmax {argmax_agreement(expected, got):.3f}")
    assert np.isfinite(got).all()
    assert divergence < 1e-6
    assert argmax_agreement(expected, got) == 1.0
    assert found["quantization"] == ("None" if name in PLAIN else "glm5_gguf")
    (ledger,) = found["ledgers"]
    assert "gguf_loader" in {entry["name"] for entry in ledger["patches"] if entry.get("used")}
    if name not in PLAIN:
        assert "gguf_quantization" in {entry["name"] for entry in ledger["patches"] if entry.get("used")}
