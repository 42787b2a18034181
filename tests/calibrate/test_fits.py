"""Fits: rates put into samples come out again, disturbed samples do not bend them, efficiencies stay at most 1."""

import random

import pytest

from calibrate.fits import (
    EVERY,
    HUBER,
    LEAST_LATENCY_S,
    AttendSample,
    attend_fit,
    latency_and_efficiency,
    latency_and_rate,
    queue_fit,
    solve,
)

SIZES = [2.0**power for power in range(16, 31, 2)]


def test_latency_and_rate_come_out_as_they_went_in() -> None:
    line = latency_and_rate([1.0] * 8, SIZES, [20e-6 + size / 50e9 for size in SIZES])
    assert line.latency_s == pytest.approx(20e-6, rel=1e-6)
    assert line.bytes_per_s == pytest.approx(50e9, rel=1e-6)
    assert line.spread < 1e-6


def test_one_disturbed_sample_does_not_bend_the_rate() -> None:
    seconds = [20e-6 + size / 50e9 for size in SIZES]
    seconds[5] *= 10
    line = latency_and_rate([1.0] * 8, SIZES, seconds)
    assert line.bytes_per_s == pytest.approx(50e9, rel=0.02)
    assert line.latency_s == pytest.approx(20e-6, rel=0.02)
    assert line.spread > 0.1


def test_noise_is_told_as_spread() -> None:
    noise = random.Random(7)  # noqa: S311
    seconds = [(20e-6 + size / 50e9) * noise.gauss(1.0, 0.02) for size in SIZES * 5]
    line = latency_and_rate([1.0] * 40, SIZES * 5, seconds)
    assert line.bytes_per_s == pytest.approx(50e9, rel=0.02)
    assert line.spread == pytest.approx(0.02, rel=0.4)


def test_no_latency_is_never_a_negative_one() -> None:
    line = latency_and_rate([1.0] * 8, SIZES, [size / 50e9 * (1 + size / 2**34) for size in SIZES])
    assert line.latency_s >= LEAST_LATENCY_S


def test_a_queue_tells_its_start_from_the_cost_of_one_more_copy() -> None:
    copies = [1, 4, 16, 64] * 3
    moved = [count * size for count, size in zip(copies, [2**20] * 4 + [2**22] * 4 + [2**24] * 4, strict=True)]
    seconds = [8e-6 + 1.5e-6 * count + size / 53e9 for count, size in zip(copies, moved, strict=True)]
    start, line = queue_fit(copies, moved, seconds)
    assert start == pytest.approx(8e-6, rel=1e-4)
    assert line.latency_s == pytest.approx(1.5e-6, rel=1e-4)
    assert line.bytes_per_s == pytest.approx(53e9, rel=1e-6)


def test_bounds_hold_where_the_samples_pull_beyond_them() -> None:
    found = solve([[1.0, 2.0, 3.0]], [1.0, 2.0, 3.0], least=[1.5])
    assert found.coefficients == pytest.approx((1.5,))
    assert all(residual == pytest.approx(0.5) for residual in found.residuals)


@pytest.mark.parametrize("seed", range(5))
def test_a_robust_fit_ends_where_nothing_pulls_any_more(seed: int) -> None:
    """Residuals within the limit pull by their size, others by the limit: at the end they cancel in each column."""
    noise = random.Random(seed)  # noqa: S311
    columns = [[1.0] * len(SIZES), SIZES]
    seconds = [(20e-6 + size / 50e9) * (1 + noise.gauss(0, 0.1)) for size in SIZES]
    found = solve(columns, seconds, least=[LEAST_LATENCY_S, 1e-15])
    held = [max(-HUBER, min(HUBER, residual)) for residual in found.residuals]
    for column, coefficient in zip(columns, found.coefficients, strict=True):
        pulls = [pull * coefficient * part / time for pull, part, time in zip(held, column, seconds, strict=True)]
        assert abs(sum(pulls)) < 1e-6 * sum(map(abs, pulls))


@pytest.mark.parametrize("apart", [0.0, 1e-9])
def test_columns_that_samples_cannot_tell_apart_share_what_they_explain(apart: float) -> None:
    """A latency and a rate from copies of one size: half each, and a last bit of a sample changes nothing."""
    sizes = [1e9 * (1 + apart * number) for number in range(6)]
    seconds = [1e-3 * (1 + 0.01 * (number % 3)) for number in range(6)]
    line = latency_and_rate([1.0] * 6, sizes, seconds)
    assert line.latency_s == pytest.approx(0.5e-3, rel=0.02)
    assert sizes[0] / line.bytes_per_s == pytest.approx(0.5e-3, rel=0.02)
    again = latency_and_rate([1.0] * 6, sizes, [time * (1 + 1e-12 * (-1) ** n) for n, time in enumerate(seconds)])
    assert (again.latency_s, again.bytes_per_s) == pytest.approx((line.latency_s, line.bytes_per_s), rel=1e-6)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        solve([[]], [], least=[0.0])


