"""Lists of prompts as text: JSON objects, one a line or in one list. Arrivals are drawn and tokens estimated."""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import Any

from msgspec import UNSET

from hwprofiles.traces import JSON_LINES, PROMPTS, TraceLayout
from twin.serving.entries import MAX_LINE_BYTES, Entry, Ids, Wrong, shown, text_of, tokens_of, unique
from twin.units import KIB

_READ = 64 * KIB
_EMPTY = " \t\r\n"
_MOST_DIGITS = 20


def _whole(text: str) -> int | float:
    """A whole number; int() takes but 4,300 digits."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_int=_whole)


def prompts_of(document: Any) -> TraceLayout | None:
    """The layout of which this object is an entry; None where it says when it arrives, or where none is known."""
    if type(document) is not dict or any(name in document for name in JSON_LINES.arrival):
        return None
    return next((each for each in PROMPTS if any(document.keys() >= set(marks) for marks in each.marks)), None)


def objects_of_lines(numbered: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Any]]:
    """Objects, one a line, with their lines; Wrong at a line that is none."""
    for number, line in numbered:
        if not line.isspace():
            yield number, _decoded(line, number)


def _decoded(line: bytes, number: int) -> Any:
    try:
        return _DECODER.decode(text_of(line).strip(_EMPTY))
    except RecursionError:
        raise Wrong("not a request: nested too deeply", line=number) from None
    except Wrong as wrong:
        raise Wrong(str(wrong), line=number) from None
    except ValueError as wrong:
        raise Wrong(f"not JSON: {wrong}", line=number) from None


def objects_of_list(stream: BufferedReader) -> Iterator[tuple[int, Any]]:
    """Members of one JSON list, with the lines where they begin; Wrong at the first that is none.

    No more is held than a member and what was read with it.
    """
    text = _Text(stream)
    text.skip(_EMPTY + "\ufeff")
    text.take("[")
    text.skip(_EMPTY)
    while not text.left.startswith("]"):
        number = text.number
        yield number, text.member()
        text.skip(_EMPTY)
        if not text.left.startswith("]"):
            text.take(",")
            text.skip(_EMPTY)
            if text.left.startswith("]"):
                raise Wrong("not JSON: nothing follows the last comma", line=text.number)
    text.take("]")
    text.skip(_EMPTY)
    if text.left:
        raise Wrong("something follows the list", line=text.number)


class _Text:
    """Text that is read as it is needed."""

    def __init__(self, stream: BufferedReader) -> None:
        self.left = ""
        self.number = 1
        self._stream = stream
        self._decoder = getincrementaldecoder("utf-8")()

    def more(self) -> bool:
        """Read on; False at the end."""
        data = self._stream.read(_READ)
        try:
            self.left += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError:
            raise Wrong("not UTF-8 text", line=self.number) from None
        return bool(data)

    def skip(self, characters: str) -> None:
        """Go to the next of other characters."""
        while True:
            rest = self.left.lstrip(characters)
            self._go(len(self.left) - len(rest))
            if rest or not self.more():
                return

    def take(self, character: str) -> None:
        """Go over this character, which must be next."""
        if not self.left.startswith(character):
            found = shown(self.left[0]) if self.left else "the end of the file"
            raise Wrong(f"not JSON: {shown(character)} expected, {found} found", line=self.number)
        self._go(1)

    def member(self) -> Any:
        """Go over the next value."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.left)
            except RecursionError:
                raise Wrong("not a request: nested too deeply", line=self.number) from None
            except Wrong as wrong:
                raise Wrong(str(wrong), line=self.number) from None
            except ValueError as wrong:
                if len(self.left) > MAX_LINE_BYTES:
                    raise Wrong(
                        f"not JSON, or longer than {MAX_LINE_BYTES:,} bytes: {wrong}", line=self.number
                    ) from None
                if not self.more():
                    raise Wrong(f"not JSON: {wrong}; the file ends here", line=self.number) from None
            else:
                self._go(end)
                return value

    def _go(self, characters: int) -> None:
        self.number += self.left.count("\n", 0, characters)
        self.left = self.left[characters:]


