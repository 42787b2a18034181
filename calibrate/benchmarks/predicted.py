"""What the twin says of a point: the same sums of ops and rates as a prediction, over the tokens that were timed."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from calibrate.benchmarks.asking import Asked
from hwprofiles import HardwareProfile
from twin.answers.service import serve
from twin.ask.case import Case
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.memory.startup import pool_rules
from twin.operations import lower
from twin.operations.ops import Op, Program, Step
from twin.prediction import Z90, chunk_breakdown, decode_breakdown_of, prefill_breakdown
from twin.serving.requests import Request

MOST_CHUNKS = 16
"""Of a prompt after others: a chunk's time is smooth in its position, and a trapezium through so many sums it up."""


class Told(NamedTuple):
    """A prediction with its interval; `floor_s`: no machine of the kind is faster, 0 where nobody says."""

    seconds: float
    low: float
    high: float
    floor_s: float
    naive_s: float | None
    wall: str
    rates: frozenset[str]


def seconds_of(asked: Asked, machine: HardwareProfile) -> float:
    """What the twin predicts for a point."""
    if asked.point.requests:
        return _served(asked, machine, intervals=False)[0]
    return breakdown_of(asked, Roofs(machine, strict=False)).seconds


def told_of(asked: Asked, machine: HardwareProfile) -> Told:
    """The same with its interval, floor and usual estimate."""
    if asked.point.requests:
        value, low, high = _served(asked, machine, intervals=True)
        return Told(value, low, high, 0.0, None, "", frozenset())
    roofs = Roofs(machine, strict=False)
    breakdown = breakdown_of(asked, roofs)
    value, floor_s = breakdown.seconds, breakdown.floor_s()
    factor = math.exp(Z90 * breakdown.spread_s(roofs) / value)
    low = max(value / factor, min(floor_s, value))
    rates = frozenset(breakdown.sensitivity())
    return Told(value, low, value * factor, floor_s, breakdown.naive_s(), breakdown.bound(), rates)


def breakdown_of(asked: Asked, roofs: Roofs) -> Breakdown:
    """A point's time by part; MissingRate where the machine lacks a rate of it.

    Of a served workload: of its prompts one by one and of its steps with as many together as may be, which is more or
    less what a simulation adds up to, and hangs on the same rates.
    """
    point, case = asked
    whole = Breakdown()
    if point.requests:
        whole.add(_prompt(case, 0, point.prompt_tokens, roofs), point.requests)
        together, middle = together_of(asked), point.prompt_tokens + point.steps // 2
        steps = point.requests * point.steps / together
        return whole.add(decode_breakdown_of(case, roofs, middle, together), steps)
    if point.prompt_tokens:
        whole.add(_prompt(case, point.kv_tokens, point.prompt_tokens, roofs))
    if point.metric in ("ttft", "latency"):
        whole.add(_first(case, point.kv_tokens + point.prompt_tokens, roofs))
    if point.steps:
        middle = point.kv_tokens + point.prompt_tokens + point.steps // 2
        times = 1.0 if point.metric == "step" else float(point.steps)
        whole.add(decode_breakdown_of(case, roofs, middle, case.question.batch), times)
    return whole


def together_of(asked: Asked) -> int:
    """Sequences that decode together."""
    point, case = asked
    if not point.requests:
        return case.question.batch
    return min(point.requests, point.batch or pool_rules(case).max_sequences)


def _prompt(case: Case, kv_tokens: int, tokens: int, roofs: Roofs) -> Breakdown:
    if not kv_tokens:
        question = replace(case.question, ctx_tokens=tokens)
        return prefill_breakdown(replace(case, question=question), roofs)
    whole = Breakdown()
    for step, times in chunks_after(case, kv_tokens, tokens):
        whole.add(chunk_breakdown(case, step, roofs), times)
    return whole


def chunks_after(case: Case, kv_tokens: int, tokens: int) -> list[tuple[Step, float]]:
    """Chunks of a prompt after others in the cache, and how many each stands for."""
    full, rest = divmod(tokens, case.chunk_tokens)
    found: dict[int, float] = {}
    places = range(full) if full <= MOST_CHUNKS else [
        round(at * (full - 1) / (MOST_CHUNKS - 1)) for at in range(MOST_CHUNKS)
    ]  # fmt: skip
    for at, place in enumerate(places):
        before = place - places[at - 1] if at else 1
        after = places[at + 1] - place if at + 1 < len(places) else 1
        found[place] = (before + after) / 2
    batch = case.question.batch
    chunk = case.chunk_tokens
    steps = [(Step(kv_tokens=kv_tokens + at * chunk, q_tokens=chunk, batch=batch), n) for at, n in found.items()]
    last = Step(kv_tokens=kv_tokens + full * chunk, q_tokens=rest, batch=batch)
    return [*steps, *([(last, 1.0)] if rest else [])]


def _first(case: Case, tokens: int, roofs: Roofs) -> Breakdown:
    """What a first token takes beyond its prefill: the prompt's last token where it is left for a step, else logits."""
    batch = case.question.batch
    if case.rules.unprefilled_tokens:
        return decode_breakdown_of(case, roofs, tokens, batch)
    return Breakdown().run(lower.head_program(case, batch, roofs.profile.gpu_count), roofs)


def _served(asked: Asked, machine: HardwareProfile, *, intervals: bool) -> tuple[float, float, float]:
    point, case = asked
    requests = [
        Request(id=number, arrival_s=0.0, prompt_tokens=point.prompt_tokens, output_tokens=max(1, point.steps))
        for number in range(point.requests)
    ]
    service = serve(case.question, lambda: iter(requests), profile=machine, intervals=intervals)
    low, high = service.ends(lambda result: result.total_s)
    return service.result.total_s, low, high


def ops_of(asked: Asked, machine: HardwareProfile) -> list[Op]:
    """Ops of the passes that a point's time is made of, each once: their kernels, and where these are asked."""
    point, case = asked
    devices, programs = machine.gpu_count, list[Program]()
    batch = case.question.batch
    if point.prompt_tokens:
        q_tokens = min(point.prompt_tokens, case.chunk_tokens)
        for kv_tokens in (point.kv_tokens, point.kv_tokens + point.prompt_tokens - q_tokens):
            step = Step(kv_tokens=kv_tokens, q_tokens=q_tokens, batch=batch)
            programs.append(lower.prefill_program(case, step, devices))
    if point.metric != "prefill":
        programs.append(lower.head_program(case, together_of(asked), devices))
    if point.steps or (point.metric != "prefill" and case.rules.unprefilled_tokens):
        middle = point.kv_tokens + point.prompt_tokens + point.steps // 2
        step = Step(kv_tokens=middle, q_tokens=1, batch=together_of(asked))
        programs.append(lower.decode_program(case, step, devices))
    return [op for program in programs for graph in program for op in graph.ops if op.kernel]
