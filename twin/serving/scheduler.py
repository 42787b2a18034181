"""Who waits and who runs in the next step, and in which blocks: vLLM's V1 scheduler in bulk.

Source: vllm/v1/core/sched/scheduler.py. First come first served, preempted sequences before all others. Only one
request is read ahead, so that memory does not grow with the queue: who waits to be admitted stays in the source.

Two facts make it cheap. Only the sequence admitted last can be in the middle of its prefill, because it took all that
was left of the budget. And all others decode in every step, so that the step in which each ends, and those in which it
crosses the end of its blocks (`Growth`), are known beforehand.

Contexts are summed in units of 1 / `limits.ratio[1]` token, so that sums stay whole under speculation.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from typing import Any

from twin.errors import BadValue
from twin.serving.blocks import MISS, NEVER, NOT_DECODING, NOT_RUNNING, BlockPool, Growth, Hit, Ledger, Live, Prefixes
from twin.serving.metrics import Rejection, ServingResult
from twin.serving.requests import MAX_ARRIVAL_S, Limits, Request

Chunk = tuple[int, int]  # cached and new tokens of a prefill chunk: kv_tokens, q_tokens

SLACK = 1e-9
MOST_SLACK_S = 1e-6  # so close after a step's end an arrival counts as before it: rounding costs no step


def slack_s(now_s: float) -> float:
    """How much later than `now_s` an arrival may lie and count as there."""
    return min(now_s * SLACK, MOST_SLACK_S)


class Arrivals:
    """The queue in front of the engine: who comes next, and when."""

    __slots__ = ("_latest_s", "_ledger", "_limits", "_preempted", "_result", "_source", "_upcoming", "next_s")

    def __init__(self, requests: Iterable[Request], ledger: Ledger, limits: Limits, result: ServingResult) -> None:
        self._source = iter(requests)
        self._ledger, self._limits, self._result = ledger, limits, result
        self._preempted: deque[Live] = deque()
        self._upcoming: Live | None = None
        self._latest_s = 0.0
        self.next_s = 0.0  # when the next request that was never admitted arrives; infinite if there is none
        self._read()

    def head(self, now_s: float) -> Live | None:
        """Who is to be admitted next, if anybody waits."""
        if self._preempted:
            return self._preempted[0]
        return self._upcoming if self.next_s <= now_s + slack_s(now_s) else None

    def pop(self) -> None:
        """The head was admitted."""
        if self._preempted:
            self._preempted.popleft()
        else:
            self._read()

    def put_back(self, live: Live) -> None:
        """A preempted sequence is the next to be admitted."""
        self._preempted.appendleft(live)

    def _read(self) -> None:
        """Read on to the next request that can run at all."""
        self._upcoming, self.next_s = None, inf
        for request in self._source:
            at_s = request.arrival_s
            if at_s > MAX_ARRIVAL_S:
                late, hint = f"the clock ends at {MAX_ARRIVAL_S:g} s", "count arrivals from the first one on"
                raise BadValue(f"request {request.id} arrives at {at_s:g} s, {late}", hint=hint)
            if not self._latest_s <= at_s:
                early, hint = f"after one at {self._latest_s:g} s", "requests are taken in the order of their arrival"
                raise BadValue(f"request {request.id} arrives at {at_s:g} s, {early}", hint=hint)
            prompt, prefix, output = request.prompt_tokens, request.prefix_tokens, request.output_tokens
            if not (output >= 1 and 0 <= prefix <= prompt >= 1):
                has = f"{prompt} prompt tokens, {prefix} of them a prefix, and {output} output tokens"
                hint = "prompt and output are at least 1, and the prefix is part of the prompt"
                raise BadValue(f"request {request.id} has {has}", hint=hint)
            self._latest_s = at_s
            rejection = self._misfit(request)
            if rejection is None:
                self._upcoming, self.next_s = Live(request), at_s
                return
            self._result.reject(rejection)

    def _misfit(self, request: Request) -> Rejection | None:
        """Why a request can never run."""
        prompt, output = request.prompt_tokens, request.output_tokens
        most = self._limits.max_model_tokens
        if most is not None and prompt + output > most:
            kind, reason = "max_model_tokens", f"{prompt + output:,} tokens, the model takes {most:,}"
        else:
            blocks = self._ledger.blocks_for(self._limits.last_slot(prompt, output))
            if blocks <= self._ledger.total:
                return None
            kind, reason = "pool", f"needs {blocks:,} blocks, the pool has {self._ledger.total:,}"
        told: dict[str, Any] = {"id": request.id, "arrival_s": request.arrival_s, "line": request.line}
        return Rejection(**told, prompt_tokens=prompt, output_tokens=output, kind=kind, reason=reason)


class Scheduler:
    """The running sequences, in the order of their admission, and the blocks they hold."""

    def __init__(self, requests: Iterable[Request], pool: BlockPool, limits: Limits, result: ServingResult) -> None:
        self.ledger = Ledger(pool.blocks, pool.blocks_for)
        self.arrivals = Arrivals(requests, self.ledger, limits, result)
        self.running: dict[Live, None] = {}
        self.step = 0  # engine steps so far; each one advances every decoding sequence
        self.decoding = 0
        self.ctx_units = 0  # cached tokens of all decoding sequences, in units
        self.gain, self.unit = limits.ratio
        self._limits, self._result = limits, result
        self._q_tokens, self._most_running = limits.q_tokens, limits.most_running
        self._prefixes = Prefixes(self.ledger)
        self._partial: Live | None = None
        self._serial = 0
        self._growth = Growth(self.ledger, limits)
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
        """Prefill chunks of a step, and the sequences whose prefill they complete; nobody new without `admit`."""
        budget = self._limits.batched_tokens - self.decoding * self._q_tokens
        chunks: list[Chunk] = []
        complete: list[Live] = []
        live = self._partial
        if live is not None:
            kv_tokens, q_tokens = live.computed, min(live.target - live.computed, budget)
            if self._extend(live, kv_tokens + q_tokens):
                chunks.append((kv_tokens, q_tokens))
                budget -= q_tokens
                self._computed(live, kv_tokens + q_tokens, complete)
            else:
                self._preempt(live, now_s)
                admit = False
        while admit and budget > 0 and len(self.running) < self._most_running:
            live = self.arrivals.head(now_s)
            chunk = None if live is None else self._admit(live, budget)
            if live is None or chunk is None:
                break
            self.arrivals.pop()
            if live.admitted_s == NEVER:
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
            return inf
        return self.arrivals.next_s

    def eviction_may_admit(self, now_s: float) -> bool:
        """Whether evicting might let in who waits: with less of its prefix cached, its first chunk is shorter."""
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
            self._growth.stop(live)
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
        self._result.preemptions += 1
        self._result.recomputed_tokens += cached
        self.arrivals.put_back(live)

    def _admit(self, live: Live, budget: int) -> Chunk | None:
        """The first chunk of a waiting request, or None where it has to wait on."""
        limits, ledger, request = self._limits, self.ledger, live.request
        hit = self._hit(live)
        q_tokens = min(live.target - hit.tokens, budget)
        blocks = ledger.blocks_for(hit.tokens + q_tokens)
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
        return hit.tokens, q_tokens

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
