"""One tile of KVarN's cache for the decode kernel: quantised, or in fp16 in the sidecar; queries as columns.

K words run along tokens and V words along channels, four or eight codes each, so that products come in interleaved
parts: of scores every fourth token, of outputs every fourth or eighth channel.
"""

import triton
import triton.language as tl

from realkernels.attend.columns import largest_scores, softmax_set
from realkernels.attend.nibbles import tiny_code, tiny_unit
from realkernels.attend.tiles import exp2, log2
from realkernels.settled import settle

LEAST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
SCAN: tl.constexpr = tl.constexpr(1024)
"""Tiles whose place is looked up at once."""
PIECE: tl.constexpr = tl.constexpr(32)
"""Tokens of a tile in fp16 that are read at once."""


@triton.jit
def neighbours(pairs):
    """FP32 [2 N] of fp16 numbers in pairs, int32 [N]: loads below 4 bytes are not asynchronous."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high).reshape(2 * pairs.shape[0]).to(tl.float32)


@triton.jit
def _interleave(parts):
    """[N x 4 or 8, 8] of as many [N, 8]: row 4n + i or 8n + i is row n of number i."""
    if len(parts) == 4:
        whole = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))  # [N, 8, 2, 2]
        rows = whole.permute(0, 2, 3, 1).reshape(4 * parts[0].shape[0], 8)
    else:
        a, b = tl.join(parts[0], parts[4]), tl.join(parts[1], parts[5])
        c, d = tl.join(parts[2], parts[6]), tl.join(parts[3], parts[7])
        whole = tl.join(tl.join(a, c), tl.join(b, d))  # [N, 8, 2, 2, 2]
        rows = whole.permute(0, 2, 3, 4, 1).reshape(8 * parts[0].shape[0], 8)
    return rows


@triton.jit
def _products(w, columns, SETS: tl.constexpr, PER_WORD: tl.constexpr, ASM: tl.constexpr):
    """All codes of words w [N, K], in their order, times the [K, 8] of each set: [N x PER_WORD, 8] a set."""
    parts = ()
    for number in tl.static_range(PER_WORD):
        codes = tiny_code(w, number, PER_WORD, ASM)
        row = ()
        for i in tl.static_range(SETS):
            row += (tl.dot(codes, columns[i]) * tiny_unit(number, PER_WORD),)
        parts += (row,)
    results = ()
    for i in tl.static_range(SETS):
        mine = ()
        for number in tl.static_range(PER_WORD):
            mine += (parts[number][i],)
        results += (_interleave(mine),)
    return results


@triton.jit
def tile_step(
    kw, k_scale, k_zero, k_token, vw, v_channel, v_scale, v_zero, here, token, constants, runnings, factor,
    SETS: tl.constexpr, PER_WORD: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One quantised tile: words kw [TILE / 4, DIM], vw [DIM / PER_WORD, TILE]; channels [DIM], pairs [TILE / 2].

    constants: a set's q [DIM, 8] and first unseen token [8]; runnings: its maximum [8], mass [TILE / 8, 8], output
    [DIM, 8]. Nothing happens unless `here` (a scalar). Returns runnings, new.
    """
    TILE: tl.constexpr = vw.shape[1]
    k_zero = k_zero.to(tl.float32)[:, None]
    k_token = tl.where(here, neighbours(k_token) * factor, 0.0)[:, None]
    v_scale = tl.where(here, neighbours(v_scale), 1.0)
    v_log = log2(tl.where(v_scale < LEAST_HALF, LEAST_HALF, v_scale), ASM)  # a row of zeros has the scale 0
    v_inverse = exp2(-v_log, ASM)[:, None]
    v_log = tl.where(here, v_log, float("-inf"))[:, None]
    v_zero = neighbours(v_zero)[:, None]
    v_channel = v_channel.to(tl.float32)[:, None]
    queries = ()
    for i in tl.static_range(SETS):
        queries += (constants[i][0] * k_scale[:, None],)
    scores = _products(kw, queries, SETS, 4, ASM)
    logits = ()
    for i in tl.static_range(SETS):
        q, seen = constants[i]
        s = (scores[i] + tl.sum(q.to(tl.float32) * k_zero, axis=0)[None, :]) * k_token + v_log
        if MASKED:
            s = tl.where(token[:, None] < seen[None, :], s, float("-inf"))
        logits += (s,)
    tops = largest_scores(logits, 0)
    weights = ()
    shares = ()
    decays = ()
    sums = ()
    for i in tl.static_range(SETS):
        top, mass, _ = runnings[i]
        p, decay, top = softmax_set(logits[i], top, tops[i], 0, ASM)
        visible = None
        if MASKED:
            visible = token[:, None] < constants[i][1][None, :]
        weight = p * v_inverse
        if MASKED:
            weight = tl.where(visible, weight, 0.0)  # the scale of a token that nobody sees may be NaN
        share = weight * v_zero
        if MASKED:
            share = tl.where(visible, share, 0.0)
        weights += (p.to(tl.float16),)
        shares += (tl.sum(share, axis=0)[None, :],)
        decays += (decay[None, :],)
        sums += ((top, mass * decay[None, :] + tl.sum(weight.reshape(TILE // 8, 8, 8), axis=1)),)
    values = _products(vw, weights, SETS, PER_WORD, ASM)
    after = ()
    for i in tl.static_range(SETS):
        o = runnings[i][2] * decays[i] + (values[i] + shares[i]) * v_channel
        after += ((sums[i][0], sums[i][1], o),)
    return after


@triton.jit
def side_tiles(
    side_of_tile, keys, values, table, last, length, constants, factor,
    SIDE_SLOT: tl.constexpr, SIDE_TOKEN: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, SETS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [8] and sum of values [DIM, 8] of each set over the fp16 tiles below `last`."""
    DIM: tl.constexpr = constants[0][0].shape[0]
    token_at = tl.arange(0, PIECE) * SIDE_TOKEN
    dims = tl.arange(0, DIM)
    runnings = ()
    for _ in tl.static_range(SETS):
        top = tl.full([8], float("-inf"), tl.float32)
        runnings += ((top, tl.zeros([8], tl.float32), tl.zeros([DIM, 8], tl.float32)),)
    for base in tl.range(0, last, SCAN, num_stages=1):
        number = base + tl.arange(0, SCAN)
        page = tl.load(table + number * TILE // PAGE, mask=number < last, other=0).to(tl.int64)
        index = page * (PAGE // TILE) + number * TILE % PAGE // TILE
        place = tl.load(side_of_tile + index, mask=number < last, other=-1)
        tile = tl.min(tl.where(place >= 0, number, last), axis=0)
        while tile < last:
            slot = tl.max(tl.where(number == tile, place, 0), axis=0).to(tl.int64) * SIDE_SLOT
            for piece in tl.range(0, tl.minimum(length - tile * TILE, TILE), PIECE, num_stages=1):
                token = tile * TILE + piece + tl.arange(0, PIECE)
                inside = token < length
                at = slot + piece * SIDE_TOKEN
                k = tl.load(keys + at + token_at[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
                v = tl.load(values + at + token_at[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
                after = ()
                for i in tl.static_range(SETS):
                    q, seen = constants[i]
                    top, mass, o = runnings[i]
                    s = tl.where(token[:, None] < seen[None, :], tl.dot(k, q) * factor, float("-inf"))
                    p, decay, top = softmax_set(s, top, tl.max(s, axis=0), 0, ASM)
                    o = tl.dot(v, p.to(tl.float16), o * decay[None, :])
                    after += ((top, mass * decay + tl.sum(p, axis=0), o),)
                runnings = after
            tile = tl.min(tl.where((place >= 0) & (number > tile), number, last), axis=0)
    return runnings


settle(globals())
