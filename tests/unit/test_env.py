"""The GLM5_SHIM_* variables, and the documents made from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shim import env

ROOT = Path(__file__).parents[2]


def test_skip(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_SKIP", " a, b,,")
    assert env.skip(("a", "b", "c")) == {"a", "b"}
    monkeypatch.setenv("GLM5_SHIM_SKIP", "a,typo")
    with pytest.raises(env.EnvProblem, match="names typo; the patches are: a, b"):
        env.skip(("a", "b"))


@pytest.mark.parametrize("text", ["12", "12.", "sm_120", "12.0.1"])
def test_a_capability_that_is_none(monkeypatch, text):
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", text)
    with pytest.raises(env.EnvProblem, match="expected major.minor, for example 12.0"):
        env.assumed_capability()


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_off(monkeypatch, value, off):
    monkeypatch.setenv("GLM5_SHIM_OFF", value)
    assert env.off() is off


def test_a_home_in_a_directory(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", "~/x")
    assert env.cache_dir() == Path.home() / "x"


def test_capability(monkeypatch):
    monkeypatch.delenv("GLM5_SHIM_ASSUME_CAPABILITY", raising=False)
    assert env.assumed_capability() is None
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", "12.1")
    assert env.assumed_capability() == (12, 1)


def test_every_variable_that_the_code_reads_is_declared():
    code = "\n".join(p.read_text() for p in [*(ROOT / "shim").rglob("*.py"), ROOT / "sitecustomize.py"])
    read = set(re.findall(r"\bGLM5_SHIM(?:_[A-Z]+)*\b", code))
    assert read == {v.name for v in env.VARIABLES}


def test_readme_has_the_table_of_variables_and_of_patches():
    from shim.patches import PATCHES

    readme = (ROOT / "README.md").read_text()
    for variable in env.VARIABLES:
        assert f"| `{variable.name}` | {variable.default or '-'} | {variable.meaning} |" in readme
    for patch in PATCHES:
        assert f"| `{patch.name}` | `{patch.target}` | {patch.why} |" in readme
