"""`glm5-shim wrap`: sets the environment, then becomes the command. Its pid, signals and exit code stay its own."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shim import env, process, upstream

RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
# programs that start another program, which is one of their arguments
STARTERS = ("env", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "timeout")


class WrapProblem(Exception):
    """The command cannot be run. The message is one line."""


def bootstrap_dir() -> Path:
    """The directory that goes on PYTHONPATH: shim/_bootstrap of a wheel, the root of a checkout."""
    package = process.PACKAGE
    packed = package / "_bootstrap"
    return packed if packed.is_dir() else package.parent


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the shim switched on for this interpreter and all its children."""
    ours = str(bootstrap_dir())
    others = [p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.realpath(p) != ours]
    # vLLM copies these to Ray workers on other machines, where GLM5_SHIM_PYTHON would name a Python of this one
    ray = [name for name in base.get(RAY_COPIES, "").split(",") if name]
    ray += [v.name for v in env.VARIABLES if v.name not in ("GLM5_SHIM_PYTHON", *ray)]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join([ours, *others]),
        "GLM5_SHIM": "1",
        RAY_COPIES: ",".join(ray),
        "GLM5_SHIM_PYTHON": env.interpreter(),
    }


def find(command: str) -> str:
    """The executable for `command`: a bare name is searched for beside this interpreter, then on PATH. WrapProblem if
    there is none."""
    beside = os.path.join(sys.prefix, "bin")
    found = shutil.which(command, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if found is None and os.path.exists(command):
        raise WrapProblem(f"{command} is not an executable file")
    if found is None and len(command.split()) > 1:
        raise WrapProblem(f"{command!r} is one word to the shell; give the command without quotes around it")
    if found is None:
        raise WrapProblem(f"{command!r} is neither in {beside} nor on PATH")
    return found


def warnings(executable: str, arguments: Sequence[str]) -> list[str]:
    """What in this command keeps the shim out: one line for each fault."""
    if os.path.basename(executable) in STARTERS:
        for place, argument in enumerate(arguments):
            if started := shutil.which(argument):  # the first program: an option or its value is none
                words = {*arguments[:place]}
                emptied = os.path.basename(executable) == "env" and words & {"-", "-i", "--ignore-environment"}
                if emptied and not any(word.startswith("PYTHONPATH=") for word in words):
                    return ["env -i takes PYTHONPATH away: the shim stays off"]
                return warnings(started, arguments[place + 1 :])
        return []
    interpreter, options = _shebang(executable)
    if not interpreter:
        interpreter, options = executable, _python_options(arguments)
    if not os.path.basename(os.path.realpath(interpreter)).startswith("python"):
        return []
    lines = []
    prefix = _prefix(interpreter)
    if os.path.realpath(prefix) != os.path.realpath(sys.prefix):
        lines.append(f"{executable} runs in {prefix}, not in {sys.prefix}: the shim stays off there")
    isolating = [option for option in options if set(option) & set("IES")]
    return lines + [f"python {o} ignores PYTHONPATH or sitecustomize: the shim stays off" for o in isolating]


def run(command: Sequence[str]) -> None:
    """Replaces this process by the command. WrapProblem if the command cannot be found or started, this vLLM is not
    supported, or a GLM5_SHIM_* variable makes no sense."""
    from shim.patches import PATCHES

    refusal = upstream.unsupported(upstream.installed() or "0.16.0")
    if refusal:
        raise WrapProblem(refusal)
    try:
        env.check(tuple(patch.name for patch in PATCHES))
    except env.EnvProblem as problem:
        raise WrapProblem(str(problem)) from None
    if env.off():
        process.say("GLM5_SHIM_OFF is set: the command runs without the shim")
    for name in env.unknown():
        process.say(f"{name} is not a variable of glm5-shim, and does nothing")
    executable = find(command[0])
    for line in warnings(executable, command[1:]):
        process.say(line)
    try:
        # argv[0] is the full path, because a Python that is called by a bare name searches PATH for its own prefix
        os.execve(executable, [executable, *command[1:]], environment(os.environ))
    except OSError as problem:
        raise WrapProblem(f"{executable}: {problem.strerror}") from problem


def _prefix(interpreter: str) -> Path:
    """sys.prefix of this Python. Like Python itself, this looks for pyvenv.cfg beside a link, not beside its target."""
    called = Path(os.path.abspath(interpreter)).parent
    if any((place / "pyvenv.cfg").is_file() for place in (called, called.parent)):
        return called.parent
    return Path(os.path.realpath(interpreter)).parent.parent


def _shebang(executable: str) -> tuple[str, list[str]]:
    """The interpreter that a script names, and that interpreter's options; ("", []) for a program."""
    with open(executable, "rb") as file:
        first, second = (file.readline(8192).decode(errors="replace") for _ in range(2))
    words = first[2:].split() if first.startswith("#!") else []
    if words == ["/bin/sh"] and second.startswith("'''exec' "):  # pip writes this if the path is long or has a space
        with suppress(ValueError):
            words = shlex.split(second)[1:]
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
        words[:1] = [shutil.which(words[0]) or words[0]] if words else []
    return (words[0], _python_options(words[1:])) if words else ("", [])


def _python_options(arguments: Sequence[str]) -> list[str]:
    """Python's own options before the script, -c or -m, without those that take a value."""
    options = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument.startswith("--") or argument[:2] in ("-c", "-m") or argument == "-":
            break
        if argument in ("-W", "-X"):
            next(rest, None)
        elif argument[:2] not in ("-W", "-X"):
            options.append(argument)
    return options
