"""backend_member and backend_choice on stand-ins with the signatures of each release era."""

from __future__ import annotations

import enum
import functools
import pickle
from collections import namedtuple

import pytest

from shim import ledger
from shim.patch import ShimError, State
from shim.patches import backend_choice, backend_member

Capability = namedtuple("Capability", "major minor")
MEMBER = backend_member.MEMBER


class Backends(enum.Enum):
    """As in 0.16 to 0.31: closed."""

    TRITON_MLA = "a.TritonMLA"
    CUSTOM = None


def closed_enum() -> type[enum.Enum]:
    made = enum.Enum("AttentionBackendEnum", {"TRITON_MLA": "a.TritonMLA", "CUSTOM": None}, module=__name__)
    globals()["AttentionBackendEnum"] = made  # pickle finds it by name
    return made


def open_enum() -> type[enum.Enum]:
    """As in 0.32 and later: with `register`."""
    made = closed_enum()
    made.registered = []

    def register(cls, name, value):
        cls.registered.append(name)
        backend_member._add_member(cls, name, value)

    made.register = classmethod(register)
    return made


@pytest.mark.parametrize("make", [closed_enum, open_enum])
def test_the_member_is_a_real_one(stub, switch_on, make):
    module = stub(backend_member.PATCH, AttentionBackendEnum=make())
    engine = switch_on(backend_member.PATCH)
    backends = module.AttentionBackendEnum
    member = backends[MEMBER]
    assert engine.records["backend_member"].state is State.APPLIED
    assert (member.name, member.value) == (MEMBER, backend_member.CLASS_PATH)
    assert backends(backend_member.CLASS_PATH) is member
    assert pickle.loads(pickle.dumps(member)) is member
    assert list(backends)[-1] is member and len(backends) == 3
    assert {member: 1}[backends[MEMBER]] == 1
    assert getattr(backends, "registered", [MEMBER]) == [MEMBER]


def test_the_class_it_names_exists():
    from importlib.util import find_spec
    from pathlib import Path

    module, _, name = backend_member.CLASS_PATH.rpartition(".")
    assert f"class {name}(" in Path(find_spec(module).origin).read_text()


def test_upstream_has_the_member(stub, switch_on):
    have = closed_enum()
    backend_member._add_member(have, MEMBER, "vllm.their.Backend")
    module = stub(backend_member.PATCH, AttentionBackendEnum=have)
    engine = switch_on(backend_member.PATCH)
    assert engine.records["backend_member"].state is State.UPSTREAM
    assert module.AttentionBackendEnum[MEMBER].value == "vllm.their.Backend"


def test_member_off_by_skip(stub, switch_on):
    module = stub(backend_member.PATCH, AttentionBackendEnum=closed_enum())
    switch_on(backend_member.PATCH, skip=frozenset({"backend_member"}))
    assert MEMBER not in module.AttentionBackendEnum.__members__


def test_member_unknown_registry(stub, switch_on):
    stub(backend_member.PATCH, AttentionBackendEnum=object)
    with pytest.raises(ShimError, match="AttentionBackendEnum is .*expected an Enum"):
        switch_on(backend_member.PATCH)


def priorities_016(use_mla, device_capability):
    return ["FIRST", "SECOND"]


def priorities_033(
    use_mla,
    device_capability,
    num_heads=None,
    kv_cache_dtype=None,
    use_non_causal=False,
    head_size=None,
    use_mm_prefix=False,
):
    return ["FIRST", "SECOND"]


class Platform016:
    capability = Capability(12, 0)

    @classmethod
    def get_device_capability(cls):
        return cls.capability

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config):
        return f"vllm.{selected_backend}"


class Platform033(Platform016):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return f"vllm.{selected_backend}"


@pytest.fixture(params=[(priorities_016, Platform016), (priorities_033, Platform033)])
def cuda(request, stub):
    stub(backend_member.PATCH, AttentionBackendEnum=(backends := closed_enum()))
    priorities, platform = request.param
    return stub(
        backend_choice.PATCH,
        AttentionBackendEnum=backends,
        _get_backend_priorities=functools.cache(priorities),
        CudaPlatformBase=type("CudaPlatformBase", (platform,), dict(vars(platform))),
    )


BOTH = (backend_member.PATCH, backend_choice.PATCH)


