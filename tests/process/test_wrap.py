"""`glm5-shim wrap`: becomes the command, with the shim on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wrap(python):
    def run(*command: str, **env: str):
        return python("-m", "shim.cli", "wrap", *command, **({"PYTHONPATH": str(ROOT)} | env))

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
        [sys.executable, "-m", "shim.cli", "wrap", sys.executable, "-c", code],
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
    assert "runs in /usr/bin/python3, not in" in wrap(str(script)).stderr


def test_options_behind_a_value_are_seen(wrap):
    done = wrap(sys.executable, "-W", "error", "-E", "-c", "print(1)")
    assert "python -E ignores" in done.stderr


@pytest.mark.parametrize("line", ["#!{python} -E", "#!/usr/bin/env -S {python} -E"])
def test_options_in_a_script_are_seen(wrap, tmp_path, line):
    script = tmp_path / "script"
    script.write_text(line.format(python=sys.executable) + "\nprint(1)\n")
    script.chmod(0o755)
    assert "python -E ignores" in wrap(str(script)).stderr


def test_a_file_that_is_no_program(wrap):
    done = wrap("/etc/passwd")
    assert (done.returncode, done.stderr) == (127, "glm5-shim: /etc/passwd is not an executable file\n")


def test_no_warning_without_reason(wrap):
    assert wrap(sys.executable, "-c", "print(1)", "-I").stderr == ""
    assert wrap(sys.executable, "-Wignore::EncodingWarning", "-c", "print(1)").stderr == ""
    assert wrap("/bin/echo", "-E").stderr == ""


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("0.15.1", "vLLM 0.15.1 is older than the oldest supported, 0.16.0"),
        ("0.16.1+cu129", "vLLM 0.16.1 is not supported: its registry is another"),
        ("0.33.0", ""),
        ("1.0", ""),
    ],
)
def test_a_release_that_is_not_supported_is_refused_by_name(monkeypatch, installed, said):
    from click.testing import CliRunner

    from shim import wrap
    from shim.cli import main

    ran = []
    monkeypatch.setattr(wrap, "version", lambda name: installed)
    monkeypatch.setattr(wrap, "UNSUPPORTED", {"0.16.1": "its registry is another"})
    monkeypatch.setattr(wrap.os, "execve", lambda *arguments: ran.append(arguments))
    done = CliRunner().invoke(main, ["wrap", "true"])
    assert done.stderr == (f"glm5-shim: {said}\n" if said else "")
    assert (done.exit_code, len(ran)) == ((127, 0) if said else (0, 1))


def test_ray_workers_get_the_shims_variables_and_the_users(clean_env):
    from shim import env, wrap

    found = wrap.environment({"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "MINE,GLM5_SHIM"})["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
    names = found.split(",")
    assert names[:2] == ["MINE", "GLM5_SHIM"] and len(set(names)) == len(names)
    assert set(names) == {"MINE"} | {v.name for v in env.VARIABLES} - {"GLM5_SHIM_PYTHON"}
