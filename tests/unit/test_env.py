"""The GLM5_SHIM_* variables, and the documents made from them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shim import env

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, own_ledger):
    for name in [name for name in os.environ if name.startswith("GLM5_SHIM")]:
        monkeypatch.delenv(name)


def test_skip(monkeypatch):
    monkeypatch.setenv("GLM5_SHIM_SKIP", " a, b,,")
    assert env.skip(("a", "b", "c")) == {"a", "b"}
    monkeypatch.setenv("GLM5_SHIM_SKIP", "a,typo")
    with pytest.raises(env.EnvProblem, match="names typo; the patches are: a, b"):
        env.skip(("a", "b"))


@pytest.mark.parametrize("text", ["12", "12.", "sm_120", "12.0.1", "120.0", "12.9"])
def test_a_capability_that_no_gpu_has(monkeypatch, text):
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", text)
    with pytest.raises(
        env.EnvProblem, match=f"ASSUME_CAPABILITY is '{text}'; expected major.minor, one of 7.0, .*12.0"
    ):
        env.assumed_capability()


YES, NO = ("1", "true", "yes", "ON"), ("0", "false", "No", "off", "")


@pytest.mark.parametrize(("value", "off"), [*((v, True) for v in YES), *((v, False) for v in NO)])
def test_off(monkeypatch, value, off):
    monkeypatch.setenv("GLM5_SHIM_OFF", value)
    assert env.off() is off


@pytest.mark.parametrize("name", ["GLM5_SHIM", "GLM5_SHIM_OFF"])
@pytest.mark.parametrize("value", ["banana", "2", "y", " 1"])
def test_a_switch_that_is_neither_on_nor_off(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(env.EnvProblem, match=rf"{name} is '{value}'; expected 1 \(on\) or 0 \(off\)"):
        env.check(())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("GLM5_SHIM_ASSUME_CAPABILTY", "GLM5_SHIM_ASSUME_CAPABILITY"),
        ("GLM5_SHIM_CAPABILITY", "GLM5_SHIM_ASSUME_CAPABILITY"),
        ("GLM5_SHIM_SKIPS", "GLM5_SHIM_SKIP"),
        ("GLM5_SHIM_STATEDIR", "GLM5_SHIM_STATE_DIR"),
        ("GLM5_SHIM_OF", "GLM5_SHIM_OFF"),
        ("GLM5_SHIM_EVERY_RELEASE", ""),  # the tests' own
        ("GLM5_SHIM_X", ""),
    ],
)
def test_a_name_that_is_no_variables(monkeypatch, name, nearest):
    monkeypatch.setenv(name, "1")
    assert env.unknown()[name] == nearest
    if nearest:
        with pytest.raises(env.EnvProblem, match=f"{name} is not a variable of glm5-shim; did you mean {nearest}?"):
            env.check(())


def test_check_looks_at_every_variable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    senseless = {
        "GLM5_SHIM": "maybe",
        "GLM5_SHIM_OFF": "maybe",
        "GLM5_SHIM_SKIP": "typo",
        "GLM5_SHIM_CACHE_DIR": str(tmp_path / "file"),
        "GLM5_SHIM_ASSUME_CAPABILITY": "sm_120",
        "GLM5_SHIM_INDEXER": "banana",
        "GLM5_SHIM_PYTHON": "/nowhere:3.11",
    }
    # a ledger may do without its directory
    assert set(senseless) == {v.name for v in env.VARIABLES} - {"GLM5_SHIM_STATE_DIR"}
    for name, value in senseless.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(env.EnvProblem, match=f"^{name} "):
                env.check(("a",))
    monkeypatch.setenv("GLM5_SHIM_SKIP", "a")
    assert env.check(("a",)) == {"a"}


HERE = f"{sys.prefix}:{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize("value", ["", HERE])
def test_no_other_python_is_meant(monkeypatch, value):
    monkeypatch.setenv("GLM5_SHIM_PYTHON", value)
    assert env.foreign() == ""


def test_another_python_is_meant(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.9").touch()
    monkeypatch.setenv("GLM5_SHIM_PYTHON", f"{tmp_path}:3.9")
    assert env.foreign() == f"{tmp_path}:3.9"
    assert env.check(()) == frozenset()


@pytest.mark.parametrize(
    "value", ["banana", "/nowhere:3.11", "/etc:3.11", f"{sys.prefix}:2.6", sys.executable, ":3", ":"]
)
def test_a_python_that_is_not_there(monkeypatch, value):
    monkeypatch.setenv("GLM5_SHIM_PYTHON", value)
    with pytest.raises(env.EnvProblem) as refused:
        env.foreign()
    assert str(refused.value) == (
        f"GLM5_SHIM_PYTHON is {value!r}; expected PREFIX:MAJOR.MINOR of a Python that exists, for example {HERE}: "
        "unset it, because `wrap` sets it"
    )


@pytest.mark.parametrize("name", ["GLM5_SHIM_STATE_DIR", "GLM5_SHIM_CACHE_DIR"])
def test_a_directory_is_the_same_for_every_process(monkeypatch, name):
    monkeypatch.setenv(name, "relative")
    with pytest.raises(env.EnvProblem, match=f"{name} is 'relative'; expected an absolute path"):
        env.check(())


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


SWITCHES = ("1", "true", "TRUE", "yes", "on", "On", "0", "false", "no", "off", "", "banana", "2")


@pytest.fixture
def gate(monkeypatch):
    """sitecustomize.py as a module, in a Python that has vLLM."""
    spec = importlib.util.spec_from_file_location("stub_sitecustomize", ROOT / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", "")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stub_sitecustomize", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PathFinder", SimpleNamespace(find_spec=lambda name: name == "vllm"))
    return module


@pytest.mark.parametrize("value", SWITCHES)
def test_every_place_reads_a_switch_alike(monkeypatch, gate, value):
    """The way in, the rest of the shim, and doctor."""
    from shim.commands import doctor

    def flag(name):
        try:
            return env.flag(name)
        except env.EnvProblem:
            return None  # refused, where vLLM is imported

    monkeypatch.setenv("GLM5_SHIM", value)
    assert gate.wanted() is bool(flag("GLM5_SHIM"))
    monkeypatch.delenv("GLM5_SHIM")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLM5_SHIM_OFF", value)
    assert gate.wanted() is not flag("GLM5_SHIM_OFF") or flag("GLM5_SHIM_OFF") is None
    if flag("GLM5_SHIM_OFF"):
        assert doctor.check_child().why.startswith("GLM5_SHIM_OFF is set")
        assert doctor.check_environment().status == "warning"


@pytest.mark.parametrize(
    "value", ["", sys.prefix, f"{sys.prefix}:2.7", f"{sys.prefix}:{sys.version_info[0]}", ":", "x"]
)
def test_every_place_reads_the_interpreter_alike(monkeypatch, gate, value):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLM5_SHIM_PYTHON", value)
    try:
        foreign = bool(env.foreign())
    except env.EnvProblem:
        foreign = False  # then the shim comes up, and refuses
    assert gate.wanted() is not foreign


DIRECTORIES = {"state": ("XDG_STATE_HOME", ".local/state"), "cache": ("XDG_CACHE_HOME", ".cache")}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_relative_xdg_directory_is_ignored(monkeypatch, kind):
    """As the XDG specification wants it: processes of a server may work in several directories."""
    xdg, usual = DIRECTORIES[kind]
    find = getattr(env, f"{kind}_dir")
    monkeypatch.delenv(f"GLM5_SHIM_{kind.upper()}_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/of/somebody")
    for value in ("relative", "./here", ""):
        monkeypatch.setenv(xdg, value)
        assert find() == Path("/home/of/somebody", usual, "glm5-shim")
    monkeypatch.setenv(xdg, "/absolute")
    assert find() == Path("/absolute/glm5-shim")


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_user_without_a_home(monkeypatch, kind):
    """No HOME, and no entry in passwd: paths became relative."""
    import pwd

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv(DIRECTORIES[kind][0], raising=False)
    monkeypatch.delenv(f"GLM5_SHIM_{kind.upper()}_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    found = getattr(env, f"{kind}_dir")()
    assert found.is_absolute() and found.parent.name == f"glm5-shim-{os.getuid()}"
    monkeypatch.setenv("HOME", "relative")
    assert getattr(env, f"{kind}_dir")() == found


def test_a_cache_of_another_user_is_refused(monkeypatch, tmp_path):
    """It could hold a config and a chat template of theirs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "glm5-shim").mkdir()
    assert env.check(()) == frozenset()
    monkeypatch.setattr(env, "_owner", lambda path: 4711)
    with pytest.raises(env.EnvProblem, match="belongs to another user; set GLM5_SHIM_CACHE_DIR to a directory of"):
        env.check(())
    monkeypatch.setenv("GLM5_SHIM_CACHE_DIR", str(tmp_path / "glm5-shim"))  # the user's own choice
    assert env.check(()) == frozenset()
