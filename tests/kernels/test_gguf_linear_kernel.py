"""Linear layers of every type against gguf-py's numbers in float64, on a GPU or under the interpreter
(test_gguf_linear_interpreted.py)."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_gguf_linear_interpreted.py runs this file", allow_module_level=True)
pytest.importorskip("triton")

from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf_cases import DEVICE, check, weight  # noqa: E402

from shim.kernels.ggml.launch import dequantize, rows_view  # noqa: E402
from shim.kernels.ggml.layout import FORMS, PLAIN, TYPES  # noqa: E402
from shim.kernels.gguf_linear import launch, reference, tune  # noqa: E402

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NAN = float("nan")


def run(kind, tokens, rows, columns, config=None, dtype=torch.float16, **options):
    """One product into a poisoned answer whose rows lie apart, checked."""
    w, numbers = weight(kind, rows, columns, seed=tokens)
    x = torch.randn(tokens, columns + 32, device=DEVICE).to(dtype)[:, :columns]
    whole = torch.full((tokens, rows + 7), NAN, dtype=dtype, device=DEVICE)
    plan = tune.split(config, tokens, rows, columns, 1) if config else None
    out = launch.linear(x, w, whole[:, :rows], plan=plan, **options)
    assert whole[:, rows:].isnan().all()
    check(out, reference.linear(x, numbers), reference.linear(x, numbers, torch.float32, dtype))
    return plan


@pytest.mark.parametrize("kind", FORMS, ids=lambda t: t.name)
def test_dequantised_as_gguf_does(kind):
    w, numbers = weight(kind, 21, 256)
    out = torch.full((21, 256), NAN, device=DEVICE)
    assert dequantize(w, torch.float32, out=out) is out
    torch.testing.assert_close(out, numbers, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_every_type(kind):
    run(kind, 3, 37, 256, tune.FEW)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.MXFP4, Type.BF16], ids=lambda t: t.name)
def test_tails_of_columns(kind):
    run(kind, 2, 17, 256 + 32, tune.FEW, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_are_added_up_and_counters_left_at_zero(dtype):
    config = tune.Config(block_n=64, tokens=8, stages=1, warps=4, per_sm=16)
    plan = tune.split(config, 9, 70, 768, 1)
    assert plan.splits == 3
    space = launch.Workspace(*launch.needs(plan, 9, 70), DEVICE)
    for _ in range(2):
        assert run(Type.Q4_K, 9, 70, 768, config, dtype, workspace=space) == plan
        assert not space.arrived.any()


@pytest.mark.parametrize("config", [tune.SOME, tune.MORE])
def test_more_tokens(config):
    run(Type.Q6_K, config.tokens + 1, 40, 256, config)


@pytest.mark.parametrize("kind", [Type.IQ3_XXS, Type.F32], ids=lambda t: t.name)
def test_many_tokens_in_slices(kind, monkeypatch):
    monkeypatch.setattr(tune, "WORKSPACE_BYTES", 2 * 256 * 16)
    run(kind, 257, 37, 256)


def test_some_rows():
    w, numbers = weight(Type.Q5_K, 2, 70, 512)
    part = rows_view(w, 16, 40)
    torch.testing.assert_close(dequantize(part, torch.float32), numbers[:, 16:56], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dequantize(w, torch.float32, 3, 20), numbers[:, 3:23], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="whole 16"):
        rows_view(w, 8, 16)


def test_nothing_to_do():
    w, _ = weight(Type.Q8_0, 16, 64)
    assert launch.linear(torch.zeros(0, 64, dtype=torch.float16, device=DEVICE), w).shape == (0, 16)


def test_what_does_not_fit_is_refused():
    w, _ = weight(Type.Q8_0, 16, 64)
    x = torch.zeros(2, 64, dtype=torch.float16, device=DEVICE)
    out = torch.zeros(2, 16, dtype=torch.float16, device=DEVICE)
    for arguments, message in (
        ((x.float(), w), r"x is .*float32"),
        ((x[:, :32], w), r"x is .*\[2, 32\].* expected \[T, 64\]"),
        ((x, w._replace(rows=40)), "weight has data"),
        ((x, w._replace(type=Type.Q4_0)), "weight has data"),
        ((x, w, out.bfloat16()), "out is .*bfloat16"),
        ((x, w, out[:, :8]), "out is"),
        ((x, w, out[:1].expand(2, 16)), "overlap"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.linear(*arguments)
    plan = tune.Plan(tune.FEW, 2)
    with pytest.raises(ValueError, match="workspace has 0 sums"):
        launch.linear(x, w, workspace=launch.Workspace(0, 0, DEVICE), plan=plan)


@needs_gpu
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 257])
def test_large(kind, tokens):
    run(kind, tokens, 1031, 2048 + (0 if kind not in PLAIN else 32), dtype=torch.bfloat16)


@needs_gpu
def test_offsets_past_2_to_the_31():
    """2.3 GB of weights, and 2.2 billion numbers of an answer."""
    w, _ = weight(Type.Q8_0, 16, 4096)
    many = w._replace(data=w.data.repeat(33_000, 1, 1), rows=16 * 33_000)
    x = torch.randn(4100, 4096, device=DEVICE).bfloat16()
    few = launch.linear(x[:3], many)
    assert torch.equal(few[:, -16:], few[:, :16])
    whole = launch.linear(x, many)
    assert torch.equal(whole[:, -16:], whole[:, :16]) and torch.equal(whole[-1, :16], launch.linear(x[-1:], w)[0])
