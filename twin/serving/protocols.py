"""What the simulation must be told: the seconds of a step and the blocks of a sequence."""

from collections.abc import Sequence
from typing import Protocol


class StepCosts(Protocol):
    """Seconds of engine steps. Pure: the same question has the same answer."""

    def decode(self, sequences: int, ctx_tokens: int) -> tuple[float, float]:
        """Seconds of a step that decodes `sequences` over `ctx_tokens` cached tokens in all, and per token more.

        For a given number of sequences the seconds are affine in `ctx_tokens`, over every context: one answer per
        number of sequences is enough, and it is asked once.
        """
        ...

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the same step with prefill chunks (past tokens, new rows) beside it; `sequences` may be 0."""
        ...


class BlockPool(Protocol):
    """Where cached tokens live.

    A pool with an attribute `block_tokens` promises that its blocks fill up evenly: the first token, and then every
    `block_tokens` tokens, take the same number of blocks more. That makes long outputs cheap.
    """

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence with so many cached tokens holds: monotone.

        What it answers for 0 tokens (a recurrent state, say) every sequence holds for itself, prefix shared or not.
        """
        ...
