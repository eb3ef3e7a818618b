"""A set of GLM-5's own size, in ten parts and typed as unsloth's UD-Q4_K_XL: the headers are written, the weights are
holes in the files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from shim import upstream
from shim.gguf import preflight
from shim.gguf.tiny import Shape, add_metadata, tiny_metadata

HIDDEN, VOCAB, MERGES, EXPERTS = 6144, 154880, 321649, 256
PARTS = 10
SHAPE = Shape(
    layers=78, dense=3, topk=2048, hidden=HIDDEN, ffn=12288, moe_ffn=2048, heads=64, q_lora=2048, experts=EXPERTS
)
Sizes = dict[str, tuple[tuple[int, ...], Type]]


def block(number: int) -> Sizes:
    """One of 78 layers, of which the first three are dense, or the NextN block after them."""
    down = Type.Q6_K if number in (8, 77) else Type.Q5_K
    up = Type.Q6_K if number == 77 else Type.Q4_K
    found: Sizes = {
        "attn_norm": ((HIDDEN,), Type.F32),
        "attn_kv_a_mqa": ((576, HIDDEN), Type.Q8_0),
        "attn_kv_a_norm": ((512,), Type.F32),
        "attn_k_b": ((64, 512, 192), Type.Q8_0),
        "attn_v_b": ((64, 256, 512), Type.Q8_0),
        "attn_output": ((HIDDEN, 16384), Type.Q8_0),
        "attn_q_a": ((2048, HIDDEN), Type.Q8_0),
        "attn_q_a_norm": ((2048,), Type.F32),
        "attn_q_b": ((16384, 2048), Type.Q8_0),
        "indexer.k_norm": ((128,), Type.F32),
        "indexer.proj": ((32, HIDDEN), Type.F32),
        "indexer.attn_k": ((128, HIDDEN), Type.Q8_0),
        "indexer.attn_q_b": ((4096, 2048), Type.Q8_0),
        "ffn_norm": ((HIDDEN,), Type.F32),
    }
    if number < 3:
        found |= {f"ffn_{name}": ((12288, HIDDEN), Type.Q8_0) for name in ("gate", "up")}
        found["ffn_down"] = ((HIDDEN, 12288), Type.Q8_0)
    else:
        found["ffn_gate_inp"] = ((EXPERTS, HIDDEN), Type.F32)
        for name in ("gate", "up"):
            found[f"ffn_{name}_shexp"] = ((2048, HIDDEN), Type.Q8_0)
            found[f"ffn_{name}_exps"] = ((EXPERTS, 2048, HIDDEN), up)
        found["ffn_down_shexp"] = ((HIDDEN, 2048), Type.Q8_0)
        found["ffn_down_exps"] = ((EXPERTS, HIDDEN, 2048), down)
    if number == 78:
        found["nextn.eh_proj"] = ((HIDDEN, 2 * HIDDEN), Type.Q8_0)
        found |= {f"nextn.{name}": ((HIDDEN,), Type.F32) for name in ("enorm", "hnorm", "shared_head_norm")}
    named = {f"blk.{number}.{name}.weight": held for name, held in found.items()}
    named[f"blk.{number}.indexer.k_norm.bias"] = ((128,), Type.F32)
    if number >= 3:
        named[f"blk.{number}.exp_probs_b.bias"] = ((EXPERTS,), Type.F32)
    return named


@pytest.fixture(scope="module")
def first_part(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("real")
    tensors: Sizes = {"token_embd.weight": ((VOCAB, HIDDEN), Type.Q8_0), "output.weight": ((VOCAB, HIDDEN), Type.Q8_0)}
    for number in range(79):
        tensors |= block(number)
    tensors["output_norm.weight"] = ((HIDDEN,), Type.F32)
    metadata = tiny_metadata(SHAPE, "GLM-5")
    words, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    metadata |= {
        "glm-dsa.vocab_size": VOCAB,
        "tokenizer.ggml.tokens": [*words, *(f"token{n}" for n in range(len(words), VOCAB))],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[1] * (VOCAB - len(words))],
        "tokenizer.ggml.merges": [merges[n % len(merges)] for n in range(MERGES)],
    }
    share = math.ceil(len(tensors) / (PARTS - 1))
    for number in range(PARTS):
        path = directory / f"GLM-5-UD-Q4_K_XL-{number + 1:05d}-of-{PARTS:05d}.gguf"
        writer = gguf.GGUFWriter(path, "glm-dsa")
        if number == 0:
            add_metadata(writer, metadata)
        for key, value in (("no", number), ("count", PARTS), ("tensors.count", len(tensors))):
            writer.add_uint16(f"split.{key}", value)
        size = 0
        for name, (shape, kind) in list(tensors.items())[(number - 1) * share : number * share] if number else ():
            plain = kind is Type.F32
            held = shape if plain else gguf.quant_shape_to_byte_shape(shape, kind)
            stored = np.dtype(np.float32 if plain else np.uint8)
            nbytes = math.prod(held) * stored.itemsize
            writer.add_tensor_info(name, held, stored, nbytes, raw_dtype=None if plain else kind)
            size += gguf.GGUFWriter.ggml_pad(nbytes, writer.data_alignment)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        end = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
        os.truncate(path, end + size)
    return directory / f"GLM-5-UD-Q4_K_XL-00001-of-{PARTS:05d}.gguf"


MEASURED = """
import atexit, sys, time
def say():
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(time.process_time(), peak / 2**10, file=sys.stderr)
atexit.register(say)
from shim.commands.cli import main
main()
"""


def test_the_command_takes_seconds_and_little_memory(first_part):
    """Headers only: 5 s is what a user may wait for. Measured: 2.4 s of computing on a busy machine, and 144 MiB."""
    command = [sys.executable, "-c", MEASURED, "gguf", str(first_part), "--json"]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    seconds, mib = map(float, done.stderr.split())  # of the processor: other tests may run beside this one
    print(f"\n{wall:.2f} s, {seconds:.2f} of them computing, at most {mib:.0f} MiB")
    assert seconds < 5 and mib < 300
    said = json.loads(done.stdout)
    assert said["quant_types"] == {"Q8_0": 872, "F32": 709, "Q4_K": 150, "Q5_K": 74, "Q6_K": 4}
    assert said["tensors"] == {"mapped": 1809, "unmapped": [], "missing": []} and said["problems"] == []
    assert said["tensor_parallel"] == [1, 2, 4, 8]
    parts = [part["bytes"] for part in said["parts"]]
    assert len(parts) == PARTS and sum(parts) / 2**30 == pytest.approx(435, abs=1)  # as published
    assert sum(p.stat().st_blocks for p in first_part.parent.iterdir()) * 512 < 100e6  # holes, truly


def test_sixteen_ranks_would_cut_blocks(first_part, monkeypatch):
    monkeypatch.setattr(upstream, "cpu_wheel", lambda: False)
    begin = time.monotonic()
    assert preflight.problem_with(str(first_part), ["vllm", "serve", "-tp", "8"]) is None
    answer = preflight.problem_with(str(first_part), ["vllm", "serve", "-tp", "16"])
    print(f"\n{(time.monotonic() - begin) / 2:.2f} s each")
    assert answer == (
        "tensor-parallel size 16 cuts blk.3.ffn_down_exps.weight, 2048 wide, into pieces that are no multiple of "
        "Q5_K's block of 256; sizes that work: 1, 2, 4, 8"
    )
    parallel_experts = ["vllm", "serve", "-tp", "16", "--enable-expert-parallel"]
    assert preflight.problem_with(str(first_part), parallel_experts) is None


def test_one_gpu_may_hold_all_experts(first_part, monkeypatch):
    """3.6 GB of a layer's gate and up experts on one rank: beyond what int32 counts."""
    monkeypatch.setattr(upstream, "cpu_wheel", lambda: False)
    assert preflight.problem_with(str(first_part), ["vllm", "serve"]) is None
    assert preflight.problem_with(str(first_part), ["vllm", "serve", "-dp", "8", "-ep"]) is None
