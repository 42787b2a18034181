"""The clock: steps with prefill in them one by one, and stretches of equal decode steps at once.

While the batch stays the same, its step grows by the same time from step to step, so that n steps take
n x first + growth x n (n - 1) / 2. A stretch ends where a sequence ends, where blocks run out, or at the first step
that an arrival might join. Nothing here is done per token, and nothing per sequence and step.
"""

import math
from collections.abc import Callable

from twin.serving.arrivals import slack_s
from twin.serving.live import Live
from twin.serving.metrics import Metrics
from twin.serving.protocols import StepCosts
from twin.serving.records import Steps
from twin.serving.scheduler import Chunk, Scheduler

PROGRESS_EVERY = 4096
"""Rounds of the loop between two reports of progress."""


class Engine:
    """Plays a scheduler's decisions against the costs of steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: StepCosts,
        metrics: Metrics,
        *,
        jump: bool = True,
        on_steps: Callable[[Steps], None] | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        self.now_s = 0.0
        self._scheduler, self._costs, self._metrics = scheduler, costs, metrics
        self._jump, self._on_steps, self._progress = jump, on_steps, progress
        self._affine: dict[int, tuple[float, float]] = {}

    def run(self) -> None:
        """From time 0 until the last request has its last token."""
        scheduler = self._scheduler
        rounds = 0
        while True:
            if not scheduler.running and scheduler.arrivals.head(self.now_s) is None:
                if scheduler.arrivals.next_s == math.inf:
                    return
                self.now_s = max(self.now_s, scheduler.arrivals.next_s)
            before = self._metrics.preemptions
            scheduler.grow(self.now_s)
            chunks, complete = scheduler.fill(self.now_s, admit=self._metrics.preemptions == before)
            if chunks:
                self._mixed_step(chunks, complete)
            elif scheduler.decoding:
                self._stretch(single=self._metrics.preemptions > before or not self._jump)
            rounds += 1
            if self._progress is not None and rounds % PROGRESS_EVERY == 0:
                self._progress(self._metrics.completed, self.now_s)

    def _mixed_step(self, chunks: list[Chunk], complete: list[Live]) -> None:
        """One step with prefill in it."""
        scheduler = self._scheduler
        seconds = self._costs.mixed(scheduler.decoding, scheduler.ctx_units // scheduler.unit, chunks)
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step of {scheduler.decoding} sequences and chunks {chunks} takes {seconds} s")
        self._passed(1, seconds, seconds, 0.0, sum(rows for _, rows in chunks))
        for live in complete:
            live.outputs += 1
            if live.first_s < 0:
                live.first_s = self.now_s
            else:
                self._metrics.itl_s.add(self.now_s - live.last_s)
            if live.outputs < live.request.output_tokens:
                scheduler.begin(live)
            else:
                scheduler.leave(live)
                self._metrics.finished(live.record(self.now_s))

    def _stretch(self, *, single: bool) -> None:
        """Decode steps of one batch: one, or as many as it stays the same for."""
        scheduler = self._scheduler
        fixed_s, per_token_s = self._decode_costs(scheduler.decoding)
        first_s = fixed_s + per_token_s * (scheduler.ctx_units / scheduler.unit)
        growth_s = per_token_s * (scheduler.decoding * scheduler.gain / scheduler.unit)
        steps = 1
        if not single and not scheduler.unsettled(self.now_s):
            steps = scheduler.steps_to_end()
            if steps > 1:
                arrival_s = scheduler.awaited_s(self.now_s)
                if arrival_s < math.inf:
                    steps = self._steps_until(arrival_s, first_s, growth_s, steps)
                steps = scheduler.grow_ahead(steps)
        seconds = steps * first_s + growth_s * (steps * (steps - 1) / 2)
        if not 0 < first_s < math.inf or not 0 < seconds < math.inf:
            raise ValueError(
                f"a decode step of {scheduler.decoding} sequences takes {first_s} s, {steps} take {seconds} s"
            )
        self._passed(steps, seconds, first_s, growth_s, 0)

    def _passed(self, steps: int, seconds: float, first_s: float, growth_s: float, prefill_tokens: int) -> None:
        """So many steps were done, and those who have all their tokens with the last of them leave."""
        scheduler, metrics = self._scheduler, self._metrics
        start_s, decoding, running = self.now_s, scheduler.decoding, len(scheduler.running)
        self.now_s = end_s = start_s + seconds
        metrics.steps += steps
        metrics.peak_blocks = max(metrics.peak_blocks, scheduler.ledger.in_use)
        metrics.busy_s += seconds
        metrics.residency.add(start_s, end_s, running)
        if steps > 1:
            metrics.itl_s.add_progression(first_s, growth_s, steps, decoding)
        elif decoding:
            metrics.itl_s.add(first_s, decoding)
        if self._on_steps is not None:
            self._on_steps(Steps(start_s, end_s, steps, decoding, running, prefill_tokens))
        for live in scheduler.advance(steps):
            metrics.finished(live.record(end_s))

    def _decode_costs(self, sequences: int) -> tuple[float, float]:
        """Seconds of a decode step over no cached token, and of each cached token."""
        known = self._affine.get(sequences)
        if known is None:
            scheduler = self._scheduler
            ctx_tokens = scheduler.ctx_units // scheduler.unit
            seconds, per_token_s = self._costs.decode(sequences, ctx_tokens)
            if not 0 <= per_token_s < math.inf:
                raise ValueError(f"a cached token adds {per_token_s} s to a decode step of {sequences} sequences")
            known = self._affine[sequences] = (seconds - per_token_s * ctx_tokens, per_token_s)
        return known

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
