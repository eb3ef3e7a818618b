"""Target: vllm.v1.attention.backends.registry.AttentionBackendEnum

Why:    the enum of attention backends is closed up to 0.31. `--attention-backend TRITON_MLA_SPARSE`, logs, configs and
        pickled configs all go through it.
How:    adds a real member: by vLLM's own `register` where it exists (0.32 and later), else by the same steps. CUSTOM
        stays free: another plugin may use it, and logs would say CUSTOM.
Delete: when vLLM has a TRITON_MLA_SPARSE that works on 12.x (vllm#38476, vllm#47629).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shim.attention import MEMBER
from shim.patch import Patch, Verdict

CLASS_PATH = "shim.attention.triton_mla.TritonMLASparseBackend"


def probe(module: ModuleType) -> Verdict:
    enum = getattr(module, "AttentionBackendEnum", None)
    if enum is None or not hasattr(enum, "_member_map_"):
        return Verdict.unknown(f"{module.__name__}.AttentionBackendEnum is {enum!r}, expected an Enum")
    if MEMBER in enum.__members__:
        return Verdict.upstream(f"vLLM has {MEMBER}")
    return Verdict.apply()


def apply(module: ModuleType) -> dict[str, Any]:
    enum = module.AttentionBackendEnum
    if hasattr(enum, "register"):
        enum.register(MEMBER, CLASS_PATH)
    else:
        _add_member(enum, MEMBER, CLASS_PATH)
    return {}


def _add_member(enum: Any, name: str, value: str) -> None:
    """Adds a member to a finished Enum class, by EnumType's own steps (CPython's enum.py; vLLM 0.32's `register`)."""
    member = object.__new__(enum)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    type.__setattr__(enum, name, member)  # before the map: EnumType refuses to reassign a member
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    enum._member_names_.append(name)


def verify(module: ModuleType) -> None:
    import pickle

    enum = module.AttentionBackendEnum
    member = enum[MEMBER]
    if pickle.loads(pickle.dumps(member)) is not member or enum(CLASS_PATH) is not member or member not in list(enum):
        raise RuntimeError(f"{MEMBER} does not behave as a member of {enum!r}")


PATCH = Patch(
    name="backend_member",
    target="vllm.v1.attention.backends.registry",
    why="there is no TRITON_MLA_SPARSE backend; --attention-backend and the logs must know it",
    delete="when vLLM has a TRITON_MLA_SPARSE that works on 12.x (vllm#38476, vllm#47629)",
    tested="an H200 with 0.23.0, 0.26.0, 0.33.0; sources of 0.16.0",
    probe=probe,
    apply=apply,
    verify=verify,
)
