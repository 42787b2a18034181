"""The tokens that KVarN keeps in float16: tiles that are still being filled, and a sequence's first tile (its sink).

| tensor | type and shape | content |
|---|---|---|
| side_keys, side_values | float16 [side slots, G, H, D]; as views [side slots, H, G, D] | rotated K and V |
| side_of_tile | int32 [tiles] | the tile's side slot; QUANTISED; EMPTY |
| tile_of_side | int32 [side slots] | the tile that holds it, -1: free |
| present | bool [side slots, G] | tokens that are written |
| sink | bool [tiles] | tiles that stay here |

`plan` decides on the host what an append will do and refuses what cannot be done; `place`, `complete` and `retire` do
it on the device with fixed shapes.
"""

from collections.abc import Sequence

import torch

from realkernels.formats.planes import Planes
from realkernels.formats.slots import put_where

QUANTISED = -1
EMPTY = -2


def side_tensors(
    *, tiles: int, tile_tokens: int, side_tiles: int, kv_heads: int, head_dim: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """All empty; 2 x 2 B x tile_tokens x kv_heads x head_dim a side slot."""
    pool = (side_tiles, tile_tokens, kv_heads, head_dim)
    return {
        "side_keys": torch.zeros(pool, dtype=torch.float16, device=device),
        "side_values": torch.zeros(pool, dtype=torch.float16, device=device),
        "side_of_tile": torch.full((tiles,), EMPTY, dtype=torch.int32, device=device),
        "tile_of_side": torch.full((side_tiles,), -1, dtype=torch.int32, device=device),
        "present": torch.zeros(side_tiles, tile_tokens, dtype=torch.bool, device=device),
        "sink": torch.zeros(tiles, dtype=torch.bool, device=device),
    }


def plan(planes: Planes, slots: Sequence[int], tile_tokens: int) -> list[list[int]]:
    """For each run of tile_tokens slots the tiles that it completes; ValueError for what has no place.

    Reads the state back from the device, which waits for it.
    """
    touched = sorted({slot // tile_tokens for slot in slots})
    index = torch.tensor(touched, device=planes.device)
    state = dict(zip(touched, planes.sidecar["side_of_tile"][index].tolist(), strict=True))
    sinks = dict(zip(touched, planes.sidecar["sink"][index].tolist(), strict=True))
    held = planes.sidecar["tile_of_side"].tolist()
    present = planes.sidecar["present"].tolist()
    filled = {
        tile: {at for at, there in enumerate(present[side]) if there} for side, tile in enumerate(held) if tile >= 0
    }
    done = {tile for tile in touched if state[tile] == QUANTISED}
    completed: list[list[int]] = []
    for first in range(0, len(slots), tile_tokens):
        run = slots[first : first + tile_tokens]
        for slot in run:
            _add(filled, slot // tile_tokens, slot % tile_tokens, done=done, room=len(held))
        full = [tile for tile in touched if len(filled.get(tile, ())) == tile_tokens and not sinks[tile]]
        for tile in full:
            del filled[tile]
        done.update(full)
        completed.append(full)
    return completed


def _add(filled: dict[int, set[int]], tile: int, offset: int, *, done: set[int], room: int) -> None:
    if tile in done:
        raise ValueError(f"tile {tile} is quantised: release it before its slots are written again")
    if tile not in filled and len(filled) >= room:
        raise ValueError(
            f"tile {tile} needs a side slot, all {room} hold open tiles or sinks: allocate more side_tiles"
        )
    filled.setdefault(tile, set()).add(offset)


def place(side: dict[str, torch.Tensor], tile: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The side slot of each token [n] and whether it has one; tiles that are new get a free one."""
    count = side["tile_of_side"].numel()
    held = side["side_of_tile"][tile].long()
    new = held == EMPTY
    same = tile[:, None] == tile[None, :]
    leader = same.int().argmax(dim=1)  # the first token of the same tile
    leads = new & (leader == torch.arange(tile.numel(), device=tile.device))
    rank = leads.int().cumsum(dim=0) - 1
    free = (side["tile_of_side"] >= 0).int().argsort(stable=True)  # free ones first
    has_room = rank < (side["tile_of_side"] < 0).sum()
    given = torch.where(has_room, free[rank.clamp(0, count - 1)], -1)
    slot = torch.where(new, given[leader], held)
    placed = slot >= 0
    opened = leads & placed
    put_where(side["side_of_tile"], tile, slot.int(), opened)
    put_where(side["tile_of_side"], slot, tile.int(), opened)
    there = torch.ones_like(placed)
    put_where(side["present"].flatten(), slot * side["present"].shape[1] + offset, there, placed)
    return slot, placed


def complete(side: dict[str, torch.Tensor], most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Side slots of up to `most` full tiles that are no sinks, and whether each is one."""
    tile = side["tile_of_side"].long()
    full = side["present"].all(dim=1) & (tile >= 0) & ~side["sink"][tile.clamp(min=0)]
    first = full.int().argsort(descending=True, stable=True)[: min(most, full.numel())]
    return first, full[first]


def retire(side: dict[str, torch.Tensor], slot: torch.Tensor, tile: torch.Tensor, valid: torch.Tensor) -> None:
    """Side slots that are free again because their tiles are quantised."""
    put_where(side["side_of_tile"], tile, torch.full_like(tile, QUANTISED, dtype=torch.int32), valid)
    put_where(side["tile_of_side"], slot, torch.full_like(slot, -1, dtype=torch.int32), valid)
    put_where(side["present"], slot, torch.zeros_like(side["present"][slot]), valid)


def forget(side: dict[str, torch.Tensor], tiles: Sequence[int]) -> None:
    """Tiles that hold nothing any more; reads the state back from the device."""
    index = torch.tensor(list(tiles), device=side["sink"].device)
    slot = side["side_of_tile"][index]
    held = slot[slot >= 0].long()
    side["tile_of_side"][held] = -1
    side["present"][held] = False
    side["side_of_tile"][index] = EMPTY
    side["sink"][index] = False
