"""Measured cases against predictions, recorded or fresh: `twin validate --device` measures, compares and records."""

import datetime
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from calibrate.machine.description import Machine, describe, open_checked
from calibrate.measure import measure, measured_in_rounds
from calibrate.measurements import SCHEMA, LeftOutRow, MeasuredRow, Measurements
from calibrate.operations.operation import KV_DTYPE, Tolerance
from calibrate.operations.shared import CPU, LONG_CURVE
from calibrate.operations.table import GROUPS, Case, held_out_cases
from calibrate.probes import WrongData
from calibrate.validation import Comparison, Skipped, Validation, validation_of
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import CPU_CAPABILITY
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import Impossible
from twin.prediction import Z90

Progress = Callable[[int, int, str], None]
"""Called with (cases done, cases in all, id of the next)."""


def predict_case(case: Case, profile: HardwareProfile, *, kv_dtype: str) -> tuple[Breakdown, float, float, float]:
    """(breakdown, seconds, low, high): the case's program on the machine, with its 90 % interval."""
    roofs = Roofs(profile)
    breakdown = Breakdown().run(case.program(kv_dtype), roofs)
    factor = math.exp(Z90 * breakdown.spread_s(roofs) / breakdown.seconds)
    low = max(breakdown.seconds / factor, breakdown.floor_s())
    return breakdown, breakdown.seconds, low, breakdown.seconds * factor


def validate_measured(measurements: Measurements, profile: HardwareProfile) -> Validation:
    """Every measured row against its prediction; nothing of the profile was fitted on any of them."""
    cases = [compare(row, profile, kv_dtype=measurements.kv_dtype) for row in measurements.rows]
    return validation_of(profile.name, cases)


def tolerance_of(row: MeasuredRow, profile: HardwareProfile) -> Tolerance:
    """How far a prediction may be off: by the operation, but for a processor and the long curve."""
    if profile.gpu.compute_capability == CPU_CAPABILITY:
        return CPU
    return LONG_CURVE if row.group == "long_curve" else row.case.row.tolerance(row.case.at)


def compare(row: MeasuredRow, profile: HardwareProfile, *, kv_dtype: str) -> Comparison:
    """A row and what is predicted for it."""
    breakdown, seconds, low, high = predict_case(row.case, profile, kv_dtype=kv_dtype)
    error = (seconds - row.median_s) / row.median_s
    tolerance = tolerance_of(row, profile)
    prefix = "curve." if row.group == "long_curve" else ""
    return Comparison(
        id=f"{profile.name}.{prefix}{row.case.id}", machine=profile.name, metric=row.case.operation, unit="s",
        predicted=seconds, low=low, high=high,
        measured=row.median_s, measured_low=row.median_s, measured_high=row.median_s,
        error=error, naive_error=(breakdown.naive_s() - row.median_s) / row.median_s, role="held_out",
        within=abs(error) <= tolerance.share, tolerance=tolerance.share, tolerance_reason=tolerance.reason,
        wall=breakdown.bound(),
        also={"link_bytes_predicted": breakdown.link_bytes, "link_bytes_measured": float(row.link_bytes)},
    )  # fmt: skip


# Here and now


def validate_live(
    hw: str, device: str, *, quick: bool, groups: Sequence[str], progress: Progress
) -> tuple[Validation, Measurements]:
    """Measure the table's cases of some groups on `device` and compare with `hw`.

    Raises Impossible where the device is not there, is another machine than the profile's, or computes wrong results.
    """
    profile = load_profile(hw)
    backend = open_checked(device, Impossible)
    machine = describe("cpu" if device == "cpu" else str(backend.device), dtype=KV_DTYPE)
    check_same_machine(profile, machine)
    cases = {
        group: list(held_out_cases(group, cuda=machine.is_cuda, quick=quick)) for group in GROUPS if group in groups
    }
    left = [
        LeftOutRow(case=case, reason=reason)
        for own in cases.values() for case in own
        if (reason := case.row.supported(case.at, machine) or case.missing_rate(profile, machine.dtype))
    ]  # fmt: skip
    unable = {row.case.id for row in left}
    able = {group: [case for case in own if case.id not in unable] for group, own in cases.items()}
    command = f"twin validate --device {device}{' --quick' if quick else ''}"
    begun, total = count(), backend.rounds * sum(map(len, able.values()))
    rows: list[MeasuredRow] = []
    try:
        for group, own in able.items():
            run = partial(
                measure, own, backend, machine, group=group,
                progress=lambda case: progress(next(begun), total, case.id),
            )  # fmt: skip
            for outcome in measured_in_rounds(run, backend.rounds):
                (left if isinstance(outcome, LeftOutRow) else rows).append(outcome)  # type: ignore[arg-type]
    except WrongData as wrong:
        raise Impossible(str(wrong)) from None
    if not rows:
        raise Impossible(f"nothing could be measured: {left[0].reason if left else 'there are no such cases'}")
    made = Measurements(
        schema=SCHEMA, machine=profile.name, kv_dtype=KV_DTYPE, rows=tuple(rows), left_out=tuple(left),
        made={group: provenance(machine, f"{command} --group {group} --record") for group in cases},
    )  # fmt: skip
    skipped = [
        Skipped(
            id=f"{profile.name}.{row.case.id}", system=profile.name, metric=row.case.operation,
            status="not_measured", reason=row.reason,
        )
        for row in left
    ]  # fmt: skip
    return validation_of(profile.name, [compare(row, profile, kv_dtype=KV_DTYPE) for row in rows], skipped), made


def check_same_machine(profile: HardwareProfile, machine: Machine) -> None:
    """Impossible where the profile is of another device: its errors would say nothing."""
    if machine.name != profile.gpu.name:
        raise Impossible(
            f"profile {profile.name} is of {profile.gpu.name!r}, this device is {machine.name!r}",
            hint="twin calibrate makes a profile of this one",
        )


def provenance(machine: Machine, command: str) -> dict[str, str]:
    """What the figures were made by: versions, driver, clocks, commit, date, command."""
    facts = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        **{name: machine.versions.get(name, "unknown") for name in ("torch", "python")},
        "commit": machine.commit or "unknown",
        "code": machine.code,
        "command": command,
    }
    if machine.is_cuda:
        facts["gpu"] = ", ".join((machine.name, *(f"{name} {value}" for name, value in machine.smi.items())))
    return facts
