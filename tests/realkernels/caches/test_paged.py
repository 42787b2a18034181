"""A pool of KVarN tokens: first and open tiles of all sequences aside, everything else quantised, in a few calls."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realkernels.caches.paged import PagedCache
from realkernels.codecs import KVarN, codec_named
from realkernels.codecs.kvarn import QUANTISED
from realkernels.shape import AttentionShape

CPU = torch.device("cpu")
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=16)


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, given: Any = (), named: Any = None) -> Any:
        self.count += 1
        return function(*given, **(named or {}))


def filled(name: str, *, sequences: int, tokens: int) -> tuple[KVarN, PagedCache]:
    fmt = codec_named(name)
    assert isinstance(fmt, KVarN)
    return fmt, PagedCache.fill(fmt, SHAPE, sequences=sequences, tokens=tokens, device=CPU)


@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k4v2_g64"])
@pytest.mark.parametrize("tokens", [1, 64, 100, 128, 256, 300, 512])
def test_the_maps_of_several_sequences_say_where_each_token_lies(name: str, tokens: int) -> None:
    sequences = 7
    fmt, pool = filled(name, sequences=sequences, tokens=tokens)
    size, side = fmt.tile_tokens, pool.planes.sidecar
    aside: dict[int, int] = {}  # tile -> tokens that are there
    firsts = set()
    for sequence in range(sequences):
        tiles = (pool.slots(sequence, 0, tokens)[::size] // size).tolist()
        firsts.add(tiles[0])
        aside[tiles[0]] = min(size, tokens)
        if tokens % size:
            aside[tiles[-1]] = (tokens - 1) % size + 1
    held = {tile: slot for tile, slot in enumerate(side["side_of_tile"].tolist()) if slot >= 0}
    assert held.keys() == aside.keys()
    assert set(side["side_of_tile"].tolist()) <= {QUANTISED, *held.values()}
    assert [tile for tile, pinned in enumerate(side["sink"].tolist()) if pinned] == sorted(firsts)
    for tile, slot in held.items():
        assert side["tile_of_side"][slot] == tile
        assert side["present"][slot].tolist() == [at < aside[tile] for at in range(size)]
    free = [slot for slot in range(2 * sequences + 1) if slot not in held.values()]
    assert len(set(held.values())) == len(held)
    assert (side["tile_of_side"][free] == -1).all()
    assert not side["present"][free].any()


def test_what_is_aside_is_random_and_differs_between_sequences() -> None:
    fmt, pool = filled("kvarn_k4v2_g64", sequences=3, tokens=300)
    rows = [fmt.restore(pool.planes, pool.slots(sequence, 0, 300)) for sequence in range(3)]
    for span in (slice(0, 64), slice(256, 300)):
        for plane in (0, 1):
            parts = [keys_values[plane][span] for keys_values in rows]
            assert not any(torch.equal(parts[one], parts[other]) for one, other in ((0, 1), (0, 2), (1, 2)))
            assert all(float(part[..., 0].std()) > 0.5 for part in parts)


def test_a_call_is_made_for_all_sequences() -> None:
    counts = []
    for sequences in (2, 20):
        with Calls() as calls:
            filled("kvarn_k4v2_g64", sequences=sequences, tokens=2100)
        counts.append(calls.count)
    # _repeat alone goes on: a copy (slice, slice, copy) each time that the appended pages are used up
    assert counts[1] - counts[0] <= 4 * (20 * 9 // 8)
