"""The leaf that every room asks: which shim this is, how it speaks, and how it asks a child process."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shim import process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """`ask(code, question=None, timeout_s=None)`: what a real child answers that runs `code` as its module."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(code: str, question: object = None, timeout_s: float | None = None) -> object:
        (tmp_path / "stub_child.py").write_text(f"import os, subprocess, sys, time\nfrom shim import process\n{code}\n")
        return process.ask_child("stub_child", question, os.environ, timeout_s)

    return run


@pytest.mark.parametrize("question", [None, 3, "text", [1, None], {"a": {"b": 1.5}}])
def test_a_child_answers_what_it_was_asked(ask, question):
    assert ask("print('noise'); process.answer_parent(lambda q: [q, os.getpid()])", question)[0] == question


@pytest.mark.parametrize(
    ("code", "line", "exit_code"),
    [
        ("raise KeyError('boom')", "KeyError: 'boom'", 1),
        ("sys.exit(3)", "exit code 3", 3),
        ("print('only this')", "only this", 0),
        ("process.answer_parent(lambda q: 1); sys.exit('after the answer')", "after the answer", 1),
        ("os.abort()", "exit code -6", -6),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", 1),
    ],
)
def test_a_child_without_an_answer_is_one_line(ask, code, line, exit_code):
    with pytest.raises(process.ChildProblem) as refused:
        ask(code)
    assert (str(refused.value), refused.value.exit_code) == (line, exit_code)


def test_a_child_that_takes_too_long_ends_with_all_that_it_started(ask, tmp_path):
    note = tmp_path / "grandchild"
    code = f"open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    with pytest.raises(process.ChildProblem, match="no answer within 2 s") as refused:
        ask(code, timeout_s=2)
    assert refused.value.exit_code is None
    pid = int(note.read_text())
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the grandchild lives")


CLOSED = {"stderr": "2>&-", "stdout": ">&-", "both": ">&- 2>&-"}


@pytest.mark.parametrize("closed", CLOSED)
def test_a_line_never_goes_to_stdout(tmp_path, closed):
    script = f"from shim import process; process.say('a line'); open({str(tmp_path / 'done')!r}, 'w').close()"
    command = f'exec {sys.executable} -c "{script}" {CLOSED[closed]}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "" and done.stderr == ("glm5-shim: a line\n" if closed == "stdout" else "")
    assert (tmp_path / "done").exists()


def test_nothing_else_prints_to_stderr():
    """print(..., file=sys.stderr) goes to stdout where stderr is closed. `process.say` does not."""
    for path in (ROOT / "shim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and path.name != "process.py":
                assert not any(word.arg == "file" for word in node.keywords), f"{path}:{node.lineno}"


def identity_of(copy: Path) -> str:
    code = "from shim import process; print(process.identity())"
    return subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True).stdout


def test_the_identity_is_that_of_the_sources(tmp_path):
    """A `git pull` changes it though the version stays; where the files lie, and bytecode, do not."""
    shutil.copytree(ROOT / "shim", tmp_path / "a" / "shim", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "shim", tmp_path / "b" / "shim", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "b" / "shim" / "_bootstrap").mkdir()  # as in a wheel
    shutil.copy(ROOT / "sitecustomize.py", tmp_path / "b" / "shim" / "_bootstrap")
    first = identity_of(tmp_path / "a")
    assert first == identity_of(tmp_path / "b") == f"{process.identity()}\n"
    changed = tmp_path / "a" / "shim" / "gguf" / "config.py"
    changed.write_text(changed.read_text() + "# another commit\n")
    assert identity_of(tmp_path / "a") != first
