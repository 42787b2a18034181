"""JSON lines that count tokens: what a line must hold, and how it must fit the ones before it."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET, DecodeError, defstruct
from msgspec.json import Decoder
from msgspec.structs import asdict

from hwprofiles.traces import JSON_LINES
from twin.serving.entries import (
    MAX_LINE_BYTES,
    MAX_TIME,
    Entry,
    Ids,
    Wrong,
    name_of,
    shown,
    text_of,
    tokens_of,
    unique,
)

_STRINGS = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)
"""All strings of a JSON text in order, and whether each is a key."""

Fields = dict[str, Any]

_OTHERS = ("prefix_id", "prefix_tokens", "hash_ids", "chat_id", "parent_chat_id")
_Line = defstruct(
    "_Line",
    [
        (name, Any, UNSET)
        for name in (*JSON_LINES.arrival, *JSON_LINES.prompt, *JSON_LINES.output, *JSON_LINES.id, *_OTHERS)
    ],
)


class Lines:
    """JSON lines, and what a line is checked against: the ones before it."""

    def __init__(self, numbered: Iterable[tuple[int, bytes]] = ()) -> None:
        self.number = self.count = self.left_out = 0
        self._numbered = numbered
        self._decode = Decoder(_Line).decode
        self._clock = ""
        self._latest = 0.0
        self._ids = Ids()

    def entries(self) -> Iterator[Entry]:
        """All entries; Wrong at the first wrong line."""
        return (self.entry(line, number) for number, line in self._numbered if not line.isspace())

    def entry(self, line: bytes, number: int) -> Entry:
        """What a line says, or Wrong."""
        self.number = number
        fields = self._fields(line)
        clock, arrival = self._arrival(fields)
        prompt = tokens_of(*_only(fields, JSON_LINES.prompt))
        output = tokens_of(*_only(fields, JSON_LINES.output))
        prefix_ids, prefix_tokens = _prefix(fields, prompt)
        entry = Entry(
            line=number,
            id=self._id(fields),
            arrival=arrival,
            in_seconds=clock == "arrival_s",
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_ids=prefix_ids,
            prefix_tokens=prefix_tokens,
            in_chats="chat_id" in fields and "parent_chat_id" in fields,
        )
        self.count += 1
        return entry

    def _fields(self, line: bytes) -> Fields:
        if len(line) > MAX_LINE_BYTES or not line.isascii():
            text_of(line)
        try:
            fields = asdict(self._decode(line))
        except RecursionError:
            raise Wrong("not a request: nested too deeply") from None
        except DecodeError as wrong:
            end = "" if line.endswith(b"\n") else "; the file ends here"
            raise Wrong(f"not a JSON object: {wrong}{end}") from None
        _refuse_repeats(line)
        return {name: value for name, value in fields.items() if value is not UNSET}

    def _arrival(self, fields: Fields) -> tuple[str, float]:
        name, value = _only(fields, JSON_LINES.arrival)
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            raise Wrong(f"{name} is {shown(value)}, allowed are numbers from 0 to {MAX_TIME:g}")
        if not self.count:
            self._clock, self._latest = name, value
        elif name != self._clock:
            raise Wrong(f"{name} after {self._clock} in the lines before, allowed is one of them in a file")
        if value < self._latest:
            raise Wrong(f"{name} is {value}, before {self._latest} of the request before; sort the trace by arrival")
        self._latest = value
        return name, value

    def _id(self, fields: Fields) -> str | int:
        """As given, or the number of requests before it."""
        if not fields.keys() & JSON_LINES.id:
            return self.count
        name, value = _only(fields, JSON_LINES.id)
        return self._ids.new(name, value)


def _refuse_repeats(line: bytes) -> None:
    """Raise Wrong where a key stands twice in an object: the decoder would take the last.

    Strings with a colon after them are told apart by their bytes, which is quick; the rare line in which two are alike
    (in different objects, perhaps) or one is escaped is read again, key by key.
    """
    keys = [key for key, colon in _STRINGS.findall(line) if colon]
    if len(set(keys)) < len(keys) or any(b"\\" in key for key in keys):
        try:
            json.loads(line, object_pairs_hook=unique, parse_int=str)  # int() takes but 4,300 digits
        except RecursionError:
            raise Wrong("not a request: nested too deeply") from None


def _only(fields: Fields, names: tuple[str, ...]) -> tuple[str, Any]:
    """The one of several spellings that a line has, and its value."""
    there = [name for name in names if name in fields]
    if len(there) > 1:
        raise Wrong(f"has both {there[0]} and {there[1]}, allowed is one of them")
    if not there:
        raise Wrong(f"has no {names[0]} (or {' or '.join(names[1:])})")
    return there[0], fields[there[0]]


def _prefix(fields: Fields, prompt: int) -> tuple[tuple[str | int, ...], int]:
    """Names of the start of the prompt, and its tokens; 0 where the names are hashes."""
    if ("prefix_id" in fields) != ("prefix_tokens" in fields):
        raise Wrong("has one of prefix_id and prefix_tokens, allowed are both or none")
    if "prefix_id" in fields:
        if "hash_ids" in fields:
            raise Wrong("has both prefix_id and hash_ids, allowed is one of them")
        return (name_of("prefix_id", fields["prefix_id"]),), tokens_of("prefix_tokens", fields["prefix_tokens"], prompt)
    hashes = fields.get("hash_ids", [])
    if type(hashes) is not list:
        raise Wrong(f"hash_ids is {shown(hashes)}, allowed is a list")
    return tuple(name_of("hash_ids", each) for each in hashes), 0
