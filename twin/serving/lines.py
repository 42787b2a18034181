"""The lines of a trace, one after the other: each checked by itself and against those before it.

A line is an object with one name from each row; other keys are ignored, blank lines are allowed:

    arrival          arrival_s (seconds) or timestamp (`reading.py` has its unit), from any start, in order
    prompt tokens    prompt_tokens, input_length or prompt
    output tokens    output_tokens, output_length or output: at least 1, because an engine always samples one
    id               id or request_id: text or a whole number, optional
    shared prefix    prefix_id with prefix_tokens, or hash_ids (`reading.py` has their tokens), optional
"""

import json
import re
from typing import Any

from msgspec import UNSET, DecodeError, Struct
from msgspec.json import Decoder

from twin.serving.reading import Entry, Wrong
from twin.units import MAX_TOKENS, MIB

MAX_LINE_BYTES = MIB
MAX_ID = 2**63 - 1
MAX_ID_LENGTH = 200
MAX_TIME = 1e15
"""Largest arrival: milliseconds since 1970 for the next 30,000 years."""
REMEMBERED_IDS = 2**18
"""Ids that are held against later ones, so that memory stays bounded: a repetition later than that passes."""

_SHOWN = 40
_STRINGS = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)
"""All strings of a JSON text in order, and whether each is a key."""


class _Line(Struct):
    arrival_s: Any = UNSET
    timestamp: Any = UNSET
    prompt_tokens: Any = UNSET
    input_length: Any = UNSET
    prompt: Any = UNSET
    output_tokens: Any = UNSET
    output_length: Any = UNSET
    output: Any = UNSET
    id: Any = UNSET
    request_id: Any = UNSET
    prefix_id: Any = UNSET
    prefix_tokens: Any = UNSET
    hash_ids: Any = UNSET
    chat_id: Any = UNSET
    parent_chat_id: Any = UNSET


_ARRIVAL = ("arrival_s", "timestamp")
_PROMPT = ("prompt_tokens", "input_length", "prompt")
_OUTPUT = ("output_tokens", "output_length", "output")
_ID = ("id", "request_id")


class Lines:
    """What a line is checked against: the ones before it."""

    def __init__(self) -> None:
        self.count = self.number = 0
        self._decode = Decoder(_Line).decode
        self._clock = ""
        self._latest = 0.0
        self._ids: set[str | int] = set()

    def entry(self, line: bytes, number: int) -> Entry:
        """What a line says, or Wrong."""
        self.number = number
        fields = self._fields(line)
        clock, arrival = self._arrival(fields)
        prompt = _tokens(*_only(fields, _PROMPT))
        output = _tokens(*_only(fields, _OUTPUT))
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
            in_chats=fields.chat_id is not UNSET and fields.parent_chat_id is not UNSET,
        )
        self.count += 1
        return entry

    def _fields(self, line: bytes) -> _Line:
        if len(line) > MAX_LINE_BYTES:
            raise Wrong(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            if not line.isascii():
                line.decode()
            fields = self._decode(line)
        except UnicodeDecodeError as wrong:
            raise Wrong(f"not UTF-8 text (byte {wrong.start})") from None
        except RecursionError:
            raise Wrong("not a request: nested too deeply") from None
        except DecodeError as wrong:
            end = "" if line.endswith(b"\n") else "; the file ends here"
            raise Wrong(f"not a JSON object: {wrong}{end}") from None
        _refuse_repeats(line)
        return fields

    def _arrival(self, fields: _Line) -> tuple[str, float]:
        name, value = _only(fields, _ARRIVAL)
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            raise Wrong(f"{name} is {_shown(value)}, allowed are numbers from 0 to {MAX_TIME:g}")
        if not self.count:
            self._clock, self._latest = name, value
        elif name != self._clock:
            raise Wrong(f"{name} after {self._clock} in the lines before, allowed is one of them in a file")
        if value < self._latest:
            raise Wrong(f"{name} is {value}, before {self._latest} of the request before; sort the trace by arrival")
        self._latest = value
        return name, value

    def _id(self, fields: _Line) -> str | int:
        """As given, or the number of requests before it."""
        name, value = _only(fields, _ID, optional=True)
        if value is UNSET:
            return self.count
        known = _name(name, value)
        if known in self._ids:
            raise Wrong(f"{name} {_shown(value)} appears twice, allowed is once")
        if len(self._ids) < REMEMBERED_IDS:
            self._ids.add(known)
        return known


def _refuse_repeats(line: bytes) -> None:
    """Raise Wrong where a key stands twice in an object: the decoder would take the last.

    Strings with a colon after them are told apart by their bytes, which is quick; the rare line in which two are alike
    (in different objects, perhaps) or one is escaped is read again, key by key.
    """
    keys = [key for key, colon in _STRINGS.findall(line) if colon]
    if len(set(keys)) < len(keys) or any(b"\\" in key for key in keys):
        try:
            json.loads(line, object_pairs_hook=_unique)
        except RecursionError:
            raise Wrong("not a request: nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise Wrong(f"has {_shown(key)} twice, allowed is once")


def _only(fields: _Line, names: tuple[str, ...], *, optional: bool = False) -> tuple[str, Any]:
    """The one of several spellings that a line has, and its value."""
    there = [name for name in names if getattr(fields, name) is not UNSET]
    if len(there) > 1:
        raise Wrong(f"has both {there[0]} and {there[1]}, allowed is one of them")
    if there:
        return there[0], getattr(fields, there[0])
    if optional:
        return names[0], UNSET
    raise Wrong(f"has no {names[0]} (or {' or '.join(names[1:])})")


def _tokens(name: str, value: Any, most: int = MAX_TOKENS) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= most:
        raise Wrong(f"{name} is {_shown(value)}, allowed are whole numbers from 1 to {most:,}")
    return value


def _name(name: str, value: Any) -> str | int:
    if type(value) is not str and not (type(value) is int and abs(value) <= MAX_ID):
        raise Wrong(f"{name} is {_shown(value)}, allowed are text and whole numbers of 64 bits")
    if type(value) is str and len(value) > MAX_ID_LENGTH:
        raise Wrong(f"{name} has {len(value):,} characters, allowed are {MAX_ID_LENGTH}")
    return value


def _prefix(fields: _Line, prompt: int) -> tuple[tuple[str | int, ...], int]:
    """Names of the start of the prompt, and its tokens; 0 where the names are hashes."""
    has_id, has_tokens = fields.prefix_id is not UNSET, fields.prefix_tokens is not UNSET
    if has_id != has_tokens:
        raise Wrong("has one of prefix_id and prefix_tokens, allowed are both or none")
    if has_id and fields.hash_ids is not UNSET:
        raise Wrong("has both prefix_id and hash_ids, allowed is one of them")
    if has_id:
        return (_name("prefix_id", fields.prefix_id),), _tokens("prefix_tokens", fields.prefix_tokens, prompt)
    if fields.hash_ids is UNSET:
        return (), 0
    if type(fields.hash_ids) is not list:
        raise Wrong(f"hash_ids is {_shown(fields.hash_ids)}, allowed is a list")
    return tuple(_name("hash_ids", each) for each in fields.hash_ids), 0


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
