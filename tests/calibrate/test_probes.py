"""Probes: how samples summarise themselves, how many repeats fit, and what all of them say of themselves."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.probes import Context, Sample, WrongData, all_probes, check
from tests.calibrate import probe_worlds as worlds


class Clock:
    """A backend whose work takes as long as it says."""

    def __init__(self, seconds: float) -> None:
        self.once = seconds
        self.asked: list[int] = []

    def seconds(self, work: Callable[[], object], *, repeats: int, warm_up: int = 3, before: Any = None) -> list[float]:
        """What every repeat took."""
        del work, before
        self.asked.append(repeats)
        time.sleep(self.once * (repeats + warm_up))
        return [self.once] * repeats


def context(backend: Any, **changes: Any) -> Context:
    fields: dict[str, Any] = {"machine": worlds.machine(), "folder": Path(), "quick": True, "estimate_s": 10.0}
    return Context(backend=backend, **fields | changes)


def test_a_sample_is_its_median_an_outlier_is_no_spread_and_a_wrong_result_worth_nothing() -> None:
    sample = Sample(at={"x": 1}, seconds=(1.0, 1.01, 1.02, 1.03, 9.0))
    assert (sample.median_s, sample.n) == (1.02, 5)
    assert Sample(at={"x": 1}, seconds=(1.0,) * 9 + (9.0,)).spread == 0.0
    with pytest.raises(ValueError, match="above 0"):
        Sample(at={"x": 1}, seconds=(0.0,))
    assert check("gather", right=True, how="equal") == "equal"
    with pytest.raises(WrongData, match="gather: the result is wrong"):
        check("gather", right=False, how="equal")


def test_quick_work_is_repeated_often_slow_work_twice_and_rounds_share_the_repeats() -> None:
    quick, slow = Clock(1e-4), Clock(0.05)
    assert len(context(quick).seconds(lambda: None)) == 9
    assert len(context(slow).seconds(lambda: None)) == 3
    assert len(context(slow, estimate_s=0.1).seconds(lambda: None)) == 2
    assert len(context(quick, rounds=2).seconds(lambda: None)) == 5
    assert len(context(quick, rounds=3).seconds(lambda: None)) == 3
    slow = Clock(0.1)
    assert context(slow, rounds=2).seconds(lambda: None, per=4) == (0.025,)  # of one of what a run did
    assert slow.asked == [1, 1]  # the first is not timed


def test_a_late_probe_leaves_points_out_and_counts_them_and_sizes_stay_within_their_share_of_memory() -> None:
    late, done = context(Clock(0.0), estimate_s=0.01), []
    for point in late.points(range(5)):
        done.append(point)
        time.sleep(0.02)
    assert (done, late.left_out) == ([0], 4)
    assert late.fitting([1, 2, 4, 8], free_bytes=10, share=0.5) == [1, 2, 4]


def test_probes_have_names_of_their_own_reasons_and_estimates_below_3_minutes_quick_and_10_full() -> None:
    pytest.importorskip("torch")
    probes, cpu = all_probes(), worlds.machine(device="cpu")
    assert len({probe.name for probe in probes}) == len(probes)
    assert all(0 < probe.estimate_s(quick=True) <= probe.estimate_s(quick=False) for probe in probes)
    skipped = {probe.name for probe in probes if probe.supported(cpu)}
    assert skipped >= {"launch", "host_register", "decode_gather.host4k"}
    for machine in (worlds.machine(), cpu):
        running = [probe for probe in probes if not probe.supported(machine)]
        assert sum(probe.estimate_s(quick=True) for probe in running) < 180
        assert sum(probe.estimate_s(quick=False) for probe in running) < 600
