"""Appending to every cache format on a real GPU: the bytes that torch writes, of rows that are hard to quantise.

Run as `python tests/gpu/appended_bytes.py [formats ...]`; 4 KV heads x 256. Exits with 1 where bytes differ.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.codecs import Codec, KVarN, Planes, arrangements, codec_named
from realkernels.kernels.append import append
from realkernels.timed.append import tile_faults
from tests.gpu.every_kernel import covering

SIZES = ((1, torch.bfloat16), (7, torch.float16), (100, torch.bfloat16), (33, torch.float32))
"""Tokens of a check and the type of their rows, in slots in any order; KVarN's in a row."""

TILED_SIZES = ((300, torch.bfloat16), (1, torch.bfloat16), (600, torch.float32))
"""Of KVarN as well."""

SINK = 1
"""The tile that is never quantised."""

DEVICE = torch.device("cuda")


def rows_of(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with outliers, zeros, extremes, and NaN and infinity in the first, second and third token."""
    source = torch.Generator(DEVICE).manual_seed(seed)
    keys, values = torch.randn(2, tokens, 4, 256, device=DEVICE, generator=source)
    keys[..., 3::29] *= 9
    values[::5] *= 1e3
    for place, what in enumerate((float("nan"), float("inf"), float("-inf"))):
        keys[place : place + 1, place, 40] = what
        values[place : place + 1, 3 - place, 7] = what
    keys[3:4, 1] = 0.0
    values[4:5, 2] = 0.25
    values[5:6] *= 1e5
    return keys, values


def planes_of(codec: Codec, tokens: int) -> Planes:
    """Twice the room; KVarN with a sink in its second tile."""
    if isinstance(codec, KVarN):
        return codec.allocate(2 + 2 * tokens // 256, 256, 4, 256, DEVICE, side_tiles=6, sinks=(SINK,))
    return codec.allocate(2 + 2 * tokens // 64, 64, 4, 256, DEVICE)


def faults(codec: Codec) -> Iterator[str]:
    """Parts whose bytes differ from torch's; for KVarN what is wrong with its tiles."""
    tiles = isinstance(codec, KVarN)
    for seed, (tokens, dtype) in enumerate(SIZES + TILED_SIZES * tiles):
        one, other = planes_of(codec, tokens), planes_of(codec, tokens)
        keys, values = (rows.to(dtype) for rows in rows_of(tokens, seed))
        slots = torch.arange(tokens, device=DEVICE)
        if not tiles:
            slots = torch.randperm(one.slots, device=DEVICE)[:tokens]
        codec.append(one, slots, keys, values)
        append(codec, other, slots, keys, values, checked=False)
        if isinstance(codec, KVarN):
            yield from _tile_faults(codec, (one, other), keys, values)
            continue
        for name, first in (one.tensors | one.sidecar).items():
            second = (other.tensors | other.sidecar)[name]
            same = first.view(torch.uint8) == second.view(torch.uint8)
            if first.is_floating_point():  # of plain rows NaN is NaN
                same = same.view(*first.shape, first.element_size()).all(-1) | (first.isnan() & second.isnan())
            if not bool(same.all()):
                yield f"{tokens} tokens of {dtype}: {int((~same).sum())} of {name} differ"


def _tile_faults(
    codec: KVarN, planes: tuple[Planes, Planes], keys: torch.Tensor, values: torch.Tensor
) -> Iterator[str]:
    """What is wrong with the full tiles of the second planes, and with which of the tokens they have lost."""
    one, other = planes
    slots, size = torch.arange(keys.shape[0], device=DEVICE), codec.tile_tokens
    full = [tile for tile in range(keys.shape[0] // size) if tile != SINK]
    if full:
        rows = torch.cat([torch.arange(tile * size, (tile + 1) * size, device=DEVICE) for tile in full])
        yield from tile_faults(codec, other, full, keys[rows], values[rows])
    for first, second in zip(codec.dequantise(one, slots), codec.dequantise(other, slots), strict=True):
        if not torch.equal(first.isnan(), second.isnan()):
            yield "other tokens are lost"


def main() -> int:
    """0 if every byte was right."""
    bad = 0
    for name in sys.argv[1:] or covering():
        for arrangement in arrangements(name):
            found = list(faults(codec_named(name, arrangement=arrangement)))
            print(name, arrangement, *(found or ["right"]), sep="  ", flush=True)
            bad += len(found)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
