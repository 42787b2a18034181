"""Published figures as their authors gave them: rows of a number, a range or a yes or no, read strictly."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from hwprofiles.errors import BadFile
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS

SCHEMA = "twin.published/1"

Text = Annotated[str, Meta(min_length=1)]
_Read = TypeVar("_Read")


class Row(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published figure."""

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
        check_schema(self.schema, SCHEMA)
        refuse_repeats("row", (row.id for row in self.rows))


def read_published(name: str) -> Published:
    """The shipped file of rows called `name`. Raises BadFile in one line."""
    return read_as(RECORDS / name, Published)


def read_as(path: Path, kind: type[_Read]) -> _Read:
    """The JSON in `path` as a `kind`. Raises BadFile in one line."""
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as wrong:
        raise BadFile(f"{path}: {wrong}") from None


def check_schema(schema: str, known: str) -> None:
    """Raise ValueError for a file of another kind or age."""
    if schema != known:
        raise ValueError(f"schema must be {known!r}, not {schema!r}")


def refuse_repeats(what: str, ids: Iterable[str]) -> None:
    """Raise ValueError where an id stands twice."""
    repeated = [name for name, times in Counter(ids).items() if times > 1]
    if repeated:
        raise ValueError(f"{what} {repeated[0]!r} appears twice")
