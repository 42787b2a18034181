"""How a decode attention is cut into programs, and what a device of so many multiprocessors makes of the cut.

The rule is that of this project's kernels (`even_splits` in `realkernels/kernels/split_kv.py`), mirrored.
"""

from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

MAX_SPLITS = 256
PROLOGUE_TILES = 3
"""Tiles that the rule allows most programs for their beginning and end."""

BEGUN_TILES = 2
"""Tiles' time that a program really takes before its first tile and after its last one: as measured."""

STATISTICS = 2
"""Numbers beside a row of partial results: its maximum and its sum."""

FULL_HEAD = 256
LEAST_TILE, MOST_TILE = 16, 128


class Program(NamedTuple):
    """What one program of a kernel works on."""

    tile: int
    """Tokens, at 256 elements a head; of a format that is stored in tiles its own count."""
    rows: int
    """Query rows of a set."""
    sets: int
    per_multiprocessor: int
    """Programs that fit a multiprocessor."""
    prologue: int = PROLOGUE_TILES

    @property
    def held(self) -> int:
        """Query rows that it multiplies, padding included."""
        return self.rows * self.sets


class Plan(Struct, frozen=True, kw_only=True):
    """Which program a kernel takes for how many query rows (query heads of a KV head x query tokens)."""

    programs: tuple[Program, ...]
    """By rows held, fewest first. More rows than the last holds take equal ones that read and decode a tile each."""
    alone: Program | None = None
    """In place of the others where a single one holds all rows."""
    other_splits: int = 0
    """Splits of a sequence that read no run of tiles."""

    def programs_of(self, rows: int) -> tuple[int, Program]:
        """(blocks that `rows` query rows are cut into, the program of each)."""
        if self.alone is not None and rows <= self.alone.held:
            return 1, self.alone
        blocks = -(-rows // self.programs[-1].held)
        return blocks, next(program for program in self.programs if program.held * blocks >= rows)


def tile_tokens(program: Program, *, head_dim: int) -> int:
    """Tokens of a tile with the bytes of the program's at 256 elements a head."""
    return max(LEAST_TILE, min(program.tile * FULL_HEAD // head_dim, MOST_TILE))


class Share(NamedTuple):
    """A cut on a device."""

    splits: int
    """Parts of a sequence, those that read no tiles included."""
    elements: float
    """Stored elements that pass through programs while the busiest place of the device works, times all places."""
    merged_bytes: float
    """Partial results, written and read again."""


class Cut(Struct, frozen=True, kw_only=True, gc=False):
    """One call, whatever device it runs on."""

    pairs: int
    """Sequences x KV heads x blocks of query rows."""
    tiles: int
    """Of a sequence."""
    tile_elements: int
    """Elements of K and V of a KV head in a tile."""
    rows: int
    """Query rows that a program multiplies."""
    per_multiprocessor: int
    partial_bytes: int
    """Partial results of one split of all sequences."""
    other_splits: int = 0
    prologue: int = PROLOGUE_TILES

    def on(self, multiprocessors: int) -> Share:
        """What becomes of it: rounds of programs, each of which begins anew and lasts as long as its longest."""
        slots = multiprocessors * self.per_multiprocessor
        splits = even_splits(
            pairs=self.pairs, tiles=self.tiles, slots=slots, extra=self.other_splits, prologue=self.prologue
        )
        rounds = -(-self.pairs * splits // slots)
        longest = -(-self.tiles // (splits - self.other_splits))
        return Share(
            splits=splits,
            elements=float(rounds * slots * (longest + BEGUN_TILES) * self.tile_elements),
            merged_bytes=2.0 * splits * self.partial_bytes,
        )


@lru_cache(maxsize=4096)
def even_splits(*, pairs: int, tiles: int, slots: int, extra: int = 0, prologue: int = PROLOGUE_TILES) -> int:
    """Splits of each of `pairs` with which `slots` programs at a time end soonest, the fewest of equals."""

    def rounds(splits: int) -> int:
        return -(-pairs * (splits + extra) // slots) * (-(-tiles // splits) + prologue)

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=rounds) + extra
