from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shim
from shim import process
from shim.gguf import hf_directory as directory
from shim.gguf.config import generation_config, hf_config
from shim.gguf.files import GGUFProblem, fingerprint, open_model
from shim.gguf.hf_directory import hf_directory

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ROOT = Path(shim.__file__).parents[1]


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_contents(tiny_model, tmp_path):
    path = hf_directory(tiny_model, tmp_path / "deep" / "cache")
    assert path == tmp_path / "deep" / "cache" / fingerprint(tiny_model)
    assert names(path) == FILES and names(path.parent) == {path.name}
    assert json.loads((path / "config.json").read_text()) == hf_config(tiny_model)
    assert json.loads((path / "generation_config.json").read_text()) == generation_config(tiny_model)
    assert path.stat().st_mode & 0o755 == 0o755


@pytest.mark.needs("transformers")
def test_transformers_loads_it(tiny_model, tmp_path):
    """As vLLM does: config, generation config, tokenizer and chat template, from the directory alone."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    path = hf_directory(tiny_model, tmp_path)
    config = AutoConfig.from_pretrained(path)
    assert config.model_type == "glm_moe_dsa" and config.indexer_rope_interleave is True
    assert GenerationConfig.from_pretrained(path).eos_token_id == [1009, 1016, 1018]
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (1009, 1010, 1011)
    chat = [{"role": "user", "content": "1 + 1?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "[gMASK]<sop><|user|>\n1 + 1?<|assistant|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[:3] == [1011, 1013, 1016] and ids.count(1011) == 1  # the template's own [gMASK], and no second one
    assert tokenizer.decode(ids) == text


def test_the_second_call_writes_nothing(tiny_model, tmp_path, monkeypatch):
    first = hf_directory(tiny_model, tmp_path)
    monkeypatch.setattr(directory, "write_tokenizer", lambda *_: pytest.fail("wrote again"))
    start = time.perf_counter()
    assert hf_directory(tiny_model, tmp_path) == first
    assert time.perf_counter() - start < 0.5


def test_a_changed_file_gets_a_new_directory(make, tmp_path):
    path = make()
    first = hf_directory(open_model(path), tmp_path / "cache")
    os.utime(path, ns=(1, 1))
    assert hf_directory(open_model(path), tmp_path / "cache") != first


def test_other_code_of_the_shim_gets_a_new_directory(tiny_model, tmp_path, monkeypatch):
    """A `git pull` moves no version, and config and tokenizer may come out differently."""
    first = hf_directory(tiny_model, tmp_path)
    monkeypatch.setattr(process, "identity", lambda: f"{shim.__version__}+another commit")
    assert hf_directory(tiny_model, tmp_path) != first


@pytest.mark.parametrize("umask", [0, 0o077])
def test_others_may_read_and_not_write_whatever_the_umask(tiny_model, tmp_path, umask):
    before = os.umask(umask)
    try:
        path = hf_directory(tiny_model, tmp_path / "deep" / "cache")
    finally:
        os.umask(before)
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {0o644}
    assert path.stat().st_mode & 0o777 == 0o755
    assert [place.stat().st_mode & 0o777 for place in (path.parent, path.parent.parent)] == [0o755 & ~umask] * 2


def test_a_lost_race_uses_the_winners_directory(tiny_model, tmp_path, monkeypatch):
    real = directory.write_tokenizer

    def other_process_comes_first(model, draft):
        monkeypatch.setattr(directory, "write_tokenizer", real)
        (hf_directory(model, tmp_path) / "mark").touch()
        real(model, draft)

    monkeypatch.setattr(directory, "write_tokenizer", other_process_comes_first)
    path = hf_directory(tiny_model, tmp_path)
    assert names(path) == FILES | {"mark"} and names(tmp_path) == {path.name}


def test_a_failure_half_way_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    def fails(model, draft):
        raise GGUFProblem("no such tokenizer")

    monkeypatch.setattr(directory, "write_tokenizer", fails)
    with pytest.raises(GGUFProblem, match="no such tokenizer"):
        hf_directory(tiny_model, tmp_path)
    assert names(tmp_path) == set()


def test_a_draft_left_by_a_killed_process_is_not_used(tiny_model, tmp_path):
    (tmp_path / ".draft-x").mkdir()
    (tmp_path / ".draft-x" / "config.json").write_text("{")
    assert names(hf_directory(tiny_model, tmp_path)) == FILES


def test_unwritable_cache(tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        GGUFProblem, match=f"cannot write the cache {tmp_path}/file/cache: Not a directory; set GLM5_SHIM_CACHE_DIR"
    ):
        hf_directory(tiny_model, tmp_path / "file" / "cache")


def test_disk_full(tiny_model, tmp_path, monkeypatch):
    def full(model, draft):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_tokenizer", full)
    with pytest.raises(GGUFProblem, match="No space left on device"):
        hf_directory(tiny_model, tmp_path)
    assert names(tmp_path) == set()


def test_processes_at_the_same_moment(tiny, tmp_path):
    script = """
import sys, time
from pathlib import Path
from shim.gguf.hf_directory import hf_directory
from shim.gguf.files import open_model
import tokenizers
model = open_model(sys.argv[1])
Path(sys.argv[2], "ready-" + sys.argv[3]).touch()
while not Path(sys.argv[2], "go").exists():
    time.sleep(0.001)
path = hf_directory(model, Path(sys.argv[2], "cache"))
print(path, *sorted(p.name for p in path.iterdir()))
"""
    command = [sys.executable, "-c", script, str(tiny), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([*command, str(n)], env=environment, text=True, stdout=subprocess.PIPE) for n in range(2)
    ]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(answers) == 1 and set(answers.pop().split()[1:]) == FILES
    assert len(names(tmp_path / "cache")) == 1
