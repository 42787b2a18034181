"""Measured kernel cases against predictions from calibrated rates: the same comparison, fresh or recorded."""

import math
from collections.abc import Sequence

from calibrate.kernel_cases import KernelCase, program_of
from calibrate.measurements import MeasuredRow, Measurements
from calibrate.validation import Comparison, Validation, validation_of
from hwprofiles import HardwareProfile
from hwprofiles.profile import CPU_CAPABILITY
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.formats import kv_format
from twin.prediction import Z90

TOLERANCES = {
    "cuda": (0.12, "twice the spread of repeated runs of such kernels over contexts that were not calibrated"),
    "host_prefill": (
        0.20,
        "another user of the shared server loaded the link in phases: samples of one row alternate between two levels "
        "up to 20 % apart, and the median of some rows fell on the slower one",
    ),
    "library": (0.16, "a library's matrix product and top-k, whose choice of kernel changes with the shape"),
    "format": (
        0.16,
        "few numbers a format stand for all contexts, batches and query tokens; some calls of two rounds of programs "
        "alternate between two levels up to 10 % apart",
    ),
    "open_tile": (
        0.25,
        "tokens of an open tile are read by one program after all of its others, with nothing loaded ahead: 7 us that "
        "show at short contexts, and calibration has whole tiles alone",
    ),
    "long_curve": (0.06, "decode of one machine from 8k to 3.1M: what a reader of the curve would notice"),
    "cpu": (0.40, "a processor shared with others: a run a minute later differs by as much; the median is what counts"),
}


def predict_case(case: KernelCase, profile: HardwareProfile, *, kv_dtype: str) -> tuple[Breakdown, float, float, float]:
    """(breakdown, seconds, low, high): the case's program on the machine, with its 90 % interval."""
    roofs = Roofs(profile)
    breakdown = Breakdown().run(program_of(case, kv_dtype=kv_dtype), roofs)
    factor = math.exp(Z90 * breakdown.spread_s(roofs) / breakdown.seconds)
    return (
        breakdown,
        breakdown.seconds,
        max(breakdown.seconds / factor, breakdown.floor_s()),
        breakdown.seconds * factor,
    )


def validate_measured(measurements: Measurements, profile: HardwareProfile) -> Validation:
    """Every measured row against its prediction; nothing of the profile was fitted on any of them."""
    return validation_of(profile.name, compare_rows(measurements.rows, profile, kv_dtype=measurements.kv_dtype))


def compare_rows(rows: Sequence[MeasuredRow], profile: HardwareProfile, *, kv_dtype: str) -> list[Comparison]:
    """One comparison a row."""
    return [_compare(row, profile, kv_dtype) for row in rows]


def _kind(row: MeasuredRow, profile: HardwareProfile) -> str:
    if profile.gpu.compute_capability == CPU_CAPABILITY:
        return "cpu"
    if row.group == "formats":
        if row.case.metric != "decode_format":
            return "cuda"
        return "open_tile" if row.case.ctx_tokens % kv_format(row.case.format).tile_tokens else "format"
    if row.group != "grid":
        return "long_curve"
    if row.case.metric == "prefill_select":
        return "library"
    return "host_prefill" if row.case.metric == "prefill_attention" and row.case.tier == "host" else "cuda"


def _compare(row: MeasuredRow, profile: HardwareProfile, kv_dtype: str) -> Comparison:
    breakdown, seconds, low, high = predict_case(row.case, profile, kv_dtype=kv_dtype)
    error = (seconds - row.median_s) / row.median_s
    tolerance, reason = TOLERANCES[_kind(row, profile)]
    prefix = "curve." if row.group == "long_curve" else ""
    return Comparison(
        id=f"{profile.name}.{prefix}{row.case.id}",
        machine=profile.name,
        metric=row.case.metric,
        unit="s",
        predicted=seconds,
        low=low,
        high=high,
        measured=row.median_s,
        error=error,
        naive_error=(breakdown.naive_s() - row.median_s) / row.median_s,
        role="held_out",
        tolerance=tolerance,
        within=abs(error) <= tolerance,
        measured_low=row.median_s,
        measured_high=row.median_s,
        tolerance_reason=reason,
        wall=breakdown.bound(),
        also={"link_bytes_predicted": breakdown.link_bytes, "link_bytes_measured": float(row.link_bytes)},
    )
