"""Prefill over a paged cache whose history is unpacked piece by piece: ops of a chunk, and the scratch that they take.

Each piece is unpacked into one buffer of K and of V in 16 bits, read there by dense attention, and folded into a
running result in fp32 (`realkernels/kernels/prefill.py`). What it costs beside attention grows with the context, its
scratch does not.
"""

from twin.case import Case
from twin.counts import HALF_BYTES
from twin.layouts.layout import Pass
from twin.models.spec import Attention
from twin.ops import Block, Engine, Op
from twin.products import ACCUMULATOR_BYTES, append
from twin.waves import Grid

FULL_BYTES = 4
"""Bytes of an fp32 element."""

FLASH_ROWS, FLASH_ROWS_WIDE, WIDE_HEAD = 128, 64, 128
"""Query rows of a program of FlashAttention-2, and those of one whose heads are wider than WIDE_HEAD elements."""

FLASH_TILE, FLASH_TILE_WIDE = 128, 64
"""Keys of a tile, likewise."""


def expands(case: Case) -> bool:
    """Whether a chunk's attention unpacks the history: an engine that does so, and a model that reads all of it."""
    return case.rules.prefill_piece_tokens > 0 and bool(case.backend) and case.model.indexer is None


def element_bytes(case: Case) -> int:
    """Of an unpacked number: what attention computes in."""
    return FULL_BYTES if case.operand_dtype == "fp32" else HALF_BYTES


def unpacked_bytes(case: Case) -> int:
    """K and V of one token in one layer, unpacked."""
    attention = case.model.attention
    return 2 * attention.kv_heads * attention.head_dim * element_bytes(case)


def pieces(case: Case, chunk: Pass) -> int:
    """Of one sequence: the chunk's own tokens included."""
    return -(-int(chunk.end) // case.rules.prefill_piece_tokens)


def attend_calls(case: Case, chunk: Pass) -> int:
    """Calls of attention over the pieces of one sequence: a piece that ends among the chunk's rows takes two."""
    piece = case.rules.prefill_piece_tokens
    return pieces(case, chunk) + (int(chunk.end) - 1) // piece - int(chunk.past) // piece


def scratch_bytes(case: Case) -> int:
    """One piece of K and of V; running sum and weights of a chunk in fp32, and a piece's result beside them."""
    attention = case.model.attention
    piece = case.rules.prefill_piece_tokens * unpacked_bytes(case)
    row = attention.query_heads * (attention.head_dim * (ACCUMULATOR_BYTES + element_bytes(case)) + ACCUMULATOR_BYTES)
    return piece + case.chunk_tokens * row


def expanded_ops(case: Case, chunk: Pass, device: int, *, first: int = 0) -> tuple[Op, ...]:
    """Unpacking, attention and folding of all pieces; `first` is the index in the block of the first of them.

    The pieces take turns on one engine: their calls are counted together. Rows of a chunk see whole pieces and their
    own up to themselves, so that only pairs of a token and what it sees are multiplied.
    """
    attention = case.model.attention
    calls, attends = pieces(case, chunk) * chunk.batch, attend_calls(case, chunk) * chunk.batch
    tokens, pairs = chunk.end * chunk.batch, chunk.rows * chunk.past + chunk.rows * (chunk.rows + 1) / 2
    unpacked = unpacked_bytes(case)
    unpack = Op(
        part="unpack",
        engine=Engine.SM,
        device=device,
        kernel=case.attention_kernel("expand"),
        calls=calls,
        vram_bytes=tokens * (case.plane_bytes + unpacked) / calls,
        grain=min(chunk.end, case.rules.prefill_piece_tokens),
        after=(first - 1,) if first else (),
    )
    attend = Op(
        part="attention",
        engine=Engine.SM,
        device=device,
        kernel=case.rules.kernel("attend_dense", case.operand_dtype),
        calls=attends,
        flops=4 * attention.query_heads * attention.head_dim * pairs * chunk.batch / attends,
        vram_bytes=tokens * unpacked / attends,
        dtype=case.operand_dtype,
        grain=chunk.rows,
        grid=flash_grid(attention, rows=int(chunk.rows), tokens=int(unpack.grain)),
        after=(first,),
    )
    fold = Op(
        part="merge",
        engine=Engine.SM,
        device=device,
        calls=attends,
        vram_bytes=fold_bytes(case, chunk) * chunk.batch / attends,
        after=(first + 1,),
    )
    return unpack, attend, fold


def flash_grid(attention: Attention, *, rows: int, tokens: int) -> Grid:
    """Programs of flash attention for a sequence's `rows` over `tokens` keys: some rows of one query head each."""
    wide = attention.head_dim > WIDE_HEAD
    blocks = -(-rows // (FLASH_ROWS_WIDE if wide else FLASH_ROWS))
    return Grid(
        programs=blocks * attention.query_heads,
        tiles=-(-tokens // (FLASH_TILE_WIDE if wide else FLASH_TILE)),
        partial_bytes=rows * attention.query_heads * (attention.head_dim + 1) * ACCUMULATOR_BYTES,
    )


def fold_bytes(case: Case, chunk: Pass) -> int:
    """Of one sequence: every piece's result of every row that sees it read, sums between them written and read.

    A row's first result is no sum yet, and its last sum is its output.
    """
    piece, attention = case.rules.prefill_piece_tokens, case.model.attention
    past, rows, end = int(chunk.past), int(chunk.rows), int(chunk.end)
    whole = past // piece + 1  # pieces that every row sees a token of
    results = whole * rows + sum(end - first for first in range(whole * piece, end, piece))
    elements = (results + rows) * element_bytes(case) + 2 * (results - rows) * ACCUMULATOR_BYTES
    return elements * attention.query_heads * attention.head_dim


def expanded_block(case: Case, chunk: Pass, device: int, *, times: int) -> Block:
    """The chunk's K and V appended, then attended to with everything before them."""
    return Block(ops=(append(case, chunk, device), *expanded_ops(case, chunk, device, first=1)), times=times)
