"""The checkpoint beside a config.json: bytes of every part from its safetensors headers, or from its index."""

from pathlib import Path

from msgspec.structs import replace

from hwprofiles.files import read_json
from twin.errors import BadFile
from twin.models.fields import Understood
from twin.models.safetensors import read_header
from twin.models.spec import ModelSpec, Part
from twin.models.tensors import Stored, with_bytes

INDEX = "model.safetensors.index.json"
MOST_SHARDS = 4096
FURTHEST = 0.05  # share of a checkpoint's bytes by which its configuration may miss what its index says


def with_checkpoint(understood: Understood, folder: Path) -> Understood:
    """The model with exact bytes where the folder holds a whole checkpoint or its index; as it is where it holds none.

    Raises BadFile where the index names files that are missing beside others, or tensors are of another model.
    """
    index = folder / INDEX
    shards = sorted(folder.glob("*.safetensors"))
    if index.exists():
        named, total = _index(index)
        here = {path.name for path in shards}
        if not named & here:
            return _changed(understood, _scaled(understood.spec, total, index), f"total_size of {INDEX}")
        if missing := sorted(named - here):
            raise BadFile(f"{index}: names {missing[0]}, which is not there beside {len(named & here)} that are")
        shards = [path for path in shards if path.name in named]
    if not shards:
        return understood
    tensors = [
        Stored(name, len(entry.shape), entry.size_bytes)
        for path in shards
        for name, entry in read_header(path).entries.items()
    ]
    spec = with_bytes(understood.spec, tensors, str(folder))
    return _changed(understood, spec, f"headers of {len(shards)} safetensors files")


def _changed(understood: Understood, spec: ModelSpec, source: str) -> Understood:
    return replace(understood, spec=spec, origins=understood.origins | {"weight bytes": source})


def _index(path: Path) -> tuple[set[str], int]:
    """Names of the files that an index names, and the bytes of all their tensors. Raises BadFile."""
    raw = read_json(path)
    try:
        named = set(raw["weight_map"].values())
        total = raw["metadata"]["total_size"]
    except (KeyError, TypeError, AttributeError):
        raise BadFile(f"{path}: no weight_map or metadata.total_size: not the index of a checkpoint") from None
    if not all(isinstance(name, str) and "/" not in name for name in named) or len(named) > MOST_SHARDS:
        raise BadFile(f"{path}: weight_map must name files of its own folder, at most {MOST_SHARDS:,}")
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < 2**50:
        raise BadFile(f"{path}: metadata.total_size is {total!r}, it must be a number of bytes")
    return named, int(total)


def _scaled(spec: ModelSpec, total: int, path: Path) -> ModelSpec:
    """The model whose parts add up to an index's total: what the configuration leaves open is in the largest part.

    Towers are in 16 bits in all checkpoints. Raises BadFile where that would be more than a few per cent.
    """
    sizes: dict[Part, int] = {part: round(size) for part, size in spec.weight_bytes.items()}
    left = total - sum(sizes.values()) - 2 * sum(spec.towers.values())
    if abs(left) > FURTHEST * total:
        said = sum(sizes.values()) + 2 * sum(spec.towers.values())
        raise BadFile(
            f"{path}: metadata.total_size {total:,} and the {said:,} bytes that follow from config.json contradict"
        )
    largest = max(sizes, key=lambda part: sizes[part])
    return replace(spec, weights=replace(spec.weights, part_bytes={largest: sizes[largest] + left}))
