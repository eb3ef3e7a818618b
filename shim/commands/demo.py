"""`glm5-shim demo`: the real `vllm serve` under `wrap` serves a tiny random GLM-5 GGUF, and answers over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from shim import ledger
from shim.env import state_dir

WRAP = (sys.executable, "-m", "shim.commands.cli", "wrap", "vllm")
PROMPT = "The quick brown fox"
TOKENS = 16


class DemoProblem(Exception):
    """The demo could not finish. The message says at which step, and ends with the server's last lines."""


def work(timeout_s: int = 600) -> dict[str, Any]:
    """Runs the demo: `{"ok", "left_out", "vllm", "model", "answer", "chat", "processes": [{"pid", "role", "applied",
    "used"}], "ready_s"}`. DemoProblem if it cannot finish."""
    from shim.gguf.tiny import write_tiny
    from shim.patches import PATCHES

    needed = {patch.name for patch in PATCHES if patch.required}
    for number in (signal.SIGTERM, signal.SIGHUP):  # then `server` ends the server, too
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="glm5-shim-demo-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        _say("writing a tiny GLM-5 GGUF in four parts")
        model = write_tiny(root / "model")
        # vLLM leaves its sockets behind. The path of a socket has 107 characters at most
        places = {"TMPDIR": scratch} if len(scratch) < 64 else {}
        with server(WRAP, model, root, timeout_s, **places) as (url, ready_s):
            name = ask(f"{url}/v1/models")["data"][0]["id"]
            completion = ask(f"{url}/v1/completions", model=name, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
            chat = ask(
                f"{url}/v1/chat/completions",
                model=name,
                messages=[{"role": "user", "content": "Who are you?"}],
                max_tokens=TOKENS,
                temperature=0,
            )
        ledgers = ledger.read(root / "state")
        with suppress(OSError):  # so that `glm5-shim patches --ledgers` shows them, as it does for a user's own server
            state_dir().mkdir(parents=True, exist_ok=True)
            for path in (root / "state").glob("*.json"):
                shutil.copy(path, state_dir())
    workers = [one for one in ledgers if _applied(one, "closing_gate", used=True)]
    off = sorted(needed & {p["name"] for one in ledgers for p in one["patches"] if p.get("state") == "off"})
    answered = completion["usage"]["completion_tokens"] > 0 and chat["usage"]["completion_tokens"] > 0
    return {
        "ok": bool(workers) and not off and answered,
        "left_out": off,
        "vllm": next((one["vllm"] for one in ledgers if one["vllm"]), None),
        "model": model.name,
        "answer": completion["choices"][0]["text"],
        "chat": chat["choices"][0]["message"]["content"],
        "processes": [
            {
                "pid": one["pid"],
                "role": one["role"],
                "applied": [p["name"] for p in one["patches"] if p.get("state") == "applied"],
                "used": [p["name"] for p in one["patches"] if p.get("used")],
            }
            for one in ledgers
        ],
        "ready_s": round(ready_s, 1),
    }


def show(found: dict[str, Any]) -> None:
    """Prints what `work` found, for a person."""
    click.echo(f"vLLM {found['vllm']} served {found['model']}, ready after {found['ready_s']} s")
    click.echo(f"completion of {PROMPT!r}: {found['answer']!r}")
    click.echo(f"chat: {found['chat']!r}")
    click.echo("(the weights are random, so the words are too; that they come at all is the point)\n")
    click.echo(f"{'pid':>7}  {'process':<18}  patches applied (* acted)")
    for process in found["processes"]:
        names = [name + "*" * (name in process["used"]) for name in process["applied"]]
        click.echo(f"{process['pid']:>7}  {process['role']:<18}  {', '.join(names) or '-'}")
    click.echo("(`glm5-shim patches --ledgers` shows them again, and those of your own servers)")
    click.echo(
        "\nok: the server answered and its worker passed the closing gate"
        if found["ok"]
        else f"\nNOT ok: GLM5_SHIM_SKIP leaves out {', '.join(found['left_out'])}, which GLM-5 needs"
        if found["left_out"]
        else "\nNOT ok: no worker passed the closing gate"
    )


@contextmanager
def server(
    vllm: Sequence[str], model: Path, root: Path, timeout_s: int, *options: str, **env: str
) -> Iterator[tuple[str, float]]:
    """Starts `<vllm> serve MODEL options` in a session of its own, and stops every process of that session at the end.

    Yields (url, seconds until ready). Ledgers go to root/state, the server's log to root/server.log. `env` is added to
    the server's environment. DemoProblem if the server is not ready after `timeout_s` seconds.
    """
    port = _free_port()
    log = root / "server.log"
    command = [
        *vllm,
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "512",
        *options,
    ]
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_server_env(root) | env, start_new_session=True)
    guard = _guard(process.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log, started + timeout_s)
        yield url, time.monotonic() - started
    finally:
        _stop(process, guard, root / "state")


