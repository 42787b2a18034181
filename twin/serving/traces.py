"""Request traces as JSON lines, plain or gzipped, read one line at a time: their size does not matter.

A line is an object with one name from each row; other keys are ignored, blank lines are allowed:

    arrival          arrival_s (seconds) or timestamp (whose unit is told below), from any start, in order
    prompt tokens    prompt_tokens, input_length or prompt
    output tokens    output_tokens, output_length or output: at least 1, because an engine always samples one
    id               id or request_id: text or a whole number, optional
    shared prefix    prefix_id with prefix_tokens, or hash_ids (whose tokens are told below), optional

Time 0 is the arrival of the first request. What the names leave open is told from the first lines where these decide,
and asked for where they do not:

    tokens a hash    a prompt of L tokens has ceil(L / h) hashes, or floor(L / h) where an unfinished piece has none. So
                     each line leaves a range of h: where a single number or power of two is left by all, it is taken.
    timestamp        Bailian's traces (chat_id and parent_chat_id in a line) are in seconds. Mooncake's (whole numbers,
                     512 tokens a hash) are in milliseconds, and so is a number that would be millennia in seconds.

Sources: what is written about both traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon, kvcache-ai/Mooncake).
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, DecodeError, Struct, defstruct
from msgspec.json import Decoder
from msgspec.structs import asdict

from hwprofiles.recognition import HEAD_BYTES, TRACE, kind_of, kind_of_head
from twin.errors import BadFile
from twin.serving.requests import Request
from twin.units import MAX_TOKENS, MIB, MS

TimeUnit = Literal["s", "ms"]

ENTRIES_AHEAD, HASHES_AHEAD = 1000, 2**16  # how far is looked ahead: to the line that reaches either

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOONCAKE_HASH_TOKENS = 512
BAILIAN_HASH_TOKENS = 16
USUAL_HASH_TOKENS = tuple(2**power for power in range(14))
MILLENNIA = 1e11  # seconds: no trace is that long, and none begins that long after 1970
MAX_LINE_BYTES = MIB
MAX_ID = 2**63 - 1
MAX_ID_LENGTH = 200
MAX_TIME = 1e15  # largest arrival: milliseconds since 1970 for the next 30,000 years
REMEMBERED_IDS = 2**18  # ids held against later ones, so that memory stays bounded

_UNITS = {"s": "in seconds", "ms": "in milliseconds", None: "all at once"}
_SHOWN = 40
_STRINGS = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)
"""All strings of a JSON text in order, and whether each is a key."""
_INSTEAD = (
    "--trace-in reads JSON objects, one a line, with arrival_s (seconds) or timestamp, "
    "prompt_tokens or input_length, output_tokens or output_length"
)


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of a trace, or asked for."""

    time_unit: TimeUnit | None = None  # None: not known, or all requests arrive at once and it does not matter
    hash_tokens: int | None = None  # None: not known, or no line has hashes

    @property
    def text(self) -> str:
        """For a reader, after the name of the trace."""
        return _UNITS[self.time_unit] + (f", {self.hash_tokens:,} tokens a hash" if self.hash_tokens else "")


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
    prefix_ids: tuple[str | int, ...]
    prefix_tokens: int  # 0: `prefix_ids` are hashes, each for as many tokens
    in_chats: bool  # whether it names a chat and that chat's parent, as Bailian's traces do

    @property
    def hashes(self) -> int:
        """Hashes of its prompt."""
        return 0 if self.prefix_tokens else len(self.prefix_ids)


_NOTHING_ASKED = Reading()


def read_trace(
    path: Path, asked: Reading = _NOTHING_ASKED, *, understood: Callable[[Reading], object] = lambda _: None
) -> Iterator[Request]:
    """The requests of a trace in its order, BadFile at the first wrong line; `understood` is told how it is read."""
    lines, head = Lines(), b""
    try:
        with path.open("rb") as raw:
            stream = _stream(raw)
            head = stream.peek(HEAD_BYTES)
            entries = (lines.entry(line, number) for number, line in _numbered(stream) if not line.isspace())
            ahead, whole = _ahead(entries)
            reading = understand(ahead, asked, whole=whole)
            understood(reading)
            first = ahead[0].arrival if ahead else 0.0
            for entry in chain(ahead, entries):
                yield _request(entry, reading, first)
            if not lines.count:
                raise BadFile(f"{path}: holds no requests")
    except Wrong as wrong:
        known = "" if lines.count else kind_of_head(head)
        if known not in ("", TRACE):
            raise BadFile(f"{path}: {known}, not {TRACE}", hint=_INSTEAD) from None
        line = lines.number if wrong.line is None else wrong.line
        raise BadFile(f"{path}{f':{line}' if line else ''}: {wrong}", hint=wrong.hint) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
        raise BadFile(f"{path}:{lines.number + 1}: broken gzip data: {wrong}") from None
    except OSError as wrong:
        if kind_of(path):
            raise BadFile(f"{path}: {kind_of(path)}, not {TRACE}", hint=_INSTEAD) from None
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None


