"""When decoding sequences need their next blocks, found without looking at every sequence in every step.

`ByHeap` keeps the step at which each sequence crosses the end of its blocks: for any pool and any speculation.
`ByModulus` is for equal blocks and one token a step. Then a sequence crosses once in `block_tokens` steps, always at
the same remainder, and counts by remainder say how many blocks any number of steps takes.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from twin.serving.blocks import NOT_RUNNING, BlockPool, Ledger, Live
from twin.serving.requests import Limits

MOST_REMAINDERS = 4096
_PROBES = (0, 1, 1000, 12_345, 2**20 - 1)


def growth(pool: BlockPool, ledger: Ledger, limits: Limits) -> "ByHeap | ByModulus":
    """The cheaper of the two that is exact: it takes blocks from the ledger for sequences that decode."""
    period = getattr(pool, "block_tokens", 0)
    if not 1 <= period <= MOST_REMAINDERS or limits.ratio != (1, 1) or limits.reserve_output:
        return ByHeap(ledger, limits)
    each = pool.blocks_for(1) - pool.blocks_for(0)
    if any(pool.blocks_for(tokens + period) - pool.blocks_for(tokens) != each for tokens in _PROBES):
        return ByHeap(ledger, limits)
    return ByModulus(ledger, limits, period, each)


class ByHeap:
    """Crossings in a heap; those of sequences that have left are dropped as they come up.

    A sequence takes blocks between `start` and `stop`: `grow` in the present step, `grow_ahead` in those that follow.
    """

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger = ledger
        self._q_tokens = limits.q_tokens
        self._gain, self._unit = limits.ratio
        self._crossings: list[tuple[int, int, Live]] = []

    def start(self, live: Live) -> None:
        """A sequence decodes from the step `live.start` on."""
        at = self._crossing(live)
        if at < live.end:
            heappush(self._crossings, (at, live.serial, live))

    def stop(self, live: Live, step: int) -> None:
        """It leaves before that step; `live.blocks` is what it holds. Its serial number has become invalid."""

    def grow(self, step: int, make_room: Callable[[Live], bool]) -> None:
        """Take the blocks of this step in the order of admission.

        Where there are none, `make_room(live)` preempts for that sequence and is False if it had to go itself.
        """
        crossings, ledger = self._crossings, self._ledger
        while crossings and crossings[0][0] <= step:
            _, serial, live = heappop(crossings)
            more = self._missing(live, step) if live.serial == serial else 0
            if not more:
                continue
            while not ledger.take(more):
                if not make_room(live):
                    break
            else:
                live.blocks += more
                self.start(live)

    def grow_ahead(self, step: int, steps: int) -> int:
        """Take the blocks of so many steps, of which `step` has its own; for how many of them there are blocks."""
        crossings, ledger = self._crossings, self._ledger
        last, present = step + steps, step
        taken: list[tuple[Live, int]] = []  # for the step `present`
        while crossings and crossings[0][0] < last:
            at, serial, live = crossings[0]
            more = self._missing(live, at) if live.serial == serial else 0
            if not more:
                heappop(crossings)
                continue
            if at > present:
                present = at
                taken.clear()
            if not ledger.take(more):
                self._give_back(taken, at)
                return at - step
            taken.append((live, more))
            live.blocks += more
            later = self._crossing(live)
            if later < live.end:
                heapreplace(crossings, (later, serial, live))
            else:
                heappop(crossings)
        return steps

    def _give_back(self, taken: list[tuple[Live, int]], at: int) -> None:
        """A step that has not begun holds no blocks yet. What was remembered beyond it is dropped when it comes up."""
        for live, blocks in taken:
            self._ledger.give(blocks)
            live.blocks -= blocks
            heappush(self._crossings, (at, live.serial, live))

    def _missing(self, live: Live, step: int) -> int:
        gained = (step - live.start) * self._gain // self._unit
        return self._ledger.blocks_for(live.computed + gained + self._q_tokens) - live.blocks

    def _crossing(self, live: Live) -> int:
        """The first step that needs more blocks than it has."""
        beyond = self._ledger.room(live.blocks) - live.computed - self._q_tokens + 1
        return live.start - (-beyond * self._unit // self._gain) if beyond > 0 else live.start


class ByModulus:
    """Crossings counted by the remainder of their step; who lacks blocks from the start is `fresh` for one step."""

    def __init__(self, ledger: Ledger, limits: Limits, period: int, each: int) -> None:
        self._ledger, self._q_tokens = ledger, limits.q_tokens
        self._period, self._each = period, each
        self._counts = [0] * period
        self._members: list[dict[Live, None]] = [{} for _ in range(period)]
        self._fresh: dict[Live, None] = {}
        self._all = 0

    def start(self, live: Live) -> None:
        """As of `ByHeap`: find its remainder."""
        spare = self._ledger.room(live.blocks) - live.computed - self._q_tokens + 1
        if spare <= 0:
            self._fresh[live] = None
            return
        live.remainder = (live.start + spare) % self._period
        self._members[live.remainder][live] = None
        self._counts[live.remainder] += 1
        self._all += 1

    def stop(self, live: Live, step: int) -> None:
        """As of `ByHeap`: forget its remainder, and work out the blocks of its last step."""
        if live in self._fresh:
            del self._fresh[live]
            return
        del self._members[live.remainder][live]
        self._counts[live.remainder] -= 1
        self._all -= 1
        if step > live.start:
            last = live.computed + step - 1 - live.start + self._q_tokens
            live.blocks = max(live.blocks, self._ledger.blocks_for(last))

    def grow(self, step: int, make_room: Callable[[Live], bool]) -> None:
        """As of `ByHeap`: all at once where there are blocks enough, otherwise one after the other."""
        ledger, members = self._ledger, self._members[step % self._period]
        if not members and not self._fresh:
            return
        blocks_for, q_tokens = ledger.blocks_for, self._q_tokens
        lacking = {live: blocks_for(live.computed + q_tokens) - live.blocks for live in self._fresh}
        if ledger.take(sum(lacking.values()) + self._each * len(members)):
            for live, more in lacking.items():
                self._grant(live, more)
            return
        lacking.update(dict.fromkeys(members, self._each))
        for live in sorted(lacking, key=lambda live: live.serial):
            if live.serial == NOT_RUNNING:
                continue
            while not ledger.take(lacking[live]):
                if not make_room(live):
                    break
            else:
                if live in self._fresh:
                    self._grant(live, lacking[live])

    def grow_ahead(self, step: int, steps: int) -> int:
        """As of `ByHeap`: crossings in whole periods and in what is left of one."""
        ledger, period = self._ledger, self._period
        whole, left = divmod(steps - 1, period)
        first = (step + 1) % period
        crossings = whole * self._all + self._between(first, left)
        if ledger.take(crossings * self._each):
            return steps
        possible = (ledger.total - ledger.in_use) // self._each
        whole, possible = divmod(possible, self._all)
        done, taken = whole * period, whole * self._all
        while self._counts[(first + done) % period] <= possible:
            possible -= self._counts[(first + done) % period]
            taken += self._counts[(first + done) % period]
            done += 1
        ledger.take(taken * self._each)
        return done + 1

    def _between(self, first: int, steps: int) -> int:
        """Crossings in so many steps, less than a period, from a remainder on."""
        end = first + steps
        if end <= self._period:
            return sum(self._counts[first:end])
        return sum(self._counts[first:]) + sum(self._counts[: end - self._period])

    def _grant(self, live: Live, more: int) -> None:
        """A fresh sequence has the blocks of its first step."""
        live.blocks += more
        del self._fresh[live]
        self.start(live)
