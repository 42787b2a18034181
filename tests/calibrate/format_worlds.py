"""Samples of format kernels on the machine of `probe_worlds`, from known latencies, shares and operations: no torch."""

import random
from collections.abc import Iterable

from calibrate.probes import ProbeRecord, Sample
from tests.calibrate import probe_worlds as worlds
from twin.operations.format_ops import Heads, append_op, decode_op, format_case

POINTS = (
    (8192, 1, 1), (131072, 1, 1), (8192, 8, 1), (131072, 8, 1), (32768, 1, 1),
    (8192, 1, 4), (131072, 1, 4), (8192, 1, 16), (131072, 1, 16), (32768, 8, 16), (8192, 8, 32), (131072, 1, 32),
)  # fmt: skip
"""Context, batch, query tokens."""

INSTRUCTIONS = 2e12
LATENCY_S = 8e-6
READ, MERGING = 0.9, 0.5
DECODING = {"bf16": 0.02, "fp8": 0.1, "int4_per_token_head": 2.0}
"""Operations an element of each format, whatever the rows."""

OF_A_ROW = 0.1

APPEND_LATENCY_S, APPEND = 90e-6, 0.01


def seconds(name: str, ctx: int, batch: int, tokens: int, *, inline: bool = False, heads: Heads | None = None) -> float:
    """Of one call."""
    op = decode_op(format_case(name, inline=inline, heads=heads), ctx_tokens=ctx, batch=batch, query_tokens=tokens)
    assert op.split_kv is not None
    share = op.split_kv.on(worlds.machine().sm_count)
    each = DECODING[name] + OF_A_ROW * op.split_kv.q_rows
    merged_s = share.combined_bytes / worlds.VRAM / MERGING
    return LATENCY_S + merged_s + max(op.vram_bytes / worlds.VRAM / READ, share.elements * each / INSTRUCTIONS)


def decode(
    name: str, points: Iterable[tuple[int, int, int]] = POINTS, *, inline: bool = False, noise: float = 0.0,
    slower: float = 1.0,
) -> ProbeRecord:  # fmt: skip
    """A format's probe."""
    chance = random.Random(len(name))  # noqa: S311
    made = []
    for ctx, batch, tokens in points:
        taken = slower * seconds(name, ctx, batch, tokens, inline=inline) * (1 + chance.gauss(0, noise))
        at = {"ctx_tokens": ctx, "batch": batch, "query_tokens": tokens}
        arrangement = "inline" if inline else "aligned"
        made.append(worlds.sample(taken, format=name, arrangement=arrangement, **at, **Heads()._asdict()))
    return ProbeRecord(samples=tuple(made), took_s=1.0)


def append(names: Iterable[str] = DECODING) -> ProbeRecord:
    """One token and 512."""
    made = []
    for name in names:
        for tokens in (1, 512):
            op = append_op(format_case(name), tokens=tokens)
            taken = APPEND_LATENCY_S + op.vram_bytes / worlds.VRAM / APPEND
            made.append(worlds.sample(taken, format=name, tokens=tokens, **Heads()._asdict()))
    return ProbeRecord(samples=tuple(made), took_s=1.0)


def instructions() -> ProbeRecord:
    """Chains of operations."""
    return ProbeRecord(samples=(worlds.sample(1e-3, flops=INSTRUCTIONS * 1e-3, chains=16),), took_s=1.0)


def roof() -> ProbeRecord:
    """The products of bf16."""
    made: Sample = worlds.sample(1.0, flops=worlds.TENSOR, dtype="bf16", tokens=8192, rows=8192, columns=8192)
    return ProbeRecord(samples=(made,), took_s=1.0)


def records(**changes: ProbeRecord) -> dict[str, ProbeRecord]:
    """Every probe of three formats, on top of `probe_worlds.records()`."""
    made = {f"format_decode_{name}": decode(name) for name in DECODING}
    return {
        **worlds.records(), "tensor_bf16": roof(), "instructions": instructions(), **made, "format_append": append(),
        **changes,
    }  # fmt: skip
