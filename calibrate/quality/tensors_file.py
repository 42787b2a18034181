"""Reading K, V and Q that somebody dumped from a model: a safetensors file, mapped into memory and checked throughout.

Names: `k`, `v` and, if there, `q`; or `layers.N.k` and so on, as many layers as one likes; others are left alone.
Shapes: [tokens, kv_heads, head_dim], of q [tokens, query_heads, head_dim]. Types: F32, F16, BF16. K is what a cache
would keep: after norms and rotary embedding.
"""

import mmap
import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twin.errors import BadFile
from twin.models.safetensors import Entry, Wrong, header_of

Floats = npt.NDArray[np.float32]
LEAST_TOKENS = 16

READ = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

CHECKED_AT_ONCE = 2**22
"""Elements."""
_LAYERED = re.compile(r"layers\.(0|[1-9]\d{0,5})\.([kvq])")


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
    except Wrong as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    except OSError as wrong:
        raise BadFile(f"{path}: cannot be read: {wrong.strerror}") from None
    return layers


def _tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor that can be read as numbers; all are checked to lie where they should."""
    header = header_of(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: _placed(name, entry, mapped, header.data_at) for name, entry in header.entries.items()}


def _placed(name: str, entry: Entry, mapped: mmap.mmap, data_at: int) -> Tensor:
    """The tensor where it lies; empty where it is or where its type is none of those that are read."""
    count, raw = prod(entry.shape), np.empty(0)
    if count and entry.dtype in READ:
        flat = np.frombuffer(mapped, READ[entry.dtype], count=count, offset=data_at + entry.data_offsets[0])
        raw = flat.reshape(entry.shape)
    return Tensor(name=name, dtype=entry.dtype, shape=entry.shape, raw=raw)


def _layers(tensors: dict[str, Tensor]) -> tuple[Layer, ...]:
    """K, V and Q put together; layers in the order of their numbers."""
    numbers = sorted({int(found[1]) for found in map(_LAYERED.fullmatch, tensors) if found})
    single = {"k", "v", "q"} & tensors.keys()
    if single and numbers:
        raise Wrong(f"tensor {min(single)!r} beside those of layer {numbers[0]}: name all of them by layers, or none")
    if not single and not numbers:
        held = ", ".join(map(repr, list(tensors)[:5])) + (", ..." if len(tensors) > 5 else "")
        raise Wrong(f"no tensors 'k' and 'v', nor 'layers.N.k' and 'layers.N.v'; it holds {held or 'none'}")
    prefixes = {f"layer {number}": f"layers.{number}." for number in numbers} or {"tensors": ""}
    return tuple(_layer(tensors, name, prefix) for name, prefix in prefixes.items())


def _layer(tensors: dict[str, Tensor], name: str, prefix: str) -> Layer:
    for needed in ("k", "v"):
        if prefix + needed not in tensors:
            raise Wrong(f"no tensor {prefix + needed!r}")
    keys, values, queries = tensors[prefix + "k"], tensors[prefix + "v"], tensors.get(prefix + "q")
    layer = Layer(name=name, keys=keys, values=values, queries=queries)
    for tensor in layer.tensors:
        if tensor.dtype not in READ:
            raise Wrong(f"tensor {tensor.name!r} is {tensor.dtype}; read are {', '.join(READ)}")
        if len(tensor.shape) != 3 or not all(tensor.shape):
            raise Wrong(f"tensor {tensor.name!r} is {list(tensor.shape)}, it must be [tokens, heads, head_dim]")
    if values.shape != keys.shape:
        raise Wrong(f"tensor {values.name!r} is {list(values.shape)}, {keys.name!r} is {list(keys.shape)}")
    tokens, kv_heads, head_dim = keys.shape
    if queries is not None and (queries.shape != (tokens, queries.shape[1], head_dim) or queries.shape[1] % kv_heads):
        expected = f"[{tokens}, a multiple of {kv_heads}, {head_dim}]"
        raise Wrong(f"tensor {queries.name!r} is {list(queries.shape)}, beside {keys.name!r} it must be {expected}")
    if tokens < LEAST_TOKENS:
        raise Wrong(f"tensor {keys.name!r} has {tokens} tokens, at least {LEAST_TOKENS} are needed")
    return layer


def _check_alike(layers: tuple[Layer, ...]) -> None:
    """One number of bytes must hold for all layers."""
    first = layers[0].keys
    for layer in layers[1:]:
        if layer.keys.shape[1:] != first.shape[1:]:
            raise Wrong(
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
            raise Wrong(f"tensor {tensor.name!r} holds {part[tuple(at)]} at [{first + at[0]}, {at[1]}, {at[2]}]")
        nothing = nothing and not part.any()
    if nothing:
        raise Wrong(f"tensor {tensor.name!r} is zero everywhere")
