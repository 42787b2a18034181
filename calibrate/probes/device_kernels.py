# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the probes: reading memory from end to end, and reading random runs of it."""

from typing import Any

import torch
import triton
import triton.language as tl

LANES = 1024
"""int32 elements that a program reads at once."""


@triton.jit
def _sum(data, partial, count, LANES: tl.constexpr, UNROLL: tl.constexpr):  # noqa: N803
    total = tl.zeros([LANES], dtype=tl.int32)
    lane = tl.arange(0, LANES)
    stride = tl.num_programs(0) * LANES * UNROLL
    for start in range(tl.program_id(0) * LANES * UNROLL, count, stride):
        for step in tl.static_range(UNROLL):
            at = start + step * LANES + lane
            total += tl.load(data + at, mask=at < count, other=0)
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _sum_runs(data, starts, partial, RUN: tl.constexpr, LANES: tl.constexpr):  # noqa: N803
    first = tl.load(starts + tl.program_id(0)) * RUN
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.int32)
    for step in range(0, RUN, LANES):
        total += tl.load(data + first + step + lane)
    tl.store(partial + tl.program_id(0), tl.sum(total, axis=0))


class Sum:
    """Sum of int32 `data` [n], n below 2^31, a multiple of 8192; wraps modulo 2^32 in each program only."""

    def __init__(self, data: Any) -> None:
        self.data = data
        processors = torch.cuda.get_device_properties(data.device).multi_processor_count
        self.programs = processors * 8
        self.partial = torch.zeros(self.programs, dtype=torch.int32, device=data.device)

    def run(self) -> None:
        """Read everything once."""
        _sum[(self.programs,)](self.data, self.partial, self.data.numel(), LANES=LANES, UNROLL=4, num_warps=8)

    def value(self) -> int:
        """The sum, waited for."""
        return int(self.partial.long().sum())


class RunSums:
    """Sums of runs of `run_bytes` bytes of int32 `data` that begin at run numbers `starts` (int64 [runs])."""

    def __init__(self, data: Any, *, run_bytes: int, runs: int) -> None:
        self.data, self.run_elements = data, run_bytes // 4
        self.starts = torch.zeros(runs, dtype=torch.int64, device=data.device)
        self.partial = torch.zeros(runs, dtype=torch.int32, device=data.device)

    def run(self) -> None:
        """Read every run once."""
        lanes = min(self.run_elements, LANES)
        warps = max(1, min(4, lanes // 128))
        _sum_runs[(self.starts.numel(),)](
            self.data, self.starts, self.partial, RUN=self.run_elements, LANES=lanes, num_warps=warps
        )
