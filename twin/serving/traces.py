"""Request traces as JSON lines, plain or gzipped, read one line at a time: their size does not matter.

A line is an object with one name from each row; other keys are ignored, blank lines are allowed:

    arrival          arrival_s (seconds) or timestamp (milliseconds, as in Mooncake's traces), from any start, in order
    prompt tokens    prompt_tokens, input_length or prompt
    output tokens    output_tokens, output_length or output: at least 1, because an engine always samples one
    id               id or request_id: text or a whole number, optional
    shared prefix    prefix_id with prefix_tokens, or hash_ids (one for every 512 tokens); optional

Time 0 is the arrival of the first request. Source of timestamp, input_length, output_length and hash_ids: the format of
Mooncake's traces (Qin et al., FAST '25; github.com/kvcache-ai/Mooncake), 512 tokens a hash.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from msgspec import UNSET, DecodeError, Struct
from msgspec.json import Decoder

from twin.errors import BadFile
from twin.serving.requests import Request
from twin.units import MAX_TOKENS, MIB, MS

MAX_LINE_BYTES = MIB
MAX_ID = 2**63 - 1
MAX_ID_LENGTH = 200
MAX_TIME = 1e15
"""Largest arrival: milliseconds since 1970 for the next 30,000 years."""
HASH_TOKENS = 512
REMEMBERED_IDS = 2**18
"""Ids that are held against later ones, so that memory stays bounded: a repetition later than that passes."""

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SCALES = {"arrival_s": 1.0, "timestamp": MS}
_SHOWN = 40


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


_ARRIVAL = ("arrival_s", "timestamp")
_PROMPT = ("prompt_tokens", "input_length", "prompt")
_OUTPUT = ("output_tokens", "output_length", "output")
_ID = ("id", "request_id")


class _Wrong(ValueError):
    """What is wrong with a line; file and line are added outside."""


class _Prefix(NamedTuple):
    ids: tuple[str | int, ...]
    tokens: int
    span: int


_NO_PREFIX = _Prefix((), 0, 0)


def read_trace(path: Path, *, hash_tokens: int = HASH_TOKENS) -> Iterator[Request]:
    """The requests of a trace in its order. BadFile with file and line at the first thing that is wrong."""
    number = 0
    state = _State(hash_tokens)
    try:
        with path.open("rb") as raw:
            for number, line in _lines(raw):
                if not line.isspace():
                    yield state.request(line, number)
            if not state.count:
                raise BadFile(f"{path}: holds no requests")
    except _Wrong as wrong:
        raise BadFile(f"{path}:{state.number}: {wrong}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
        raise BadFile(f"{path}:{number + 1}: broken gzip data: {wrong}") from None
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None


def _lines(raw: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, none longer than one byte over the limit."""
    zipped = raw.peek(2)[:2] == _GZIP_MAGIC
    stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if zipped else raw
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


