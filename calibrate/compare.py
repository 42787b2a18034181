"""Prediction against measurement, case by case: signed errors, tolerances, and what they add up to."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct, field

from calibrate.cases import RecordedCase
from calibrate.estimates import Estimate
from calibrate.published import Row

Role = Literal["fit", "held_out"]

ROUNDING = 1e-9
"""Relative room for floating-point noise at the edge of a tolerance."""


class Comparison(Struct, frozen=True, kw_only=True):
    """One case. Predictions and errors are None where the twin has no answer; such a case is outside its tolerance."""

    id: str
    machine: str
    metric: str
    unit: str
    predicted: float | None
    low: float | None
    high: float | None
    """Ends of the 90 % interval; equal to `predicted` where the figure is a count."""
    measured: float
    """As published; the middle where a range was."""
    error: float | None
    """(predicted - measured) / measured."""
    naive_error: float | None
    """The same of the usual estimate; None where there is none."""
    role: Role
    tolerance: float
    """Largest absolute value of `error`."""
    within: bool
    measured_low: float
    measured_high: float
    """Ends of a published range; equal to `measured` otherwise."""
    tolerance_reason: str
    role_reason: str = ""
    """What the row sets, or which row it repeats; empty where it is held out."""
    note: str = ""
    wall: str = ""
    """What the prediction says holds it, where it is a time of its own."""
    also: dict[str, float] = field(default_factory=dict)
    """What else the twin says here, by a name that ends in its unit."""

    @property
    def has_interval(self) -> bool:
        """Whether the prediction claims a range at all; a count does not."""
        return self.low is not None and self.high is not None and self.low < self.high

    @property
    def covered(self) -> bool:
        """Whether the interval meets what was published: the number, or any of the range."""
        if self.low is None or self.high is None:
            return False
        return self.low <= self.measured_high and self.measured_low <= self.high


class Errors(Struct, frozen=True, kw_only=True):
    """Spread of the errors of some cases. None where there are no cases."""

    n: int
    median_abs_error: float | None
    p95_abs_error: float | None
    worst: str | None
    """Id of the case with the largest absolute error."""


class Summary(Struct, frozen=True, kw_only=True):
    """All cases of one role."""

    n: int
    median_abs_error: float | None
    p95_abs_error: float | None
    worst: str | None
    """A case without an answer, or else the one with the largest absolute error."""
    coverage_90: float | None
    """Share of the cases with an interval whose interval meets the measurement; counts have none and are left out."""
    with_interval: Errors
    """The cases that `coverage_90` is a share of: counts, which are exact or wrong, do not flatter their median."""
    outside: int
    """Cases outside their tolerance."""
    unanswered: int
    """Cases without an answer: in `n` and `outside`, in no median."""
    naive: Errors
    """The usual estimate, over the cases that it has an answer to."""
    beside_naive: Errors
    """The twin over the same cases as `naive`."""


def compare(
    case: RecordedCase, row: Row, answer: Estimate | str, *, machine: str, role: Role, role_reason: str
) -> Comparison:
    """Join one prediction with its row; `answer` is a text where the twin says why it has none."""
    measured = row.middle
    tolerance = _relative_tolerance(case, measured)
    estimate = answer if isinstance(answer, Estimate) else None
    error = _error(estimate.value, measured) if estimate else None
    note = case.note if isinstance(answer, Estimate) else answer
    return Comparison(
        id=row.id,
        machine=machine,
        metric=row.metric,
        unit=row.unit,
        predicted=estimate.value if estimate else None,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        measured=measured,
        error=error,
        naive_error=None if estimate is None or estimate.naive is None else _error(estimate.naive, measured),
        role=role,
        tolerance=tolerance,
        within=error is not None and abs(error) <= tolerance + ROUNDING,
        measured_low=row.low,
        measured_high=row.high,
        tolerance_reason=case.reason,
        role_reason=role_reason,
        note=note,
        also=estimate.also if estimate else {},
    )


def _relative_tolerance(case: RecordedCase, measured: float) -> float:
    if case.tolerance is not None:
        return case.tolerance
    return (case.tolerance_absolute or 0.0) / measured if measured else case.tolerance_absolute or 0.0


def _error(predicted: float, measured: float) -> float:
    """Relative to the measurement, or what it differs by where that is 0 (a no)."""
    return (predicted - measured) / measured if measured else predicted - measured


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Median, 95th percentile (linear between ranks), worst case and coverage of cases of one role."""
    own = _errors([(case.id, case.error) for case in comparisons if case.error is not None])
    unanswered = [case.id for case in comparisons if case.error is None]
    intervals = [case for case in comparisons if case.has_interval]
    beside = [case for case in comparisons if case.naive_error is not None]
    return Summary(
        n=len(comparisons),
        median_abs_error=own.median_abs_error,
        p95_abs_error=own.p95_abs_error,
        worst=unanswered[0] if unanswered else own.worst,
        coverage_90=sum(case.covered for case in intervals) / len(intervals) if intervals else None,
        with_interval=_errors(list(_pairs(intervals, naive=False))),
        outside=sum(not case.within for case in comparisons),
        unanswered=len(unanswered),
        naive=_errors(list(_pairs(beside, naive=True))),
        beside_naive=_errors(list(_pairs(beside, naive=False))),
    )


def _pairs(comparisons: Sequence[Comparison], *, naive: bool) -> Iterator[tuple[str, float]]:
    for case in comparisons:
        error = case.naive_error if naive else case.error
        if error is not None:
            yield case.id, error


def _errors(errors: Sequence[tuple[str, float]]) -> Errors:
    if not errors:
        return Errors(n=0, median_abs_error=None, p95_abs_error=None, worst=None)
    sizes = [abs(error) for _, error in errors]
    worst, _ = max(errors, key=lambda pair: abs(pair[1]))
    median, p95 = (float(value) for value in np.quantile(sizes, (0.5, 0.95)))
    if not math.isfinite(p95):
        raise ArithmeticError(f"the error of {worst} is not finite")
    return Errors(n=len(errors), median_abs_error=median, p95_abs_error=p95, worst=worst)
