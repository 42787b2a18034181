"""Which side slot each new token of a KVarN cache gets, and which tiles it completes: one program, nothing read back.

The bookkeeping of `realkernels/formats/kvarn_sidecar.py`, run by run of a tile's tokens, with its outcome in every
byte: the side slots of tiles that a run completes are free for the next run. What it leaves for the kernels after it:
a side slot a token (-1: there is none, the token is dropped), and the tiles to quantise with the side slots that held
them. Several tiles of an append may have had the same side slot one after the other: the tokens of such an append do
not go there, they are found by `last` and `source`.
"""

import triton
import triton.language as tl

QUANTISED = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)
ONES = tl.constexpr(0x0101010101010101)
"""Times a word of eight bytes of 0 or 1 it has their sum in its highest byte."""


@triton.jit
def _run(
    first, closed, slots, side_of_tile, tile_of_side, present, words, sink, slot_of_token, done, last, source, count,
    side_count, TILE: tl.constexpr, SIDES: tl.constexpr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Places the tokens from `first` on; gives how many tiles they complete, rows of `done` from `closed` on."""
    line = tl.arange(0, BLOCK)
    token = first + line
    there = token < count
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int32)
    tile, offset = slot // TILE, slot % TILE
    held = tl.load(side_of_tile + tile, mask=there, other=QUANTISED)
    pinned = tl.load(sink + tile, mask=there, other=0)
    sides = tl.arange(0, SIDES)
    free = tl.load(tile_of_side + sides, mask=sides < side_count, other=0) < 0
    if BLOCK == 1:
        leads, followers, number = there, there[:, None], tl.zeros([1], tl.int32)
    else:
        followers = (tile[:, None] == tile[None, :]) & there[:, None] & there[None, :]
        leader = tl.min(tl.where(followers, line[None, :], BLOCK), axis=1)  # the first token of the same tile
        leads = there & (leader == line)
        opens = leads & (held == EMPTY)
        number = tl.sum((opens[None, :] & (line[None, :] < leader[:, None])).to(tl.int32), axis=1)
    rank = tl.cumsum(free.to(tl.int32), 0)
    found = free[None, :] & (rank[None, :] == number[:, None] + 1)  # the number-th free slot
    given = tl.sum(tl.where(found, sides[None, :] + 1, 0), axis=1) - 1
    side = tl.where(held == EMPTY, given, held)
    side = tl.where(there & (side >= 0), side, -1)
    placed = side >= 0
    row = tl.where(placed, side, 0)
    word = row[:, None] * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    kept = tl.load(words + word, mask=(leads & placed)[:, None], other=0)
    before = tl.sum(((kept * ONES) >> 56).to(tl.int32), axis=1)
    again = tl.load(present + row * TILE + offset, mask=placed, other=0).to(tl.int32)
    new = placed.to(tl.int32) - again
    total = before + tl.sum(tl.where(followers, new[None, :], 0), axis=1)  # of leaders
    full = leads & placed & (total == TILE) & (pinned == 0)
    gone = tl.sum((followers & full[None, :]).to(tl.int32), axis=1) != 0
    at = closed + tl.cumsum(full.to(tl.int32), 0) - 1
    tl.debug_barrier()  # nobody writes before everybody has read
    tl.store(slot_of_token + token, side, mask=there)
    tl.store(side_of_tile + tile, tl.where(full, QUANTISED, side), mask=leads & placed)
    tl.store(tile_of_side + row, tl.where(full, -1, tile), mask=leads & placed)
    tl.store(present + row * TILE + offset, tl.full([BLOCK], 1, tl.uint8), mask=placed & ~gone)
    tl.store(words + word, tl.zeros([BLOCK, TILE // 8], tl.int64), mask=full[:, None] & (word >= 0))
    tl.store(done + 2 * at, tile, mask=full)
    tl.store(done + 2 * at + 1, side, mask=full)
    completed = tl.sum(full.to(tl.int32), axis=0)
    if SEVERAL:
        tl.store(last + row * TILE + offset, token, mask=placed)
        tl.debug_barrier()  # the next run reads all of it
        column = tl.arange(0, TILE)
        for number_done in range(closed, closed + completed):
            from_side = tl.load(done + 2 * number_done + 1)
            tl.store(source + number_done * TILE + column, tl.load(last + from_side * TILE + column))
    return completed


@triton.jit(do_not_specialize=["count", "side_count", "done_count"])
def place_tokens(
    slots, side_of_tile, tile_of_side, present, words, sink, slot_of_token, done, last, source, count, side_count,
    done_count, TILE: tl.constexpr, SIDES: tl.constexpr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Grid (1). slot_of_token int32 [count]; done int32 [done_count, 2]: tile (-1: no more) and its side slot.

    present and sink are bytes, words are those of present as int64. BLOCK and SIDES: powers of two, at least the tokens
    and the side slots; if there are SEVERAL runs, BLOCK is TILE. Then it also writes last int32 [side slots, TILE], the
    token of this append that had the place last (-1: none), and source int32 [done_count, TILE], for each token of a
    completed tile which one of this append it is (-1: it lies in the side slot).
    """
    line = tl.arange(0, BLOCK)
    if SEVERAL:
        for at in range(0, side_count * TILE, BLOCK):
            tl.store(last + at + line, tl.full([BLOCK], -1, tl.int32))
        tl.debug_barrier()
    closed = tl.zeros([], tl.int32)
    for first in range(0, count, BLOCK):
        closed += _run(
            first, closed, slots, side_of_tile, tile_of_side, present, words, sink, slot_of_token, done, last, source,
            count, side_count, TILE, SIDES, BLOCK, SEVERAL,
        )  # fmt: skip
    for at in range(closed, done_count, BLOCK):
        tl.store(done + 2 * (at + line), tl.full([BLOCK], -1, tl.int32), mask=at + line < done_count)
