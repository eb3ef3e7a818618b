"""`glm5-shim wrap` becomes the command, with the shim on. Nothing of the shim's ever goes to stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wrap(python):
    def run(*command: str, **env: str):
        return python("-m", "shim.commands.cli", "wrap", *command, **({"PYTHONPATH": str(ROOT)} | env))

    return run


def test_the_command_gets_its_arguments_and_its_exit_code_back(wrap):
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = wrap(sys.executable, "-c", code, "--help", "-tp", "2", "--", "--json")
    assert done.stdout == "['--help', '-tp', '2', '--', '--json']\n"
    assert done.returncode == 7


def test_a_leading_double_dash(wrap):
    assert wrap("--", sys.executable, "-c", "print(1)").stdout == "1\n"


def test_the_shim_is_on_and_the_users_path_is_kept(wrap, stub_vllm):
    registry = (
        "import vllm.v1.attention.backends.registry as r; print(r.AttentionBackendEnum['TRITON_MLA_SPARSE'].value)"
    )
    done = wrap(sys.executable, "-c", registry, PYTHONPATH=os.pathsep.join([str(stub_vllm), str(ROOT)]))
    assert done.stdout.startswith("shim.attention.")


def test_it_is_the_same_process(clean_env, tmp_path):
    import subprocess

    code = "import os; print(os.getpid())"
    process = subprocess.Popen(
        [sys.executable, "-m", "shim.commands.cli", "wrap", sys.executable, "-c", code],
        env=clean_env | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate()
    assert int(out) == process.pid


def test_a_command_beside_the_interpreter_needs_no_path(wrap):
    done = wrap("python", "-c", "import sys; print(sys.prefix)", PATH="/nowhere")
    assert done.stdout.strip() == sys.prefix


def test_no_such_command(wrap):
    done = wrap("no-such-command")
    assert done.returncode == 127
    assert done.stderr.startswith("glm5-shim: 'no-such-command' is neither in ")


def test_a_file_that_cannot_be_run(wrap, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = wrap(str(script))
    assert done.returncode == 127
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-sE"])
def test_it_warns_of_options_that_keep_the_shim_out(wrap, option):
    done = wrap(sys.executable, option, "-c", "print(1)")
    assert done.stdout == "1\n"
    assert f"python {option} ignores" in done.stderr


def test_it_warns_of_another_interpreter(wrap, tmp_path):
    script = tmp_path / "other"
    script.write_text("#!/usr/bin/python3\nprint(1)\n")
    script.chmod(0o755)
    assert f"{script} runs in /usr, not in {sys.prefix}: " in wrap(str(script)).stderr


def test_it_warns_of_another_interpreter_behind_a_link_a_space_or_a_starter(tmp_path):
    """Nothing is run, so it does not matter what the other environment has."""
    from shim.commands.wrap import warnings

    venv = tmp_path / "other venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    base, other = tmp_path / "base" / "bin" / "python3.11", venv / "bin" / "python"
    base.parent.mkdir(parents=True)
    base.touch(0o755)
    other.symlink_to(base)
    link, script = tmp_path / "lp", tmp_path / "script"
    script.write_text(f"""#!/bin/sh\n'''exec' "{other}" -E "$0" "$@"\n' '''\nprint(1)\n""")
    script.chmod(0o755)
    off = f"not in {sys.prefix}: the shim stays off there"
    in_venv = f"{other} runs in {venv}, {off}"
    assert warnings(str(other), []) == [in_venv]
    isolating = "python -E ignores PYTHONPATH or sitecustomize: the shim stays off"
    assert warnings(str(script), []) == [f"{script} runs in {venv}, {off}", isolating]
    # Python itself looks for pyvenv.cfg beside the link, not beside its target
    link.symlink_to(other)
    assert warnings(str(link), []) == [f"{link} runs in {tmp_path / 'base'}, {off}"]
    for starter in (["env", "X=1"], ["timeout", "-k", "5", "9"], ["nohup", "env", "-u", "X"]):
        assert warnings(starter[0], [*starter[1:], str(other), "-c", ""]) == [in_venv]
    assert warnings("env", ["-u", "X"]) == warnings("env", [sys.executable]) == []
    emptied = ["env -i takes PYTHONPATH away: the shim stays off"]
    assert warnings("env", ["-i", "X=1", sys.executable]) == emptied
    assert warnings("nice", ["env", "-", sys.executable]) == emptied
    assert warnings("env", ["-i", "PYTHONPATH=x", sys.executable]) == warnings("env", [sys.executable, "-i"]) == []


def test_options_behind_a_value_are_seen(wrap):
    done = wrap(sys.executable, "-W", "error", "-E", "-c", "print(1)")
    assert "python -E ignores" in done.stderr


@pytest.mark.parametrize("line", ["#!{python} -E", "#!/usr/bin/env -S {python} -E"])
def test_options_in_a_script_are_seen(wrap, tmp_path, line):
    script = tmp_path / "script"
    script.write_text(line.format(python=sys.executable) + "\nprint(1)\n")
    script.chmod(0o755)
    assert "python -E ignores" in wrap(str(script)).stderr


