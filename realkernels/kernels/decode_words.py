"""Decode attention over caches whose rows are 16-bit words of two or four codes: int4, groups of 32, TurboQuant.

What a codec does is in its `WordCodec`: how codes become numbers and where scales and zero points go. V scales per
token join the exponent: p v_scale = 2^(s + log2 v_scale - top) are the weights of the codes, the sum of p is taken
from p v_scale / v_scale, and what zero points add to all elements alike is summed apart.

The loop has two steps, for few and for many query rows: `word_steps.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from realkernels.jit import tl, triton
from realkernels.kernels.arithmetic import largest, power_below, tiny_unit
from realkernels.kernels.query_sets import by_rows, per_row, query_part, set_count, set_rows, set_width, store_set
from realkernels.kernels.split_kv import (
    LOG2E,
    TilePlan,
    Workspace,
    alignment,
    checked_call,
    combine_splits,
    element,
    load_rows,
    read_page,
    tiles_of_split,
)
from realkernels.kernels.word_steps import narrow_step, token_scales, wide_step

QUERY_TOP: tl.constexpr = tl.constexpr(512.0)
"""Queries are brought to fp16 with their largest magnitude in [512, 1024)."""
GROUP_ELEMENTS = 32


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Words of K or V, and the numbers in them."""

    number: Any
    """Compile-time function (words, scales, number, ASM) -> fp16: code `number` of words, as the products take it."""
    per_word: int = 4
    """4 or 2: codes of 4 or 8 bits."""
    unit: float = 1.0
    """What numbers are multiplied by after the products."""


@dataclass(frozen=True, kw_only=True)
class WordCodec:
    """What a codec of 16-bit words does in `attend_words`."""

    key: Codes
    value: Codes
    zero: Literal["", "min", "code", "value"] = ""
    """Scales are of groups of 32, alone or with minima and fifth bits; or per token with zero points in codes, or of V
    in its unit."""
    zeros: Any = None
    """Compile-time function (K's and V's scales, V's with a least one, V's plane of zeros) -> zeros of K and of V, of
    scales per token, all fp32 [TILE]."""
    planes: tuple[str, str, str] = ("key_scale", "value_scale", "value_scale")
    """Names of the views: scales of K, scales and zeros of V."""
    minima: tuple[str, ...] = ()
    """Of "min": minima of K and V, fifth bits of K and V, in int32 or four bytes bit j of a group's element j."""
    score_unit: Callable[[int], float] = lambda _head_dim: 1.0
    """By the head size: what scores are multiplied by beside."""
    ggml: bool = False
    """Word w of a group of 32 holds elements 2w, 2w + 16, 2w + 1, 2w + 17, not 4w to 4w + 3."""


@triton.constexpr_function
def query_unit(number, zero):
    """What a query part is multiplied by since `tiny_code` reads codes with different powers of two."""
    return 16.0 ** -(number % 2) if zero == "code" else 1.0


