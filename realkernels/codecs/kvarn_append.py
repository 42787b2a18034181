"""Appending to KVarN on a device: tokens go to side slots, full tiles are quantised; see `kvarn.py`.

An append is three launches for up to a tile's tokens, four for any number. `place_tokens` finds a side slot for each
token and the tiles that this completes: one thread block, nothing read back. Rows, rotated, then go there at once where
they are of one run of a tile's tokens; those of several wait in rows of their own until the tiles that they complete
are quantised, since side slots change hands meanwhile, and what the last tile of each place leaves there is then moved.
"""

from functools import partial

import torch

from realkernels.codecs import on_device as dev
from realkernels.codecs.codec import Planes
from realkernels.codecs.kvarn import SIZES, KVarN
from realkernels.jit import INTERPRETED, libdevice, stable_keys, tl, triton

QUANTISED = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)
ONES = tl.constexpr(0x0101010101010101)
"""Times a word of eight bytes of 0 or 1 it has their sum in its highest byte."""

ITERATIONS = tl.constexpr(8)
LARGEST_HALF = tl.constexpr(65504.0)
ASIDE = ("side_keys", "side_values")
PARTS = (
    "key_data", "key_scale", "key_zero", "key_token_scale",
    "value_data", "value_channel_scale", "value_scale", "value_zero",
)  # fmt: skip
"""Of a tile, as the kernels take them."""


# Which side slot each token gets


