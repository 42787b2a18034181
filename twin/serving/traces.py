"""Request traces as JSON lines, plain or gzipped, read one line at a time: their size does not matter.

`lines.py` has the names that a line may use. Time 0 is the arrival of the first request. The unit of timestamps and the
tokens of a hash are told from the first lines, which are looked at ahead, or by an option.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path

from hwprofiles.recognition import HEAD_BYTES, TRACE, kind_of, kind_of_head
from twin.errors import BadFile
from twin.serving.lines import MAX_LINE_BYTES, Lines
from twin.serving.reading import Entry, Reading, Wrong, understand
from twin.serving.requests import Request
from twin.units import MS

ENTRIES_AHEAD, HASHES_AHEAD = 1000, 2**16
"""How far is looked ahead: to the line that reaches either."""

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOTHING_ASKED = Reading()
_INSTEAD = (
    "--trace-in reads JSON objects, one a line, with arrival_s (seconds) or timestamp, "
    "prompt_tokens or input_length, output_tokens or output_length"
)


def read_trace(
    path: Path, asked: Reading = _NOTHING_ASKED, *, understood: Callable[[Reading], object] = lambda _: None
) -> Iterator[Request]:
    """The requests of a trace in its order. BadFile with file and line at the first thing that is wrong.

    `asked` is what an option says of it; `understood` is told how it is read before the first request is given out.
    """
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
        raise Wrong(
            "the first hash_ids come too late to tell what they stand for",
            hint="--hash-tokens N says it",
            line=entry.line,
        )
    begun = -(-entry.prompt_tokens // hash_tokens)
    if not entry.prompt_tokens // hash_tokens <= entry.hashes <= begun:
        raise Wrong(
            f"{entry.hashes:,} hash_ids for {entry.prompt_tokens:,} prompt tokens, "
            f"allowed are {begun:,} of {hash_tokens:,} tokens each",
            line=entry.line,
        )
