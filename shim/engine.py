"""Takes one patch at a time through probe, apply, verify and record. The only file that imports wrapt.

wrapt supplies the import hooks, and resolves and sets attributes. Its function wrappers are never used: torch.compile
skips them without a word and runs the unpatched function.

A required patch that does not take stops the process. The import of its target raises `ShimError`, every later import
of it raises that again (`latch.py`), and so does the closing gate that each worker passes before it serves.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from shim import ledger, process, upstream
from shim.latch import Latch
from shim.patch import Action, Patch, ShimError, State, failure

ACCEPTED = frozenset({State.APPLIED, State.UPSTREAM, State.UNNEEDED, State.OFF})
STANDS = ACCEPTED - {State.OFF}  # what another patch may build on
# wrapt 1.x has no BaseObjectProxy; there every proxy of wrapt's is an ObjectProxy
PROXY: Any = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)


@dataclass
class Record:
    patch: Patch
    state: State = State.WAITING
    detail: str = ""
    originals: dict[str, Any] = field(default_factory=dict)
    replacements: dict[str, Any] = field(default_factory=dict)


class Engine:
    """The patches of one process and how each of them stands."""

    def __init__(self, patches: Iterable[Patch], skip: frozenset[str] = frozenset()) -> None:
        self.records = {patch.name: Record(patch) for patch in patches}
        self._latch = Latch()
        owners: dict[tuple[str, str], str] = {}
        for record in self.records.values():
            patch = record.patch
            for symbol in patch.replaces:
                other = owners.setdefault((patch.target, symbol), patch.name)
                if other != patch.name:
                    raise ValueError(f"{patch.target}.{symbol} is replaced by two patches: {other} and {patch.name}")
            self._set(record, State.WAITING, "")
        for name in sorted(skip & set(self.records)):
            self._switch_off(name, "in GLM5_SHIM_SKIP")

    def _switch_off(self, name: str, because: str) -> None:
        """This patch is off, and so is every patch that needs it."""
        self._set(self.records[name], State.OFF, because)
        for other, record in self.records.items():
            if name in record.patch.needs and record.state is not State.OFF:
                self._switch_off(other, f"needs {name}, which is off")

    @property
    def seal(self) -> str:
        """What every process of one server must have in common: the shim's own code and the patches that are on."""
        names = sorted(name for name, record in self.records.items() if record.state is not State.OFF)
        return f"{process.identity()}+{hashlib.sha256(','.join(names).encode()).hexdigest()[:12]}"

    def state(self, name: str) -> State | None:
        """How the patch of this name stands; None if there is none."""
        record = self.records.get(name)
        return record.state if record else None

    def arm(self) -> None:
        """Registers one import hook for each target. A target that is loaded already is patched now; one that is half
        imported makes its patches late."""
        for target in dict.fromkeys(r.patch.target for r in self.records.values() if r.state is State.WAITING):
            module = sys.modules.get(target)
            if module is not None and getattr(module.__spec__, "_initializing", False):
                for record in self._of(target):
                    self._set(record, State.LATE, f"{target} was half imported when the shim was switched on")
            else:
                wrapt.register_post_import_hook(self._on_import, target)
        ledger.flush()

    def left_out(self) -> str:
        """What GLM5_SHIM_SKIP takes from GLM-5, in words; "" if nothing."""
        names = [n for n, record in self.records.items() if record.state is State.OFF and record.patch.required]
        return f"GLM5_SHIM_SKIP leaves out {', '.join(names)}: GLM-5's answers can be wrong without it" if names else ""

    def check(self, name: str = "") -> None:
        """ShimError unless every required patch whose target is loaded is in force right now; with `name`, that one.

        This is the closing gate. It logs what GLM5_SHIM_SKIP leaves out.
        """
        if self.left_out() and not name:
            process.log.warning("glm5-shim: %s", self.left_out())
        problems = []
        for record in [self.records[name]] if name else self.records.values():
            patch = record.patch
            loaded = patch.target in sys.modules
            if not patch.required or (record.state is State.WAITING and not loaded):
                continue
            if record.state not in ACCEPTED:
                problems.append(f"{patch.name} is {record.state.value}: {record.detail or patch.target + ' is loaded'}")
            elif record.state is State.APPLIED:
                lost = self._lost(record)
                if lost:
                    problems.append(f"{patch.name} was undone: {lost}")
        if problems:
            what = failure("; ".join(problems), [p.split(" ", 1)[0] for p in problems])
            raise ShimError(f"glm5-shim: {what}")

    # what happens when a target was imported

    def _on_import(self, module: ModuleType) -> None:
        try:
            for record in self._of(module.__name__):
                self._take(record, module)
        finally:
            ledger.flush()

    def _of(self, target: str) -> list[Record]:
        return [r for r in self.records.values() if r.patch.target == target and r.state is State.WAITING]

    def _take(self, record: Record, module: ModuleType) -> None:
        patch = record.patch
        try:
            verdict = patch.probe(module)
            if verdict.action is Action.APPLY:
                self._apply(record, module)
                self._set(record, State.APPLIED, verdict.because)
            elif verdict.action is Action.UNKNOWN:
                self._fail(record, verdict.because)
            else:
                self._set(record, State(verdict.action.value), verdict.because)
        except ShimError:
            raise
        except Exception as problem:
            self._undo(record, module)
            self._fail(record, f"{type(problem).__name__}: {problem}", problem)

    def _apply(self, record: Record, module: ModuleType) -> None:
        patch = record.patch
        for name in patch.needs:
            state = self.state(name)
            if state not in STANDS:
                raise RuntimeError(f"needs {name}, which is {state.value if state else 'not there'}")
        replacements = dict(patch.apply(module))
        lacking = {symbol for symbol in patch.optional if not upstream.has(module, symbol)}
        expected = set(patch.replaces) - lacking
        if set(replacements) != expected:
            raise RuntimeError(f"apply returned {sorted(replacements)}, replaces calls for {sorted(expected)}")
        for symbol, new in replacements.items():
            if isinstance(new, PROXY):
                raise TypeError(f"{symbol} is replaced by a wrapt proxy, which torch.compile would skip")
            record.originals[symbol] = upstream.raw(module, symbol)
            record.replacements[symbol] = new
            _set_attribute(module, symbol, new)
        for importer, symbol, name in self._importers(patch):
            if vars(importer).get(name) is record.originals.get(symbol, record):
                setattr(importer, name, record.replacements[symbol])
        lost = self._lost(record)
        if lost:
            raise RuntimeError(lost)

    def _undo(self, record: Record, module: ModuleType) -> None:
        """Takes back what a patch set before it failed, so that an optional patch is never half on."""
        for symbol, original in record.originals.items():
            _set_attribute(module, symbol, original)
        for importer, symbol, name in self._importers(record.patch):
            if symbol in record.originals and vars(importer).get(name) is record.replacements[symbol]:
                setattr(importer, name, record.originals[symbol])

    @staticmethod
    def _importers(patch: Patch) -> Iterable[tuple[ModuleType, str, str]]:
        """(loaded module, symbol of the target, its name in that module) for each copy by value."""
        by_last_name = {symbol.rsplit(".", 1)[-1]: symbol for symbol in patch.replaces}
        for importer in patch.importers:
            module_name, name = importer.split(":")
            module = sys.modules.get(module_name)
            if module is not None:
                yield module, by_last_name[name], name

    def _lost(self, record: Record) -> str:
        """What was undone: a symbol, a loaded copy of it, or what the patch verifies. Empty if all is in force."""
        module = sys.modules[record.patch.target]
        for symbol, new in record.replacements.items():
            if not upstream.has(module, symbol) or upstream.raw(module, symbol) is not new:
                return f"{module.__name__}.{symbol} is not the shim's"
        for importer, symbol, name in self._importers(record.patch):
            held = vars(importer).get(name)
            # a half-imported importer has not copied the name yet, and will copy ours
            if held is not None and held is not record.replacements.get(symbol, held):
                return f"{importer.__name__}.{name} is not the shim's"
        try:
            record.patch.verify(module)
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
        return ""

    def _fail(self, record: Record, found: str, cause: Exception | None = None) -> None:
        self._set(record, State.FAILED, found)
        patch = record.patch
        text = failure(f"{patch.name} could not be applied to {patch.target}: {found}", [patch.name])
        if not patch.required:
            process.say(text)
            return
        error = ShimError(f"glm5-shim: {text}")
        self._latch.refused[patch.target] = error
        raise error from cause

    def _set(self, record: Record, state: State, detail: str) -> None:
        record.state, record.detail = state, detail
        ledger.record(record.patch.name, state.value, detail)


def _set_attribute(module: ModuleType, symbol: str, value: Any) -> None:
    parent, attribute, _ = wrapt.resolve_path(module, symbol)
    setattr(parent, attribute, value)
