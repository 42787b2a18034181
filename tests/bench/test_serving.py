"""How long a simulation of serving takes, by the number of requests and by what makes it hard.

Run with `--benchmark-enable`; as tests they run once each and check that what is timed is right.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.twin.serving.worlds import PagedPool
from twin.serving.engine import simulate_serving
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Limits, Request, Workload

ROOMY = PagedPool(blocks=20_000, block_tokens=16)
CHAT: dict[str, Any] = {
    "prompt": Lengths(mean=512, distribution="exponential"),
    "output": Lengths(mean=256, distribution="exponential"),
}


class Toy:
    """Steps of about 8 ms, as of an 8B model on one large card."""

    def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
        """A decode step, and each token more."""
        return 6e-3 + 2e-5 * sequences + 1e-7 * ctx_tokens, 1e-7

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """A step with prefill in it."""
        seconds = self.decode(sequences, ctx_tokens)[0]
        return seconds + sum(3e-5 * rows + 1e-9 * rows * (past + rows / 2) for past, rows in chunks)


def simulated(requests: Iterable[Request], pool: PagedPool = ROOMY, **asked: Any) -> ServingResult:
    jump = asked.pop("jump", True)
    return simulate_serving(requests, Toy(), pool, Limits(**asked), jump=jump)


def timed(benchmark: BenchmarkFixture, workload: Workload, rounds: int, **asked: Any) -> ServingResult:
    result: ServingResult = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: simulated(workload.requests(), **asked), rounds=rounds
    )
    assert result.completed == workload.count
    return result


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_chat_at_ten_a_second(benchmark: BenchmarkFixture, count: int) -> None:
    result = timed(benchmark, Workload(count=count, rate_per_s=10.0, **CHAT), rounds=5)
    assert 6e-3 < result.itl_s.quantile(0.5) < 10e-3


def test_chat_step_by_step(benchmark: BenchmarkFixture) -> None:
    timed(benchmark, Workload(count=1_000, rate_per_s=10.0, **CHAT), rounds=3, jump=False)


def test_a_thousand_at_once(benchmark: BenchmarkFixture) -> None:
    result = timed(benchmark, Workload(count=1_000, **CHAT), rounds=5)
    assert result.resident_max == 256


def test_a_pool_that_is_too_small(benchmark: BenchmarkFixture) -> None:
    small = PagedPool(blocks=1_500, block_tokens=16)
    result = timed(benchmark, Workload(count=1_000, **CHAT), rounds=5, pool=small)
    assert result.preemptions > 100


def test_long_outputs(benchmark: BenchmarkFixture) -> None:
    workload = Workload(count=1_000, rate_per_s=0.4, prompt=Lengths(mean=1_000), output=Lengths(mean=8_000))
    timed(benchmark, workload, rounds=5, pool=PagedPool(blocks=100_000, block_tokens=16))


def test_long_outputs_with_speculation(benchmark: BenchmarkFixture) -> None:
    workload = Workload(count=1_000, rate_per_s=0.4, prompt=Lengths(mean=1_000), output=Lengths(mean=8_000))
    pool = PagedPool(blocks=100_000, block_tokens=16)
    timed(benchmark, workload, rounds=3, pool=pool, speculative=3, tokens_per_step=2.56)


def test_a_shared_prefix(benchmark: BenchmarkFixture) -> None:
    result = timed(benchmark, Workload(count=1_000, rate_per_s=10.0, prefix_tokens=2_000, **CHAT), rounds=5)
    assert result.cached_tokens > 1_900_000
