"""Ops of attention's matrix products in prefill, wherever the planes come from."""

from twin.case import Case
from twin.counts import padded_selection
from twin.layouts.layout import Pass
from twin.ops import Block, Engine, Op

ACCUMULATOR_BYTES = 4
"""Bytes of an element of partial outputs and running sums (fp32)."""

INDEX_BYTES = 4
"""Bytes of one selected token index (int32)."""


def dense_block(case: Case, chunk: Pass, device: int, *, times: int, link_bytes: float) -> Block:
    """Causal attention of a chunk over everything before it: 4 x heads x dim operations per pair of tokens."""
    attention = case.model.attention
    pairs = chunk.rows * chunk.past + chunk.rows * (chunk.rows + 1) / 2
    attend = Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("attend_dense", case.fmt.name),
        flops=4 * attention.query_heads * attention.head_dim * pairs * chunk.batch,
        vram_bytes=chunk.end * case.plane_bytes * chunk.batch - link_bytes,
        link_bytes=link_bytes,
        grain=chunk.rows,
    )
    return Block(ops=(attend,), times=times)


def issued_flops(case: Case, rows: int) -> float:
    """Operations that one call of the sparse kernel issues: padded selection x query heads padded to whole tiles."""
    attention = case.model.attention
    group = attention.query_heads // attention.kv_heads
    heads = attention.kv_heads * -(-group // case.rules.head_tile) * case.rules.head_tile
    return 4.0 * rows * padded_selection(case.model, case.rules.selection_alignment) * heads * attention.head_dim


def sparse_products(
    case: Case, chunk: Pass, device: int, *, after: tuple[int, ...], vram_bytes: float, link_bytes: float = 0
) -> Op:
    """One call of the sparse kernel for all rows of the chunk; the index list is read once per kv head."""
    rows = chunk.rows * chunk.batch
    selection = padded_selection(case.model, case.rules.selection_alignment)
    return Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("attend_sparse", case.fmt.name),
        flops=issued_flops(case, rows),
        vram_bytes=vram_bytes + rows * selection * INDEX_BYTES * case.model.attention.kv_heads,
        link_bytes=link_bytes,
        grain=chunk.rows,
        after=after,
    )


def merge_partials(case: Case, chunk: Pass, device: int, *, after: tuple[int, ...]) -> Op:
    """Fold one bucket's partial outputs into the running softmax: write and read partials, read and write the sum."""
    attention = case.model.attention
    group = attention.query_heads // attention.kv_heads
    padded = attention.kv_heads * -(-group // case.rules.head_tile) * case.rules.head_tile
    elements = 2 * padded + 2 * attention.query_heads
    return Op(
        part="merge",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("attend", case.fmt.name),
        vram_bytes=chunk.rows * elements * attention.head_dim * ACCUMULATOR_BYTES,
        after=after,
    )
