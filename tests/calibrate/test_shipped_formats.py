"""The shipped H200 over cache formats: every kernel was measured and checked, and rates predict what they never saw."""

from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.format_grid import FORMATS
from calibrate.live import validate_measured
from calibrate.measurements import shipped_measurements
from calibrate.refit import FORMATS as RECORD
from calibrate.refit import probes
from hwprofiles import load_profile
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS
from twin.engines.twin import INLINE

MACHINE = "h200"

MEDIAN, P95, COVERAGE = 0.04, 0.12, (0.8, 0.97)
"""Errors that the held-out cases of formats must keep below, and how often their intervals must hold."""

LEAST_CASES = 120


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    """The record of `tests/gpu/format_rates.py`."""
    document: dict[str, Any] = read_json(RECORDS / MACHINE / RECORD)
    return document


def test_every_format_was_measured_and_checked(suite: dict[str, Any]) -> None:
    for name, record in probes(suite).items():
        assert record.samples, name
        assert (record.skipped, record.left_out) == ("", 0), name
    kernels = load_profile(MACHINE).kernels
    assert {f"attend_decode/twin/{name}" for name in FORMATS} <= set(kernels)
    assert {f"attend_decode/twin_inline/{name}" for name in INLINE} <= set(kernels)


def test_formats_are_predicted_where_nothing_was_calibrated() -> None:
    measured = shipped_measurements(MACHINE)
    rows = tuple(row for row in measured.rows if row.group == "formats")
    assert len(rows) >= LEAST_CASES
    assert {row.case.format for row in rows} == set(FORMATS)
    summary = validate_measured(replace(measured, rows=rows), load_profile(MACHINE)).summary.held_out
    assert summary.n == len(rows)
    assert summary.median_abs_error is not None
    assert summary.p95_abs_error is not None
    assert summary.coverage_90 is not None
    assert summary.median_abs_error <= MEDIAN
    assert summary.p95_abs_error <= P95
    assert COVERAGE[0] <= summary.coverage_90 <= COVERAGE[1]
