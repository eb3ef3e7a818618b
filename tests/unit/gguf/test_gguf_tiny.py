from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shim
from shim.gguf.config import hf_config
from shim.gguf.files import open_model
from shim.gguf.names import require_complete
from shim.gguf.tiny import write_tiny

FOLDER = Path(shim.__file__).parent / "gguf"


def test_the_same_arguments_give_the_same_bytes(tiny, tmp_path):
    again = write_tiny(tmp_path)
    for number in (1, 2, 3, 4):
        name = f"tiny-glm5-0000{number}-of-00004.gguf"
        assert again.with_name(name).read_bytes() == tiny.with_name(name).read_bytes()


def test_another_seed_gives_other_weights(tiny, tmp_path):
    other = write_tiny(tmp_path, seed=1)
    name = "tiny-glm5-00003-of-00004.gguf"
    assert other.with_name(name).read_bytes() != tiny.with_name(name).read_bytes()
    assert other.read_bytes() == tiny.read_bytes()  # metadata and tokenizer


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts(tmp_path, parts):
    model = open_model(write_tiny(tmp_path, layers=2, parts=parts))
    assert len(model.parts) == parts
    assert (model.parts[0].tensors == 0) == (parts > 1)
    assert all(part.tensors for part in model.parts[1:])
    require_complete(model)


@pytest.mark.parametrize(("mix", "types"), [("q8_0", {"Q8_0", "F32"}), ("bf16", {"BF16", "F32"}), ("f32", {"F32"})])
def test_mixes(tmp_path, mix, types):
    model = open_model(write_tiny(tmp_path, layers=2, mix=mix, parts=1))
    assert {tensor.type.name for tensor in model.tensors.values()} == types
    require_complete(model)


def test_unknown_mix(tmp_path):
    with pytest.raises(KeyError):
        write_tiny(tmp_path, mix="q3")


def test_it_is_laid_out_like_unsloths(tiny_model):
    names = list(tiny_model.tensors)
    assert names.index("blk.1.attn_kv_a_mqa.weight") < names.index("blk.1.attn_q_a.weight")
    kinds = {name: tensor.type.name for name, tensor in tiny_model.tensors.items()}
    assert kinds["blk.1.ffn_down_exps.weight"] == "Q6_K" and kinds["blk.2.ffn_down_exps.weight"] == "Q5_K"
    assert kinds["blk.2.ffn_gate_exps.weight"] == kinds["blk.2.ffn_up_exps.weight"] == "Q4_K"
    assert kinds["blk.2.attn_k_b.weight"] == kinds["blk.2.indexer.attn_k.weight"] == "Q8_0"
    for name in ("indexer.proj.weight", "ffn_gate_inp.weight", "exp_probs_b.bias", "attn_norm.weight"):
        assert kinds[f"blk.2.{name}"] == "F32"


def test_geometry_follows_the_arguments(tmp_path):
    config = hf_config(open_model(write_tiny(tmp_path, layers=5, dense=2, nextn=0, topk=32, context=1048576)))
    assert (config["num_hidden_layers"], config["first_k_dense_replace"], config["num_nextn_predict_layers"]) == (
        5,
        2,
        0,
    )
    assert config["index_topk"] == 32
    assert config["index_topk_pattern"] == "FFFSS"


def test_the_folder_knows_nothing_of_vllm_and_opens_without_torch():
    script = (
        "import sys; import shim.gguf.files, shim.gguf.config, shim.gguf.names, shim.gguf.hf_directory;"
        "import shim.commands.gguf;"
        "print([m for m in ('vllm', 'torch', 'transformers', 'tokenizers', 'shim.engine') if m in sys.modules])"
    )
    run = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(FOLDER.parents[1]), *sys.path]!r}; {script}"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            foreign = [
                n for n in names if n.startswith("vllm") or (n.startswith("shim.") and not n.startswith("shim.gguf"))
            ]
            assert not foreign, (file.name, foreign)
