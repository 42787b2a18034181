"""`twin validate --from`: each point of a benchmark against its prediction."""

from calibrate.benchmarks.asking import Asked, Evidence
from calibrate.benchmarks.predicted import told_of
from calibrate.validation import Comparison, Skipped, Validation, validation_of
from hwprofiles import HardwareProfile
from twin.errors import MissingRate

TOLERANCE = 0.12
REASON = "what an engine's own benchmark is to be met within, once the machine is calibrated"


def compare_points(found: Evidence) -> Validation:
    """All points; those that set a rate of the machine apart."""
    machine = found.machine
    used = {
        id_
        for kernel in machine.kernels.values()
        for rate in (kernel.efficiency, kernel.latency)
        if rate is not None
        for id_ in rate.fitted_on
    }
    cases: list[Comparison] = []
    skipped = [
        Skipped(id=left.where, system=machine.name, metric="", status="not_predicted", reason=left.reason)
        for left in found.left
    ]
    for asked in found.asked:
        try:
            cases.append(_compared(asked, machine, sets_a_rate=asked.point.id in used))
        except MissingRate as missing:
            point = asked.point
            skipped.append(
                Skipped(
                    id=point.id, system=machine.name, metric=point.metric, status="not_predicted",
                    reason=missing.message,
                )
            )  # fmt: skip
    return validation_of(machine.name, cases, skipped)


def _compared(asked: Asked, machine: HardwareProfile, *, sets_a_rate: bool) -> Comparison:
    point, told = asked.point, told_of(asked, machine)
    error = told.seconds / point.seconds - 1
    return Comparison(
        id=point.id, machine=machine.name, metric=point.metric, unit="s", predicted=told.seconds, low=told.low,
        high=told.high, measured=point.seconds, measured_low=point.seconds, measured_high=point.seconds, error=error,
        naive_error=None if told.naive_s is None else told.naive_s / point.seconds - 1,
        role="fit" if sets_a_rate else "held_out", role_reason="sets a rate of this profile" if sets_a_rate else "",
        within=abs(error) <= TOLERANCE, tolerance=TOLERANCE, tolerance_reason=REASON, wall=told.wall,
    )  # fmt: skip
