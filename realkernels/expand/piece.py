"""What the unpacking kernels share: strides of a view as compile-time numbers, and the sizes of a piece, checked."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Plane(NamedTuple):
    """A view [page, head, token, ...] as its storage's first element and the way from there, in elements.

    A compiler that knows offset and strides knows how wide it may load, which the address of a part tells only where it
    is a multiple of 16 B.
    """

    base: torch.Tensor
    way: tuple[int, ...]
    """Offset, then strides of page, head, token and, where there are groups, of a group."""

    @staticmethod
    def of(view: torch.Tensor, axes: int = 3) -> "Plane":
        """The first `axes` axes of a view; the ones behind must be dense. No axes: a single number."""
        base = view.as_strided((1,), (1,), 0)
        return Plane(base, (view.storage_offset(), *view.stride()[:axes]))


def check_piece(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, *, first: int, last: int, size: tuple[int, int],
    page_tokens: int, tile_tokens: int = 1,
) -> None:  # fmt: skip
    """ValueError unless tokens first .. last - 1 of a sequence whose pages `table` names fit keys and values.

    keys and values [tokens, kv_heads, head_dim] of one floating type, dense; size is (kv_heads, head_dim).
    """
    room = keys.shape[0]
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
    if first % page_tokens or first % tile_tokens:
        raise ValueError(f"a piece begins a page of {page_tokens} tokens and a tile of {tile_tokens}, not at {first}")


def power_of_two_below(number: int, most: int) -> int:
    """The largest power of two that divides `number` and does not exceed `most`."""
    power = 1
    while number % (2 * power) == 0 and 2 * power <= most:
        power *= 2
    return power


@triton.jit
def page_at(table, token, PAGE: tl.constexpr):
    """Page number of a token, int64."""
    return tl.load(table + token // PAGE).to(tl.int64)


@triton.jit
def half_numbers(bits):
    """FP32 of e4m3 bits in uint8: an fp16 has the same bits one place higher, and a bias of 8 more."""
    low = bits.to(tl.int16) & 127
    half = (((bits.to(tl.int16) & 128) << 8) | (low << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(low == 127, float("nan"), half.to(tl.float32) * 256.0)
