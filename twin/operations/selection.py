"""Ops of sparse selection (score every pooled key, keep the best): the same under every placement of K and V.

Work of one query row over `ctx` tokens [derived]: 2 x heads x dim x ctx / ratio operations; one pooled key is read per
block, one score is written and read.
"""

from twin.ask.case import Case
from twin.layouts.layout import Pass
from twin.operations.counts import complete_blocks
from twin.operations.ops import Engine, Op


def decode_selection(case: Case, step: Pass, device: int, *, first: int) -> tuple[Op, Op]:
    """Scan of all pooled keys and top-k for one new token of each sequence; a chain after op `first` - 1."""
    blocks = complete_blocks(case.model, step.end) * step.batch
    scan_bytes = blocks * case.index_key_bytes
    on_host = case.pooled == "host"
    scan = Op(
        part="pooled_scan",
        engine=Engine.H2D if on_host else Engine.SM,
        device=device,
        kernel=case.index_kernel("scan"),
        vram_bytes=0 if on_host else scan_bytes,
        link_bytes=scan_bytes if on_host else 0,
        flops=blocks * _flops_per_score(case),
        dtype=case.operand_dtype,
        grain=step.end,
        after=(first - 1,),
    )
    select = Op(
        part="select",
        engine=Engine.SM,
        device=device,
        kernel=case.index_kernel("select"),
        vram_bytes=2 * case.rules.sparse.score_bytes * blocks,
        grain=step.end,
        after=(first,),
    )
    return scan, select


def prefill_selection(case: Case, chunk: Pass, device: int, *, first: int) -> tuple[Op, Op]:
    """Scoring and top-k for all rows of a chunk, a slab of `score_rows` rows at a time."""
    slabs = -(-chunk.rows // case.rules.sparse.score_rows) * chunk.batch
    rows = chunk.rows * chunk.batch
    pooled_bytes = complete_blocks(case.model, chunk.end) * case.index_key_bytes
    scores = rows * (chunk.past + (chunk.rows + 1) / 2) / case.model.indexer.ratio if case.model.indexer else 0
    on_host = case.pooled == "host"
    score = Op(
        part="score",
        engine=Engine.H2D if on_host else Engine.SM,
        device=device,
        kernel=case.index_kernel("score"),
        calls=slabs,
        vram_bytes=(0 if on_host else pooled_bytes) + case.rules.sparse.score_bytes * scores / slabs,
        link_bytes=pooled_bytes if on_host else 0,
        flops=scores * _flops_per_score(case) / slabs,
        dtype=case.operand_dtype,
        grain=chunk.end,
        after=(first - 1,) if first else (),
    )
    select = Op(
        part="select",
        engine=Engine.SM,
        device=device,
        kernel=case.index_kernel("select"),
        calls=slabs,
        vram_bytes=case.rules.sparse.score_bytes * scores / slabs,
        grain=chunk.end,
        after=(first,),
    )
    return score, select


def _flops_per_score(case: Case) -> int:
    indexer = case.model.indexer
    return 2 * indexer.query_heads * indexer.head_dim if indexer else 0
