"""How long a simulation of serving takes, by the number of requests and by what makes it hard.

Run with `--benchmark-enable`; as tests they run once each and check that what is timed is right.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.twin.serving.worlds import PagedPool
from twin.serving.engine import simulate_serving
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Limits, Workload

ROOMY, WIDE = (PagedPool(blocks=blocks, block_tokens=16) for blocks in (20_000, 100_000))

TEN = {"rate_per_s": 10.0}
LONG = {"prompt": Lengths(mean=1_000), "output": Lengths(mean=8_000), "rate_per_s": 0.4}
CHAT: dict[str, Any] = {
    "prompt": Lengths(mean=512, distribution="exponential"),
    "output": Lengths(mean=256, distribution="exponential"),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[ServingResult], bool]]] = {
    "chat": (CHAT | TEN, {}, lambda result: 6e-3 < result.itl_s.quantile(0.5) < 10e-3),
    "10,000 chats": (CHAT | TEN | {"count": 10_000}, {}, lambda result: result.steps > 10_000),
    "step by step": (CHAT | TEN, {"jump": False}, lambda result: result.steps > 1_000),
    "at once": (CHAT, {}, lambda result: result.resident_max == 256),
    "small pool": (CHAT, {"pool": PagedPool(blocks=1_500, block_tokens=16)}, lambda result: result.preemptions > 100),
    "long outputs": (LONG, {"pool": WIDE}, lambda result: result.preemptions == 0),
    "speculation": (LONG, {"pool": WIDE, "speculative": 3, "tokens_per_step": 2.56}, lambda result: result.steps > 0),
    "shared prefix": (CHAT | TEN | {"prefix_tokens": 2_000}, {}, lambda result: result.cached_tokens > 1_900_000),
}
"""Workload, limits and pool, and what shows that it was served as meant."""


class Toy:
    """Steps of about 8 ms, as of an 8B model on one large card."""

    def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
        """A decode step, and each token more."""
        return 6e-3 + 2e-5 * sequences + 1e-7 * ctx_tokens, 1e-7

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """A step with prefill in it."""
        seconds = self.decode(sequences, ctx_tokens)[0]
        return seconds + sum(3e-5 * rows + 1e-9 * rows * (past + rows / 2) for past, rows in chunks)


@pytest.mark.parametrize("name", CASES)
def test_a_thousand_requests(benchmark: BenchmarkFixture, name: str) -> None:
    shape, asked, right = CASES[name]
    workload, more = Workload(**{"count": 1_000} | shape), dict(asked)
    pool, jump = more.pop("pool", ROOMY), more.pop("jump", True)
    result: ServingResult = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: simulate_serving(workload.requests(), Toy(), pool, Limits(**more), jump=jump), rounds=5
    )
    assert result.completed == workload.count
    assert right(result)
