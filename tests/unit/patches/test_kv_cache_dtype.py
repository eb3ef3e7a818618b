"""kv_cache_dtype: fp8 becomes fp8_ds_mla before the layer is built, and only for our backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shim import ledger
from shim.patch import Patch, ShimError, Verdict
from shim.patches.backend_member import MEMBER
from shim.patches.kv_cache_dtype import NAME, PATCH

STANDING = Patch(  # backend_member, as far as `needs` is concerned
    name="backend_member",
    target="stub_registry",
    why="",
    delete="",
    tested="",
    probe=lambda module: Verdict.apply(),
    apply=lambda module: {},
)


def selector_016(head_size, dtype, kv_cache_dtype, block_size, use_mla=False, has_sink=False, use_sparse=False):
    return SimpleNamespace(get_name=lambda: selector_016.chooses)


def selector_033(head_size, dtype, kv_cache_dtype, use_mla=False, has_sink=False, use_sparse=False, num_heads=None):
    return SimpleNamespace(get_name=lambda: selector_033.chooses)


@pytest.fixture(params=[selector_016, selector_033])
def layer(request, stub, switch_on):
    """`layer(chooses, cache_dtype, **more)`: builds an MLAAttention and returns the cache dtype that it saw."""

    class MLAAttention:
        def __init__(
            self,
            num_heads,
            scale,
            qk_rope_head_dim,
            kv_lora_rank,
            cache_config=None,
            attn_backend=None,
            use_sparse=False,
            **more,
        ):
            self.saw = cache_config and cache_config.cache_dtype

    stub(STANDING)
    module = stub(PATCH, MLAAttention=MLAAttention, get_attn_backend=request.param)
    switch_on(STANDING, PATCH)

    def build(chooses: str, cache_dtype: str | None, **more):
        request.param.chooses = chooses
        config = cache_dtype and SimpleNamespace(cache_dtype=cache_dtype, block_size=64)
        arguments = {"use_sparse": True, "cache_config": config} | more
        return module.MLAAttention(8, 0.1, qk_rope_head_dim=64, kv_lora_rank=512, **arguments).saw

    return build


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_our_backend_gets_fp8_ds_mla(layer, dtype):
    assert layer(MEMBER, dtype) == "fp8_ds_mla"
    assert ledger._entries[NAME]["used"]


@pytest.mark.parametrize(
    ("chooses", "dtype", "more"),
    [
        ("FLASHMLA_SPARSE", "fp8", {}),
        (MEMBER, "auto", {}),
        (MEMBER, "fp8_ds_mla", {}),
        (MEMBER, "fp8", {"use_sparse": False}),
        (MEMBER, None, {}),
    ],
)
def test_all_else_stays(layer, chooses, dtype, more):
    assert layer(chooses, dtype, **more) == dtype
    assert not ledger._entries[NAME].get("used")


def test_a_backend_that_is_given_to_the_layer_counts(layer):
    assert layer("other", "fp8", attn_backend=SimpleNamespace(get_name=lambda: MEMBER)) == "fp8_ds_mla"


def test_off_by_skip_and_applied_once(stub, off_and_twice):
    def __init__(self, num_heads, qk_rope_head_dim, kv_lora_rank, cache_config=None, use_sparse=False):
        pass

    cls = type("MLAAttention", (), {"__init__": __init__})
    stub(STANDING)
    off_and_twice(stub(PATCH, MLAAttention=cls, get_attn_backend=selector_033), PATCH, STANDING)


def test_an_unknown_signature_is_named(stub, switch_on):
    stub(STANDING)
    stub(PATCH, MLAAttention=type("MLAAttention", (), {"__init__": lambda self, config: None}))
    with pytest.raises(ShimError, match=r"MLAAttention.__init__ has no parameter num_heads"):
        switch_on(STANDING, PATCH)
