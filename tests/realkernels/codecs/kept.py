"""Every format in every arrangement, planes with something in them, and rows of many kinds."""

from math import sqrt

import numpy as np
import torch

from realkernels.codecs import Codec, Planes, arrangements, codec_named, codec_names
from tests.realkernels.codecs import slow

CPU = torch.device("cpu")

FEW_EXL3 = {"exl3_k2v2", "exl3_k3v5", "exl3_k4v4", "exl3_k6v7", "exl3_k8v8"}

ALL = [
    (name, arrangement)
    for name in codec_names()
    if not name.startswith("exl3_") or name in FEW_EXL3
    for arrangement in arrangements(name)
]
"""Each format once for each of its arrangements; of exllamav3's the widths that differ in kind."""

ROWS = [case for case in ALL if not case[0].startswith("kvarn")]
KVARN = [name for name in codec_names() if name.startswith("kvarn")]


def raw(planes: Planes) -> dict[str, bytes]:
    """Base tensors as their bytes."""
    return {name: bytes(tensor.contiguous().view(torch.uint8).numpy()) for name, tensor in planes.tensors.items()}


def same_bytes(one: Planes, other: Planes) -> bool:
    """Whether planes and sidecars are the same, bit by bit."""
    pairs = [(one.tensors, other.tensors), (one.sidecar, other.sidecar)]
    return all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
        for first, second in pairs
        for name in first
    )


def normal(tokens: int, heads: int, dims: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, standard normal."""
    source = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(tokens, heads, dims, generator=source) for _ in range(2))
    return keys, values


def outliers(tokens: int, heads: int, dims: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in which a few channels are much larger than the others, as real ones; values with a few loud tokens."""
    keys, values = normal(tokens, heads, dims, seed)
    keys[..., 1::13] = keys[..., 1::13] * 5 + 20
    values[3::17] *= 8
    return keys, values


def twins(fmt: Codec, *, pages: int = 3, page_tokens: int = 16, heads: int = 2, dims: int = 128) -> list[Planes]:
    """Two planes of the same random bytes."""
    pair = [fmt.allocate(pages, page_tokens, heads, dims, CPU) for _ in range(2)]
    for planes in pair:
        source = torch.Generator().manual_seed(7)
        for tensor in planes.tensors.values():
            every = tensor.view(torch.uint8)
            every.copy_(torch.randint(0, 256, every.shape, dtype=torch.uint8, generator=source))
    return pair


def place_of(planes: Planes, slot: int, head: int) -> slow.Place:
    return slow.Place(
        slot=slot, head=head, page_tokens=planes.page_tokens, kv_heads=planes.kv_heads, head_dim=planes.head_dim
    )


def planes_for(fmt: Codec, *, tokens: int, heads: int, dims: int) -> Planes:
    """At least `tokens` slots, in pages of whole tiles."""
    page_tokens = 2 * fmt.tile_tokens if fmt.tile_tokens > 1 else 16
    return fmt.allocate(-(-tokens // page_tokens), page_tokens, heads, dims, CPU)


def rotation(name: str, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices that bring K and V into the stored basis, by their definitions."""
    whole = np.eye(dims)
    if name.startswith("exl3"):
        groups = np.kron(np.eye(dims // 32), slow.sylvester(32) / sqrt(32))
        return groups, groups
    if name.startswith("kvarn"):
        return slow.sylvester(dims) / sqrt(dims), slow.sylvester(dims) / sqrt(dims)
    if name.startswith("int4"):
        fmt = codec_named(name)
        scaled = fmt.rotate_query(torch.eye(dims)).numpy().T * dims
        return scaled, scaled
    if name.startswith("turboquant") and name.endswith("_nc"):
        return slow.sylvester(dims) / sqrt(dims), whole
    return whole, whole


def stored(name: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows brought into the stored basis in float64."""
    for_keys, for_values = rotation(name, keys.shape[-1])
    return keys.double().numpy() @ for_keys.T, values.double().numpy() @ for_values.T
