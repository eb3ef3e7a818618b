"""`glm5-shim explain`: vLLM's own words, on real releases. Without the shim no backend takes GLM-5 on 12.0."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
import wheels
from command_line import invoke

from shim import process
from shim.commands import explain

NATIVE = "FLASHINFER_MLA_SPARSE_SM120"  # takes GLM-5 where flashinfer is installed, from 0.24 on
OURS = "TRITON_MLA_SPARSE"


def answer(monkeypatch, version: str | None, *options: str) -> dict:
    path = [str(wheels.sources(version))] if version else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    done = invoke(["explain", "--json", *options])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def forks(monkeypatch, tmp_path_factory):
    """`explain`'s children are forks of a process that has torch already: see tests/contract/wheel_child.py."""

    def run(module, question, variables):
        place = tmp_path_factory.mktemp("child")
        argv = ["-c", json.dumps(question)]
        code = f"import runpy; sys.argv = {argv}; runpy.run_module({module!r}, run_name='__main__'); say(0)"
        wheels.child(code, place, **variables)
        answer = (place / "stdout").read_text().partition("glm5-shim-answer ")[2]
        return json.loads(answer.splitlines()[0])

    monkeypatch.setattr(process, "ask_child", run)


@pytest.mark.parametrize("version", ["0.16.0", "0.23.0", "0.26.0", "0.33.0"])
def test_on_120_only_with_the_shim(monkeypatch, version, forks):
    found = answer(monkeypatch, version, "--capability", "12.0")
    assert (found["vllm"], found["capability"]) == (version, "12.0")
    rows = {row["name"]: row for row in found["backends"]}
    assert {name for name, row in rows.items() if row["without_shim"]["accepted"]} <= {NATIVE}
    assert found["selected"]["without_shim"] in (None, NATIVE)
    assert rows[OURS]["with_shim"] == {"accepted": True, "reasons": []}
    assert found["selected"]["with_shim"] == OURS
    for name, row in rows.items():
        assert row["without_shim"]["accepted"] or row["without_shim"]["reasons"], name
        if name != OURS:
            assert row["with_shim"] == row["without_shim"], name
    assert rows["TRITON_MLA"]["without_shim"]["reasons"] == ["sparse not supported"]
    assert "compute capability not supported" in rows["FLASHMLA_SPARSE"]["without_shim"]["reasons"]


def test_another_capability_cache_and_dtype_on_the_installed_wheel(monkeypatch):
    found = answer(monkeypatch, None, "--capability", "7.5", "--kv-cache-dtype", "fp8_e5m2", "--dtype", "float16")
    (ours,) = [row for row in found["backends"] if row["name"] == OURS]
    assert found["selected"] == {"without_shim": None, "with_shim": None}
    assert set(ours["with_shim"]["reasons"]) == {"kv_cache_dtype not supported", "compute capability not supported"}
    assert found["gpu"] is torch.cuda.is_available()


@pytest.mark.parametrize(
    ("gpu", "capability", "message"),
    [(True, "", ""), (False, "", "capability 12.0 is assumed, and some reasons"), (False, "12.0", "GPU here: some")],
)
def test_without_a_gpu_the_assumption_is_reported(monkeypatch, capsys, gpu, capability, message):
    found = {"vllm": "0.33.0", "capability": "12.0", "gpu": gpu, "selected": None, "backends": {}}
    monkeypatch.setattr(explain, "ask", lambda *question, **shim: found)
    monkeypatch.delenv("GLM5_SHIM_OFF", raising=False)
    assert explain.explain(capability)["gpu"] is gpu
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [message in line for line in lines] == ([True] if message else [])
    monkeypatch.setenv("GLM5_SHIM_OFF", "1")
    explain.explain(capability)
    assert capsys.readouterr().err.startswith("glm5-shim: GLM5_SHIM_OFF is set: vLLM runs without the shim; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "banana"), "kv-cache-dtype is 'banana', expected one of auto, "),
        (("12",), "capability is '12'; expected major.minor, one of 7.0"),
        (("99.0",), "capability is '99.0'; expected major.minor, one of 7.0"),
        (("", "auto", "int8"), "dtype is 'int8', expected one of"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_announced(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(explain, "ask", lambda *question, **shim: pytest.fail("a child was started"))
    with pytest.raises(ValueError, match=message):
        explain.explain(*arguments)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("version", "last"), [("0.16.0", "fp8_ds_mla"), ("0.33.0", "nvfp4_4over6")])
def test_a_cache_dtype_is_one_of_vllms_own(monkeypatch, version, last):
    """The list differs between releases, and is read without an import."""
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(wheels.sources(version))
    known = explain._cache_dtypes()
    assert (known[0], known[-1], "vllm" in sys.modules) == ("auto", last, False)


def test_without_a_vllm_it_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('broken install')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = invoke(["explain"])
    assert (done.exit_code, done.stdout) == (1, "")
    announcement, problem = done.stderr.splitlines()
    assert announcement == "glm5-shim: asking vLLM, without and with the shim: about half a minute"
    assert problem == "glm5-shim: vLLM could not be asked without the shim: ImportError: broken install"
