"""The real server, by its real command line: with PYTHONPATH alone, through the demo, and on files that cannot be
served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shim.commands.demo import ask, server

ROOT = Path(__file__).parents[2]
VLLM = os.path.join(sys.prefix, "bin", "vllm")
WORKER = {"cpu_backend", "cpu_indexer", "cpu_indexer_op", "cpu_rotary", "gguf_loader", "closing_gate"}


def alive(pids: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("gone", "Z")]


def test_pythonpath_alone(tiny, tokens, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with server([VLLM], tiny, tmp_path, 600, "--dtype", "float32", "--max-logprobs", "10", **environment) as (url, _):
        assert ask(f"{url}/v1/models")["data"][0]["id"] == str(tiny)
        answer = ask(
            f"{url}/v1/completions",
            model=str(tiny),
            prompt=tokens,
            max_tokens=1,
            temperature=0,
            logprobs=10,
            return_tokens_as_token_ids=True,
        )
        chat = ask(
            f"{url}/v1/chat/completions", model=str(tiny), messages=[{"role": "user", "content": "你好"}], max_tokens=4
        )
    from hf_reference import logits

    expected = logits(tiny, tokens)[-1].astype(np.float64)
    expected -= np.log(np.exp(expected - expected.max()).sum()) + expected.max()
    got = {int(t.split(":")[1]): v for t, v in answer["choices"][0]["logprobs"]["top_logprobs"][0].items()}
    assert set(got) >= set(np.argsort(expected)[-10:].tolist())
    assert max(abs(v - expected[t]) for t, v in got.items()) < 1e-3
    assert chat["usage"]["completion_tokens"] > 0

    ledgers = [json.loads(p.read_text()) for p in (tmp_path / "state").glob("*.json")]
    workers = [one for one in ledgers if "Worker" in one["role"]]
    assert len(workers) == 1
    acted = {p["name"] for p in workers[0]["patches"] if p.get("used") and p["state"] == "applied"}
    assert acted >= WORKER
    assert any("EngineCore" in one["role"] for one in ledgers)
    assert alive([one["pid"] for one in ledgers]) == []


def test_the_demo(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GLM5_SHIM") and k != "PYTHONPATH"}
    env["GLM5_SHIM_STATE_DIR"] = str(tmp_path / "state")
    demo = [os.path.join(sys.prefix, "bin", "glm5-shim"), "demo", "--json"]
    done = subprocess.run(demo, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    assert found["ok"] and found["answer"] and found["chat"]
    assert found["model"].endswith("-00001-of-00004.gguf")
    roles = {p["role"]: p for p in found["processes"]}
    worker = next(p for role, p in roles.items() if "Worker" in role)
    assert set(worker["applied"]) >= WORKER
    assert "main" in roles and any("EngineCore" in role for role in roles)
    assert "waiting for the server" in done.stderr
    assert alive([p["pid"] for p in found["processes"]]) == []
    ledgers = subprocess.run([demo[0], "patches", "--ledgers", "--json"], env=env, capture_output=True, cwd=tmp_path)
    used = {one["pid"]: one["used"] for one in json.loads(ledgers.stdout)["processes"]}
    assert used == {p["pid"]: p["used"] for p in found["processes"]}


def cut(tiny: Path, to: Path) -> Path:
    part = tiny.with_name(tiny.name.replace("00001-of", "00003-of"))
    (to / part.name).unlink()
    (to / part.name).write_bytes(part.read_bytes()[:-1000])
    return to / tiny.name


def lose(tiny: Path, to: Path) -> Path:
    (to / tiny.name.replace("00001-of", "00002-of")).unlink()
    return to / tiny.name


def other_architecture(tiny: Path, to: Path) -> Path:
    from gguf import GGMLQuantizationType

    from shim.gguf.tiny import write_gguf

    weights = {"token_embd.weight": (np.zeros((8, 32), dtype=np.float32), GGMLQuantizationType.F32)}
    return write_gguf(to, "llama", {"general.architecture": "llama"}, weights)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lose, "1 of 4 parts missing in {dir}: {stem}-00002-of-00004.gguf"),
        (cut, "{stem}-00003-of-00004.gguf is cut short: "),
        (other_architecture, "llama.gguf is of architecture llama, expected glm-dsa"),
    ],
)
def test_files_that_cannot_be_served_cost_a_second_and_a_line(tiny, tmp_path, spoil, line):
    for part in tiny.parent.glob("*.gguf"):
        (tmp_path / part.name).hardlink_to(part)
    path = spoil(tiny, tmp_path)
    expected = "glm5-shim: " + line.format(dir=tmp_path, stem=tiny.name.rpartition("-00001")[0])
    env = {k: v for k, v in os.environ.items() if not k.startswith("GLM5_SHIM") and k != "PYTHONDONTWRITEBYTECODE"}
    shim = os.path.join(sys.prefix, "bin", "glm5-shim")
    said, seconds = {}, {}
    for name, command, pythonpath in (
        ("gguf", [shim, "gguf", str(path)], ""),
        ("wrap", [shim, "wrap", "vllm", "serve", str(path)], ""),
        ("PYTHONPATH", [VLLM, "serve", str(path)], str(ROOT)),
    ):
        begin = time.monotonic()
        done = subprocess.run(command, env=env | {"PYTHONPATH": pythonpath}, capture_output=True, text=True)
        seconds[name] = time.monotonic() - begin
        assert done.returncode == 1, name
        assert done.stdout == "", name
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1, (name, done.stderr)
        said[name] = done.stderr
    assert len(set(said.values())) == 1
    assert seconds["PYTHONPATH"] < 5, (
        seconds
    )  # a second on an idle machine; vLLM itself takes a minute to come this far
