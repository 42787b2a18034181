"""Fused decode attention over KVarN's tiles: K in 4 bits by channel, V in 2 or 4 bits by token, some tiles in fp16.

K = (code key_scale[d] + key_zero[d]) key_token_scale[t]: a tile's query is the query times key_scale, sum(q key_zero)
is one number a row, and token scales multiply scores. V = (code value_scale[t] + value_zero[t]) channel[d]: p
value_scale = 2^(s + log2 value_scale - top) are the weights of the codes, sum(p value_zero) is one number a row, and
channel scales multiply a tile's sum. No element is multiplied. K words run along tokens, so that scores come in four
interleaved parts, V words along channels.

Tiles that lie in the sidecar in fp16 (the sink, open tiles) are skipped where quantised tiles are read. The first split
of each sequence takes them, wherever they are, and those of which some row sees a part only; the others have the rest.
"""

from collections.abc import Mapping

import torch

from realkernels.jit import stable_keys, tl, triton
from realkernels.kernels.arithmetic import exp2, largest, log2, neighbours, power_below, tiny_code, tiny_unit
from realkernels.kernels.decode_form import DecodeForm
from realkernels.kernels.query_sets import largest_scores, query_part, set_rows, softmax_set, store_set
from realkernels.kernels.split_kv import (
    LOG2E,
    PlanCase,
    TilePlan,
    Workspace,
    checked_call,
    combine_splits,
    read_page,
    tiles_of_split,
)

