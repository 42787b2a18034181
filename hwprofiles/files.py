"""Reading a data file: whole and within bounds, as strict JSON, and laid over the shipped one that it extends."""

import json
import os
import stat
import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hwprofiles.errors import BadFile

MOST_BYTES = 8 * 2**20  # some twenty times the largest that is shipped; a second's work for a parser
MOST_VALUES = 2**19  # commas and brackets: what a parser makes of a byte takes up to 60
LONGEST_WAIT_S = 5.0  # until the next byte of a pipe

Table = dict[str, Any]
_Read = TypeVar("_Read")


def is_path(name: str) -> bool:
    """Whether it means a file, and not something that is shipped under a name."""
    return "/" in name or name.endswith(".json") or os.path.isfile(name)


Shelf = tuple[str, list[str], Callable[[str], Any], Callable[[Table, Table], Table]]
"""What of a kind is shipped: the kind's name, all names, how one is read, and how another is laid over it."""


def extended(raw: Any, path: Path, shelf: Shelf) -> Any:
    """`raw` of `path` over what its key `extends` names, and so on; BadFile for what is not shipped, or a ring."""
    kind, names, shipped, lay_over = shelf
    layers: dict[str, Table] = {}  # by whom they extend
    while isinstance(raw, dict) and "extends" in raw:
        parent = raw["extends"]
        if parent not in names:
            raise BadFile(f"{path}: extends {parent!r}, which is not a shipped {kind}", hint=", ".join(names))
        if parent in layers:
            raise BadFile(f"{path}: extends {parent!r}, which extends itself", hint=", ".join(names))
        layers[parent] = {key: value for key, value in raw.items() if key != "extends"}
        raw = shipped(parent)
    for layer in reversed(layers.values()):
        raw = lay_over(raw, layer)
    return raw


def read_json(path: Path, *, finite: bool = True) -> Any:
    """The JSON value in `path`, read strictly; BadFile for NaN, infinity, half characters or a repeated key.

    finite: whether NaN and infinity are refused, which files of other projects hold here and there.
    """
    content = read_whole(path)
    if sum(content.count(each) for each in (b",", b"[", b"{")) > MOST_VALUES:
        raise BadFile(f"{path}: holds more than {MOST_VALUES:,} values, the most that a data file may have")
    try:
        value = json.loads(content.decode(), object_pairs_hook=refuse_repeats)
        _check_values(value, "$", finite=finite)
    except UnicodeDecodeError as wrong:
        raise BadFile(f"{path}: not UTF-8 text (byte {wrong.start})") from None
    except (ValueError, RecursionError) as wrong:
        raise BadFile(f"{path}: not valid JSON: {wrong}") from None
    return value


def check_finite(value: Any, path: Path) -> None:
    """BadFile for NaN or infinity anywhere in what was read from `path`."""
    try:
        _check_values(value, "$", finite=True)
    except ValueError as wrong:
        raise BadFile(f"{path}: not valid JSON: {wrong}") from None


def read_as(path: Path, kind: type[_Read]) -> _Read:
    """The same, checked against a schema; BadFile names the key that is wrong."""
    raw = read_json(path)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as wrong:
        raise BadFile(f"{path}: {wrong}") from None


def refuse_repeats(pairs: list[tuple[str, Any]]) -> Table:
    """A JSON object of these keys and values; ValueError where a key is there twice."""
    table: Table = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} appears twice")
        table[key] = value
    return table


def _check_values(value: Any, where: str, *, finite: bool) -> None:
    """Raise ValueError where a number is not finite, or a text could not be written again."""
    if finite and isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{where} is {value}, which is not a number that a data file may hold")
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_text(key, f"a key of {where}")
            _check_values(part, f"{where}.{key}", finite=finite)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_values(part, f"{where}[{index}]", finite=finite)


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        raise ValueError(f"{where} holds half of a surrogate pair (character {wrong.start})") from None


def read_whole(path: Path, *, most_bytes: int | None = None) -> bytes:
    """All bytes of a file, or of a pipe that somebody writes; BadFile for devices, silence and what is too long."""
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would block here
        try:
            content = _read(handle, path, most_bytes)
        finally:
            os.close(handle)
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None
    if len(content) > most_bytes:
        raise BadFile(f"{path}: longer than {most_bytes:,} bytes, the most that a data file may have")
    return content


def _read(handle: int, path: Path, most_bytes: int) -> bytes:
    """At most one byte over the limit."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        raise BadFile(f"{path}: cannot be read: Is a directory")
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise BadFile(f"{path}: cannot be read: a device, not a file")
    parts: list[bytes] = []
    left = most_bytes + 1
    while left and (part := _part(handle, left, path, piped=stat.S_ISFIFO(mode) and not parts)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _part(handle: int, most: int, path: Path, *, piped: bool) -> bytes:
    """What comes next; empty at the end. A pipe whose writer has yet to come is not at its end: `piped`."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            if (part := os.read(handle, min(most, 2**20))) or not piped:
                return part
        except BlockingIOError:  # somebody has it open and writes nothing for now
            pass
        if time.monotonic() >= deadline:
            raise BadFile(f"{path}: a pipe that nobody wrote to for {LONGEST_WAIT_S:g} s")
        time.sleep(0.01)