def test_latency_and_efficiency_give_the_samples_back() -> None:
    roofs = [1e-6, 8e-6, 64e-6, 256e-6]
    efficiency = [0.3, 0.5, 0.8, 0.9]
    seconds = [12e-6 + roof / share for roof, share in zip(roofs, efficiency, strict=True)]
    shape = latency_and_efficiency([1, 2, 3, 4], seconds, roofs, latency_s=12e-6)
    assert shape.efficiency == pytest.approx(efficiency)
    assert shape.spread < 1e-9


def test_a_regressed_latency_gives_the_samples_back_too() -> None:
    roofs = [1e-6, 8e-6, 64e-6, 256e-6]
    seconds = [12e-6 + roof / 0.8 for roof in roofs]
    shape = latency_and_efficiency([1, 2, 3, 4], seconds, roofs)
    assert shape.latency_s == pytest.approx(12e-6, rel=0.05)
    assert max(abs(residual) for residual in shape.residuals) < 1e-6


def test_a_latency_that_leaves_no_time_for_the_bytes_is_lowered() -> None:
    shape = latency_and_efficiency([1, 2], [10e-6, 20e-6], [4e-6, 15e-6], latency_s=9e-6)
    assert shape.latency_s == pytest.approx(5e-6)
    assert max(shape.efficiency) == pytest.approx(1.0)
    assert shape.spread < 1e-9


def test_quicker_than_the_roof_is_capped_and_told() -> None:
    shape = latency_and_efficiency([1, 2], [8e-6, 40e-6], [10e-6, 20e-6], latency_s=0.0)
    assert shape.efficiency == pytest.approx((1.0, 0.5))
    assert shape.residuals == pytest.approx((0.25, 0.0))
    assert shape.latency_s == 0.0


def test_samples_that_share_an_x_share_an_efficiency() -> None:
    shape = latency_and_efficiency([5, 5, 5, 9], [10.0, 11.0, 12.0, 4.0], [5.0, 5.0, 5.0, 4.0], latency_s=0.0)
    assert shape.at == (5, 9)
    assert shape.efficiency == pytest.approx((5 / 11, 1.0))


def attend_world(rows: float, buckets: int, *, per_row: dict[float, float]) -> AttendSample:
    """10 us a call, boundaries at 0.8 of their roof, copies at 0.9."""
    attend, merge = 1e-6 * rows / buckets, (2e-8 * rows if buckets > 1 else 0.0)
    copied = 3e-4 if buckets > 1 else 0.0
    seconds = buckets * (10e-6 + attend / per_row[rows] + merge / 0.8) + copied / 0.9
    return AttendSample(region=rows, buckets=buckets, attend_s=attend, merge_s=merge, copied_s=copied, seconds=seconds)


def test_attention_by_buckets_comes_apart_into_its_rates() -> None:
    per_row = {128.0: 0.3, 512.0: 0.45, 2048.0: 0.5}
    fit = attend_fit([attend_world(rows, b, per_row=per_row) for rows in per_row for b in (1, 4, 16, 64)])
    assert fit.latency_s == pytest.approx(10e-6, rel=1e-3)
    assert fit.efficiency == pytest.approx(tuple(per_row.values()), rel=1e-3)
    assert fit.merge_efficiency == pytest.approx(0.8, rel=1e-3)
    assert fit.copy_efficiency == pytest.approx(0.9, rel=1e-3)
    assert fit.regions == tuple(per_row)
    assert fit.spread < 1e-4


def test_in_place_alone_still_tells_a_latency_from_an_efficiency() -> None:
    per_row = {64.0: 0.4, 256.0: 0.4, 1024.0: 0.4}
    fit = attend_fit([attend_world(rows, 1, per_row=per_row) for rows in per_row])
    assert fit.latency_s == pytest.approx(10e-6, rel=0.02)
    assert fit.efficiency == pytest.approx((0.4, 0.4, 0.4), rel=0.01)
    assert fit.merge_efficiency == 1.0


def test_one_sample_of_attention_is_no_latency_of_its_own() -> None:
    fit = attend_fit([attend_world(64.0, 1, per_row={64.0: 0.4})])
    assert 0 < fit.efficiency[0] <= 1
    assert fit.latency_s <= 64e-6 / 0.4 + 10e-6


def test_a_law_that_misses_is_spread_over_all_samples_where_that_is_asked_for() -> None:
    columns = [[1.0] * 3]
    robust = solve(columns, [1.0, 1.0, 2.0], least=[0.0])
    plain = solve(columns, [1.0, 1.0, 2.0], least=[0.0], huber=EVERY)
    assert robust.coefficients[0] == pytest.approx(1.0, abs=0.03)
    assert plain.coefficients[0] == pytest.approx((1 + 1 + 0.5) / (1 + 1 + 0.25))
