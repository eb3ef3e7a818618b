"""What happened to each patch in this process, written as <state dir>/<pid>.json and read back by the command line.

Only the user can read the file, and it holds no argument of the command line, which may be an API key. A ledger that
cannot be written costs one line on stderr and nothing else: serving goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shim import env, process

_entries: dict[str, dict[str, Any]] = {}
_started = time.time()
_forked = False
_reported_unwritable = False


def record(name: str, state: str, detail: str) -> None:
    """The engine tells how one patch stands. `flush` writes the file."""
    _entries.setdefault(name, {}).update(state=state, detail=detail)


def used(name: str) -> None:
    """A patch reports, from its replacement, that it acted for GLM-5. Cheap after the first call."""
    entry = _entries.setdefault(name, {})
    if not entry.get("used"):
        entry["used"] = True
        entry.pop("idle", None)
        flush()


def idle(name: str, because: str) -> None:
    """A patch reports that it stood aside and let vLLM's own code run. Cheap after the first call."""
    entry = _entries.setdefault(name, {})
    if "idle" not in entry and not entry.get("used"):
        entry["idle"] = because
        flush()


def all_idle(because: str) -> None:
    """This process serves another model: every applied patch that has not acted stood aside for this reason."""
    for entry in _entries.values():
        if entry.get("state") == "applied" and not entry.get("used"):
            entry.setdefault("idle", because)
    flush()


def entries() -> list[dict[str, Any]]:
    return [{"name": name, **entry} for name, entry in _entries.items()]


def flush() -> None:
    """Writes this process's file in one rename."""
    global _reported_unwritable
    vllm = sys.modules.get("vllm")
    content = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "role": role(),
        "command": command(),
        "python": sys.executable,
        "shim": process.identity(),
        "vllm": vars(vllm).get("__version__") if vllm else None,
        "started": _started,
        "patches": entries(),
    }
    path = env.state_dir() / f"{os.getpid()}.json"
    try:
        write_private(path, json.dumps(content, indent=1))
    except OSError as problem:
        if not _reported_unwritable:
            _reported_unwritable = True
            why = "Not a directory" if os.path.isfile(path.parent) else problem.strerror
            process.say(f"cannot write {path} ({why}); set GLM5_SHIM_STATE_DIR")


def write_private(path: Path, text: str) -> None:
    """Writes `text` in one rename, in a file of mode 0600. A directory that is made for it has mode 0700."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def command() -> list[str]:
    """How this process was started, without what may be a secret: the program, Python's script or module, and the names
    of options."""
    words = list(sys.orig_argv)
    names = [os.path.basename(word) for word in words[:1]]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-X", "-W"):
            next(rest, None)
        elif word == "-m":
            names += [next(rest, "")]
            break
        elif not word.startswith("-"):
            names += [os.path.basename(word)]
            break
        elif word.startswith("-c"):
            break
    return names + [word.partition("=")[0] for word in words if word.startswith("--")]


def role() -> str:
    """What this process is to a person. vLLM names its children; the command line tells the others apart."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    if _forked:
        return "fork"
    line = " ".join(sys.orig_argv)
    if "resource_tracker" in line:
        return "resource_tracker"
    if "forkserver" in line:
        return "forkserver"
    if "vllm.model_executor.models.registry" in line:
        return "model inspection"
    return "main"


def read(state_dir: Path) -> list[dict[str, Any]]:
    """All ledgers in a directory, the oldest process first. A file that is no ledger is named on stderr."""
    found = []
    for path in state_dir.glob("*.json"):
        try:
            one = json.loads(path.read_text())
            if not {"started", "pid", "role", "vllm", "patches"} <= set(one):
                raise ValueError
            if not all(isinstance(one[key], (int, float)) for key in ("started", "pid")):
                raise ValueError
            if not all(isinstance(patch["name"], str) for patch in one["patches"]):
                raise ValueError
            found.append(one)
        except (ValueError, TypeError, KeyError, OSError):
            process.say(f"{path} is not a ledger, or cannot be read, so it is left out")
    return sorted(found, key=lambda ledger: (ledger["started"], ledger["pid"]))


def running(pid: int) -> bool:
    """Does this process run? A zombie, which its parent has yet to collect, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def prune(state_dir: Path, older_than_s: float = 86_400) -> None:
    """Removes the ledgers of processes that have ended, if the file is older than a day."""
    for path in state_dir.glob("*.json"):
        try:
            if time.time() - path.stat().st_mtime > older_than_s and not os.path.exists(f"/proc/{path.stem}"):
                path.unlink()
        except OSError:
            continue


def reset_after_fork() -> None:
    """In a forked child, which inherits the patches and their states, and writes a file of its own."""
    global _started, _forked
    _started, _forked = time.time(), True
    flush()
