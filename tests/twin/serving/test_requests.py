"""Made-up workloads are what was asked for on average, and what is out of range is refused."""

import itertools
import math
import random
import statistics
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from tests.twin.serving.worlds import request, serve
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


@pytest.mark.parametrize("asked", [{}, {"rate_per_s": None}, {"arrivals": "constant"}, {"burstiness": 0.5, "seed": 4}])
def test_arrivals_alone_are_those_of_the_requests_and_go_on(asked: dict[str, Any]) -> None:
    times = list(itertools.islice(workload(count=1, **asked).arrivals_s(), 120))
    assert times[:100] == arrivals(**asked)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("mean", "distribution", "asked", "cv"),
    [(300, "uniform", None, 0.5), (300, "uniform", 0.2, 0.2), (300, "exponential", None, 1.0),
     (300, "lognormal", None, 1.0), (300, "lognormal", 0.3, 0.3), (2, "exponential", None, math.sqrt(0.5)),
     (5, "lognormal", 0.5, 0.5)],
)  # fmt: skip
def test_lengths_have_the_mean_and_spread_that_were_asked_for_and_a_token_at_least(
    mean: int, distribution: Any, asked: float | None, cv: float
) -> None:
    values = drawn(Lengths(mean=mean, distribution=distribution, cv=asked))
    assert statistics.mean(values) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(values) / mean == pytest.approx(cv, rel=0.08)
    assert min(values) >= 1
    assert all(type(value) is int for value in values)


def test_a_change_of_one_kind_of_chance_leaves_the_others_alone() -> None:
    plain = list(workload().requests())
    slower = workload(rate_per_s=2.0, burstiness=0.5).requests()
    longer = workload(output=Lengths(mean=4000)).requests()
    assert plain == [replace(each, arrival_s=like.arrival_s) for each, like in zip(slower, plain, strict=True)]
    assert plain == [replace(each, output_tokens=like.output_tokens) for each, like in zip(longer, plain, strict=True)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    gaps = [end - start for start, end in itertools.pairwise(arrivals(count=MANY, burstiness=burstiness))]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_without_a_rate_all_arrive_at_once_and_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    for asked in ({"rate_per_s": None}, {"rate_per_s": math.inf}, {"arrivals": "burst", "rate_per_s": None}):
        assert set(arrivals(**asked)) == {0.0}
    assert arrivals(count=4, arrivals="constant", rate_per_s=2.0) == [0.0, 0.5, 1.0, 1.5]


def test_a_billion_requests_take_no_memory() -> None:
    requests = workload(count=10**9).requests()
    tracemalloc.start()
    for _ in itertools.islice(requests, 2000):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert isinstance(next(requests), Request)


LENGTH, CLOCK = partial(Lengths, mean=9), r"11 requests at 1e-09 a second take 1\.1e\+10 s, the clock ends at 1e\+10 s"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (workload, {"count": True}, "the count is True"),
    (workload, {"rate_per_s": 1e-300}, "the rate is 1e-300, outside the range of 1e-09"),
    (workload, {"rate_per_s": 1e-9, "count": 11}, CLOCK),
    (workload, {"rate_per_s": -math.inf}, "the rate is -inf"),
    (workload, {"arrivals": "burst"}, r"a burst has no rate, 10\.0 requests/s given"),
    (workload, {"arrivals": "gamma"}, "'gamma' is no way to arrive"),
    (workload, {"burstiness": 0.0}, r"the burstiness is 0\.0, outside the range of 0\.001"),
    (workload, {"burstiness": 2.0, "rate_per_s": None}, "needs poisson arrivals at a finite rate"),
    (workload, {"burstiness": 2.0, "arrivals": "constant"}, "needs poisson arrivals"),
    (workload, {"prefix_tokens": -1}, "the shared prefix is -1"),
    (workload, {"seed": 1.5}, r"the seed is 1\.5, not a whole number"),
    (LENGTH, {"mean": 0}, "the mean length is 0, outside the range of 1 to 2,147,483,647 tokens"),
    (LENGTH, {"distribution": "normal"}, "'normal' is no distribution"),
    (LENGTH, {"cv": 1.0}, r"a cv of 1\.0 with fixed lengths"),
    (LENGTH, {"distribution": "uniform", "cv": 0.6}, r"outside the range of 0 to 0\.57 for uniform"),
    (LENGTH, {"distribution": "lognormal", "cv": math.nan}, "the cv is nan"),
    (Limits, {"batched_tokens": 0}, "batched_tokens is 0, outside the range of 1 to 2,147,483,647"),
    (Limits, {"batched_tokens": 8.0}, r"batched_tokens is 8\.0"),
    (Limits, {"max_sequences": True}, "max_sequences is True, outside the range of 1 to 65,536"),
    (Limits, {"max_model_tokens": 1}, "max_model_tokens is 1, outside the range of 2"),
    (Limits, {"speculative": -1}, "speculative is -1"),
    (Limits, {"tokens_per_step": 1.5}, r"tokens_per_step is 1\.5, outside the range of 1 to 1"),
    (Limits, {"tokens_per_step": 4.5, "speculative": 3}, "outside the range of 1 to 4"),
    (Limits, {"tokens_per_step": math.nan, "speculative": 3}, "tokens_per_step is nan"),
    (Limits, {"batched_tokens": 3, "speculative": 3}, "batched_tokens is 3: one sequence decodes 4 tokens a step"),
]


@pytest.mark.parametrize(("make", "asked", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_is_out_of_range_is_refused(make: Callable[..., Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        make(**asked)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(0, 1, 1, at=2.0), request(1, 1, 1, at=1.0)], "request 1 arrives at 1 s, after one at 2 s"),
        ([request(0, 1, 1, at=math.nan)], "arrives at nan s"),
        *(([request(0, 1, 1, at=at)], "the clock ends at 1e") for at in (1.1e10, 1e300, math.inf)),
        *(
            ([request(0, *tokens, prefix=prefix)], f"{tokens[0]} prompt tokens, {prefix} of them a prefix")
            for *tokens, prefix in ((0, 1, 0), (1, 0, 0), (4, 4, 5), (4, 4, -1))
        ),
    ],
)
def test_requests_out_of_order_beyond_the_clock_or_without_tokens_are_refused(
    requests: list[Request], message: str
) -> None:
    """At 1e16 s the next double is two seconds on: times of a request would be nothing."""
    serve([request(0, 1, 1, at=1e10)])
    with pytest.raises(BadValue, match=message):
        serve(requests)
