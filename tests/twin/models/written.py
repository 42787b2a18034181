"""Checkpoint folders as they are written, with nothing in their tensors: headers are whole, data is a hole in the file.

Names and shapes are those of published checkpoints of each kind, made small.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from twin.models.safetensors import ELEMENT_BITS

Named = dict[str, tuple[str, list[int]]]
"""Tensors by name: type and shape."""


def write(path: Path, tensors: Named, **metadata: str) -> int:
    """A safetensors file; bytes of its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def size(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    return prod(shape) * ELEMENT_BITS[dtype] // 8


def sharded(folder: Path, tensors: Named, shards: int) -> int:
    """The same over several files with an index; bytes of all data."""
    names, total = list(tensors), 0
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = {each: tensors[each] for each in names[number::shards]}
        total += write(folder / name, own)
        weight_map |= dict.fromkeys(own, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


class Checkpoint(NamedTuple):
    """A config.json, and the tensors of each part of the model and of what lies beside it."""

    config: dict[str, Any]
    parts: dict[str, Named]

    @property
    def tensors(self) -> Named:
        """All of them."""
        return {name: told for tensors in self.parts.values() for name, told in tensors.items()}

    def bytes_of(self, part: str) -> int:
        """Bytes of a part."""
        return sum(size(*told) for told in self.parts.get(part, {}).values())

    def without(self, part: str) -> "Checkpoint":
        """One that does not hold a part."""
        return self._replace(parts={each: tensors for each, tensors in self.parts.items() if each != part})


def named(lines: str, **ranges: range) -> Named:
    """Tensors of lines such as `model.layers.{n}.mlp.up_proj.weight BF16 128x64`, for every value of each range."""
    every: list[dict[str, int]] = [{}]
    for key, values in ranges.items():
        every = [{**known, key: value} for known in every for value in values]
    found: Named = {}
    for line in lines.split("\n"):
        if line.strip():
            name, dtype, *sizes = line.split()
            shape = [int(each) for each in sizes[0].split("x")] if sizes else []
            found |= {name.format(**known): (dtype, shape) for known in every}
    return found
