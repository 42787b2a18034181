"""The header of a GGUF file: its metadata and the table of its tensors, none of which is read.

The format, little-endian: the magic GGUF, a version, the numbers of tensors and of metadata; the metadata (key, type,
value); for each tensor its name, dimensions (the fastest first), type and offset; padding to `general.alignment`; the
data, to whose beginning offsets refer. Texts have their length before them, arrays the type and number of their
elements. Source: `docs/gguf.md` of github.com/ggml-org/ggml.

Limits lie far above what models have: 2,000 tensors, 60 keys, a million texts of a tokenizer in a header of 30 MB.
"""

import os
import stat
import struct
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from twin.errors import BadFile
from twin.models.fields import shown
from twin.models.ggml import TYPES, Type

LONGEST_HEADER = 2**26  # bytes
LONGEST_TEXT = 2**24  # bytes
LONGEST_NAME = 2**16 - 1  # bytes of a key or of a tensor's name
MOST_TENSORS = 65_536
MOST_KEYS = 65_536
MOST_TEXTS = 2**22  # of arrays, together
LONGEST_KEPT = 4096  # elements of an array that is kept: more than layers of a model
MOST_KEPT = 2**20  # elements of arrays that are kept, together
MOST_DIMENSIONS = 4
MOST_ELEMENTS = 2**50  # of a tensor
LARGEST_ALIGNMENT = 2**20  # bytes

_BLOCK = 2**20  # bytes that are read at once
_TEXT, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_FLAG = 7
_LENGTH = struct.Struct("<Q")


class Tensor(NamedTuple):
    """What the table says of a tensor; `at` which byte of the data it begins."""

    name: str
    dims: tuple[int, ...]
    type: Type
    at: int

    @property
    def elements(self) -> int:
        """Elements of all dimensions."""
        return prod(self.dims)

    @property
    def size_bytes(self) -> int:
        """Bytes of the data that it takes."""
        return self.elements // self.type.block * self.type.block_bytes


class Unread(NamedTuple):
    """An array that is too long to matter here."""

    elements: int

    def __repr__(self) -> str:
        return f"an array of {self.elements:,} elements"


class Header(NamedTuple):
    """Metadata by key (numbers, texts, `Unread` or lists, in which flags are 0 or 1) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class Wrong(Exception):
    """What is wrong with a file, without its name."""


def read_header(path: Path) -> Header:
    """The header of one file, every tensor checked to lie where it can. Raises BadFile in one line."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would block here
        with os.fdopen(handle, "rb", buffering=0) as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise Wrong("is no file whose size is known")
            return _header(_Cursor(file, about.st_size))
    except Wrong as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None


class _Cursor:
    """Reads a file's header from front to back, a block at a time; `about` is what it is reading."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size
        self.block, self.block_at, self.at = b"", 0, 0
        self.about = "its first bytes"
        self.texts = self.kept = 0

    @property
    def place(self) -> int:
        """Bytes of the file before the next one."""
        return self.block_at + self.at

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if self.at + count > len(self.block):
            self._refill(count)
        self.at += count
        return self.block[self.at - count : self.at]

    def number(self, code: str) -> Any:
        """The next number of a type of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self, longest: int = LONGEST_TEXT) -> str:
        """The next text."""
        length = self.number("Q")
        if length > longest:
            raise Wrong(f"{self.about}: a text of {length:,} bytes, at most {longest:,} are allowed")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as wrong:
            raise Wrong(f"{self.about}: a text that is not UTF-8 (byte {wrong.start})") from None

    def skip(self, count: int) -> None:
        """Past the next bytes, which are not read."""
        self.at += count
        self._within(0)

    def skip_texts(self, count: int) -> None:
        """Past so many texts, of which the lengths alone are read."""
        self.texts += count
        if self.texts > MOST_TEXTS:
            raise Wrong(f"{self.about}: {self.texts:,} texts in arrays, at most {MOST_TEXTS:,} are allowed")
        unpack = _LENGTH.unpack_from
        while count:
            block, at = self.block, self.at
            try:
                for left in range(count, 0, -1):  # noqa: B007 - read where a block ends
                    at += 8 + unpack(block, at)[0]
                self.at, count = at, 0
            except (struct.error, OverflowError):  # the next length lies beyond what has been read
                self.at, count = at, left
                self._refill(8)
        self._within(0)

    def _refill(self, needed: int) -> None:
        self._within(needed)
        self.block_at, self.at = self.place, 0
        self.file.seek(self.block_at)
        self.block = self.file.read(max(needed, _BLOCK))
        if len(self.block) < needed:
            raise Wrong(f"{self.about}: cut short while it was being read")

    def _within(self, needed: int) -> None:
        end = self.place + needed
        if end > self.size:
            raise Wrong(f"cut short: it has {self.size:,} bytes, {self.about} goes on beyond them")
        if end > LONGEST_HEADER:
            raise Wrong(f"{self.about} goes on beyond byte {LONGEST_HEADER:,}, where the longest header allowed ends")


