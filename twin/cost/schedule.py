"""The event simulation: ops queue first-in-first-out for engines on simpy. Knows nothing of transformers or hardware.

A chain needs no events: its length is the sum of its ops. A pipeline of many equal iterations is played until its
rhythm is steady and is then extrapolated; one whose rhythm does not become steady, or whose busiest engine would be
overtaken, is played to the end.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import simpy
from msgspec import Struct
from simpy.resources.resource import Request

from twin.operations.ops import Engine, Op, OpGraph, Program

WARM_UP = 8  # iterations after which a pipeline's rhythm is looked for
STEADY = 1e-9  # largest relative change of the time per iteration that counts as steady


class Span(NamedTuple):
    """One call of an op, in seconds from the start of its graph."""

    op: Op
    start_s: float
    end_s: float


class GraphRun(Struct, frozen=True, kw_only=True):
    """One playing of a graph (all its iterations, once)."""

    seconds: float
    critical: tuple[float, ...]  # how often each op is on the critical path: its seconds x this sum up to `seconds`
    spans: tuple[Span, ...] = ()


class Timeline(Struct, frozen=True, kw_only=True):
    """A played program."""

    program: Program
    runs: tuple[GraphRun, ...]

    @property
    def total_s(self) -> float:
        """Length of the whole program in seconds."""
        return sum(run.seconds * graph.times for graph, run in zip(self.program, self.runs, strict=True))

    def spans(self) -> Iterator[Span]:
        """Every recorded span, in seconds from the start of the program."""
        offset = 0.0
        for graph, run in zip(self.program, self.runs, strict=True):
            for _ in range(graph.times):
                for span in run.spans:
                    yield Span(span.op, span.start_s + offset, span.end_s + offset)
                offset += run.seconds


def schedule(program: Program, seconds: Sequence[Sequence[float]], *, spans: bool = False) -> Timeline:
    """Play `program`; `seconds` holds the service time of each op of each graph. `spans` records every call."""
    runs = tuple(
        _play(graph, tuple(own), graph.iterations, spans=True) if spans else _run(graph, tuple(own))
        for graph, own in zip(program, seconds, strict=True)
    )
    return Timeline(program=program, runs=runs)


def _run(graph: OpGraph, seconds: tuple[float, ...]) -> GraphRun:
    """A chain as a sum, a long pipeline extrapolated from its steady rhythm, anything else played."""
    if _is_chain(graph):
        counts = (float(graph.iterations),) * len(graph.ops)
        return GraphRun(seconds=sum(seconds) * graph.iterations, critical=counts)
    extrapolated = _extrapolated(graph, seconds) if graph.iterations > WARM_UP + 2 else None
    return extrapolated or _play(graph, seconds, graph.iterations)


def _extrapolated(graph: OpGraph, seconds: tuple[float, ...]) -> GraphRun | None:
    """The whole pipeline from its first iterations; None where their rhythm is not that of the others."""
    before, steady, after = (_play(graph, seconds, WARM_UP + extra) for extra in (0, 1, 2))
    rhythm = after.seconds - steady.seconds
    if abs(rhythm - (steady.seconds - before.seconds)) > STEADY * after.seconds:
        return None
    left = graph.iterations - (WARM_UP + 2)
    counts = tuple(late + (late - early) * left for early, late in zip(steady.critical, after.critical, strict=True))
    length = after.seconds + rhythm * left
    if length < _busiest(graph, seconds) or min(counts) < 0:  # a slower part has not caught up with the rhythm yet
        return None
    return GraphRun(seconds=length, critical=counts)


def _busiest(graph: OpGraph, seconds: tuple[float, ...]) -> float:
    """Work of the busiest engine over all iterations: no playing of the graph is shorter."""
    work: dict[tuple[int, Engine], float] = {}
    for op, taken in zip(graph.ops, seconds, strict=True):
        work[op.device, op.engine] = work.get((op.device, op.engine), 0.0) + taken * graph.iterations
    return max(work.values(), default=0.0) * (1 - STEADY)


def _is_chain(graph: OpGraph) -> bool:
    """Whether every op waits for the one before it, and every iteration for the whole of the last."""
    linked = all(max(op.after, default=-1) == index - 1 for index, op in enumerate(graph.ops))
    one_engine = len({(op.device, op.engine) for op in graph.ops}) == 1
    barrier = any(edge.op == 0 and edge.earlier == len(graph.ops) - 1 and edge.distance == 1 for edge in graph.carried)
    return linked and (graph.iterations == 1 or one_engine or barrier)


class _Call:
    """One call of op number `op`: what waits for it, when it was ready and ran, and what last held it up."""

    __slots__ = ("cause", "end", "missing", "op", "ready_at", "start", "waiters")

    def __init__(self, op: int) -> None:
        self.op = op
        self.missing = 0
        self.waiters: list[_Call] = []
        self.ready_at = self.start = self.end = 0.0
        self.cause: _Call | None = None


def _linked(graph: OpGraph, iterations: int) -> list[_Call]:
    """Every call of every iteration in order, with its edges."""
    calls = [[_Call(index) for index in range(len(graph.ops))] for _ in range(iterations)]
    for iteration, own in enumerate(calls):
        for call in own:
            needs = [own[earlier] for earlier in graph.ops[call.op].after]
            needs += [
                calls[iteration - edge.distance][edge.earlier]
                for edge in graph.carried
                if edge.op == call.op and edge.distance <= iteration
            ]
            call.missing = len(needs)
            for need in needs:
                need.waiters.append(call)
    return [call for own in calls for call in own]


class _Playing:
    """One playing of a graph: who holds what, and which calls have ended."""

    def __init__(self, graph: OpGraph, seconds: tuple[float, ...], iterations: int) -> None:
        """Let every call run. ValueError for a cycle of edges."""
        self.graph, self.seconds = graph, seconds
        self.env = simpy.Environment()
        self.servers: dict[tuple[int, Engine], simpy.Resource] = {}
        self.last_on: dict[simpy.Resource, _Call] = {}
        self.ended: list[_Call] = []
        calls = _linked(graph, iterations)
        for call in [call for call in calls if call.missing == 0]:
            self._ready(call, None)
        self.env.run()
        if len(self.ended) < len(calls):
            raise ValueError(f"{len(calls) - len(self.ended)} ops wait for each other in a circle")
        self.last = max(reversed(calls), key=lambda call: call.end, default=None)  # of equal ends the last in order

    def _ready(self, call: _Call, cause: _Call | None) -> None:
        call.ready_at, call.cause = self.env.now, cause
        op = self.graph.ops[call.op]
        place = op.device, op.engine
        if place not in self.servers:
            self.servers[place] = simpy.Resource(self.env)
        server = self.servers[place]
        request = server.request()
        request.callbacks.append(lambda _event: self._begin(call, server, request))

    def _begin(self, call: _Call, server: simpy.Resource, request: Request) -> None:
        call.start = self.env.now
        if call.start > call.ready_at:
            call.cause = self.last_on[server]
        self.env.timeout(self.seconds[call.op]).callbacks.append(lambda _event: self._finish(call, server, request))

    def _finish(self, call: _Call, server: simpy.Resource, request: Request) -> None:
        call.end = self.env.now
        self.ended.append(call)
        self.last_on[server] = call
        server.release(request)
        for waiter in call.waiters:
            waiter.missing -= 1
            if waiter.missing == 0:
                self._ready(waiter, call)


def _play(graph: OpGraph, seconds: tuple[float, ...], iterations: int, *, spans: bool = False) -> GraphRun:
    """What was played: its length, how often each op lies on the critical path, and on request each span."""
    playing = _Playing(graph, seconds, iterations)
    counts = [0.0] * len(graph.ops)
    call = playing.last
    while call is not None:
        counts[call.op] += 1
        call = call.cause
    recorded = tuple(
        Span(op=graph.ops[call.op], start_s=call.start, end_s=call.end)
        for call in (sorted(playing.ended, key=lambda call: call.start) if spans else ())
    )
    return GraphRun(seconds=playing.last.end if playing.last else 0.0, critical=tuple(counts), spans=recorded)
