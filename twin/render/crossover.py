"""Where each cache format becomes faster than another on one machine, for a reader or as JSON."""

from typing import Any

import msgspec

from twin.answers.crossover import Crossing, Crossover
from twin.render.text import table
from twin.units import format_seconds

SCHEMA = "twin.crossover/1"


def crossover_text(found: Crossover) -> str:
    """A line a format: from which context on it is faster at each batch, and how it stands at one context."""
    batches = [crossing.batch for crossing in found.lines[0].crossings]
    heads = (
        "format",
        *(f"faster at batch {batch}" for batch in batches),
        f"at {found.ctx_tokens:,}, batch 1",
        f"of {found.against}",
        "held by",
    )
    rows = [
        (
            line.kv_dtype + (" *" if line.kv_dtype in found.carried else ""),
            *(_from(crossing) for crossing in line.crossings),
            format_seconds(line.seconds),
            f"{line.ratio:.2f} +- {line.ratio * line.spread:.2f}",
            line.wall,
        )
        for line in found.lines
    ]
    tokens = f"{found.query_tokens} query token{'s' if found.query_tokens > 1 else ''}"
    carried = f", carried over from {found.carried_from}" if found.carried_from else ""
    text = (
        f"{found.machine}, kernels of engine {found.engine} (this project's own{carried}): "
        f"attention of one layer, {tokens}, against {found.against}\n\n{table(heads, rows)}"
    )
    for name, why in found.refused.items():
        text += f"  {name}: {why}\n"
    if found.carried_from:
        text += (
            f"  * Not measured on {found.machine} ({', '.join(found.carried)}): shares of roofs and operations an "
            f"element are those of {found.carried_from}\n"
        )
    if found.others:
        text += (
            f"  Other engines run kernels of their own here ({', '.join(found.others)}), which may rank the formats "
            f"otherwise: twin compare --over formats --model MODEL --hw {found.machine}\n"
        )
    return text


def _from(crossing: Crossing) -> str:
    if crossing.ctx_tokens is None:
        return f"never ({crossing.wall})"
    return f"from {crossing.ctx_tokens:,} ({crossing.wall})"


def crossover_json(found: Crossover) -> dict[str, Any]:
    """All of it."""
    plain: dict[str, Any] = {"schema": SCHEMA, **msgspec.to_builtins(found)}
    return plain
