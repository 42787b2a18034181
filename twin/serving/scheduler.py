"""Who runs in the next step and in which blocks: vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py), in bulk.

Two facts make it cheap. Only the sequence admitted last can be in the middle of its prefill, because it took all that
was left of the budget. And all others decode in every step, so that the step in which each ends, and those in which it
crosses the end of its blocks (`growth.py`), are known beforehand.

Contexts are summed in units of 1 / `limits.ratio[1]` token, so that sums stay whole under speculation.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from twin.serving.arrivals import Arrivals
from twin.serving.growth import growth
from twin.serving.limits import Limits
from twin.serving.live import NOT_DECODING, NOT_RUNNING, Live
from twin.serving.metrics import Metrics
from twin.serving.pool import Ledger
from twin.serving.prefixes import MISS, Hit, Prefixes
from twin.serving.protocols import BlockPool
from twin.serving.requests import Request

Chunk = tuple[int, int]
"""Past tokens and new rows of a prefill."""


class Scheduler:
    """The running sequences, in the order of their admission, and the blocks they hold."""

    def __init__(self, requests: Iterable[Request], pool: BlockPool, limits: Limits, metrics: Metrics) -> None:
        self.ledger = Ledger(pool.blocks, pool.blocks_for)
        self.arrivals = Arrivals(requests, self.ledger, limits, metrics)
        self.running: dict[Live, None] = {}
        self.step = 0
        """Engine steps so far; each one advances every decoding sequence."""
        self.decoding = 0
        self.ctx_units = 0
        """Cached tokens of all decoding sequences, in units."""
        self.gain, self.unit = limits.ratio
        self._limits, self._metrics = limits, metrics
        self._query = limits.query_tokens
        self._most_running = limits.most_running
        self._prefixes = Prefixes(self.ledger)
        self._partial: Live | None = None
        self._serial = 0
        self._growth = growth(pool, self.ledger, limits)
        self._now_s = 0.0
        self._ends: list[tuple[int, int, Live]] = []

    def grow(self, now_s: float) -> None:
        """Blocks for the decodes of the present step; where there are none, who was admitted last is preempted."""
        self._now_s = now_s
        self._growth.grow(self.step, self._make_room)

    def grow_ahead(self, steps: int) -> int:
        """Blocks for the decodes of so many steps from the present one on; how many of them there are blocks for."""
        return self._growth.grow_ahead(self.step, steps)

    def fill(self, now_s: float, *, admit: bool) -> tuple[list[Chunk], list[Live]]:
        """Prefill chunks beside the decodes of this step, and the sequences whose prefill they complete.

        `admit=False` where somebody was preempted for this step: then nobody new comes in.
        """
        budget = self._limits.batched_tokens - self.decoding * self._query
        chunks: list[Chunk] = []
        complete: list[Live] = []
        live = self._partial
        if live is not None:
            past, rows = live.computed, min(live.target - live.computed, budget)
            if self._extend(live, past + rows):
                chunks.append((past, rows))
                budget -= rows
                self._computed(live, past + rows, complete)
            else:
                self._preempt(live, now_s)
                admit = False
        while admit and budget > 0 and len(self.running) < self._most_running:
            live = self.arrivals.head(now_s)
            chunk = None if live is None else self._admit(live, budget)
            if live is None or chunk is None:
                break
            self.arrivals.pop()
            if live.admitted_s < 0:
                live.admitted_s, live.cached_tokens = now_s, chunk[0]
            chunks.append(chunk)
            budget -= chunk[1]
            self._computed(live, sum(chunk), complete)
        return chunks, complete

    def begin(self, live: Live) -> None:
        """A sequence whose prefill has brought forth a token decodes from the present step on."""
        gain, unit = self.gain, self.unit
        live.start = self.step
        live.end = self.step - (live.outputs - live.request.output_tokens) * unit // gain
        heappush(self._ends, (live.end, live.serial, live))
        self.decoding += 1
        self.ctx_units += live.computed * unit
        self._growth.start(live)

    def advance(self, steps: int) -> list[Live]:
        """So many steps are done; the sequences that have all their tokens with the last of them, who leave."""
        self.step += steps
        self.ctx_units += self.decoding * self.gain * steps
        ends = self._ends
        done = []
        while ends and ends[0][0] <= self.step:
            _, serial, live = heappop(ends)
            if live.serial == serial:
                done.append(live)
                self.leave(live)
        return done

    def steps_to_end(self) -> int:
        """Steps until the next decoding sequence has all its tokens."""
        ends = self._ends
        while ends[0][2].serial != ends[0][1]:
            heappop(ends)
        return ends[0][0] - self.step

    def awaited_s(self, now_s: float) -> float:
        """Arrival of the next request that might be admitted before one ends; infinite where none might."""
        if len(self.running) >= self._most_running or self.arrivals.head(now_s) is not None:
            return float("inf")
        return self.arrivals.next_s

    def unsettled(self, now_s: float) -> bool:
        """Whether who waits now might be let in after an eviction: with less of its prefix, its first chunk is shorter.

        Otherwise who does not fit fits no better before somebody leaves.
        """
        if self._limits.reserve_prompt or not self.ledger.idle_blocks:
            return False
        head = self.arrivals.head(now_s)
        return head is not None and bool(head.pieces)

    def leave(self, live: Live) -> int:
        """A sequence gives up its place and its blocks; the tokens that were cached in them."""
        cached = live.computed
        if live.start != NOT_DECODING:
            gained = (self.step - live.start) * self.gain
            cached += gained // self.unit
            self.ctx_units -= live.computed * self.unit + gained
            self.decoding -= 1
            self._growth.stop(live, self.step)
        elif live is self._partial:
            self._partial = None
        del self.running[live]
        live.serial = NOT_RUNNING
        self.ledger.give(live.blocks - live.shared_blocks)
        if live.pieces:
            self._prefixes.release(live.pieces[: live.held])
        return cached

    def _make_room(self, live: Live) -> bool:
        """Preempt who was admitted last, for `live`; False if that is `live`."""
        victim = next(reversed(self.running))
        self._preempt(victim, self._now_s)
        return victim is not live

    def _preempt(self, live: Live, now_s: float) -> None:
        """Back to the head of the queue; prompt and output so far are to be computed again."""
        cached = self.leave(live)
        if live.start != NOT_DECODING:
            live.outputs += (self.step - live.start) * self.gain // self.unit
            live.last_s = now_s
        live.target = live.request.prompt_tokens + live.outputs
        live.start = NOT_DECODING
        live.computed = live.blocks = live.shared_blocks = live.held = 0
        live.preemptions += 1
        self._metrics.preemptions += 1
        self._metrics.recomputed_tokens += cached
        self.arrivals.put_back(live)

    def _admit(self, live: Live, budget: int) -> Chunk | None:
        """The first chunk of a waiting request, or None where it has to wait on."""
        limits, ledger, request = self._limits, self.ledger, live.request
        hit = self._hit(live)
        rows = min(live.target - hit.tokens, budget)
        blocks = ledger.blocks_for(hit.tokens + rows)
        if limits.reserve_output:
            blocks = ledger.blocks_for(limits.last_slot(request.prompt_tokens, request.output_tokens))
        blocks = max(blocks, hit.blocks)
        fitting = max(blocks, ledger.blocks_for(live.target)) if limits.reserve_prompt else blocks
        if ledger.in_use + hit.idle_blocks + fitting - hit.blocks > ledger.total:
            return None
        if live.pieces:
            self._prefixes.hold(live.pieces[: hit.pieces])
        ledger.take(blocks - hit.blocks)
        live.blocks, live.shared_blocks, live.held = blocks, hit.blocks, hit.pieces
        live.serial = self._serial = self._serial + 1
        self.running[live] = None
        return hit.tokens, rows

    def _hit(self, live: Live) -> Hit:
        if not live.request.prefix_ids or not self._limits.prefix_cache:
            return MISS
        if live.pieces is None:
            live.pieces = self._prefixes.pieces(live.request)
        return self._prefixes.look_up(live.pieces, live.target)

    def _extend(self, live: Live, tokens: int) -> bool:
        """Blocks for a prefill that goes on to so many tokens."""
        more = self.ledger.blocks_for(tokens) - live.blocks
        if more > 0:
            if not self.ledger.take(more):
                return False
            live.blocks += more
        return True

    def _computed(self, live: Live, tokens: int, complete: list[Live]) -> None:
        """A prompt is computed up to so many tokens in this step; later requests may share what it completes."""
        live.computed = tokens
        pieces = live.pieces or ()
        while live.held < len(pieces) and pieces[live.held].end <= tokens and self._prefixes.offer(pieces[live.held]):
            live.shared_blocks += pieces[live.held].blocks
            live.held += 1
        self._partial = live if tokens < live.target else None
        if tokens == live.target:
            complete.append(live)
