"""What the launches share: forms of tensors, plans by form, and the warning of late compilation. No GPU."""

import logging

import pytest
import torch

pytest.importorskip("triton")

from shim.kernels.host import Compiled, form
from shim.kernels.indexer import launch as indexer
from shim.kernels.topk import launch as topk


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3), (2, 4, 8), (0, 5), (4, 0, 2), (1, 1)])
def test_a_form_is_contiguous_as_its_tensor_is(shape):
    whole = torch.zeros(shape)
    for tensor in (whole, whole.T if len(shape) == 2 else whole, whole[..., ::2], whole[:1], whole.expand(shape)):
        assert form(tensor).contiguous == tensor.is_contiguous(), (tensor.shape, tensor.stride())


def test_whole_16_bytes():
    store = torch.zeros(4, 24, dtype=torch.bfloat16)
    assert form(store).in_16_bytes and form(store[:, 8:16]).in_16_bytes
    for bad in (store[:, 1:9], store[:, ::2], torch.zeros(4, 20, dtype=torch.bfloat16), store.T):
        assert not form(bad).in_16_bytes


def test_a_kept_plan_lets_nothing_else_pass():
    """Each bad call differs from a planned one in one thing that the kernels rely on."""
    q, keys = torch.zeros(3, 32, 128).to(indexer.FP8), torch.zeros(8 * 128 + 16).to(indexer.FP8)
    k, scale, weights, rows = keys[:-16].view(8, 128), torch.zeros(8), torch.zeros(3, 32), torch.zeros(3).int()
    good = [form(x) for x in (q, k, scale, weights, rows, rows)]
    more = (None, None, None, 188)
    plan = indexer._prefill(*good, *more)
    assert indexer._prefill(*[form(x.clone()) for x in (q, k, scale, weights, rows, rows)], *more) is plan
    for at, bad in ((1, keys[8:-8].view(8, 128)), (1, k[:, :64]), (3, weights.half()), (4, rows[:2]), (5, rows.long())):
        with pytest.raises(ValueError):
            indexer._prefill(*good[:at], form(bad), *good[at + 1 :], *more)
    logits, lengths = torch.zeros(3, 9000), rows
    assert topk._launch(form(logits), form(lengths), 5, None, None, None, None, 188)[1].programs
    for values in (logits.T.contiguous().T, logits[:2]):
        with pytest.raises(ValueError):
            topk._launch(form(values), form(lengths), 5, None, None, None, None, 188)


def test_what_compiles_after_warm_up_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM sets it to False, and caplog needs it

    class Kernel:
        def __init__(self):
            self.device_caches = {0: ({"a": 1}, {})}

    kernels = Kernel(), Kernel()
    compiled = Compiled("op", *kernels)
    with caplog.at_level(logging.WARNING):
        compiled.tell("before warm-up")
        compiled.warm(torch.device("cuda", 0))
        compiled.tell("warm")
        assert compiled.count() == 2 and not caplog.records
        kernels[1].device_caches[0][0]["b"] = 1
        compiled.tell("late")
        compiled.tell("again")
    (record,) = caplog.records
    assert record.name == "vllm.glm5_shim"  # vLLM's handlers print it
    assert record.getMessage() == "op compiled a variant after warm-up: late"