@pytest.mark.parametrize(
    ("use_mla", "capability", "first"),
    [
        (True, (12, 0), True),
        (True, (12, 1), True),
        (True, (9, 0), False),
        (True, (10, 0), False),
        (False, (12, 0), False),
    ],
)
def test_first_in_line_on_12x_for_mla_only(cuda, switch_on, use_mla, capability, first):
    switch_on(*BOTH)
    member = cuda.AttentionBackendEnum[MEMBER]
    got = cuda._get_backend_priorities(use_mla=use_mla, device_capability=Capability(*capability))
    assert got == ([member] if first else []) + ["FIRST", "SECOND"]
    entry = next(e for e in ledger.entries() if e["name"] == "backend_choice")
    assert bool(entry.get("used")) is first and bool(entry.get("idle")) is not first


def test_positional_call_and_assumed_capability(cuda, switch_on, monkeypatch):
    switch_on(*BOTH)
    member = cuda.AttentionBackendEnum[MEMBER]
    assert cuda._get_backend_priorities(True, Capability(9, 0)) == ["FIRST", "SECOND"]
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", "12.0")
    assert cuda._get_backend_priorities(True, Capability(9, 0)) == [member, "FIRST", "SECOND"]


def test_the_cached_list_of_vllm_is_not_changed(cuda, switch_on):
    original = cuda._get_backend_priorities
    switch_on(*BOTH)
    cuda._get_backend_priorities(True, Capability(12, 0))
    assert original(True, Capability(12, 0)) == ["FIRST", "SECOND"]


def test_a_second_activation_changes_nothing(cuda, switch_on):
    engine = switch_on(*BOTH)
    ours = cuda._get_backend_priorities
    engine.arm()
    assert cuda._get_backend_priorities is ours


def test_choice_off_by_skip(cuda, switch_on):
    original = cuda._get_backend_priorities
    switch_on(*BOTH, skip=frozenset({"backend_choice"}))
    assert cuda._get_backend_priorities is original


def test_choice_needs_the_member(cuda, switch_on):
    with pytest.raises(ShimError, match="needs backend_member"):
        switch_on(backend_choice.PATCH, backend_member.PATCH)


def test_choice_unknown_signature(stub, switch_on):
    stub(backend_member.PATCH, AttentionBackendEnum=closed_enum())
    stub(backend_choice.PATCH, _get_backend_priorities=lambda config: [], CudaPlatformBase=Platform016)
    with pytest.raises(
        ShimError, match=r"_get_backend_priorities takes \(config\), expected \(use_mla, device_capability"
    ):
        switch_on(*BOTH)


def test_choice_symbol_gone(stub, switch_on):
    stub(backend_member.PATCH, AttentionBackendEnum=closed_enum())
    stub(backend_choice.PATCH)
    with pytest.raises(ShimError, match="_get_backend_priorities does not exist"):
        switch_on(*BOTH)


def test_choice_of_a_class_unknown_signature(stub, switch_on):
    stub(backend_member.PATCH, AttentionBackendEnum=closed_enum())
    platform = type("CudaPlatformBase", (), {"get_attn_backend_cls": classmethod(lambda cls, config: "")})
    stub(backend_choice.PATCH, _get_backend_priorities=priorities_033, CudaPlatformBase=platform)
    with pytest.raises(
        ShimError, match=r"get_attn_backend_cls takes \(cls, config\), expected \(cls, selected_backend"
    ):
        switch_on(*BOTH)


@pytest.mark.parametrize(
    ("capability", "assumed", "chosen", "warned"),
    [
        ((12, 0), "", "FlashInferMLASparseSM120Backend", True),
        ((12, 1), "", "FlashInferMLASparseBackend", True),
        ((9, 0), "12.0", "FlashInferMLASparseSM120Backend", True),
        ((10, 0), "", "FlashInferMLASparseBackend", False),
        ((12, 0), "", "FlashMLASparseBackend", False),
    ],
)
def test_the_log_names_the_known_hang(cuda, switch_on, caplog, monkeypatch, capability, assumed, chosen, warned):
    monkeypatch.setenv("GLM5_SHIM_ASSUME_CAPABILITY", assumed)
    switch_on(*BOTH)
    cuda.CudaPlatformBase.capability = Capability(*capability)
    assert cuda.CudaPlatformBase.get_attn_backend_cls(chosen, attn_selector_config=None) == f"vllm.{chosen}"
    assert ("hang under load" in caplog.text and f"--attention-backend {MEMBER}" in caplog.text) is warned
