"""Checks of selections and page tables on the host: kernels trust indices, so whoever makes them up checks them first.

None of this belongs into a timed path: each check waits for the device.
"""

import torch

from realkernels.codecs.codec import Planes
from realkernels.kernels.sparse_prefill import NO_BLOCK
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


def check_blocks(planes: Planes, *, end: int, shape: QsaShape) -> None:
    """ValueError for a context of `end` tokens that does not fit the interleaved blocks of these planes."""
    if end > planes.slots or planes.page_tokens != shape.ratio:
        raise ValueError(
            f"a context of {end} tokens in blocks of {shape.ratio} does not fit {planes.pages} blocks of "
            f"{planes.page_tokens}"
        )


def check_pages(page_table: torch.Tensor, lengths: torch.Tensor, *, pages: int, page_tokens: int) -> None:
    """Page tables [batch, max_pages] and lengths [batch] of caches of `pages` pages.

    Each length fits its row of the table, and the pages that it reaches into exist; entries beyond may hold anything.
    IndexError otherwise.
    """
    most = page_table.shape[1] * page_tokens
    wrong = (lengths < 0) | (lengths > most)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise IndexError(f"sequence {row} has {int(lengths[row])} tokens: its row of the page table holds 0 to {most}")
    used = torch.arange(page_table.shape[1], device=page_table.device)[None, :] * page_tokens < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= pages))
    if bool(wrong.any()):
        row, place = (int(number) for number in wrong.nonzero()[0])
        raise IndexError(
            f"page {int(page_table[row, place])} of sequence {row} is out of range: there are pages 0 to {pages - 1}"
        )
