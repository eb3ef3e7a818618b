"""deep_gemm_gate: vLLM's claim for SM120 holds only where the library has kernels for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shim.indexer import probe as indexer_probe
from shim.patch import ShimError, State
from shim.patches import deep_gemm_gate


def platform_class(families):
    class CudaPlatformBase:
        found = SimpleNamespace(major=12, minor=0)

        @classmethod
        def get_device_capability(cls):
            return cls.found

    if families:
        CudaPlatformBase.support_deep_gemm = classmethod(families)
    return CudaPlatformBase


def claims_120(cls):
    return cls.found.major == 9 or cls.found.major * 10 == 120


def claims_100(cls):
    return cls.found.major == 9


@pytest.mark.parametrize(
    ("major", "kernels", "claim"), [(12, False, False), (12, True, True), (9, False, True), (8, False, False)]
)
def test_the_claim_for_12x_needs_kernels(stub, switch_on, monkeypatch, tmp_path, major, kernels, claim):
    module = stub(deep_gemm_gate.PATCH, CudaPlatformBase=platform_class(claims_120))
    switch_on(deep_gemm_gate.PATCH)
    impls = tmp_path / "include" / "deep_gemm" / "impls"
    impls.mkdir(parents=True)
    (impls / ("sm120_bf16_gemm.cuh" if kernels else "sm100_bf16_gemm.cuh")).touch()
    monkeypatch.setattr(indexer_probe, "deep_gemm_directory", lambda: tmp_path)
    module.CudaPlatformBase.found = SimpleNamespace(major=major, minor=0)
    assert module.CudaPlatformBase.support_deep_gemm() is claim


def test_gate_off_unneeded_and_unknown(stub, switch_on, off_and_twice):
    off_and_twice(stub(deep_gemm_gate.PATCH, CudaPlatformBase=platform_class(claims_120)), deep_gemm_gate.PATCH)
    for families in (claims_100, None):
        stub(deep_gemm_gate.PATCH, CudaPlatformBase=platform_class(families))
        assert switch_on(deep_gemm_gate.PATCH).records["deep_gemm_gate"].state is State.UNNEEDED
    stub(deep_gemm_gate.PATCH, CudaPlatformBase=platform_class(lambda cls, device: 120))
    with pytest.raises(ShimError, match=r"support_deep_gemm takes \(cls, device\), expected \(cls\)"):
        switch_on(deep_gemm_gate.PATCH)
