"""The header of a safetensors file: names, types, shapes and places of its tensors, none of which is read.

The format: 8 bytes with the header's length (little-endian), the header (JSON, padded with blanks), the data. The
header names tensors, each with `dtype`, `shape` and `data_offsets` [begin, end) in bytes of the data; together they
cover the data without gap or overlap. Source: the format's description at github.com/huggingface/safetensors.
"""

import os
import stat
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from twin.errors import BadFile

LONGEST_HEADER = 2**24
"""Bytes. The reference implementation takes six times that."""
MOST_TENSORS = 2**17
ELEMENT_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BOOL": 8,
    "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip

Size = Annotated[int, Meta(ge=0, le=2**53)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of a tensor."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=16)]
    data_offsets: tuple[Size, Size]

    @property
    def size_bytes(self) -> int:
        """Bytes of the data that it takes."""
        return self.data_offsets[1] - self.data_offsets[0]


class Header(NamedTuple):
    """All tensors of a file, and the byte at which their data begins."""

    entries: dict[str, Entry]
    data_at: int


class Wrong(Exception):
    """What is wrong with a file, without its name."""


def read_header(path: Path) -> Header:
    """The header of a file, every tensor checked to lie where it should. Raises BadFile in one line."""
    try:
        return header_of(path)
    except Wrong as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None


def header_of(path: Path) -> Header:
    """The same; raises Wrong or OSError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would block here
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise Wrong("is no file that can be mapped into memory")
        size = about.st_size
        if size < 8:
            raise Wrong(f"cut short: it has {size:,} bytes, the length of a safetensors header alone takes 8")
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise Wrong(f"a header of {length:,} bytes, at most {LONGEST_HEADER:,} are allowed: no safetensors file?")
        if 8 + length > size:
            raise Wrong(f"cut short: it has {size:,} bytes, its header alone ends at byte {8 + length:,}")
        entries = parse_header(file.read(length))
    _check_places(entries, size - 8 - length)
    return Header(entries, 8 + length)


def parse_header(raw: bytes) -> dict[str, Entry]:
    """Tensors by name. Raises Wrong."""
    if raw.count(b'":') > 4 * (MOST_TENSORS + 1):  # before anything is built: keys are the smallest that can be sent
        raise Wrong(f"the header names more than {MOST_TENSORS:,} tensors")
    try:
        raw.decode("utf-8")
        told = _HEADER.decode(raw)
    except UnicodeDecodeError as wrong:
        raise Wrong(f"the header is not UTF-8 text (byte {wrong.start})") from None
    except msgspec.ValidationError:
        raise Wrong("the header is no JSON object") from None
    except (ValueError, RecursionError) as wrong:
        raise Wrong(f"the header is not valid JSON: {wrong}") from None
    told.pop("__metadata__", None)
    entries = {}
    for name, entry in told.items():
        try:
            entries[name] = _ENTRY.decode(entry)
        except (ValueError, RecursionError) as wrong:
            raise Wrong(f"tensor {name[:LONGEST_SHOWN]!r}: {wrong}") from None
    return entries


# a name that is there twice leaves the bytes of its first tensor to nobody, which is refused
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(Entry)
LONGEST_SHOWN = 120  # characters of a name in a message


def _check_places(entries: dict[str, Entry], data_bytes: int) -> None:
    """Each as long as its shape says, one behind the other, to the end of the file."""
    for name, entry in entries.items():
        if entry.dtype not in ELEMENT_BITS:
            raise Wrong(
                f"tensor {name!r}: unknown dtype {entry.dtype[:LONGEST_SHOWN]!r}; known are {', '.join(ELEMENT_BITS)}"
            )
        begin, end = entry.data_offsets
        needed = prod(entry.shape) * ELEMENT_BITS[entry.dtype] // 8
        if end < begin or end - begin != needed:
            raise Wrong(
                f"tensor {name!r}: data_offsets [{begin}, {end}] do not hold the {needed:,} bytes of {entry.dtype} "
                f"{list(entry.shape)}"
            )
        if end > data_bytes:
            raise Wrong(f"tensor {name!r} ends at byte {end:,} of the data, of which the file has {data_bytes:,}")
    placed = sorted((entry.data_offsets, name) for name, entry in entries.items())
    for ((_, end), before), ((begin, _), name) in pairwise([((0, 0), ""), *placed]):
        if begin < end:
            raise Wrong(f"tensor {name!r} begins at byte {begin:,} of the data, within {before!r}")
        if begin > end:
            raise Wrong(f"bytes {end:,} to {begin:,} of the data, before tensor {name!r}, belong to no tensor")
    last = placed[-1][0][1] if placed else 0
    if last < data_bytes:
        raise Wrong(f"the data's last {data_bytes - last:,} bytes belong to no tensor")
