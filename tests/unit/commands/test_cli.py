"""The command line: errors, exit codes and variables without sense."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from command_line import invoke

from shim.commands import cli, patches
from shim.commands.cli import main


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["doctor", "--json", "nonsense"], 2, "no check is named nonsense"),
        (["gguf", "/dev/null", "--json"], 1, "/dev/null is a FIFO, device or socket"),
        (["gguf", "--json"], 2, "Missing argument 'PATH'"),
        pytest.param(
            ["explain", "--json", "--capability", "120"],
            1,
            "capability is '120'; expected major.minor",
            marks=pytest.mark.needs("vllm"),
        ),
        (["demo", "--json", "--timeout", "0"], 2, "0 is not in the range"),
        (["nonsense", "--json"], 2, "No such command 'nonsense'"),
        (["patches", "--json", "--ledgers"], 1, "ZeroDivisionError: "),  # an error that nobody expected
    ],
)
def test_with_json_an_error_is_an_object(monkeypatch, words, code, message):
    monkeypatch.setattr(patches, "processes", lambda: 1 / 0)
    done = invoke(words)
    found = json.loads(done.stdout)
    assert (list(found), done.exit_code) == (["error"], code)
    assert message in found["error"]


COMMANDS = [
    ["wrap", "true"],
    ["patches"],
    ["patches", "--ledgers"],
    ["explain"],
    ["selftest"],
    ["gguf", "/dev/null"],
    ["demo"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_senseless_variable(monkeypatch, words):
    # doctor reports it as a problem. `path` answers, because PYTHONPATH="" would start vLLM without the shim
    assert set(main.commands) == {"path", "doctor"} | {word for word, *_ in COMMANDS}
    monkeypatch.setenv("GLM5_SHIM_OFF", "banana")
    message = "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"
    done = invoke(words)
    assert (done.exit_code, done.stdout, done.stderr) == (
        127 if words[0] == "wrap" else 1,
        "",
        f"glm5-shim: {message}\n",
    )
    if words[0] != "wrap":
        assert json.loads(invoke([*words, "--json"]).stdout) == {"error": message}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["path"], *([word, "--help"] for word in main.commands)])
def test_help_and_the_path_come_with_a_senseless_variable_too(monkeypatch, words):
    monkeypatch.setenv("GLM5_SHIM_OFF", "banana")
    done = invoke(words)
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout


def test_json_is_left_to_the_wrapped_command_and_to_answers(monkeypatch):
    done = invoke(["wrap", "no-such-command", "--json"])
    assert (done.exit_code, done.stdout) == (127, "")
    done = invoke(["doctor", "--json", "--help"])
    assert done.exit_code == 0 and done.stdout.startswith("Usage: ")


def test_an_interrupted_demo_says_so(monkeypatch):
    def work(timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr("shim.commands.demo.work", work)
    monkeypatch.setattr("shim.commands.cli._require", lambda *modules: None)
    done = invoke(["demo"])
    assert (done.exit_code, done.stderr) == (130, "glm5-shim: interrupted; the server has ended\n")


@pytest.mark.parametrize("command, missing", [("demo", "tokenizers"), ("selftest", "torch")])
def test_a_python_without_vllm_is_reported(monkeypatch, command, missing):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == missing else object())
    done = invoke([command])
    assert done.exit_code == 1 and f"no {missing} in " in done.stderr and done.stderr.count("\n") == 1


def test_a_command_is_imported_when_it_is_called():
    code = "import sys, shim.commands.cli; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'shim'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shim", "shim.commands", "shim.commands.cli", "shim.commands.output"]
