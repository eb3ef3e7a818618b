"""Looks at the command line of a vLLM process before anything heavy is imported.

A GGUF that cannot be served is refused within a second. vLLM itself would take a minute.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shim import env, process, upstream


def check_command_line(argv: list[str]) -> None:
    """Ends the process with one line and exit code 1 if `argv` starts vLLM on a GGUF that the shim cannot serve."""
    path = gguf_argument(argv)
    if path is None:
        return
    problem = problem_with(path, argv)
    if problem:
        process.say(problem)
        os._exit(1)  # an exception out of sitecustomize, SystemExit too, ends in a "Fatal Python error" and a traceback


def gguf_argument(argv: list[str]) -> str | None:
    """The GGUF that a `vllm` command line serves, or None. It is the argument of `serve`, or the value of `--model`.

    A path in a directory that does not exist may be a repository's name, and is left to vLLM, as is all that is less
    certain. But a repository whose name says GLM-5 as GGUF is ours: nobody else can serve it.
    """
    if any(os.path.basename(word) == "vllm" for word in argv[:3]):
        if "serve" not in argv[:4]:
            return None  # a client, a benchmark
        words = argv[argv.index("serve") + 1 :]
        candidates = words[:1]
        # Behind options. A word behind an option's value is no value, but for options that take several
        candidates += [word for before, word in itertools.pairwise(words) if _closed(before) and os.path.exists(word)]
    elif any(word.startswith("vllm.entrypoints.") for word in argv[:4]):
        candidates = []
    else:
        return None
    candidates += [after for word, after in itertools.pairwise(argv) if word == "--model"]
    candidates += [word.partition("=")[2] for word in argv if word.startswith("--model=")]
    # os.path.isdir: False, not PermissionError, behind a directory that may not be entered
    found = (c for c in candidates if (names_gguf(c) and os.path.isdir(Path(c).parent)) or _names_repository(c))
    return next(found, None)


def _closed(word: str) -> bool:
    """Does `word` leave no option waiting for its value?"""
    return not word.startswith("-") or "=" in word


def problem_with(path: str, argv: Sequence[str] = ()) -> str | None:
    """One line on why the command `argv` cannot serve the GGUF at `path`. None if it can, or if vLLM or its plugin may
    serve this model."""
    from shim.gguf.files import GGUFProblem, WrongArchitecture, open_model
    from shim.gguf.hf_directory import require_cache
    from shim.gguf.names import require_complete, require_nextn
    from shim.gguf.tensor_parallel import ALL2ALL, Parallel, parallel_problem
    from shim.gguf.tokenizer import tables

    try:
        model = open_model(path)
        require_complete(model)
        tables(model)
        require_cache(model, env.cache_dir())
        if _drafts_with_nextn(argv):
            require_nextn(model)
        if not upstream.cpu_wheel() and _option(argv, "--quantization", "-q") in (None, "gguf", "glm5_gguf"):
            asked = Parallel(
                _size(argv, "--tensor-parallel-size", "-tp"),
                _size(argv, "--data-parallel-size", "-dp"),
                _flag(argv, "--enable-expert-parallel", "-ep"),
                _flag(argv, "--enable-eplb"),
                _option(argv, "--all2all-backend") or ALL2ALL,
            )
            return parallel_problem(model, asked)
    except WrongArchitecture as problem:
        return None if upstream.others_serve_gguf() else str(problem)
    except GGUFProblem as problem:
        return str(problem)
    return None


def drafts_with_nextn(speculative: Any, method: str | None = None, model: str | None = None) -> bool:
    """Does this speculative config, as vLLM takes it, draft with the NextN block of the model itself? `method` and
    `model`: the values of their own options, which win."""
    config = speculative if isinstance(speculative, dict) else {}
    return str(method or config.get("method")).endswith("mtp") and not (model or config.get("model"))


def _drafts_with_nextn(argv: Sequence[str]) -> bool:
    try:
        config = json.loads(_option(argv, "--speculative-config", "-sc") or "{}")
    except ValueError:
        config = None  # vLLM will refuse it
    method = _option(argv, "--spec-method", "--speculative-config.method", "-sc.method")
    model = _option(argv, "--spec-model", "--speculative-config.model", "-sc.model")
    return drafts_with_nextn(config, method, model)


def _option(argv: Sequence[str], *names: str) -> str | None:
    """The value of an option, given as `--name value` or `--name=value`. The last one wins. Like vLLM, it takes `_` for
    `-`."""
    found = None
    for word, after in itertools.pairwise((*argv, "")):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else after
    return found


def _flag(argv: Sequence[str], *names: str) -> bool:
    return any(word.replace("_", "-") in names for word in argv)


def _size(argv: Sequence[str], *names: str) -> int:
    value = _option(argv, *names)
    return int(value) if value and value.isdecimal() and int(value) else 1  # vLLM will refuse anything else


def names_gguf(name: str) -> bool:
    """Can `name`, as a user gives a model, mean a GGUF?

    These can: a name that ends in .gguf, whether or not it exists; any file with GGUF's magic; `directory:QUANT`; a
    directory without config.json that has GGUF files or cannot be listed. The name of a Hugging Face repository cannot.
    """
    directory, colon, _ = name.rpartition(":")
    if os.path.isdir(name):
        closed = not os.access(name, os.R_OK | os.X_OK)
        return not os.path.exists(os.path.join(name, "config.json")) and (closed or any(Path(name).glob("*.gguf")))
    if name.lower().endswith(".gguf") or (bool(colon) and os.path.isdir(directory)):
        return True
    if not os.path.isfile(name):
        return False  # so it is with most models, and gguf and numpy are not imported
    from shim.gguf.files import is_gguf

    return is_gguf(name)


def is_ours(name: str) -> bool:
    """Does `name` mean a GLM-5 GGUF?"""
    if not names_gguf(name):
        return False
    from shim.gguf.files import GGUFProblem, open_model

    try:
        open_model(name)
    except GGUFProblem:
        return False
    return True


def _names_repository(name: str) -> bool:
    """A hub's name for GLM-5, 5.1 or 5.2 as GGUF, as owner/GLM-5-GGUF or owner/GLM-5-GGUF:QUANT."""
    match = re.fullmatch(r"[\w.-]+/GLM-5(\.[12])?-GGUF(:[\w.-]+)?", name, re.IGNORECASE)
    return match is not None and not os.path.exists(name)
