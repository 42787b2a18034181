"""Made-up workloads are what was asked for on average, and what is out of range is refused."""

import itertools
import math
import random
import statistics
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.serving.worlds import request, serve
from tests.worlds import LAWS
from twin.errors import BadValue
from twin.serving.requests import Lengths, Limits, Request, Workload

MANY = 20_000


def workload(count: int = 100, **asked: Any) -> Workload:
    lengths = {
        "prompt": Lengths(mean=500, distribution="lognormal"),
        "output": Lengths(mean=80, distribution="uniform"),
    }
    return Workload(**{"count": count, "rate_per_s": 10.0, **lengths, **asked})


def drawn(lengths: Lengths, count: int = MANY) -> list[int]:
    draw = lengths.draws(random.Random(3))  # noqa: S311
    return [draw() for _ in range(count)]


def arrivals(**asked: Any) -> list[float]:
    return [each.arrival_s for each in workload(**asked).requests()]


@pytest.mark.parametrize(
    ("lengths", "cv"),
    [
        (Lengths(mean=300, distribution="uniform"), 0.5),
        (Lengths(mean=300, distribution="uniform", cv=0.2), 0.2),
        (Lengths(mean=300, distribution="exponential"), 1.0),
        (Lengths(mean=300, distribution="lognormal"), 1.0),
        (Lengths(mean=300, distribution="lognormal", cv=0.3), 0.3),
        (Lengths(mean=2, distribution="exponential"), math.sqrt(0.5)),
        (Lengths(mean=5, distribution="lognormal", cv=0.5), 0.5),
    ],
)
def test_lengths_have_the_mean_and_spread_that_were_asked_for(lengths: Lengths, cv: float) -> None:
    values = drawn(lengths)
    assert statistics.mean(values) == pytest.approx(lengths.mean, rel=0.03)
    assert statistics.pstdev(values) / lengths.mean == pytest.approx(cv, rel=0.08)


@LAWS
@given(st.integers(1, 50), st.sampled_from(("fixed", "uniform", "exponential", "lognormal")))
def test_lengths_are_at_least_one_token(mean: int, distribution: Any) -> None:
    values = drawn(Lengths(mean=mean, distribution=distribution), 300)
    assert min(values) >= 1
    assert all(type(value) is int for value in values)


def test_a_change_of_one_kind_of_chance_leaves_the_others_alone() -> None:
    plain = list(workload().requests())
    slower = list(workload(rate_per_s=2.0, burstiness=0.5).requests())
    longer = list(workload(output=Lengths(mean=4000)).requests())
    assert [each.prompt_tokens for each in slower] == [each.prompt_tokens for each in plain]
    assert [each.output_tokens for each in slower] == [each.output_tokens for each in plain]
    assert [each.arrival_s for each in longer] == [each.arrival_s for each in plain]
    assert [each.prompt_tokens for each in longer] == [each.prompt_tokens for each in plain]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    gaps = [end - start for start, end in itertools.pairwise(arrivals(count=MANY, burstiness=burstiness))]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    assert arrivals(count=4, arrivals="constant", rate_per_s=2.0) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    "asked", [{"rate_per_s": None}, {"rate_per_s": math.inf}, {"arrivals": "burst", "rate_per_s": None}]
)
def test_without_a_rate_all_arrive_at_once(asked: dict[str, Any]) -> None:
    assert set(arrivals(**asked)) == {0.0}


