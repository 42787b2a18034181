"""Fused decode attention over TurboQuant's 4bit_nc: K as 16 centroids of a rotated direction, V as 4-bit codes.

Centroids of a normal variable are nearly an odd polynomial of (code - 7.5): x (a + b x^2 + x^6) in fp16, found for the
16 numbers, misses them by 1.9e-3 of a standard deviation (root of the mean square; 5.2e-3 at most), against 9.7e-2 by
which centroids miss what they stand for: it adds 4e-4 of that to the squared error. key_norm holds norm / |centroids|,
so that norms multiply scores. Values: codes less 7.5; sum(p (zero + 7.5 scale)) is added at the end. K is rotated, V is
not: the caller rotates the query.
"""

from math import sqrt

import torch

from realkernels.attend.launch_words import (
    LEAST_ASYNCHRONOUS,
    Codes,
    launch_words,
    plan_columns,
    plan_rows,
    plan_small,
    plan_wide,
)
from realkernels.attend.plan import TilePlan, checked_call, is_large, tile_tokens
from realkernels.attend.splits import Workspace
from realkernels.attend.word_tiles import TURBOQUANT

UNIT = 82.2174035
"""The polynomial gives centroids for N(0, 1) over this."""


def plan_words(*, query_rows: int, head_dim: int, device: torch.device, aligned: int = 16) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    `query_rows` is query tokens x query heads of a KV head; more than 48 are cut into blocks. Rows `aligned`
    to 2 bytes cannot be copied asynchronously: they pass through registers.
    """
    if not is_large(device):
        return plan_small(query_rows=query_rows, head_dim=head_dim)
    blocks = -(-query_rows // 48)
    if query_rows <= 24 * blocks:
        tile, programs = tile_tokens(head_dim, of_256=64), 3 if query_rows <= 8 else 2
        return plan_columns(query_rows=query_rows, tile=tile, num_warps=4, per_multiprocessor=programs)
    if query_rows <= 32 * blocks and aligned >= LEAST_ASYNCHRONOUS:
        return plan_wide(head_dim=head_dim)
    return plan_rows(query_rows=query_rows, head_dim=head_dim)


def attend_turboquant(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_norm: torch.Tensor, value_scale: torch.Tensor,
    value_zero: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    workspace: Workspace, *, softmax_scale: float, plan: TilePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of each sequence's newest q_tokens tokens over TurboQuant codes, into `out`, K in the stored basis.

    query and out [batch, q_tokens, query_heads, head_dim]; keys and values uint8 [pages, kv_heads, page_tokens,
    head_dim / 2] with any even strides (4 bytes and more let loads be asynchronous), element 2j in the low nibble of
    byte j; key_norm, value_scale and value_zero fp16 [pages, kv_heads, page_tokens] with equal strides (1 from token to
    token lets loads be asynchronous). page_table int32 [batch, max_pages], lengths int32 [batch], new tokens included.
    Query i of q sees the first lengths - q + i + 1 tokens; one that sees none gets zeros. `workspace` comes from the
    plan (`plan_words` where none is given). Two launches, no host synchronisation; page numbers and lengths are
    trusted.
    """
    words_k, words_v = keys.view(torch.int16), values.view(torch.int16)
    call = checked_call(query, words_k, words_v, page_table, lengths, out, workspace, width=query.shape[3] // 4)
    scales = (key_norm, value_scale, value_zero)
    for part in scales:
        if part.stride() != key_norm.stride() or part.shape != keys.shape[:3]:
            raise ValueError(f"{tuple(part.shape)} {part.stride()} is not {tuple(keys.shape[:3])} {key_norm.stride()}")
    if plan is None:
        plan = plan_words(query_rows=call.query_rows, head_dim=call.head_dim, device=query.device)
    pairs = key_norm.stride(2) == 1 and all(step % 2 == 0 for step in key_norm.stride()[:2])
    pairs = pairs and all(part.data_ptr() % 4 == 0 for part in scales)
    if pairs:
        scales = tuple(part.view(torch.int32) for part in scales)
    words = (words_k.unflatten(3, (-1, 8)), words_v.unflatten(3, (-1, 8)))
    return launch_words(
        call, query, words, scales, page_table, lengths, out, workspace, plan, form=TURBOQUANT, pairs=pairs,
        softmax_scale=softmax_scale * UNIT / sqrt(call.head_dim), key_codes=Codes(), value_codes=Codes(),
    )  # fmt: skip
