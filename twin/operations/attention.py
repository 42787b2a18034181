"""Ops of attention: decode and prefill, dense and sparse, selection of blocks, and prefill over a dequantised history.

Everything is per attention layer. K and V may lie anywhere: what a layout moves before these ops is its own affair.
"""

import math
from functools import cache

from msgspec.structs import replace

from twin.ask.case import Case
from twin.models.mixers import Attention
from twin.operations.counts import FULL_BYTES, HALF_BYTES, complete_blocks, padded_selection
from twin.operations.occupancy import ACCUMULATOR_BYTES, STATISTICS, SplitKV, flash_grid
from twin.operations.ops import Engine, Op, OpGraph, Step

INDEX_BYTES = 4  # bytes of one selected token index (int32)
MANY = 64.0  # mean from which on the remainder of a Poisson count is even


# Decode, append and dense prefill


def decode_attention(case: Case, step: Step, device: int, *, after: tuple[int, ...]) -> Op:
    """Attention of a step's query tokens over every cached token: the cache is read once, whatever their number.

    A kernel whose plan is known pads query rows to those of its thread blocks, each of which dequantises the cache.
    """
    attention = case.attention
    q_rows = step.q_tokens * attention.group
    kernel = case.attention_kernel("attend_decode", step.q_tokens)
    plans, backend, fmt = case.rules.own_kernels.decode_plans, kernel.split("/")[1], case.fmt.name
    plan = plans.get(f"{backend}/{fmt}", plans.get(fmt))
    dequantised, split_kv = 1, None
    if plan is not None:
        dequantised, thread_block = plan.thread_blocks_of(q_rows)
        q_rows = dequantised * thread_block.q_rows
        own = case.fmt.tile_tokens
        tile = own if own > 1 else thread_block.tile_tokens(attention.head_dim)
        outputs = step.batch * step.q_tokens * attention.query_heads
        split_kv = SplitKV(
            pairs=step.batch * attention.kv_heads * dequantised,
            tiles=-(-int(step.end) // tile),
            tile_elements=2 * tile * attention.head_dim,
            q_rows=thread_block.q_rows,
            per_multiprocessor=thread_block.per_multiprocessor,
            prologue=thread_block.prologue,
            partial_bytes=outputs * (attention.head_dim + STATISTICS) * ACCUMULATOR_BYTES,
            other_splits=plan.other_splits,
        )
    elements = step.end * step.batch * attention.kv_elements
    return Op(
        "attention",
        device,
        kernel=kernel,
        vram_bytes=step.end * case.plane_bytes * step.batch,
        flops=2.0 * elements * q_rows,
        dequantised_elements=float(elements * dequantised) if case.fmt.kind != "plain" else 0,
        dtype=case.operand_dtype,
        grain=step.q_tokens,
        split_kv=split_kv,
        after=after,
    )


def append(case: Case, chunk: Step, device: int) -> Op:
    """Write a chunk's K and V: computed in 16 bits, stored (and quantised) in the format."""
    tokens = chunk.q_tokens * chunk.batch
    moved = (case.attention.kv_elements * HALF_BYTES + case.plane_bytes) * tokens
    return Op("append", device, kernel=case.attention_kernel("append"), vram_bytes=moved, grain=tokens)


def _causal_flops(case: Case, chunk: Step) -> float:
    """Two products for every pair of a new token and one that it sees."""
    attention = case.attention
    return 2 * attention.query_heads * (attention.head_dim + attention.value_width) * chunk.pairs * chunk.batch


def dense_graph(case: Case, chunk: Step, device: int, *, times: int, link_bytes: float) -> OpGraph:
    """Causal attention of a chunk over everything before it."""
    write = (append(case, chunk, device),) if case.backend and case.indexer is None else ()
    attend = Op(
        "attention",
        device,
        kernel=case.attention_kernel("attend_dense"),
        flops=_causal_flops(case, chunk),
        vram_bytes=chunk.end * case.plane_bytes * chunk.batch - link_bytes,
        link_bytes=link_bytes,
        dtype=case.operand_dtype,
        grain=chunk.q_tokens,
        after=tuple(range(len(write))),
    )
    return OpGraph(ops=(*write, attend), times=times)


# Selection: score every pooled key, keep the best blocks. The same wherever K and V lie.
# Work of one query token over `ctx` tokens [derived]: 2 x heads x dim x ctx / ratio operations; one pooled key is read
# per block, one score is written and read.


def decode_selection(case: Case, step: Step, device: int, *, first: int) -> tuple[Op, Op]:
    """Scan of all pooled keys and top-k for one new token of each sequence; a chain after op `first` - 1."""
    blocks = complete_blocks(case.indexer, step.end) * step.batch
    scan = _scoring(case, device, part="pooled_scan", operation="scan", blocks=blocks, scores=blocks, grain=step.end)
    return _selection(case, scan, score_bytes=2 * case.rules.sparse.score_bytes * blocks, first=first)


def prefill_selection(case: Case, chunk: Step, device: int, *, first: int) -> tuple[Op, Op]:
    """Scoring and top-k for all query tokens of a chunk, a slab of `score_rows` of them at a time."""
    slabs = -(-chunk.q_tokens // case.rules.sparse.score_rows) * chunk.batch
    scores = chunk.batch * chunk.pairs / case.indexer.ratio / slabs if case.indexer else 0
    blocks = complete_blocks(case.indexer, chunk.end)
    score = _scoring(case, device, part="score", operation="score", blocks=blocks, scores=scores, grain=chunk.end)
    score_bytes = case.rules.sparse.score_bytes * scores
    score = replace(score, calls=slabs, vram_bytes=score.vram_bytes + score_bytes)
    return _selection(case, score, score_bytes=score_bytes, first=first)


def _scoring(case: Case, device: int, *, part: str, operation: str, blocks: int, scores: float, grain: float) -> Op:
    """Each of `blocks` pooled keys read once, in VRAM or over the link; every score is a dot product of all heads."""
    on_host, key_bytes = case.pooled == "host", blocks * case.index_key_bytes
    indexer = case.indexer
    return Op(
        part,
        device,
        engine=Engine.H2D if on_host else Engine.SM,
        kernel=case.index_kernel(operation),
        vram_bytes=0 if on_host else key_bytes,
        link_bytes=key_bytes if on_host else 0,
        flops=scores * 2 * indexer.query_heads * indexer.head_dim if indexer else 0,
        dtype=case.operand_dtype,
        grain=grain,
    )


def _selection(case: Case, scoring: Op, *, score_bytes: float, first: int) -> tuple[Op, Op]:
    """Scoring after op `first` - 1, and the top-k of its scores."""
    kernel, calls, grain = case.index_kernel("select"), scoring.calls, scoring.grain
    return (
        replace(scoring, after=(first - 1,) if first else ()),
        Op("select", scoring.device, kernel=kernel, calls=calls, vram_bytes=score_bytes, grain=grain, after=(first,)),
    )


# Sparse prefill: every query token attends to its own selection, bucket by bucket where the history is staged


def padded_heads(case: Case) -> int:
    """Query heads that the sparse kernel computes: each KV head's group is padded up to whole tiles."""
    attention, tile = case.attention, case.rules.sparse.head_tile
    return attention.kv_heads * -(-attention.group // tile) * tile


def issued_tokens(case: Case, buckets: int) -> float:
    """Tokens that the sparse kernel multiplies for one query token in one of `buckets` buckets, masked lanes included.

    An engine that masks issues its whole padded selection in every bucket. One that splits the selection issues what
    falls into the bucket, rounded up to whole tiles: a Poisson count of mean blocks / buckets.
    """
    rules, indexer = case.rules, case.indexer
    if indexer is None:
        return 0.0
    if not rules.sparse.splits_selection:
        return float(padded_selection(case.indexer, rules.sparse.selection_alignment))
    tile_blocks = max(1, rules.sparse.selection_alignment // indexer.ratio)
    return expected_rounded((indexer.block_topk + 1) / buckets, tile_blocks) * indexer.ratio


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


def issued_flops(case: Case, q_tokens: int, buckets: int) -> float:
    """Operations that one call of the sparse kernel issues: two products of each query token and issued token."""
    return 4.0 * q_tokens * issued_tokens(case, buckets) * padded_heads(case) * case.attention.head_dim


def sparse_attention(
    case: Case, chunk: Step, device: int, *, after: tuple[int, ...], buckets: int, region_tokens: int, vram_bytes: float
) -> Op:
    """One call of the sparse kernel for all query tokens over `region_tokens`; indices are read once per KV head."""
    tokens = chunk.q_tokens * chunk.batch
    selection = padded_selection(case.indexer, case.rules.sparse.selection_alignment)
    return Op(
        "attention",
        device,
        kernel=case.kernel("attend_sparse"),
        flops=issued_flops(case, tokens, buckets),
        vram_bytes=vram_bytes + tokens * selection * INDEX_BYTES * case.attention.kv_heads,
        dtype=case.operand_dtype,
        grain=region_tokens,
        after=after,
    )


def combine_partials(case: Case, chunk: Step, device: int, *, after: tuple[int, ...]) -> Op:
    """Combine one bucket's partial outputs with the running softmax: both are written and read."""
    attention, kernel = case.attention, case.kernel("combine")
    partials = 0 if case.rules.sparse.splits_selection else padded_heads(case)  # such a kernel carries the sum itself
    elements = 2 * (partials + attention.query_heads) * attention.head_dim
    moved = chunk.q_tokens * elements * ACCUMULATOR_BYTES
    return Op("combine", device, kernel=kernel, vram_bytes=moved, grain=chunk.q_tokens, after=after)


# Prefill over a history that is dequantised kv chunk by kv chunk (`realkernels/kernels/prefill.py`): into one buffer
# of K and of V in 16 bits, read there by flash attention, whose result is combined with a running one in fp32. What
# it costs beside attention grows with the context, its scratch does not.


def dequantises_history(case: Case) -> bool:
    """Whether a chunk's attention dequantises the history: an engine that does, and a model that reads all of it."""
    if case.rules.own_kernels.kv_chunk_tokens == 0 or not case.backend:
        return False
    return isinstance(case.mixer, Attention) and case.indexer is None


def operand_bytes(case: Case) -> int:
    """Bytes of a dequantised element: what attention computes in."""
    return FULL_BYTES if case.operand_dtype == "fp32" else HALF_BYTES


def dequantised_token_bytes(case: Case) -> int:
    """K and V of one token in one layer, dequantised."""
    return case.attention.kv_elements * operand_bytes(case)


def attention_calls(case: Case, chunk: Step) -> int:
    """Calls of attention over the kv chunks of one sequence: one that ends among the new tokens takes two."""
    size = case.rules.own_kernels.kv_chunk_tokens
    return -(-int(chunk.end) // size) + (int(chunk.end) - 1) // size - int(chunk.kv_tokens) // size


def prefill_scratch_bytes(case: Case) -> int:
    """One kv chunk of K and V; a chunk's running sum and weights in fp32, and a kv chunk's result beside them."""
    attention = case.attention
    kv_chunk = case.rules.own_kernels.kv_chunk_tokens * dequantised_token_bytes(case)
    row = attention.query_heads * (attention.head_dim * (ACCUMULATOR_BYTES + operand_bytes(case)) + ACCUMULATOR_BYTES)
    return kv_chunk + case.chunk_tokens * row


def combined_bytes(case: Case, chunk: Step) -> int:
    """Of one sequence: results of all kv chunks read, sums between them written and read; the first is none yet."""
    size, attention = case.rules.own_kernels.kv_chunk_tokens, case.attention
    kv_tokens, q_tokens, end = int(chunk.kv_tokens), int(chunk.q_tokens), int(chunk.end)
    whole = kv_tokens // size + 1  # kv chunks that every query token sees a token of
    results = whole * q_tokens + sum(end - first for first in range(whole * size, end, size))
    elements = (results + q_tokens) * operand_bytes(case) + 2 * (results - q_tokens) * ACCUMULATOR_BYTES
    return elements * attention.query_heads * attention.head_dim


def dequantised_ops(case: Case, chunk: Step, device: int, *, first: int = 0) -> tuple[Op, ...]:
    """Dequantise, attend and combine over all kv chunks, their calls counted together; `first` is their index."""
    attention, size = case.attention, case.rules.own_kernels.kv_chunk_tokens
    calls, attends = -(-int(chunk.end) // size) * chunk.batch, attention_calls(case, chunk) * chunk.batch
    tokens, token_bytes = chunk.end * chunk.batch, dequantised_token_bytes(case)
    kv_tokens = min(chunk.end, size)
    shape = {"query_heads": attention.query_heads, "head_dim": attention.head_dim}
    dequantise = Op(
        "dequantise",
        device,
        kernel=case.attention_kernel("dequantise"),
        calls=calls,
        vram_bytes=tokens * (case.plane_bytes + token_bytes) / calls,
        grain=kv_tokens,
        after=(first - 1,) if first else (),
    )
    attend = Op(
        "attention",
        device,
        kernel=case.rules.kernel("attend_dense", case.operand_dtype),
        calls=attends,
        flops=_causal_flops(case, chunk) / attends,
        vram_bytes=tokens * token_bytes / attends,
        dtype=case.operand_dtype,
        grain=chunk.q_tokens,
        flash_grid=flash_grid(**shape, q_tokens=int(chunk.q_tokens), kv_tokens=int(kv_tokens)),
        after=(first,),
    )
    moved = combined_bytes(case, chunk) * chunk.batch / attends
    return dequantise, attend, Op("combine", device, calls=attends, vram_bytes=moved, after=(first + 1,))
