"""The command line. Each command imports what it needs when it is called."""

from __future__ import annotations

import json as jsonlib
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from shim import __version__


class Stop(click.ClickException):
    """Ends a command with one line on stderr and exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"glm5-shim: {self.message}", err=True)


class NotRun(Stop):
    """`wrap` did not become the command; a shell's code for that."""

    exit_code = 127


class Interrupted(Stop):
    exit_code = 130


class Checked(click.Command):
    """Refuses a senseless GLM5_SHIM_* variable before it begins; not when asked for its --help."""

    def invoke(self, ctx: click.Context) -> Any:
        from shim import env
        from shim.patches import PATCHES

        try:
            env.check(tuple(patch.name for patch in PATCHES))
        except env.EnvProblem as problem:
            raise Stop(str(problem)) from None
        return super().invoke(ctx)


class Commands(click.Group):
    """With --json an error of any command, click's own too, is one JSON object on stdout: {"error": line}."""

    command_class = Checked

    def main(self, args: Any = None, **extra: Any) -> Any:  # type: ignore[override]  # click's overloads
        words = list(sys.argv[1:] if args is None else args)
        if "--json" not in words or words[0] == "wrap":  # what follows `wrap` is another's
            return super().main(words, **extra)
        try:
            sys.exit(super().main(words, **extra | {"standalone_mode": False}))
        except click.ClickException as problem:
            line, code = problem.format_message(), problem.exit_code
        except click.Abort:
            line, code = "interrupted", 1
        except Exception as problem:
            traceback.print_exc()
            line, code = f"{type(problem).__name__}: {problem}", 1
        _print_json({"error": line})
        sys.exit(code)


@click.group(cls=Commands)
@click.version_option(__version__, prog_name="glm5-shim")
def main() -> None:
    """Serve GLM-5 from a GGUF with an unmodified vLLM wheel."""


# a class of their own: wrap has its exit code for a refusal; an empty PYTHONPATH, which a refusal of path would make,
# starts vLLM without the shim; and doctor reports
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--ledgers", is_flag=True, help="Instead: what was patched in each process that ran, newest last.")
def patches(as_json: bool, ledgers: bool) -> None:
    """Every patch: target, why, and its state in a fresh child that imports vLLM's real modules."""
    from shim import env
    from shim.commands import doctor

    if ledgers:
        try:
            found = doctor.processes()
        except NotADirectoryError:
            raise Stop("GLM5_SHIM_STATE_DIR is a file; expected a directory") from None
        except OSError as problem:
            raise Stop(f"{problem.filename} cannot be read: {problem.strerror}; set GLM5_SHIM_STATE_DIR") from None
        (_print_json if as_json else _print_processes)(found)
        return
    try:
        env.require_on()
        _announce("importing vLLM's modules: about half a minute")
        table = doctor.patches()
    except env.EnvProblem as problem:
        raise Stop(str(problem)) from None
    if as_json:
        _print_json(table)
    else:
        if table["vllm"] is None:
            raise Stop(f"no vLLM came up in {sys.prefix}: install the shim into the Python that vLLM runs in")
        click.echo(f"vLLM {table['vllm']}")
        _columns([(p["state"], p["name"], p["detail"] or p["why"]) for p in table["patches"]])
    failed = [p["name"] for p in table["patches"] if p["state"] in ("failed", "late") and p["required"]]
    sys.exit(1 if failed or table["vllm"] is None else 0)


