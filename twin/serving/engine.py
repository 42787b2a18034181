"""The door and the clock: steps with prefill in them one by one, and stretches of equal decode steps at once.

While the batch stays the same, its step grows by the same time from step to step, so that n steps take
n x first + growth x n (n - 1) / 2. A stretch ends where a sequence ends, where blocks run out, or at the first step
that an arrival might join. Nothing here is done per token, and nothing per sequence and step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from twin.serving.blocks import NEVER, BlockPool, Live
from twin.serving.metrics import RequestRecord, ServingResult, Steps
from twin.serving.requests import Limits, Request
from twin.serving.scheduler import Chunk, Scheduler, slack_s

PROGRESS_EVERY = 4096  # rounds of the loop between two reports of progress


class StepCosts(Protocol):
    """Seconds of engine steps. Pure: the same question has the same answer."""

    def decode(self, sequences: int, ctx_tokens: float) -> tuple[float, float]:
        """Seconds of a step of `sequences` over `ctx_tokens` cached tokens (a mean) in all, and per token: affine."""
        ...

    def mixed(self, sequences: int, ctx_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the same step with prefill chunks (kv_tokens, q_tokens) beside it; `sequences` may be 0."""
        ...


def simulate_serving(
    requests: Iterable[Request],
    costs: StepCosts,
    pool: BlockPool,
    limits: Limits,
    *,
    jump: bool = True,
    on_finish: Callable[[RequestRecord], None] | None = None,
    on_steps: Callable[[Steps], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> ServingResult:
    """Serve `requests`, read one ahead in the order of their arrival; memory does not grow with their number.

    `jump=False` takes every decode step by itself, for the same result. `on_finish` gets each record as it ends,
    `on_steps` what the engine did, `progress` now and then the completed requests and the simulated seconds. BadValue
    for requests out of order; whatever `requests` raises passes through.
    """
    result = ServingResult(limits=limits, pool_blocks=pool.blocks)
    scheduler = Scheduler(requests, pool, limits, result)
    Engine(scheduler, costs, result, jump, on_finish, on_steps, progress).run()
    return result


class Engine(Struct):
    """Plays a scheduler's decisions against the costs of steps."""

    scheduler: Scheduler
    costs: StepCosts
    result: ServingResult
    jump: bool = True
    on_finish: Callable[[RequestRecord], None] | None = None
    on_steps: Callable[[Steps], None] | None = None
    progress: Callable[[int, float], None] | None = None
    now_s: float = 0.0

    def run(self) -> None:
        """From time 0 until the last request has its last token."""
        scheduler, result = self.scheduler, self.result
        rounds = 0
        while True:
            if not scheduler.running and scheduler.arrivals.head(self.now_s) is None:
                if scheduler.arrivals.next_s == math.inf:
                    result.total_s = self.now_s
                    return
                self.now_s = max(self.now_s, scheduler.arrivals.next_s)
            before = result.preemptions
            scheduler.grow(self.now_s)
            chunks, complete = scheduler.fill(self.now_s, admit=result.preemptions == before)
            if chunks:
                self._mixed_step(chunks, complete)
            elif scheduler.decoding:
                self._stretch(single=result.preemptions > before or not self.jump)
            rounds += 1
            if self.progress is not None and rounds % PROGRESS_EVERY == 0:
                self.progress(result.completed, self.now_s)

    def _mixed_step(self, chunks: list[Chunk], complete: list[Live]) -> None:
        """One step with prefill in it."""
        scheduler = self.scheduler
        seconds = self.costs.mixed(scheduler.decoding, scheduler.ctx_units // scheduler.unit, chunks)
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step of {scheduler.decoding} sequences and chunks {chunks} takes {seconds} s")
        self._passed(1, seconds, seconds, 0.0, sum(q_tokens for _, q_tokens in chunks))
        for live in complete:
            live.outputs += 1
            if live.first_s == NEVER:
                live.first_s = self.now_s
            else:
                self.result.itl_s.add(self.now_s - live.last_s)
            if live.outputs < live.request.output_tokens:
                scheduler.begin(live)
            else:
                scheduler.leave(live)
                self._finish(live)

    def _stretch(self, *, single: bool) -> None:
        """Decode steps of one batch: one, or as many as it stays the same for."""
        scheduler = self.scheduler
        first_s, per_token_s = self.costs.decode(scheduler.decoding, scheduler.ctx_units / scheduler.unit)
        if not 0 <= per_token_s < math.inf:
            raise ValueError(f"a cached token adds {per_token_s} s to a step of {scheduler.decoding} sequences")
        growth_s = per_token_s * (scheduler.decoding * scheduler.gain / scheduler.unit)
        steps = 1
        if not single and not scheduler.eviction_may_admit(self.now_s):
            steps = scheduler.steps_to_end()
            if steps > 1:
                arrival_s = scheduler.awaited_s(self.now_s)
                if arrival_s < math.inf:
                    steps = self._steps_until(arrival_s, first_s, growth_s, steps)
                steps = scheduler.grow_ahead(steps)
        seconds = steps * first_s + growth_s * (steps * (steps - 1) / 2)
        if not 0 < first_s < math.inf or not 0 < seconds < math.inf:
            taken = f"takes {first_s} s, {steps} take {seconds} s"
            raise ValueError(f"a decode step of {scheduler.decoding} sequences {taken}")
        self._passed(steps, seconds, first_s, growth_s, 0)

    def _passed(self, steps: int, seconds: float, first_s: float, growth_s: float, prefill_tokens: int) -> None:
        """So many steps were done, and those who have all their tokens with the last of them leave."""
        scheduler, result = self.scheduler, self.result
        start_s, decoding, running = self.now_s, scheduler.decoding, len(scheduler.running)
        self.now_s = end_s = start_s + seconds
        result.steps += steps
        result.pool_peak_blocks = max(result.pool_peak_blocks, scheduler.ledger.in_use)
        result.busy_s += seconds
        result.residency.add(start_s, end_s, running)
        if steps > 1:
            result.itl_s.add_progression(first_s, growth_s, steps, decoding)
        elif decoding:
            result.itl_s.add(first_s, decoding)
        if self.on_steps is not None:
            self.on_steps(Steps(start_s, end_s, steps, decoding, running, prefill_tokens))
        for live in scheduler.advance(steps):
            self._finish(live)

    def _finish(self, live: Live) -> None:
        record = live.record(self.now_s)
        self.result.finish(record)
        if self.on_finish is not None:
            self.on_finish(record)

    def _steps_until(self, arrival_s: float, first_s: float, growth_s: float, most: int) -> int:
        """Steps to the first one that does not end before an arrival, `most` if none does."""
        if not self._has_come(arrival_s, most, first_s, growth_s):
            return most
        gap_s = arrival_s - self.now_s
        even_s = first_s - growth_s / 2
        root_s = math.sqrt(even_s * even_s + 2 * growth_s * gap_s)
        steps = min(max(1, math.ceil(2 * gap_s / (even_s + root_s))), most)
        while not self._has_come(arrival_s, steps, first_s, growth_s):
            steps += 1
        while steps > 1 and self._has_come(arrival_s, steps - 1, first_s, growth_s):
            steps -= 1
        return steps

    def _has_come(self, arrival_s: float, steps: int, first_s: float, growth_s: float) -> bool:
        end_s = self.now_s + (steps * first_s + growth_s * (steps * (steps - 1) / 2))
        return arrival_s <= end_s + slack_s(end_s)
