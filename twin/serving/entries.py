"""What a line of a trace says, whatever its layout, and the checks that all layouts share."""

import json
from collections.abc import Iterator
from typing import Any, Protocol

from msgspec import Struct

from twin.units import MAX_TOKENS, MIB

MAX_LINE_BYTES = MIB
MAX_ID = 2**63 - 1
MAX_ID_LENGTH = 200
MAX_TIME = 1e15  # largest arrival: milliseconds since 1970 for the next 30,000 years
REMEMBERED_IDS = 2**18  # ids held against later ones, so that memory stays bounded

_SHOWN = 40


class Wrong(ValueError):
    """What is wrong with a trace; its path is added outside."""

    def __init__(self, message: str, *, hint: str = "", line: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.line = line  # 0: all of it; None: the line that was read last


class Entry(Struct, frozen=True, kw_only=True, gc=False):
    """What a line of a trace says, with its numbers as they stand there."""

    line: int
    id: str | int
    arrival: float
    in_seconds: bool  # by the name of the key
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[str | int, ...] = ()
    prefix_tokens: int = 0  # 0: `prefix_ids` are hashes, each for as many tokens
    in_chats: bool = False  # whether it names a chat and that chat's parent, as Bailian's traces do

    @property
    def hashes(self) -> int:
        """Hashes of its prompt."""
        return 0 if self.prefix_tokens else len(self.prefix_ids)


class Reader(Protocol):
    """Reads the lines of one layout."""

    number: int  # the line that was read last
    count: int  # entries so far
    left_out: int  # requests so far of which the layout says that they came to nothing

    def entries(self) -> Iterator[Entry]:
        """All entries; Wrong at the first wrong line."""


class Ids:
    """Names of requests, each of which may come once."""

    def __init__(self) -> None:
        self._known: set[str | int] = set()

    def new(self, name: str, value: Any) -> str | int:
        """The id, or Wrong: as long as there are no more than are remembered."""
        known = name_of(name, value)
        if known in self._known:
            raise Wrong(f"{name} {shown(value)} appears twice, allowed is once")
        if len(self._known) < REMEMBERED_IDS:
            self._known.add(known)
        return known


def tokens_of(name: str, value: Any, most: int = MAX_TOKENS) -> int:
    """A count of tokens, at least 1."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= most:
        raise Wrong(f"{name} is {shown(value)}, allowed are whole numbers from 1 to {most:,}")
    return value


def name_of(name: str, value: Any) -> str | int:
    """What names a request or a piece of a prompt."""
    if type(value) is not str and not (type(value) is int and abs(value) <= MAX_ID):
        raise Wrong(f"{name} is {shown(value)}, allowed are text and whole numbers of 64 bits")
    if type(value) is str and len(value) > MAX_ID_LENGTH:
        raise Wrong(f"{name} has {len(value):,} characters, allowed are {MAX_ID_LENGTH}")
    return value


def text_of(line: bytes) -> str:
    """A line as text; Wrong where it is too long or none."""
    if len(line) > MAX_LINE_BYTES:
        raise Wrong(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as wrong:
        raise Wrong(f"not UTF-8 text (byte {wrong.start})") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values, for a JSON decoder; Wrong where a key stands twice."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise Wrong(f"has {shown(key)} twice, allowed is once")
    return dict(pairs)


def shown(value: Any) -> str:
    """A value as JSON, cut short."""
    try:
        text = json.dumps(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
