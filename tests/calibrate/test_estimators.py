"""Estimators: rates put into samples come out, disturbed samples do not bend them, efficiencies stay at most 1."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.build import copies_line
from calibrate.estimators import Rates, Timing, exact, latency_of_sizes, least_squares, streamed
from calibrate.searches import EVERY, HUBER, solve
from hwprofiles.profile import LEAST_LATENCY_S
from tests.calibrate import probe_worlds as worlds
from twin.operations.ops import Engine, Op

SIZES = [2.0**power for power in range(16, 31, 2)]
GPU: Any = SimpleNamespace(instructions=None, sm_count=100)


def line(sizes: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """(latency, rate, spread) of copies."""
    found = solve([[1.0] * len(sizes), sizes], seconds, least=[LEAST_LATENCY_S, 1e-15])
    return found.coefficients[0], 1 / found.coefficients[1], found.spread


def timing(x: float, seconds: float, roof_s: float, *, calls: float = 1, joint_s: tuple[float, ...] = ()) -> Timing:
    op = Op(part="x", engine=Engine.SM, device=0, kernel="x/y/z", grain=x, flops=roof_s)
    return Timing(worlds.sample(seconds * calls), op, calls, seconds, roof_s, 0.0, joint_s, {})


def exactly(x: list[float], seconds: list[float], roofs: list[float], **given: Any) -> Rates:
    return exact([timing(*each) for each in zip(x, seconds, roofs, strict=True)], **given)


# Solving


def test_latency_and_rate_come_out_as_they_went_in_noise_is_spread_and_one_disturbed_sample_bends_nothing() -> None:
    seconds = [20e-6 + size / 50e9 for size in SIZES]
    assert line(SIZES, seconds) == pytest.approx((20e-6, 50e9, 0.0), rel=1e-6, abs=1e-6)
    noise = random.Random(7)  # noqa: S311
    _, rate, spread = line(SIZES * 5, [second * noise.gauss(1.0, 0.02) for second in seconds * 5])
    assert rate == pytest.approx(50e9, rel=0.02)
    assert spread == pytest.approx(0.02, rel=0.4)
    seconds[5] *= 10
    latency, rate, spread = line(SIZES, seconds)
    assert (latency, rate) == pytest.approx((20e-6, 50e9), rel=0.02)
    assert spread > 0.1


def test_a_queue_tells_its_start_from_the_cost_of_one_more_copy() -> None:
    queues = [(count, count * size) for size in (2**20, 2**22, 2**24) for count in (1, 4, 16, 64)]
    start, found = copies_line(
        [worlds.sample(8e-6 + 1.5e-6 * count + moved / 53e9, moved=moved, copies=count) for count, moved in queues]
    )
    assert (start, found.latency_s) == pytest.approx((8e-6, 1.5e-6), rel=1e-4)
    assert found.bytes_per_s == pytest.approx(53e9, rel=1e-6)


def test_bounds_hold_where_the_samples_pull_beyond_them_and_nothing_to_fit_is_refused() -> None:
    found = solve([[1.0, 2.0, 3.0]], [1.0, 2.0, 3.0], least=[1.5])
    assert found.coefficients == pytest.approx((1.5,))
    assert found.residuals == pytest.approx((0.5,) * 3)
    with pytest.raises(ValueError, match="no samples"):
        solve([[]], [], least=[0.0])


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
    latency, rate, _ = line(sizes, seconds)
    assert (latency, sizes[0] / rate) == pytest.approx((0.5e-3, 0.5e-3), rel=0.02)
    again = line(sizes, [time * (1 + 1e-12 * (-1) ** number) for number, time in enumerate(seconds)])
    assert again[:2] == pytest.approx((latency, rate), rel=1e-6)


def test_a_law_that_misses_is_spread_over_all_samples_where_that_is_asked_for() -> None:
    robust, plain = (solve([[1.0] * 3], [1.0, 1.0, 2.0], least=[0.0], huber=limit) for limit in (HUBER, EVERY))
    assert robust.coefficients[0] == pytest.approx(1.0, abs=0.03)
    assert plain.coefficients[0] == pytest.approx((1 + 1 + 0.5) / (1 + 1 + 0.25))


# Exact


def test_a_known_or_regressed_latency_and_efficiencies_give_the_samples_back() -> None:
    roofs, efficiency = [1e-6, 8e-6, 64e-6, 256e-6], [0.3, 0.5, 0.8, 0.9]
    seconds = [12e-6 + roof / share for roof, share in zip(roofs, efficiency, strict=True)]
    known = exactly([1, 2, 3, 4], seconds, roofs, latency_s=12e-6)
    assert known.efficiency == pytest.approx(efficiency)
    assert known.spread < 1e-9
    alike = exactly([1, 2, 3, 4], [12e-6 + roof / 0.8 for roof in roofs], roofs)
    assert alike.latency_s == pytest.approx(12e-6, rel=0.05)
    assert max(map(abs, alike.residuals)) < 1e-6


def test_a_latency_that_leaves_no_time_for_the_bytes_is_lowered_unless_it_is_kept() -> None:
    given = ([1, 2], [10e-6, 20e-6], [4e-6, 15e-6])
    lowered, kept = exactly(*given, latency_s=9e-6), exactly(*given, latency_s=9e-6, keep=True)
    assert (lowered.latency_s, max(lowered.efficiency)) == pytest.approx((5e-6, 1.0))
    assert lowered.spread < 1e-9
    assert kept.latency_s == 9e-6
    assert kept.efficiency == (1.0, 1.0)


def test_what_is_quicker_than_the_roof_is_capped_and_told_and_samples_that_share_an_x_share_an_efficiency() -> None:
    rates = exactly([1, 2], [8e-6, 40e-6], [10e-6, 20e-6], latency_s=0.0)
    assert rates.efficiency == pytest.approx((1.0, 0.5))
    assert rates.residuals == pytest.approx((0.25, 0.0))
    assert "latency" not in rates.entry("x", {})
    rates = exactly([5, 5, 5, 9], [10.0, 11.0, 12.0, 4.0], [5.0, 5.0, 5.0, 4.0], latency_s=0.0)
    assert rates.at == (5, 9)
    assert rates.efficiency == pytest.approx((5 / 11, 1.0))


def test_a_latency_of_sizes_is_told_by_the_first_place_that_has_several() -> None:
    sized = [timing(3, 5e-6 + roof / 2.0, roof) for roof in (1e-6, 4e-6)]  # in steps quicker than the roof
    assert latency_of_sizes([timing(1, 1.0, 1.0), timing(9, 1.0, 1.0), *sized]) == pytest.approx(5e-6, rel=1e-3)
    assert latency_of_sizes([timing(1, 1.0, 1.0), timing(2, 1.0, 1.0)]) is None


def test_streaming_begins_with_a_latency_and_one_size_is_all_efficiency() -> None:
    rates = streamed([timing(x, 5e-6 + x * 1e-6 / share, x * 1e-6) for x, share in ((1, 0.5), (8, 0.5), (64, 0.8))])
    assert rates.latency_s == pytest.approx(5e-6)
    assert (rates.at, rates.efficiency) == ((1, 8, 64), pytest.approx((0.5, 0.5, 0.8)))
    alone = streamed([timing(1, 10e-6, 4e-6)])
    assert (alone.latency_s, alone.efficiency) == (0, pytest.approx((0.4,)))


# Least squares


def staged(region: float, buckets: int, *, share: float) -> Timing:
    """10 us a call, boundaries at 0.8 of their roof, copies at 0.9."""
    roof, joint = 1e-6 * region / buckets, (2e-8 * region, 3e-4 / buckets) if buckets > 1 else (0.0, 0.0)
    return timing(region, 10e-6 + roof / share + joint[0] / 0.8 + joint[1] / 0.9, roof, calls=buckets, joint_s=joint)


def test_attention_by_buckets_comes_apart_into_its_rates() -> None:
    shares = {128.0: 0.3, 512.0: 0.45, 2048.0: 0.5}
    made = [staged(region, buckets, share=share) for region, share in shares.items() for buckets in (1, 4, 16, 64)]
    rates = least_squares(made, gpu=GPU)
    assert rates.latency_s == pytest.approx(10e-6, rel=1e-3)
    assert (rates.at, rates.efficiency) == (tuple(shares), pytest.approx(tuple(shares.values()), rel=1e-3))
    assert rates.beside == pytest.approx((0.8, 0.9), rel=1e-3)
    assert rates.spread < 1e-4


def test_in_place_alone_still_tells_a_latency_from_an_efficiency_and_one_sample_tells_none() -> None:
    rates = least_squares([staged(region, 1, share=0.4) for region in (64.0, 256.0, 1024.0)], gpu=GPU)
    assert rates.latency_s == pytest.approx(10e-6, rel=0.02)
    assert rates.efficiency == pytest.approx((0.4,) * 3, rel=0.01)
    assert rates.beside == (1.0, 1.0)
    alone = least_squares([timing(64, 10e-6, 4e-6)], gpu=GPU)
    assert (alone.latency_s, alone.efficiency) == (0.0, pytest.approx((0.4,)))
    (share,) = least_squares([staged(64.0, 1, share=0.4)], gpu=GPU).efficiency
    assert 0 < share <= 1
