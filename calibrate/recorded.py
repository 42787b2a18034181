"""Published rows against predictions: every row of a machine, predicted, compared, or listed with why it is not."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from calibrate.cases import Recorded, RecordedCase, load_recorded
from calibrate.compare import Comparison, compare
from calibrate.estimates import Asked, Estimate, NoAnswer
from calibrate.figures import FIGURES
from calibrate.published import Row
from calibrate.validation import Skipped, Validation, validation_of
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.rates import Provenance, Rate
from twin.ask.resolve import resolve
from twin.engines import engine_names
from twin.errors import BadFile


def validate_recorded(machine: str = "3x-rtx3090", *, profile: HardwareProfile | None = None) -> Validation:
    """Predict and compare every recorded row of `machine`: a shipped name or a profile's path, or `profile` itself.

    The rows are those of the machine that the profile is named after. Raises UnknownName, BadFile or MissingRate.
    """
    owned = profile or load_profile(machine)
    recorded = load_recorded(owned.name)
    return validate(recorded, owned)


def validate(recorded: Recorded, profile: HardwareProfile) -> Validation:
    """Predict and compare every row of `recorded` on `profile`, which must be the machine that it was recorded on."""
    if recorded.machine != profile.name:
        raise BadFile(f"the cases are of machine {recorded.machine!r}, the profile is of {profile.name!r}")
    reasons = role_reasons(recorded, profile)
    cases = [
        _compared(recorded.case_of[row.id], row, profile, reasons.get(row.id, ""))
        for row in recorded.rows
        if row.id in recorded.case_of
    ]
    return validation_of(profile.name, cases, tuple(_skipped(recorded)))


def role_reasons(recorded: Recorded, profile: HardwareProfile) -> dict[str, str]:
    """Why rows are `fit`, by id: they set a rate, are one, or repeat such a row. Whatever is not here is held out."""
    reasons = {id_: f"sets {place}" for id_, place in _fitted_rows(profile, "profile")}
    for rules in {resolve(case.ask).rules.name: resolve(case.ask).rules for case in recorded.cases}.values():
        reasons |= {id_: f"sets {place}" for id_, place in _fitted_rows(rules, f"engine {rules.name}")}
    for case in recorded.cases:
        if case.input_of and _rate_at(case, profile).source == "published":
            reasons.setdefault(case.id, f"is {case.input_of} of the profile")
        if case.sets:
            reasons.setdefault(case.id, f"sets {case.sets}")
    for case in recorded.cases:
        if case.same_as and all(other in reasons for other in case.same_as):
            reasons.setdefault(case.id, f"says the same as {' and '.join(case.same_as)}")
    return reasons


def _fitted_rows(part: object, path: str) -> Iterator[tuple[str, str]]:
    """Ids in every `fitted_on` below `part`, each with the path of the number that it sets."""
    if isinstance(part, Provenance):
        yield from ((id_, path) for id_ in part.fitted_on)
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            yield from _fitted_rows(getattr(part, name), f"{path}.{name}")
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from _fitted_rows(value, f"{path}.{key}")
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _fitted_rows(value, path)


def _rate_at(case: RecordedCase, profile: HardwareProfile) -> Rate:
    part: object = profile
    for name in case.input_of.split("."):
        part = getattr(part, name, None)
    if not isinstance(part, Rate):
        raise BadFile(f"case {case.id!r}: input_of {case.input_of!r} is no rate of a profile")
    return part


def _compared(case: RecordedCase, row: Row, profile: HardwareProfile, role_reason: str) -> Comparison:
    return compare(
        case,
        row,
        _estimate(case, profile),
        machine=profile.name,
        role="fit" if role_reason else "held_out",
        role_reason=role_reason,
    )


def _estimate(case: RecordedCase, profile: HardwareProfile) -> Estimate | str:
    """The prediction of a case, or why there is none."""
    against = replace(case.against, hw=profile.name) if case.against else None
    asked = Asked(question=replace(case.ask, hw=profile.name), against=against, profile=profile, workload=case.workload)
    try:
        return FIGURES[case.figure].estimate(asked)
    except NoAnswer as none:
        return none.message


def _skipped(recorded: Recorded) -> Iterator[Skipped]:
    for row in recorded.rows:
        rule = None if row.id in recorded.case_of else recorded.rule_of(row)
        if rule is not None:
            reason = rule.reason or _why_not(rule.engine)
            yield Skipped(id=row.id, system=row.system, metric=row.metric, status=rule.status, reason=reason)


def _why_not(engine: str) -> str:
    if engine in engine_names():
        return f"not predicted yet: engine {engine} has a rulebook, but no case asks for this row"
    return f"not predicted yet: engine {engine} has no rulebook here"
