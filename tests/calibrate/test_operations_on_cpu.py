"""Every operation of the table with its real kernels on this processor: timed when right, refused when broken."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calibrate.machine.description import describe
from calibrate.operations import timing
from calibrate.operations.operation import Operation, Point
from calibrate.operations.table import OPERATIONS
from calibrate.operations.timing import Measured, measured
from calibrate.probes import CannotRun, Context, Pace, WrongData, all_probes

pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")

SMALL: dict[str, Point] = {
    "decode_step": {"ctx_tokens": 2_305, "layers": 2}, "decode_select": {"ctx_tokens": 2_305, "layers": 2},
    "decode_gather": {"ctx_tokens": 2_307, "layers": 2}, "prefill_select": {"ctx_tokens": 2_560, "q_tokens": 8},
    "prefill_attention": {"ctx_tokens": 2_560, "q_tokens": 8},
}  # fmt: skip
"""Sizes that a test can wait for, in place of a table's own."""


def small(operation: Operation) -> Iterator[Point]:
    """One point of each kind: every placement, format and way of copying."""
    points = [*operation.calibrated.cpu_quick]
    points += [point for held_out in operation.held_out.values() for point in held_out.cpu_quick]
    seen = set()
    for point in points:
        kind = tuple(value for value in point.values() if isinstance(value, str))
        if kind not in seen:
            seen.add(kind)
            bucket = {"bucket_tokens": 1_024} if "bucket_tokens" in point else {}
            yield {**point, **SMALL.get(operation.name, {}), **bucket}


EVERY = [(operation, point) for operation in OPERATIONS for point in small(operation)]
ONE_EACH = list({operation.name: (operation, point) for operation, point in reversed(EVERY)}.values())


@pytest.fixture(autouse=True)
def _small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TABLE_ROWS", 2**12)


def context(folder: Path, **changes: Any) -> Context:
    from realkernels.device import CpuDevice

    fields = {"machine": describe("cpu", dtype="fp16"), "folder": folder, "quick": True, "pace": Pace(0.0, 1, 1)}
    return Context(backend=CpuDevice(threads=1), **fields | changes)


def ids(pair: Any) -> str:
    return pair[0].id(pair[1])


@pytest.mark.parametrize("pair", EVERY, ids=ids)
def test_it_is_timed_and_right_and_leaves_nothing_behind(tmp_path: Path, pair: tuple[Operation, Point]) -> None:
    operation, point = pair
    (made,) = measured(context(tmp_path), [(operation, point)], whole=True)
    assert isinstance(made, Measured)
    assert made.sample.median_s > 0
    assert made.error <= operation.worst_error(point)
    assert made.sample.at == point
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pair", ONE_EACH, ids=ids)
def test_a_kernel_that_does_nothing_is_noticed_before_and_after_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Operation, Point]
) -> None:
    operation, point = pair
    made = timing._call

    def idle(*given: Any) -> Any:
        call = made(*given)
        call.run = lambda: None
        return call

    monkeypatch.setattr(timing, "_call", idle)
    with pytest.raises(WrongData, match="the result is wrong after timing"):
        list(measured(context(tmp_path), [(operation, point)], whole=True))


def test_every_probe_of_the_table_runs_here_or_says_why_not(tmp_path: Path) -> None:
    machine = describe("cpu", dtype="fp16")
    probes = {probe.name: probe for probe in all_probes()}
    assert "CUDA" in probes["compiled_kernels"].supported(machine)
    assert "CUDA" in probes["decode_gather.host4k"].supported(machine)
    made = context(tmp_path, estimate_s=0.0)
    (sample,) = probes["decode_format.q8_0"].run(made)
    assert (sample.at["format"], sample.at["heads"]) == ("q8_0", "8x2x64")
    assert made.left_out > 0


def test_a_format_without_a_kernel_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoKernel(RuntimeError):
        """As the kernels' room calls it."""

    def refuse(*_given: Any) -> Any:
        raise NoKernel("the kernel of q4_0 is not there")

    monkeypatch.setattr(timing, "_call", refuse)
    probe = next(probe for probe in all_probes() if probe.name == "decode_format.q4_0")
    with pytest.raises(CannotRun, match="q4_0 is not there"):
        probe.run(context(tmp_path))


def test_without_flash_attention_a_probe_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realkernels.timed.library.flash_missing", lambda *_given, **_named: "no flash attention: sm75")
    for name in ("prefill_dense", "decode_dense"):
        probe = next(probe for probe in all_probes() if probe.name == name)
        with pytest.raises(CannotRun, match="sm75"):
            probe.run(context(tmp_path))
