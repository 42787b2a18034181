"""A validation as text: each case, the rows that set a rate apart from the evidence, and what is not predicted."""

from collections.abc import Sequence

from calibrate.compare import Comparison, Errors, Summary
from calibrate.validation import Validation
from twin.render.text import table

TITLES = {"held_out": "held out: nothing was fitted on these rows", "fit": "fit: rows that set a rate, or repeat one"}


def validation_text(validation: Validation) -> str:
    """Tables of both roles, each with its totals; then the rows without a prediction and those out of tolerance."""
    summaries = {"held_out": validation.summary.held_out, "fit": validation.summary.fit}
    sections = [f"{validation.machine}: predictions against what was recorded\n"]
    for role, title in TITLES.items():
        cases = [case for case in validation.cases if case.role == role]
        if cases:
            sections += [title, _cases_table(cases), _totals(summaries[role])]
    sections.append(_notes(validation))
    sections.append(_counts(validation))
    sections.append(_verdict(validation))
    return "\n".join(sections)


def _cases_table(cases: Sequence[Comparison]) -> str:
    heads = ("case", "predicted", "90 % interval", "measured", "unit", "error", "naive", "tolerance", "", "wall")
    return table(heads, [_case_row(case) for case in cases])


def _case_row(case: Comparison) -> tuple[str, ...]:
    interval = f"{_figure(case.low)} to {_figure(case.high)}" if case.has_interval else "-"
    measured = _figure(case.measured)
    if case.measured_low < case.measured_high:
        measured = f"{_figure(case.measured_low)} to {_figure(case.measured_high)}"
    return (
        case.id,
        _figure(case.predicted),
        interval,
        measured,
        case.unit,
        _percent(case.error, signed=True),
        _percent(case.naive_error, signed=True),
        _percent(case.tolerance),
        "" if case.within else "OUTSIDE",
        case.wall,
    )


def _totals(summary: Summary) -> str:
    lines = [
        f"  {summary.n} rows, {summary.outside} outside; {_errors('with an interval', summary.with_interval)}",
        f"  {_errors('all', _all(summary))}",
    ]
    if summary.naive.n:
        lines.append(f"  {_errors('twin beside naive', summary.beside_naive)}")
        lines.append(f"  {_errors('naive', summary.naive)}")
    if summary.coverage_90 is not None:
        lines.append(f"  the 90 % interval covers {_percent(summary.coverage_90)} of the rows that have one")
    return "\n".join(lines) + "\n"


def _all(summary: Summary) -> Errors:
    return Errors(
        n=summary.n,
        median_abs_error=summary.median_abs_error,
        p95_abs_error=summary.p95_abs_error,
        worst=summary.worst,
    )


def _errors(name: str, errors: Errors) -> str:
    return (
        f"{name}: n {errors.n}, median error {_percent(errors.median_abs_error)}, "
        f"95th percentile {_percent(errors.p95_abs_error)}, worst {errors.worst or '-'}"
    )


def _notes(validation: Validation) -> str:
    """What stands beside a row: what it does not explain, or what it is in the source."""
    lines = [f"  {case.id}: {case.note}" for case in validation.cases if case.note]
    return "\n".join(["notes", *lines]) + "\n" if lines else ""


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


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return "-"
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.3g} %"
