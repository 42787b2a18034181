"""New tokens of a KVarN cache, rotated, into the float16 side slots that `kvarn_places.py` has found for them.

Those of one run go there at once. Those of several wait in rows of their own until the tiles that they complete are
quantised, since side slots change hands meanwhile; what the last tile of each place leaves there is then moved.
"""

import triton
import triton.language as tl

from realkernels.append.folds import hadamard
from realkernels.append.places import load_rows, place


@triton.jit
def _write(x, side, slots, slot_of_token, token, root, count, TILE: tl.constexpr, DIM: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    there = token < count
    slot = tl.load(slot_of_token + token, mask=there, other=-1)
    offset = (tl.load(slots + token, mask=there, other=0) % TILE).to(tl.int32)
    keep = (there & (slot >= 0))[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
    x = hadamard(load_rows(x, token, head, keep, DIM), BLOCK, DIM) * root
    at = place(side, slot.to(tl.int64), head, offset)[:, None] + tl.arange(0, DIM)[None, :]
    tl.store(at, x.to(tl.float16), mask=keep)


@triton.jit(do_not_specialize=["count"])
def write_aside(
    keys, values, slots, slot_of_token, side_keys, side_values, root, count, TILE: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V): rows, rotated, in float16 to their side slots."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(2) == 0:
        _write(keys, side_keys, slots, slot_of_token, token, root, count, TILE, DIM, BLOCK)
    else:
        _write(values, side_values, slots, slot_of_token, token, root, count, TILE, DIM, BLOCK)


@triton.jit
def _at(rows, token, head, DIM: tl.constexpr):
    return rows[0] + token.to(tl.int64)[:, None] * rows[1] + head * rows[2] + tl.arange(0, DIM)[None, :]


@triton.jit
def _rotate(x, rotated, token, root, count, DIM: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(1)
    keep = (token < count)[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
    y = hadamard(load_rows(x, token, head, keep, DIM), BLOCK, DIM) * root
    tl.store(_at(rotated, token, head, DIM), y.to(tl.float16), mask=keep)


@triton.jit(do_not_specialize=["count"])
def rotate_rows(
    keys, values, rotated_keys, rotated_values, root, count, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid as that of `write_aside`: rows, rotated, to float16 rows [count, heads, DIM] of the same order."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(2) == 0:
        _rotate(keys, rotated_keys, token, root, count, DIM, BLOCK)
    else:
        _rotate(values, rotated_values, token, root, count, DIM, BLOCK)


@triton.jit(do_not_specialize=["count"])
def move_aside(
    rotated_keys, rotated_values, slots, slot_of_token, last, side_keys, side_values, count, TILE: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid as that of `write_aside`: rotated rows that were the last of this append in their place go there."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    there = token < count
    slot = tl.load(slot_of_token + token, mask=there, other=-1)
    offset = (tl.load(slots + token, mask=there, other=0) % TILE).to(tl.int32)
    stays = slot >= 0
    stays = stays & (tl.load(last + slot * TILE + offset, mask=stays, other=-1) == token)
    if tl.max(stays.to(tl.int32), axis=0) != 0:
        keep = stays[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
        if tl.program_id(2) == 0:
            rows = tl.load(_at(rotated_keys, token, head, DIM), mask=keep)
            to = place(side_keys, slot.to(tl.int64), head, offset)
        else:
            rows = tl.load(_at(rotated_values, token, head, DIM), mask=keep)
            to = place(side_values, slot.to(tl.int64), head, offset)
        tl.store(to[:, None] + tl.arange(0, DIM)[None, :], rows, mask=keep)
