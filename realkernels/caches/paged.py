"""A paged cache of a codec with random tokens in it: shuffled pages, outlier channels, and float64 attention.

It holds the caches of several calls one after the other, so that a device's own cache is of no help. Its tokens are
appended, a few thousand of them, and copied page by page until the cache is full: what a page holds repeats, where it
lies does not. Of KVarN all sequences' first tiles and all open ones are written together, as they stay in float16.
"""

from dataclasses import dataclass

import torch

from realkernels.codecs import Codec, KVarN, Planes
from realkernels.codecs.kvarn import EMPTY, QUANTISED
from realkernels.shape import AttentionShape

PAGE_TOKENS = 256
APPENDED_PAGES = {"cuda": 64, "cpu": 8}
"""Pages whose tokens are appended; the others repeat them."""

TABLE_PAGES = 16
"""A sequence's row of the page table is as long as a multiple of this: Triton compiles a kernel anew for other rows."""

APPENDED_ROWS = {"cuda": 4096, "cpu": 512}
"""Tokens of one append, so that what it needs beside the planes stays small (on a CPU, in its caches)."""

OUTLIERS = (3, 0.4, 0.7)
"""Channels of K that are much larger than the others: by number, or as a share of the head size."""

OUTLIER_SIZE = 6.0
LAYER_SCALES = {"key": 0.125, "value": 0.0625}
"""Of a codec with one scale a layer; powers of two lose nothing."""

READ_TOKENS = 4096
"""Tokens that the reference reads at once."""


class NoKernel(RuntimeError):
    """The device has no kernel that reads the codec; the message says why, in one line."""


