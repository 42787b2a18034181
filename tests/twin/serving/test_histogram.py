"""The histogram against sorted lists, and progressions against their numbers one by one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.metrics import RELATIVE_ERROR, Histogram

NUMBERS = st.floats(1e-9, 1e9)
SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)


def filled(values: list[float]) -> Histogram:
    found = Histogram()
    for value in values:
        found.add(value)
    return found


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]


@LAWS
@given(st.lists(NUMBERS, min_size=1, max_size=200))
def test_quantiles_are_within_half_a_percent(values: list[float]) -> None:
    found = filled(values)
    for share in SHARES:
        assert found.quantile(share) == pytest.approx(nearest_rank(values, share), rel=RELATIVE_ERROR + 1e-12)
    assert (found.count, found.least, found.most) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12)


def test_quantiles_of_many_numbers() -> None:
    stream = random.Random(7)  # noqa: S311
    values = [stream.lognormvariate(-4, 1.5) for _ in range(50_000)]
    found = filled(values)
    for share in SHARES:
        assert found.quantile(share) == pytest.approx(nearest_rank(values, share), rel=5e-3)


def test_the_error_is_half_a_percent_at_most() -> None:
    assert RELATIVE_ERROR < 5e-3


@LAWS
@given(st.floats(1e-6, 10), st.one_of(st.just(0.0), st.floats(-0.01, 10)), st.integers(1, 300), st.integers(1, 5))
def test_a_progression_is_its_numbers(first: float, growth: float, count: int, weight: int) -> None:
    growth = max(growth, -first / (2 * count))
    at_once, singly = Histogram(), Histogram()
    at_once.add_progression(first, growth, count, weight)
    for index in range(count):
        singly.add(first + growth * index, weight)
    assert (at_once.count, at_once.least) == (singly.count, singly.least)
    assert at_once.most == singly.most
    assert at_once.total == pytest.approx(singly.total, rel=1e-12)
    if growth >= 0:
        assert at_once.buckets() == singly.buckets()
    assert sum(at_once.buckets().values()) == at_once.count


def test_weights_are_repetitions() -> None:
    once, often = Histogram(), filled([0.5] * 7)
    once.add(0.5, 7)
    assert once.summary() == often.summary()


def test_nothing_and_zeros_are_counted_too() -> None:
    found = filled([0.0, 0.0, 0.0, 2.0])
    assert (found.quantile(0.5), found.least, found.most, found.mean) == (0.0, 0.0, 2.0, 0.5)
    assert set(Histogram().summary().values()) == {None}
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().quantile(0.5))


def test_memory_is_bounded_by_the_range() -> None:
    found = filled([1.003**power for power in range(-11_000, 9_000)])
    assert len(found.buckets()) < 6_250
