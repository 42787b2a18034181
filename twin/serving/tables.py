"""Traces as tables: CSV, whose header says the layout. Dates and numbers are told apart by the first row."""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime

from msgspec import Struct

from hwprofiles.traces import TABLES, TraceLayout
from twin.serving.entries import MAX_TIME, Entry, Ids, Wrong, shown, text_of, tokens_of

_MOST_DIGITS = 10  # of a count of tokens
_NOTHING = ("0", "0.0")


def table_of(header: bytes) -> TraceLayout | None:
    """The layout whose columns a first line names; None where it is no known header."""
    columns = set(_names(header))
    return next((each for each in TABLES if any(columns.issuperset(marks) for marks in each.marks)), None)


def has_arrivals(layout: TraceLayout, header: bytes) -> bool:
    """Whether one of the columns says when a request comes."""
    return not set(layout.arrival).isdisjoint(_names(header))


def _names(header: bytes) -> list[str]:
    """Names of columns as layouts spell them."""
    try:
        cells = next(csv.reader([header.decode(errors="replace")]), [])
    except csv.Error:
        return []
    return [cell.strip().lower() for cell in cells]


class _Columns(Struct, frozen=True):
    """Where a header has what; None where it has no such column."""

    names: tuple[str, ...]
    prompt: int
    output: int
    arrival: int | None
    id: int | None
    only: tuple[tuple[int, int], ...]


def _columns(layout: TraceLayout, header: list[str]) -> _Columns:
    """Wrong where two columns are of one name, or for one thing."""
    names = tuple(cell.strip() for cell in header)
    at = {name.lower(): index for index, name in enumerate(names)}
    if len(at) < len(names):
        twice = next(name for index, name in enumerate(names) if at[name.lower()] != index)
        raise Wrong(f"has the column {shown(twice)} twice, allowed is once")

    def place(spellings: tuple[str, ...]) -> int | None:
        there = [at[spelling] for spelling in spellings if spelling in at]
        if len(there) > 1:
            raise Wrong(f"has both {names[there[0]]} and {names[there[1]]}, allowed is one of them")
        return there[0] if there else None

    prompt, output = place(layout.prompt), place(layout.output)
    if prompt is None or output is None:
        missing = layout.prompt if prompt is None else layout.output
        raise Wrong(f"has no column {' or '.join(missing)}")
    only = tuple((at[name], value) for name, value in layout.only if name in at)
    return _Columns(names, prompt, output, place(layout.arrival), place(layout.id), only)


class Table:
    """The rows of a table, from its header on; `drawn` are the arrivals where no column has them."""

    def __init__(self, layout: TraceLayout, numbered: Iterable[tuple[int, bytes]], drawn: Iterator[float]) -> None:
        self.number = self.count = self.left_out = 0
        self.dated = False
        self._layout = layout
        self._numbered = numbered
        self._drawn = drawn
        self._inside = False  # of a row
        self._first: datetime | None = None
        self._latest = 0.0
        self._said = ""  # the arrival of the row before
        self._ids = Ids()

    def entries(self) -> Iterator[Entry]:
        """All entries; Wrong at the first wrong line."""
        rows = csv.reader(self._texts(), strict=True)
        try:
            columns = _columns(self._layout, next(rows))
            self._inside = False
            for row in rows:
                self._inside = False
                entry = self._entry(columns, row)
                if entry is not None:
                    self.count += 1
                    yield entry
        except csv.Error as wrong:
            raise Wrong(f"not CSV: {wrong}") from None

    def _texts(self) -> Iterator[str]:
        """Lines with something in them. A row is a line: a quoted line break would let a row grow without bound."""
        for number, line in self._numbered:
            if self._inside:
                raise Wrong("a quote is not closed in its line")
            self.number = number
            text = text_of(line)
            if not text.isspace():
                self._inside = True
                yield text

    def _entry(self, columns: _Columns, row: list[str]) -> Entry | None:
        """What a row says; None where the request came to nothing."""
        names = columns.names
        if len(row) != len(names):
            raise Wrong(f"has {len(row)} cells, the header has {len(names)}")
        for index, value in columns.only:
            if row[index].strip() not in ("", str(value), f"{value}.0"):
                raise Wrong(f"{names[index]} is {shown(row[index])}, allowed is {value}: anything else is not modelled")
        at, name = columns.arrival, columns.id
        arrival = next(self._drawn) if at is None else self._arrival(names[at], row[at].strip())
        if self._layout.failed and row[columns.output] in _NOTHING:
            self.left_out += 1
            return None
        return Entry(
            line=self.number,
            id=self.count if name is None else self._ids.new(names[name], row[name].strip()),
            arrival=arrival,
            in_seconds=self.dated or at is None or names[at].lower() == "arrival_s",
            prompt_tokens=_tokens(names[columns.prompt], row[columns.prompt]),
            output_tokens=_tokens(names[columns.output], row[columns.output]),
        )

    def _arrival(self, name: str, text: str) -> float:
        """As the number says, or in seconds from the first date."""
        if not self._said:
            self.dated = _number(text) is None and _date(text) is not None
        arrival = self._since_first(name, text) if self.dated else _number(text)
        if arrival is None:
            dates = "dates such as 2023-11-16 18:15:46.68"
            allowed = f"{dates}, as before" if self.dated else f"numbers from 0 to {MAX_TIME:g}"
            raise Wrong(f"{name} is {shown(text)}, allowed are {allowed if self._said else f'{allowed}, or {dates}'}")
        if self._said and arrival < self._latest:
            raise Wrong(f"{name} is {text}, before {self._said} of the request before; sort the trace by arrival")
        self._latest, self._said = arrival, text
        return arrival

    def _since_first(self, name: str, text: str) -> float | None:
        when = _date(text)
        if when is None:
            return None
        if self._first is None:
            self._first = when
        try:
            return (when - self._first).total_seconds()
        except TypeError:
            with_zone = "has a time zone" if when.tzinfo else "has no time zone"
            raise Wrong(f"{name} {shown(text)} {with_zone}, unlike the rows before") from None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MAX_TIME and "_" not in text else None


def _date(text: str) -> datetime | None:
    """A date of ISO 8601, to the microsecond."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _tokens(name: str, text: str) -> int:
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return tokens_of(name, int(text))
    value = _number(text.strip())
    return tokens_of(name, text if value is None else value)