class _State:
    """What a line is checked against: the ones before it."""

    def __init__(self, hash_tokens: int) -> None:
        self.count = self.number = 0
        self._hash_tokens = hash_tokens
        self._decode = Decoder(_Line).decode
        self._clock = ""
        self._first = self._latest = 0.0
        self._ids: set[str | int] = set()

    def request(self, line: bytes, number: int) -> Request:
        """The request on a line, or _Wrong."""
        self.number = number
        fields = self._fields(line)
        arrival_s = self._arrival_s(fields)
        prompt = _tokens(*_only(fields, _PROMPT))
        output = _tokens(*_only(fields, _OUTPUT))
        prefix = _prefix(fields, prompt, self._hash_tokens)
        request = Request(
            id=self._id(fields),
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_ids=prefix.ids,
            prefix_tokens=prefix.tokens,
            prefix_span=prefix.span,
            line=number,
        )
        self.count += 1
        return request

    def _fields(self, line: bytes) -> _Line:
        if len(line) > MAX_LINE_BYTES:
            raise _Wrong(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            if not line.isascii():
                line.decode()
            return self._decode(line)
        except UnicodeDecodeError as wrong:
            raise _Wrong(f"not UTF-8 text (byte {wrong.start})") from None
        except RecursionError:
            raise _Wrong("not a request: nested too deeply") from None
        except DecodeError as wrong:
            end = "" if line.endswith(b"\n") else "; the file ends here"
            raise _Wrong(f"not a JSON object: {wrong}{end}") from None

    def _arrival_s(self, fields: _Line) -> float:
        name, value = _only(fields, _ARRIVAL)
        if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
            raise _Wrong(f"{name} is {_shown(value)}, allowed are numbers from 0 to {MAX_TIME:g}")
        if not self.count:
            self._clock, self._first, self._latest = name, value, value
        elif name != self._clock:
            raise _Wrong(f"{name} after {self._clock} in the lines before, allowed is one of them in a file")
        if value < self._latest:
            raise _Wrong(f"{name} is {value}, before {self._latest} of the request before; sort the trace by arrival")
        self._latest = value
        return float((value - self._first) * _SCALES[name])

    def _id(self, fields: _Line) -> str | int:
        """As given, or the number of requests before it."""
        name, value = _only(fields, _ID, optional=True)
        if value is UNSET:
            return self.count
        known = _name(name, value)
        if known in self._ids:
            raise _Wrong(f"{name} {_shown(value)} appears twice, allowed is once")
        if len(self._ids) < REMEMBERED_IDS:
            self._ids.add(known)
        return known


def _only(fields: _Line, names: tuple[str, ...], *, optional: bool = False) -> tuple[str, Any]:
    """The one of several spellings that a line has, and its value."""
    there = [name for name in names if getattr(fields, name) is not UNSET]
    if len(there) > 1:
        raise _Wrong(f"has both {there[0]} and {there[1]}, allowed is one of them")
    if there:
        return there[0], getattr(fields, there[0])
    if optional:
        return names[0], UNSET
    raise _Wrong(f"has no {names[0]} (or {' or '.join(names[1:])})")


def _tokens(name: str, value: Any, most: int = MAX_TOKENS) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= most:
        raise _Wrong(f"{name} is {_shown(value)}, allowed are whole numbers from 1 to {most:,}")
    return value


def _name(name: str, value: Any) -> str | int:
    if type(value) is not str and not (type(value) is int and abs(value) <= MAX_ID):
        raise _Wrong(f"{name} is {_shown(value)}, allowed are text and whole numbers of 64 bits")
    if type(value) is str and len(value) > MAX_ID_LENGTH:
        raise _Wrong(f"{name} has {len(value):,} characters, allowed are {MAX_ID_LENGTH}")
    return value


def _prefix(fields: _Line, prompt: int, hash_tokens: int) -> _Prefix:
    """The part of the prompt that is named; hashes beyond its end are ignored."""
    has_id, has_tokens = fields.prefix_id is not UNSET, fields.prefix_tokens is not UNSET
    if has_id != has_tokens:
        raise _Wrong("has one of prefix_id and prefix_tokens, allowed are both or none")
    if has_id and fields.hash_ids is not UNSET:
        raise _Wrong("has both prefix_id and hash_ids, allowed is one of them")
    if has_id:
        tokens = _tokens("prefix_tokens", fields.prefix_tokens, prompt)
        return _Prefix((_name("prefix_id", fields.prefix_id),), tokens, 0)
    if fields.hash_ids is UNSET:
        return _NO_PREFIX
    if type(fields.hash_ids) is not list:
        raise _Wrong(f"hash_ids is {_shown(fields.hash_ids)}, allowed is a list")
    ids = fields.hash_ids[: -(-prompt // hash_tokens)]
    if not ids:
        return _NO_PREFIX
    return _Prefix(tuple(_name("hash_ids", each) for each in ids), min(prompt, len(ids) * hash_tokens), hash_tokens)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
