"""Published rows as their authors gave them, and how the twin is asked for each: JSON files, read strictly."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from calibrate.published.estimates import Load
from calibrate.published.figures import FIGURES
from calibrate.validation import NotCompared
from hwprofiles.errors import BadFile, TwinError, find
from hwprofiles.files import read_as
from hwprofiles.store import RECORDS
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.formats import format_names

Text = Annotated[str, Meta(min_length=1)]


class Row(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published figure: a number, a range, or a yes or no."""

    id: Text
    system: Text
    metric: Text
    value: bool | float | tuple[float, float]
    unit: str
    source: Text
    conditions: dict[str, object]

    @property
    def low(self) -> float:
        """The number, or the lower end of the range."""
        return float(self.value[0] if isinstance(self.value, tuple) else self.value)

    @property
    def high(self) -> float:
        """The number, or the upper end of the range."""
        return float(self.value[1] if isinstance(self.value, tuple) else self.value)

    @property
    def middle(self) -> float:
        """The number, or the middle of the range."""
        return (self.low + self.high) / 2


class Published(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of rows."""

    schema: str
    note: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        _check_schema(self.schema, "twin.published/1")
        _refuse_repeats("row", (row.id for row in self.rows))


class Ask(Question, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question as a data file writes it: a key that no question has is refused."""


class RecordedCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the twin is asked for one row, and how near it has to come."""

    id: Text
    figure: Text
    ask: Ask
    against: Ask | None = None
    """The other question, where the figure sets two against each other."""
    workload: Load | None = None
    """What is served, where the figure is of many requests."""
    tolerance: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Largest relative error."""
    tolerance_absolute: Annotated[float, Meta(gt=0)] | None = None
    """Largest error in the row's own unit; for a range, half its width."""
    reason: Text
    """Why that tolerance."""
    same_as: tuple[Text, ...] = ()
    """Rows that say the same in other words: this one is no more evidence than they are."""
    differs: dict[str, Text] = {}
    """Conditions of the row that the question deliberately does not share, and why."""
    sets: str = ""
    """What of its own question this row sets, so that it is no evidence."""
    input_of: str = ""
    """Rate of the profile, by its path, that this row is."""
    note: str = ""

    def __post_init__(self) -> None:
        if (self.tolerance is None) == (self.tolerance_absolute is None):
            raise ValueError(f"{self.id}: either 'tolerance' or 'tolerance_absolute' is needed, and not both")
        figure = FIGURES.get(self.figure)
        if figure is None:
            raise ValueError(f"{self.id}: figure {self.figure!r} is not one of {', '.join(sorted(FIGURES))}")
        if figure.paired != (self.against is not None):
            raise ValueError(f"{self.id}: 'against' goes with a figure that sets two questions against each other")
        if figure.served != (self.workload is not None):
            raise ValueError(f"{self.id}: 'workload' goes with a figure of many requests")


class SkipRule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows that no case asks for, and why: `reason`, or the engine that has no rulebook yet."""

    system: Text
    metric: str | None = None
    """None: whatever metric no rule before took."""
    status: NotCompared
    reason: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        if bool(self.reason) == bool(self.engine):
            raise ValueError(f"rule for {self.system!r}: either 'reason' or 'engine' is needed, and not both")

    def takes(self, row: Row) -> bool:
        """Whether the rule speaks of `row`."""
        return row.system == self.system and self.metric in (None, row.metric)


class CaseFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A machine's cases."""

    schema: str
    machine: Text
    published: Annotated[str, Meta(pattern=r"^[\w-]+\.json$")]
    """File of rows, beside the machines."""
    systems: tuple[Text, ...]
    """Whose rows are this machine's."""
    cases: tuple[RecordedCase, ...]
    skipped: tuple[SkipRule, ...]

    def __post_init__(self) -> None:
        _check_schema(self.schema, "twin.cases/1")
        _refuse_repeats("case", (case.id for case in self.cases))


class Recorded(Struct, frozen=True, kw_only=True, dict=True):
    """Rows joined with the cases and rules that speak of them; every row has exactly one."""

    machine: str
    rows: tuple[Row, ...]
    cases: tuple[RecordedCase, ...]
    rules: tuple[SkipRule, ...]

    def __post_init__(self) -> None:
        for case in self.cases:
            _check_case(case, self)
        for row in self.rows:
            if row.id not in self.case_of and self.rule_of(row) is None:
                raise ValueError(f"row {row.id!r} of system {row.system!r} has neither a case nor a rule")
        for rule in self.rules:
            if not any(self.rule_of(row) is rule for row in self.rows):
                raise ValueError(f"rule for {rule.system!r}, metric {rule.metric!r}: it takes no row")

    @cached_property
    def row_of(self) -> dict[str, Row]:
        """Rows by id."""
        return {row.id: row for row in self.rows}

    @cached_property
    def case_of(self) -> dict[str, RecordedCase]:
        """Cases by the id of their row."""
        return {case.id: case for case in self.cases}

    def rule_of(self, row: Row) -> SkipRule | None:
        """First rule that speaks of a row without a case."""
        return next((rule for rule in self.rules if rule.takes(row)), None)


def recorded_machines() -> list[str]:
    """Machines of which cases are shipped."""
    return sorted(path.parent.name for path in RECORDS.glob("*/cases.json"))


def load_recorded(machine: str) -> Recorded:
    """The shipped cases of `machine`; UnknownName where there are none."""
    return read_recorded(RECORDS / find("recorded machine", machine, recorded_machines()) / "cases.json")


def read_published(name: str) -> Published:
    """The shipped file of rows called `name`. Raises BadFile in one line."""
    return read_as(RECORDS / name, Published)


def read_recorded(path: Path) -> Recorded:
    """The cases in `path` with the rows that they name. Raises BadFile in one line."""
    own = read_as(path, CaseFile)
    published = read_published(own.published)
    try:
        rows = tuple(row for row in published.rows if row.system in own.systems)
        return Recorded(machine=own.machine, rows=rows, cases=own.cases, rules=own.skipped)
    except ValueError as wrong:
        raise BadFile(f"{path}: {wrong}") from None


def _check_schema(schema: str, known: str) -> None:
    if schema != known:
        raise ValueError(f"schema must be {known!r}, not {schema!r}")


def _refuse_repeats(what: str, ids: Iterable[str]) -> None:
    repeated = [name for name, times in Counter(ids).items() if times > 1]
    if repeated:
        raise ValueError(f"{what} {repeated[0]!r} appears twice")


def _check_case(case: RecordedCase, recorded: Recorded) -> None:
    row = recorded.row_of.get(case.id)
    if row is None:
        raise ValueError(f"case {case.id!r}: no published row has this id")
    for other in case.same_as:
        if other not in recorded.case_of or recorded.case_of[other].same_as:
            raise ValueError(f"{case.id}: same_as {other!r} is not a case that stands for itself")
    if not isinstance(row.value, bool) and not 0 < row.low <= row.high:
        raise ValueError(f"{case.id}: the published value {row.value} is not a positive number or range")
    if row.unit != FIGURES[case.figure].unit:
        raise ValueError(f"{case.id}: published in {row.unit!r}, {case.figure} is in {FIGURES[case.figure].unit!r}")
    _check_conditions(case, row)


def _check_conditions(case: RecordedCase, row: Row) -> None:
    """The question must be the one that was measured, as far as the row says."""
    try:
        asked, said = resolve(case.ask), row.conditions
    except TwinError as refused:  # not every refusal is a ValueError
        raise ValueError(f"{case.id}: {refused}") from None
    formats = {"layout"} if _first_word(said.get("layout", "")) in format_names() else set()
    for key, ours, published in (
        ("ctx_tokens", case.ask.ctx_tokens, said.get("ctx", said.get("prompt", case.ask.ctx_tokens))),
        ("kv_dtype" if formats else "layout", asked.fmt.name if formats else asked.layout.name, said.get("layout")),
        ("engine", asked.rules.name, said.get("engine")),
        ("model", asked.model.name, said.get("model")),
        ("utilisation", case.ask.utilisation, said.get("util")),
        ("speculation", asked.speculation.drafter.name if asked.speculation else "none", _drafter(said)),
        ("backend", asked.backend.replace("_", ""), said.get("backend")),
    ):
        if published is not None and key not in case.differs and not _agree(ours, published):
            raise ValueError(f"{case.id}: {key} {ours!r} is asked, {published!r} was measured")


def _drafter(said: Mapping[str, object]) -> str | None:
    """The drafter that a row names: the letters that its speculation begins with, and a 2 that belongs to one."""
    found = re.match(r"dflash2?|mtp", str(said.get("speculation", "")).lower())
    return found and {"dflash": "dflash2"}.get(found[0], found[0])


def _agree(ours: object, published: object) -> bool:
    """Numbers alike, or a name that begins as the published one does: a file's qwen3.8-27b-fast is Qwen3.8-27B."""
    if isinstance(ours, (int, float)) or isinstance(published, (int, float)):
        return ours == published
    return _plain(str(ours)).startswith(_plain(_first_word(published)))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def _first_word(text: object) -> str:
    return str(text).replace(",", " ").partition(" ")[0]
