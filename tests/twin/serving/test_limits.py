"""What the scheduler may be told."""

from typing import Any

import pytest

from tests.twin.serving.worlds import request, serve
from twin.errors import BadValue
from twin.serving.requests import Limits


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


def test_the_budget_limits_who_runs() -> None:
    assert Limits(batched_tokens=100, max_sequences=64, speculative=3).most_running == 25
    assert Limits(batched_tokens=2048, max_sequences=64).most_running == 64


def test_tokens_per_step_are_whole_millionths() -> None:
    assert Limits().ratio == (1, 1)
    assert Limits(speculative=3, tokens_per_step=2.56).ratio == (2_560_000, 1_000_000)


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