def test_a_billion_requests_take_no_memory() -> None:
    requests = workload(count=10**9).requests()
    tracemalloc.start()
    for _ in itertools.islice(requests, 2000):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert isinstance(next(requests), Request)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"count": 0}, "the count is 0, outside the range of 1 to 1,000,000,000 requests"),
        ({"count": True}, "the count is True"),
        ({"rate_per_s": 0.0}, r"the rate is 0\.0, outside the range of 1e-09 to 1,000,000 requests/s"),
        ({"rate_per_s": 1e-300}, "the rate is 1e-300, outside the range of 1e-09"),
        (
            {"rate_per_s": 1e-9, "count": 11},
            r"11 requests at 1e-09 a second take 1\.1e\+10 s, the clock ends at 1e\+10 s",
        ),
        ({"rate_per_s": math.nan}, "the rate is nan"),
        ({"rate_per_s": -math.inf}, "the rate is -inf"),
        ({"arrivals": "burst"}, r"a burst has no rate, 10\.0 requests/s given"),
        ({"arrivals": "gamma"}, "'gamma' is no way to arrive"),
        ({"burstiness": 0.0}, r"the burstiness is 0\.0, outside the range of 0\.001"),
        ({"burstiness": 2.0, "rate_per_s": None}, "needs poisson arrivals at a finite rate"),
        ({"burstiness": 2.0, "arrivals": "constant"}, "needs poisson arrivals"),
        ({"prefix_tokens": -1}, "the shared prefix is -1"),
        ({"seed": 1.5}, r"the seed is 1\.5, not a whole number"),
    ],
)
def test_workloads_out_of_range_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        workload(**asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mean": 0}, "the mean length is 0, outside the range of 1 to 2,147,483,647 tokens"),
        ({"mean": 9, "distribution": "normal"}, "'normal' is no distribution"),
        ({"mean": 9, "cv": 1.0}, r"a cv of 1\.0 with fixed lengths"),
        ({"mean": 9, "distribution": "exponential", "cv": 2.0}, "with exponential lengths"),
        ({"mean": 9, "distribution": "uniform", "cv": 0.6}, r"outside the range of 0 to 0\.57 for uniform"),
        ({"mean": 9, "distribution": "lognormal", "cv": math.nan}, "the cv is nan"),
    ],
)
def test_lengths_out_of_range_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Lengths(**asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batched_tokens": 0}, "batched_tokens is 0, outside the range of 1 to 2,147,483,647"),
        ({"batched_tokens": 8.0}, r"batched_tokens is 8\.0"),
        ({"max_sequences": True}, "max_sequences is True, outside the range of 1 to 65,536"),
        ({"max_model_tokens": 1}, "max_model_tokens is 1, outside the range of 2"),
        ({"speculative": -1}, "speculative is -1"),
        ({"tokens_per_step": 1.5}, r"tokens_per_step is 1\.5, outside the range of 1 to 1"),
        ({"tokens_per_step": 4.5, "speculative": 3}, "outside the range of 1 to 4"),
        ({"tokens_per_step": float("nan"), "speculative": 3}, "tokens_per_step is nan"),
        ({"batched_tokens": 3, "speculative": 3}, "batched_tokens is 3: one sequence decodes 4 tokens a step"),
    ],
)
def test_limits_out_of_range_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Limits(**asked)


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(BadValue, match="request 1 arrives at 1 s, after one at 2 s"):
        serve([request(0, 1, 1, at=2.0), request(1, 1, 1, at=1.0)])
    with pytest.raises(BadValue, match="arrives at nan s"):
        serve([request(0, 1, 1, at=float("nan"))])


def test_an_arrival_beyond_the_clock_is_refused() -> None:
    """At 1e16 s the next double is two seconds on: times of a request would be nothing."""
    serve([request(0, 1, 1, at=1e10)])
    for at in (1.1e10, 1e300, float("inf")):
        with pytest.raises(BadValue, match="the clock ends at 1e"):
            serve([request(0, 1, 1, at=at)])


@pytest.mark.parametrize(("prompt", "output", "prefix"), [(0, 1, 0), (1, 0, 0), (4, 4, 5), (4, 4, -1)])
def test_requests_without_tokens_are_refused(prompt: int, output: int, prefix: int) -> None:
    with pytest.raises(BadValue, match=f"request 0 has {prompt} prompt tokens, {prefix} of them a prefix"):
        serve([request(0, prompt, output, prefix=prefix)])
