"""From a question to an answer: memory first, then a decode step and a prefill, each with parts and an interval."""

import math
from typing import NamedTuple

from msgspec import Struct

from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import FULL_LANES
from hwprofiles.rates import Provenance
from twin.assumptions import assumptions_of
from twin.case import Case, Question, resolve
from twin.layouts.layout import Pass
from twin.lower import decode_program, prefetch_program, prefill_program
from twin.memory import MemoryPlan, plan_memory
from twin.prefill import Weights, chunk_at, sample
from twin.roofline import Roofs
from twin.tally import Part, Tally

Z90 = 1.6449
"""Standard deviations to either side that hold 90 % of a normal distribution."""


class Quantity(NamedTuple):
    """A predicted number with its 90 % interval."""

    value: float
    low: float
    high: float


class Phase(Struct, frozen=True, kw_only=True):
    """A decode step or a whole prefill."""

    seconds: Quantity
    tokens_per_s: Quantity
    floor_s: float
    """No machine of this kind can be faster: bytes and operations at datasheet peaks, everything overlapped."""
    naive_s: float
    """The usual estimate: the same bytes and operations over datasheet rates, one after the other, nothing else."""
    bound: str
    """The wall with the largest share of the time."""
    parts: tuple[Part, ...]
    """Longest first; their seconds add up to the phase."""
    link_bytes: int
    """Cache bytes from host to device, over all links."""
    link_write_bytes: int
    """Cache bytes from device to host, over all links."""
    busy_s: dict[str, float]
    """Busy seconds of each kind of engine, over all devices."""


class Prediction(Struct, frozen=True, kw_only=True):
    """The answer to a question."""

    case: Case
    machine: HardwareProfile
    memory: MemoryPlan
    decode: Phase | None
    """None where the question does not fit."""
    prefill: Phase | None
    ttft_s: Quantity | None
    """Prefill and the first decode step."""
    assumptions: tuple[str, ...]
    """Keys in twin.assumptions, and what was extrapolated."""
    sources: dict[str, Provenance]
    """The rates used, by name."""

    @property
    def fits(self) -> bool:
        """Whether the question fits the machine."""
        return self.memory.fits


def predict(question: Question, profile: HardwareProfile | None = None) -> Prediction:
    """Answer `question`, on `profile` if given and on the machine that it names otherwise.

    Raises UnknownName, BadValue, Impossible, MissingRate or BadFile; not fitting is an answer, not an error.
    """
    case = resolve(question)
    machine = profile or load_profile(question.hw)
    if question.lanes != FULL_LANES:
        machine = machine.with_lanes(question.lanes)
    plan = plan_memory(case, machine)
    if not plan.fits:
        return Prediction(
            case=case,
            machine=machine,
            memory=plan,
            decode=None,
            prefill=None,
            ttft_s=None,
            assumptions=assumptions_of(case, machine, extrapolated=()),
            sources={},
        )
    roofs = Roofs(machine)
    decode = decode_tally(case, roofs)
    prefill = prefill_tally(case, roofs)
    used = sorted(decode.hangs_on().keys() | prefill.hangs_on().keys())
    return Prediction(
        case=case,
        machine=machine,
        memory=plan,
        decode=_phase(decode, roofs, tokens=question.batch),
        prefill=_phase(prefill, roofs, tokens=question.batch * question.ctx_tokens),
        ttft_s=_seconds(Tally().add(decode).add(prefill), roofs),
        assumptions=assumptions_of(case, machine, extrapolated=tuple(sorted(roofs.extrapolated))),
        sources={name: roofs.rates[name] for name in used},
    )


def decode_tally(case: Case, roofs: Roofs) -> Tally:
    """One decode step after `ctx_tokens` cached tokens."""
    step = Pass(past=case.question.ctx_tokens, rows=1, batch=case.question.batch)
    return Tally().run(decode_program(case, step, roofs.profile.gpu_count), roofs)


def prefill_tally(case: Case, roofs: Roofs) -> Tally:
    """A prefill of `ctx_tokens` prompt tokens, from the chunks that its shape needs."""
    prompt = case.question.ctx_tokens
    chunks: dict[int, Tally] = {}
    fetches: dict[int, Tally] = {}  # by rows: what is fetched does not depend on the position

    def seconds(index: int) -> float:
        if index not in chunks:
            chunk = chunk_at(case, prompt, index)
            if chunk.rows not in fetches:
                fetches[chunk.rows] = Tally().run(prefetch_program(case, chunk), roofs)
            chunks[index] = chunk_tally(case, chunk, roofs, fetch=fetches[chunk.rows])
        return chunks[index].seconds

    weights: Weights = sample(case, prompt, seconds)
    whole = Tally()
    for index, times in sorted(weights.items()):
        seconds(index)
        whole.add(chunks[index], times)
    return whole


def chunk_tally(case: Case, chunk: Pass, roofs: Roofs, *, fetch: Tally | None = None) -> Tally:
    """One prefill chunk; of what is `fetch`ed beside it (n-gram rows unless given), only what sticks out is added."""
    if fetch is None:
        fetch = Tally().run(prefetch_program(case, chunk), roofs)
    work = Tally().run(prefill_program(case, chunk, roofs.profile.gpu_count), roofs)
    if fetch.seconds <= work.seconds:
        return work
    return work.add(fetch, times=1 - work.seconds / fetch.seconds)


def _phase(tally: Tally, roofs: Roofs, *, tokens: int) -> Phase:
    seconds = _seconds(tally, roofs)
    return Phase(
        seconds=seconds,
        tokens_per_s=_rate(tokens, seconds),
        floor_s=tally.floor_s(),
        naive_s=tally.naive_s(),
        bound=tally.bound(),
        parts=tally.parts(),
        link_bytes=round(tally.link_bytes),
        link_write_bytes=round(tally.link_write_bytes),
        busy_s={engine.value: busy for engine, busy in sorted(tally.busy_s().items())},
    )


def _seconds(tally: Tally, roofs: Roofs) -> Quantity:
    """Log-normal interval from the spread of every rate, never below the physical floor."""
    value = tally.seconds
    if value == 0:
        return Quantity(0.0, 0.0, 0.0)
    factor = math.exp(Z90 * tally.spread_s(roofs) / value)
    return Quantity(value, max(value / factor, min(tally.floor_s(), value)), value * factor)


def _rate(tokens: int, seconds: Quantity) -> Quantity:
    if seconds.value == 0:
        return Quantity(0.0, 0.0, 0.0)
    return Quantity(tokens / seconds.value, tokens / seconds.high, tokens / seconds.low)
