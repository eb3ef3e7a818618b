"""GGUF files that cannot be served, by the real command line: one line, exit code 1, as fast as a Python starts."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from shim.gguf.tiny import Shape, Tensors, tiny_metadata, tiny_tensors, write_gguf

ROOT = Path(__file__).parents[2]
BIN = os.path.join(sys.prefix, "bin")
SHAPE = Shape(layers=2, vocab=512, heads=2, kv_lora=256, experts=2, index_heads=4)
EXPERTS = "blk.1.ffn_up_exps.weight"
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'


def write(
    directory: Path, *, shape: Shape = SHAPE, change: Tensors | None = None, without: str = "-", parts: int = 1
) -> Path:
    tensors = {**tiny_tensors(shape, 3), **(change or {})}
    kept = {name: held for name, held in tensors.items() if without not in name}
    return write_gguf(directory, "small", tiny_metadata(shape, "small"), kept, parts)


def damaged(directory: Path, at: str | int, kind: str, *values: int) -> Path:
    """One file with `values` written over its header: at a byte, or behind a tensor's name and number of dimensions."""
    path = write(directory)
    data = bytearray(path.read_bytes())
    place = at if isinstance(at, int) else data.index(at.encode()) + len(at) + 4
    struct.pack_into(kind, data, place, *values)
    path.write_bytes(data)
    return path


def of_two_models(directory: Path) -> Path:
    path = write(directory, parts=3)
    other = write(directory / "other", without="output.weight", parts=3)
    shutil.copy(other.with_name("small-00003-of-00003.gguf"), path.with_name("small-00003-of-00003.gguf"))
    return path


CASES = {
    "parts of two models": (of_two_models, (), "small-00003-of-00003.gguf has split.tensors.count"),
    "ik_llama's iq4_k": (
        lambda d: damaged(d, EXPERTS, "<QQQI", 256, 256, 2, 139),
        (),
        f"tensor {EXPERTS} in small.gguf is of type number 139, which is not supported",
    ),
    "no indexer": (lambda d: write(d, without=".indexer."), (), "small.gguf has no indexer tensors"),
    "negative count": (lambda d: damaged(d, 8, "<q", -1), (), "small.gguf "),
    "huge count": (lambda d: damaged(d, 8, "<q", 2**40), (), "small.gguf "),
    "huge metadata count": (lambda d: damaged(d, 16, "<q", 2**62), (), "small.gguf "),
    "offsets in a circle": (
        lambda d: damaged(d, EXPERTS, "<QQQIQ", 256, 256, 2, int(Type.Q4_K), 0),
        (),
        "tensors token_embd.weight and blk.1.ffn_up_exps.weight overlap in small.gguf",
    ),
    "experts that move": (write, ("--enable-expert-parallel", "--enable-eplb"), "--enable-eplb copies experts between"),
    "a size that cuts a block": (
        write,
        ("--tensor-parallel-size", "2"),
        "tensor-parallel size 2 cuts blk.1.ffn_down_exps.weight, 256 wide, into pieces that are no multiple of Q6_K's "
        "block of 256; sizes that work: 1",
    ),
    "MTP without NextN": (
        lambda d: write(d, shape=Shape(**{**vars(SHAPE), "nextn": 0})),
        ("--speculative-config", MTP),
        "small.gguf has no NextN block",
    ),
}


@pytest.fixture(scope="session")
def gpu_wheel(tmp_path_factory) -> Path:
    """On a child's path: the installed vLLM counts as one for GPUs, where weights stay quantised."""
    place = tmp_path_factory.mktemp("wheel")
    (place / "vllm-0.33.0.dist-info").mkdir()
    (place / "vllm-0.33.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    return place


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_no_engine(name, gpu_wheel, tmp_path):
    spoiled, options, line = CASES[name]
    path = str(spoiled(tmp_path / "model"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("GLM5_SHIM") and k != "PYTHONDONTWRITEBYTECODE"}
    others = [str(gpu_wheel)]
    said = []
    for command, paths in (
        ([os.path.join(BIN, "glm5-shim"), "wrap", "vllm"], others),
        ([os.path.join(BIN, "vllm")], [str(ROOT), *others]),
    ):
        state = tmp_path / f"state{len(said)}"
        env |= {"PYTHONPATH": os.pathsep.join(paths), "GLM5_SHIM_STATE_DIR": str(state)}
        begin = time.monotonic()
        done = subprocess.run([*command, "serve", path, *options], env=env, capture_output=True, text=True)
        assert time.monotonic() - begin < 10  # about a second; vLLM itself takes a minute to come this far
        assert (done.returncode, done.stdout) == (1, "")
        assert not list(state.glob("*.json"))  # no patch was applied, so nothing of vLLM was imported
        said.append(done.stderr)
    assert said[0].startswith(f"glm5-shim: {line}") and said[0].count("\n") == 1
    assert said[1] == said[0]