class Prompts:
    """Entries of a list of prompts; `drawn` are their arrivals, `output_tokens` stands in where an entry has none."""

    def __init__(
        self, layout: TraceLayout, objects: Iterable[tuple[int, Any]], drawn: Iterator[float],
        *, chars_per_token: float, output_tokens: int | None,
    ) -> None:  # fmt: skip
        self.number = self.count = self.left_out = 0
        self._layout = layout
        self._objects = objects
        self._drawn = drawn
        self._chars_per_token = chars_per_token
        self._output_tokens = output_tokens
        self._ids = Ids()

    def entries(self) -> Iterator[Entry]:
        """All entries; Wrong at the first wrong one."""
        for number, document in self._objects:
            self.number = number
            entry = self._entry(document)
            if entry is None:
                self.left_out += 1
            else:
                self.count += 1
                yield entry

    def _entry(self, document: Any) -> Entry | None:
        """What an object says; None where it is none that the layout counts."""
        layout = self._layout
        if type(document) is not dict or not any(document.keys() >= set(marks) for marks in layout.marks):
            raise Wrong(f"no {' and '.join(layout.marks[0])} in it: not an entry of {layout.name}")
        for path, allowed in layout.only:
            value = _at(document, path)
            if value not in (UNSET, None, allowed):
                raise Wrong(f"{path} is {shown(value)}, allowed is {allowed}: anything else is not modelled")
        (prompt, text), (output, reply) = _first(document, layout.prompt), _first(document, layout.output)
        if layout.failed and not (text and reply):
            return None
        if text is None:
            raise Wrong(f"has no {' or '.join(layout.prompt)}")
        name, given = _first(document, layout.id)
        return Entry(
            line=self.number,
            id=self.count if given is None else self._ids.new(name, given),
            arrival=next(self._drawn),
            in_seconds=True,
            prompt_tokens=self._tokens(prompt, text),
            output_tokens=self._tokens(output, self._reply(reply)),
        )

    def _reply(self, said: Any) -> Any:
        if said is None and self._output_tokens is None:
            hint = "--output-tokens N is taken where an entry says nothing"
            raise Wrong(f"has no {' or '.join(self._layout.output)}", hint=hint)
        return self._output_tokens if said is None else said

    def _tokens(self, path: str, value: Any) -> int:
        """As counted, or estimated from text; a chat template is not counted."""
        if type(value) is list and value and all(type(each) is int for each in value):
            return len(value)
        if type(value) not in (str, list):
            return tokens_of(path, value)
        characters = _characters(path, value)
        if not characters:
            raise Wrong(f"{path} is empty")
        return tokens_of(path, max(1, round(characters / self._chars_per_token)))


def _first(document: Any, paths: tuple[str, ...]) -> tuple[str, Any]:
    """The first path that leads somewhere, and where; None where none does."""
    for path in paths:
        value = _at(document, path)
        if value is not UNSET and value is not None:
            return path, value
    return "", None


def _at(document: Any, path: str) -> Any:
    """What lies there: UNSET where nothing does."""
    for key in path.split("."):
        if type(document) is dict and key in document:
            document = document[key]
        elif type(document) is list and key.isdigit() and int(key) < len(document):
            document = document[int(key)]
        else:
            return UNSET
    return document


def _characters(path: str, value: Any) -> int:
    """Of text, of all messages of a chat, or of all parts of a message."""
    if type(value) is str:
        return len(value)
    if type(value) is list:
        return sum(_characters(path, each) for each in value)
    if type(value) is dict and type(value.get("text", value.get("content", ""))) in (str, list, type(None)):
        if value.get("type", "text") == "text":
            return _characters(path, value.get("text", value.get("content")) or "")
        raise Wrong(f"{path} has a part of type {shown(value['type'])}, allowed is text")
    raise Wrong(f"{path} has {shown(value)} in it, allowed are text and messages of text")
