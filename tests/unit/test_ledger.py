"""The ledger's file: who can read it, and what it must not hold."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from shim import ledger


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_reads_it(tmp_path, monkeypatch, umask):
    place = tmp_path / "deep" / "state"
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(place))
    before = os.umask(umask)
    try:
        ledger.flush()
        ledger.flush()  # over the first one
    finally:
        os.umask(before)
    assert mode(place) == 0o700
    assert [(path.name, mode(path)) for path in place.iterdir()] == [(f"{os.getpid()}.json", 0o600)]


def test_a_directory_of_the_users_keeps_its_mode(tmp_path, monkeypatch):
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(place))
    ledger.flush()
    assert mode(place) == 0o777


SECRET = "sk-secret"


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["python3.11", "/v/bin/vllm", "serve", "/m", "--api-key", SECRET], ["python3.11", "vllm", "--api-key"]),
        (["python", "/v/bin/vllm", "serve", f"--api-key={SECRET}"], ["python", "vllm", "--api-key"]),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--api-key", SECRET],
         ["python", "vllm.entrypoints.openai.api_server", "--api-key"]),
        (["python", "-c", f"key = '{SECRET}'"], ["python"]),
        (["python", "-u", "-X", "dev", "-m", "vllm", "chat", "--api_key", SECRET], ["python", "vllm", "--api_key"]),
        (["/v/bin/vllm"], ["vllm"]),
        ([], []),
    ],
)  # fmt: skip
def test_no_argument_is_written(tmp_path, monkeypatch, command, kept):
    monkeypatch.setattr(ledger.sys, "orig_argv", command)
    ledger.flush()
    (file,) = (tmp_path / "state").glob("*.json")
    assert SECRET not in file.read_text()
    assert json.loads(file.read_text())["command"] == kept
