"""Full tiles of a KVarN cache from side slots into their records: `realkernels/formats/kvarn_tile.py` in a kernel.

A program holds one tile of one head, of K as [channels, tokens] or of V as [tokens, channels], in registers.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from realkernels.append.numbers import INFINITE_32, affine_codes, between, magnitude_bits
from realkernels.append.packing import store_codes
from realkernels.append.places import place
from realkernels.settled import settle

ITERATIONS = tl.constexpr(8)
LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def _exp(x, DEVICE: tl.constexpr):
    if DEVICE:  # noqa: SIM108 - a branch of the compiler's
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def _log(x, DEVICE: tl.constexpr):
    if DEVICE:  # noqa: SIM108 - a branch of the compiler's
        y = libdevice.log(x)
    else:
        y = tl.log(x)
    return y


@triton.jit
def _std(x, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Of the population along an axis, which stays, between 1e-3 and 1e3."""
    apart = x - tl.sum(x, axis=AXIS, keep_dims=True) * (1.0 / SIZE)
    return between(tl.sqrt_rn(tl.sum(apart * apart, axis=AXIS, keep_dims=True) * (1.0 / SIZE)), 1e-3, 1e3)


@triton.jit
def _spread(std):
    """Largest over least."""
    return tl.div_rn(tl.max(tl.max(std, axis=1), axis=0), tl.min(tl.min(std, axis=1), axis=0))


@triton.jit
def _column_logs(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEVICE: tl.constexpr):
    """[1, COLUMNS]: logarithms of the columns' scales in the most even of the states that the iteration passes."""
    row, column = tl.zeros([ROWS, 1], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    best, std = column, _std(x, 0, ROWS)
    least = _spread(std) + _spread(_std(x, 1, COLUMNS))
    for _ in range(ITERATIONS):
        column = between(column + _log(std, DEVICE), -0.3, 10.0)
        by_column = _exp(-column, DEVICE)
        std_rows = _std(x * _exp(-row, DEVICE) * by_column, 1, COLUMNS)
        row = between(row + _log(std_rows, DEVICE), -0.3, 10.0)
        scaled = x * _exp(-row, DEVICE) * by_column
        std = _std(scaled, 0, ROWS)
        unevenness = _spread(std) + _spread(_std(scaled, 1, COLUMNS))
        best = tl.where(unevenness < least, column, best)
        least = tl.minimum(unevenness, least)
    return best


@triton.jit
def _quantise(x, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEVICE: tl.constexpr):
    """Codes int32 [ROWS, COLUMNS]; scale and zero [ROWS], column scale [1, COLUMNS], float16."""
    column = _exp(_column_logs(x, ROWS, COLUMNS, DEVICE), DEVICE).to(tl.float16)
    y = tl.div_rn(x, column.to(tl.float32))
    low, high = tl.min(y, axis=1), tl.max(y, axis=1)
    scale = tl.div_rn(high - low, tl.full([ROWS], (1 << BITS) - 1.0, tl.float32))
    scale = tl.minimum(scale, LARGEST_HALF).to(tl.float16)
    zero = between(low, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    codes = affine_codes(y, scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None], BITS)
    return codes, scale, zero, column


@triton.jit
def _tile(side, slot, head, rows, columns, row_step, column_step):
    """float32 [rows, columns] of a side slot: the tile as it lies there."""
    at = place(side, slot, head, 0) + rows[:, None] * row_step + columns[None, :] * column_step
    return tl.load(at).to(tl.float32)


@triton.jit
def _lost(x):
    """Where it is not finite, 1."""
    return (magnitude_bits(x) >= INFINITE_32).to(tl.int32)


@triton.jit
def _part(part, tile, head):
    """Pointer to one head's numbers of a tile."""
    return part[0] + tile * part[1] + head * part[2]


@triton.jit
def _key(side, slot, tile, head, data, scales, zeros, token_scales, BITS: tl.constexpr, TILE: tl.constexpr,
         DIM: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    x = _tile(side, slot, head, channel, token, 1, side[3])
    lost = tl.max(_lost(x), axis=0) != 0
    codes, scale, zero, column = _quantise(tl.where(lost[None, :], 0.0, x), BITS, DIM, TILE, DEVICE)
    tl.store(_part(scales, tile, head) + channel, scale)
    tl.store(_part(zeros, tile, head) + channel, zero)
    column = tl.where(lost[None, :], float("nan"), column)
    tl.store(_part(token_scales, tile, head) + token[None, :], column)
    at = _part(data, tile, head) + channel * (TILE * BITS // 8)
    store_codes(at[:, None], codes, codes >= 0, DIM, TILE, BITS)


@triton.jit
def _value(side, slot, tile, head, data, channel_scales, scales, zeros, BITS: tl.constexpr, TILE: tl.constexpr,
           DIM: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    x = _tile(side, slot, head, token, channel, side[3], 1)
    lost = tl.max(_lost(x), axis=1) != 0
    codes, scale, zero, column = _quantise(tl.where(lost[:, None], 0.0, x), BITS, TILE, DIM, DEVICE)
    tl.store(_part(scales, tile, head) + token, tl.where(lost, float("nan"), scale))
    tl.store(_part(zeros, tile, head) + token, zero)
    tl.store(_part(channel_scales, tile, head) + channel[None, :], column)
    at = _part(data, tile, head) + token * (DIM * BITS // 8)
    store_codes(at[:, None], codes, codes >= 0, TILE, DIM, BITS)


@triton.jit
def quantise_tiles(
    done, side_keys, side_values, key_data, key_scale, key_zero, key_token_scale, value_data, value_channel_scale,
    value_scale, value_zero, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    DEVICE: tl.constexpr,
):  # fmt: skip
    """Grid (rows of `done`, heads, 2 for K and V); see `kvarn_places.py` for `done`. Parts are (view, tile, head)."""
    tile, head = tl.load(done + 2 * tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if tile >= 0:
        slot = tl.load(done + 2 * tl.program_id(0) + 1).to(tl.int64)
        if tl.program_id(2) == 0:
            _key(side_keys, slot, tile, head, key_data, key_scale, key_zero, key_token_scale, KEY_BITS, TILE, DIM,
                 DEVICE)  # fmt: skip
        else:
            _value(side_values, slot, tile, head, value_data, value_channel_scale, value_scale, value_zero, VALUE_BITS,
                   TILE, DIM, DEVICE)  # fmt: skip


settle(globals())
