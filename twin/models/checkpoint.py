"""The checkpoint beside a config.json: bytes of every part from its safetensors headers, or from its index."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hwprofiles.files import read_whole
from twin.errors import BadFile
from twin.models.fields import Understood
from twin.models.hub import kept_headers
from twin.models.safetensors import read_header
from twin.models.spec import ModelSpec, Part
from twin.models.tensors import UNUSED, Stored, part_of, with_bytes

INDEX = "model.safetensors.index.json"
LONGEST_INDEX = 2**26  # bytes: half a million tensors
MOST_SHARDS = 4096
LONGEST_HEADERS = 3 * 2**24  # bytes of all shards together: 300,000 tensors
FURTHEST = 0.05  # share of a checkpoint's bytes by which its configuration may miss what its index says


def with_checkpoint(understood: Understood, folder: Path) -> Understood:
    """The model with exact bytes where the folder holds a whole checkpoint or its index; as it is where it holds none.

    Raises BadFile where the index names files that are missing beside others, or tensors are of another model.
    """
    fetched = None if any(folder.glob("*.safetensors")) else kept_headers(folder)
    if fetched is not None:
        return _changed(understood, with_bytes(understood.spec, fetched, str(folder)), "headers that the hub sent")
    path = folder / INDEX
    held = {shard.name: shard for shard in folder.glob("*.safetensors")}
    if os.path.lexists(path):
        index = _index(path)
        named = set(index.weight_map.values())
        if not named & held.keys():
            if index.metadata.total_size is None:
                return understood
            return _changed(understood, _scaled(understood.spec, index, path), f"total_size of {INDEX}")
        if missing := sorted(named - held.keys()):
            there = len(named & held.keys())
            raise BadFile(f"{path}: names {missing[0]!r}, which is not there beside {there:,} that are")
        shards = [held[name] for name in sorted(named)]
    else:
        shards = _whole(held, folder)
    if not shards:
        return understood
    spec = with_bytes(understood.spec, _tensors(shards), str(folder))
    return _changed(understood, spec, f"headers of {len(shards)} safetensors files")


def _whole(held: dict[str, Path], folder: Path) -> list[Path]:
    """Files that are a checkpoint without an index: `model.safetensors`, else the only one, or all parts of one."""
    if "model.safetensors" in held:
        return [held["model.safetensors"]]
    parts = {name: found for name in held if (found := _PART.fullmatch(name))}
    sets = {(found[1], found[3]) for found in parts.values()}
    if len(sets) == 1 and len(parts) == len(held):
        ((stem, count),) = sets
        for number in range(1, min(int(count), MOST_SHARDS) + 1):
            name = f"{stem}-{number:05}-of-{count}.safetensors"
            if name not in held:
                raise BadFile(f"{folder}: {name} is not there beside {len(parts):,} other parts")
    elif len(held) > 1:
        return []
    return [held[name] for name in sorted(held)]


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def _tensors(shards: list[Path]) -> Iterator[Stored]:
    """All tensors, file by file. Raises BadFile."""
    left = LONGEST_HEADERS
    for path in shards:
        header = read_header(path)
        left -= header.data_at
        if left < 0:
            raise BadFile(f"{path}: headers up to this one are longer than {LONGEST_HEADERS:,} bytes")
        yield from (Stored(name, entry.shape, entry.size_bytes) for name, entry in header.entries.items())


def _changed(understood: Understood, spec: ModelSpec, source: str) -> Understood:
    return replace(understood, spec=spec, origins=understood.origins | {"weight bytes": source})


class _Metadata(Struct, frozen=True):
    total_size: Annotated[int, Meta(ge=1, le=2**50)] | Annotated[float, Meta(ge=1, le=2**50)] | None = None


class _Index(Struct, frozen=True):
    """Of a sharded checkpoint: which file has which tensor."""

    weight_map: dict[str, str]
    metadata: _Metadata = _Metadata()


def _index(path: Path) -> _Index:
    """Raises BadFile."""
    try:
        index = msgspec.json.decode(read_whole(path, most_bytes=LONGEST_INDEX), type=_Index)
    except (ValueError, RecursionError) as wrong:
        raise wrong if isinstance(wrong, BadFile) else BadFile(f"{path}: {wrong}") from None
    named = set(index.weight_map.values())
    if len(named) > MOST_SHARDS:
        raise BadFile(f"{path}: weight_map names {len(named):,} files, at most {MOST_SHARDS:,} are allowed")
    for name in named:
        if not name.endswith(".safetensors") or re.search(r"[/\\\0]", name):
            raise BadFile(f"{path}: weight_map names {name[:80]!r}, which is no safetensors file of its own folder")
    return index


def _scaled(spec: ModelSpec, index: _Index, path: Path) -> ModelSpec:
    """The model whose parts add up to an index's total: what the configuration leaves open is in the largest part.

    Raises BadFile where that would be more than a few per cent.
    """
    total = int(index.metadata.total_size or 0)
    sizes: dict[Part, int] = {part: round(size) for part, size in spec.weight_bytes.items()}
    beside = {tower: round(count * _tower_bits(spec, tower) / 8) for tower, count in spec.towers.items()}
    left = total - sum(sizes.values()) - sum(beside.values())
    named = {part_of(name, 2, spec.layers) for name in index.weight_map}
    if spec.tied and "head" in named and left >= sizes["embedding"] / 2:
        beside[UNUSED] = min(left, sizes["embedding"])
        left -= beside[UNUSED]
    uncounted = sorted(named & {"vision", "audio", "mtp"} - beside.keys())
    if uncounted and left > 0:  # which the configuration does not describe
        beside[uncounted[0]], left = left, 0
    if abs(left) > FURTHEST * total:
        said = total - left
        raise BadFile(
            f"{path}: metadata.total_size {total:,} and the {said:,} bytes that follow from config.json contradict"
        )
    largest = max(sizes, key=lambda part: sizes[part])
    return replace(
        spec, weights=replace(spec.weights, part_bytes={largest: sizes[largest] + left}, beside_bytes=beside)
    )


def _tower_bits(spec: ModelSpec, tower: str) -> float:
    """16, except that layers which predict further tokens are in 8 bits where all others are."""
    return spec.weights.bits if tower == "mtp" and spec.weights.format == "fp8" else 16
