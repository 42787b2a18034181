"""Probes of prefill over quantised caches on this processor: what is timed is checked, wrong results are noticed."""

from pathlib import Path

import pytest

from calibrate.kernel_cases import KernelCase
from calibrate.probes import WrongData
from tests.calibrate.cpu_probes import context, probe_of

pytest.importorskip("torch")


def test_unpacking_is_checked_number_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = context(tmp_path)
    small, large = probe_of("format_expand").run(made)
    assert made.left_out > 0
    assert (small.at["format"], small.at["tokens"], large.at["tokens"]) == ("bf16", 256, 2_048)
    assert large.moved_bytes == 8 * small.moved_bytes
    assert "numbers are not torch's" in large.checked
    from realkernels.timed.prefill import Dequantise

    monkeypatch.setattr(Dequantise, "verify", lambda _self: 1e-6)
    with pytest.raises(WrongData, match="dequantising bf16"):
        probe_of("format_expand").run(context(tmp_path))


def test_a_chunk_is_checked_against_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = probe_of("format_prefill").run(context(tmp_path))
    assert (sample.at["format"], sample.at["rows"], sample.at["past"]) == ("bf16", 32, 1_024)
    assert sample.flops == 4 * 8 * 64 * (32 * 1_024 + 32 * 33 / 2)
    from realkernels.timed.prefill import AttendChunk

    monkeypatch.setattr(AttendChunk, "verify", lambda _self: 0.5)
    with pytest.raises(WrongData, match="relative error"):
        probe_of("format_prefill").run(context(tmp_path))


def test_a_case_of_a_chunk_is_measured() -> None:
    from calibrate.measure import Measurement
    from calibrate.measure_formats import measure_formats
    from realkernels.device import CpuDevice

    case = KernelCase(
        metric="prefill_format", tier="vram", ctx_tokens=300, layers=1, rows=7, format="q4_0", heads="4x2x64"
    )
    (found,) = measure_formats([case], CpuDevice(threads=1))
    assert isinstance(found, Measurement)
    assert found.error < 1e-5


@pytest.mark.parametrize(
    ("multiprocessors", "heads", "rows"), [(132, 24, 23 * 64), (108, 24, 19 * 64), (82, 24, 14 * 64), (12, 24, 0)]
)
def test_some_rows_leave_programs_alone_after_two_waves(multiprocessors: int, heads: int, rows: int) -> None:
    """Of 132: 22 blocks are two waves of 264, the 23rd has a multiprocessor for each of its 24. 24 fill 12 always."""
    from calibrate.probes.format_prefill import rows_with_some_alone

    assert rows_with_some_alone(multiprocessors, query_heads=heads) == rows