def _stream(raw: BufferedReader) -> BufferedReader | gzip.GzipFile:
    """What is read: `raw`, or what is compressed in it."""
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw


def _numbered(stream: BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, none longer than one byte over the limit."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


def _ahead(entries: Iterator[Entry]) -> tuple[list[Entry], bool]:
    """The first entries, and whether they are all."""
    ahead: list[Entry] = []
    hashes = 0
    for entry in entries:
        ahead.append(entry)
        hashes += entry.hashes
        if len(ahead) == ENTRIES_AHEAD or hashes >= HASHES_AHEAD:
            return ahead, False
    return ahead, True


def _request(entry: Entry, reading: Reading, first: float) -> Request:
    """The request of an entry; Wrong where its hashes contradict the length of its prompt."""
    prefix_tokens, span = entry.prefix_tokens, 0
    if entry.hashes:
        span = reading.hash_tokens or 0
        prefix_tokens = min(entry.prompt_tokens, entry.hashes * span)
        _check_hashes(entry, span)
    return Request(
        id=entry.id,
        arrival_s=float((entry.arrival - first) * (MS if reading.time_unit == "ms" else 1)),
        prompt_tokens=entry.prompt_tokens,
        output_tokens=entry.output_tokens,
        prefix_ids=entry.prefix_ids,
        prefix_tokens=prefix_tokens,
        prefix_span=span,
        line=entry.line,
    )


def _check_hashes(entry: Entry, hash_tokens: int) -> None:
    if not hash_tokens:
        late = "the first hash_ids come too late to tell what they stand for"
        raise Wrong(late, hint="--hash-tokens N says it", line=entry.line)
    begun = -(-entry.prompt_tokens // hash_tokens)
    if not entry.prompt_tokens // hash_tokens <= entry.hashes <= begun:
        allowed = f"allowed are {begun:,} of {hash_tokens:,} tokens each"
        wrong = f"{entry.hashes:,} hash_ids for {entry.prompt_tokens:,} prompt tokens, {allowed}"
        raise Wrong(wrong, line=entry.line)


def understand(ahead: Sequence[Entry], asked: Reading, *, whole: bool) -> Reading:
    """How to read a trace that begins with `ahead`, what is `asked` first; Wrong where an option has to say it."""
    hashed = [entry for entry in ahead if entry.hashes]
    bailian = all(entry.in_chats for entry in ahead)
    sizes, left = ([asked.hash_tokens], "") if asked.hash_tokens else hash_sizes(hashed)
    if bailian and BAILIAN_HASH_TOKENS in sizes:
        sizes = [BAILIAN_HASH_TOKENS]
    hash_tokens = sizes[0] if len(sizes) == 1 else None
    time_unit = _time_unit(ahead, asked, bailian=bailian, hash_tokens=hash_tokens)
    span = ahead[-1].arrival - ahead[0].arrival if ahead else 0.0
    what, how = [], []
    if time_unit is None and (span or not whole):
        what.append("timestamp may be in seconds or in milliseconds")
        how.append(f"--time-unit s or ms: {span:,.12g} s or ms from the first to the last of {len(ahead):,} requests")
    if hash_tokens is None and hashed:
        what.append(f"hash_ids may stand for {' or '.join(map(str, sizes)) or left} tokens each")
        how.append("--hash-tokens N")
    if what:
        raise Wrong("; ".join(what), hint="; ".join(how), line=0)
    return Reading(time_unit=time_unit, hash_tokens=hash_tokens)


def _time_unit(ahead: Sequence[Entry], asked: Reading, *, bailian: bool, hash_tokens: int | None) -> TimeUnit | None:
    """The unit, where it is decided."""
    if any(entry.in_seconds for entry in ahead):
        if asked.time_unit == "ms":
            raise Wrong("arrival_s is in seconds, not in milliseconds", hint="--time-unit is for timestamp", line=0)
        return "s"
    if asked.time_unit or bailian:
        return asked.time_unit or "s"
    mooncake = hash_tokens == MOONCAKE_HASH_TOKENS and all(type(entry.arrival) is int for entry in ahead)
    return "ms" if mooncake or ahead[-1].arrival >= MILLENNIA else None


def hash_sizes(hashed: Sequence[Entry]) -> tuple[list[int], str]:
    """Sizes that all entries with hashes allow, and in words their range: the only size, or else the usual ones.

    Where unfinished pieces cannot have been counted, one must be left. Wrong where an entry contradicts the others.
    """
    up: tuple[float, float] = (1, math.inf)
    down = up
    contradiction = None
    for entry in hashed:
        tokens, hashes = entry.prompt_tokens, entry.hashes
        before, most = up, -(-tokens // (hashes - 1)) - 1 if hashes > 1 else math.inf
        up = max(up[0], -(-tokens // hashes)), min(up[1], most)
        down = max(down[0], tokens // (hashes + 1) + 1), min(down[1], tokens // hashes)
        if contradiction is None and up[0] > up[1]:
            others = f", where the lines before mean {_range(*before)} tokens each" if before[1] < math.inf else ""
            contradiction = Wrong(f"{hashes:,} hash_ids for {tokens:,} prompt tokens{others}", line=entry.line)
    if contradiction is None:
        return _usual(*up), _range(*up)
    if len(_usual(*down)) != 1:
        raise contradiction
    return _usual(*down), _range(*down)


def _usual(low: float, high: float) -> list[int]:
    return [int(low)] if low == high else [size for size in USUAL_HASH_TOKENS if low <= size <= high]


def _range(low: float, high: float) -> str:
    return f"{low:,.0f} or more" if high == math.inf else f"{low:,.0f} to {high:,.0f}"


Fields = dict[str, Any]

_ARRIVAL = ("arrival_s", "timestamp")
_PROMPT = ("prompt_tokens", "input_length", "prompt")
_OUTPUT = ("output_tokens", "output_length", "output")
_ID = ("id", "request_id")
_OTHERS = ("prefix_id", "prefix_tokens", "hash_ids", "chat_id", "parent_chat_id")
_Line = defstruct("_Line", [(name, Any, UNSET) for name in (*_ARRIVAL, *_PROMPT, *_OUTPUT, *_ID, *_OTHERS)])


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
            in_chats="chat_id" in fields and "parent_chat_id" in fields,
        )
        self.count += 1
        return entry

    def _fields(self, line: bytes) -> Fields:
        if len(line) > MAX_LINE_BYTES:
            raise Wrong(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            if not line.isascii():
                line.decode()
            fields = asdict(self._decode(line))
        except UnicodeDecodeError as wrong:
            raise Wrong(f"not UTF-8 text (byte {wrong.start})") from None
        except RecursionError:
            raise Wrong("not a request: nested too deeply") from None
        except DecodeError as wrong:
            end = "" if line.endswith(b"\n") else "; the file ends here"
            raise Wrong(f"not a JSON object: {wrong}{end}") from None
        _refuse_repeats(line)
        return {name: value for name, value in fields.items() if value is not UNSET}

    def _arrival(self, fields: Fields) -> tuple[str, float]:
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

    def _id(self, fields: Fields) -> str | int:
        """As given, or the number of requests before it."""
        if not fields.keys() & _ID:
            return self.count
        name, value = _only(fields, _ID)
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


def _only(fields: Fields, names: tuple[str, ...]) -> tuple[str, Any]:
    """The one of several spellings that a line has, and its value."""
    there = [name for name in names if name in fields]
    if len(there) > 1:
        raise Wrong(f"has both {there[0]} and {there[1]}, allowed is one of them")
    if not there:
        raise Wrong(f"has no {names[0]} (or {' or '.join(names[1:])})")
    return there[0], fields[there[0]]


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


def _prefix(fields: Fields, prompt: int) -> tuple[tuple[str | int, ...], int]:
    """Names of the start of the prompt, and its tokens; 0 where the names are hashes."""
    if ("prefix_id" in fields) != ("prefix_tokens" in fields):
        raise Wrong("has one of prefix_id and prefix_tokens, allowed are both or none")
    if "prefix_id" in fields:
        if "hash_ids" in fields:
            raise Wrong("has both prefix_id and hash_ids, allowed is one of them")
        return (_name("prefix_id", fields["prefix_id"]),), _tokens("prefix_tokens", fields["prefix_tokens"], prompt)
    hashes = fields.get("hash_ids", [])
    if type(hashes) is not list:
        raise Wrong(f"hash_ids is {_shown(hashes)}, allowed is a list")
    return tuple(_name("hash_ids", each) for each in hashes), 0


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
