"""Reading K, V and Q that somebody dumped from a model: a safetensors file, mapped into memory and checked throughout.

The format: 8 bytes with the header's length (little-endian), the header (JSON, padded with blanks), the data. The
header names tensors, each with `dtype`, `shape` and `data_offsets` [begin, end) in bytes of the data; together they
cover the data without gap or overlap. Source: the format's description at github.com/huggingface/safetensors.

Names: `k`, `v` and, if there, `q`; or `layers.N.k` and so on, as many layers as one likes; others are left alone.
Shapes: [tokens, kv_heads, head_dim], of q [tokens, query_heads, head_dim]. Types: F32, F16, BF16. K is what a cache
would keep: after norms and rotary embedding.
"""

import json
import mmap
import os
import re
import stat
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from hwprofiles.files import refuse_repeats
from twin.errors import BadFile

Floats = npt.NDArray[np.float32]
Size = Annotated[int, Meta(ge=0, le=2**53)]

LONGEST_HEADER = 2**24
"""Bytes: 100,000 tensors. The reference implementation takes six times that, whose parsing fills 2 GB of memory."""
LEAST_TOKENS = 16

READ = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
ELEMENT_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8,
    "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip

CHECKED_AT_ONCE = 2**22
"""Elements."""
_LAYERED = re.compile(r"layers\.(0|[1-9]\d{0,5})\.([kvq])")


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A tensor in a mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: npt.NDArray[Any] = field(repr=False)

    def rows(self, first: int, last: int) -> Floats:
        """Rows first .. last - 1 as float32, exactly."""
        part = self.raw[first:last]
        if self.dtype == "BF16":
            return (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """K, V and perhaps Q of one attention layer."""

    name: str
    keys: Tensor
    values: Tensor
    queries: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in (self.keys, self.values, self.queries) if tensor is not None]


def read_layers(path: Path, *, tokens: int | None = None) -> tuple[Layer, ...]:
    """The layers of a file in order, of which the first `tokens` tokens (None: all) are checked to be numbers.

    Raises BadFile in one line, which names the file and the tensor.
    """
    try:
        layers = _layers(_tensors(path))
        _check_alike(layers)
        for layer in layers:
            for tensor in layer.tensors:
                _check_numbers(tensor, tokens or tensor.shape[0])
    except _Wrong as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None
    return layers


class _Wrong(Exception):
    """What is wrong with a file, without its name."""


def _tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor that can be read as numbers; all are checked to lie where they should."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _Wrong("is a folder" if path.is_dir() else "is no file that can be mapped into memory")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise _Wrong(f"cut short: it has {size:,} bytes, the length of a safetensors header alone takes 8")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(mapped[:8], "little")
    if length > LONGEST_HEADER:
        raise _Wrong(f"a header of {length:,} bytes, at most {LONGEST_HEADER:,} are allowed: no safetensors file?")
    if 8 + length > size:
        raise _Wrong(f"cut short: it has {size:,} bytes, its header alone ends at byte {8 + length:,}")
    entries = _header(mapped[8 : 8 + length])
    _check_places(entries, size - 8 - length)
    return {name: _placed(name, entry, mapped, 8 + length) for name, entry in entries.items()}


def _placed(name: str, entry: _Entry, mapped: mmap.mmap, data_at: int) -> Tensor:
    """The tensor where it lies; empty where it is or where its type is none of those that are read."""
    count, raw = prod(entry.shape), np.empty(0)
    if count and entry.dtype in READ:
        flat = np.frombuffer(mapped, READ[entry.dtype], count=count, offset=data_at + entry.data_offsets[0])
        raw = flat.reshape(entry.shape)
    return Tensor(name=name, dtype=entry.dtype, shape=entry.shape, raw=raw)


def _header(raw: bytes) -> dict[str, _Entry]:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=refuse_repeats)
    except UnicodeDecodeError as wrong:
        raise _Wrong(f"the header is not UTF-8 text (byte {wrong.start})") from None
    except (ValueError, RecursionError) as wrong:
        raise _Wrong(f"the header is not valid JSON: {wrong}") from None
    if not isinstance(document, dict):
        raise _Wrong("the header is no JSON object")
    entries = {}
    for name, told in document.items():
        if name != "__metadata__":
            try:
                entries[name] = msgspec.convert(told, _Entry)
            except msgspec.ValidationError as wrong:
                raise _Wrong(f"tensor {name!r}: {wrong}") from None
    return entries


