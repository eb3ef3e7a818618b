"""The command line: options, errors and exit codes. Each command imports its own file when it is called."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click

from shim import __version__
from shim.commands.output import print_json

INSTALL = "install the shim into the Python that vLLM runs in"
as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


class Stop(click.ClickException):
    """Ends a command with one line on stderr and exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"glm5-shim: {self.message}", err=True)


class NotRun(Stop):
    """`wrap` could not become the command. A shell uses the same exit code for that."""

    exit_code = 127


class Interrupted(Stop):
    exit_code = 130


class Checked(click.Command):
    """A command that refuses a GLM5_SHIM_* variable without sense before it begins. Its --help works all the same."""

    def invoke(self, ctx: click.Context) -> Any:
        from shim import env
        from shim.patches import PATCHES

        try:
            env.check(tuple(patch.name for patch in PATCHES))
        except env.EnvProblem as problem:
            raise Stop(str(problem)) from None
        return super().invoke(ctx)


class Commands(click.Group):
    """With --json every error, click's own too, is one JSON object on stdout: {"error": line}."""

    command_class = Checked

    def main(self, args: Any = None, **extra: Any) -> Any:  # type: ignore[override]  # click's overloads
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # it is closed: click and traceback would take the other one, or fail
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the process ends
        words = list(sys.argv[1:] if args is None else args)
        if "--json" not in words or words[0] == "wrap":  # behind `wrap`, --json belongs to the command
            return super().main(words, **extra)
        try:
            sys.exit(super().main(words, **extra | {"standalone_mode": False}))
        except click.ClickException as problem:
            line, code = problem.format_message(), problem.exit_code
        except click.Abort:
            line, code = "interrupted", 1
        except Exception as problem:
            click.echo(traceback.format_exc(), err=True, nl=False)
            line, code = f"{type(problem).__name__}: {problem}", 1
        print_json({"error": line})
        sys.exit(code)


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="glm5-shim")
def main() -> None:
    """Serve GLM-5 from a GGUF with an unmodified vLLM wheel."""


# Three commands are not `Checked`. `wrap` refuses with an exit code of its own. If `path` refused, PYTHONPATH would be
# empty and vLLM would start without the shim. `doctor` reports a bad variable as a problem.
@main.command(cls=click.Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def wrap(command: tuple[str, ...]) -> None:
    """Run COMMAND with the shim on. Everything after COMMAND's name belongs to it."""
    from shim import env, ledger
    from shim.commands.wrap import WrapProblem, run

    ledger.prune(env.state_dir())
    try:
        run(command)
    except WrapProblem as problem:
        raise NotRun(str(problem)) from None


@main.command(cls=click.Command)
def path() -> None:
    """The directory that PYTHONPATH needs, for use without `wrap`."""
    from shim.commands.wrap import bootstrap_dir

    click.echo(bootstrap_dir())


@main.command()
@as_json_option
@click.option("--ledgers", is_flag=True, help="Instead: what was patched in each process that ran, newest last.")
def patches(as_json: bool, ledgers: bool) -> None:
    """Every patch: target, why, and its state in a fresh child that imports vLLM's real modules."""
    from shim import env, process
    from shim.commands import patches as command

    if ledgers:
        try:
            found = command.processes()
        except NotADirectoryError:
            raise Stop("GLM5_SHIM_STATE_DIR is a file; expected a directory") from None
        except OSError as problem:
            raise Stop(f"{problem.filename} cannot be read: {problem.strerror}; set GLM5_SHIM_STATE_DIR") from None
        _print(found, as_json, command.show_processes)
        return
    try:
        env.require_on()
        process.say("importing vLLM's modules: about half a minute")
        found = command.patch_table()
    except env.EnvProblem as problem:
        raise Stop(str(problem)) from None
    if found["vllm"] is None and not as_json:
        raise Stop(f"no vLLM came up in {sys.prefix}: {INSTALL}")
    _print(found, as_json, command.show)
    failed = [p["name"] for p in found["patches"] if p["state"] in ("failed", "late") and p["required"]]
    sys.exit(1 if failed or found["vllm"] is None else 0)


@main.command(cls=click.Command)
@as_json_option
@click.option("--list-checks", is_flag=True, help="The names of the checks.")
@click.argument("names", nargs=-1)
def doctor(as_json: bool, list_checks: bool, names: tuple[str, ...]) -> None:
    """Is this machine ready? Runs all checks, or those in NAMES; exit 1 on a problem."""
    from shim import process
    from shim.commands.doctor import CHECKS, examine, show, show_checks

    if list_checks:
        show_checks()
        return
    unknown = [n for n in names if n not in CHECKS]
    if unknown:
        raise click.UsageError(f"no check is named {', '.join(unknown)}; the checks are: {', '.join(CHECKS)}")
    if not names:
        process.say("asking vLLM: about half a minute")
    found = examine(names or tuple(CHECKS))
    _print(found, as_json, show)
    sys.exit(0 if found["ok"] else 1)


@main.command()
@click.option(
    "--capability", default="", help="Compute capability to ask for, as 12.0; default: this GPU's, else 12.0."
)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="As for vllm serve.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]))
@as_json_option
def explain(capability: str, kv_cache_dtype: str, dtype: str, as_json: bool) -> None:
    """Which attention backend takes GLM-5, and why each other does not, in vLLM's words; without and with the shim."""
    from shim.commands import explain as command

    _require("vllm")
    try:
        found = command.explain(capability, kv_cache_dtype, dtype)
    except (command.ExplainProblem, ValueError) as problem:
        raise Stop(str(problem)) from None
    _print(found, as_json, command.show)


@main.command()
@as_json_option
def selftest(as_json: bool) -> None:
    """Run every kernel against its reference, on this GPU or in Triton's interpreter; exit 1 if one is off."""
    _require("torch", "triton")
    from shim.commands import selftest as command

    try:
        found = command.selftest()
    except command.SelftestProblem as problem:
        raise Stop(str(problem)) from None
    _print(found, as_json, command.show)
    sys.exit(0 if found["ok"] else 1)


@main.command()
@as_json_option
@click.argument("path")
def gguf(path: str, as_json: bool) -> None:
    """What vLLM will be told of the GGUF at PATH: any part of it, its directory, or directory:QUANT."""
    from shim.commands.gguf import report, show
    from shim.gguf.files import GGUFProblem, open_model

    try:
        found = report(open_model(path))
    except GGUFProblem as problem:
        raise Stop(str(problem)) from None
    _print(found, as_json, show)
    sys.exit(1 if found["problems"] else 0)


@main.command()
@as_json_option
@click.option(
    "--timeout", default=600, show_default=True, type=click.IntRange(min=1), help="Seconds to wait for the server."
)
def demo(as_json: bool, timeout: int) -> None:
    """Write a tiny GLM-5 GGUF, serve it through `wrap vllm serve`, ask it, and show which patches ran where."""
    _require("vllm", "tokenizers")
    from shim import env
    from shim.commands.demo import DemoProblem, show, work

    try:
        env.require_on()
        found = work(timeout)
    except (DemoProblem, env.EnvProblem) as problem:
        raise Stop(str(problem)) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the server has ended") from None
    _print(found, as_json, show)
    sys.exit(0 if found["ok"] else 1)


def _require(*modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise Stop(f"no {' and no '.join(missing)} in {sys.prefix}: {INSTALL}")


def _print(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    (print_json if as_json else show)(found)


if __name__ == "__main__":
    main()
