"""Plans that codecs of 16-bit words share, and what they choose by."""

from realkernels.kernels.split_kv import PlanCase, TilePlan

LEAST_ASYNCHRONOUS = 4
"""Bytes that an asynchronous copy takes at least, aligned to as many."""


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
