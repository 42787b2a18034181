"""Blocks of the cache: how many are in use, and how many tokens fit into so many."""

from collections.abc import Callable

from msgspec import Struct

UNLIMITED = 2**40
"""More tokens than any sequence has: the room in blocks that never fill up (a sliding window)."""

Key = tuple[str | int, int]
"""A cached piece of prompt: its id and the token that it ends with."""


class PagedPool(Struct, frozen=True, kw_only=True):
    """Equal blocks; every sequence holds `sequence_blocks` beside those of its tokens."""

    blocks: int
    block_tokens: int
    sequence_blocks: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence with so many cached tokens."""
        return self.sequence_blocks - (-tokens // self.block_tokens)


class Ledger:
    """Who holds what. A block is in use, idle (nobody's, but a prefix is still in it) or empty."""

    __slots__ = ("_rooms", "blocks_for", "idle", "idle_blocks", "in_use", "own_blocks", "total")

    def __init__(self, blocks: int, blocks_for: Callable[[int], int]) -> None:
        self.total = blocks
        self.blocks_for = blocks_for
        self.own_blocks = blocks_for(0)
        self.in_use = self.idle_blocks = 0
        self.idle: dict[Key, int] = {}
        """Idle prefixes and their blocks, least recently used first."""
        self._rooms: dict[int, int] = {}

    def take(self, blocks: int) -> bool:
        """Put so many more blocks to use, evicting idle prefixes where needed; False if they are not there."""
        in_use = self.in_use + blocks
        if in_use > self.total:
            return False
        self.in_use = in_use
        while in_use + self.idle_blocks > self.total:
            self.idle_blocks -= self.idle.pop(next(iter(self.idle)))
        return True

    def give(self, blocks: int) -> None:
        """Blocks that are empty from now on."""
        self.in_use -= blocks

    def rest(self, key: Key, blocks: int) -> None:
        """The blocks of a prefix whose last user has left."""
        self.in_use -= blocks
        self.idle_blocks += blocks
        self.idle[key] = blocks

    def wake(self, key: Key) -> None:
        """An idle prefix is in use again."""
        blocks = self.idle.pop(key)
        self.idle_blocks -= blocks
        self.in_use += blocks

    def room(self, blocks: int) -> int:
        """Most tokens that so many blocks hold."""
        room = self._rooms.get(blocks)
        if room is None:
            room = self._rooms[blocks] = self._search_room(blocks)
        return room

    def _search_room(self, blocks: int) -> int:
        if blocks < self.own_blocks:
            return 0
        blocks_for = self.blocks_for
        fits = self._rooms.get(blocks - 1, 0)
        reach = 16
        while blocks_for(fits + reach) <= blocks:
            fits += reach
            reach *= 2
            if fits > UNLIMITED:
                return fits
        beyond = fits + reach
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            if blocks_for(middle) <= blocks:
                fits = middle
            else:
                beyond = middle
        return fits

    def whole(self, tokens: int) -> tuple[int, int]:
        """The tokens from the start that fill whole blocks, at most `tokens`, and the number of those blocks."""
        blocks = self.blocks_for(tokens)
        if self.room(blocks) > tokens:
            tokens = self.room(blocks - 1)
            blocks = self.blocks_for(tokens)
        return tokens, blocks - self.own_blocks
