"""The slow way: vLLM's scheduler step by step and sequence by sequence, with nothing but lists. No prefix cache."""

from fractions import Fraction
from typing import Any

from tests.twin.serving.worlds import Affine
from twin.serving.blocks import BlockPool
from twin.serving.requests import Limits, Request
from twin.serving.scheduler import slack_s


class Sequence:
    """A request with everything that is known of it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks = self.computed = self.outputs = self.preemptions = 0
        self.gained = Fraction(0)
        self.before = 0
        self.target = request.prompt_tokens
        self.decoding = False
        self.admitted: float | None = None
        self.first: float | None = None
        self.last = 0.0

    @property
    def cached(self) -> int:
        """Whole tokens in its blocks."""
        return self.computed + int(self.gained)


class SlowEngine:
    """Scheduler and clock in one."""

    def __init__(self, requests: list[Request], costs: Affine, pool: BlockPool, limits: Limits) -> None:
        self.costs, self.pool, self.limits = costs, pool, limits
        self.most = {request.id: limits.last_slot(request.prompt_tokens, request.output_tokens) for request in requests}
        self.coming = [
            Sequence(request) for request in requests if pool.blocks_for(self.most[request.id]) <= pool.blocks
        ]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.now = 0.0
        self.steps = self.preemptions = self.recomputed = self.peak = self.most_running = 0
        self.area = 0.0
        self.gaps: list[float] = []
        self.finished: list[tuple[Any, ...]] = []
        self.gain = Fraction(*limits.ratio)

    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.blocks - sum(sequence.blocks for sequence in self.running)

    def take(self, sequence: Sequence, tokens: int) -> bool:
        """Only one who is running may take."""
        blocks = max(self.pool.blocks_for(tokens), sequence.blocks)
        if blocks - sequence.blocks > self.free():
            return False
        sequence.blocks = blocks
        return True

    def preempt(self) -> Sequence:
        """Who was admitted last goes to the head of the queue."""
        victim = self.running.pop()
        self.preemptions += 1
        self.recomputed += victim.cached
        victim.preemptions += 1
        victim.target = victim.request.prompt_tokens + victim.outputs
        victim.blocks = victim.computed = 0
        victim.gained, victim.decoding = Fraction(0), False
        self.waiting.insert(0, victim)
        return victim

    def schedule(self) -> list[tuple[Sequence, int, int]]:
        """Blocks for this step, and its chunks: sequence, past tokens and rows."""
        budget, chunks, preempted = self.limits.batched_tokens, [], False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            rows = self.limits.q_tokens if sequence.decoding else min(sequence.target - sequence.computed, budget)
            while not self.take(sequence, sequence.cached + rows):
                preempted = True
                if self.preempt() is sequence:
                    break
            else:
                budget -= rows
                if not sequence.decoding:
                    chunks.append((sequence, sequence.computed, rows))
            index += 1
        while not preempted and budget > 0 and self.waiting and len(self.running) < self.limits.most_running:
            sequence = self.waiting[0]
            rows = min(sequence.target, budget)
            whole = sequence.target if self.limits.reserve_prompt else rows
            if self.limits.reserve_output:
                whole = self.most[sequence.request.id]
            if self.pool.blocks_for(whole) > self.free():
                break
            self.running.append(self.waiting.pop(0))
            assert self.take(sequence, whole if self.limits.reserve_output else rows)
            if sequence.admitted is None:
                sequence.admitted = self.now
            budget -= rows
            chunks.append((sequence, 0, rows))
        return chunks

    def run(self) -> "SlowEngine":
        """Until nobody is left."""
        while self.coming or self.waiting or self.running:
            while self.coming and self.coming[0].request.arrival_s <= self.now + slack_s(self.now):
                self.waiting.append(self.coming.pop(0))
            if not self.waiting and not self.running:
                self.now = self.coming[0].request.arrival_s
                continue
            chunks = self.schedule()
            decoding = [sequence for sequence in self.running if sequence.decoding]
            if chunks or decoding:
                self.play(chunks, decoding)
        return self

    def play(self, chunks: list[tuple[Sequence, int, int]], decoding: list[Sequence]) -> None:
        """One step."""
        ctx = float(sum(sequence.computed + sequence.gained for sequence in decoding))
        if chunks:
            seconds = self.costs.mixed(len(decoding), int(ctx), [(past, rows) for _, past, rows in chunks])
        else:
            seconds = self.costs.decode(len(decoding), ctx)[0]
        self.peak = max(self.peak, self.pool.blocks - self.free())
        self.most_running = max(self.most_running, len(self.running))
        self.area += len(self.running) * seconds
        self.now += seconds
        self.steps += 1
        for sequence in decoding:
            sequence.gained += self.gain
            sequence.outputs = min(sequence.before + int(sequence.gained), sequence.request.output_tokens)
        for sequence, past, rows in chunks:
            sequence.computed = past + rows
            if sequence.computed == sequence.target:
                sequence.decoding = True
                sequence.outputs += 1
                sequence.before = sequence.outputs
                decoding.append(sequence)
        for sequence in decoding:
            self.deliver(sequence)

    def deliver(self, sequence: Sequence) -> None:
        """A sequence got tokens at the end of this step."""
        request = sequence.request
        if sequence.first is None:
            sequence.first = self.now
        else:
            self.gaps.append(self.now - sequence.last)
        sequence.last = self.now
        if sequence.outputs == request.output_tokens:
            self.running.remove(sequence)
            marks = (sequence.admitted or 0.0, sequence.first, self.now)
            times = (mark - request.arrival_s for mark in marks)
            self.finished.append((request.id, *times, sequence.preemptions))
