"""Full tiles of a KVarN cache from side slots into their records: `realkernels/formats/kvarn_tile.py` in a kernel.

A program works on one tile of one head, of K as [channels, tokens] or of V as [tokens, channels]. It reads the tile's
float16 numbers anew for each pass, from the cache: held in registers in float32, they and what a pass makes of them
would not both fit.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from realkernels.append.numbers import INFINITE_32, affine_codes, between, magnitude_bits
from realkernels.append.packing import store_codes
from realkernels.append.places import place
from realkernels.kernels.stable_keys import stable_keys

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
def _read(at, lost):
    """float32 of the numbers behind pointers, 0 of lost tokens; volatile: from memory each time."""
    return tl.where(lost, 0.0, tl.load(at, volatile=True).to(tl.float32))


@triton.jit
def _column_logs(at, lost, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEVICE: tl.constexpr):
    """[1, COLUMNS]: logarithms of the columns' scales in the most even of the states that the iteration passes."""
    x = _read(at, lost)
    row, column = tl.zeros([ROWS, 1], tl.float32), tl.zeros([1, COLUMNS], tl.float32)
    best, std = column, _std(x, 0, ROWS)
    least = _spread(std) + _spread(_std(x, 1, COLUMNS))
    for _ in range(ITERATIONS):
        column = between(column + _log(std, DEVICE), -0.3, 10.0)
        by_column = _exp(-column, DEVICE)
        std_rows = _std(_read(at, lost) * _exp(-row, DEVICE) * by_column, 1, COLUMNS)
        row = between(row + _log(std_rows, DEVICE), -0.3, 10.0)
        scaled = _read(at, lost) * _exp(-row, DEVICE) * by_column
        std = _std(scaled, 0, ROWS)
        unevenness = _spread(std) + _spread(_std(scaled, 1, COLUMNS))
        best = tl.where(unevenness < least, column, best)
        least = tl.minimum(unevenness, least)
    return best


@triton.jit
def _quantise(at, lost, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEVICE: tl.constexpr):
    """Codes int32 [ROWS, COLUMNS]; scale and zero [ROWS], column scale [1, COLUMNS], float16."""
    column = _exp(_column_logs(at, lost, ROWS, COLUMNS, DEVICE), DEVICE).to(tl.float16)
    y = tl.div_rn(_read(at, lost), column.to(tl.float32))
    low, high = tl.min(y, axis=1), tl.max(y, axis=1)
    scale = tl.div_rn(high - low, tl.full([ROWS], (1 << BITS) - 1.0, tl.float32))
    scale = tl.minimum(scale, LARGEST_HALF).to(tl.float16)
    zero = between(low, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    codes = affine_codes(y, scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None], BITS)
    return codes, scale, zero, column


@triton.jit
def _tokens(side, rotated, source, slot, head, token, FRESH: tl.constexpr):
    """Pointers to the tokens' first numbers: in the side slot or, where `source` says so, among the rotated rows."""
    at = place(side, slot, head, token)
    if FRESH:
        new = tl.load(source + token)
        at = tl.where(new >= 0, rotated[0] + new.to(tl.int64) * rotated[1] + head * rotated[2], at)
    return tl.multiple_of(at, 16)  # bytes: a row of a head has at least 8 float16


@triton.jit
def _lost(at):
    """Where it is not finite, 1."""
    return (magnitude_bits(tl.load(at).to(tl.float32)) >= INFINITE_32).to(tl.int32)


@triton.jit
def _part(part, tile, head):
    """Pointer to one head's numbers of a tile."""
    return part[0] + tile * part[1] + head * part[2]


@triton.jit
def _key(tokens, tile, head, data, scales, zeros, token_scales, BITS: tl.constexpr, TILE: tl.constexpr,
         DIM: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    from_at = tokens[None, :] + channel[:, None]
    lost = tl.max(_lost(from_at), axis=0) != 0
    codes, scale, zero, column = _quantise(from_at, lost[None, :], BITS, DIM, TILE, DEVICE)
    tl.store(_part(scales, tile, head) + channel, scale)
    tl.store(_part(zeros, tile, head) + channel, zero)
    column = tl.where(lost[None, :], float("nan"), column)
    tl.store(_part(token_scales, tile, head) + token[None, :], column)
    at = _part(data, tile, head) + channel * (TILE * BITS // 8)
    store_codes(at[:, None], codes, codes >= 0, DIM, TILE, BITS)


@triton.jit
def _value(tokens, tile, head, data, channel_scales, scales, zeros, BITS: tl.constexpr, TILE: tl.constexpr,
           DIM: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    token, channel = tl.arange(0, TILE), tl.arange(0, DIM)
    from_at = tokens[:, None] + channel[None, :]
    lost = tl.max(_lost(from_at), axis=1) != 0
    codes, scale, zero, column = _quantise(from_at, lost[:, None], BITS, TILE, DIM, DEVICE)
    tl.store(_part(scales, tile, head) + token, tl.where(lost, float("nan"), scale))
    tl.store(_part(zeros, tile, head) + token, zero)
    tl.store(_part(channel_scales, tile, head) + channel[None, :], column)
    at = _part(data, tile, head) + token * (DIM * BITS // 8)
    store_codes(at[:, None], codes, codes >= 0, TILE, DIM, BITS)


@triton.jit
def quantise_tiles(
    done, source, side_keys, side_values, rotated_keys, rotated_values, key_data, key_scale, key_zero, key_token_scale,
    value_data, value_channel_scale, value_scale, value_zero, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, FRESH: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    """Grid (rows of `done`, heads, 2 for K and V); see `kvarn_places.py` for `done` and `source`.

    Parts are (view, stride of a tile, of a head). Without FRESH all tokens lie in side slots and nothing else is read.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    tile, token = tl.load(done + 2 * number).to(tl.int64), tl.arange(0, TILE)
    if tile >= 0:
        slot = tl.load(done + 2 * number + 1).to(tl.int64)
        source += number * TILE
        if tl.program_id(2) == 0:
            tokens = _tokens(side_keys, rotated_keys, source, slot, head, token, FRESH)
            _key(tokens, tile, head, key_data, key_scale, key_zero, key_token_scale, KEY_BITS, TILE, DIM, DEVICE)
        else:
            tokens = _tokens(side_values, rotated_values, source, slot, head, token, FRESH)
            _value(tokens, tile, head, value_data, value_channel_scale, value_scale, value_zero, VALUE_BITS, TILE, DIM,
                   DEVICE)  # fmt: skip


stable_keys(globals())
