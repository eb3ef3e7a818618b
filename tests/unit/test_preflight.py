"""Which command lines are looked at before vLLM starts."""

from __future__ import annotations

import pytest

from shim import preflight

GGUF = "/m/x-00001-of-00002.gguf"


@pytest.mark.parametrize(
    "argv",
    [
        ["/usr/bin/python", "/v/bin/vllm", "serve", GGUF, "--port", "1"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", GGUF],
        ["python", "-m", "vllm.entrypoints.openai.api_server", f"--model={GGUF}"],
    ],
)
def test_vllm_on_a_gguf(argv):
    assert preflight.gguf_argument(argv) == GGUF


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "convert.py", GGUF],
        ["/usr/bin/python", "/v/bin/vllm", "serve", "org/model"],
        ["/v/bin/glm5-shim", "gguf", GGUF],
        ["python", "-c", "print(1)", GGUF],
        [],
    ],
)
def test_everything_else(argv):
    assert preflight.gguf_argument(argv) is None


def test_a_whole_model_passes(tiny):
    assert preflight.problem_with(str(tiny)) is None


def test_another_architecture_is_refused_only_where_nobody_else_serves_it(other_architecture, monkeypatch):
    monkeypatch.setattr(preflight, "others_serve_gguf", lambda: False)
    assert "is of architecture llama, expected glm-dsa" in preflight.problem_with(str(other_architecture))
    monkeypatch.setattr(preflight, "others_serve_gguf", lambda: True)
    assert preflight.problem_with(str(other_architecture)) is None
