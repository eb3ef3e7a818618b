"""What tests of the command line share: `invoke` runs it in this process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from click.testing import CliRunner, Result

from shim.commands.cli import main

# click before 8.2 puts stderr into stdout by default
APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def invoke(words: Sequence[str]) -> Result:
    """`glm5-shim WORDS`: its exit code, stdout and stderr."""
    return CliRunner(**APART).invoke(main, list(words))
