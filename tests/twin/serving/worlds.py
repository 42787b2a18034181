"""Small worlds of serving: affine costs, pools of all kinds, workloads by hand and drawn."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from twin.serving.blocks import BlockPool
from twin.serving.engine import simulate_serving
from twin.serving.metrics import ServingResult
from twin.serving.requests import Limits, Request


class Affine(Struct, frozen=True, kw_only=True):
    """Seconds of a step: fixed, per decoding sequence, per cached token, per prefill row and per row x token."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0
    pair_s: float = 0.0

    def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
        """A decode step, and each token more."""
        return self.fixed_s + self.sequence_s * sequences + self.token_s * ctx_tokens, self.token_s

    def mixed(self, sequences: int, ctx_tokens: float, chunks: Sequence[tuple[int, int]]) -> float:
        """A step with prefill in it."""
        seconds = self.decode(sequences, ctx_tokens)[0]
        for past, rows in chunks:
            seconds += self.row_s * rows + self.pair_s * ((past + rows) ** 2 - past**2)
        return seconds


class PagedPool(Struct, frozen=True, kw_only=True):
    """Equal blocks; every sequence holds `sequence_blocks` beside those of its tokens."""

    blocks: int
    block_tokens: int
    sequence_blocks: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence with so many cached tokens."""
        return self.sequence_blocks - (-tokens // self.block_tokens)


class HybridPool(Struct, frozen=True, kw_only=True):
    """Full attention in blocks of `block_tokens`, and beside it a window that is full after `window` tokens."""

    blocks: int
    block_tokens: int
    window: int

    def blocks_for(self, tokens: int) -> int:
        """Of both kinds of attention."""
        return -(-tokens // self.block_tokens) - (-min(tokens, self.window) // 3)


PLAIN = Affine(fixed_s=1.0, row_s=1.0)
"""A decode step takes a second, a step with prefill a second and one for every row."""
PLENTY = PagedPool(blocks=10**6, block_tokens=16)


def request(index: int, prompt: int, output: int, *, at: float = 0.0, prefix: int = 0, name: str = "p") -> Request:
    ids = (name,) if prefix else ()
    return Request(
        id=index, arrival_s=at, prompt_tokens=prompt, output_tokens=output, prefix_ids=ids, prefix_tokens=prefix
    )


def serve(
    requests: Iterable[Request],
    *,
    costs: Affine = PLAIN,
    pool: BlockPool = PLENTY,
    jump: bool = True,
    calls: dict[str, Any] | None = None,
    **limits: Any,
) -> ServingResult:
    return simulate_serving(requests, costs, pool, Limits(**limits), jump=jump, **(calls or {}))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Few sequences, small budgets, speculation in one of three."""
    speculative = draw(st.sampled_from((0, 0, 1, 3)))
    return Limits(
        batched_tokens=draw(st.integers(1 + speculative, 40)),
        max_sequences=draw(st.integers(1, 8)),
        speculative=speculative,
        tokens_per_step=draw(st.floats(1, 1 + speculative)),
        reserve_prompt=draw(st.booleans()),
        reserve_output=draw(st.sampled_from((False, False, True))),
    )


@st.composite
def pools(draw: st.DrawFn) -> BlockPool:
    """So small that sequences preempt each other; even blocks and uneven ones."""
    blocks, block_tokens = draw(st.integers(6, 30)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        return HybridPool(blocks=blocks, block_tokens=block_tokens, window=draw(st.integers(0, 9)))
    return PagedPool(blocks=blocks, block_tokens=block_tokens, sequence_blocks=draw(st.integers(0, 2)))


@st.composite
def costs(draw: st.DrawFn) -> Affine:
    seconds = st.floats(0, 1)
    return Affine(
        fixed_s=draw(st.floats(0.1, 1)), sequence_s=draw(seconds), token_s=draw(st.sampled_from((0.0, 1e-3, 0.05))),
        row_s=draw(seconds), pair_s=draw(st.sampled_from((0.0, 1e-3))),
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn, *, prefixes: bool = False) -> list[Request]:
    """Up to 14 requests that come in heaps and with gaps."""
    gaps = draw(st.lists(st.one_of(st.just(0.0), st.floats(0.01, 30)), min_size=1, max_size=14))
    found, at = [], 0.0
    for index, gap in enumerate(gaps):
        at += gap
        prompt, output = draw(st.integers(1, 30)), draw(st.one_of(st.integers(1, 5), st.integers(1, 60)))
        prefix = draw(st.integers(0, prompt)) if prefixes else 0
        ids = tuple(draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=4))) if prefix else ()
        named = tuple("".join(ids[: end + 1]) for end in range(len(ids)))
        drawn = replace(request(index, prompt, output, at=at, prefix=prefix), prefix_ids=named)
        found.append(replace(drawn, prefix_span=draw(st.integers(1, 8)) if prefix else 0))
    return found


GOOD = '{"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5}'


def line(**changed: Any) -> str:
    """A line of a trace; `...` leaves a key out."""
    fields = {"arrival_s": 1, "prompt_tokens": 10, "output_tokens": 5, **changed}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})
