"""Runs a wheel's own `sparse_attn_indexer` on the CPU, in a child with the shim on.

What needs a GPU has stand-ins. The compiled cache ops are written in torch (as the real ones, on the planar key cache),
our kernels are their references, and the platform says that it is CUDA of capability 12.0. All else is the wheel's,
unmodified, and the shim's.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

from shim.kernels.indexer import reference as scores
from shim.kernels.topk import reference as choice

HEADS, DIM, BLOCK, K = 32, 128, 64, 512
native: list[str] = []  # ops of vLLM's own that ran
ours: list[Any] = []  # kernels of ours that ran


def quantise(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, block: int, scale_format: str) -> None:
    scale = torch.exp2(torch.ceil(torch.log2(k.float().abs().amax(1).clamp(min=1e-4) / 448)))
    fp8 = (k.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    planes = cache.view(cache.shape[0], -1)
    for row, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, BLOCK)
        planes[page, place * DIM : (place + 1) * DIM] = fp8[row]
        at = BLOCK * DIM + 4 * place
        planes[page, at : at + 4] = scale[row : row + 1].view(torch.uint8)


def gather(
    cache: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, table: torch.Tensor, ends: torch.Tensor
) -> None:
    for request, (first, last) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        keys, scales = scores.read_keys(cache, table[request], last - first, torch.float32)
        k[first:last] = keys.to(k.dtype)
        assert scales is not None
        k_scale[first:last] = scales[:, None].contiguous().view(torch.uint8)


def _library(namespace: str, functions: dict[str, Any]) -> torch.library.Library:
    library = torch.library.Library(namespace, "DEF")
    for schema, function in functions.items():
        library.define(f"{schema} -> ()")
        library.impl(schema.split("(")[0], function, "CPU")
    return library


def _noted(name: str) -> Any:
    return lambda *_: native.append(name)


_rest = "Tensor! indices, int numRows, int stride0, int stride1, int topK)"
_flat = "(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len)"
_schemas = {
    "top_k_per_row_prefill": f"(Tensor logits, Tensor rowStarts, Tensor rowEnds, {_rest}",
    "top_k_per_row_decode": f"(Tensor logits, int next_n, Tensor seq_lens, {_rest}",
    "large_context_topk": "(Tensor score, Tensor indices, Tensor lengths, Tensor? row_starts_opt)",
    "persistent_topk": _flat,
    "cooperative_topk": _flat,
}
libraries = [
    _library(
        "_C_cache_ops",
        {
            "indexer_k_quant_and_cache(Tensor k, Tensor! cache, Tensor slots, int block, str format)": quantise,
            "cp_gather_indexer_k_quant_cache(Tensor c, Tensor! k, Tensor! s, Tensor table, Tensor ends)": gather,
        },
    ),
    _library("_C", {name + schema: _noted(name) for name, schema in _schemas.items()}),
]


def mqa_logits(
    q: Any, k: Any, k_scale: Any, weights: Any, ks: Any, ke: Any, out: Any = None, compressed_columns: Any = None
) -> Any:
    """NaN where the kernel writes nothing, because the wheel must not read it."""
    ours.append("mqa_logits")
    full = scores.mqa_logits(q, k, k_scale, weights, ks, ke)
    full[full == -torch.inf] = torch.nan
    if compressed_columns is None:
        return full
    column = ks[:, None].long() + torch.arange(compressed_columns)
    inside = column < ke[:, None]
    return full.gather(1, column.clamp(max=full.shape[1] - 1)).masked_fill(~inside, torch.nan)


def paged_mqa_logits(q: Any, cache: Any, weights: Any, lens: Any, table: Any, max_len: int, out: Any = None) -> Any:
    ours.append("paged_mqa_logits")
    full = scores.paged_mqa_logits(q, cache, weights, lens, table, max_len)
    return full.masked_fill(full == -torch.inf, torch.nan)


def topk(
    logits: Any, lengths: Any, k: int, out: Any, starts: Any = None, next_n: Any = None, workspace: Any = None
) -> Any:
    ours.append("topk")
    if next_n is not None:
        lengths = (lengths.reshape(-1, 1) - next_n + 1 + torch.arange(next_n)).clamp(min=0)
    return out.copy_(choice.topk(logits, lengths.reshape(-1), k, starts))


def _warm(name: str) -> Any:
    return lambda *limits: ours.append([f"{name}.warm_up", *limits[:-1]])


def install() -> None:
    """Before vLLM's indexer is imported."""
    kernels = {
        "indexer": {"mqa_logits": mqa_logits, "paged_mqa_logits": paged_mqa_logits, "warm_up": _warm("indexer")},
        "topk": {"topk": topk, "Workspace": lambda *_: "workspace", "warm_up": _warm("topk")},
    }
    for name, functions in kernels.items():
        launch = types.ModuleType(f"shim.kernels.{name}.launch")
        vars(launch).update(functions)
        sys.modules[launch.__name__] = launch
        setattr(importlib.import_module(f"shim.kernels.{name}"), "launch", launch)  # noqa: B010
    flash = types.ModuleType("vllm.vllm_flash_attn")  # compiled; nothing here calls it
    vars(flash)["__getattr__"] = lambda name: None
    sys.modules[flash.__name__] = flash
    import vllm.platforms as platforms
    import vllm.platforms.cuda as cuda
    from vllm.platforms.interface import DeviceCapability

    for platform in {cuda.CudaPlatform, cuda.CudaPlatformBase}:
        platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(12, 0))
    platforms._current_platform = cuda.CudaPlatform()