@triton.jit
def _place_run(
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
def _place_tokens(
    slots, side_of_tile, tile_of_side, present, words, sink, slot_of_token, done, last, source, count, side_count,
    done_count, TILE: tl.constexpr, SIDES: tl.constexpr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Grid (1): the bookkeeping of `kvarn.py`, run by run of a tile's tokens, with its outcome in every byte.

    The side slots of tiles that a run completes are free for the next run. What is left for the kernels after it:
    slot_of_token int32 [count] (-1: there is none, the token is dropped); done int32 [done_count, 2]: a tile to
    quantise (-1: no more) and the side slot that held it.

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
        closed += _place_run(
            first, closed, slots, side_of_tile, tile_of_side, present, words, sink, slot_of_token, done, last, source,
            count, side_count, TILE, SIDES, BLOCK, SEVERAL,
        )  # fmt: skip
    for at in range(closed, done_count, BLOCK):
        tl.store(done + 2 * (at + line), tl.full([BLOCK], -1, tl.int32), mask=at + line < done_count)


# Rows to their side slots


@triton.jit
def _side(side, slot, head, offset):
    """Pointers to a token's first number in a side slot; side is (view, strides of slot, head, token)."""
    return side[0] + slot * side[1] + head * side[2] + offset * side[3]


@triton.jit
def _slots_of(slots, slot_of_token, token, there, TILE: tl.constexpr):
    """Side slot (-1: none) and offset in its tile of each token."""
    slot = tl.load(slot_of_token + token, mask=there, other=-1)
    return slot, (tl.load(slots + token, mask=there, other=0) % TILE).to(tl.int32)


@triton.jit
def _at(rows, token, head, DIM: tl.constexpr):
    return rows[0] + token.to(tl.int64)[:, None] * rows[1] + head * rows[2] + tl.arange(0, DIM)[None, :]


@triton.jit
def _rotated(x, token, head, keep, DIM: tl.constexpr, BLOCK: tl.constexpr):
    return (dev.hadamard(dev.load_rows(x, token, head, keep, DIM), BLOCK, DIM) * dev.one_over_root(DIM)).to(tl.float16)


@triton.jit
def _write_side(x, side, slots, slot_of_token, token, count, TILE: tl.constexpr, DIM: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    head, there = tl.program_id(1), token < count
    slot, offset = _slots_of(slots, slot_of_token, token, there, TILE)
    keep = (there & (slot >= 0))[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
    y = _rotated(x, token, head, keep, DIM, BLOCK)
    at = _side(side, slot.to(tl.int64), head, offset)[:, None] + tl.arange(0, DIM)[None, :]
    tl.store(at, y, mask=keep)


@triton.jit(do_not_specialize=["count"])
def _write_aside(
    keys, values, slots, slot_of_token, side_keys, side_values, count, TILE: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V): rows, rotated, in float16 to their side slots."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(2) == 0:
        _write_side(keys, side_keys, slots, slot_of_token, token, count, TILE, DIM, BLOCK)
    else:
        _write_side(values, side_values, slots, slot_of_token, token, count, TILE, DIM, BLOCK)


@triton.jit(do_not_specialize=["count"])
def _rotate_rows(
    keys, values, rotated_keys, rotated_values, count, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid as that of `_write_aside`: rows, rotated, to float16 rows [count, heads, DIM] of the same order."""
    token, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    keep = (token < count)[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
    if tl.program_id(2) == 0:
        tl.store(_at(rotated_keys, token, head, DIM), _rotated(keys, token, head, keep, DIM, BLOCK), mask=keep)
    else:
        tl.store(_at(rotated_values, token, head, DIM), _rotated(values, token, head, keep, DIM, BLOCK), mask=keep)


@triton.jit(do_not_specialize=["count"])
def _move_aside(
    rotated_keys, rotated_values, slots, slot_of_token, last, side_keys, side_values, count, TILE: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid as that of `_write_aside`: rotated rows that were the last of this append in their place go there."""
    token, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    slot, offset = _slots_of(slots, slot_of_token, token, token < count, TILE)
    stays = slot >= 0
    stays = stays & (tl.load(last + slot * TILE + offset, mask=stays, other=-1) == token)
    if tl.max(stays.to(tl.int32), axis=0) != 0:
        keep = stays[:, None] & (tl.arange(0, DIM) >= 0)[None, :]
        if tl.program_id(2) == 0:
            rows = tl.load(_at(rotated_keys, token, head, DIM), mask=keep)
            to = _side(side_keys, slot.to(tl.int64), head, offset)
        else:
            rows = tl.load(_at(rotated_values, token, head, DIM), mask=keep)
            to = _side(side_values, slot.to(tl.int64), head, offset)
        tl.store(to[:, None] + tl.arange(0, DIM)[None, :], rows, mask=keep)


# Full tiles

# A thread block works on one tile of one head, of K as [channels, tokens] or of V as [tokens, channels]. It reads the
# tile's float16 numbers anew for each pass, from the cache: held in registers in float32, they and what a pass makes of
# them would not both fit.


@triton.jit
def _exp(x):
    if INTERPRETED:  # noqa: SIM108 - a branch of the compiler's
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def _log(x):
    if INTERPRETED:  # noqa: SIM108 - a branch of the compiler's
        y = tl.log(x)
    else:
        y = libdevice.log(x)
    return y


@triton.jit
def _std(x, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Of the population along an axis, which stays, between 1e-3 and 1e3."""
    apart = x - tl.sum(x, axis=AXIS, keep_dims=True) * (1.0 / SIZE)
    return dev.between(tl.sqrt_rn(tl.sum(apart * apart, axis=AXIS, keep_dims=True) * (1.0 / SIZE)), 1e-3, 1e3)


@triton.jit
def _spread(std):
    """Largest over least."""
    return tl.div_rn(tl.max(tl.max(std, axis=1), axis=0), tl.min(tl.min(std, axis=1), axis=0))


@triton.jit
def _read(at, lost):
    """float32 of the numbers behind pointers, 0 of lost tokens; volatile: from memory each time."""
    return tl.where(lost, 0.0, tl.load(at, volatile=True).to(tl.float32))


@triton.jit
def _column_logs(at, lost, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[1, COLUMNS]: logarithms of the columns' scales in the most even of the states that the iteration passes."""
    x = _read(at, lost)
    row, column = tl.zeros([ROWS, 1], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    best, std = column, _std(x, 0, ROWS)
    least = _spread(std) + _spread(_std(x, 1, COLUMNS))
    for _ in range(ITERATIONS):
        column = dev.between(column + _log(std), -0.3, 10.0)
        by_column = _exp(-column)
        std_rows = _std(_read(at, lost) * _exp(-row) * by_column, 1, COLUMNS)
        row = dev.between(row + _log(std_rows), -0.3, 10.0)
        scaled = _read(at, lost) * _exp(-row) * by_column
        std = _std(scaled, 0, ROWS)
        unevenness = _spread(std) + _spread(_std(scaled, 1, COLUMNS))
        best = tl.where(unevenness < least, column, best)
        least = tl.minimum(unevenness, least)
    return best


@triton.jit
def _quantise(at, lost, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes int32 [ROWS, COLUMNS]; scale and zero [ROWS], column scale [1, COLUMNS], float16."""
    column = _exp(_column_logs(at, lost, ROWS, COLUMNS)).to(tl.float16)
    y = tl.div_rn(_read(at, lost), column.to(tl.float32))
    low, high = tl.min(y, axis=1), tl.max(y, axis=1)
    scale = tl.div_rn(high - low, tl.full([ROWS], (1 << BITS) - 1.0, tl.float32))
    scale = tl.minimum(scale, LARGEST_HALF).to(tl.float16)
    zero = dev.between(low, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    codes = dev.affine_codes(y, scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None], BITS)
    return codes, scale, zero, column


@triton.jit
def _tokens(side, rotated, source, slot, head, token, FRESH: tl.constexpr):
    """Pointers to the tokens' first numbers: in the side slot or, where `source` says so, among the rotated rows."""
    at = _side(side, slot, head, token)
    if FRESH:
        new = tl.load(source + token)
        at = tl.where(new >= 0, rotated[0] + new.to(tl.int64) * rotated[1] + head * rotated[2], at)
    return tl.multiple_of(at, 16)  # bytes: a row of a head has at least 8 float16


@triton.jit
def _lost(at):
    """Where it is not finite, 1."""
    return (dev.magnitude_bits(tl.load(at).to(tl.float32)) >= dev.INFINITE_32).to(tl.int32)


@triton.jit
def _part(part, tile, head):
    """Pointer to one head's numbers of a tile."""
    return part[0] + tile * part[1] + head * part[2]


@triton.jit
def _key(tokens, tile, head, data, scales, zeros, token_scales, BITS: tl.constexpr, TILE: tl.constexpr,
         DIM: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    from_at = tokens[None, :] + channel[:, None]
    lost = tl.max(_lost(from_at), axis=0) != 0
    codes, scale, zero, column = _quantise(from_at, lost[None, :], BITS, DIM, TILE)
    tl.store(_part(scales, tile, head) + channel, scale)
    tl.store(_part(zeros, tile, head) + channel, zero)
    column = tl.where(lost[None, :], float("nan"), column)
    tl.store(_part(token_scales, tile, head) + token[None, :], column)
    at = _part(data, tile, head) + channel * (TILE * BITS // 8)
    dev.store_codes(at[:, None], codes, codes >= 0, DIM, TILE, BITS)


@triton.jit
def _value(tokens, tile, head, data, channel_scales, scales, zeros, BITS: tl.constexpr, TILE: tl.constexpr,
           DIM: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    from_at = tokens[:, None] + channel[None, :]
    lost = tl.max(_lost(from_at), axis=1) != 0
    codes, scale, zero, column = _quantise(from_at, lost[:, None], BITS, TILE, DIM)
    tl.store(_part(scales, tile, head) + token, tl.where(lost, float("nan"), scale))
    tl.store(_part(zeros, tile, head) + token, zero)
    tl.store(_part(channel_scales, tile, head) + channel[None, :], column)
    at = _part(data, tile, head) + token * (DIM * BITS // 8)
    dev.store_codes(at[:, None], codes, codes >= 0, TILE, DIM, BITS)


@triton.jit
def _quantise_tiles(
    done, source, side_keys, side_values, rotated_keys, rotated_values, key_data, key_scale, key_zero, key_token_scale,
    value_data, value_channel_scale, value_scale, value_zero, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Grid (rows of `done`, heads, 2 for K and V); see `_place_tokens` for `done` and `source`.

    Parts are (view, stride of a tile, of a head). Without FRESH all tokens lie in side slots and nothing else is read.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    tile, token = tl.load(done + 2 * number).to(tl.int64), tl.arange(0, TILE)
    if tile >= 0:
        slot = tl.load(done + 2 * number + 1).to(tl.int64)
        source += number * TILE
        if tl.program_id(2) == 0:
            tokens = _tokens(side_keys, rotated_keys, source, slot, head, token, FRESH)
            _key(tokens, tile, head, key_data, key_scale, key_zero, key_token_scale, KEY_BITS, TILE, DIM)
        else:
            tokens = _tokens(side_values, rotated_values, source, slot, head, token, FRESH)
            _value(tokens, tile, head, value_data, value_channel_scale, value_scale, value_zero, VALUE_BITS, TILE, DIM)


def append_tokens(codec: KVarN, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Rows [n, kv_heads, head_dim] into the slots `index` int64 [n], as `codec.append` unchecked."""
    side, views, count, dim = planes.sidecar, codec.views(planes), index.numel(), planes.head_dim
    key_bits, value_bits, tile = SIZES[codec.name]
    sides, several = side["tile_of_side"].numel(), count > tile
    most = min(count, sides + count // tile)  # tiles that an append completes: those begun before, and whole ones
    integers = partial(torch.empty, dtype=torch.int32, device=planes.device)
    slot_of_token, done = integers(count), integers(most, 2)
    last, source = (integers(sides, tile), integers(most, tile)) if several else (done, done)
    present = side["present"].view(torch.uint8)
    _place_tokens[(1,)](
        index, side["side_of_tile"], side["tile_of_side"], present, present.view(torch.int64),
        side["sink"].view(torch.uint8), slot_of_token, done, last, source, count, sides, most, TILE=tile,
        SIDES=triton.next_power_of_2(sides), BLOCK=min(tile, triton.next_power_of_2(count)), SEVERAL=several,
        num_warps=1 if count <= 8 else 8, num_stages=1,
    )  # fmt: skip
    block = dev.tokens_of_a_block(count, planes.device)
    options = {"DIM": dim, "BLOCK": block, "num_warps": dev.warps(block * dim, most=8), "enable_fp_fusion": False}
    grid = (-(-count // block), planes.kv_heads, 2)
    rows, pools = [dev.rows_and_steps(each) for each in (keys, values)], [dev.strided(views[name], 3) for name in ASIDE]
    if several:
        new = [dev.rows_and_steps(torch.empty(keys.shape, dtype=torch.float16, device=planes.device)) for _ in ASIDE]
        _rotate_rows[grid](*rows, *new, count, **options)
    else:
        new = [dev.rows_and_steps(side[name][0]) for name in ASIDE]
        _write_aside[grid](*rows, index, slot_of_token, *pools, count, TILE=tile, **options)
    parts = [(views[name], *views[name].stride()[:2]) for name in PARTS]
    _quantise_tiles[(most, planes.kv_heads, 2)](
        done, source, *pools, *new, *parts, KEY_BITS=key_bits, VALUE_BITS=value_bits, TILE=tile, DIM=dim, FRESH=several,
        num_warps=max(1, min(16, tile * dim // 2048)), enable_fp_fusion=False,
    )  # fmt: skip
    if several:
        _move_aside[grid](*new, index, slot_of_token, last, *pools, count, TILE=tile, **options)


stable_keys(globals())
