"""Figures that strangers published of any machine, engine and model, and how the twin is asked for each of them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from calibrate.published.cases import Ask
from calibrate.published.estimates import Load, NoAnswer
from calibrate.published.public_figures import PUBLIC_FIGURES
from hwprofiles.errors import BadFile
from hwprofiles.files import read_as
from hwprofiles.store import RECORDS

FOLDER = RECORDS / "public"
ROWS, CASES = (FOLDER / "rows.json", FOLDER / "tried.json"), FOLDER / "asked.json"

Text = Annotated[str, Meta(min_length=1)]
Table = dict[str, Any]


class PublicRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One figure in its publisher's words: of any model, on anything, under any engine."""

    id: Text
    kind: Text
    model: Table
    hardware: Table
    backend: str
    kv_layout: str | None
    ctx: int | None
    batch: int | None
    metric: Text
    value: bool | float | None
    unit: Text
    source: Text
    confidence: Literal["high", "medium", "low"]
    note: str
    wrong_value: bool | float | None = None
    """What the reported defect made of it."""
    how_known: str = ""
    wrong_value_origin: str = ""
    ttft_ms: float | None = None
    device_kv_tok_s: float | None = None
    value_q4: float | None = None


class PublicRows(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of rows."""

    schema: Literal["twin.public/1"]
    note: str
    rows: tuple[PublicRow, ...]


class Tolerance(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How near the twin has to come, and why."""

    tolerance: Annotated[float, Meta(ge=0, le=10)]
    """Largest relative error."""
    reason: Text


class PublicCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the twin is asked for one row: the whole question, since rows share no machine."""

    id: Text
    curve: Text
    """Rows of one model, engine and host: they are held out together."""
    figure: Text
    ask: Table
    """A question; `model` may be a file beside the cases."""
    against: Table | None = None
    """The other question, where the figure sets two against each other."""
    workload: Load | None = None
    value: float | None = None
    """What is right, in `unit`, where the row's own value is not it: `because` says how that is known."""
    unit: str = ""
    because: str = ""
    tolerance: Annotated[float, Meta(ge=0, le=10)] | None = None
    """In place of that of the kind, for the `reason`."""
    reason: str = ""
    differs: dict[str, Text] = {}
    """What the row had and the question has not, and why."""
    also_from: str = ""
    """What else the question says, and where its publisher says it beside the row."""
    sets: str = ""
    """What this row is a source of elsewhere in the project, so that it is no evidence."""

    def __post_init__(self) -> None:
        if self.figure not in PUBLIC_FIGURES:
            raise ValueError(f"{self.id}: figure {self.figure!r} is not one of {', '.join(sorted(PUBLIC_FIGURES))}")
        if PUBLIC_FIGURES[self.figure].paired != (self.against is not None):
            raise ValueError(f"{self.id}: 'against' goes with a figure that sets two questions against each other")
        if PUBLIC_FIGURES[self.figure].served != (self.workload is not None):
            raise ValueError(f"{self.id}: 'workload' goes with a figure of many requests")
        if (self.value is None) != (not self.because) or bool(self.unit) > bool(self.because):
            raise ValueError(f"{self.id}: 'value', of a 'unit' of its own or the row's, and 'because' go together")
        if (self.tolerance is None) != (not self.reason):
            raise ValueError(f"{self.id}: 'tolerance' and 'reason' go together")


class NotAsked(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows that no question can be put for, and why."""

    ids: Annotated[tuple[Text, ...], Meta(min_length=1)]
    because: Literal["engine", "card", "shape", "state", "instrument", "not_a_figure"]
    """An engine, card or shape that is not shipped or not named; a state nobody wrote down; a fault of the
    instrument; no figure that a prediction has."""
    reason: Text


class PublicCases(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file of cases."""

    schema: Literal["twin.public_cases/1"]
    tolerances: dict[str, Tolerance]
    """By kind of row."""
    cases: tuple[PublicCase, ...]
    not_asked: tuple[NotAsked, ...]


class Public(Struct, frozen=True, kw_only=True):
    """Rows joined with what speaks of them; every row has exactly one case or reason."""

    rows: tuple[PublicRow, ...]
    tolerances: dict[str, Tolerance]
    cases: dict[str, PublicCase]
    not_asked: dict[str, NotAsked]


def load_public() -> Public:
    """The shipped rows and cases. Raises BadFile in one line."""
    rows = tuple(row for path in ROWS for row in read_as(path, PublicRows).rows)
    told = read_as(CASES, PublicCases)
    try:
        return joined(rows, told)
    except ValueError as wrong:
        raise BadFile(f"{CASES}: {wrong}") from None


def joined(rows: tuple[PublicRow, ...], told: PublicCases) -> Public:
    """Rows with their cases. ValueError unless each has exactly one case or reason, and a tolerance."""
    spoken = [case.id for case in told.cases] + [id_ for rule in told.not_asked for id_ in rule.ids]
    _same((row.id for row in rows), spoken)
    public = Public(
        rows=rows,
        tolerances=told.tolerances,
        cases={case.id: case for case in told.cases},
        not_asked={id_: rule for rule in told.not_asked for id_ in rule.ids},
    )
    for row in rows:
        case = public.cases.get(row.id)
        if case is not None and case.value is None and row.value is None:
            raise ValueError(f"case {row.id!r}: neither the row nor the case says what is right")
        if case is not None and case.tolerance is None and row.kind not in told.tolerances:
            raise ValueError(f"case {row.id!r}: kind {row.kind!r} has no tolerance")
    return public


def _same(rows: Iterable[str], spoken: Iterable[str]) -> None:
    left = Counter(spoken)
    left.subtract(Counter(rows))
    for id_, times in left.items():
        if times:
            raise ValueError(f"row {id_!r} is {'spoken of twice or not there' if times > 0 else 'passed over'}")


def model_of(asked: Table) -> str:
    """The model that a case names: a shipped one, or the path of the file beside the cases."""
    name = str(asked["model"])
    beside = FOLDER / name
    return str(beside) if beside.is_file() else name


def question_of(asked: Table) -> Ask:
    """The question that a case writes; NoAnswer for one that this version cannot be asked."""
    try:
        return msgspec.convert(asked | {"model": model_of(asked)}, Ask)
    except msgspec.ValidationError as wrong:
        raise NoAnswer(f"cannot be asked: {wrong}") from None


def model_files() -> list[Path]:
    """Models beside the cases, of which nothing else is shipped."""
    return sorted((FOLDER / "models").glob("*.json"))
