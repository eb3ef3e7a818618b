"""The vocabulary of the shim: a patch, a probe's answer, how a patch can end, and the error that stops vLLM.

Nothing here imports vLLM, torch or wrapt, and nothing here has logic: `engine.py` acts on these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any


class ShimError(RuntimeError):
    """A required patch is not in force. It is no ImportError, because vLLM swallows those in many places."""


def failure(what: str, names: list[str]) -> str:
    """The message of failed patches: `what` went wrong, and how to do without the patches of these names."""
    switch = ",".join(dict.fromkeys(names))
    return f"{what}. Leave it out with GLM5_SHIM_SKIP={switch}, or switch the shim off with GLM5_SHIM_OFF=1."


class State(str, Enum):
    """How one patch stands in one process."""

    WAITING = "waiting"  # its target has not been imported
    APPLIED = "applied"  # applied and verified
    UPSTREAM = "upstream"  # vLLM has it itself, so the patch stands aside
    UNNEEDED = "unneeded"  # the probe looked, and nothing needs the patch here
    OFF = "off"  # named in GLM5_SHIM_SKIP, or it needs a patch that is off
    LATE = "late"  # its target was half imported when the shim was switched on
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


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to vLLM, with one owner and one off-switch (its name in GLM5_SHIM_SKIP).

    name:      also the file's name
    target:    the module whose import triggers the patch
    replaces:  symbols of the target ("function", "Class.method" or "a.b.name"). One patch owns a symbol
    optional:  those of `replaces` that a release may lack. The probe says which of them must be there
    importers: "module:name" of those that copied a symbol of the same last name by value: rebound, checked by identity
    why:       what breaks without the patch, for the person who reads `glm5-shim patches`
    delete:    when this file can be deleted, with vLLM's issue or pull request
    tested:    vLLM versions on which CI or a recorded run really exercised it
    needs:     patches that must stand before this one
    required:  without the patch answers are wrong or vLLM crashes later, so a failure stops the process
    probe:     looks at the module (signatures, attributes, never a version) and changes nothing
    apply:     returns the replacement for each symbol of `replaces` that the module has. The engine sets them. Other
               effects (a registered loader, an enum member) it makes itself, and `verify` proves them
    verify:    raises if the patch did not take. The engine itself checks the identity of `replaces` and `importers`
    """

    name: str
    target: str
    replaces: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    importers: tuple[str, ...] = ()
    why: str
    delete: str
    tested: str
    needs: tuple[str, ...] = ()
    required: bool = True
    probe: Callable[[ModuleType], Verdict]
    apply: Callable[[ModuleType], Mapping[str, Any]]
    verify: Callable[[ModuleType], None] = _nothing_more
