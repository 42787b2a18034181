"""The record of a validation: every case of one or more machines, fit and held out apart."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from calibrate.cases import Skip
from calibrate.compare import Comparison, Summary, summarise

SCHEMA = "twin.validation/1"

Status = Literal[Skip, "not_measured"]


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


def validation_of(machine: str, cases: Sequence[Comparison], skipped: Sequence[Skipped] = ()) -> Validation:
    """Summaries and counts over `cases`."""
    roles = {role: [case for case in cases if case.role == role] for role in ("fit", "held_out")}
    statuses = Counter(row.status for row in skipped)
    return Validation(
        schema=SCHEMA,
        machine=machine,
        cases=tuple(cases),
        summary=Summaries(fit=summarise(roles["fit"]), held_out=summarise(roles["held_out"])),
        counts=Counts(
            predicted=len(cases),
            carried=statuses["carried"],
            not_predicted=statuses["not_predicted"],
            not_measured=statuses["not_measured"],
            reasons=dict(Counter(row.reason for row in skipped if row.status != "not_measured")),
        ),
        skipped=tuple(skipped),
    )


def joined(validations: Iterable[Validation]) -> Validation:
    """Several machines as one."""
    parts = list(validations)
    cases = [case for part in parts for case in part.cases]
    skipped = [row for part in parts for row in part.skipped]
    return validation_of(", ".join(part.machine for part in parts), cases, skipped)


def to_json(validation: Validation) -> dict[str, Any]:
    """Plain values for JSON, keys as in the schema."""
    plain: dict[str, Any] = msgspec.to_builtins(validation)
    return plain
