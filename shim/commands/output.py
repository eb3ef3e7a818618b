"""How the subcommands print an answer: as one JSON object, or as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """At least one row. Every column but the last is as wide as its longest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1])