def test_a_command_in_quotes(wrap):
    done = wrap("vllm serve x.gguf")
    assert done.stderr.startswith("glm5-shim: 'vllm serve x.gguf' is one word to the shell; give the command without")


def test_a_file_that_is_no_program(wrap):
    done = wrap("/etc/passwd")
    assert (done.returncode, done.stderr) == (127, "glm5-shim: /etc/passwd is not an executable file\n")


def test_no_warning_without_reason(wrap):
    assert wrap(sys.executable, "-c", "print(1)", "-I").stderr == ""
    assert wrap(sys.executable, "-Wignore::EncodingWarning", "-c", "print(1)").stderr == ""
    assert wrap("/bin/echo", "-E").stderr == ""


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("0.15.1", "vLLM 0.15.1 is older than the oldest supported, 0.16.0"),
        ("0.16.1+cu129", "vLLM 0.16.1 is not supported: its registry is another"),
        ("0.33.0", ""),
        ("1.0", ""),
    ],
)
def test_a_release_that_is_not_supported_is_refused_by_name(monkeypatch, installed, message):
    from command_line import invoke

    from shim import upstream
    from shim.commands import wrap

    for name in [name for name in os.environ if name.startswith("GLM5_SHIM")]:
        monkeypatch.delenv(name)
    ran = []
    monkeypatch.setattr(upstream, "version", lambda name: installed)
    monkeypatch.setattr(upstream, "UNSUPPORTED", {"0.16.1": "its registry is another"})
    monkeypatch.setattr(wrap.os, "execve", lambda *arguments: ran.append(arguments))
    done = invoke(["wrap", "true"])
    assert done.stderr == (f"glm5-shim: {message}\n" if message else "")
    assert (done.exit_code, len(ran)) == ((127, 0) if message else (0, 1))


def test_ray_workers_get_the_shims_variables_and_the_users(clean_env):
    from shim import env
    from shim.commands import wrap

    found = wrap.environment({"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE,GLM5_SHIM"})["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
    names = found.split(",")
    assert names[:2] == ["MINE", "GLM5_SHIM"] and len(set(names)) == len(names)
    assert set(names) == {"MINE"} | {v.name for v in env.VARIABLES} - {"GLM5_SHIM_PYTHON"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GLM5_SHIM_OFF", "banana", "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"),
        ("GLM5_SHIM_SKIP", "typo", "GLM5_SHIM_SKIP names typo; the patches are: gguf_engine_args, "),
        ("GLM5_SHIM_ASSUME_CAPABILITY", "120", "GLM5_SHIM_ASSUME_CAPABILITY is '120'; expected major.minor, one of "),
        ("GLM5_SHIM_INDEXER", "banana", "GLM5_SHIM_INDEXER is 'banana'; expected native, triton or auto"),
        ("GLM5_SHIM_PYTHON", "/nowhere:3.11", "GLM5_SHIM_PYTHON is '/nowhere:3.11'; expected PREFIX:MAJOR.MINOR of a "),
        ("GLM5_SHIM_CACHE_DIR", "/dev/null", "GLM5_SHIM_CACHE_DIR is '/dev/null'; expected a directory"),
        (
            "GLM5_SHIM_ASSUME_CAPABILTY",
            "12.0",
            "GLM5_SHIM_ASSUME_CAPABILTY is not a variable of glm5-shim; did you mean GLM5_SHIM_ASSUME_CAPABILITY?",
        ),
    ],
)
def test_a_senseless_variable_is_refused_before_the_command_runs(wrap, name, value, message):
    done = wrap(sys.executable, "-c", "print('ran')", **{name: value})
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(f"glm5-shim: {message}") and done.stderr.count("\n") == 1


def test_a_variable_that_is_like_none_of_ours_is_reported(wrap):
    done = wrap(sys.executable, "-c", "print('ran')", GLM5_SHIM_FOREIGN="1")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr == "glm5-shim: GLM5_SHIM_FOREIGN is not a variable of glm5-shim, and does nothing\n"


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ({"GLM5_SHIM_OFF": "banana"}, "GLM5_SHIM_OFF is 'banana'; expected 1 (on) or 0 (off)"),
        ({"GLM5_SHIM_INDEXER": "banana"}, "GLM5_SHIM_INDEXER is 'banana'; expected native, triton or auto"),
        ({"GLM5_SHIM_INDEXR": "triton"}, "did you mean GLM5_SHIM_INDEXER?"),
    ],
)
def test_without_wrap_a_senseless_variable_stops_vllm_and_nothing_else(python, stub_vllm, variable, message):
    path = os.pathsep.join([str(ROOT), str(stub_vllm)])
    done = python("-c", "print('fine')", PYTHONPATH=path, **variable)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
    done = python("-c", "import vllm", PYTHONPATH=path, **variable)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


