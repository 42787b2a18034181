"""Dequantising a kv chunk of a paged cache into rows of 16-bit numbers: one kernel for all codecs, and KVarN's own.

The kernel takes the codec's `dequantise` functions. A thread block has some tokens of one page, one head and one plane;
its rows are the (token, group) pairs, whose codes lie one behind the other, and so do their numbers. Bytes are all that
it costs: codes and scales read, numbers written. Each product of a code and a scale is exact in fp32 or rounded once,
as the reference rounds it, so that the numbers are the reference's, rounded to the type of the rows.
"""

from collections.abc import Callable
from functools import partial

import torch

from realkernels.codecs import PLANES, Codec, KVarN, Planes, RowCodec, codec_named, codec_names
from realkernels.codecs.kvarn_dequantise import dequantise_tiles
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
    if isinstance(codec, KVarN):
        return partial(_tiles, codec, planes)
    return partial(_rows, codec, planes)


def _tiles(
    codec: KVarN, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    _check_chunk(codec, planes, table, keys, values, first=first, last=last)
    dequantise_tiles(codec, planes, table, keys, values, first=first, last=last)


def _rows(
    codec: RowCodec, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int,
    last: int,
) -> None:  # fmt: skip
    heads, dim, page_tokens = planes.kv_heads, planes.head_dim, planes.page_tokens
    _check_chunk(codec, planes, table, keys, values, first=first, last=last)
    groups = dim // codec.group if codec.group else 1
    width = dim // groups
    if any(planes.parts[f"{plane}_data"].stride(-1) != 1 for plane in PLANES) or width & (width - 1):
        raise ValueError(f"codes of {width} numbers must lie one behind the other, and be a power of two")
    key, value = (codec.kernels_of(plane) for plane in PLANES)
    parts = [codec.kernel_parts(plane, planes) for plane in PLANES]
    ways = [tuple(_way(view, 4 if groups > 1 else 3) for view in views) for views in parts]
    bases = [tuple(view.as_strided((1,), (1,), 0) for view in views) for views in parts]
    tokens = power_of_two_below(page_tokens, min(key.most_tokens, max(1, ELEMENTS // dim)))
    _dequantise[(triton.cdiv(last - first, tokens), heads, 2)](
        *bases, table, keys, values, first, last - first, KEY=key.dequantise, VALUE=value.dequantise, KEY_WAYS=ways[0],
        VALUE_WAYS=ways[1], KEY_BITS=key.bits, VALUE_BITS=value.bits, PAGE=page_tokens, HEADS=heads, GROUPS=groups,
        WIDTH=width, TOKENS=tokens, num_warps=4,
    )  # fmt: skip


def _way(view: torch.Tensor, axes: int) -> tuple[int, ...]:
    """From the first element of a view's storage: its offset and the strides of its first `axes` axes, in elements."""
    return (view.storage_offset(), *view.stride()[:axes])


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
