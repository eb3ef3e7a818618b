"""How a product is launched, by its size. Measured on an H200; 12.x gets the same, which compiles there without
spills."""

from __future__ import annotations

from dataclasses import dataclass

WORKSPACE_BYTES = 512 << 20  # of weights in 16 bits at a time


@dataclass(frozen=True)
class Config:
    block_n: int  # rows of W of a program
    tokens: int  # of a program
    stages: int
    warps: int
    per_sm: int = 4  # programs that fill an SM, up to which W's columns are split
    registers: int | None = None  # a thread's, at most


FEW = Config(block_n=64, tokens=8, stages=1, warps=4, per_sm=8)
SOME = Config(block_n=64, tokens=16, stages=1, warps=4, per_sm=8)
MORE = Config(block_n=64, tokens=32, stages=1, warps=4, per_sm=4)
# Tokens from which on weights are dequantised, slice by slice, for a product of 16 bits. H200, Q4_K 2,048 x 6,144: 32
# tokens in 18 us (dequantised: 18), 64 in 24 (19), 128 in 34 (23), 8,192 in 267 (cuBLAS alone: 257)
MANY = 48


@dataclass(frozen=True)
class Plan:
    config: Config
    splits: int


def plan(tokens: int, rows: int, columns: int, sms: int) -> Plan | None:
    """None: dequantise, then a product of 16 bits."""
    if tokens >= MANY:
        return None
    config = FEW if tokens <= FEW.tokens else SOME if tokens <= SOME.tokens else MORE
    return split(config, tokens, rows, columns, sms)


def split(config: Config, tokens: int, rows: int, columns: int, sms: int) -> Plan:
    """As many parts of the columns, of 256 at least, as fill the GPU."""
    tiles = -(-rows // config.block_n) * -(-tokens // config.tokens)
    wide = -(-columns // 256)
    parts = max(1, min(wide, sms * config.per_sm // max(1, tiles)))
    share = -(-wide // parts)
    return Plan(config, -(-wide // share))
