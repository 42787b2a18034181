"""Slots and rows as callers give them, checked on the host before anything is written."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from realkernels.formats.planes import Planes

Slots: TypeAlias = Sequence[int] | torch.Tensor
"""Integers below pages x page_tokens, in any order; on a device only as a tensor."""


def slot_tensor(planes: Planes, slots: Slots, *, checked: bool, distinct: bool = False) -> torch.Tensor:
    """int64 [n] on the planes' device; ValueError for none, for slots out of range and, if `distinct`, repeated ones.

    `checked` reads slots that lie on a device back, which waits for it and cannot be captured in a graph; without it
    the caller vouches for them.
    """
    given = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int64)
    if given.dim() != 1 or given.numel() == 0:
        raise ValueError(f"slots are {tuple(given.shape)}: give one axis of at least one slot")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"slots are {given.dtype}: give integers")
    if checked:
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("slots cannot be checked while a graph is captured: give checked=False")
        _check(given.cpu(), planes, distinct=distinct)
    return given.to(device=planes.device, dtype=torch.int64)


def _check(slots: torch.Tensor, planes: Planes, *, distinct: bool) -> None:
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= planes.slots:
        wrong = low if low < 0 else high
        raise ValueError(f"slot {wrong} does not lie in {planes.pages} pages of {planes.page_tokens} tokens")
    if distinct and slots.unique().numel() < slots.numel():
        raise ValueError("a slot is written twice in one append")


def check_rows(planes: Planes, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """ValueError unless both are floating-point [tokens, kv_heads, head_dim] on the planes' device."""
    expected = (tokens, planes.kv_heads, planes.head_dim)
    for name, rows in (("keys", keys), ("values", values)):
        if tuple(rows.shape) != expected:
            raise ValueError(f"{name} are {tuple(rows.shape)}, {tokens} slots take {expected}")
        if not rows.is_floating_point():
            raise ValueError(f"{name} are {rows.dtype}: give floating-point rows")
        if rows.device != planes.device:
            raise ValueError(f"{name} lie on {rows.device}, the planes on {planes.device}")


def put_where(target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
    """target[index[i]] = rows[i] for every i that is `valid`, all on the device and with fixed shapes.

    The others repeat the first valid write, or the present contents of row 0 where there is none: harmless.
    """
    any_valid = valid.any()
    source = torch.where(valid, torch.arange(valid.numel(), device=valid.device), valid.int().argmax())
    index = torch.where(any_valid, index[source], 0).long()
    target[index] = torch.where(any_valid, rows[source], target[index])
