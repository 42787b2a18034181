"""Predictions against measurements: signed errors, tolerances, what they add up to, as JSON and as text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct, field

from twin.render.text import table

SCHEMA = "twin.validation/1"

Role = Literal["fit", "held_out"]
NotCompared = Literal["carried", "not_predicted"]
Status = Literal[NotCompared, "not_measured"]

_HEADS = ("case", "predicted", "90 % interval", "measured", "unit", "error", "naive", "tolerance", "", "wall")
TITLES = {"held_out": "held out: nothing was fitted on these rows", "fit": "fit: rows that set a rate, or repeat one"}


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


class Summary(Errors, frozen=True, kw_only=True):
    """All cases of one role; `worst` is one without an answer where there is any."""

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


class Skipped(Struct, frozen=True, kw_only=True):
    """A row that is not predicted, or a case that could not be measured: no room, no kernel, too busy a machine."""

    id: str
    system: str
    metric: str
    status: Status
    reason: str


class Counts(Struct, frozen=True, kw_only=True):
    """What became of the rows; the four add up to all of them."""

    predicted: int
    carried: int
    not_predicted: int
    not_measured: int
    reasons: dict[str, int]
    """Rows by why they are carried or not predicted. A case that was not measured has its own reason: see `skipped`."""


class Summaries(Struct, frozen=True, kw_only=True):
    """Rows that set a rate (or are one) apart from rows that did not: only the second are evidence."""

    fit: Summary
    held_out: Summary


class Validation(Struct, frozen=True, kw_only=True):
    """Every recorded row of one machine."""

    schema: str
    machine: str
    cases: tuple[Comparison, ...]
    summary: Summaries
    counts: Counts
    skipped: tuple[Skipped, ...]

    @property
    def within(self) -> bool:
        """Whether every case is within its tolerance."""
        return not self.outside

    @property
    def outside(self) -> list[Comparison]:
        """Cases outside their tolerance."""
        return [case for case in self.cases if not case.within]


def summarise(cases: Sequence[Comparison]) -> Summary:
    """Median, 95th percentile (linear between ranks), worst case and coverage of cases of one role."""
    own = _errors((case.id, case.error) for case in cases)
    unanswered = [case.id for case in cases if case.error is None]
    intervals = [case for case in cases if case.has_interval]
    beside = [case for case in cases if case.naive_error is not None]
    return Summary(
        n=len(cases), median_abs_error=own.median_abs_error, p95_abs_error=own.p95_abs_error,
        worst=unanswered[0] if unanswered else own.worst,
        coverage_90=sum(case.covered for case in intervals) / len(intervals) if intervals else None,
        with_interval=_errors((case.id, case.error) for case in intervals),
        outside=sum(not case.within for case in cases), unanswered=len(unanswered),
        naive=_errors((case.id, case.naive_error) for case in beside),
        beside_naive=_errors((case.id, case.error) for case in beside),
    )  # fmt: skip


def _errors(told: Iterable[tuple[str, float | None]]) -> Errors:
    errors = [(abs(error), id_) for id_, error in told if error is not None]
    if not errors:
        return Errors(n=0, median_abs_error=None, p95_abs_error=None, worst=None)
    _, worst = max(errors, key=lambda pair: pair[0])
    median, p95 = (float(value) for value in np.quantile([size for size, _ in errors], (0.5, 0.95)))
    if not math.isfinite(p95):
        raise ArithmeticError(f"the error of {worst} is not finite")
    return Errors(n=len(errors), median_abs_error=median, p95_abs_error=p95, worst=worst)


def validation_of(machine: str, cases: Sequence[Comparison], skipped: Sequence[Skipped] = ()) -> Validation:
    """Summaries and counts over `cases`."""
    statuses: Counter[Status] = Counter(row.status for row in skipped)
    counts = Counts(
        predicted=len(cases),
        **{status: statuses[status] for status in get_args(Status)},
        reasons=dict(Counter(row.reason for row in skipped if row.status != "not_measured")),
    )
    fit, held_out = (summarise([case for case in cases if case.role == role]) for role in ("fit", "held_out"))
    return Validation(
        schema=SCHEMA, machine=machine, cases=tuple(cases), summary=Summaries(fit=fit, held_out=held_out),
        counts=counts, skipped=tuple(skipped),
    )  # fmt: skip


def joined(validations: Iterable[Validation]) -> Validation:
    """Several machines as one."""
    parts = list(validations)
    cases = [case for part in parts for case in part.cases]
    skipped = [row for part in parts for row in part.skipped]
    return validation_of(", ".join(part.machine for part in parts), cases, skipped)


def validation_text(validation: Validation) -> str:
    """Tables of both roles, each with its totals; then the rows without a prediction and those out of tolerance."""
    sections = [f"{validation.machine}: predictions against what was recorded\n"]
    for role, title in TITLES.items():
        cases = [case for case in validation.cases if case.role == role]
        if cases:
            sections += [
                title,
                table(_HEADS, [_case_row(case) for case in cases]),
                _totals(getattr(validation.summary, role)),
            ]
    notes = [f"  {case.id}: {case.note}\n" for case in validation.cases if case.note]
    sections += ["".join(["notes\n", *notes]) if notes else "", _counts(validation), _verdict(validation)]
    return "\n".join(sections)


def _case_row(case: Comparison) -> tuple[str, ...]:
    one = case.measured_low == case.measured_high
    measured = _figure(case.measured) if one else _range(case.measured_low, case.measured_high)
    return (
        case.id, _figure(case.predicted), _range(case.low, case.high) if case.has_interval else "-", measured,
        case.unit, _percent(case.error, signed=True), _percent(case.naive_error, signed=True), _percent(case.tolerance),
        "" if case.within else "OUTSIDE", case.wall,
    )  # fmt: skip


def _totals(summary: Summary) -> str:
    lines = [
        f"{summary.n} rows, {summary.outside} outside; {_errors_text('with an interval', summary.with_interval)}",
        _errors_text("all", summary),
    ]
    if summary.naive.n:
        lines += [_errors_text("twin beside naive", summary.beside_naive), _errors_text("naive", summary.naive)]
    if summary.coverage_90 is not None:
        lines.append(f"the 90 % interval covers {_percent(summary.coverage_90)} of the rows that have one")
    return "".join(f"  {line}\n" for line in lines)


def _errors_text(name: str, errors: Errors) -> str:
    return (
        f"{name}: n {errors.n}, median error {_percent(errors.median_abs_error)}, "
        f"95th percentile {_percent(errors.p95_abs_error)}, worst {errors.worst or '-'}"
    )


def _counts(validation: Validation) -> str:
    counts = validation.counts
    lines = [f"{counts.predicted} rows predicted, {counts.carried} carried, {counts.not_predicted} not predicted"]
    lines[0] += f", {counts.not_measured} not measured" if counts.not_measured else ""
    lines += [f"  {count} x {reason}" for reason, count in counts.reasons.items()]
    lines += [f"  not measured: {row.id}: {row.reason}" for row in validation.skipped if row.status == "not_measured"]
    return "\n".join(lines) + "\n"


def _verdict(validation: Validation) -> str:
    if validation.within:
        return "every case is within its tolerance\n"
    lines = ["outside their tolerance:"]
    lines += [f"  {case.id}: {case.note or case.tolerance_reason}" for case in validation.outside]
    return "\n".join(lines) + "\n"


def _range(low: float | None, high: float | None) -> str:
    return f"{_figure(low)} to {_figure(high)}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return "-"
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.3g} %"
