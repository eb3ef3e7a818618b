"""A process that imports the packages that every vLLM imports, which is most of its start, and forks once per question.

A line on stdin is [code, environment, place]. The fork does what `python -c code` does with this environment in this
directory, with sitecustomize first. Its output goes to <place>/stdout and <place>/stderr, its exit code to our stdout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from types import ModuleType

OTHERS = ("torch._dynamo", "torch._inductor.lowering", "transformers", "openai.types.responses", "fastapi", "aiohttp")


def become(code: str, environment: dict[str, str], place: str) -> None:
    os.chdir(place)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = ["", *environment["PYTHONPATH"].split(os.pathsep)]
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401

    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<child>", "exec"), vars(main))


def main() -> None:
    codes = os.fdopen(os.dup(1), "w")
    for name in ("torchvision", "torchaudio", "torchcodec"):  # they are built for another torch; the shim does the same
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name in OTHERS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=codes, flush=True)


if __name__ == "__main__":
    main()
