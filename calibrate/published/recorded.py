"""Published rows against predictions: every row of a machine, predicted, compared, or listed with why it is not."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from calibrate.published.cases import Recorded, RecordedCase, Row, load_recorded
from calibrate.published.estimates import Asked, Estimate, NoAnswer
from calibrate.published.figures import FIGURES
from calibrate.validation import Comparison, Role, Skipped, Validation, validation_of
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.rates import Provenance, Rate
from twin.ask.resolve import resolve
from twin.engines import engine_names
from twin.errors import BadFile

ROUNDING = 1e-9
"""Relative room for floating-point noise at the edge of a tolerance."""


def validate_recorded(machine: str, *, profile: HardwareProfile | None = None) -> Validation:
    """Predict and compare every recorded row of `machine`, on its shipped profile or on `profile` of it.

    Raises UnknownName, BadFile or MissingRate.
    """
    profile = profile or load_profile(machine)
    recorded = load_recorded(profile.name)
    reasons = role_reasons(recorded, profile)
    cases = []
    for row in recorded.rows:
        if row.id in recorded.case_of:
            case, reason = recorded.case_of[row.id], reasons.get(row.id, "")
            try:
                told: Estimate | str = estimate_of(case, profile)
            except NoAnswer as none:
                told = none.message
            role: Role = "fit" if reason else "held_out"
            cases.append(compare(case, row, told, machine=profile.name, role=role, role_reason=reason))
    return validation_of(profile.name, cases, tuple(_skipped(recorded)))


def estimate_of(case: RecordedCase, profile: HardwareProfile, *, intervals: bool = True) -> Estimate:
    """The prediction of a case; NoAnswer where there is none."""
    asked = Asked(
        question=replace(case.ask, hw=profile.name), profile=profile, workload=case.workload, intervals=intervals,
        against=replace(case.against, hw=profile.name) if case.against else None,
    )  # fmt: skip
    return FIGURES[case.figure].estimate(asked)


def compare(
    case: RecordedCase, row: Row, answer: Estimate | str, *, machine: str, role: Role, role_reason: str
) -> Comparison:
    """Join one prediction with its row; `answer` is a text where the twin says why it has none."""
    measured = row.middle
    absolute = (case.tolerance_absolute or 0.0) / (measured or 1.0)
    tolerance = absolute if case.tolerance is None else case.tolerance
    estimate = answer if isinstance(answer, Estimate) else None
    error = _error(estimate.value, measured) if estimate else None
    return Comparison(
        id=row.id, machine=machine, metric=row.metric, unit=row.unit,
        predicted=estimate.value if estimate else None,
        low=estimate.low if estimate else None,
        high=estimate.high if estimate else None,
        measured=measured, measured_low=row.low, measured_high=row.high, error=error,
        naive_error=None if estimate is None or estimate.naive is None else _error(estimate.naive, measured),
        within=error is not None and abs(error) <= tolerance + ROUNDING,
        tolerance=tolerance, tolerance_reason=case.reason, role=role, role_reason=role_reason,
        note=answer if isinstance(answer, str) else case.note,
        also=estimate.also if estimate else {},
    )  # fmt: skip


def _error(predicted: float, measured: float) -> float:
    """Relative to the measurement, or what it differs by where that is 0 (a no)."""
    return (predicted - measured) / measured if measured else predicted - measured


def role_reasons(recorded: Recorded, profile: HardwareProfile) -> dict[str, str]:
    """Why rows are `fit`, by id: they set a rate, are one, or repeat such a row. Whatever is not here is held out."""
    reasons = {id_: f"sets {place}" for id_, place in fitted_rows(profile, "profile")}
    rulebooks = [resolve(case.ask).rules for case in recorded.cases]
    for rules in {rules.name: rules for rules in rulebooks}.values():
        reasons |= {id_: f"sets {place}" for id_, place in fitted_rows(rules, f"engine {rules.name}")}
    for case in recorded.cases:
        if case.input_of and _rate_at(case, profile).source == "published":
            reasons.setdefault(case.id, f"is {case.input_of} of the profile")
        if case.sets:
            reasons.setdefault(case.id, f"sets {case.sets}")
    for case in recorded.cases:
        if case.same_as and all(other in reasons for other in case.same_as):
            reasons.setdefault(case.id, f"says the same as {' and '.join(case.same_as)}")
    return reasons


def fitted_rows(part: object, path: str) -> Iterator[tuple[str, str]]:
    """Ids in every `fitted_on` below `part`, each with the path of the number that it sets."""
    if isinstance(part, Provenance):
        yield from ((id_, path) for id_ in part.fitted_on)
        return
    inner: Iterator[tuple[object, str]] = iter(())
    if isinstance(part, Struct):
        inner = ((getattr(part, name), f"{path}.{name}") for name in part.__struct_fields__)
    elif isinstance(part, dict):
        inner = ((value, f"{path}.{key}") for key, value in part.items())
    elif isinstance(part, (list, tuple)):
        inner = ((value, path) for value in part)
    for value, place in inner:
        yield from fitted_rows(value, place)


def _rate_at(case: RecordedCase, profile: HardwareProfile) -> Rate:
    part: object = profile
    for name in case.input_of.split("."):
        part = getattr(part, name, None)
    if not isinstance(part, Rate):
        raise BadFile(f"case {case.id!r}: input_of {case.input_of!r} is no rate of a profile")
    return part


def _skipped(recorded: Recorded) -> Iterator[Skipped]:
    for row in recorded.rows:
        rule = None if row.id in recorded.case_of else recorded.rule_of(row)
        if rule is not None:
            ruled = rule.engine in engine_names()
            known = "has a rulebook, but no case asks for this row" if ruled else "has no rulebook here"
            reason = rule.reason or f"not predicted yet: engine {rule.engine} {known}"
            yield Skipped(id=row.id, system=row.system, metric=row.metric, status=rule.status, reason=reason)
