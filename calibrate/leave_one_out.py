"""Each speed row predicted from all the others: rates refitted without the row, and without rows that repeat it.

Run `python -m calibrate.leave_one_out [machine ...]`. All speed rows of a machine are fitted together by least squares
on relative errors; a row is left out by one Gauss-Newton step from there, and predicted with the rates so found. A row
is not predictable so where the others leave a rate that it hangs on free, or set it only loosely: it is listed with
that rate and with how loosely.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from calibrate import fit_published, fit_vllm
from calibrate.cases import Recorded, RecordedCase, load_recorded
from calibrate.fit_vllm import predicted
from hwprofiles import HardwareProfile, load_profile

SPEED = {
    "decode", "decode_step", "decode_drop", "prefill", "ttft", "time_to_context", "time_per_token", "total_time",
    "throughput", "inter_token", "attention_per_layer",
}  # fmt: skip
"""Figures that hang on kernels' rates."""

STEP = 1e-3
"""Change of a parameter's logarithm by which its effect is measured."""
ITERATIONS = 8
SETTLED = 1e-7
HANGS_ON = 0.05
"""Effect of a parameter on a row, in per cent a per cent, from which on the row hangs on it."""
LOOSE = 0.1
"""Standard deviation of a prediction, given how well rows agree, from which on the others do not set it."""

Vector = NDArray[Any]


