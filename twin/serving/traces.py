"""Request traces of many layouts, plain or compressed, read one request at a time: their size does not matter.

`hwprofiles/traces.py` says which layouts these are. In JSON lines each line is an object with one name from each row;
other keys are ignored, blank lines are allowed:

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
    arrivals         where a layout has none they are drawn, at a rate that is asked for
    tokens of text   characters over characters a token, which is asked for

Sources: what is written about both traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon, kvcache-ai/Mooncake).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.recognition import HEAD_BYTES, TRACE, kind_of, kind_of_head
from hwprofiles.traces import JSON_LINES, PROMPTS, TABLES, TraceLayout
from twin.errors import BadFile, BadValue, Impossible
from twin.serving.compressed import Broken, plain
from twin.serving.entries import MAX_LINE_BYTES, Entry, Reader, Wrong
from twin.serving.lines import Lines
from twin.serving.prompts import Prompts, objects_of_lines, objects_of_list, prompts_of
from twin.serving.requests import Request
from twin.serving.tables import Table, has_arrivals, table_of
from twin.units import MS

TimeUnit = Literal["s", "ms"]

ENTRIES_AHEAD, HASHES_AHEAD = 1000, 2**16  # how far is looked ahead: to the line that reaches either

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOONCAKE_HASH_TOKENS = 512
BAILIAN_HASH_TOKENS = 16
USUAL_HASH_TOKENS = tuple(2**power for power in range(14))
CHARS_PER_TOKEN = 0.1, 100.0  # the least and the most that is taken for an estimate
MILLENNIA = 1e11  # seconds: no trace is that long, and none begins that long after 1970

REQUESTS = "a trace of requests"
_UNITS = {"s": "in seconds", "ms": "in milliseconds", None: "all at once"}
_INSTEAD = (
    "--trace-in reads JSON objects, one a line, with arrival_s (seconds) or timestamp, "
    "prompt_tokens or input_length, output_tokens or output_length; CSV with these columns, or Azure's, BurstGPT's, "
    "Splitwise's or Vidur's; ShareGPT, OpenAI batches and vLLM's prompts with --rate"
)


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of a trace, or asked for."""

    time_unit: TimeUnit | None = None  # None: not known, or all requests arrive at once and it does not matter
    hash_tokens: int | None = None  # None: not known, or no line has hashes
    chars_per_token: float | None = None  # of prompts as text
    output_tokens: int | None = None  # of each prompt that says nothing of its output
    layout: str = ""  # empty: JSON lines
    arrivals: str = ""  # how they come about where no number says it
    left_out: str = ""  # what was not served, and how much of it

    def __post_init__(self) -> None:
        chars, (least, most) = self.chars_per_token, CHARS_PER_TOKEN
        if chars is not None and not least <= chars <= most:
            raise BadValue(f"--chars-per-token is {chars}, outside the range of {least} to {most}")

    @property
    def text(self) -> str:
        """For a reader, after the name of the trace."""
        when = self.arrivals or _UNITS[self.time_unit]
        told = [when + (f", {self.hash_tokens:,} tokens a hash" if self.hash_tokens else ""), self.layout]
        if self.chars_per_token:
            told.append(f"tokens estimated at {self.chars_per_token:g} characters each")
        return "; ".join(filter(None, [*told, self.left_out]))


class Lacks(Struct, frozen=True):
    """What a layout says nothing of, so that it is asked for."""

    arrivals: bool = False
    tokens: bool = False  # it has text


class _Opened(Struct, frozen=True):
    """A trace of which no more is read than tells its layout."""

    layout: TraceLayout
    lacks: Lacks
    numbered: Iterable[tuple[int, bytes]] = ()
    objects: Iterable[tuple[int, Any]] = ()


_NOTHING_ASKED = Reading()
_NOTHING = Lacks()


def lacks_of(path: Path) -> Lacks:
    """What the trace under `path` says nothing of; nothing is lacking where it cannot be read."""
    try:
        with path.open("rb") as raw:
            return _opened(plain(raw)).lacks
    except (OSError, Broken, Wrong):
        return _NOTHING


def read_trace(
    path: Path,
    asked: Reading = _NOTHING_ASKED,
    *,
    drawn: Callable[[], Iterator[float]] | None = None,
    understood: Callable[[Reading], object] = lambda _: None,
) -> Iterator[Request]:
    """The requests of a trace in its order, BadFile at the first wrong line; `understood` is told how it is read.

    `drawn` are arrivals for a trace without any, Impossible where it has some. `understood` is told once more at the
    end where something was left out.
    """
    reader: Reader = Lines()
    head, layout = b"", JSON_LINES
    try:
        with path.open("rb") as raw:
            stream = plain(raw)
            head = stream.peek(HEAD_BYTES)
            opened = _opened(stream)
            layout = opened.layout
            reader = _reader(opened, asked, drawn)
            entries = reader.entries()
            ahead, whole = _ahead(entries)
            reading = _reading(opened, reader, ahead, asked, whole=whole)
            understood(reading)
            first = ahead[0].arrival if ahead else 0.0
            for entry in chain(ahead, entries):
                yield _request(entry, reading, first)
            if not reader.count:
                raise BadFile(f"{path}: holds no requests")
            if reader.left_out:
                understood(replace(reading, left_out=f"{layout.failed} left out: {reader.left_out:,}"))
    except Wrong as wrong:
        known = kind_of_head(head) if layout is JSON_LINES and not reader.count else ""
        if known not in ("", TRACE):
            raise BadFile(f"{path}: {known}, not {REQUESTS}", hint=_INSTEAD) from None
        line = reader.number if wrong.line is None else wrong.line
        raise BadFile(f"{path}{f':{line}' if line else ''}: {wrong}", hint=wrong.hint) from None
    except Broken as wrong:
        raise BadFile(f"{path}:{reader.number + 1}: {wrong}") from None
    except OSError as wrong:
        if kind_of(path):
            raise BadFile(f"{path}: {kind_of(path)}, not {REQUESTS}", hint=_INSTEAD) from None
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None


