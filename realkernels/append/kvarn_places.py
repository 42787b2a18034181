"""Which side slot each new token of a KVarN cache gets, and which tiles it completes: one program, nothing read back.

The bookkeeping of `realkernels/formats/kvarn_sidecar.py` for up to a tile's tokens at once. What it leaves for the
kernels after it: a side slot a token (-1: there is none, the token is dropped), and the tiles to quantise with the side
slots that still hold them; their slots are marked free already.
"""

import triton
import triton.language as tl

QUANTISED = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)


@triton.jit(do_not_specialize=["count", "side_count", "done_count"])
def place_tokens(
    slots, side_of_tile, tile_of_side, present, sink, slot_of_token, done, count, side_count, done_count,
    TILE: tl.constexpr, SIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1). slot_of_token int32 [count]; done int32 [done_count, 2]: tile (-1: no more) and its side slot.

    BLOCK and SIDES: powers of two, at least the tokens and the side slots. present and sink are bytes.
    """
    token = tl.arange(0, BLOCK)
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
        leader = tl.min(tl.where(followers, token[None, :], BLOCK), axis=1)  # the first token of the same tile
        leads = there & (leader == token)
        opens = leads & (held == EMPTY)
        number = tl.sum((opens[None, :] & (token[None, :] < leader[:, None])).to(tl.int32), axis=1)
    rank = tl.cumsum(free.to(tl.int32), 0)
    found = free[None, :] & (rank[None, :] == number[:, None] + 1)  # the number-th free slot
    given = tl.sum(tl.where(found, sides[None, :] + 1, 0), axis=1) - 1
    side = tl.where(held == EMPTY, given, held)
    side = tl.where(there & (side >= 0), side, -1)
    placed = side >= 0
    row = tl.where(placed, side, 0)
    line = tl.arange(0, TILE)
    kept = tl.load(present + row[:, None] * TILE + line[None, :], mask=(leads & placed)[:, None], other=0)
    before = tl.sum(kept.to(tl.int32), axis=1)
    again = tl.load(present + row * TILE + offset, mask=placed, other=0).to(tl.int32)
    new = placed.to(tl.int32) - again
    total = before + tl.sum(tl.where(followers, new[None, :], 0), axis=1)  # of leaders
    full = leads & placed & (total == TILE) & (pinned == 0)
    gone = tl.sum((followers & full[None, :]).to(tl.int32), axis=1) != 0
    tl.debug_barrier()  # nobody writes before everybody has read
    tl.store(slot_of_token + token, side, mask=there)
    tl.store(side_of_tile + tile, tl.where(full, QUANTISED, side), mask=leads & placed)
    tl.store(tile_of_side + row, tl.where(full, -1, tile), mask=leads & placed)
    one = tl.full([BLOCK], 1, tl.uint8)
    tl.store(present + row * TILE + offset, one, mask=placed & ~gone)
    nothing = tl.zeros([BLOCK, TILE], tl.uint8)
    tl.store(present + row[:, None] * TILE + line[None, :], nothing, mask=full[:, None] & (line >= 0)[None, :])
    at = tl.cumsum(full.to(tl.int32), 0) - 1
    tl.store(done + 2 * at, tile, mask=full)
    tl.store(done + 2 * at + 1, side, mask=full)
    rest = tl.sum(full.to(tl.int32), axis=0)
    lines = tl.arange(0, BLOCK)
    tl.store(done + 2 * lines, tl.full([BLOCK], -1, tl.int32), mask=(lines >= rest) & (lines < done_count))