@main.command(cls=click.Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--list-checks", is_flag=True, help="The names of the checks.")
@click.argument("names", nargs=-1)
def doctor(as_json: bool, list_checks: bool, names: tuple[str, ...]) -> None:
    """Is this machine ready? Runs all checks, or those in NAMES; exit 1 on a problem."""
    from shim.commands.doctor import CHECKS, examine

    if list_checks:
        _columns([(name, (check.__doc__ or "").splitlines()[0]) for name, check in CHECKS.items()])
        return
    unknown = [n for n in names if n not in CHECKS]
    if unknown:
        raise click.UsageError(f"no check is named {', '.join(unknown)}; the checks are: {', '.join(CHECKS)}")
    if not names:
        _announce("asking vLLM: about half a minute")
    found = examine(names or tuple(CHECKS))
    if as_json:
        _print_json(found)
    else:
        marks = {"ok": "[✓]", "warning": "[!]", "problem": "[✗]", "skipped": "[-]"}
        for check in found["checks"]:
            click.echo(f"{marks[check['status']]} {check['name']}: {check['why']}")
            if check["mend"]:
                click.echo(f"    mend: {check['mend']}")
        counts = [f"{len(found['checks'])} checks"]
        for kind in ("problem", "warning"):
            count = sum(check["status"] == kind for check in found["checks"])
            counts.append(f"{count} {kind}{'' if count == 1 else 's'}")
        click.echo(", ".join(counts))
    sys.exit(0 if found["ok"] else 1)


@main.command()
@click.option(
    "--capability", default="", help="Compute capability to ask for, as 12.0; default: this GPU's, else 12.0."
)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="As for vllm serve.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16"]))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def explain(capability: str, kv_cache_dtype: str, dtype: str, as_json: bool) -> None:
    """Which attention backend takes GLM-5, and why each other does not, in vLLM's words; without and with the shim."""
    from shim.commands.explain import ExplainProblem
    from shim.commands.explain import explain as ask

    _needs("vllm")
    try:
        found = ask(capability, kv_cache_dtype, dtype)
    except (ExplainProblem, ValueError) as problem:
        raise Stop(str(problem)) from None
    if as_json:
        _print_json(found)
        return
    click.echo(f"vLLM {found['vllm']}, capability {found['capability']}, KV cache {kv_cache_dtype}, {dtype}")
    for backend in found["backends"]:
        before, after = (_verdict(backend[side]) for side in ("without_shim", "with_shim"))
        click.echo(f"{backend['name']}: {before}" + (f"; with the shim: {after}" if after != before else ""))
    for side, chosen in found["selected"].items():
        click.echo(f"{side.replace('_', ' the ')}: {chosen or 'No valid attention backend found'}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def selftest(as_json: bool) -> None:
    """Run every kernel against its reference, on this GPU or in Triton's interpreter; exit 1 if one is off."""
    _needs("torch", "triton")
    from shim.commands.selftest import SelftestProblem
    from shim.commands.selftest import selftest as test

    try:
        found = test()
    except SelftestProblem as problem:
        raise Stop(str(problem)) from None
    if as_json:
        _print_json(found)
    else:
        click.echo(found["device"])
        for row in found["kernels"]:
            error = row.get("error") or f"relative error {row['rel_error']:.1e}, limit {row['limit']:.0e}"
            time = "" if row["median_us"] is None else f", {row['median_us']} us"
            click.echo(f"{'ok ' if row['ok'] else 'BAD'}  {row['name']}  {row['case']}: {error}{time}")
    sys.exit(0 if found["ok"] else 1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.argument("path")
def gguf(path: str, as_json: bool) -> None:
    """What vLLM will be told of the GGUF at PATH: any part of it, its directory, or directory:QUANT."""
    from shim.commands.gguf import report
    from shim.gguf.files import GGUFProblem, open_model

    try:
        found = report(open_model(path))
    except GGUFProblem as problem:
        raise Stop(str(problem)) from None
    if as_json:
        _print_json(found)
    else:
        _print_gguf(found)
    sys.exit(1 if found["problems"] else 0)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option(
    "--timeout", default=600, show_default=True, type=click.IntRange(min=1), help="Seconds to wait for the server."
)
def demo(as_json: bool, timeout: int) -> None:
    """Write a tiny GLM-5 GGUF, serve it through `wrap vllm serve`, ask it, and show which patches ran where."""
    _needs("vllm", "tokenizers")
    from shim import env
    from shim.commands.demo import DemoProblem, show, work

    try:
        env.require_on()
        found = work(timeout)
    except (DemoProblem, env.EnvProblem) as problem:
        raise Stop(str(problem)) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the server has ended") from None
    if as_json:
        _print_json(found)
    else:
        show(found)
    sys.exit(0 if found["ok"] else 1)


def _announce(line: str) -> None:
    click.echo(f"glm5-shim: {line}", err=True)


def _needs(*modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise Stop(f"no {' and no '.join(missing)} in {sys.prefix}: install the shim into the Python that vLLM runs in")


def _verdict(found: dict[str, Any]) -> str:
    return "accepted" if found["accepted"] else "; ".join(found["reasons"])


def _print_json(value: Any) -> None:
    click.echo(jsonlib.dumps(value, indent=1))


def _columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1])


def _print_processes(found: dict[str, Any]) -> None:
    served = [one for one in found["processes"] if one["vllm"]]
    for one in served:
        states = ", ".join(
            f"{len(names)} {state}" + (f" ({', '.join(names)})" if state in ("failed", "late", "off") else "")
            for state, names in one["states"].items()
        )
        life = "running" if one["running"] else "ended"
        click.echo(f"{one['pid']} {life}  {one['role']}, vLLM {one['vllm']}: {states}")
        click.echo(f"    acted: {', '.join(one['used']) or 'none'}")
    others = len(found["processes"]) - len(served)
    missing = "" if Path(found["directory"]).is_dir() else " (no such directory)"
    click.echo(f"{found['directory']}{missing}: {len(served)} processes with vLLM, {others} without")


def _print_gguf(found: dict[str, Any]) -> None:
    config, memory, tensors = found["config"], found["memory"], found["tensors"]
    layers, heads, topk = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "index_topk"))
    click.echo(f"{found['arch']}: {layers} layers, {heads} heads, top-k {topk}")
    _columns([(p["path"], f"{p['tensors']} tensors", f"{p['bytes']:,} bytes") for p in found["parts"]])
    click.echo("quant types: " + ", ".join(f"{name} x {count}" for name, count in found["quant_types"].items()))
    click.echo(
        f"tensors: {tensors['mapped']} mapped, {len(tensors['unmapped'])} unmapped, {len(tensors['missing'])} missing"
    )
    per_gpu = ", ".join(f"TP{tp} {size / 2**30:.2f} GiB" for tp, size in memory["per_gpu"].items())
    click.echo(f"weights: {memory['weights_bytes'] / 2**30:.2f} GiB; per GPU: {per_gpu}")
    sizes = ", ".join(map(str, found["tensor_parallel"]))
    click.echo(f"tensor-parallel sizes that keep quantisation blocks whole: {sizes or 'none'}")
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")


if __name__ == "__main__":
    main()