def _opened(stream: BufferedReader) -> _Opened:
    """What the first line, or the first member of a list, shows. Lines of no known layout are left to JSON lines."""
    if stream.peek(HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        objects = objects_of_list(stream)
        begun = list(islice(objects, 1))
        layout = prompts_of(begun[0][1]) if begun else PROMPTS[0]
        if layout is None:
            raise Wrong("a JSON list of another layout than ShareGPT's", hint=_INSTEAD, line=0)
        return _Opened(layout, Lacks(arrivals=True, tokens=True), objects=chain(begun, objects))
    numbered = _numbered(stream)
    lines = list(islice(dropwhile(lambda each: each[1].isspace(), numbered), 1))
    numbered = chain(lines, numbered)
    first = lines[0][1] if lines else b""
    table = table_of(first)
    if table is not None:
        return _Opened(table, Lacks(arrivals=not has_arrivals(table, first)), numbered)
    layout = _prompts_of(first)
    if layout is not None:
        return _Opened(layout, Lacks(arrivals=True, tokens=True), objects=objects_of_lines(numbered))
    return _Opened(JSON_LINES, _NOTHING, numbered)


def _prompts_of(line: bytes) -> TraceLayout | None:
    try:
        return prompts_of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _reader(opened: _Opened, asked: Reading, drawn: Callable[[], Iterator[float]] | None) -> Reader:
    """What reads on; Wrong where an option has to say what the layout does not, Impossible where it need not."""
    layout, lacks = opened.layout, opened.lacks
    what, how = [], []
    if lacks.arrivals and drawn is None:
        what.append("arrivals")
        how.append("--rate R draws them, inf for all at once")
    if lacks.tokens and asked.chars_per_token is None:
        what.append("tokens")
        how.append("--chars-per-token N estimates them: about 4 in English")
    if what:
        raise Wrong(f"{layout.name}, which says nothing of {' and '.join(what)}", hint="; ".join(how), line=0)
    if drawn is not None and not lacks.arrivals:
        raise Impossible("--rate means nothing beside --trace-in: the trace says what comes when")
    if not lacks.tokens and (asked.chars_per_token or asked.output_tokens):
        option = "--chars-per-token" if asked.chars_per_token else "--output-tokens"
        raise Impossible(f"{option} means nothing beside this trace: it counts tokens")
    arrivals = iter(()) if drawn is None else drawn()
    if layout is JSON_LINES:
        return Lines(opened.numbered)
    if layout in TABLES:
        return Table(layout, opened.numbered, arrivals)
    chars, output = asked.chars_per_token or 1.0, asked.output_tokens
    return Prompts(layout, opened.objects, arrivals, chars_per_token=chars, output_tokens=output)


def _reading(opened: _Opened, reader: Reader, ahead: Sequence[Entry], asked: Reading, *, whole: bool) -> Reading:
    """How to read what begins with `ahead`; Wrong where an option has to say it, or says what cannot be."""
    layout = opened.layout
    dated = isinstance(reader, Table) and reader.dated
    if asked.time_unit is not None and (dated or opened.lacks.arrivals):
        have = "arrivals are dates" if dated else "it says nothing of arrivals"
        raise Wrong(f"{have}, so that there is no unit", hint="--time-unit is for numbers", line=0)
    told = understand(ahead, asked, whole=whole, documented=layout.time_unit)
    if layout is JSON_LINES:
        return told
    arrivals = "as dates" if dated else asked.arrivals if opened.lacks.arrivals else ""
    name = f"{layout.name}, {layout.note}" if layout.note else layout.name
    return replace(told, layout=name, arrivals=arrivals, chars_per_token=asked.chars_per_token)


def _numbered(stream: BufferedReader) -> Iterator[tuple[int, bytes]]:
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


def understand(ahead: Sequence[Entry], asked: Reading, *, whole: bool, documented: TimeUnit | None = None) -> Reading:
    """How to read a trace that begins with `ahead`, what is `asked` first; Wrong where an option has to say it.

    `documented` is the unit of arrivals that the layout is known to have.
    """
    hashed = [entry for entry in ahead if entry.hashes]
    bailian = all(entry.in_chats for entry in ahead)
    sizes, left = ([asked.hash_tokens], "") if asked.hash_tokens else hash_sizes(hashed)
    if bailian and BAILIAN_HASH_TOKENS in sizes:
        sizes = [BAILIAN_HASH_TOKENS]
    hash_tokens = sizes[0] if len(sizes) == 1 else None
    documented = documented or ("s" if bailian else None)
    time_unit = _time_unit(ahead, asked, documented=documented, hash_tokens=hash_tokens)
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


def _time_unit(
    ahead: Sequence[Entry], asked: Reading, *, documented: TimeUnit | None, hash_tokens: int | None
) -> TimeUnit | None:
    """The unit, where it is decided."""
    if any(entry.in_seconds for entry in ahead):
        if asked.time_unit == "ms":
            raise Wrong("arrival_s is in seconds, not in milliseconds", hint="--time-unit is for timestamp", line=0)
        return "s"
    if asked.time_unit or documented:
        return asked.time_unit or documented
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
