"""How experts are launched, by the number of slots (tokens times experts of each). Measured on an H200; for 12.x, where
nothing has been measured, chosen by what compiles without spills."""

from __future__ import annotations

from dataclasses import dataclass

PARTS_BYTES = 512 << 20  # of slots' shares of the answer at a time
WORKSPACE_BYTES = 512 << 20  # of experts in 16 bits at a time
BLOCK_K = 64  # columns of a step, of weights in 16 bits
COUNT, PLACE, PLACE_BLOCKS, ADD = 1024, 256, 32, 1024  # slots or columns of a program that sorts or adds up


@dataclass(frozen=True)
class Config:
    block_n: int  # rows of a matrix of a program
    tokens: int  # of a program
    stages: int
    warps: int
    per_sm: int = 4  # programs that fill an SM, up to which a product is split
    registers: int | None = None  # a thread's, at most


@dataclass(frozen=True)
class Plan:
    gate_up: Config
    down: Config
    few: bool  # a program finds its expert's slots itself; else slots are sorted first
    dense: bool = False  # experts go to 16 bits first, as many at a time as the workspace holds


FEW_SLOTS, MANY_SLOTS = 256, 8192  # up to which slots are few; from which experts are dequantised first on 9.0
# H200, 16 tokens: 2 and 3 stages take 1.8 to 2.5 times as long; 16 rows and 2 warps are within 5 %. Without a limit on
# registers ptxas takes 80 for Q4_0's down, and spills two
FEW = Plan(Config(32, 8, 1, 4, per_sm=8), Config(64, 8, 1, 4, per_sm=8, registers=224), few=True)
# What is looked up once for each weight would be copied ahead as weights are, and take 160 KB of shared memory
UNSTAGED = ("IQ4_NL", "IQ4_XS")
SOME = Plan(Config(64, 64, 2, 8), Config(128, 64, 2, 8), few=False)
# H200, 8,192 tokens: 128 slots or 256 rows a program are 3 % slower; SOME takes 8.3 ms, where this takes 3.5
DENSE = Plan(Config(128, 64, 3, 8), Config(128, 64, 3, 4), few=False, dense=True)


def plan(slots: int, capability: tuple[int, int], plain: bool = False) -> Plan:
    """plain: all weights are of 16 bits."""
    if slots <= FEW_SLOTS:
        return FEW
    return DENSE if plain or (capability[0] == 9 and slots >= MANY_SLOTS) else SOME


def splits(tiles: int, most: int, config: Config, sms: int) -> int:
    """Parts of a product that make enough programs."""
    parts = max(1, min(most, sms * config.per_sm // max(1, tiles)))
    share = -(-most // parts)
    return -(-most // share)
