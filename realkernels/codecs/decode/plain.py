"""Decode attention over bf16 and fp16 caches."""

from realkernels.codecs.decode.form import DecodeForm
from realkernels.kernels.decode_plain import attend_plain
from realkernels.kernels.split_kv import PlanCase, TilePlan


def _plan(case: PlanCase) -> TilePlan:
    """The fastest plan measured on an H200 (head_dim 256), and one that fits where shared memory is 100 KiB.

    More than 64 query rows are several blocks that read a tile each.
    """
    stages = 3 if case.large else 2
    if case.q_rows <= 16:
        return TilePlan(tile=case.tile(of_256=64), rows=16, num_warps=4, stages=stages, per_multiprocessor=1)
    return TilePlan(tile=case.tile(of_256=32), rows=64, num_warps=4, stages=stages, per_multiprocessor=1, wide=False)


PLAIN = DecodeForm(loop=attend_plain, plan=_plan)
FORMS = {"bf16": PLAIN, "fp16": PLAIN}
