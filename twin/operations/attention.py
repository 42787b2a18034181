"""Ops of attention's matrix products in prefill, wherever the planes come from."""

import math
from functools import cache

from twin.ask.case import Case
from twin.layouts.layout import Pass
from twin.operations.counts import HALF_BYTES, padded_selection
from twin.operations.occupancy import STATISTICS, Cut, Plan, tile_tokens
from twin.operations.ops import Block, Engine, Op

ACCUMULATOR_BYTES = 4
"""Bytes of an element of partial outputs and running sums (fp32)."""

INDEX_BYTES = 4
"""Bytes of one selected token index (int32)."""


def dense_read(case: Case, step: Pass, device: int, *, after: tuple[int, ...]) -> Op:
    """Attention of a step's query tokens over every cached token: the cache is read once, whatever their number."""
    attention = case.model.attention
    rows = step.rows * (attention.query_heads // attention.kv_heads)
    kernel = case.attention_kernel("attend_decode", step.rows)
    plan = case.rules.plan(case.fmt.name, kernel.split("/")[1])
    blocks, program = plan.programs_of(rows) if plan is not None else (1, None)
    elements = step.end * step.batch * attention.kv_heads * attention.head_dim
    return Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=kernel,
        vram_bytes=step.end * case.plane_bytes * step.batch,
        flops=4.0 * elements * (blocks * program.held if program is not None else rows),
        decoded=2.0 * elements * blocks if case.fmt.kind != "plain" else 0,
        dtype=case.operand_dtype,
        grain=step.rows,
        cut=_cut(case, step, plan) if plan is not None else None,
        after=after,
    )


def _cut(case: Case, step: Pass, plan: Plan) -> Cut:
    """How a step's decode attention is cut into programs of the plan."""
    attention = case.model.attention
    blocks, program = plan.programs_of(step.rows * (attention.query_heads // attention.kv_heads))
    own = case.fmt.tile_tokens
    tile = own if own > 1 else tile_tokens(program, head_dim=attention.head_dim)
    rows = step.batch * step.rows * attention.query_heads
    return Cut(
        pairs=step.batch * attention.kv_heads * blocks,
        tiles=-(-int(step.end) // tile),
        tile_elements=2 * tile * attention.head_dim,
        rows=program.held,
        per_multiprocessor=program.per_multiprocessor,
        prologue=program.prologue,
        partial_bytes=rows * (attention.head_dim + STATISTICS) * ACCUMULATOR_BYTES,
        other_splits=plan.other_splits,
    )


def append(case: Case, chunk: Pass, device: int) -> Op:
    """Write a chunk's K and V: computed in 16 bits, stored in the format (quantised there, where it is)."""
    attention = case.model.attention
    computed = 2 * attention.kv_heads * attention.head_dim * HALF_BYTES
    return Op(
        part="append",
        engine=Engine.SM,
        device=device,
        kernel=case.attention_kernel("append"),
        vram_bytes=(computed + case.plane_bytes) * chunk.rows * chunk.batch,
        grain=chunk.rows * chunk.batch,
    )


def dense_block(case: Case, chunk: Pass, device: int, *, times: int, link_bytes: float) -> Block:
    """Causal attention of a chunk over everything before it: 4 x heads x dim operations per pair of tokens."""
    attention = case.model.attention
    pairs = chunk.rows * chunk.past + chunk.rows * (chunk.rows + 1) / 2
    write = (append(case, chunk, device),) if case.backend and case.model.indexer is None else ()
    attend = Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=case.attention_kernel("attend_dense"),
        flops=4 * attention.query_heads * attention.head_dim * pairs * chunk.batch,
        vram_bytes=chunk.end * case.plane_bytes * chunk.batch - link_bytes,
        link_bytes=link_bytes,
        dtype=case.operand_dtype,
        grain=chunk.rows,
        after=tuple(range(len(write))),
    )
    return Block(ops=(*write, attend), times=times)


def padded_heads(case: Case) -> int:
    """Query heads that the sparse kernel computes: each KV head's group is padded up to whole tiles."""
    attention = case.model.attention
    group = attention.query_heads // attention.kv_heads
    return attention.kv_heads * -(-group // case.rules.sparse.head_tile) * case.rules.sparse.head_tile


def issued_tokens(case: Case, buckets: int) -> float:
    """Tokens that the sparse kernel multiplies for one row in one of `buckets` buckets, masked lanes included.

    An engine that masks issues its whole padded selection in every bucket. One that splits the selection issues what
    falls into the bucket, rounded up to whole tiles: a Poisson count of mean blocks / buckets.
    """
    rules, indexer = case.rules, case.model.indexer
    if indexer is None:
        return 0.0
    if not rules.sparse.splits_selection:
        return float(padded_selection(case.model, rules.sparse.selection_alignment))
    tile_blocks = max(1, rules.sparse.selection_alignment // indexer.ratio)
    return expected_rounded((indexer.block_topk + 1) / buckets, tile_blocks) * indexer.ratio


MANY = 64.0
"""Mean from which on the remainder of a Poisson count is even."""


@cache
def expected_rounded(mean: float, tile: int) -> float:
    """Expectation of a Poisson count of that mean rounded up to whole tiles."""
    if mean > MANY:
        return mean + (tile - 1) / 2
    chance, total, count = math.exp(-mean), 0.0, 0
    while count <= mean + 12 * math.sqrt(mean) + 24:
        total += chance * (-(-count // tile) * tile)
        count += 1
        chance *= mean / count
    return total


def issued_flops(case: Case, rows: int, buckets: int) -> float:
    """Operations that one call of the sparse kernel issues for `rows` rows: two products with every issued token."""
    return 4.0 * rows * issued_tokens(case, buckets) * padded_heads(case) * case.model.attention.head_dim


def sparse_products(
    case: Case, chunk: Pass, device: int, *, after: tuple[int, ...], buckets: int, region_tokens: int, vram_bytes: float
) -> Op:
    """One call of the sparse kernel for all rows over `region_tokens` tokens; indices are read once per kv head."""
    rows = chunk.rows * chunk.batch
    selection = padded_selection(case.model, case.rules.sparse.selection_alignment)
    return Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=case.kernel("attend_sparse"),
        flops=issued_flops(case, rows, buckets),
        vram_bytes=vram_bytes + rows * selection * INDEX_BYTES * case.model.attention.kv_heads,
        dtype=case.operand_dtype,
        grain=region_tokens,
        after=after,
    )


def merge_partials(case: Case, chunk: Pass, device: int, *, after: tuple[int, ...]) -> Op:
    """Fold one bucket's partial outputs into the running softmax: write and read partials, read and write the sum."""
    attention = case.model.attention
    partials = 0 if case.rules.sparse.splits_selection else padded_heads(case)  # such a kernel carries the sum itself
    elements = 2 * partials + 2 * attention.query_heads
    return Op(
        part="combine",
        engine=Engine.SM,
        device=device,
        kernel=case.kernel("combine"),
        vram_bytes=chunk.rows * elements * attention.head_dim * ACCUMULATOR_BYTES,
        grain=chunk.rows,
        after=after,
    )