def build_indexer(model_type: str = "glm_moe_dsa") -> str:
    """Constructs the wheel's SparseAttnIndexer as its model does; the class of the error, empty without one."""
    import vllm.model_executor.layers.sparse_attn_indexer as op
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type, index_n_heads=HEADS))
    try:
        with set_current_vllm_config(config):
            op.SparseAttnIndexer(None, 128, "ue8m0", K, DIM, 2048, 4096, torch.empty(8, K, dtype=torch.int32))
    except RuntimeError as problem:
        return str(problem)
    return ""


class Batch:
    """Two requests that decode next_n tokens, then two that prefill: one from its start, one after 500 keys."""

    def __init__(self, next_n: int) -> None:
        torch.manual_seed(next_n)
        self.next_n = next_n
        self.new, self.lens = [next_n, next_n, 150, 90], [700, 130, 150, 590]
        self.tokens, self.width = sum(self.new), 12
        self.cache = torch.randint(0, 255, (64, BLOCK, DIM + 4), dtype=torch.uint8)  # garbage where nothing was written
        self.table = torch.randperm(48).view(4, self.width).to(torch.int32)
        keys = [torch.randn(n, DIM, dtype=torch.bfloat16) for n in self.lens]
        for request, key in enumerate(keys):
            quantise(key, self.cache, self._slots(request, 0), 128, "ue8m0")
        self.k = torch.cat([key[-n:] for key, n in zip(keys, self.new, strict=True)])
        self.slots = torch.cat([self._slots(r, self.lens[r] - self.new[r]) for r in range(4)])
        planes = self.cache.view(64, -1)
        for slot in self.slots.tolist():  # the wheel's op is to write these
            planes[slot // BLOCK, slot % BLOCK * DIM : (slot % BLOCK + 1) * DIM] = 0
        self.q = torch.randn(self.tokens, HEADS, DIM).to(torch.float8_e4m3fn)
        self.weights = torch.randn(self.tokens, HEADS)
        self.buffer = torch.full((self.tokens + 5, K), 77, dtype=torch.int32)

    def _slots(self, request: int, first: int) -> torch.Tensor:
        position = torch.arange(first, self.lens[request])
        return self.table[request, position // BLOCK].long() * BLOCK + position % BLOCK

    def metadata(self, module: types.ModuleType, two_dimensional: bool) -> Any:
        decodes = 2 * self.next_n
        lens = torch.tensor(self.lens, dtype=torch.int32)
        ends = torch.tensor([0, self.lens[2], self.lens[2] + self.lens[3]], dtype=torch.int32)
        ks = torch.cat([torch.full((self.new[r],), int(ends[r - 2])) for r in (2, 3)]).int()
        visible = torch.cat([torch.arange(self.lens[r] - self.new[r], self.lens[r]) + 1 for r in (2, 3)]).int()
        total = int(ends[-1])
        chunk = _of(
            module.DeepseekV32IndexerPrefillChunkMetadata,
            block_table=self.table[2:], cu_seqlen_ks=ks, cu_seqlen_ke=ks + visible, cu_seq_lens=ends,
            token_to_seq=None, total_seq_lens=total, token_start=decodes, token_end=self.tokens, num_reqs=2,
            local_cu_seq_lens=ends, local_total_seq_lens=total, max_local_total_seq_lens=total,
            max_seqlen_k=int(visible.max()),
        )  # fmt: skip
        seq_lens = lens[:2]
        if two_dimensional:
            seq_lens = (seq_lens[:, None] - self.next_n + 1 + torch.arange(self.next_n)).int()
        offsets = torch.arange(self.next_n, dtype=torch.int32) if self.next_n > 1 else None
        decode = _of(
            module.DeepSeekV32IndexerDecodeMetadata,
            block_table=self.table[:2], seq_lens=seq_lens, decode_lens=torch.full((2,), self.next_n),
            requires_padding=False, schedule_metadata=None, use_large_context_topk=self.next_n > 1, offsets=offsets,
            per_req_decode_lens=None, decode_is_uniform=True, write_max_decode_len=self.next_n,
        )  # fmt: skip
        return _of(
            module.DeepseekV32IndexerMetadata,
            seq_lens=lens, num_reqs=4, max_query_len=150, max_seq_len=700, num_actual_tokens=self.tokens,
            query_start_loc=None, slot_mapping=self.slots, head_dim=DIM, num_decodes=2, num_decode_tokens=decodes,
            num_prefills=2, num_prefill_tokens=self.tokens - decodes, decode=decode,
            prefill=_of(module.DeepseekV32IndexerPrefillMetadata, chunks=[chunk]), block_table=self.table,
        )  # fmt: skip

    def run(self) -> None:
        """The wheel's function on this batch."""
        import vllm.model_executor.layers.sparse_attn_indexer as op
        import vllm.v1.attention.backends.mla.indexer as builder

        metadata = self.metadata(builder, "fp8_fp4_mqa_logits" in vars(op))
        context = SimpleNamespace(attn_metadata={"layer": metadata}, cudagraph_runtime_mode=None)
        workspaces = SimpleNamespace(get_simultaneous=lambda *specs: [torch.empty(s, dtype=d) for s, d in specs])
        op.get_forward_context = lambda: context
        for module in (op, sys.modules.get("vllm.model_executor.layers.indexer_topk")):
            if module is not None:
                module.current_workspace_manager = lambda: workspaces
        given = dict(
            hidden_states=torch.empty(self.tokens, 8), k_cache_prefix="layer", kv_cache=self.cache, q_fp8=self.q,
            q_quant=self.q, q_scale=None, k=self.k, weights=self.weights, quant_block_size=128, scale_fmt="ue8m0",
            topk_tokens=K, head_dim=DIM, max_model_len=self.width * BLOCK, total_seq_lens=1000,
            topk_indices_buffer=self.buffer, skip_k_cache_insert=False, use_pcp=False, pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="",
        )  # fmt: skip
        parameters = inspect.signature(op.sparse_attn_indexer).parameters.values()
        missing = [p.name for p in parameters if p.name not in given and p.default is p.empty]
        assert not missing, missing
        op.sparse_attn_indexer(**{p.name: given[p.name] for p in parameters if p.name in given})

    def wrong_rows(self) -> list[int]:
        """Tokens whose chosen positions are not the top K of the reference's scores (a tie may fall either way)."""
        wrong, last = [], 0
        for request, new in enumerate(self.new):
            first, last = last, last + new
            length = self.lens[request]
            keys, scales = scores.read_keys(self.cache, self.table[request], length, torch.float64)
            visible = torch.arange(length - new, length) + 1
            tokens = slice(first, last)
            logits = scores.mqa_logits(
                self.q[tokens], keys, scales, self.weights[tokens], visible * 0, visible, dtype=torch.float64
            )
            for row, count in enumerate(visible.tolist()):
                chosen = self.buffer[first + row]
                found = chosen[chosen >= 0].long()
                distinct = len(found) == len(found.unique()) == min(K, count) and int(found.max()) < count
                best = logits[row].topk(min(K, count)).values
                if not distinct or not torch.allclose(logits[row, found].sort(descending=True).values, best, atol=1e-4):
                    wrong.append(first + row)
        return wrong


def _of(cls: Any, **values: Any) -> Any:
    """The release's dataclass, of the fields that it has."""
    return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
