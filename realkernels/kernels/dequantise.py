"""Dequantising a kv chunk of a paged cache into rows of 16-bit numbers: one kernel for all codecs, and KVarN's own.

The kernel takes the codec's `dequantise` functions. A thread block has some tokens of one page, one head and one plane;
its rows are the (token, group) pairs, whose codes lie one behind the other, and so do their numbers. Bytes are all that
it costs: codes and scales read, numbers written. Each product of a code and a scale is exact in fp32 or rounded once,
as the reference rounds it, so that the numbers are the reference's, rounded to the type of the rows.
"""

from collections.abc import Callable

import torch

from realkernels.codecs import PLANES, Codec, KVarN, Planes, RowCodec, codec_named, codec_names
from realkernels.codecs.kvarn_append import PARTS
from realkernels.jit import tl, triton

ELEMENTS = 8192
"""Numbers that a thread block writes."""

Dequantise = Callable[..., None]
"""(page table, keys, values, first=, last=): tokens of a sequence into the first rows of keys and values."""


@triton.jit(do_not_specialize=["first", "tokens"])
def _dequantise(
    key_parts, value_parts, pages, keys, values, first, tokens, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_WAYS: tl.constexpr, VALUE_WAYS: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TOKENS
    head = tl.program_id(1)
    page = tl.load(pages + (first + start) // PAGE).to(tl.int64)
    row = start + tl.arange(0, TOKENS * GROUPS) // GROUPS
    group = tl.arange(0, TOKENS * GROUPS) % GROUPS
    live = row < tokens
    place = page, head, (first + row) % PAGE, group
    to = (((row.to(tl.int64) * HEADS + head) * GROUPS + group) * WIDTH)[:, None]
    if tl.program_id(2) == 0:
        KEY(keys + to, key_parts, KEY_WAYS, place, live, KEY_BITS, WIDTH)
    else:
        VALUE(values + to, value_parts, VALUE_WAYS, place, live, VALUE_BITS, WIDTH)


def missing(codec: Codec) -> str:
    """Empty, or in one line why no kernel dequantises this codec."""
    if _dequantised(codec):
        return ""
    there = ", ".join(name for name in codec_names() if _dequantised(codec_named(name)))
    return f"no kernel dequantises {codec.name}: there are {there}"


def _dequantised(codec: Codec) -> bool:
    if isinstance(codec, RowCodec):
        return all(codec.kernels_of(plane).dequantise is not None for plane in PLANES)
    return isinstance(codec, KVarN)


def dequantiser(codec: Codec, planes: Planes) -> Dequantise:
    """The kernel of a codec on planes of it; ValueError where there is none, or where parts are not aligned.

    What it gives writes tokens first .. last - 1 of one sequence, whose pages `table` int32 [pages] names, as
    `codec.dequantise` sees them, into keys and values [at least last - first, kv_heads, head_dim] fp16, bf16 or fp32.
    One launch, no host synchronisation; page numbers are trusted. ValueError for what does not fit.
    """
    reason = missing(codec)
    if reason:
        raise ValueError(reason)
    views = codec.views(planes)
    for name, view in views.items():
        if view.data_ptr() % view.element_size():
            raise ValueError(f"{name} begins {view.data_ptr() % view.element_size()} B off its type of {view.dtype}")
    own = dequantise_tiles if isinstance(codec, KVarN) else _rows

    def dequantise(table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int, last: int) -> None:
        _check_chunk(codec, planes, table, keys, values, first=first, last=last)
        own(codec, planes, table, keys, values, first=first, last=last)

    return dequantise


def _rows(
    codec: RowCodec, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    heads, dim, page_tokens = planes.kv_heads, planes.head_dim, planes.page_tokens
    groups = dim // codec.group if codec.group else 1
    width = dim // groups
    if any(planes.parts[f"{plane}_data"].stride(-1) != 1 for plane in PLANES) or width & (width - 1):
        raise ValueError(f"codes of {width} numbers must lie one behind the other, and be a power of two")
    key, value = (codec.kernels_of(plane) for plane in PLANES)
    parts = [codec.kernel_parts(plane, planes) for plane in PLANES]
    axes = 4 if groups > 1 else 3  # from the first element of a view's storage: its offset and strides, in elements
    ways = [tuple((view.storage_offset(), *view.stride()[:axes]) for view in views) for views in parts]
    bases = [tuple(view.as_strided((1,), (1,), 0) for view in views) for views in parts]
    tokens = power_of_two_below(page_tokens, min(key.most_tokens, max(1, ELEMENTS // dim)))
    _dequantise[(triton.cdiv(last - first, tokens), heads, 2)](
        *bases, table, keys, values, first, last - first, KEY=key.dequantise, VALUE=value.dequantise, KEY_WAYS=ways[0],
        VALUE_WAYS=ways[1], KEY_BITS=key.bits, VALUE_BITS=value.bits, PAGE=page_tokens, HEADS=heads, GROUPS=groups,
        WIDTH=width, TOKENS=tokens, num_warps=4,
    )  # fmt: skip


def power_of_two_below(number: int, most: int) -> int:
    """The largest power of two that divides `number` and does not exceed `most`."""
    power = 1
    while number % (2 * power) == 0 and 2 * power <= most:
        power *= 2
    return power


def _check_chunk(
    codec: Codec, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    """ValueError unless tokens first .. last - 1 of a sequence whose pages `table` names fit keys and values."""
    room, page_tokens, size = keys.shape[0], planes.page_tokens, (planes.kv_heads, planes.head_dim)
    if keys.shape != values.shape or tuple(keys.shape[1:]) != size or keys.dtype != values.dtype:
        raise ValueError(
            f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} are no rows of "
            f"{size[0]} heads x {size[1]}"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("rows of keys and values must lie one behind the other")
    if table.dtype != torch.int32 or table.dim() != 1 or (table.numel() > 1 and table.stride(0) != 1):
        raise ValueError(f"a sequence's row of the page table is dense int32 [pages], not {table.dtype} {table.shape}")
    if not 0 <= first < last or last - first > room or last > table.numel() * page_tokens:
        raise ValueError(
            f"tokens {first} to {last - 1} fit neither {room} rows nor {table.numel()} pages of {page_tokens} tokens"
        )
    if first % page_tokens or first % codec.tile_tokens:
        raise ValueError(
            f"a kv chunk begins a page of {page_tokens} tokens and a tile of {codec.tile_tokens}, not at {first}"
        )


# KVarN's own: a thread block has a part of one tile of one head, some channels of K, which it turns over on the way, or
# some tokens of V. Tokens that lie in float16 in the sidecar are read there.

KEY_CHANNELS = 64
"""Of K that a thread block dequantises."""

VALUE_TOKENS = 32


@triton.jit
def _dequantise_keys(
    data, scales, zeros, token_scales, out, at, head, start, tokens, first_channel,
    DATA_HEAD: tl.constexpr, HALF_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """K of a tile that begins `at` bytes behind the first one."""
    channel = first_channel + tl.arange(0, CHANNELS)
    pair = tl.arange(0, TILE // 2)
    codes = tl.load(data + at + head * DATA_HEAD + channel[None, :] * (TILE // 2) + pair[:, None])
    half = at // 2 + head * HALF_HEAD
    scale = tl.load(scales + half + channel).to(tl.float32)[None, :]
    zero = tl.load(zeros + half + channel).to(tl.float32)[None, :]
    for odd in tl.static_range(2):
        token = 2 * pair + odd
        each = tl.load(token_scales + half + token).to(tl.float32)[:, None]
        code = (codes >> (4 * odd)) & 15
        made = (code.to(tl.float32) * scale + zero) * each
        row = start + token
        to = out + ((row.to(tl.int64) * HEADS + head) * DIM)[:, None] + channel[None, :]
        tl.store(to, made.to(out.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def _dequantise_values(
    data, channel_scales, scales, zeros, out, at, head, start, tokens, first_token,
    DATA_HEAD: tl.constexpr, HALF_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    PER_BYTE: tl.constexpr,
):  # fmt: skip
    """V of some tokens of a tile."""
    token = first_token + tl.arange(0, TOKENS)
    byte = tl.arange(0, DIM // PER_BYTE)
    codes = tl.load(data + at + head * DATA_HEAD + token[:, None] * (DIM // PER_BYTE) + byte[None, :])
    half = at // 2 + head * HALF_HEAD
    scale = tl.load(scales + half + token).to(tl.float32)[:, None]
    zero = tl.load(zeros + half + token).to(tl.float32)[:, None]
    if PER_BYTE == 4:
        even, odd = tl.join(codes & 3, (codes >> 4) & 3), tl.join((codes >> 2) & 3, codes >> 6)
        codes = tl.join(even, odd).reshape(TOKENS, DIM)
    else:
        codes = tl.join(codes & 15, codes >> 4).reshape(TOKENS, DIM)
    channel = tl.arange(0, DIM)
    each = tl.load(channel_scales + half + channel).to(tl.float32)[None, :]
    made = (codes.to(tl.float32) * scale + zero) * each
    row = start + token
    to = out + ((row.to(tl.int64) * HEADS + head) * DIM)[:, None] + channel[None, :]
    tl.store(to, made.to(out.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def _copy_aside(
    side, out, slot, head, start, tokens, first_token, TOKENS: tl.constexpr, SLOT: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Some tokens of a tile in fp16."""
    token = first_token + tl.arange(0, TOKENS)
    channel = tl.arange(0, DIM)
    row = start + token
    live = (row < tokens)[:, None]
    at = slot.to(tl.int64) * SLOT + head * HEAD + token[:, None] * TOKEN + channel[None, :]
    to = out + ((row.to(tl.int64) * HEADS + head) * DIM)[:, None] + channel[None, :]
    tl.store(to, tl.load(side + at, mask=live).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["first", "tokens"])
def _dequantise_tiles(
    key_data, key_scale, key_zero, key_token_scale, value_data, value_channel_scale, value_scale, value_zero,
    side_of_tile, side_keys, side_values, pages, keys, values, first, tokens,
    TILE_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr, SLOT: tl.constexpr, SIDE_HEAD: tl.constexpr,
    SIDE_TOKEN: tl.constexpr, PER_BYTE: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TILE
    head = tl.program_id(1)
    part = tl.program_id(2)
    parts: tl.constexpr = DIM // CHANNELS
    token = first + start
    page = tl.load(pages + token // PAGE).to(tl.int64)
    tile = page * (PAGE // TILE) + token % PAGE // TILE
    slot = tl.load(side_of_tile + tile)
    at = tile * TILE_BYTES
    if part < parts:
        if slot < 0:
            _dequantise_keys(
                key_data, key_scale, key_zero, key_token_scale, keys, at, head, start, tokens, part * CHANNELS,
                HEAD_BYTES, HEAD_BYTES // 2, HEADS, DIM, TILE, CHANNELS,
            )  # fmt: skip
        elif part == 0:
            for token_at in range(0, TILE, TOKENS):
                _copy_aside(
                    side_keys, keys, slot, head, start, tokens, token_at, TOKENS, SLOT, SIDE_TOKEN, SIDE_HEAD,
                    HEADS, DIM,
                )  # fmt: skip
    else:
        token_at = (part - parts) * TOKENS
        if slot < 0:
            _dequantise_values(
                value_data, value_channel_scale, value_scale, value_zero, values, at, head, start, tokens, token_at,
                HEAD_BYTES, HEAD_BYTES // 2, HEADS, DIM, TOKENS, PER_BYTE,
            )  # fmt: skip
        else:
            _copy_aside(
                side_values, values, slot, head, start, tokens, token_at, TOKENS, SLOT, SIDE_TOKEN, SIDE_HEAD,
                HEADS, DIM,
            )  # fmt: skip


def dequantise_tiles(
    codec: KVarN, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    """Tokens first .. last - 1 of a sequence into the first rows of keys and values; first begins a page and a tile.

    A tile that lies in the sidecar is read there. ValueError for planes that are no tiles in one run of bytes each.
    """
    views, page_tokens, tile = codec.views(planes), planes.page_tokens, codec.tile_tokens
    data, side, kv_heads, head_dim = views["key_data"], views["side_keys"], planes.kv_heads, planes.head_dim
    steps = {tuple(view.element_size() * step for step in view.stride()[:2]) for view in map(views.get, PARTS)}
    dense = data.stride(2) == tile // 2 and views["value_data"].stride(2) == views["value_data"].shape[3]
    if len(steps) > 1 or not dense or side.stride() != views["side_values"].stride():
        raise ValueError(f"the planes are no tiles of {tile} tokens in one run of bytes each")
    if data.stride(0) % 2 or data.stride(1) % 2:
        raise ValueError(f"tiles begin on even bytes, not every {data.stride(0)} and {data.stride(1)} B")
    channels, tokens = min(KEY_CHANNELS, head_dim), VALUE_TOKENS
    _dequantise_tiles[(triton.cdiv(last - first, tile), kv_heads, head_dim // channels + tile // tokens)](
        *(views[name] for name in PARTS), views["side_of_tile"], side, views["side_values"], table, keys, values, first,
        last - first, TILE_BYTES=data.stride(0), HEAD_BYTES=data.stride(1), SLOT=side.stride(0),
        SIDE_HEAD=side.stride(1), SIDE_TOKEN=side.stride(2), PER_BYTE=head_dim // views["value_data"].shape[3],
        PAGE=page_tokens, HEADS=kv_heads, DIM=head_dim, TILE=tile, CHANNELS=channels, TOKENS=tokens, num_warps=4,
    )  # fmt: skip
