# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels of the probes: memory read from end to end or in random runs, and chains of logic in registers."""

from typing import Any

import torch
import triton
import triton.language as tl

LANES = 1024
"""int32 elements that a thread block reads at once."""
CHAINS = (4, 8, 16)
"""Independent chains of a thread."""
WARPS, WARP_LANES = 8, 32
PROGRAMS_PER_SM = 8
STEPS = 2048
ROUNDS, OPERATIONS_A_ROUND = 8, 2
"""lop3 and shf, one after the other, of a step."""
_ROUND = "lop3.b32 $0, $0, $2, $3, 0x6a; shf.l.wrap.b32 $0, $0, $0, 7;"
_ASSEMBLY = "mov.b32 $0, $1; " + " ".join([_ROUND] * ROUNDS)


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


@triton.jit
def _chains(data, masks, out, steps, ELEMENTS: tl.constexpr, ASSEMBLY: tl.constexpr):  # noqa: N803, PLR0917
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(data + at)
    first = tl.load(masks)
    second = tl.load(masks + 1)
    for _ in range(steps):
        x = tl.inline_asm_elementwise(ASSEMBLY, "=&r,r,r,r", [x, first, second], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + at, x)


class Sum:
    """Sum of int32 `data` [n], n below 2^31, a multiple of 8192; wraps modulo 2^32 in each thread block only."""

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


class Chains:
    """x = rotate((x & a) ^ b, 7), again and again, over every lane of the device."""

    def __init__(self, *, chains: int, device: Any, steps: int = STEPS, programs: int | None = None) -> None:
        self.elements = chains * WARPS * WARP_LANES
        if programs is None:
            programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self.programs, self.steps = programs, steps
        size = (programs * self.elements,)
        self.data = torch.randint(-(2**31), 2**31, size, dtype=torch.int64, device=device).int()
        self.masks = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, device=device).int()
        self.out = torch.zeros_like(self.data)

    @property
    def operations(self) -> float:
        """Of one run."""
        return float(self.programs) * self.elements * self.steps * ROUNDS * OPERATIONS_A_ROUND

    def run(self) -> None:
        """All thread blocks, all steps."""
        _chains[(self.programs,)](
            self.data, self.masks, self.out, self.steps, ELEMENTS=self.elements, ASSEMBLY=_ASSEMBLY, num_warps=WARPS
        )

    def right(self, some: int = 16) -> bool:
        """Whether some chains hold what the host computes."""
        first, second = (int(mask) & 0xFFFFFFFF for mask in self.masks.tolist())
        for start, end in zip(self.data[:some].tolist(), self.out[:some].tolist(), strict=True):
            if chained(start & 0xFFFFFFFF, (first, second), self.steps * ROUNDS) != end & 0xFFFFFFFF:
                return False
        return True


def chained(start: int, masks: tuple[int, int], rounds: int) -> int:
    """`rounds` rounds of one chain, in unsigned 32 bits."""
    x = start
    for _ in range(rounds):
        x = (x & masks[0]) ^ masks[1]
        x = (x << 7 | x >> 25) & 0xFFFFFFFF
    return x
