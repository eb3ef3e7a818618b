"""The vocabulary of the shim: what a patch is, what a probe answers, and how it can end.

Nothing here imports vLLM, torch or wrapt, and nothing here has logic; `engine.py` acts on these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any


class State(str, Enum):
    """How one patch stands in one process."""

    WAITING = "waiting"  # its target has not been imported
    APPLIED = "applied"  # applied and verified
    UPSTREAM = "upstream"  # vLLM already has it: the patch steps aside
    UNNEEDED = "unneeded"  # looked, and nothing needs it here
    OFF = "off"  # named in GLM5_SHIM_SKIP
    LATE = "late"  # its target was half imported when the shim came up
    FAILED = "failed"  # unknown signature, or apply or verify raised


class Action(str, Enum):
    """What a probe asks for."""

    APPLY = "apply"
    UPSTREAM = "upstream"
    UNNEEDED = "unneeded"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """A probe's answer: what to do and, unless it is to apply, why."""

    action: Action
    because: str = ""

    @classmethod
    def apply(cls, because: str = "") -> Verdict:
        return cls(Action.APPLY, because)

    @classmethod
    def upstream(cls, because: str) -> Verdict:
        return cls(Action.UPSTREAM, because)

    @classmethod
    def unneeded(cls, because: str) -> Verdict:
        return cls(Action.UNNEEDED, because)

    @classmethod
    def unknown(cls, because: str) -> Verdict:
        """`because` names the symbol, what was found and what was expected."""
        return cls(Action.UNKNOWN, because)


def _nothing_more(module: ModuleType) -> None:
    """The default `verify`: the engine's own identity checks are enough."""


@dataclass(frozen=True)
class Patch:
    """One change to vLLM, with one owner and one off-switch (its name in GLM5_SHIM_SKIP).

    name:      also the file's name
    target:    the module whose import triggers it
    why:       what breaks without it, for the person who reads `glm5-shim patches`
    upstream:  issue or pull request, and the condition under which this file is deleted
    tested:    vLLM versions on which CI or a recorded run really exercised it
    probe:     looks at the module (signatures, attributes; never a version) and changes nothing
    apply:     returns the replacement for each symbol in `replaces`; the engine sets them. Other effects (a registered
               loader, an enum member) it makes itself, and `verify` proves them
    verify:    raises if the patch did not take; identity of `replaces` and `importers` is checked by the engine
    replaces:  symbols in the target ("function" or "Class.method"); one patch owns a symbol
    importers: "module:name" of those that copied a symbol of the same last name by value: rebound, checked by identity
    needs:     patches that must stand before this one
    required:  failing means wrong answers or a later crash, so the process stops
    """

    name: str
    target: str
    why: str
    upstream: str
    tested: str
    probe: Callable[[ModuleType], Verdict]
    apply: Callable[[ModuleType], Mapping[str, Any]]
    verify: Callable[[ModuleType], None] = _nothing_more
    replaces: tuple[str, ...] = ()
    importers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    required: bool = True