@triton.jit
def _query_codes(
    query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big,
    KW: tl.constexpr, GGML: tl.constexpr, Q_TOKENS: tl.constexpr, GROUP: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """A set's query in KW parts, the elements of each code of K's words; the larger of `big` and its magnitudes."""
    parts = ()
    for number in tl.static_range(KW):
        part = query_part(
            query, element(k_word, number, KW, GGML), rows, batch, kv_head, q_batch, q_token, q_head, Q_TOKENS, GROUP,
            AXIS,
        )  # fmt: skip
        big = tl.maximum(big, largest(part))
        parts += (part,)
    return parts, big


@triton.jit
def _nothing_seen(N: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr, AXIS: tl.constexpr):
    """State of a set of N rows."""
    if WIDE:
        none = tl.zeros([KEEP, 8, N], tl.float32)
        state = (tl.zeros([N], tl.float32), none, none)
    else:
        state = (tl.full([N], float("-inf"), tl.float32), by_rows(KEEP, N, AXIS), by_rows(KEEP, N, AXIS))
    return state


@triton.jit
def _load_scales(at, inside, GROUPED: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr):
    """Scales of tokens, or of their groups as `load_rows`."""
    if GROUPED:
        scales = load_rows(at, inside, MASKED, AXIS)
    else:
        scales = tl.load(at, mask=inside, other=0) if MASKED else tl.load(at)
    return scales


@triton.jit
def _loads(
    k_at, v_at, ks_at, vs_at, vz_at, min_at, inside, ZERO: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Words and scales of a tile; where MASKED zeros for tokens that are not inside."""
    GROUPED: tl.constexpr = not token_scales(ZERO)
    kw, ks = load_rows(k_at, inside, MASKED, 1), _load_scales(ks_at, inside, GROUPED, MASKED, 1)
    vw, vs = load_rows(v_at, inside, MASKED, AXIS), _load_scales(vs_at, inside, GROUPED, MASKED, AXIS)
    vz = vs
    if ZERO == "value":
        vz = _load_scales(vz_at, inside, GROUPED, MASKED, AXIS)
    if ZERO == "min":
        km_at, vm_at, kh_at, vh_at = min_at
        ks = (ks, load_rows(km_at, inside, MASKED, 1), load_rows(kh_at, inside, MASKED, 1))
        vs = (vs, load_rows(vm_at, inside, MASKED, AXIS), load_rows(vh_at, inside, MASKED, AXIS))
    return kw, ks, vw, vs, vz


@triton.jit(do_not_specialize=["splits"])
def _attend_words(  # noqa: C901, PLR0912
    query, keys, values, key_scale, value_scale, value_zero, key_min, value_min, key_high, value_high, table, lengths,
    partial, statistics, softmax_scale, v_unit, q_batch, q_token, q_head, table_batch, splits,
    K_PAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_GROUP: tl.constexpr,
    V_PAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_GROUP: tl.constexpr,
    S_PAGE: tl.constexpr, S_HEAD: tl.constexpr, S_TOKEN: tl.constexpr, S_GROUP: tl.constexpr,
    H_PAGE: tl.constexpr, H_HEAD: tl.constexpr, H_TOKEN: tl.constexpr, H_GROUP: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, ZEROS: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    ZERO: tl.constexpr, GGML: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    Q_TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    STEP: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SET: tl.constexpr, KEEP: tl.constexpr,
    TILE: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and KV head; see `attend_words` for the arguments.

    A thread block has ROWS query rows in sets of SET at most. Sums over a row's tokens are kept for KEEP tokens, or of
    WIDE for KEEP warps.
    """
    SETS: tl.constexpr = set_count(ROWS, SET)
    block = tl.program_id(0) // (HEADS // GROUP)
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    split = tl.program_id(1)
    batch = tl.program_id(2)
    k_word = tl.arange(0, DIM // KW)
    v_word = tl.arange(0, DIM // VW)
    lane = tl.arange(0, TILE)
    length = tl.load(lengths + batch)
    first, last = tiles_of_split(length, split, splits, TILE)
    whole = tl.minimum(tl.maximum(length - Q_TOKENS + 1, 0) // TILE, last)  # tiles before it: every row sees all of it
    table += batch * table_batch
    page = tl.load(table + first * TILE // PAGE, mask=first < last, other=0).to(tl.int64)
    loaded = ()
    big = 0.0
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        q, big = _query_codes(
            query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big, KW, GGML, Q_TOKENS, GROUP, AXIS
        )
        loaded += (q,)
    power = power_below(big) / QUERY_TOP
    factor = power * softmax_scale
    constants = ()
    state = ()
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        q = loaded[i]
        if WIDE:  # loaded again: registers do not hold all of it
            q, _ = _query_codes(
                query, k_word, rows, batch, kv_head, q_batch, q_token, q_head, big, KW, GGML, Q_TOKENS, GROUP, AXIS
            )
        parts = ()
        total = tl.zeros([set_width(ROWS, SET, i)], tl.float32)
        for number in tl.static_range(KW):
            part = (q[number] * (query_unit(number, ZERO) / power)).to(tl.float16)
            total += tl.sum(part.to(tl.float32), axis=AXIS) / (query_unit(number, ZERO) * tiny_unit(0, 4))
            parts += (part,)
        constants += ((parts, total, length - Q_TOKENS + rows // GROUP + 1),)
        state += (_nothing_seen(set_width(ROWS, SET, i), WIDE, KEEP, AXIS),)
    outputs = ()
    for _number in tl.static_range(VW):
        o = ()
        for i in tl.static_range(SETS):
            o += (by_rows(DIM // VW, set_width(ROWS, SET, i), AXIS),)
        outputs += (o,)
    if ZERO == "code":
        factor *= tiny_unit(0, 4)
    k_column = k_word if K_GROUP == 32 // KW else k_word // (32 // KW) * K_GROUP + k_word % (32 // KW)
    v_column = v_word if V_GROUP == 32 // VW else v_word // (32 // VW) * V_GROUP + v_word % (32 // VW)
    k_at = tl.multiple_of(keys + kv_head * K_HEAD, ALIGN) + (lane * K_TOKEN)[:, None] + k_column[None, :]
    v_at = tl.multiple_of(values + kv_head * V_HEAD, ALIGN)
    v_at = v_at + tl.expand_dims(lane * V_TOKEN, AXIS) + tl.expand_dims(v_column, 1 - AXIS)
    ONE: tl.constexpr = 2 if PAIRS else 1  # tokens that an element of the scales holds
    GROUPED: tl.constexpr = not token_scales(ZERO)
    s_at = kv_head * (S_HEAD // ONE) + lane // ONE * S_TOKEN
    t_at = s_at
    h_at = kv_head * H_HEAD + lane * H_TOKEN
    u_at = h_at
    if GROUPED:
        group = tl.arange(0, DIM // 32) * H_GROUP
        u_at = tl.expand_dims(h_at, AXIS) + tl.expand_dims(group, 1 - AXIS)
        h_at = h_at[:, None] + group[None, :]
        group = tl.arange(0, DIM // 32) * S_GROUP
        t_at = tl.expand_dims(s_at, AXIS) + tl.expand_dims(group, 1 - AXIS)
        s_at = s_at[:, None] + group[None, :]
    for masked in tl.static_range(2):
        begin = tl.maximum(first, whole) if masked else first
        end = last if masked else whole
        for tile in tl.range(begin, end, num_stages=1 if masked else STAGES):
            following = page
            if masked:
                page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
            else:
                following = read_page(table, tl.minimum(tile + 1, last - 1) * TILE // PAGE, ASM)
            row = tile * TILE % PAGE
            token = tile * TILE + lane
            s_row = page * (S_PAGE // ONE) + row // ONE * S_TOKEN
            h_row = page * H_PAGE + row * H_TOKEN
            min_at = (
                key_min + s_at + s_row, value_min + t_at + s_row, key_high + h_at + h_row, value_high + u_at + h_row,
            )  # fmt: skip
            kw, ks, vw, vs, vz = _loads(
                k_at + (page * K_PAGE + row * K_TOKEN), v_at + (page * V_PAGE + row * V_TOKEN),
                key_scale + s_at + s_row, value_scale + t_at + s_row, value_zero + t_at + s_row,
                min_at, token < length, ZERO, masked, AXIS,
            )  # fmt: skip
            page = following
            state, outputs = STEP(
                kw, vw, ks, vs, vz, token, constants, state, outputs, factor, tile == first,
                KEY, VALUE, ZEROS, KW, VW, ZERO, PAIRS, masked, AXIS, ASM,
            )  # fmt: skip
    for i in tl.static_range(SETS):
        rows = set_rows(block, i, ROWS, SET)
        top, mass, low = state[i]
        if WIDE:
            seen = length - Q_TOKENS + rows // GROUP + 1 > first * TILE
            top = tl.where(seen & (first < last), top, float("-inf"))
            mass, low = tl.sum(mass, axis=0), tl.sum(low, axis=0)
        mass, low = tl.sum(mass, axis=AXIS), per_row(tl.sum(low, axis=AXIS), AXIS)
        for number in tl.static_range(VW):
            o = outputs[number][i]
            if GROUPED:
                o *= v_unit
            elif ZERO == "code":
                o -= low
            else:
                o += low
            store_set(
                partial, statistics, o, top, mass, batch, split, kv_head, rows, number * (DIM // VW) + v_word,
                Q_TOKENS, HEADS, GROUP, splits, DIM, AXIS,
            )  # fmt: skip


def _words(plane: torch.Tensor, codes: Codes, shape: torch.Size, head_dim: int) -> torch.Tensor:
    """int16 [pages, kv_heads, page_tokens, groups, words of a group]; ValueError for a plane that is none."""
    width = GROUP_ELEMENTS // codes.per_word
    words = plane.view(torch.int16)
    if words.dim() == 4 and words.shape[3] % width == 0:
        words = words.unflatten(3, (-1, width))
    if tuple(words.shape) != (*shape[:3], head_dim // GROUP_ELEMENTS, width) or words.stride(4) != 1:
        raise ValueError(
            f"words {tuple(words.shape)} {words.stride()} and a head_dim of {head_dim} do not belong together"
        )
    return words


def _scale_planes(
    views: Mapping[str, torch.Tensor], codec: WordCodec, shape: tuple[int, ...]
) -> tuple[list[torch.Tensor], bool]:
    """Scales of K, of V and zeros of V, and whether two tokens' are neighbours that one int32 holds."""
    planes = [views[name] for name in codec.planes]
    first = planes[0]
    for plane in planes:
        if tuple(plane.shape) != shape or plane.stride() != first.stride():
            raise ValueError(f"scales {tuple(plane.shape)} {plane.stride()} are not {shape} {first.stride()}")
    pairs = first.dtype == torch.float16 and first.dim() == 3 and first.stride(2) == 1
    pairs = pairs and all(step % 2 == 0 for step in first.stride()[:2])
    if pairs and all(plane.data_ptr() % 4 == 0 for plane in planes):
        return [plane.view(torch.int32) for plane in planes], True
    return planes, False


def attend_words(
    query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, workspace: Workspace, *, codec: WordCodec, plan: TilePlan, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """`DecodeForm.attend`; views key_data and value_data uint8 [pages, kv_heads, page_tokens, bytes of a row].

    Or [.., groups, bytes of 32 elements]; even strides, the last 1 (rows without gaps and of multiples of 4 bytes let
    loads be asynchronous). Planes of scales [pages, kv_heads, page_tokens] or [.., groups], of equal strides.
    """
    head_dim = query.shape[3]
    words = [
        _words(views[name], codes, views["key_data"].shape, head_dim)
        for name, codes in (("key_data", codec.key), ("value_data", codec.value))
    ]
    one = words[0][:, :, :, 0]
    call = checked_call(query, one, one, page_table, lengths, out, workspace, width=one.shape[3])
    shape = words[0].shape[: 3 if codec.zero in {"code", "value"} else 4]
    scales, pairs = _scale_planes(views, codec, tuple(shape))
    minima = [views[name] for name in codec.minima] or [*scales, scales[0]]  # none of them are read
    high = [plane.view(torch.int32).squeeze(-1) if plane.dim() == 5 else plane for plane in minima[2:]]
    if codec.minima and (minima[0].stride(), minima[1].stride(), high[0].stride()) != (
        scales[0].stride(), scales[0].stride(), high[1].stride(),
    ):  # fmt: skip
        raise ValueError(f"minima {minima[0].stride()} and scales {scales[0].stride()} must have the same strides")
    tile = min(plan.tile, call.page_tokens)
    wide = plan.sets == 1 and plan.rows > 16
    if plan.rows % 8 or plan.rows > (64 if wide else 16):
        raise ValueError(f"sets have 8 or 16 rows, a single one any multiple of 8 up to 64, not {plan.rows}")
    axis = 0 if wide else plan.rows // 8 - 1
    if axis and codec.minima:
        raise ValueError("groups with minima take query rows as columns")
    keep = min(plan.num_warps, tile // 16) if wide else min(tile, (16, 8)[axis] * plan.num_warps)
    page, head, token, group = (*scales[0].stride(), 0)[:4]
    ones = 2 if pairs else 1
    _attend_words[(call.kv_heads * plan.blocks(call.q_rows), workspace.splits, call.batch)](
        query, *words, *scales, *minima[:2], *high, page_table, lengths, workspace.partial, workspace.statistics,
        softmax_scale * LOG2E * codec.score_unit(head_dim) * codec.key.unit, codec.value.unit,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        *words[0].stride()[:4], *words[1].stride()[:4], ones * page, ones * head, token, group,
        *(*high[0].stride(), 0)[:4],
        KEY=codec.key.number, VALUE=codec.value.number, ZEROS=codec.zeros, KW=codec.key.per_word,
        VW=codec.value.per_word, ZERO=codec.zero, GGML=codec.ggml, PAIRS=pairs, ALIGN=alignment(*words),
        PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads, GROUP=call.group, DIM=head_dim,
        STEP=wide_step if wide else narrow_step, WIDE=wide, ROWS=plan.rows * plan.sets, SET=64 if wide else plan.rows,
        KEEP=keep, TILE=tile, AXIS=axis, ASM=query.device.type == "cuda", STAGES=plan.stages,
        num_warps=plan.num_warps,
    )  # fmt: skip
    return combine_splits(workspace, out, per_word=codec.value.per_word, ggml=codec.ggml)
