"""Launches of the kernel in `decode_words.py`, and how it is cut into programs."""

from dataclasses import dataclass

import torch

from realkernels.attend.decode_words import attend_words
from realkernels.attend.decode_words_wide import attend_words_wide
from realkernels.attend.merge import merge
from realkernels.attend.plan import Call, TilePlan, alignment, tile_tokens
from realkernels.attend.splits import Workspace

LOG2E = 1.4426950408889634
LEAST_ASYNCHRONOUS = 4
"""Bytes that an asynchronous copy takes at least, aligned to as many."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """How a 16-bit word of a row holds elements, and what a code stands for."""

    per_word: int = 4
    """4 or 2: codes of 4 or 8 bits."""
    zero: float = 0.0
    """x = ((code ^ flip) - zero) x scale x unit."""
    flip: int = 0
    unit: float = 1.0
    ggml: bool = False
    """Word w of a group of 32 holds elements 2w, 2w + 16, 2w + 1, 2w + 17, not 4w to 4w + 3."""


def plan_columns(*, query_rows: int, tile: int, num_warps: int, per_multiprocessor: int, stages: int = 3) -> TilePlan:
    """Queries as columns, in up to three sets of 8; more rows are cut into blocks that read and convert a tile each."""
    blocks = -(-query_rows // 24)
    return TilePlan(
        tile=tile, rows=8, sets=-(-query_rows // (8 * blocks)), num_warps=num_warps, stages=stages,
        per_multiprocessor=per_multiprocessor, wide=True,
    )  # fmt: skip


def plan_wide(*, head_dim: int) -> TilePlan:
    """32 queries as columns of one set, all the registers that two programs of a multiprocessor may have."""
    return TilePlan(
        tile=tile_tokens(head_dim, of_256=64), rows=32, sets=1, num_warps=4, stages=3, per_multiprocessor=2, wide=True
    )


def wide_is_less(query_rows: int, *, sets: int) -> bool:
    """Whether blocks of 32 rows are fewer than blocks of `sets` sets of 8: those cost less where equally many do."""
    return -(-query_rows // 32) * 8 * sets < query_rows


def plan_small(*, query_rows: int, head_dim: int, wide_codes: bool = False) -> TilePlan:
    """One that fits where shared memory is 100 KiB."""
    return plan_columns(
        query_rows=query_rows, tile=tile_tokens(head_dim, of_256=64), num_warps=4, stages=2 if wide_codes else 3,
        per_multiprocessor=1 if wide_codes or query_rows > 8 else 2,
    )  # fmt: skip


def plan_rows(*, query_rows: int, head_dim: int) -> TilePlan:
    """Queries as rows, in up to three sets of 16, for a program that has a multiprocessor of Hopper to itself."""
    blocks = -(-query_rows // 48)
    return TilePlan(
        tile=tile_tokens(head_dim, of_256=128), rows=16, sets=-(-query_rows // (16 * blocks)), num_warps=8, stages=3,
        per_multiprocessor=1, wide=True,
    )  # fmt: skip


def launch_words(
    call: Call, query: torch.Tensor, words: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, ...],
    page_table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, workspace: Workspace, plan: TilePlan, *,
    form: int, softmax_scale: float, key_codes: Codes, value_codes: Codes, pairs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Both launches. words int16 [pages, kv_heads, page_tokens, groups, words]; scales of K, of V, zeros of V.

    Scales are [pages, kv_heads, page_tokens] or [pages, kv_heads, page_tokens, groups], of equal strides; with `pairs`
    int32, each two neighbouring tokens'.
    """
    tile = min(plan.tile, call.page_tokens)
    wide = plan.sets == 1 and plan.rows > 16
    if plan.rows % 8 or plan.rows > (64 if wide else 16):
        raise ValueError(f"sets have 8 or 16 rows, a single one any multiple of 8 up to 64, not {plan.rows}")
    if call.head_dim % 32:
        raise ValueError(f"head_dim is {call.head_dim}: words are read in groups of 32 elements")
    one = 2 if pairs else 1
    page, head, token, group = (*scales[0].stride(), 0)[:4]
    if wide:
        kernel, sizes = attend_words_wide, {"ROWS": plan.rows, "WARPS": min(plan.num_warps, tile // 16)}
    else:
        axis = plan.rows // 8 - 1
        keep = min(tile, (16, 8)[axis] * plan.num_warps)
        kernel, sizes = attend_words, {"SETS": plan.sets, "KEEP": keep, "AXIS": axis}
    kernel[(call.kv_heads * plan.blocks(call.query_rows), workspace.splits, call.batch)](
        query, *words, *scales, page_table, lengths, workspace.partial, workspace.statistics,
        softmax_scale * LOG2E * key_codes.unit, value_codes.unit,
        query.stride(0), query.stride(1), query.stride(2), page_table.stride(0), workspace.splits,
        *words[0].stride()[:4], *words[1].stride()[:4], one * page, one * head, token, group,
        FORMAT=form, KW=key_codes.per_word, KZ=key_codes.zero, KF=key_codes.flip,
        VW=value_codes.per_word, VZ=value_codes.zero, VF=value_codes.flip, GGML=key_codes.ggml, PAIRS=pairs,
        ALIGN=alignment(*words), PAGE=call.page_tokens, Q_TOKENS=call.q_tokens, HEADS=call.query_heads,
        GROUP=call.group, DIM=call.head_dim, TILE=tile, ASM=query.device.type == "cuda", STAGES=plan.stages,
        num_warps=plan.num_warps, **sizes,
    )  # fmt: skip
    return merge(workspace, out, per_word=value_codes.per_word, ggml=key_codes.ggml)
