"""How the thread blocks of an attention kernel fill a device: split-KV decode kernels, and flash attention in prefill.

The rules are mirrored: `even_splits` of this project's decode kernels (`realkernels/kernels/split_kv.py`), and
FlashAttention-2's as torch carries it (`num_splits_heuristic` in its `flash_api`). A test holds the first two equal.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

ACCUMULATOR_BYTES = 4  # bytes of an element of partial outputs and running sums (fp32)

# Split-KV decode kernels: a thread block holds some query rows and reads a run of tiles of one KV head

MAX_SPLITS = 256
PROLOGUE_TILES = 3  # tiles' time that the rule allows most thread blocks for their beginning and end
BEGUN_TILES = 2  # tiles' time that a thread block takes before its first and after its last one, as measured
STATISTICS = 2  # numbers beside a row of partial results: its maximum and its sum

FULL_HEAD = 256
LEAST_TILE, MOST_TILE = 16, 128


class ThreadBlock(NamedTuple):
    """What one thread block of a decode kernel works on."""

    tile: int  # tokens, at 256 elements a head; of a format that is stored in tiles its own count
    set_rows: int  # query rows of a set
    sets: int
    per_multiprocessor: int  # thread blocks that fit a multiprocessor
    prologue: int = PROLOGUE_TILES

    @property
    def q_rows(self) -> int:
        """Query rows that it multiplies, padding included."""
        return self.set_rows * self.sets

    def tile_tokens(self, head_dim: int) -> int:
        """Tokens of a tile with the bytes of its own at 256 elements a head."""
        return max(LEAST_TILE, min(self.tile * FULL_HEAD // head_dim, MOST_TILE))


class DecodePlan(Struct, frozen=True, kw_only=True):
    """Which thread block a decode kernel takes for how many query rows (query heads of a KV head x query tokens)."""

    thread_blocks: tuple[ThreadBlock, ...]
    """By their query rows, fewest first. More rows than the last holds take equal ones that dequantise a tile each."""
    alone: ThreadBlock | None = None  # in place of the others where a single one holds all rows
    other_splits: int = 0  # splits of a sequence that read no run of tiles

    def thread_blocks_of(self, q_rows: int) -> tuple[int, ThreadBlock]:
        """(thread blocks that share `q_rows` query rows, what each of them works on)."""
        if self.alone is not None and q_rows <= self.alone.q_rows:
            return 1, self.alone
        count = -(-q_rows // self.thread_blocks[-1].q_rows)
        return count, next(block for block in self.thread_blocks if block.q_rows * count >= q_rows)


class Occupancy(NamedTuple):
    """What a split-KV kernel makes of a device."""

    splits: int  # parts of a sequence, those that read no tiles included
    elements: float  # elements that pass while the busiest place of the device works, times all places
    combined_bytes: float  # partial results, written and read again


class SplitKV(Struct, frozen=True, kw_only=True, gc=False):
    """One call of a decode kernel, whatever device it runs on."""

    pairs: int  # sequences x KV heads x thread blocks that share their query rows
    tiles: int  # of a sequence
    tile_elements: int  # elements of K and V of a KV head in a tile
    q_rows: int  # query rows that a thread block multiplies
    per_multiprocessor: int
    partial_bytes: int  # partial results of one split of all sequences
    other_splits: int = 0
    prologue: int = PROLOGUE_TILES

    def on(self, multiprocessors: int) -> Occupancy:
        """Rounds of thread blocks, each of which begins anew and lasts as long as its longest run of tiles."""
        slots = multiprocessors * self.per_multiprocessor
        splits = even_splits(
            pairs=self.pairs, tiles=self.tiles, slots=slots, extra=self.other_splits, prologue=self.prologue
        )
        rounds = -(-self.pairs * splits // slots)
        longest = -(-self.tiles // (splits - self.other_splits))
        elements = float(rounds * slots * (longest + BEGUN_TILES) * self.tile_elements)
        return Occupancy(splits=splits, elements=elements, combined_bytes=2.0 * splits * self.partial_bytes)


@lru_cache(maxsize=4096)
def even_splits(*, pairs: int, tiles: int, slots: int, extra: int = 0, prologue: int = PROLOGUE_TILES) -> int:
    """Splits of each of `pairs` with which `slots` thread blocks at a time end soonest, the fewest of equals."""

    def rounds(splits: int) -> int:
        return -(-pairs * (splits + extra) // slots) * (-(-tiles // splits) + prologue)

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=rounds) + extra


# Flash attention: a thread block holds query rows of one head and walks over all keys; few of them are split over keys

FLASH_ROWS, FLASH_ROWS_WIDE, WIDE_HEAD = 128, 64, 128
"""Query rows of a thread block, and those of one whose heads are wider than WIDE_HEAD elements."""

FLASH_TILE, FLASH_TILE_WIDE = 128, 64  # keys of a tile, likewise
RESIDENT = 2  # thread blocks of a multiprocessor that the rule counts on: they fit 192 KiB of shared memory
NEARLY_FULL = 0.8  # thread blocks that take this share of a device's places are not split
GOOD_ENOUGH = 0.85  # of the best fill: the fewest splits that reach it are taken

MAX_FLASH_SPLITS = 128


class Waves(NamedTuple):
    """What flash attention makes of a device."""

    splits: int
    full: int  # waves in which a multiprocessor holds RESIDENT thread blocks: the longest one counts
    alone: int  # 1 where a last wave has a multiprocessor for each of its thread blocks, which then run faster
    thread_blocks: int  # of all splits
    combined_bytes: float  # partial results, written and read again


class FlashGrid(NamedTuple):
    """Thread blocks of one call, all of one length."""

    thread_blocks: int
    tiles: int = 1  # of keys, that each walks through and may be split by
    partial_bytes: int = 0  # partial results of one split of all thread blocks

    def on(self, multiprocessors: int) -> Waves:
        """Waves of thread blocks on a device of so many multiprocessors."""
        splits = flash_splits(thread_blocks=self.thread_blocks, tiles=self.tiles, places=RESIDENT * multiprocessors)
        thread_blocks = self.thread_blocks * splits
        full, rest = divmod(thread_blocks, RESIDENT * multiprocessors)
        return Waves(
            splits=splits,
            full=full + (rest > multiprocessors),
            alone=int(0 < rest <= multiprocessors),
            thread_blocks=thread_blocks,
            combined_bytes=2.0 * splits * self.partial_bytes if splits > 1 else 0.0,
        )


def flash_grid(*, query_heads: int, head_dim: int, q_tokens: int, kv_tokens: int) -> FlashGrid:
    """Thread blocks of flash attention for a sequence's `q_tokens` over `kv_tokens` keys."""
    wide = head_dim > WIDE_HEAD
    return FlashGrid(
        thread_blocks=-(-q_tokens // (FLASH_ROWS_WIDE if wide else FLASH_ROWS)) * query_heads,
        tiles=-(-kv_tokens // (FLASH_TILE_WIDE if wide else FLASH_TILE)),
        partial_bytes=q_tokens * query_heads * (head_dim + 1) * ACCUMULATOR_BYTES,
    )


@lru_cache(maxsize=4096)
def flash_splits(*, thread_blocks: int, tiles: int, places: int) -> int:
    """The fewest splits into runs of tiles that fill waves of `places` nearly as well as any number."""
    if thread_blocks >= NEARLY_FULL * places:
        return 1

    def longest(splits: int) -> int:
        return -(-tiles // splits)

    fills = {
        splits: thread_blocks * splits / places / math.ceil(thread_blocks * splits / places)
        for splits in range(1, min(MAX_FLASH_SPLITS, places, tiles) + 1)
        if splits == 1 or longest(splits) != longest(splits - 1)
    }
    best = max(fills.values())
    return min(splits for splits, fill in fills.items() if fill >= GOOD_ENOUGH * best)
