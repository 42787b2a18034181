"""Blocks of the cache: how many tokens they hold, which prefixes lie in them, and what each request holds.

The id of a prefix stands for its piece of the prompt and for all before it, as the hash ids of Mooncake's traces do: a
prompt's hit is its longest run of cached pieces. A piece counts the blocks that it completes; one without is never
cached.
"""

from bisect import bisect_right
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from msgspec import Struct

from twin.serving.metrics import RequestRecord
from twin.serving.requests import Limits, Request

UNLIMITED = 2**40  # more tokens than any sequence has: the room in blocks that never fill up (a sliding window)

NEVER = -1.0
NOT_RUNNING = NOT_DECODING = -1

Key = tuple[str | int, int]  # a cached piece of prompt: its id and the token that it ends with


class BlockPool(Protocol):
    """Where cached tokens live."""

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a sequence with so many cached tokens: monotone; those for 0 tokens it shares with nobody."""
        ...


class Ledger:
    """Who holds what. A block is in use, idle (nobody's, but a prefix is still in it) or empty."""

    __slots__ = ("_rooms", "blocks_for", "idle", "idle_blocks", "in_use", "own_blocks", "total")

    def __init__(self, blocks: int, blocks_for: Callable[[int], int]) -> None:
        self.total = blocks
        self.blocks_for = blocks_for
        self.own_blocks = blocks_for(0)
        self.in_use = self.idle_blocks = 0
        self.idle: dict[Key, int] = {}  # idle prefixes and their blocks, least recently used first
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
        if blocks not in self._rooms:
            self._rooms[blocks] = self._search_room(blocks)
        return self._rooms[blocks]

    def _search_room(self, blocks: int) -> int:
        if blocks < self.own_blocks:
            return 0
        blocks_for = self.blocks_for
        fits, reach = self._rooms.get(blocks - 1, 0), 16
        while blocks_for(fits + reach) <= blocks:
            fits += reach
            reach *= 2
            if fits > UNLIMITED:
                return fits
        beyond = fits + reach
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if blocks_for(middle) <= blocks else (fits, middle)
        return fits

    def whole(self, tokens: int) -> tuple[int, int]:
        """The tokens from the start that fill whole blocks, at most `tokens`, and the number of those blocks."""
        blocks = self.blocks_for(tokens)
        if self.room(blocks) > tokens:
            tokens = self.room(blocks - 1)
            blocks = self.blocks_for(tokens)
        return tokens, blocks - self.own_blocks


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
    """The prefix cache: pieces in use and their users; idle ones stay in the ledger until it needs their blocks."""

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


class Live(Struct, eq=False):
    """What the scheduler knows of a request between its arrival and its last token. Compared by identity."""

    request: Request
    serial: int = NOT_RUNNING  # rises from admission to admission: who has the highest is preempted first
    target: int = 0  # tokens to compute before the next token can be sampled: at first those of the prompt
    computed: int = 0  # tokens computed by prefill so far; those of decode steps follow from `start`
    outputs: int = 0  # tokens brought forth before the decode step `start`
    start: int = NOT_DECODING  # the engine's count of steps at its first decode step
    end: int = NOT_DECODING  # the same after its last
    blocks: int = 0  # blocks held
    shared_blocks: int = 0  # those of them that belong to a prefix
    pieces: tuple[Piece, ...] | None = None
    held: int = 0  # how many of `pieces` it holds
    admitted_s: float = NEVER
    first_s: float = NEVER
    last_s: float = NEVER
    cached_tokens: int = 0
    preemptions: int = 0
    crossing: int = 0

    def __post_init__(self) -> None:
        self.target = self.request.prompt_tokens

    def record(self, now_s: float) -> RequestRecord:
        """What is left of it after its last token at `now_s`."""
        request = self.request
        arrival_s, output = request.arrival_s, request.output_tokens
        return RequestRecord(
            id=request.id,
            arrival_s=arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=output,
            cached_tokens=self.cached_tokens,
            queue_s=max(0.0, self.admitted_s - arrival_s),
            ttft_s=self.first_s - arrival_s,
            tpot_s=(now_s - self.first_s) / (output - 1) if output > 1 else None,
            e2e_s=now_s - arrival_s,
            preemptions=self.preemptions,
        )


class Growth:
    """Takes blocks from the ledger for sequences that decode, as they cross the end of those that they have."""

    __slots__ = ("_decoding", "_gain", "_ledger", "_next", "_q_tokens", "_unit")

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._q_tokens = ledger, limits.q_tokens
        self._gain, self._unit = limits.ratio
        self._decoding: dict[Live, None] = {}
        self._next: float = inf  # a step before which no sequence crosses

    def start(self, live: Live) -> None:
        """A sequence decodes from the step `live.start` on."""
        self._decoding[live] = None
        self._aim(live)

    def stop(self, live: Live) -> None:
        """It leaves."""
        del self._decoding[live]

    def grow(self, step: int, make_room: Callable[[Live], bool]) -> None:
        """Take this step's blocks by admission; `make_room(live)` preempts for one, and is False if that one went."""
        if step < self._next:
            return
        crossing = [live for live in self._decoding if live.crossing <= step]
        for live in sorted(crossing, key=lambda live: live.serial):
            if live.serial == NOT_RUNNING:  # preempted for one before it
                continue
            more = self._missing(live, step)
            while not self._ledger.take(more):
                if not make_room(live):
                    break
            else:
                live.blocks += more
                self._aim(live)
        self._next = min((live.crossing for live in self._decoding), default=inf)

    def grow_ahead(self, step: int, steps: int) -> int:
        """Take the blocks of so many steps, of which `step` has its own; for how many of them there are blocks."""
        if step + steps <= self._next:
            return steps
        free = self._ledger.total - self._ledger.in_use
        if self._needed(step + steps - 1) > free:
            steps = bisect_right(range(1, steps + 1), free, key=lambda count: self._needed(step + count - 1))
        last = step + steps - 1
        self._ledger.take(self._needed(last))
        for live in self._decoding:
            if live.crossing <= last:
                live.blocks += self._missing(live, last)
                self._aim(live)
        self._next = min(live.crossing for live in self._decoding)
        return steps

    def _needed(self, step: int) -> int:
        """Blocks that all sequences lack for the steps up to that one."""
        return sum(self._missing(live, step) for live in self._decoding if live.crossing <= step)

    def _missing(self, live: Live, step: int) -> int:
        gained = (step - live.start) * self._gain // self._unit
        return self._ledger.blocks_for(live.computed + gained + self._q_tokens) - live.blocks

    def _aim(self, live: Live) -> None:
        """Find the first step that needs more blocks than it has."""
        beyond = self._ledger.room(live.blocks) - live.computed - self._q_tokens + 1
        live.crossing = live.start + max(0, -(-beyond * self._unit // self._gain))
        self._next = min(self._next, live.crossing)
