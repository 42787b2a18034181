"""Decode attention over KVarN's tiles."""

from realkernels.codecs.decode.form import DecodeForm
from realkernels.kernels.decode_kvarn import attend_kvarn
from realkernels.kernels.split_kv import PlanCase, TilePlan


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200, and one that fits where shared memory is 100 KiB; tiles are the format's.

    More than 8 query rows are several blocks that read and dequantise a tile each: registers hold no second set.
    """
    deep = case.large and case.q_rows <= 8
    return TilePlan(
        tile=case.tile_tokens, rows=8, num_warps=2, stages=3 if deep else 2,
        per_multiprocessor=3 if deep else 4 if case.large else 2,
    )  # fmt: skip


KVARN = DecodeForm(loop=attend_kvarn, plan=_plan, other_splits=1, paged=True)
FORMS = dict.fromkeys(("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64"), KVARN)
