"""The shipped H200 over cache formats: rates are what raw samples make, and predict what they never saw."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.build import Evidence, instructions_roof
from calibrate.format_grid import FORMATS
from calibrate.live import validate_measured
from calibrate.measurements import shipped_measurements
from calibrate.probes import Machine
from hwprofiles import load_profile
from hwprofiles.store import DATA
from tests.calibrate.test_shipped_calibration import MACHINE, differences, probes, read
from tests.gpu.format_rates import rates
from twin.engines.twin import INLINE

pytestmark = pytest.mark.skipif(
    not (DATA / MACHINE / "format_rates.json").exists(), reason="these kernels were not measured on the H200 yet"
)

MEDIAN, P95, COVERAGE = 0.04, 0.12, (0.8, 0.97)
"""Errors that the held-out cases of formats must keep below, and how often their intervals must hold."""

LEAST_CASES = 120
FITTED = 1e-5
"""What a search's end may differ by from one version of its library to another."""


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    """The record of `tests/gpu/format_rates.py`."""
    return read("format_rates.json")


def test_rates_are_what_their_raw_samples_make(suite: dict[str, Any]) -> None:
    machine, records = msgspec.convert(suite["machine"], Machine), probes(suite)
    evidence = Evidence(machine=machine, records=records, date=suite["date"])
    profile = load_profile(MACHINE)
    kernels, fitted = rates(evidence, replace(profile, kernels={}))
    made = {"kernels": kernels, "fitted": fitted, "gpu": instructions_roof(evidence)}
    for part, value in made.items():
        assert list(differences(json.loads(json.dumps(value)), suite[part], rel=FITTED)) == []


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
