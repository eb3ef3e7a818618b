"""Which command lines are looked at before vLLM starts."""

from __future__ import annotations

import os

import pytest

from shim import upstream
from shim.gguf import preflight


@pytest.fixture
def gguf(tmp_path) -> str:
    """A part that does not exist, in a directory that does."""
    return str(tmp_path / "x-00001-of-00002.gguf")


SERVER = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    "argv",
    [
        "/usr/bin/python /v/bin/vllm serve {} --port 1",
        "/usr/bin/python /v/bin/vllm serve --port 1 --model {}",
        f"python -m {SERVER} --model {{}}",
        f"python -m {SERVER} --model={{}}",
    ],
)
def test_vllm_on_a_gguf(argv, gguf):
    assert preflight.gguf_argument(argv.format(gguf).split()) == gguf


@pytest.mark.parametrize(
    "options", ["--port 8123", "--port=8123", "--enforce-eager --port 8123", "--enforce-eager --a=b"]
)
def test_a_gguf_behind_options(options, tiny):
    assert preflight.gguf_argument(f"/v/bin/vllm serve {options} {tiny}".split()) == str(tiny)


def test_what_may_be_an_options_value_is_left_to_vllm(tiny):
    assert preflight.gguf_argument(f"/v/bin/vllm serve --tokenizer {tiny} org/model".split()) is None


@pytest.mark.parametrize(
    "argv",
    [
        "python convert.py {}",
        "/usr/bin/python /v/bin/vllm serve org/model",
        "/usr/bin/python /v/bin/vllm serve ./hf --served-model-name {}",
        "/usr/bin/python /v/bin/vllm serve ./hf --tokenizer {}",
        "/usr/bin/python /v/bin/vllm chat --model-name {}",
        "/usr/bin/python /v/bin/vllm serve no-such-org/repository/model-Q4.gguf",
        "/v/bin/glm5-shim gguf {}",
        "python -c print(1) {}",
        "",
    ],
)
def test_everything_else(argv, gguf):
    assert preflight.gguf_argument(argv.format(gguf).split()) is None


@pytest.mark.parametrize("name", ["unsloth/GLM-5-GGUF", "unsloth/GLM-5.2-GGUF:UD-Q4_K_XL", "one/glm-5.1-gguf"])
def test_a_repository_of_glm5_as_gguf_is_refused_at_once(name):
    argv = ["/v/bin/vllm", "serve", name]
    assert preflight.gguf_argument(argv) == name
    line = preflight.problem_with(name, argv)
    assert line.startswith(f"{name} does not exist; if it is a repository, download its files first (hf download ")


@pytest.mark.parametrize("name", ["zai-org/GLM-5", "unsloth/GLM-5.3-Flash-GGUF", "unsloth/GLM-4.7-GGUF:Q4_K_M"])
def test_other_repositories_are_vllms(name):
    assert preflight.gguf_argument(["/v/bin/vllm", "serve", name]) is None


def test_what_is_no_file_does_not_hang(tmp_path):
    for name in ("pipe.gguf", "x-00001-of-00002.gguf"):
        os.mkfifo(tmp_path / name)
        path = str(tmp_path / name)
        assert preflight.gguf_argument(["vllm", "serve", path]) == path
        assert preflight.problem_with(path).startswith(f"{path} is a FIFO, device or socket, expected a regular file")


def test_merges_that_do_not_fit_the_tokens(tiny, tmp_path):
    from shim.gguf.tiny import Shape, tiny_metadata, tiny_tensors, write_gguf

    shape = Shape()
    metadata = {**tiny_metadata(shape, "spoiled"), "tokenizer.ggml.merges": ["Ġ t", "no where"]}
    path = write_gguf(tmp_path, "spoiled", metadata, tiny_tensors(shape, 3))
    assert preflight.problem_with(str(path)).startswith(
        "the tokenizer's merge 1, 'no where', needs 'where', which is none of"
    )


def test_what_can_mean_a_gguf(tiny, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf.gguf.txt").write_text("GGUFnot")
    assert preflight.names_gguf(str(tiny)) and preflight.names_gguf("missing.gguf")
    assert preflight.names_gguf("missing.GGUF")
    assert preflight.names_gguf(f"{tiny.parent}:UD") and preflight.names_gguf(str(tiny.parent))
    assert preflight.names_gguf(str(tmp_path / "hf.gguf.txt"))  # the magic says so
    assert not preflight.names_gguf(str(tmp_path)) and not preflight.names_gguf("org/repo:UD-Q4_K_XL")


def test_what_is_ours(tiny, other_architecture, tmp_path):
    assert preflight.is_ours(str(tiny)) and preflight.is_ours(str(tiny.parent))
    assert not preflight.is_ours(str(other_architecture)) and not preflight.is_ours(str(tmp_path / "missing.gguf"))


def test_a_cache_that_cannot_be_written(tiny, monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", "/proc/nowhere")
    line = preflight.problem_with(str(tiny))
    assert line.startswith("cannot write the cache /proc/nowhere: ") and "set GLM5_SHIM_CACHE_DIR" in line


def test_a_whole_model_passes(tiny):
    assert preflight.problem_with(str(tiny)) is None


def test_another_architecture_is_refused_only_where_nobody_else_serves_it(other_architecture, monkeypatch):
    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: False)
    assert "is of architecture llama, expected glm-dsa" in preflight.problem_with(str(other_architecture))
    monkeypatch.setattr(upstream, "others_serve_gguf", lambda: True)
    assert preflight.problem_with(str(other_architecture)) is None


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        (['--speculative-config={"method": "mtp", "num_speculative_tokens": 1}'], True),
        (["-sc", '{"method": "deepseek_mtp"}'], True),
        (["--speculative_config", '{"method": "mtp"}'], True),
        (["--speculative-config.method", "mtp"], True),
        (["--spec-method", "mtp", "--spec-tokens", "1"], True),
        (["--speculative-config", '{"method": "ngram"}'], False),
        (["--speculative-config", '{"method": "mtp", "model": "org/draft"}'], False),
        (["--spec-method", "mtp", "--spec-model=org/draft"], False),
        (["--speculative-config", "{nonsense"], False),
        (["--speculative-config", "[1]"], False),
        ([], False),
    ],
)
def test_mtp_needs_a_nextn_block(tiny, tmp_path, words, drafts):
    from shim.gguf.tiny import write_tiny

    without = write_tiny(tmp_path, name="no-nextn", parts=1, layers=1, nextn=0)
    argv = ["vllm", "serve", "x.gguf", *words]
    assert preflight.problem_with(str(tiny), argv) is None
    line = preflight.problem_with(str(without), argv)
    assert (line or "").startswith("no-nextn.gguf has no NextN block") is drafts
    assert drafts or line is None
