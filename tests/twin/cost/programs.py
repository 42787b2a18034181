"""Looking into lowered programs: ops of one part, and whether two tallies say the same."""

import pytest

from twin.cost.breakdown import Tally
from twin.operations.ops import Op, Program


def ops(program: Program, part: str) -> list[tuple[Op, int]]:
    """Ops of that part, each with how often it is done."""
    return [(op, block.iterations * block.times) for block in program for op in block.ops if op.part == part]


def same(one: Tally, other: Tally) -> bool:
    numbers = [
        [tally.seconds, tally.link_bytes, tally.link_write_bytes, tally.floor_s(), tally.naive_s()]
        + [value for _, value in sorted(tally.hangs_on().items())]
        for tally in (one, other)
    ]
    return numbers[0] == pytest.approx(numbers[1], rel=1e-9)
