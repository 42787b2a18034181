"""New tokens of a KVarN cache, rotated, into the float16 side slots that `kvarn_places.py` has found for them."""

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
