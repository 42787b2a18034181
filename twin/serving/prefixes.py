"""The prefix cache: which pieces of prompts lie in which blocks, shared by id, and who holds them.

An id stands for its piece and for all before it (as the hash ids of Mooncake's traces do), so that a prompt's hit is
its longest run of cached pieces. A piece counts the blocks that it completes; one that completes none is never cached.
"""

from typing import NamedTuple

from twin.serving.pool import Key, Ledger
from twin.serving.requests import Request


class Piece(NamedTuple):
    """Part of a prompt that others may share: the tokens up to `end`, in blocks that it completes."""

    key: Key
    end: int
    blocks: int


class Hit(NamedTuple):
    """Pieces of a prompt that are cached: tokens to skip, all their blocks, and those that are idle so far."""

    pieces: int
    tokens: int
    blocks: int
    idle_blocks: int


MISS = Hit(0, 0, 0, 0)


class Prefixes:
    """Pieces in use and their users; idle ones lie in the ledger until it needs their blocks."""

    __slots__ = ("_ledger", "_users")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._users: dict[Key, int] = {}

    def pieces(self, request: Request) -> tuple[Piece, ...]:
        """What of a request's prompt can be shared, piece by piece."""
        found = []
        span = request.prefix_span or request.prefix_tokens
        end = before = 0
        for name in request.prefix_ids:
            if end == request.prefix_tokens:
                break
            end = min(end + span, request.prefix_tokens)
            tokens, blocks = self._ledger.whole(end)
            if blocks > before:
                found.append(Piece((name, end), tokens, blocks - before))
                before = blocks
        return tuple(found)

    def look_up(self, pieces: tuple[Piece, ...], target: int) -> Hit:
        """The longest run of cached pieces. Of `target` tokens at least the last is computed, in a block of its own."""
        users, idle = self._users, self._ledger.idle
        count = tokens = blocks = idle_blocks = 0
        for piece in pieces:
            if piece.key in idle:
                idle_blocks += piece.blocks
            elif piece.key not in users:
                break
            count += 1
            tokens = piece.end
            blocks += piece.blocks
        if tokens >= target:
            tokens = self._ledger.whole(target - 1)[0]
        return Hit(count, tokens, blocks, idle_blocks)

    def hold(self, pieces: tuple[Piece, ...]) -> None:
        """One more user of cached pieces."""
        users = self._users
        for piece in pieces:
            if piece.key in users:
                users[piece.key] += 1
            else:
                self._ledger.wake(piece.key)
                users[piece.key] = 1

    def offer(self, piece: Piece) -> bool:
        """A piece that was just computed, held by who computed it; False if it is cached already."""
        if piece.key in self._users or piece.key in self._ledger.idle:
            return False
        self._users[piece.key] = 1
        return True

    def release(self, pieces: tuple[Piece, ...]) -> None:
        """A user leaves; what nobody uses any more becomes idle, the end of the prompt to be evicted first."""
        users = self._users
        for piece in reversed(pieces):
            users[piece.key] -= 1
            if not users[piece.key]:
                del users[piece.key]
                self._ledger.rest(piece.key, piece.blocks)
