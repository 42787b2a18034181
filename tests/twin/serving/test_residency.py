"""The time line: never more than 512 points, and no sequence-second is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving.metrics import FIRST_BIN_S, POINTS, Residency

PARTS = st.lists(st.tuples(st.floats(1e-4, 1e4), st.integers(0, 300)), min_size=1, max_size=60)


@LAWS
@given(PARTS)
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


def test_bins_double_as_time_goes_by() -> None:
    residency = Residency()
    residency.add(0.0, POINTS * FIRST_BIN_S, 3)
    assert residency.bin_s == 2 * FIRST_BIN_S
    assert residency.points(POINTS * FIRST_BIN_S) == tuple(
        (index * 2 * FIRST_BIN_S, 3.0) for index in range(POINTS // 2)
    )


def test_idle_time_counts_as_nobody() -> None:
    residency = Residency()
    residency.add(8.0, 9.0, 4)
    levels = [level for _, level in residency.points(10.0)]
    assert sum(levels) * residency.bin_s == pytest.approx(4.0)
    assert levels[0] == levels[-1] == 0.0