def _check_places(entries: dict[str, _Entry], data_bytes: int) -> None:
    """Each as long as its shape says, one behind the other, to the end of the file."""
    for name, entry in entries.items():
        if entry.dtype not in ELEMENT_BITS:
            raise _Wrong(f"tensor {name!r}: unknown dtype {entry.dtype!r}; K, V and Q are read from {', '.join(READ)}")
        begin, end = entry.data_offsets
        needed = prod(entry.shape) * ELEMENT_BITS[entry.dtype] // 8
        if end < begin or end - begin != needed:
            raise _Wrong(
                f"tensor {name!r}: data_offsets [{begin}, {end}] do not hold the {needed:,} bytes of {entry.dtype} "
                f"{list(entry.shape)}"
            )
        if end > data_bytes:
            raise _Wrong(f"tensor {name!r} ends at byte {end:,} of the data, of which the file has {data_bytes:,}")
    placed = sorted((entry.data_offsets, name) for name, entry in entries.items())
    for ((_, end), before), ((begin, _), name) in pairwise([((0, 0), ""), *placed]):
        if begin < end:
            raise _Wrong(f"tensor {name!r} begins at byte {begin:,} of the data, within {before!r}")
        if begin > end:
            raise _Wrong(f"bytes {end:,} to {begin:,} of the data, before tensor {name!r}, belong to no tensor")
    last = placed[-1][0][1] if placed else 0
    if last < data_bytes:
        raise _Wrong(f"the data's last {data_bytes - last:,} bytes belong to no tensor")


def _layers(tensors: dict[str, Tensor]) -> tuple[Layer, ...]:
    """K, V and Q put together; layers in the order of their numbers."""
    numbers = sorted({int(found[1]) for found in map(_LAYERED.fullmatch, tensors) if found})
    single = {"k", "v", "q"} & tensors.keys()
    if single and numbers:
        raise _Wrong(f"tensor {min(single)!r} beside those of layer {numbers[0]}: name all of them by layers, or none")
    if not single and not numbers:
        held = ", ".join(map(repr, list(tensors)[:5])) + (", ..." if len(tensors) > 5 else "")
        raise _Wrong(f"no tensors 'k' and 'v', nor 'layers.N.k' and 'layers.N.v'; it holds {held or 'none'}")
    prefixes = {f"layer {number}": f"layers.{number}." for number in numbers} or {"tensors": ""}
    return tuple(_layer(tensors, name, prefix) for name, prefix in prefixes.items())


def _layer(tensors: dict[str, Tensor], name: str, prefix: str) -> Layer:
    for needed in ("k", "v"):
        if prefix + needed not in tensors:
            raise _Wrong(f"no tensor {prefix + needed!r}")
    keys, values, queries = tensors[prefix + "k"], tensors[prefix + "v"], tensors.get(prefix + "q")
    layer = Layer(name=name, keys=keys, values=values, queries=queries)
    for tensor in layer.tensors:
        if tensor.dtype not in READ:
            raise _Wrong(f"tensor {tensor.name!r} is {tensor.dtype}; read are {', '.join(READ)}")
        if len(tensor.shape) != 3 or not all(tensor.shape):
            raise _Wrong(f"tensor {tensor.name!r} is {list(tensor.shape)}, it must be [tokens, heads, head_dim]")
    if values.shape != keys.shape:
        raise _Wrong(f"tensor {values.name!r} is {list(values.shape)}, {keys.name!r} is {list(keys.shape)}")
    tokens, kv_heads, head_dim = keys.shape
    if queries is not None and (queries.shape != (tokens, queries.shape[1], head_dim) or queries.shape[1] % kv_heads):
        expected = f"[{tokens}, a multiple of {kv_heads}, {head_dim}]"
        raise _Wrong(f"tensor {queries.name!r} is {list(queries.shape)}, beside {keys.name!r} it must be {expected}")
    if tokens < LEAST_TOKENS:
        raise _Wrong(f"tensor {keys.name!r} has {tokens} tokens, at least {LEAST_TOKENS} are needed")
    return layer


def _check_alike(layers: tuple[Layer, ...]) -> None:
    """One number of bytes must hold for all layers."""
    first = layers[0].keys
    for layer in layers[1:]:
        if layer.keys.shape[1:] != first.shape[1:]:
            raise _Wrong(
                f"tensor {layer.keys.name!r} has {layer.keys.shape[1]} heads of {layer.keys.shape[2]}, "
                f"{first.name!r} has {first.shape[1]} of {first.shape[2]}: give them in files of their own"
            )


def _check_numbers(tensor: Tensor, tokens: int) -> None:
    """All finite, and not all zero."""
    rows = max(1, CHECKED_AT_ONCE // prod(tensor.shape[1:]))
    nothing = True
    for first in range(0, min(tokens, tensor.shape[0]), rows):
        part = tensor.rows(first, min(first + rows, tokens))
        wrong = ~np.isfinite(part)
        if wrong.any():
            at = [int(axis) for axis in np.argwhere(wrong)[0]]
            raise _Wrong(f"tensor {tensor.name!r} holds {part[tuple(at)]} at [{first + at[0]}, {at[1]}, {at[2]}]")
        nothing = nothing and not part.any()
    if nothing:
        raise _Wrong(f"tensor {tensor.name!r} is zero everywhere")
