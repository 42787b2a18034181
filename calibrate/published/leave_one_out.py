"""Each speed row predicted from all the others: rates refitted without the row, and without rows that repeat it.

Run `python -m calibrate.published.leave_one_out [machine ...]`. All speed rows of a machine are fitted together by
least squares on relative errors; a row is left out by one Gauss-Newton step from there, and predicted with the rates so
found. Where the others leave a rate free that a row is sensitive to, or set it loosely, the row is not predictable:
it is listed with that rate and with how loosely.
"""

import sys
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from calibrate.published.cases import RecordedCase, load_recorded
from calibrate.published.fit import PARAMETERS, Rows, shipped, solve
from hwprofiles import load_profile

SPEED = {
    "decode", "decode_step", "decode_drop", "prefill", "ttft", "time_to_context", "time_per_token", "total_time",
    "throughput", "inter_token", "attention_per_layer",
}  # fmt: skip
"""Figures that depend on kernels' rates."""
SENSITIVE = 0.05
"""Effect of a parameter on a row, in per cent a per cent, from which on the row is sensitive to it."""
LOOSE = 0.1
"""Standard deviation of a prediction, given how well rows agree, from which on the others do not set it."""


class LeftOut(Struct, frozen=True, kw_only=True):
    """One speed row, predicted without itself."""

    id: str
    measured: float
    predicted: float | None
    """None where the other rows do not set what it is sensitive to."""
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative to the measurement."""
        return None if self.predicted is None else self.predicted / self.measured - 1


class _Fitted:
    """All speed rows of a machine at the parameters that fit them best: their errors, and how each row answers."""

    def __init__(self, machine: str) -> None:
        profile, recorded = load_profile(machine), load_recorded(machine)
        self.names = [str(parameter) for parameter in PARAMETERS[machine]]
        self.cases = [case for case in recorded.cases if case.figure in SPEED]
        self.rows = Rows(recorded, profile, self.cases)
        self.values, self.jacobian = solve(self.rows.errors, shipped(profile))
        self.errors = self.rows.errors(self.values)


def leave_one_out(machine: str) -> list[LeftOut]:
    """Every speed row of `machine`, predicted from the others."""
    fitted = _Fitted(machine)
    return [_left_out(at, fitted) for at in range(len(fitted.cases))]


def _left_out(at: int, fitted: _Fitted) -> LeftOut:
    """The row by the rates that the others set, or why they do not."""
    case, measured, jacobian = fitted.cases[at], float(fitted.rows.measured[at]), fitted.jacobian

    def listed(reason: str) -> LeftOut:
        return LeftOut(id=case.id, measured=measured, predicted=None, reason=reason)

    if case.sets:
        return listed(f"alone sets {case.sets}")
    kept = [index for index, other in enumerate(fitted.cases) if not _same(case, other)]
    sensitive = np.flatnonzero(np.abs(jacobian[at]) > SENSITIVE)
    free = [fitted.names[column] for column in sensitive if not np.abs(jacobian[kept, column]).max() > SENSITIVE]
    if free:
        return listed(f"alone sets {', '.join(free)}")
    noise = float(np.sqrt(np.mean(fitted.errors**2)))
    covariance = np.linalg.pinv(jacobian[kept].T @ jacobian[kept], rcond=1e-9) * noise**2
    spread = float(np.sqrt(jacobian[at] @ covariance @ jacobian[at]))
    if spread > LOOSE:
        loosest = max(sensitive, key=lambda column: abs(jacobian[at, column]) * np.sqrt(covariance[column, column]))
        name = fitted.names[loosest]
        return listed(f"the others set {name} only so that this row is known within {100 * spread:.0f} %")
    step = np.linalg.lstsq(jacobian[kept], -fitted.errors[kept], rcond=1e-6)[0]
    error = fitted.rows.errors(np.minimum(fitted.values + step, 0.0), [at])[0]
    return LeftOut(id=case.id, measured=measured, predicted=measured * float(np.exp(error)))


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
            told = f"{row.predicted:10.4g} against {row.measured:10.4g}  {100 * row.error:+6.1f} %"
            lines.append(f"  {row.id:52s} {told}")
    errors = sorted(abs(row.error) for row in rows if row.error is not None)
    listed = sum(row.predicted is None for row in rows)
    median, worst = float(np.median(errors)), errors[-1]
    lines.append(f"  {len(errors)} rows: median {100 * median:.1f} %, worst {100 * worst:.1f} %; {listed} listed")
    return "\n".join(lines) + "\n"


def main(machines: Sequence[str]) -> None:
    """Print the table of each machine named, or of all that rates were fitted for."""
    for machine in machines or PARAMETERS:
        sys.stdout.write(text(machine, leave_one_out(machine)))


if __name__ == "__main__":
    main(sys.argv[1:])
