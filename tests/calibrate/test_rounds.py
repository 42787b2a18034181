"""Rounds: repeats at one point come together, a machine that changes between them is known by its rounds."""

import math
import random

import pytest

from calibrate.probes import Probe, ProbeRecord, Sample
from calibrate.rounds import between_calibrations, in_order, joined_rounds, moment_spread, round_name, typical_spread
from tests.calibrate import probe_worlds as worlds


def record(*seconds: tuple[float, ...], **of: float) -> ProbeRecord:
    """A point a tuple of repeats, numbered."""
    samples = tuple(Sample(at={"x": x}, seconds=each) for x, each in enumerate(seconds))
    return ProbeRecord(samples=samples, took_s=of.get("took_s", 0.0))


def moments(spread: float, *, points: int, rounds: int, seed: int) -> dict[str, ProbeRecord]:
    """A probe whose every round lies off by a factor of its own, log-normal with `spread`."""
    noise = random.Random(seed)  # noqa: S311
    made = {
        round_name("read", number): record(*[(math.exp(noise.gauss(0, spread)),) * 3 for _ in range(points)])
        for number in range(rounds)
    }
    return joined_rounds(made)


def test_repeats_of_all_rounds_come_together_at_their_point() -> None:
    joined = joined_rounds(
        {"read": record((1.0, 2.0), (5.0,), took_s=1.0), "read@2": record((3.0,), took_s=2.0), "copy": record((7.0,))}
    )
    assert list(joined) == ["read", "copy"]
    first, second = joined["read"].samples
    assert (first.seconds, first.rounds, first.round_medians_s) == ((1.0, 2.0, 3.0), (2, 1), (1.5, 3.0))
    assert second.seconds == (5.0,)  # left out of the second round
    assert joined["read"].took_s == 3.0
    assert joined["copy"] == record((7.0,))
    joined = joined_rounds({"read": record((1.0,)), "read@2": record((1.0,), (2.0,))})
    assert [sample.seconds for sample in joined["read"].samples] == [(1.0, 1.0), (2.0,)]
    records = worlds.records() | {"vram_read@end": worlds.records()["vram_read"]}
    assert joined_rounds(records) == records


@pytest.mark.parametrize("rounds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_the_spread_between_moments_is_found_back(spread: float, rounds: int) -> None:
    joined = moments(spread, points=400, rounds=rounds, seed=rounds)
    assert moment_spread(joined["read"].samples) == pytest.approx(spread, rel=0.12)
    assert typical_spread(joined) == pytest.approx(spread, rel=0.12)


def test_a_probe_that_found_something_else_does_not_widen_what_is_typical() -> None:
    steady = moments(0.02, points=400, rounds=2, seed=3)["read"]
    wild = moments(0.5, points=40, rounds=2, seed=4)["read"]
    assert typical_spread({"read": steady, "disk": wild}) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("rounds", [2, 3])
def test_two_calibrations_differ_by_what_the_rounds_of_one_say(rounds: int) -> None:
    ones, others = (moments(0.05, points=400, rounds=rounds, seed=seed)["read"].samples for seed in (1, 2))
    apart = [
        math.log(sum(one.round_medians_s) / sum(other.round_medians_s)) for one, other in zip(ones, others, strict=True)
    ]
    seen = math.sqrt(sum(each**2 for each in apart) / len(apart))
    said = between_calibrations(ones, moment_spread(ones))
    assert said == pytest.approx(seen, rel=0.12)


def test_a_probe_of_one_round_takes_the_spread_of_the_others_and_without_rounds_nothing_is_said() -> None:
    samples = worlds.records()["vram_read"].samples
    assert moment_spread(samples) == typical_spread(worlds.records()) == between_calibrations(samples, 0.0) == 0.0
    once, steady = Sample(at={}, seconds=(1.0,)), Sample(at={}, seconds=(1.0, 1.0), rounds=(1, 1))
    assert between_calibrations([once], 0.1) == pytest.approx(0.1 * math.sqrt(2))
    assert between_calibrations([steady], 0.1) >= 0.1 / math.sqrt(2)  # two rounds may agree by chance


def test_later_rounds_run_every_probe_and_all_kinds_soon() -> None:
    probes = [Probe(name=str(number), run=lambda _context: []) for number in range(8)]
    assert in_order(probes, 0) == probes
    later = in_order(probes, 1)
    assert sorted(probe.name for probe in later) == [probe.name for probe in probes]
    assert [probe.name for probe in later[:3]] == ["0", "3", "6"]
