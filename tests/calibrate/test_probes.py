"""Probes: how samples summarise themselves, how many repeats fit, and one real pass over some of them on the CPU."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.machine.description import describe
from calibrate.probes import Context, Sample, WrongData, all_probes
from calibrate.probes.probe import check
from tests.calibrate import probe_worlds as worlds

TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="torch is not installed")


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


def test_a_sample_is_its_median_and_an_outlier_is_no_spread() -> None:
    sample = Sample(at={"x": 1}, seconds=(1.0, 1.01, 1.02, 1.03, 9.0))
    assert sample.median_s == 1.02
    assert sample.n == 5
    assert Sample(at={"x": 1}, seconds=(1.0,) * 9 + (9.0,)).spread == 0.0


def test_a_sample_without_time_is_none() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Sample(at={"x": 1}, seconds=(0.0,))


def test_a_wrong_result_is_worth_nothing() -> None:
    assert check("gather", right=True, how="equal") == "equal"
    with pytest.raises(WrongData, match="gather: the result is wrong"):
        check("gather", right=False, how="equal")


def test_quick_work_is_repeated_often_and_slow_work_twice() -> None:
    quick, slow = Clock(1e-4), Clock(0.05)
    assert len(context(quick).seconds(lambda: None)) == 9
    assert len(context(slow).seconds(lambda: None)) == 3
    assert len(context(slow, estimate_s=0.1).seconds(lambda: None)) == 2


def test_rounds_share_the_repeats_and_long_work_is_run_once_in_each() -> None:
    quick, slow = Clock(1e-4), Clock(0.1)
    assert len(context(quick, rounds=2).seconds(lambda: None)) == 5
    assert len(context(quick, rounds=3).seconds(lambda: None)) == 3
    assert context(slow, rounds=2).seconds(lambda: None, per=4) == (0.025,)
    assert slow.asked == [1, 1]  # the first is not timed


def test_seconds_are_divided_by_what_one_run_did() -> None:
    assert context(Clock(0.012)).seconds(lambda: None, per=12)[0] == pytest.approx(0.001)


def test_a_late_probe_leaves_points_out_and_counts_them() -> None:
    late = context(Clock(0.0), estimate_s=0.01)
    done = []
    for point in late.points(range(5)):
        done.append(point)
        time.sleep(0.02)
    assert done == [0]
    assert late.left_out == 4


def test_sizes_stay_within_their_share_of_free_memory() -> None:
    assert context(None).fitting([1, 2, 4, 8], free_bytes=10, share=0.5) == [1, 2, 4]


@needs_torch
def test_every_probe_has_a_name_of_its_own_and_a_reason_or_none() -> None:
    probes = all_probes()
    names = [probe.name for probe in probes]
    assert len(set(names)) == len(names)
    cpu = worlds.machine(device="cpu")
    for probe in probes:
        assert isinstance(probe.supported(cpu), str)
        assert 0 < probe.estimate_s(quick=True) <= probe.estimate_s(quick=False)
    assert {probe.name for probe in probes if probe.supported(cpu)} >= {
        "launch",
        "host_register",
        "decode_gather.host4k",
    }


@needs_torch
def test_the_estimates_keep_quick_below_3_and_full_below_10_minutes() -> None:
    for device in ("cuda:0", "cpu"):
        machine = worlds.machine(device=device)
        running = [probe for probe in all_probes() if not probe.supported(machine)]
        assert sum(probe.estimate_s(quick=True) for probe in running) < 170
        assert sum(probe.estimate_s(quick=False) for probe in running) < 600


@needs_torch
@pytest.mark.parametrize(
    "name", ["host_to_device_gather", "disk_random_read", "decode_gather.host", "prefill_attention.vram"]
)
def test_a_probe_runs_on_the_cpu_and_checks_its_result(tmp_path: Path, name: str) -> None:
    from realkernels.device import open_device

    machine = describe("cpu", dtype="fp16")
    backend = open_device("cpu")
    probe = next(probe for probe in all_probes() if probe.name == name)
    samples = probe.run(
        Context(machine=machine, backend=backend, folder=tmp_path, quick=True, estimate_s=0.01)  # the first point only
    )
    assert samples
    assert all(sample.median_s > 0 and sample.checked for sample in samples)
    assert list(tmp_path.iterdir()) == []