def _server_env(root: Path) -> dict[str, str]:
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files each process of the server needs a minute to import
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    env.setdefault("TORCHDYNAMO_DISABLE", "1")  # the first request would compile the sampler with a C++ compiler
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env["GLM5_SHIM_STATE_DIR"] = str(root / "state")
    env["GLM5_SHIM_CACHE_DIR"] = str(root / "cache")
    return env


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    begin = time.monotonic()
    reported = -10.0
    while True:
        waited = time.monotonic() - begin
        if process.poll() is not None:
            raise DemoProblem(
                f"the server ended with exit code {process.returncode} before it was ready\n{_tail(log, 25)}"
            )
        if time.monotonic() > deadline:
            raise DemoProblem(f"the server was not ready after {waited:.0f} s\n{_tail(log, 25)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                _say(f"ready after {waited:.0f} s")
                return
        except (urllib.error.URLError, OSError):
            pass
        if waited - reported >= 5:
            reported = waited
            last = shorten(_last_message(log), 100, placeholder=" ...")
            _say(f"waiting for the server, {waited:.0f} s{last and ': ' + last}")
        time.sleep(0.5)


def _guard(group: int) -> subprocess.Popen[bytes]:
    """A process that kills this process group when its stdin closes. That is when the demo ends, even by kill -9.

    It is needed because vLLM's server may ignore SIGTERM while it starts, and its engine core may outlive it.
    """
    line = f"read _; kill -KILL -{group} 2>/dev/null"
    return subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE, start_new_session=True)


def _stop(process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes], state_dir: Path) -> None:
    """Asks the server to stop, then kills what is left of it: vLLM's worker sometimes outlives its parent."""
    try:
        if process.poll() is None:
            _say("stopping the server")
            process.send_signal(signal.SIGINT)
            process.wait(15)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C ends the wait, and leaves no orphans
        pass
    for pid in {process.pid, *(one["pid"] for one in ledger.read(state_dir))}:
        if _in_session(pid, process.pid):
            os.kill(pid, signal.SIGKILL)
    guard.communicate()
    process.wait()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


def ask(url: str, **body: Any) -> dict[str, Any]:
    """The JSON answer to a GET, or to a POST if there is a `body`. DemoProblem if the server refuses."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as problem:
        raise DemoProblem(
            f"{url} answered {problem.code}: {problem.read().decode(errors='replace')[:500]}"
        ) from problem


def _applied(one: dict[str, Any], name: str, *, used: bool) -> bool:
    return any(
        p["name"] == name and p.get("state") == "applied" and bool(p.get("used")) == used for p in one["patches"]
    )


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _last_message(log: Path) -> str:
    """The last line that vLLM logged as INFO; "" if there is none. Other lines are often parts of a warning."""
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if "INFO" in line), "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _say(line: str) -> None:
    click.echo(f"glm5-shim demo: {line}", err=True)
