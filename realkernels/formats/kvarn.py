"""KVarN: tiles of 128 or 64 tokens, rotated, variance-normalised and rounded to 4 bits (K) and 2 or 4 bits (V).

| bytes of a tile of one head | content | at D = 256, k4v2_g128 |
|---|---|---|
| K codes | [D, G] k bits, packed along tokens | 16,384 |
| K scales | float16: scale a channel [D], zero a channel [D], scale a token [G] | 1,280 |
| V codes | [G, D] v bits, packed along channels | 8,192 |
| V scales | float16: scale a channel [D], scale a token [G], zero a token [G] | 1,024 |

tile = slot // G; `tiles` uint8 [tiles, G x token_bytes] holds the heads' records one behind the other (26,880 B each,
840 B a token at 4 heads; heads below 64 elements may leave a few bytes unused at its end, so that token_bytes is
whole). Within a byte the first code has the lowest bits. K = (code x key_scale[d] + key_zero[d]) x key_token_scale[t];
V = (code x value_scale[t] + value_zero[t]) x value_channel_scale[d]. Both are rotated by the orthonormal Hadamard
matrix. Source: syv-ai/qwen38-27b-rtx3090 `kvarn/.../config.py` and huawei-csl/KVarN (sizes, order of the parts,
arithmetic); the order of the codes within a tile is this project's.

Tokens wait in a float16 sidecar (`kvarn_sidecar.py`), rotated, until their tile is full; sinks stay there. A tile that
is appended to is committed: it is quantised as soon as its last token is there.

A row of K or V that holds NaN or infinity (or exceeds 65,504 when rotated) is NaN as a whole: that token, head and
plane only. When its tile is quantised it counts as zeros, so that the other tokens of the tile stay what they are for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch

from realkernels.formats import kvarn_sidecar as sidecar
from realkernels.formats.arithmetic import hadamard, pack, unpack
from realkernels.formats.format import Format, Rows, check_power_of_two, check_sizes
from realkernels.formats.kvarn_tile import quantise_tile
from realkernels.formats.planes import Arrangement, Part, Planes, cut
from realkernels.formats.slots import Slots, check_rows, put_where, slot_tensor

SIZES = {"kvarn_k4v2_g128": (4, 2, 128), "kvarn_k4v4_g128": (4, 4, 128), "kvarn_k4v2_g64": (4, 2, 64)}
"""Bits of K, bits of V, tokens of a tile."""

SIDE_TILES = 8
"""Side slots of a cache for one sequence: a sink, the open tile, and some for tiles in flight."""


@dataclass(frozen=True, kw_only=True)
class KVarN(Format):
    """Tiles in records; open tiles and sinks in a sidecar."""

    arrangements: ClassVar[tuple[Arrangement, ...]] = ("aligned",)

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
            sidecar=sidecar.side_tensors(
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
        quantised = index[planes.sidecar["side_of_tile"][index] == sidecar.QUANTISED].tolist()
        if quantised:
            raise ValueError(f"tile {quantised[0]} is quantised: pin it before its last token is written")
        planes.sidecar["sink"][index] = True

    def release(self, planes: Planes, tiles: Sequence[int]) -> None:
        """Forget tiles, such as those of a sequence that ended: no sinks any more, and their side slots are free."""
        self._check_tiles(planes, tiles)
        if tiles:
            sidecar.forget(planes.sidecar, tiles)

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
        completed = sidecar.plan(planes, index.tolist(), tokens) if checked else None
        rotated = [self._rotate(rows.detach().float()).half() for rows in (keys, values)]
        for number, first in enumerate(range(0, index.numel(), tokens)):
            run = slice(first, first + tokens)
            self._write(planes, index[run], rotated[0][run], rotated[1][run])
            if completed is None:
                self._flush(planes, *sidecar.complete(planes.sidecar, most=index[run].numel()))
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
        planes.sidecar["side_of_tile"][index] = sidecar.QUANTISED

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
        slot, _ = sidecar.place(side, index, torch.zeros_like(index))
        side["present"][slot, :count] = True
        turn = torch.arange(len(tiles), device=planes.device) % keys.shape[0]
        for name, rows in (("side_keys", keys), ("side_values", values)):
            side[name][slot, :count] = self._rotate(rows.detach().float()).half()[turn]

    def read(self, planes: Planes, slots: Slots, *, checked: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, head_dim] float32, rotated: from the sidecar where the tile lies there."""
        index = slot_tensor(planes, slots, checked=checked)
        tile, offset = index // self.tile_tokens, index % self.tile_tokens
        slot = planes.sidecar["side_of_tile"][tile].long()
        beside, quantised = (slot >= 0)[:, None, None], self._read_tiles(planes.parts, tile, offset)
        place = slot.clamp(min=0), offset
        keys = torch.where(beside, planes.sidecar["side_keys"][place].float(), quantised[0])
        return keys, torch.where(beside, planes.sidecar["side_values"][place].float(), quantised[1])

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """The orthonormal Hadamard product, its own inverse."""
        return self._rotate(query.float()).to(query.dtype)

    def rotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(output)

    def rotate_back_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The same once more."""
        return self.rotate_query(keys)

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
        held = index[planes.sidecar["side_of_tile"][index] != sidecar.EMPTY].tolist()
        if held:
            raise ValueError(f"tile {held[0]} holds tokens already: release it first")
        return index

    def _write(self, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        side, tokens = planes.sidecar, self.tile_tokens
        slot, placed = sidecar.place(side, index // tokens, index % tokens)
        at = slot * tokens + index % tokens
        put_where(side["side_keys"].flatten(0, 1), at, keys, placed)
        put_where(side["side_values"].flatten(0, 1), at, values, placed)

    def _flush(self, planes: Planes, slot: torch.Tensor, valid: torch.Tensor) -> None:
        """Quantise the tiles of these side slots where `valid`."""
        tile = planes.sidecar["tile_of_side"][slot].long()
        keys, values = (planes.sidecar[name][slot].float().transpose(1, 2) for name in ("side_keys", "side_values"))
        for name, rows in self._quantise(keys, values).items():
            put_where(planes.parts[name], tile, rows, valid)
        sidecar.retire(planes.sidecar, slot, tile, valid)

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

    def _read_tiles(self, parts: Rows, tile: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


FORMATS = dict.fromkeys(SIZES, KVarN)
