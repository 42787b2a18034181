"""How the programs of flash attention fill a device: wave by wave, and divided over keys where they are too few.

The rule of division is FlashAttention-2's, as torch carries it (`num_splits_heuristic` in its `flash_api`).
"""

import math
from functools import lru_cache
from typing import NamedTuple

RESIDENT = 2
"""Programs of a multiprocessor that the rule counts on; they fit where its shared memory is 192 KiB or more."""

NEARLY_FULL = 0.8
"""Programs that take this share of a device's places are not divided."""

GOOD_ENOUGH = 0.85
"""Of the best fill: the fewest splits that reach it are taken."""

MAX_SPLITS = 128


class Waves(NamedTuple):
    """A grid on a device."""

    splits: int
    full: int
    """Waves in which a multiprocessor holds RESIDENT programs: the longest one counts."""
    alone: int
    """1 where a last wave has a multiprocessor for each of its programs, which then run faster."""
    programs: int
    """Of all splits."""
    merged_bytes: float
    """Partial results, written and read again."""


class Grid(NamedTuple):
    """Programs of one call, all of one length."""

    programs: int
    tiles: int = 1
    """Of keys, that each walks through and may be divided by."""
    partial_bytes: int = 0
    """Partial results of one split of all programs."""

    def on(self, multiprocessors: int) -> Waves:
        """What becomes of it on a device of so many multiprocessors."""
        splits = flash_splits(programs=self.programs, tiles=self.tiles, places=RESIDENT * multiprocessors)
        programs = self.programs * splits
        full, rest = divmod(programs, RESIDENT * multiprocessors)
        alone = 0 < rest <= multiprocessors
        return Waves(
            splits=splits,
            full=full + (rest > multiprocessors),
            alone=int(alone),
            programs=programs,
            merged_bytes=2.0 * splits * self.partial_bytes if splits > 1 else 0.0,
        )


@lru_cache(maxsize=4096)
def flash_splits(*, programs: int, tiles: int, places: int) -> int:
    """Splits of each of `programs` into runs of tiles: the fewest that fill waves of `places` nearly as well as any.

    A number that leaves the longest run as long as one split fewer would is passed over.
    """
    if programs >= NEARLY_FULL * places:
        return 1

    def longest(splits: int) -> int:
        return -(-tiles // splits)

    most = min(MAX_SPLITS, places, tiles)
    fills = {
        splits: programs * splits / places / math.ceil(programs * splits / places)
        for splits in range(1, most + 1)
        if splits == 1 or longest(splits) != longest(splits - 1)
    }
    best = max(fills.values())
    return min(splits for splits, fill in fills.items() if fill >= GOOD_ENOUGH * best)
