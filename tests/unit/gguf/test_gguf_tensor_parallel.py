"""Which ways of sharing a file's tensors among GPUs work."""

from __future__ import annotations

import pytest

from shim import upstream
from shim.gguf.files import open_model
from shim.gguf.preflight import problem_with
from shim.gguf.tensor_parallel import Parallel, cut_problem, parallel_problem, sizes_that_work
from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf


def test_tensor_parallel_sizes_of_glm_5(tmp_path):
    """The expert width of the real one, few of everything else."""
    shape = Shape(layers=2, nextn=0, moe_ffn=2048, heads=64, experts=1, experts_used=1, kv_lora=256, vocab=512)
    model = open_model(write_gguf(tmp_path, "wide", tiny_metadata(shape), tiny_tensors(shape)))
    assert sizes_that_work(model) == [1, 2, 4, 8]
    assert cut_problem(model, Parallel(8)) is None
    whole = Parallel(16, expert_parallel=True)
    assert cut_problem(model, whole) is None  # experts whole, and 512 / 16 is one block of Q8_0
    line = cut_problem(model, Parallel(16))
    assert line is not None and "Q" in line and line.endswith("sizes that work: 1, 2, 4, 8")
    assert "does not divide the 64 attention heads" in (cut_problem(model, Parallel(3)) or "")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(upstream, "cpu_wheel", lambda: False)


def test_the_size_comes_from_the_command_line(tiny, gpu, monkeypatch):
    assert problem_with(str(tiny), ["vllm", "serve", str(tiny)]) is None
    for words in (["-tp", "2"], ["--tensor-parallel-size=2"], ["--data-parallel-size", "2"]):
        assert "that work: 1" in (problem_with(str(tiny), words) or "")
    assert problem_with(str(tiny), ["-tp", "2", "--quantization", "fp8"]) is None
    monkeypatch.setattr(upstream, "cpu_wheel", lambda: True)  # weights are dequantised there
    assert problem_with(str(tiny), ["-tp", "2"]) is None


REFUSED = {
    "--enable-eplb": "--enable-eplb copies experts between GPUs",
    "-ep -dp 2 --all2all-backend deepep_low_latency": "--all2all-backend deepep_low_latency sends tokens to kernels",
    "-ep -dp 2": None,
    "-ep -dp 2 --all2all-backend=allgather_reducescatter": None,
    "-ep --all2all-backend deepep_low_latency": None,  # nobody to send to
}


@pytest.mark.parametrize("words", REFUSED)
def test_modes_that_move_experts_or_tokens(tiny, gpu, words):
    found, expected = problem_with(str(tiny), words.split()), REFUSED[words]
    assert found is None if expected is None else (found or "").startswith(expected)


def test_modes_as_vllm_has_them(tiny_model):
    assert parallel_problem(tiny_model, Parallel()) is None
    assert parallel_problem(tiny_model, Parallel(eplb=True)) is not None
    assert parallel_problem(tiny_model, Parallel(data=2, expert_parallel=True)) is None
    assert parallel_problem(tiny_model, Parallel(data=2, expert_parallel=True, all2all="pplx")) is not None