LEAST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
SCAN: tl.constexpr = tl.constexpr(1024)
"""Tiles whose place is looked up at once."""
STEP: tl.constexpr = tl.constexpr(32)
"""Tokens of a tile in fp16 that are read at once."""


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
def _tile_step(
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
def _side_tiles(
    side_of_tile, keys, values, table, last, length, constants, factor,
    SIDE_SLOT: tl.constexpr, SIDE_TOKEN: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, SETS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Maximum and sum [8] and sum of values [DIM, 8] of each set over the fp16 tiles below `last`."""
    DIM: tl.constexpr = constants[0][0].shape[0]
    token_at = tl.arange(0, STEP) * SIDE_TOKEN
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
            for part in tl.range(0, tl.minimum(length - tile * TILE, TILE), STEP, num_stages=1):
                token = tile * TILE + part + tl.arange(0, STEP)
                inside = token < length
                at = slot + part * SIDE_TOKEN
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


@triton.jit(do_not_specialize=["splits"])
def _attend_kvarn(
    query, key_data, key_scale, key_zero, key_token_scale, value_data, value_channel_scale, value_scale, value_zero,
    side_of_tile, side_keys, side_values, table, lengths, partial, statistics, softmax_scale,
    q_batch, q_token, q_head, table_batch, splits,
    TILE_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr, SIDE_SLOT: tl.constexpr, SIDE_HEAD: tl.constexpr,
    SIDE_TOKEN: tl.constexpr, PER_WORD: tl.constexpr, PAGE: tl.constexpr, Q_TOKENS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, SETS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // (HEADS // GROUP)
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    dims = tl.arange(0, DIM)
    length = tl.load(lengths + batch)
    whole = tl.maximum(length - Q_TOKENS + 1, 0) // TILE  # every row sees all of the tiles before it
    first, last = tiles_of_split(whole * TILE, tl.maximum(split - 1, 0), splits - 1, TILE)
    table += batch * table_batch
    page = tl.load(table + first * TILE // PAGE, mask=first < last, other=0).to(tl.int64)
    parts = ()
    big = 0.0
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, 8 * SETS, 8)
        part = query_part(query, dims, rows, batch, kv_head, q_batch, q_token, q_head, Q_TOKENS, GROUP, 0)
        big = tl.maximum(big, largest(part))
        parts += (part,)
    power = power_below(big)
    factor = power * softmax_scale
    constants = ()
    runnings = ()
    for i in tl.static_range(SETS):
        seen = length - Q_TOKENS + set_rows(block, i, 8 * SETS, 8) // GROUP + 1
        constants += (((parts[i] / power).to(tl.float16), seen),)
        top = tl.full([8], float("-inf"), tl.float32)
        runnings += ((top, tl.zeros([TILE // 8, 8], tl.float32), tl.zeros([DIM, 8], tl.float32)),)
    k_row: tl.constexpr = TILE // 4
    v_row: tl.constexpr = DIM // PER_WORD
    head = kv_head * (HEAD_BYTES // 2)
    lane = tl.arange(0, TILE)
    k_at = key_data + head + dims[None, :] * k_row + tl.arange(0, k_row)[:, None]
    v_at = value_data + head + lane[None, :] * v_row + tl.arange(0, v_row)[:, None]
    d_at = head + dims
    t_at = kv_head * (HEAD_BYTES // 4) + tl.arange(0, TILE // 2)
    tiles = (length + TILE - 1) // TILE
    for masked in tl.static_range(2):
        begin = whole if masked else first
        end = tl.where(split == 0, tiles, whole) if masked else tl.where(split > 0, last, first)
        for tile in tl.range(begin, end, num_stages=1 if masked else STAGES):
            following = page
            if masked:
                page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
            else:
                following = read_page(table, tl.minimum(tile + 1, last - 1) * TILE // PAGE, ASM)
            index = page * (PAGE // TILE) + tile * TILE % PAGE // TILE
            at, t = index * (TILE_BYTES // 2), index * (TILE_BYTES // 4) + t_at
            here = tl.load(side_of_tile + index) < 0
            kw, vw = tl.load(k_at + at), tl.load(v_at + at)
            ks, kz = tl.load(key_scale + d_at + at), tl.load(key_zero + d_at + at)
            kt, vs, vz = tl.load(key_token_scale + t), tl.load(value_scale + t), tl.load(value_zero + t)
            vc, token = tl.load(value_channel_scale + d_at + at), tile * TILE + lane
            page = following
            runnings = _tile_step(
                kw, ks, kz, kt, vw, vc, vs, vz, here, token, constants, runnings, factor, SETS, PER_WORD, masked, ASM
            )
    if split == 0:
        beside = _side_tiles(
            side_of_tile, side_keys + kv_head * SIDE_HEAD, side_values + kv_head * SIDE_HEAD, table, tiles, length,
            constants, factor, SIDE_SLOT, SIDE_TOKEN, TILE, PAGE, SETS, ASM,
        )  # fmt: skip
        for i in tl.static_range(SETS):
            top, mass, o = runnings[i]
            side_top, side_mass, side_o = beside[i]
            best = tl.maximum(top, side_top)
            zero = tl.where(best == float("-inf"), 0.0, best)
            decay, side_decay = exp2(top - zero, ASM), exp2(side_top - zero, ASM)
            o = o * decay[None, :] + side_o * side_decay[None, :]
            store_set(
                partial, statistics, o, best, tl.sum(mass, axis=0) * decay + side_mass * side_decay, batch, split,
                kv_head, set_rows(block, i, 8 * SETS, 8), dims, Q_TOKENS, HEADS, GROUP, splits, DIM, 0,
            )  # fmt: skip
    else:
        for i in tl.static_range(SETS):
            top, mass, o = runnings[i]
            store_set(
                partial, statistics, o, top, tl.sum(mass, axis=0), batch, split, kv_head,
                set_rows(block, i, 8 * SETS, 8), dims, Q_TOKENS, HEADS, GROUP, splits, DIM, 0,
            )  # fmt: skip


def attend_kvarn(
    query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, plan: TilePlan, page_tokens: int, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`DecodeForm.attend`; views key_data uint8 [tiles, kv_heads, head_dim, G / 2] and so on, as `kvarn.py` has them.

    key_scale, key_zero and value_channel_scale fp16 [tiles, kv_heads, head_dim], key_token_scale, value_scale and
    value_zero fp16 [tiles, kv_heads, G], value_data uint8 [tiles, kv_heads, G, head_dim / 4 or / 2], all with the same
    strides in bytes from tile to tile and head to head; side_of_tile int32 [tiles] (a side slot, or negative),
    side_keys and side_values fp16 [side slots, kv_heads, G, head_dim]. A page holds page_tokens / G tiles; a workspace
    at least two splits. Bytes of tiles that lie in the sidecar must hold finite channel scales and zeros.
    """
    keys, values = views["key_data"].view(torch.int16), views["value_data"].view(torch.int16)
    _tiles, kv_heads, head_dim, quarter = keys.shape
    tile = 4 * quarter
    if page_tokens % tile or values.shape[2] != tile:
        raise ValueError(f"pages of {page_tokens} tokens and values {tuple(values.shape)} are not of tiles of {tile}")
    side = views["side_keys"]
    call = checked_call(query, side, views["side_values"], page_table, lengths, out, workspace, width=query.shape[3])
    outer = 1 if kv_heads == 1 else 2  # A single head has no next one, and any stride.
    for name in ("key_scale", "key_zero", "key_token_scale", "value_channel_scale", "value_scale", "value_zero"):
        if views[name].stride()[:outer] != keys.stride()[:outer] or views[name].stride(2) != 1:
            raise ValueError(f"{name} has strides {views[name].stride()}, key_data {keys.stride()} in 16-bit words")
    strides = (values.stride()[:outer], side.stride())
    if strides != (keys.stride()[:outer], views["side_values"].stride()) or side.stride(3) != 1:
        raise ValueError("planes of keys and of values must have the same strides")
    if plan.rows != 8 or workspace.splits < 2:
        raise ValueError(f"sets of {plan.rows} rows, {workspace.splits} splits: KVarN takes sets of 8, and at least 2")
    if (call.kv_heads, call.head_dim, keys.stride(2), values.stride(2)) != (
        kv_heads, head_dim, quarter, values.shape[3],
    ):  # fmt: skip
        raise ValueError(f"keys {tuple(keys.shape)} {keys.stride()} do not belong to side_keys {tuple(side.shape)}")
    _attend_kvarn[(kv_heads * plan.blocks(call.q_rows), workspace.splits, call.batch)](
        query, keys, views["key_scale"], views["key_zero"], views["key_token_scale"].view(torch.int32), values,
        views["value_channel_scale"], views["value_scale"].view(torch.int32), views["value_zero"].view(torch.int32),
        views["side_of_tile"], side,
        views["side_values"], page_table, lengths, workspace.partial, workspace.statistics, softmax_scale * LOG2E,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        TILE_BYTES=2 * keys.stride(0), HEAD_BYTES=2 * keys.stride(1), SIDE_SLOT=side.stride(0),
        SIDE_HEAD=side.stride(1), SIDE_TOKEN=side.stride(2), PER_WORD=head_dim // values.shape[3], PAGE=page_tokens,
        Q_TOKENS=call.q_tokens, HEADS=call.query_heads, GROUP=call.group, DIM=head_dim, SETS=plan.sets, TILE=tile,
        ASM=query.device.type == "cuda", STAGES=plan.stages, num_warps=plan.num_warps,
    )  # fmt: skip
    return combine_splits(workspace, out)


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200, and one that fits where shared memory is 100 KiB; tiles are the codec's.

    More than 8 query rows are several blocks that read and dequantise a tile each: registers hold no second set.
    """
    deep = case.large and case.q_rows <= 8
    return TilePlan(
        tile=case.tile_tokens, rows=8, num_warps=2, stages=3 if deep else 2,
        per_multiprocessor=3 if deep else 4 if case.large else 2,
    )  # fmt: skip


DECODE = DecodeForm(loop=attend_kvarn, plan=_plan, other_splits=1, paged=True)

stable_keys(globals())
