"""Dequantising KVarN on a device: full tiles, and the tokens that lie in float16 in the sidecar; see `kvarn.py`.

A thread block has a part of one tile of one head: some channels of K, which it turns over on the way, or some tokens of
V. So KVarN has a kernel of its own.
"""

import torch

from realkernels.codecs.codec import Planes
from realkernels.codecs.kvarn import KVarN
from realkernels.codecs.kvarn_append import PARTS
from realkernels.jit import tl, triton

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