def random_rows(
    tokens: int, shape: AttentionShape, device: torch.device, source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [tokens, kv_heads, head_dim] float32: normal, some channels of K six times as large."""
    size = (tokens, shape.kv_heads, shape.head_dim)
    keys = torch.randn(size, device=device, generator=source)
    for place in OUTLIERS:
        channel = place if isinstance(place, int) else int(place * shape.head_dim)
        keys[..., channel % shape.head_dim] *= OUTLIER_SIZE
    return keys, torch.randn(size, device=device, generator=source)


def allocated(codec: Codec, shape: AttentionShape, pages: int, device: torch.device, *, side_tiles: int) -> Planes:
    """Planes of zeros; of KVarN with so many side slots and no sinks."""
    beside = {"side_tiles": side_tiles, "sinks": ()} if isinstance(codec, KVarN) else {}
    return codec.allocate(pages, PAGE_TOKENS, shape.kv_heads, shape.head_dim, device, **beside)


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """Sequences of `tokens` tokens each in pages of one codec."""

    codec: Codec
    shape: AttentionShape
    planes: Planes
    table: torch.Tensor
    """int32 [sequences, pages of one or more]; what is more is 0."""
    tokens: int

    @staticmethod
    def fill(codec: Codec, shape: AttentionShape, *, sequences: int, tokens: int, device: torch.device) -> "PagedCache":
        """A cache whose every page belongs to a sequence; ValueError for sizes that the codec does not take."""
        each = -(-tokens // PAGE_TOKENS)
        pages = sequences * each
        source = torch.Generator(device).manual_seed(0)
        table = torch.zeros(sequences, -(-each // TABLE_PAGES) * TABLE_PAGES, dtype=torch.int32, device=device)
        table[:, :each] = torch.randperm(pages, device=device, generator=source).view(sequences, each)
        planes = allocated(codec, shape, pages, device, side_tiles=2 * sequences + 1)
        cache = PagedCache(codec=codec, shape=shape, planes=planes, table=table, tokens=tokens)
        _repeat(planes, _appended(codec, shape, min(pages, APPENDED_PAGES[device.type]), device, source))
        if isinstance(codec, KVarN):
            cache._keep_aside(codec, source)
        return cache

    def slots(self, sequence: int, first: int, last: int) -> torch.Tensor:
        """int64: where the tokens `first` to `last` - 1 of a sequence lie."""
        token = torch.arange(first, last, device=self.table.device)
        page = self.table[sequence, token // PAGE_TOKENS].long()
        return page * PAGE_TOKENS + token % PAGE_TOKENS

    def _keep_aside(self, codec: KVarN, source: torch.Generator) -> None:
        """Every tile is quantised but for each sequence's first and its open one, which go to the sidecar."""
        size, side = codec.tile_tokens, self.planes.sidecar
        opened = self.tokens // size * size
        spans = [(0, min(size, self.tokens))] + ([(opened, self.tokens)] if size <= opened < self.tokens else [])
        for first, last in spans:
            tiles = self._tiles(first, size)
            if first == 0:
                codec.pin(self.planes, tiles)
            different = min(len(tiles), APPENDED_ROWS[self.planes.device.type] // size)
            rows = random_rows(different * (last - first), self.shape, self.planes.device, source)
            codec.write_aside(self.planes, tiles, *(part.unflatten(0, (different, -1)) for part in rows))
        side["side_of_tile"][side["side_of_tile"] == EMPTY] = QUANTISED

    def _tiles(self, token: int, size: int) -> list[int]:
        """Of each sequence, the tile of `size` tokens in which this token lies."""
        slots = self.table[:, token // PAGE_TOKENS].long() * PAGE_TOKENS + token % PAGE_TOKENS
        return [int(slot) // size for slot in slots.tolist()]

    def attend(self, query: torch.Tensor, sequence: int, kv_head: int, *, seen: int) -> torch.Tensor:
        """float64 [heads, head_dim]: attention of query [heads, head_dim] over the first `seen` tokens, dequantised."""
        wanted = query.double() * query.shape[-1] ** -0.5
        top = torch.full((query.shape[0], 1), float("-inf"), dtype=torch.float64, device=query.device)
        mass, total = torch.zeros_like(top), torch.zeros_like(wanted)
        for first in range(0, seen, READ_TOKENS):
            slots = self.slots(sequence, first, min(first + READ_TOKENS, seen))
            keys, values = self.codec.restore(self.planes, slots, checked=False)
            scores = wanted @ keys[:, kv_head].double().mT
            best = torch.maximum(top, scores.amax(dim=1, keepdim=True))
            weights, decay = (scores - best).exp(), (top - best).exp()
            mass = mass * decay + weights.sum(dim=1, keepdim=True)
            total = total * decay + weights @ values[:, kv_head].double()
            top = best
        return total / mass


def _appended(
    codec: Codec, shape: AttentionShape, pages: int, device: torch.device, source: torch.Generator
) -> Planes:  # fmt: skip
    """Planes of `pages` pages, every slot written."""
    planes = allocated(codec, shape, pages, device, side_tiles=2)
    set_scales = getattr(codec, "set_scales", None)
    if set_scales is not None:
        set_scales(planes, **LAYER_SCALES)
    together = APPENDED_ROWS[device.type]
    for first in range(0, planes.slots, together):
        slots = range(first, min(first + together, planes.slots))
        rows = random_rows(len(slots), shape, device, source)
        if isinstance(codec, KVarN):
            size = codec.tile_tokens
            tiles = range(first // size, slots.stop // size)
            codec.write_tiles(planes, tiles, *(part.unflatten(0, (-1, size)) for part in rows))
        else:
            codec.append(planes, torch.tensor(slots), *rows)
    return planes


def _repeat(planes: Planes, appended: Planes) -> None:
    """Fill `planes` with the pages of `appended`, again and again."""
    for name, tensor in planes.tensors.items():
        target, pages = tensor.view(planes.pages, -1), appended.tensors[name].view(appended.pages, -1)
        for first in range(0, planes.pages, appended.pages):
            part = target[first : first + appended.pages]
            part.copy_(pages[: part.shape[0]])
    for name in ("key_scale", "value_scale"):  # of the layer
        if name in planes.sidecar:
            planes.sidecar[name].copy_(appended.sidecar[name])
