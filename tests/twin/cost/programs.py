"""Looking into lowered programs: ops of one part, and whether two breakdowns say the same."""

import pytest

from twin.cost.breakdown import Breakdown
from twin.operations.ops import Op, Program


def ops(program: Program, part: str) -> list[tuple[Op, int]]:
    """Ops of that part, each with how often it is done."""
    return [(op, graph.iterations * graph.times) for graph in program for op in graph.ops if op.part == part]


def same(one: Breakdown, other: Breakdown) -> bool:
    numbers = [
        [breakdown.seconds, breakdown.link_bytes, breakdown.link_write_bytes, breakdown.floor_s(), breakdown.naive_s()]
        + [value for _, value in sorted(breakdown.sensitivity().items())]
        for breakdown in (one, other)
    ]
    return numbers[0] == pytest.approx(numbers[1], rel=1e-9)
