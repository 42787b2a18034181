"""Which blocks each row of a prefill chunk attends to, as lists; plain torch on any device."""

import torch

from realkernels.shape import QsaShape

NO_BLOCK = 2**31 - 1
"""Fills a row's selection where the row has fewer blocks than the budget."""

SLAB_ELEMENTS = 2**25
"""Products held at once on the CPU: 128 MiB of float32."""


def select_rows(
    index_queries: torch.Tensor, pooled_keys: torch.Tensor, past: int, shape: QsaShape, *, slab_rows: int = 1024
) -> torch.Tensor:
    """Each row's selection: its best complete blocks ascending, then its open block; int32 [rows, topk + 1].

    index_queries [rows, index_heads, index_dim], pooled_keys [>= (past + rows) // ratio, index_dim]. A row with fewer
    blocks than the budget is filled with NO_BLOCK at its end. Products are rounded to the planes' precision on a GPU,
    as the published engine does, and kept in float32 on the CPU; among equal scores any block may win. A product that
    is NaN counts as 0.
    """
    rows, heads, dim = index_queries.shape
    blocks = shape.blocks(past + rows)
    keys = pooled_keys[:blocks]
    device = index_queries.device
    if device.type == "cpu":
        index_queries, keys = index_queries.float(), keys.float()
        slab_rows = max(1, min(slab_rows, SLAB_ELEMENTS // max(1, heads * blocks)))
    zero = keys.new_zeros(())
    out = torch.full((rows, shape.topk + 1), NO_BLOCK, dtype=torch.int32, device=device)
    ends = torch.arange(past + 1, past + rows + 1, device=device)
    for first in range(0, rows, slab_rows):
        slab = index_queries[first : first + slab_rows]
        products = (slab.reshape(-1, dim) @ keys.T).view(slab.shape[0], heads, blocks)
        scores = torch.fmax(products, zero, out=products).sum(dim=1, dtype=torch.float32)
        complete = (ends[first : first + slab_rows] // shape.ratio)[:, None]
        scores.masked_fill_(torch.arange(blocks, device=device)[None, :] >= complete, -1.0)
        best = scores.topk(min(shape.topk, blocks), dim=1, sorted=False)
        chosen = torch.where(best.values >= 0, best.indices, NO_BLOCK).to(torch.int32)
        out[first : first + slab.shape[0], : chosen.shape[1]] = chosen
    out[:, -1] = (ends // shape.ratio).to(torch.int32)
    return out.sort(dim=1).values


def bucket_bounds(selection: torch.Tensor, bucket_blocks: int, buckets: int) -> torch.Tensor:
    """Where each bucket begins and ends in each row's ascending selection; int32 [rows, buckets + 1]."""
    edges = torch.arange(buckets + 1, device=selection.device, dtype=torch.int32) * bucket_blocks
    return torch.searchsorted(selection, edges.expand(selection.shape[0], -1).contiguous(), out_int32=True)


def whole_bounds(selection: torch.Tensor) -> torch.Tensor:
    """The bounds of one bucket that holds everything: from 0 to the first NO_BLOCK; int32 [rows, 2]."""
    bounds = torch.zeros(selection.shape[0], 2, dtype=torch.int32, device=selection.device)
    bounds[:, 1] = (selection != NO_BLOCK).sum(dim=1)
    return bounds
