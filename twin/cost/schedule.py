"""The event simulation: ops queue first-in-first-out for engines on simpy. Knows nothing of transformers or hardware.

A chain needs no events: its length is the sum of its ops. A pipeline of many equal iterations is played until it has
settled into a steady rhythm and is then extrapolated; one that does not settle, or whose busiest engine would be
overtaken, is played to the end.
"""

from collections.abc import Sequence
from typing import NamedTuple

import simpy
from simpy.resources.resource import Request

from twin.cost.timeline import BlockRun, Span, Timeline
from twin.operations.ops import Block, Engine, Program

WARM_UP = 8
"""Iterations after which a pipeline's rhythm is looked for."""

SETTLED = 1e-9
"""Largest relative change of the time per iteration that counts as steady."""


def simulate(program: Program, seconds: Sequence[Sequence[float]], *, spans: bool = False) -> Timeline:
    """Play `program`; `seconds` holds the service time of each op of each block. `spans` records every call."""
    play = _play_all if spans else _run
    runs = tuple(play(block, tuple(own)) for block, own in zip(program, seconds, strict=True))
    return Timeline(program=program, runs=runs)


def _run(block: Block, seconds: tuple[float, ...]) -> BlockRun:
    if _is_chain(block):
        counts = (float(block.iterations),) * len(block.ops)
        return BlockRun(seconds=sum(seconds) * block.iterations, critical=counts)
    if block.iterations <= WARM_UP + 2:
        return _play(block, seconds, block.iterations).run()
    before, settled, after = (_play(block, seconds, WARM_UP + extra).run() for extra in (0, 1, 2))
    rhythm = after.seconds - settled.seconds
    if abs(rhythm - (settled.seconds - before.seconds)) > SETTLED * after.seconds:
        return _play(block, seconds, block.iterations).run()
    left = block.iterations - (WARM_UP + 2)
    counts = tuple(late + (late - early) * left for early, late in zip(settled.critical, after.critical, strict=True))
    length = after.seconds + rhythm * left
    if length < _busiest(block, seconds) or min(counts) < 0:  # a slower part has not caught up with the rhythm yet
        return _play(block, seconds, block.iterations).run()
    return BlockRun(seconds=length, critical=counts)


def _busiest(block: Block, seconds: tuple[float, ...]) -> float:
    """Work of the busiest engine over all iterations: no playing of the block is shorter."""
    work: dict[tuple[int, Engine], float] = {}
    for op, taken in zip(block.ops, seconds, strict=True):
        work[op.device, op.engine] = work.get((op.device, op.engine), 0.0) + taken * block.iterations
    return max(work.values(), default=0.0) * (1 - SETTLED)


def _is_chain(block: Block) -> bool:
    """Whether every op waits for the one before it, and every iteration for the whole of the last."""
    linked = all(max(op.after, default=-1) == index - 1 for index, op in enumerate(block.ops))
    one_engine = len({(op.device, op.engine) for op in block.ops}) == 1
    barrier = any(edge.op == 0 and edge.earlier == len(block.ops) - 1 and edge.distance == 1 for edge in block.carried)
    return linked and (block.iterations == 1 or one_engine or barrier)


def _play_all(block: Block, seconds: tuple[float, ...]) -> BlockRun:
    return _play(block, seconds, block.iterations).run(spans=True)


class _Call(NamedTuple):
    """Op number `op` of iteration `iteration`."""

    iteration: int
    op: int


class _Stage:
    """One playing of a block: who waits for whom, who holds what, and what each call was last held up by."""

    def __init__(self, block: Block, seconds: tuple[float, ...], iterations: int) -> None:
        self.block, self.seconds, self.iterations = block, seconds, iterations
        self.env = simpy.Environment()
        self.servers: dict[tuple[int, Engine], simpy.Resource] = {}
        self.last_on: dict[tuple[int, Engine], _Call] = {}
        self.start: dict[_Call, float] = {}
        self.end: dict[_Call, float] = {}
        self.ready_at: dict[_Call, float] = {}
        self.cause: dict[_Call, _Call | None] = {}
        self.missing: dict[_Call, int] = {}
        self.waiters: dict[_Call, list[_Call]] = {}
        self._link()

    def _link(self) -> None:
        for iteration in range(self.iterations):
            for index, op in enumerate(self.block.ops):
                call = _Call(iteration, index)
                needs = [_Call(iteration, earlier) for earlier in op.after]
                needs += [
                    _Call(iteration - edge.distance, edge.earlier)
                    for edge in self.block.carried
                    if edge.op == index and edge.distance <= iteration
                ]
                self.missing[call] = len(needs)
                for need in needs:
                    self.waiters.setdefault(need, []).append(call)

    def play(self) -> None:
        """Let every call run; afterwards `start`, `end` and `cause` are complete. ValueError for a cycle of edges."""
        for call in [call for call, missing in self.missing.items() if missing == 0]:
            self._ready(call, None)
        self.env.run()
        if len(self.end) < len(self.missing):
            raise ValueError(f"{len(self.missing) - len(self.end)} ops wait for each other in a circle")

    def _ready(self, call: _Call, cause: _Call | None) -> None:
        self.ready_at[call], self.cause[call] = self.env.now, cause
        place = self._place(call)
        if place not in self.servers:
            self.servers[place] = simpy.Resource(self.env)
        request = self.servers[place].request()
        request.callbacks.append(lambda _event: self._begin(call, request))

    def _begin(self, call: _Call, request: Request) -> None:
        self.start[call] = self.env.now
        if self.env.now > self.ready_at[call]:
            self.cause[call] = self.last_on[self._place(call)]
        self.env.timeout(self.seconds[call.op]).callbacks.append(lambda _event: self._finish(call, request))

    def _finish(self, call: _Call, request: Request) -> None:
        self.end[call] = self.env.now
        place = self._place(call)
        self.last_on[place] = call
        self.servers[place].release(request)
        for waiter in self.waiters.get(call, ()):
            self.missing[waiter] -= 1
            if self.missing[waiter] == 0:
                self._ready(waiter, call)

    def _place(self, call: _Call) -> tuple[int, Engine]:
        op = self.block.ops[call.op]
        return (op.device, op.engine)

    def run(self, *, spans: bool = False) -> BlockRun:
        """What was played: its length, how often each op lies on the critical path, and on request each span."""
        counts = [0.0] * len(self.block.ops)
        call = max(self.end, key=lambda key: (self.end[key], key), default=None)
        length = self.end[call] if call else 0.0
        while call is not None:
            counts[call.op] += 1
            call = self.cause[call]
        recorded = tuple(
            Span(op=self.block.ops[key.op], start_s=self.start[key], end_s=end)
            for key, end in (sorted(self.end.items(), key=lambda item: self.start[item[0]]) if spans else ())
        )
        return BlockRun(seconds=length, critical=tuple(counts), spans=recorded)


def _play(block: Block, seconds: tuple[float, ...], iterations: int) -> _Stage:
    stage = _Stage(block, seconds, iterations)
    stage.play()
    return stage
