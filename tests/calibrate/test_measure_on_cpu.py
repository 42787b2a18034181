"""Measuring the real kernels of this processor: right ones are timed, broken ones are noticed."""

from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.kernel_cases import DECODE, KernelCase
from calibrate.measure import LEAST_REPEATS, Measurement, WrongResult, measure
from tests.calibrate.test_measure import CHUNK, EVERY, GATHER, SELECT, STAGED, STEP, only


@pytest.fixture(scope="module")
def cpu() -> Any:
    """The real kernels on this processor."""
    pytest.importorskip("torch")
    from realkernels.device import CpuDevice

    return CpuDevice(threads=1)


@pytest.fixture
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calibrate.measure.LEAST_MEASURED_S", 0.0)


def small(case: KernelCase) -> KernelCase:
    """The same on a context of a few thousand tokens, which a test can wait for."""
    if case.metric in DECODE:
        return replace(case, ctx_tokens=2_305, layers=1)
    return replace(case, ctx_tokens=2_560, rows=8, bucket_tokens=1_024 if case.mode == "staged" else 0)


REAL = [small(case) for case in (*EVERY, replace(GATHER, tier="host"), replace(STAGED, copies="serial"))]


@pytest.mark.usefixtures("_few_repeats")
def test_the_kernels_of_this_processor_are_measured_and_right(cpu: Any) -> None:
    outcomes = list(measure(REAL, cpu))
    assert {outcome.case for outcome in outcomes} == set(REAL)
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        assert len(outcome.samples_s) == -(-LEAST_REPEATS // cpu.rounds)
        assert min(outcome.samples_s) > 0
        assert outcome.error < 2e-3
        assert (outcome.error > 0) == (not outcome.case.metric.endswith("select"))  # a selection is right or wrong
        assert outcome.link_bytes == (2_560 * 2_048 if outcome.case.mode == "staged" else 0)


@pytest.mark.usefixtures("_few_repeats")
def test_a_backbone_runs_before_each_layer(cpu: Any) -> None:
    case = replace(small(STEP), layers=2, backbone_bytes=2**20)
    assert only(case, cpu).case == case


@pytest.mark.usefixtures("_few_repeats")
@pytest.mark.parametrize(
    ("case", "kernel"),
    [(small(STEP), "PlaneGather.run"), (small(GATHER), "PlaneGather.run"), (small(CHUNK), "ChunkAttention.run")],
    ids=lambda value: value.id if isinstance(value, KernelCase) else value,
)
def test_a_kernel_that_does_nothing_is_a_wrong_result(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, case: KernelCase, kernel: str
) -> None:
    monkeypatch.setattr(f"realkernels.kernels.in_torch.{kernel}", lambda *_args, **_named: None)
    with pytest.raises(WrongResult):
        only(case, cpu)


@pytest.mark.usefixtures("_few_repeats")
def test_a_selection_of_the_worst_is_a_wrong_result(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from realkernels.kernels import in_torch

    best = in_torch.best_blocks
    monkeypatch.setattr(in_torch, "best_blocks", lambda scores, selected: best(-scores, selected))
    with pytest.raises(WrongResult):
        only(small(SELECT), cpu)
