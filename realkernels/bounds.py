"""Checks of selections on the host: kernels trust their indices, so whoever makes them up has them checked first.

None of this belongs into a timed path: each check waits for the device.
"""

import torch

from realkernels.rows import NO_BLOCK
from realkernels.shape import QsaShape


def check_selected(selected: torch.Tensor, *, blocks: int) -> None:
    """Decode selections [..., topk]: every index in 0 ... blocks - 1, none twice in a row. IndexError otherwise."""
    low, high = int(selected.min()), int(selected.max())
    if low < 0 or high >= blocks:
        wrong = low if low < 0 else high
        raise IndexError(f"selected block {wrong} is out of range: the context has blocks 0 to {blocks - 1}")
    ordered = selected.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise IndexError("a block is selected twice: it would count twice in the attention")


def check_rows(selection: torch.Tensor, *, past: int, shape: QsaShape) -> None:
    """Prefill selections [rows, topk + 1], the first row being the token at `past`.

    Each row ascends, reaches no further than its own open block, and is filled with NO_BLOCK. IndexError otherwise.
    """
    rows = selection.shape[0]
    ends = torch.arange(past + 1, past + rows + 1, device=selection.device)
    fill = selection == NO_BLOCK
    if bool(((selection < 0) | (~fill & (selection > (ends // shape.ratio)[:, None]))).any()):
        raise IndexError(f"a row selects a block before 0 or beyond its own, for rows at {past} to {past + rows - 1}")
    if bool(((selection[:, 1:] <= selection[:, :-1]) & ~fill[:, 1:]).any()):
        raise IndexError("a row's selection does not ascend, or holds a block twice")