def _header(cursor: _Cursor) -> Header:
    tensors, keys = _counts(cursor)
    metadata = _metadata(cursor, keys)
    alignment = metadata.get("general.alignment", 32)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 8 <= alignment <= LARGEST_ALIGNMENT or alignment.bit_count() != 1:
        raise Wrong(f"general.alignment is {shown(alignment)}, not a power of two from 8 to {LARGEST_ALIGNMENT:,}")
    table: dict[str, Tensor] = {}
    for number in range(tensors):
        cursor.about = f"tensor {number + 1:,} of {tensors:,}"
        tensor = _tensor(cursor)
        if tensor.name in table:
            raise Wrong(f"tensor {shown(tensor.name)} appears twice")
        table[tensor.name] = tensor
    data_at = -(-cursor.place // alignment) * alignment
    _check_places(table, alignment, data_at, cursor.size)
    return Header(metadata, table)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata."""
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise Wrong(f"begins with {magic!r} and not with b'GGUF': no GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        said = f"{swapped}, big endian" if swapped in (2, 3) else f"{version}"
        raise Wrong(f"is of GGUF version {said}; 2 and 3, little endian, are read")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    for count, most, what in ((tensors, MOST_TENSORS, "tensors"), (keys, MOST_KEYS, "metadata keys")):
        if count > most:
            raise Wrong(f"claims {count:,} {what}, at most {most:,} are allowed")
    return tensors, keys


def _metadata(cursor: _Cursor, keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(keys):
        cursor.about = f"metadata key {number + 1:,} of {keys:,}"
        key = cursor.text(LONGEST_NAME)
        cursor.about = f"metadata key {shown(key)}"
        if key in metadata:
            raise Wrong(f"{cursor.about} appears twice")
        metadata[key] = _value(cursor, cursor.number("I"))
    return metadata


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == _TEXT:
        return cursor.text()
    if kind == _ARRAY:
        return _array(cursor, cursor.number("I"), cursor.number("Q"))
    if kind not in _SCALARS:
        raise Wrong(f"{cursor.about}: unknown value type {kind}")
    value = cursor.number(_SCALARS[kind])
    return _flag(cursor, value) if kind == _FLAG else value


def _array(cursor: _Cursor, kind: int, count: int) -> list[Any] | Unread:
    if kind == _ARRAY:
        raise Wrong(f"{cursor.about}: an array of arrays, which no model has")
    if kind not in _SCALARS and kind != _TEXT:
        raise Wrong(f"{cursor.about}: an array of unknown value type {kind}")
    if count > LONGEST_KEPT:
        if kind == _TEXT:
            cursor.skip_texts(count)
        else:
            cursor.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        return Unread(count)
    cursor.kept += count
    if cursor.kept > MOST_KEPT:
        raise Wrong(f"{cursor.about}: {cursor.kept:,} elements of short arrays, at most {MOST_KEPT:,} are allowed")
    if kind == _TEXT:
        return [cursor.text() for _ in range(count)]
    form = f"<{count}{_SCALARS[kind]}"
    values = list(struct.unpack(form, cursor.take(struct.calcsize(form))))
    return [int(_flag(cursor, value)) for value in values] if kind == _FLAG else values


def _flag(cursor: _Cursor, value: int) -> bool:
    if value > 1:
        raise Wrong(f"{cursor.about}: {value} is neither true nor false")
    return value == 1


def _tensor(cursor: _Cursor) -> Tensor:
    name = cursor.text(LONGEST_NAME)
    cursor.about = f"tensor {shown(name)}"
    axes = cursor.number("I")
    if axes > MOST_DIMENSIONS:
        raise Wrong(f"{cursor.about}: {axes:,} dimensions, at most {MOST_DIMENSIONS} are allowed")
    dims = tuple(cursor.number("Q") for _ in range(axes))
    kind, offset = cursor.number("I"), cursor.number("Q")
    if not 1 <= prod(dims) <= MOST_ELEMENTS:
        raise Wrong(f"{cursor.about}: {list(dims)} are {prod(dims):,} elements, outside of 1 to {MOST_ELEMENTS:,}")
    if kind not in TYPES:
        raise Wrong(f"{cursor.about}: unknown ggml type {kind}")
    row = dims[0] if dims else 1
    if row % TYPES[kind].block:
        raise Wrong(f"{cursor.about}: rows of {row:,} are no whole blocks of {TYPES[kind].block} of {TYPES[kind].name}")
    return Tensor(name, dims, TYPES[kind], offset)


def _check_places(table: dict[str, Tensor], alignment: int, data_at: int, size: int) -> None:
    """Each aligned, behind the one before it and inside the file."""
    placed = sorted(table.values(), key=attrgetter("at"))
    for tensor in placed:
        if tensor.at % alignment:
            raise Wrong(f"tensor {shown(tensor.name)}: offset {tensor.at:,} is not a multiple of {alignment:,}")
        end = data_at + tensor.at + tensor.size_bytes
        if end > size:
            raise Wrong(f"cut short: it has {size:,} bytes, tensor {shown(tensor.name)} ends at byte {end:,}")
    for before, tensor in pairwise(placed):
        if tensor.at < before.at + before.size_bytes:
            raise Wrong(f"tensor {shown(tensor.name)}: offset {tensor.at:,} lies within {shown(before.name)}")
