"""What a simulation leaves behind: lengths, critical paths and, on request, every span."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from twin.operations.ops import Op, Program


class Span(NamedTuple):
    """One call of an op, in seconds from the start of its block."""

    op: Op
    start_s: float
    end_s: float


class BlockRun(Struct, frozen=True, kw_only=True):
    """One playing of a block (all its iterations, once)."""

    seconds: float
    critical: tuple[float, ...]
    """How often each op of the block lies on the critical path: its seconds x this count add up to `seconds`."""
    spans: tuple[Span, ...] = ()


class Timeline(Struct, frozen=True, kw_only=True):
    """A played program."""

    program: Program
    runs: tuple[BlockRun, ...]

    @property
    def total_s(self) -> float:
        """Length of the whole program in seconds."""
        return sum(run.seconds * block.times for block, run in zip(self.program, self.runs, strict=True))

    def spans(self) -> Iterator[Span]:
        """Every recorded span, in seconds from the start of the program."""
        offset = 0.0
        for block, run in zip(self.program, self.runs, strict=True):
            for _ in range(block.times):
                for span in run.spans:
                    yield Span(span.op, span.start_s + offset, span.end_s + offset)
                offset += run.seconds
