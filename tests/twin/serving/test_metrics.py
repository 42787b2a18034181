"""The histogram against sorted lists, and the time line against its area: little memory, nothing lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.metrics import FIRST_BIN_S, GROWTH, POINTS, Histogram, Residency

RELATIVE_ERROR = (GROWTH - 1) / (GROWTH + 1)


def filled(values: list[float]) -> Histogram:
    found = Histogram()
    for value in values:
        found.add(value)
    return found


@LAWS
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200))
def test_quantiles_are_within_half_a_percent(values: list[float]) -> None:
    found = filled(values)
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        nearest_rank = sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]
        assert found.quantile(share) == pytest.approx(nearest_rank, rel=RELATIVE_ERROR + 1e-12)
    assert (found.count, found.least, found.most) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12)


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


def test_nothing_and_zeros_are_counted_too_and_memory_is_bounded_by_the_range() -> None:
    found = filled([0.0, 0.0, 0.0, 2.0])
    assert (found.quantile(0.5), found.least, found.most, found.mean) == (0.0, 0.0, 2.0, 0.5)
    assert set(Histogram().summary().values()) == {None}
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().quantile(0.5))
    assert len(filled([1.003**power for power in range(-11_000, 9_000)]).buckets()) < 6_250


def test_bins_double_as_time_goes_by_and_idle_time_counts_as_nobody() -> None:
    residency, idle = Residency(), Residency()
    residency.add(0.0, POINTS * FIRST_BIN_S, 3)
    assert residency.bin_s == 2 * FIRST_BIN_S
    starts = (index * 2 * FIRST_BIN_S for index in range(POINTS // 2))
    assert residency.points(POINTS * FIRST_BIN_S) == tuple((start, 3.0) for start in starts)
    idle.add(8.0, 9.0, 4)
    levels = [level for _, level in idle.points(10.0)]
    assert sum(levels) * idle.bin_s == pytest.approx(4.0)
    assert levels[0] == levels[-1] == 0.0


@LAWS
@given(st.lists(st.tuples(st.floats(1e-4, 1e4), st.integers(0, 300)), min_size=1, max_size=60))
def test_the_area_is_kept(parts: list[tuple[float, int]]) -> None:
    residency, now = Residency(), 0.0
    for seconds, running in parts:
        residency.add(now, now + seconds, running)
        now += seconds
    points = residency.points(now)
    assert len(points) <= POINTS
    ends = [*(start for start, _ in points[1:]), now]
    area = sum(level * (end - start) for (start, level), end in zip(points, ends, strict=True))
    assert area == pytest.approx(residency.area, rel=1e-9, abs=1e-12)
    assert residency.area == pytest.approx(sum(seconds * running for seconds, running in parts))
    assert residency.most == max(running for _, running in parts)
    assert all(level <= residency.most * (1 + 1e-9) for _, level in points)
