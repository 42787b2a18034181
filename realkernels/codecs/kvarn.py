"""KVarN: tiles of 128 or 64 tokens, rotated, variance-normalised and rounded to 4 bits (K) and 2 or 4 bits (V).

| bytes of a tile of one head | content | at D = 256, k4v2_g128 |
|---|---|---|
| K codes | [D, G] k bits, packed along tokens | 16,384 |
| K scales | float16: scale a channel [D], zero a channel [D], scale a token [G] | 1,280 |
| V codes | [G, D] v bits, packed along channels | 8,192 |
| V scales | float16: scale a channel [D], scale a token [G], zero a token [G] | 1,024 |

tile = slot // G; `tiles` uint8 [tiles, G x token_bytes] holds the heads' bytes one behind the other (26,880 B each, 840
B a token at 4 heads; heads below 64 elements may leave a few bytes unused at its end, so that token_bytes is whole).
Within a byte the first code has the lowest bits. K = (code x key_scale[d] + key_zero[d]) x key_token_scale[t];
V = (code x value_scale[t] + value_zero[t]) x value_channel_scale[d]. Both are rotated by the orthonormal Hadamard
matrix. Source: syv-ai/qwen38-27b-rtx3090 `kvarn/.../config.py` and huawei-csl/KVarN (sizes, order of the parts,
arithmetic); the order of the codes within a tile is this project's.

Tokens wait in a float16 sidecar, rotated, until their tile is full; a sequence's first tile (its sink) stays there. A
tile that is appended to is committed: it is quantised as soon as its last token is there.

| tensor of the sidecar | type and shape | content |
|---|---|---|
| side_keys, side_values | float16 [side slots, G, H, D]; as views [side slots, H, G, D] | rotated K and V |
| side_of_tile | int32 [tiles] | the tile's side slot; QUANTISED; EMPTY |
| tile_of_side | int32 [side slots] | the tile that holds it, -1: free |
| present | bool [side slots, G] | tokens that are written |
| sink | bool [tiles] | tiles that stay here |

A row of K or V that holds NaN or infinity (or exceeds 65,504 when rotated) is NaN as a whole: that token, head and
plane only. When its tile is quantised it counts as zeros, so that the other tokens of the tile stay what they are for.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import torch

from realkernels.codecs.arithmetic import affine_codes, folded_sum, hadamard, over, pack, unpack
from realkernels.codecs.codec import (
    Codec,
    Part,
    Planes,
    Rows,
    Slots,
    check_power_of_two,
    check_rows,
    check_sizes,
    cut,
    slot_tensor,
)
from realkernels.kernels.decode_kvarn import DECODE

SIZES = {"kvarn_k4v2_g128": (4, 2, 128), "kvarn_k4v4_g128": (4, 4, 128), "kvarn_k4v2_g64": (4, 2, 64)}
"""Bits of K, bits of V, tokens of a tile."""

QUANTISED = -1
EMPTY = -2
"""Of a tile that has no side slot."""

SIDE_TILES = 8
"""Side slots of a cache for one sequence: a sink, the open tile, and some for tiles in flight."""


class KVarN(Codec):
    """Full tiles in bytes of their own; open tiles and sinks in a sidecar."""

    arrangements = ("aligned",)
    decode_form = DECODE

    @property
    def tile_tokens(self) -> int:
        """Tokens that are quantised together."""
        return SIZES[self.name][2]

    def check(self, head_dim: int) -> None:
        """Hadamard matrices and whole bytes."""
        check_power_of_two(self.name, head_dim, 8)

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        """Of one head's tile, in the order in which they lie."""
        key_bits, value_bits, tokens = SIZES[self.name]
        return (
            Part("key_data", torch.uint8, (head_dim, tokens * key_bits // 8)),
            Part("key_scale", torch.float16, (head_dim,)),
            Part("key_zero", torch.float16, (head_dim,)),
            Part("key_token_scale", torch.float16, (tokens,)),
            Part("value_data", torch.uint8, (tokens, head_dim * value_bits // 8)),
            Part("value_channel_scale", torch.float16, (head_dim,)),
            Part("value_scale", torch.float16, (tokens,)),
            Part("value_zero", torch.float16, (tokens,)),
        )

    def tile_bytes(self, head_dim: int) -> int:
        """Of one head."""
        self.check(head_dim)
        return sum(part.nbytes for part in self.parts(head_dim))

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of K and V of one token in one layer, rounded up to whole ones; the sidecar apart."""
        return -(-self.tile_bytes(head_dim) * kv_heads // self.tile_tokens)

    def allocate(
        self, pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device, *,
        side_tiles: int | None = None, sinks: Sequence[int] = (0,),
    ) -> Planes:  # fmt: skip
        """Tiles of zeros and `side_tiles` side slots (None: up to 8); `sinks` are tiles that are never quantised.

        ValueError for sizes that do not fit and for pages that are no whole tiles.
        """
        check_sizes(pages=pages, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim)
        size, tokens = self.tile_bytes(head_dim), self.tile_tokens
        if page_tokens % tokens:
            raise ValueError(f"{self.name} needs pages of whole tiles of {tokens} tokens, not of {page_tokens}")
        tiles = pages * page_tokens // tokens
        side_tiles = min(tiles, SIDE_TILES) if side_tiles is None else side_tiles
        check_sizes(side_tiles=side_tiles)
        stride = tokens * self.token_bytes(kv_heads, head_dim)
        tensor = torch.zeros(tiles, stride, dtype=torch.uint8, device=device)
        heads = tensor[:, : kv_heads * size].unflatten(-1, (kv_heads, size))
        planes = Planes(
            pages=pages, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=head_dim,
            tensors={"tiles": tensor}, parts=cut(heads, self.parts(head_dim)),
            sidecar=_side_tensors(
                tiles=tiles, tile_tokens=tokens, side_tiles=side_tiles,
                kv_heads=kv_heads, head_dim=head_dim, device=tensor.device,
            ),
        )  # fmt: skip
        self.pin(planes, sinks)
        return planes

    def pin(self, planes: Planes, tiles: Sequence[int]) -> None:
        """Tiles that stay in float16: the first of each sequence. ValueError for tiles that are quantised already."""
        self._check_tiles(planes, tiles)
        index = torch.tensor(list(tiles), dtype=torch.int64, device=planes.device)
        quantised = index[planes.sidecar["side_of_tile"][index] == QUANTISED].tolist()
        if quantised:
            raise ValueError(f"tile {quantised[0]} is quantised: pin it before its last token is written")
        planes.sidecar["sink"][index] = True

    def release(self, planes: Planes, tiles: Sequence[int]) -> None:
        """Forget tiles, such as those of a sequence that ended: no sinks any more, and their side slots are free."""
        self._check_tiles(planes, tiles)
        if tiles:
            _forget(planes.sidecar, tiles)

    def views(self, planes: Planes) -> Rows:
        """Parts of tiles [tiles, kv_heads, ...], side_keys and side_values [side slots, kv_heads, G, D], the maps."""
        side = {name: planes.sidecar[name].transpose(1, 2) for name in ("side_keys", "side_values")}
        return {**planes.parts, **planes.sidecar, **side}

    def append(
        self, planes: Planes, slots: Slots, keys: torch.Tensor, values: torch.Tensor, *, checked: bool = True
    ) -> None:
        """Rows [n, kv_heads, head_dim], n >= 1, into the sidecar; tiles that they complete are quantised.

        ValueError, with nothing written, for what does not fit, for slots of quantised tiles and for more open tiles
        than side slots. `checked=False` drops the tokens of the latter two instead; it tries every tile that it
        touches, since shapes may not depend on which of them are full.
        """
        index = slot_tensor(planes, slots, checked=checked, distinct=True)
        check_rows(planes, index.numel(), keys, values)
        tokens = self.tile_tokens
        completed = plan(planes, index.tolist(), tokens) if checked else None
        rotated = [self._rotate(rows.detach().float()).half() for rows in (keys, values)]
        for number, first in enumerate(range(0, index.numel(), tokens)):
            run = slice(first, first + tokens)
            self._write(planes, index[run], rotated[0][run], rotated[1][run])
            if completed is None:
                self._flush(planes, *complete(planes.sidecar, most=index[run].numel()))
            elif completed[number]:
                tiles = torch.tensor(completed[number], device=planes.device)
                slot = planes.sidecar["side_of_tile"][tiles].long()
                self._flush(planes, slot, torch.ones_like(slot, dtype=torch.bool))

    def write_tiles(self, planes: Planes, tiles: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Whole tiles, rows [n, G, kv_heads, head_dim], quantised together as `append` does it run by run.

        ValueError, with nothing written, for what does not fit, for tiles that are not empty and for sinks.
        """
        index = self._empty_tiles(planes, tiles)
        check_rows(planes, len(tiles) * self.tile_tokens, keys.flatten(0, 1), values.flatten(0, 1))
        sinks = index[planes.sidecar["sink"][index]].tolist()
        if sinks:
            raise ValueError(f"tile {sinks[0]} is a sink, which is not quantised")
        heads = [self._rotate(rows.detach().float()).half().float().transpose(1, 2) for rows in (keys, values)]
        for name, rows in self._quantise(*heads).items():
            planes.parts[name][index] = rows
        planes.sidecar["side_of_tile"][index] = QUANTISED

    def write_aside(self, planes: Planes, tiles: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """First tokens of many tiles into side slots, together: rows [m, up to G, kv_heads, head_dim], i % m of tile i.

        ValueError, with nothing written, for what does not fit, for tiles that are not empty, for whole tiles that are
        no sinks and for more tiles than free side slots.
        """
        index, side, count = self._empty_tiles(planes, tiles), planes.sidecar, keys.shape[1]
        check_rows(planes, keys.shape[0] * count, keys.flatten(0, 1), values.flatten(0, 1))
        if not 1 <= count <= self.tile_tokens:
            raise ValueError(f"{count} tokens of a tile of {self.tile_tokens}")
        if count == self.tile_tokens and not bool(side["sink"][index].all()):
            raise ValueError("whole tiles stay in side slots only as sinks: pin them, or quantise them")
        room = int((side["tile_of_side"] < 0).sum())
        if len(tiles) > room:
            raise ValueError(f"{len(tiles)} tiles need a side slot, {room} are free: allocate more side_tiles")
        slot, _ = place(side, index, torch.zeros_like(index))
        side["present"][slot, :count] = True
        source = torch.arange(len(tiles), device=planes.device) % keys.shape[0]
        for name, rows in (("side_keys", keys), ("side_values", values)):
            side[name][slot, :count] = self._rotate(rows.detach().float()).half()[source]

    def dequantise(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32, rotated: from the sidecar where the tile lies there."""
        index = slot_tensor(planes, slots, checked=checked)
        tile, offset = index // self.tile_tokens, index % self.tile_tokens
        slot = planes.sidecar["side_of_tile"][tile].long()
        beside, quantised = (slot >= 0)[:, None, None], self._dequantise_tiles(planes.parts, tile, offset)
        place = slot.clamp(min=0), offset
        keys = torch.where(beside, planes.sidecar["side_keys"][place].float(), quantised[0])
        return keys, torch.where(beside, planes.sidecar["side_values"][place].float(), quantised[1])

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """The orthonormal Hadamard product, its own inverse."""
        return self._rotate(query.float()).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The same once more; of keys, too."""
        return self.rotate_query(output)

    def _rotate(self, rows: torch.Tensor) -> torch.Tensor:
        return hadamard(rows) * (1 / sqrt(rows.shape[-1]))

    def _check_tiles(self, planes: Planes, tiles: Sequence[int]) -> None:
        count = planes.slots // self.tile_tokens
        for tile in tiles:
            if not 0 <= tile < count:
                raise ValueError(f"tile {tile} is none of {count}")

    def _empty_tiles(self, planes: Planes, tiles: Sequence[int]) -> torch.Tensor:
        self._check_tiles(planes, tiles)
        if not tiles or len(set(tiles)) < len(tiles):
            raise ValueError(f"{len(tiles)} tiles, {len(set(tiles))} different ones: give each once, and at least one")
        index = torch.tensor(list(tiles), device=planes.device)
        held = index[planes.sidecar["side_of_tile"][index] != EMPTY].tolist()
        if held:
            raise ValueError(f"tile {held[0]} holds tokens already: release it first")
        return index

    def _write(self, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        side, tokens = planes.sidecar, self.tile_tokens
        slot, placed = place(side, index // tokens, index % tokens)
        at = slot * tokens + index % tokens
        put_where(side["side_keys"].flatten(0, 1), at, keys, placed)
        put_where(side["side_values"].flatten(0, 1), at, values, placed)

    def _flush(self, planes: Planes, slot: torch.Tensor, valid: torch.Tensor) -> None:
        """Quantise the tiles of these side slots where `valid`."""
        tile = planes.sidecar["tile_of_side"][slot].long()
        keys, values = (planes.sidecar[name][slot].float().transpose(1, 2) for name in ("side_keys", "side_values"))
        for name, rows in self._quantise(keys, values).items():
            put_where(planes.parts[name], tile, rows, valid)
        retire(planes.sidecar, slot, tile, valid)

    def _quantise(self, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """The parts of tiles [n, heads, G, D]."""
        key_bits, value_bits, _ = SIZES[self.name]
        lost_key, lost_value = (~rows.isfinite().all(dim=-1) for rows in (keys, values))
        keys = torch.where(lost_key[..., None], 0.0, keys).transpose(-1, -2).contiguous()
        values = torch.where(lost_value[..., None], 0.0, values).contiguous()
        key_codes, key_scale, key_zero, token_scale = quantise_tile(keys, key_bits)
        value_codes, value_scale, value_zero, channel_scale = quantise_tile(values, value_bits)
        return {
            "key_data": pack(key_codes, key_bits),
            "key_scale": key_scale,
            "key_zero": key_zero,
            "key_token_scale": token_scale.masked_fill(lost_key, float("nan")),
            "value_data": pack(value_codes, value_bits),
            "value_channel_scale": channel_scale,
            "value_scale": value_scale.masked_fill(lost_value, float("nan")),
            "value_zero": value_zero,
        }

    def _dequantise_tiles(
        self, parts: Rows, tile: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n, heads, D] float32 of quantised tiles."""
        key_bits, value_bits, _ = SIZES[self.name]
        together = 8 // key_bits
        key_bytes = parts["key_data"].permute(0, 3, 1, 2)[tile, offset // together]
        key_codes = key_bytes.int() >> (key_bits * (offset % together))[:, None, None] & (2**key_bits - 1)
        keys = key_codes.float() * parts["key_scale"][tile].float() + parts["key_zero"][tile].float()
        keys = keys * _at(parts["key_token_scale"], tile, offset)
        value_codes = unpack(parts["value_data"].transpose(1, 2)[tile, offset], value_bits)
        values = value_codes.float() * _at(parts["value_scale"], tile, offset) + _at(parts["value_zero"], tile, offset)
        return keys, values * parts["value_channel_scale"][tile].float()


def _at(plane: torch.Tensor, tile: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """float32 [n, heads, 1] of [tiles, heads, G]."""
    return plane.transpose(1, 2)[tile, offset].float()[..., None]


# The sidecar: `plan` decides on the host what an append will do and refuses what cannot be done; `place`, `complete`
# and `retire` do it on the device with fixed shapes.


def _side_tensors(
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
            _fill(filled, slot // tile_tokens, slot % tile_tokens, done=done, room=len(held))
        full = [tile for tile in touched if len(filled.get(tile, ())) == tile_tokens and not sinks[tile]]
        for tile in full:
            del filled[tile]
        done.update(full)
        completed.append(full)
    return completed


def _fill(filled: dict[int, set[int]], tile: int, offset: int, *, done: set[int], room: int) -> None:
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


def _forget(side: dict[str, torch.Tensor], tiles: Sequence[int]) -> None:
    """Tiles that hold nothing any more; reads the state back from the device."""
    index = torch.tensor(list(tiles), device=side["sink"].device)
    slot = side["side_of_tile"][index]
    held = slot[slot >= 0].long()
    side["tile_of_side"][held] = -1
    side["present"][held] = False
    side["side_of_tile"][index] = EMPTY
    side["sink"][index] = False


def put_where(target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
    """target[index[i]] = rows[i] for every i that is `valid`, all on the device and with fixed shapes.

    The others repeat the first valid write, or the present contents of row 0 where there is none: harmless.
    """
    any_valid = valid.any()
    source = torch.where(valid, torch.arange(valid.numel(), device=valid.device), valid.int().argmax())
    index = torch.where(any_valid, index[source], 0).long()
    target[index] = torch.where(any_valid, rows[source], target[index])


# How a full tile is quantised: iterative variance normalisation, then asymmetric rounding row by row. Source:
# huawei-csl/KVarN's `sinkhorn.py`, from a description of it.

ITERATIONS = 8
LEAST_STD, LARGEST_STD = 1e-3, 1e3
LEAST_LOG, LARGEST_LOG = -0.3, 10.0
LARGEST_HALF = 65504.0
ROWS, COLUMNS = -1, -2
"""The axis along which a row's, a column's elements lie."""

Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes [..., rows, columns] float32; scale and zero [..., rows], column scale [..., columns], float16."""


def quantise_tile(x: torch.Tensor, bits: int) -> Quantised:
    """Tiles [..., rows, columns] of finite float32, of K [channels, tokens], of V [tokens, channels]; powers of two.

    Each row gets a scale and a zero, each column a scale: x = (code x scale[row] + zero[row]) x column[column].
    Rounding a row to codes does not change when the row is scaled, so that the rows' normalisation scales, which the
    iteration needs to find the columns' ones, are already within scale[row] and zero[row]. Codes are found with the
    float16 values that are stored. Standard deviations are those of the population; the start, without
    normalisation, is one of the states to choose from.
    """
    column = column_logs(x).exp().half()
    y = x / column.float()
    low, high = y.amin(dim=-1, keepdim=True), y.amax(dim=-1, keepdim=True)
    scale = over(high - low, 2.0**bits - 1).clamp(max=LARGEST_HALF).half()
    zero = low.clamp(-LARGEST_HALF, LARGEST_HALF).half()
    codes = affine_codes(y, scale.float(), zero.float(), bits)
    return codes, scale.squeeze(-1), zero.squeeze(-1), column.squeeze(-2)


def column_logs(x: torch.Tensor) -> torch.Tensor:
    """Logarithms [..., 1, columns] of the columns' scales in the most even of the states that 8 iterations pass."""
    (least, best), *others = states(x)
    for unevenness, column in others:
        better = unevenness < least
        least, best = torch.where(better, unevenness, least), torch.where(better, column, best)
    return best


def states(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(unevenness [..., 1, 1], logarithms of the columns' scales) as it is, then after each iteration."""
    row, column = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    yield _unevenness(x), column
    for _ in range(ITERATIONS):
        column = _step(column, _std(_scaled(x, row, column), COLUMNS))
        row = _step(row, _std(_scaled(x, row, column), ROWS))
        yield _unevenness(_scaled(x, row, column)), column


def _scaled(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return x * (-row).exp() * (-column).exp()


def _step(logs: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (logs + std.log()).clamp(LEAST_LOG, LARGEST_LOG)


def _std(x: torch.Tensor, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    apart = x - folded_sum(x, dim) / size
    return (folded_sum(apart * apart, dim) / size).sqrt().clamp(LEAST_STD, LARGEST_STD)


def _unevenness(x: torch.Tensor) -> torch.Tensor:
    """Largest over least standard deviation of the columns plus that of the rows, [..., 1, 1]."""
    columns, rows = _std(x, COLUMNS), _std(x, ROWS)
    across, down = columns.amax(-1, keepdim=True) / columns.amin(-1, keepdim=True), rows.amax(-2, keepdim=True)
    return across + down / rows.amin(-2, keepdim=True)


CODECS = dict.fromkeys(SIZES, KVarN)
