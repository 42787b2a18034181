"""What a codec declares for decode attention: the loop that reads its cache, what it is in that loop, and its plan.

Plans that several codecs share are here: each the fastest measured on an H200 (head_dim 256), and one that fits where
shared memory is 100 KiB.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from realkernels.kernels.split_kv import PROLOGUE_TILES, PlanCase, TilePlan, Workspace

LEAST_ASYNCHRONOUS = 4
"""Bytes that an asynchronous copy takes at least, aligned to as many."""

ONE_ROUND = 40
"""Prologue of thread blocks that only read: second rounds have made 12 sequences 12 to 25 % slower on an H200."""

ACROSS_DIM = 256
"""Elements of a head at which rows have been measured as columns."""


@dataclass(frozen=True, kw_only=True)
class DecodeForm:
    """The loop that reads a codec's cache, and what the codec is within it."""

    loop: Callable[..., torch.Tensor]
    """A function of `realkernels/kernels/decode_*.py`."""
    plan: Callable[[PlanCase], TilePlan]
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the loop is given of the codec."""
    paged: bool = False
    """The loop is told the tokens of a page: planes of tiles do not say it."""
    other_splits: int = 0
    """Splits of a sequence that do not read its run of tiles: KVarN's first, which reads the sidecar."""
    least_capability: tuple[int, int] = (8, 0)

    def attend(
        self, query: torch.Tensor, views: Mapping[str, torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
        out: torch.Tensor, workspace: Workspace, *, plan: TilePlan, page_tokens: int, softmax_scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of each sequence's newest q_tokens tokens over the codec's `views` into `out`, in the stored basis.

        query and out [batch, q_tokens, query_heads, head_dim], page_table int32 [batch, max_pages], lengths int32
        [batch], new tokens included. Query i of q sees the first lengths - q + i + 1 tokens; one that sees none gets
        zeros. `workspace` comes from the plan. Two launches, no host synchronisation; page numbers, places and lengths
        are trusted. ValueError for what does not fit. Loops say what views they take.
        """
        options = {**self.options, "page_tokens": page_tokens} if self.paged else self.options
        return self.loop(
            query, views, page_table, lengths, out, workspace, plan=plan, softmax_scale=softmax_scale, **options
        )


def plan_columns(case: PlanCase, *, tile: int, num_warps: int, per_multiprocessor: int, stages: int = 3) -> TilePlan:
    """Queries as columns, in up to three sets of 8; more are several blocks that read and dequantise a tile each."""
    blocks = -(-case.q_rows // 24)
    return TilePlan(
        tile=tile, rows=8, sets=-(-case.q_rows // (8 * blocks)), num_warps=num_warps, stages=stages,
        per_multiprocessor=per_multiprocessor,
    )  # fmt: skip


def plan_wide(case: PlanCase) -> TilePlan:
    """32 queries as columns of one set, all the registers that two thread blocks of a multiprocessor may have."""
    return TilePlan(tile=case.tile(of_256=64), rows=32, num_warps=4, stages=3, per_multiprocessor=2)


def wide_is_less(q_rows: int, *, sets: int) -> bool:
    """Whether blocks of 32 rows are fewer than blocks of `sets` sets of 8: those cost less where equally many do."""
    return -(-q_rows // 32) * 8 * sets < q_rows


def plan_small(case: PlanCase, *, wide_codes: bool = False) -> TilePlan:
    """One that fits where shared memory is 100 KiB."""
    return plan_columns(
        case, tile=case.tile(of_256=64), num_warps=4, stages=2 if wide_codes else 3,
        per_multiprocessor=1 if wide_codes or case.q_rows > 8 else 2,
    )  # fmt: skip


def plan_rows(case: PlanCase) -> TilePlan:
    """Queries as rows, in up to three sets of 16, for a thread block that has a multiprocessor of Hopper to itself."""
    blocks = -(-case.q_rows // 48)
    return TilePlan(
        tile=case.tile(of_256=128), rows=16, sets=-(-case.q_rows // (16 * blocks)), num_warps=8, stages=3,
        per_multiprocessor=1,
    )  # fmt: skip


def plan_groups(case: PlanCase, *, wide_codes: bool = False) -> TilePlan:
    """Of words with a scale per 32 elements; `wide_codes`: of 8 bits, or of many instructions.

    More than 24 or 32 query rows are several blocks. Rows aligned to 2 bytes cannot be copied asynchronously: they pass
    through registers, which a wide plan has none left for.
    """
    if not case.large:
        return plan_small(case, wide_codes=wide_codes)
    alone = case.q_rows <= 8 and not wide_codes
    if case.aligned < LEAST_ASYNCHRONOUS and not alone and not wide_codes:
        return plan_rows(case)
    if case.aligned >= LEAST_ASYNCHRONOUS and wide_is_less(case.q_rows, sets=3 if wide_codes else 2):
        return plan_wide(case)
    return plan_columns(
        case, tile=case.tile(of_256=64), num_warps=2 if alone else 4, per_multiprocessor=4 if alone else 2
    )


def plan_bytes(case: PlanCase) -> TilePlan:
    """Of codes of a byte whose products need no scale.

    More than 48 query rows are several blocks that read and dequantise a tile each. Copies of 4 and 8 bytes want
    registers for their addresses. Of Hopper's matrix units rows that are columns make more: 32 of them, and 48 where no
    scales per token take the registers.
    """
    blocks = -(-case.q_rows // 48)
    rows, sets = {1: (16, 1), 2: (32, 1), 3: (16, 3)}[-(-case.q_rows // (16 * blocks))]
    across = case.aligned == 16 and case.head_dim == ACROSS_DIM and case.warpgroups and rows * sets > 16
    if across and sets > 1:
        across = not case.per_token
        rows, sets = (48, 1) if across else (rows, sets)
    return TilePlan(
        tile=case.tile(of_256=64), rows=rows, sets=sets, num_warps=4, stages=3 if case.aligned == 16 else 2,
        per_multiprocessor=2 if case.large else 1, across=across,
        prologue_tiles=ONE_ROUND if rows * sets == 16 else PROLOGUE_TILES,
    )  # fmt: skip
