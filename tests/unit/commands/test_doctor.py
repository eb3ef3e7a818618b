"""`glm5-shim doctor`: the shape of its answer, its exit code, and each mend that a test can bring about."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest
from command_line import invoke

from shim import upstream
from shim.commands import doctor, patches

QUICK = ("environment", "import_name", "directories", "compiler", "bytecode")


@pytest.fixture
def child_has(monkeypatch):
    """`child_has(row, ...)`: these are the rows of the child's patch table."""

    def use(*rows: dict) -> None:
        monkeypatch.setattr(patches, "patch_table", lambda: {"vllm": "0.33.0", "patches": list(rows)})

    return use


def test_json_shape_and_names():
    done = invoke(["doctor", "--json", *QUICK])
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == list(QUICK)
    assert all(set(check) == {"name", "status", "why", "mend"} for check in found["checks"])
    assert found["ok"] == (done.exit_code == 0)


def test_list_checks():
    done = invoke(["doctor", "--list-checks"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(doctor.CHECKS)


def test_an_unknown_check_is_an_error():
    done = invoke(["doctor", "nonsense"])
    assert done.exit_code == 2
    assert "no check is named nonsense; the checks are: vllm, " in done.stderr


def test_a_problem_exits_with_1_and_a_mend(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_SKIP", "typo")
    done = invoke(["doctor", "environment"])
    assert done.exit_code == 1
    assert "[✗] environment: GLM5_SHIM_SKIP names typo" in done.stdout
    assert "mend: correct the variable" in done.stdout
    assert done.stdout.endswith("1 checks, 1 problem, 0 warnings\n")


SAME = f"{sys.prefix}/:{sys.version_info[0]}.{sys.version_info[1]}"  # this Python by another name


@pytest.mark.parametrize(
    ("name", "value", "status", "why"),
    [
        ("GLM5_SHIM_OFF", "banana", "problem", "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"),
        ("GLM5_SHIM_INDEXR", "triton", "problem", "not a variable of glm5-shim; did you mean GLM5_SHIM_INDEXER?"),
        ("GLM5_SHIM_FOREIGN", "1", "warning", "not variables of glm5-shim: GLM5_SHIM_FOREIGN"),
        ("GLM5_SHIM_OFF", "no", "ok", ""),
        ("GLM5_SHIM_PYTHON", "/nowhere:3.11", "problem", "GLM5_SHIM_PYTHON is '/nowhere:3.11'; expected PREFIX:"),
        ("GLM5_SHIM_PYTHON", SAME, "warning", f"={SAME}: the shim stays off in this"),
    ],
)
def test_variables(monkeypatch, name, value, status, why):
    for other in [other for other in os.environ if other.startswith("GLM5_SHIM")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    finding = doctor.check_environment()
    assert finding.status == status and why in finding.why


@pytest.mark.parametrize(
    "variable",
    [{"GLM5_SHIM_OFF": "1"}, {"GLM5_SHIM_OFF": "banana"}, {"GLM5_SHIM_SKIP": "typo"}, {"GLM5_SHIM_INDEXR": "auto"}],
)
def test_nothing_is_claimed_of_patches_where_the_shim_cannot_come_up(monkeypatch, variable):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert doctor.check_child().status == ("warning" if variable == {"GLM5_SHIM_OFF": "1"} else "skipped")
    done = invoke(["patches"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert next(iter(variable)) in done.stderr and done.stderr.count("\n") == 1
    if variable == {"GLM5_SHIM_OFF": "1"} and importlib.util.find_spec("vllm"):
        assert invoke(["demo"]).stderr == done.stderr


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


def test_patches_of_a_child_reach_the_report(monkeypatch, child_has):
    row = {"name": "one", "required": True, "state": "failed", "detail": "signature changed"}
    child_has(row)
    finding = doctor.check_child()
    assert (finding.status, finding.why) == ("problem", "one: signature changed")
    child_has(row | {"state": "waiting", "detail": ""})
    monkeypatch.setattr(upstream, "installed", lambda: "0.26.0")
    assert doctor.check_child().why == "the shim did not come up in a child process"
    monkeypatch.setattr(upstream, "installed", lambda: None)
    assert doctor.check_child().status == "skipped"
    child_has(row | {"state": "applied"})
    assert doctor.check_child().status == "ok"


@pytest.mark.parametrize(
    ("capability", "assumed", "status", "why"),
    [
        ((12, 0), "", "warning", "the indexer is vLLM's where a probe proves it, else the shim's"),
        ((9, 0), "12.0", "warning", "TRITON_MLA_SPARSE comes first"),
        ((9, 0), "", "ok", "vLLM's own backends come first"),
        ((7, 5), "", "problem", "needs 8.0"),
    ],
)
def test_gpu(monkeypatch, capability, assumed, status, why):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", assumed)
    finding = doctor.check_gpu()
    assert finding.status == status
    assert why in finding.why


@pytest.mark.parametrize(
    ("capability", "status"), [(None, "skipped"), ((7, 5), "problem"), ((9, 0), "ok"), ((12, 0), "ok")]
)
def test_gguf_layers(monkeypatch, capability, status):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert doctor.check_gguf().status == status


def test_a_required_patch_that_is_left_out_is_reported(child_has):
    rows = [
        {"name": "gguf_loader", "required": True, "state": "off", "detail": ""},
        {"name": "closing_gate", "required": True, "state": "applied", "detail": ""},
    ]
    child_has(*rows)
    finding = doctor.check_child()
    assert finding.status == "warning" and "gguf_loader" in finding.why and "closing_gate" not in finding.why
    rows[0]["state"] = "applied"
    assert doctor.check_child().status == "ok"