class LeftOut(Struct, frozen=True, kw_only=True):
    """One speed row, predicted without itself."""

    id: str
    measured: float
    predicted: float | None
    """None where the other rows do not set what it hangs on."""
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative to the measurement."""
        return None if self.predicted is None else self.predicted / self.measured - 1


class _Fit(Struct, frozen=True, kw_only=True):
    """The parameters of one machine: their names, their values, and a profile that holds others."""

    names: tuple[str, ...]
    start: Vector
    with_values: Callable[[HardwareProfile, Vector], HardwareProfile]


def _fit_of(machine: str, profile: HardwareProfile) -> _Fit:
    if machine == fit_vllm.MACHINE:
        return _Fit(
            names=tuple(map(str, fit_vllm.PARAMETERS)),
            start=fit_vllm.shipped(profile),
            with_values=fit_vllm.with_parameters,
        )
    return _Fit(
        names=tuple(target.parameter for target in fit_published.TARGETS),
        start=np.log(list(fit_published.shipped(profile))),
        with_values=lambda base, values: fit_published.with_parameters(base, np.exp(values)),
    )


MACHINES = (fit_published.MACHINE, fit_vllm.MACHINE)


class _Rows:
    """Logarithms of predicted over measured of all speed rows, and how each answers to each parameter."""

    def __init__(self, recorded: Recorded, profile: HardwareProfile, fit: _Fit) -> None:
        self.cases = [case for case in recorded.cases if case.figure in SPEED]
        self.measured = np.array([recorded.row_of[case.id].middle for case in self.cases])
        self.profile, self.fit = profile, fit
        self.touches = np.ones((len(self.cases), len(fit.names)), dtype=bool)

    def errors(self, values: Vector, rows: Sequence[int] | None = None) -> Vector:
        profile = self.fit.with_values(self.profile, values)
        wanted = range(len(self.cases)) if rows is None else rows
        return np.array([np.log(predicted(self.cases[at], profile) / self.measured[at]) for at in wanted])

    def jacobian(self, values: Vector, errors: Vector) -> Vector:
        """Change of each row's logarithm with each parameter's; what had no effect once is not tried again."""
        table = np.zeros(self.touches.shape)
        for column in range(len(values)):
            rows = np.flatnonzero(self.touches[:, column])
            moved = values.copy()
            moved[column] -= STEP
            table[rows, column] = (errors[rows] - self.errors(moved, list(rows))) / STEP
        self.touches &= table != 0
        return table


def leave_one_out(machine: str) -> list[LeftOut]:
    """Every speed row of `machine`, predicted from the others."""
    profile, recorded = load_profile(machine), load_recorded(machine)
    rows = _Rows(recorded, profile, _fit_of(machine, profile))
    values, errors, jacobian = _settle(rows)
    return [_left_out(at, rows, values, errors, jacobian) for at in range(len(rows.cases))]


def _settle(rows: _Rows) -> tuple[Vector, Vector, Vector]:
    """Least squares over all rows. Efficiencies stay at most 1."""
    values = rows.fit.start
    errors = rows.errors(values)
    for _ in range(ITERATIONS):
        jacobian = rows.jacobian(values, errors)
        step = np.linalg.lstsq(jacobian, -errors, rcond=1e-6)[0]
        values = np.minimum(values + np.clip(step, -0.5, 0.5), 0.0)
        errors = rows.errors(values)
        if np.abs(step).max() < SETTLED**0.5:
            break
    return values, errors, rows.jacobian(values, errors)


def _left_out(at: int, rows: _Rows, values: Vector, errors: Vector, jacobian: Vector) -> LeftOut:
    """The row by the rates that the others set, or why they do not."""
    case, measured = rows.cases[at], float(rows.measured[at])
    if case.sets:
        return LeftOut(id=case.id, measured=measured, predicted=None, reason=f"alone sets {case.sets}")
    kept = [index for index, other in enumerate(rows.cases) if not _same(case, other)]
    hangs_on = np.flatnonzero(np.abs(jacobian[at]) > HANGS_ON)
    free = [rows.fit.names[column] for column in hangs_on if not np.abs(jacobian[kept, column]).max() > HANGS_ON]
    if free:
        return LeftOut(id=case.id, measured=measured, predicted=None, reason=f"alone sets {', '.join(free)}")
    noise = float(np.sqrt(np.mean(errors**2)))
    covariance = np.linalg.pinv(jacobian[kept].T @ jacobian[kept], rcond=1e-9) * noise**2
    spread = float(np.sqrt(jacobian[at] @ covariance @ jacobian[at]))
    if spread > LOOSE:
        loosest = max(hangs_on, key=lambda column: abs(jacobian[at, column]) * np.sqrt(covariance[column, column]))
        reason = f"the others set {rows.fit.names[loosest]} only so that this row is known within {100 * spread:.0f} %"
        return LeftOut(id=case.id, measured=measured, predicted=None, reason=reason)
    step = np.linalg.lstsq(jacobian[kept], -errors[kept], rcond=1e-6)[0]
    without = np.minimum(values + step, 0.0)
    return LeftOut(id=case.id, measured=measured, predicted=measured * float(np.exp(rows.errors(without, [at])[0])))


def _same(case: RecordedCase, other: RecordedCase) -> bool:
    """Whether the two say the same: one of them is left out with the other."""
    first, second = {case.id, *case.same_as}, {other.id, *other.same_as}
    return bool(first & second)


def text(machine: str, rows: Sequence[LeftOut]) -> str:
    """A line a row, and what they add up to."""
    lines = [f"{machine}: each speed row predicted from all the others"]
    for row in rows:
        if row.predicted is None or row.error is None:
            lines.append(f"  {row.id:52s} not predictable so: {row.reason}")
        else:
            lines.append(
                f"  {row.id:52s} {row.predicted:10.4g} against {row.measured:10.4g}  {100 * row.error:+6.1f} %"
            )
    errors = sorted(abs(row.error) for row in rows if row.error is not None)
    listed = sum(row.predicted is None for row in rows)
    median, worst = float(np.median(errors)), errors[-1]
    lines.append(f"  {len(errors)} rows: median {100 * median:.1f} %, worst {100 * worst:.1f} %; {listed} listed")
    return "\n".join(lines) + "\n"


def main(machines: Sequence[str]) -> None:
    """Print the table of each machine named, or of all that rates were fitted for."""
    for machine in machines or MACHINES:
        sys.stdout.write(text(machine, leave_one_out(machine)))


if __name__ == "__main__":
    main(sys.argv[1:])