SCRIPT = """
import os, sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
from vllm.engine.arg_utils import EngineArgs
os.environ["GLM5_SHIM"] = sys.argv[1]  # not earlier: an editable install would switch the shim on before vLLM
EngineArgs(model=sys.argv[2])
print("made")
"""


@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    ("value", "gguf", "message"),
    [
        ("1", True, "ShimError: glm5-shim: GLM5_SHIM=1 alone is too late for {}: vLLM loads its plugins after"),
        ("1", False, ""),
        ("banana", False, "GLM5_SHIM is 'banana'; expected 1 (on) or 0 (off)"),
    ],
)
def test_a_script_that_only_vllms_plugins_switch_on(python, tmp_path, value, gguf, message):
    """EngineArgs.__post_init__ loads the plugins. That is too late for a GGUF, and early enough for other models."""
    from shim.gguf.tiny import write_tiny

    model = str(write_tiny(tmp_path, parts=1)) if gguf else str(tmp_path)
    done = python("-c", SCRIPT, value, model, PYTHONPATH="")
    assert (done.stdout, done.returncode) == (("", 1) if message else ("made\n", 0)), done.stderr
    assert message.format(model) in done.stderr.splitlines()[-1] if message else "glm5-shim" not in done.stderr


def test_a_command_without_the_shim_is_reported(wrap):
    done = wrap(sys.executable, "-c", "import sys; print('shim.activate' in sys.modules)", GLM5_SHIM_OFF="1")
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert done.stderr == "glm5-shim: GLM5_SHIM_OFF is set: the command runs without the shim\n"


@pytest.fixture
def command_line(python):
    """`command_line(redirection, *arguments)`: this Python started by a shell, which closes what redirection names."""

    def run(redirection: str, *arguments: str, **env: str):
        return python("-c", f'exec "$0" "$@" {redirection}', sys.executable, *arguments, executable="/bin/sh", **env)

    return run


CRASH = """
from shim.commands import cli, patches
patches.processes = lambda: 1 / 0
cli.main(["patches", "--ledgers"{}])
"""
CLI = ("-m", "shim.commands.cli")


@pytest.mark.parametrize("redirection", ["2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ((*CLI, "doctor", "nosuch"), 2, ""),
        ((*CLI, "doctor", "--json", "nosuch"), 2, "no check is named nosuch; "),
        ((*CLI, "nosuch"), 2, ""),
        ((*CLI, "gguf", "/nowhere"), 1, ""),
        ((*CLI, "gguf", "/nowhere", "--json"), 1, "/nowhere does not exist; "),
        ((*CLI, "explain", "--capability", "3"), 1, ""),
        ((*CLI, "wrap", "no-such-command"), 127, ""),
        (("-c", CRASH.format("")), 1, ""),
        (("-c", CRASH.format(", '--json'")), 1, "ZeroDivisionError: "),
    ],
)
def test_with_stderr_closed_an_error_does_not_go_to_stdout(command_line, redirection, arguments, code, error):
    done = command_line(redirection, *arguments)
    assert (done.returncode, done.stderr) == (code, "")
    if error and redirection == "2>&-":
        assert json.loads(done.stdout)["error"].startswith(error)
    else:
        assert done.stdout == ""


@pytest.mark.parametrize("redirection", ["2>&-", ">&- 2>&-"])
def test_with_stderr_closed_the_command_has_stdout_for_itself(command_line, redirection, stub_vllm, tmp_path, ledgers):
    """`wrap` warns of a variable and of -E. The shim in the command reports a patch that is left out."""
    path = os.pathsep.join([str(ROOT), str(stub_vllm)])
    result = tmp_path / "result"
    code = (
        "import pathlib, sys, vllm.v1.attention.backends.registry; print('ran');"
        f"pathlib.Path({str(result)!r}).write_text(str('shim.activate' in sys.modules)); sys.exit(7)"
    )
    env = {"PYTHONPATH": path, "GLM5_SHIM_FOREIGN": "1", "GLM5_SHIM_SKIP": "worker_seal"}
    loud = command_line("", *CLI, "wrap", sys.executable, "-c", code, **env)
    assert "GLM5_SHIM_FOREIGN is not" in loud.stderr and "GLM5_SHIM_SKIP leaves out worker_seal" in loud.stderr
    result.unlink()
    done = command_line(redirection, *CLI, "wrap", sys.executable, "-c", code, **env)
    assert (done.stdout, done.stderr, done.returncode) == ("ran\n" if redirection == "2>&-" else "", "", 7)
    assert result.read_text() == "True"
    assert len(ledgers()) == 2  # each is JSON: no line of ours went into a file that got the number of a closed stream
    done = command_line(redirection, *CLI, "wrap", sys.executable, "-E", "-c", "print('ran')", GLM5_SHIM_FOREIGN="1")
    assert (done.stdout, done.stderr, done.returncode) == ("ran\n" if redirection == "2>&-" else "", "", 0)
