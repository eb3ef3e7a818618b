"""At which tensor-parallel sizes a file can be cut."""

from __future__ import annotations

from shim.gguf.files import open_model
from shim.gguf.preflight import problem_with
from shim.gguf.tensor_parallel import cut_problem, sizes_that_work
from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf


def test_tensor_parallel_sizes_of_glm_5(tmp_path, monkeypatch):
    """The expert width of the real one, few of everything else."""
    shape = Shape(layers=2, nextn=0, moe_ffn=2048, heads=64, experts=1, experts_used=1, kv_lora=256, vocab=512)
    model = open_model(write_gguf(tmp_path, "wide", tiny_metadata(shape), tiny_tensors(shape)))
    assert sizes_that_work(model) == [1, 2, 4, 8]
    assert cut_problem(model, 8) is None
    assert cut_problem(model, 16, expert_parallel=True) is None  # experts whole, and 512 / 16 is one block of Q8_0
    line = cut_problem(model, 16)
    assert line is not None and "Q" in line and line.endswith("sizes that work: 1, 2, 4, 8")
    assert "does not divide the 64 attention heads" in (cut_problem(model, 3) or "")
    argv = ["vllm", "serve", str(model.parts[0].path)]
    assert problem_with(str(model.parts[0].path), argv) is None
    monkeypatch.setattr("shim.gguf.tensor_parallel.MOST_EXPERT_BYTES", 1)
    assert (cut_problem(model, 8) or "").endswith("sizes that work: none, this file needs another quantisation")


def test_the_size_comes_from_the_command_line(tiny, monkeypatch):
    from shim import upstream

    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: True)
    assert problem_with(str(tiny), ["vllm", "serve", str(tiny)]) is None
    for words in (["-tp", "2"], ["--tensor-parallel-size=2"], ["--data-parallel-size", "2"]):
        assert "that work: 1" in (problem_with(str(tiny), words) or "")
    assert problem_with(str(tiny), ["-tp", "2", "--quantization", "fp8"]) is None
    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: False)
    assert problem_with(str(tiny), ["-tp", "2"]) is None
