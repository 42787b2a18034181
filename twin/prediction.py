"""From a question to an answer: memory first, then a decode step and a prefill, each with parts and an interval."""

import math
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from hwprofiles.ladder import RUNGS, Rung
from hwprofiles.rates import Provenance
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.assumptions import assumptions_of, beyond_native, not_loaded, of_another_version
from twin.cost.breakdown import Breakdown, Part
from twin.cost.mixed import roofs_of
from twin.cost.prefill import Weights, chunk_at, sample
from twin.cost.roofline import Roofs
from twin.errors import MissingRate
from twin.memory.plan import MemoryPlan, plan_memory
from twin.operations import lower
from twin.operations.ops import Step
from twin.units import format_bytes

Z90 = 1.6449  # standard deviations to either side that hold 90 % of a normal distribution


DECODE_READS = ("attend_decode/", "gather_vram/", "gather_host/", "gather_host_4k/")
"""Operations in which a decode step reads the cache, as the keys of their kernels begin."""


class Quantity(NamedTuple):
    """A predicted number with its 90 % interval."""

    value: float
    low: float
    high: float


NOTHING = Quantity(0.0, 0.0, 0.0)


class Phase(Struct, frozen=True, kw_only=True):
    """A decode step or a whole prefill."""

    seconds: Quantity
    tokens_per_s: Quantity
    floor_s: float  # no such machine can be faster: bytes and operations at datasheet peaks, overlapped
    naive_s: float  # the usual estimate: the same over datasheet rates, one after the other, nothing else
    bound: str  # the wall with the largest share of the time
    parts: tuple[Part, ...]  # longest first; their seconds add up to the phase
    link_bytes: int  # cache bytes from host to device, over all links
    link_write_bytes: int  # cache bytes from device to host, over all links
    busy_s: dict[str, float]  # busy seconds of each kind of engine, over all devices


class Prediction(Struct, frozen=True, kw_only=True):
    """The answer to a question."""

    case: Case
    machine: HardwareProfile
    memory: MemoryPlan
    decode: Phase | None  # None where the question does not fit, or a rate is missing
    prefill: Phase | None
    ttft_s: Quantity | None  # prefill and the first decode step
    break_even: float | None  # tokens from which on a verify step pays; None where nothing is drafted
    not_predicted: dict[str, str]  # why a phase is not: the rates that the machine's profile lacks
    assumptions: tuple[str, ...]  # keys in twin.assumptions, and what was extrapolated
    sources: dict[str, Provenance]  # the rates used, by name
    rungs: dict[str, Rung]  # of those that were not measured on this machine

    @property
    def fits(self) -> bool:
        """Whether the question fits the machine."""
        return self.memory.fits

    @property
    def missing(self) -> tuple[str, ...]:
        """What the machine's profile lacks, each reason once."""
        return tuple(dict.fromkeys(self.not_predicted.values()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said beside the answer.

        Weights that the engine does not load; that the context asked about, or the longest, is beyond the model's; that
        a host which counts is nobody's.
        """
        asked = beyond_native(self.case, self.case.question.ctx_tokens)
        beyond = asked or beyond_native(self.case, self.memory.max_ctx_tokens())
        return (*of_another_version(self.case), *not_loaded(self.case), *beyond, *self._of_an_assumed_host())

    def _of_an_assumed_host(self) -> tuple[str, ...]:
        host, short = self.machine.host, self.memory.short()
        counts = self.case.layout.host_planes or any(memory in short for memory in self.memory.host())
        if not counts or not host.is_assumed:
            return ()
        return (f"{format_bytes(host.memory.value)} of host memory are assumed: --ram sets what is there",)

    def rung_of(self, rate: str) -> Rung:
        """On what a rate stands."""
        return self.rungs.get(rate, "measured")

    def standing(self) -> dict[Rung, tuple[str, ...]]:
        """Kernels whose rates the answer uses, by rung, lowest last; of roofs alone nothing is said."""
        found: dict[Rung, dict[str, None]] = {rung: {} for rung in RUNGS}
        for name in self.sources:
            key, mark, _ = name.partition("#")
            if mark:
                found[self.rung_of(name)][key] = None
        return {rung: tuple(keys) for rung, keys in found.items() if keys}

    @property
    def kernel(self) -> str:
        """Key of the kernel whose rates a decode step reads the cache at; empty where no step is predicted."""
        used = (name.partition("#")[0] for name in self.sources if name.startswith(DECODE_READS))
        return next(used, "") if self.decode else ""

    @property
    def kernel_rung(self) -> Rung | None:
        """On what that kernel's rates stand; None where no step is predicted."""
        return next((rung for rung, keys in self.standing().items() if self.kernel in keys), None)

    @property
    def kernel_rate(self) -> Provenance | None:
        """Where the rates of that kernel are from."""
        return next((rate for name, rate in self.sources.items() if self.kernel == name.partition("#")[0]), None)


def predict(question: Question, profile: HardwareProfile | None = None) -> Prediction:
    """Answer `question`, on `profile` if given and on the machine that it names otherwise.

    Raises UnknownName, BadValue, Impossible or BadFile, and with `strict` MissingRate. Not fitting is an answer, not an
    error, and so is a rate that neither the machine nor any other has: the phase that needs it is left out, and
    `not_predicted` says why.
    """
    case, machine = settled(question, profile)
    plan = plan_memory(case, machine)
    roofs = roofs_of(machine, strict=False)
    not_predicted: dict[str, str] = {}
    decode, prefill = _breakdowns(case, roofs, not_predicted) if plan.fits else (None, None)
    ttft = _first_token(case, roofs, decode, prefill) if prefill else None
    used = sorted({rate for breakdown in (decode, prefill) if breakdown for rate in breakdown.sensitivity()})
    if question.strict:
        refuse_borrowed(roofs)
    break_even = None
    if decode and case.speculation is not None:
        break_even = decode.seconds / decode_breakdown(replace(case, speculation=None), roofs).seconds
    prompt = question.batch * (question.ctx_tokens - case.cached_tokens)
    return Prediction(
        case=case,
        machine=machine,
        memory=plan,
        decode=_phase(decode, roofs, tokens=tokens_per_step(case)) if decode else None,
        prefill=_phase(prefill, roofs, tokens=prompt) if prefill else None,
        ttft_s=_seconds(ttft, roofs) if ttft else None,
        break_even=break_even,
        not_predicted=not_predicted,
        assumptions=assumptions_of(case, machine, extrapolated=tuple(sorted(roofs.extrapolated))),
        sources={name: roofs.rates[name] for name in used},
        rungs={name: roofs.rungs[name] for name in used if name in roofs.rungs},
    )


def refuse_borrowed(roofs: Roofs) -> None:
    """MissingRate with each kernel that was asked for and not measured on the machine, and its rung."""
    borrowed = {name.partition("#")[0]: rung for name, rung in roofs.rungs.items() if "#" in name}
    if borrowed:
        told = ", ".join(f"{key} ({rung})" for key, rung in sorted(borrowed.items()))
        hint = "without --strict they are borrowed, with wider intervals; twin calibrate measures them"
        raise MissingRate(f"not measured on {roofs.profile.name}: {told}", hint=hint)


def _breakdowns(case: Case, roofs: Roofs, not_predicted: dict[str, str]) -> tuple[Breakdown | None, Breakdown | None]:
    """Decode step and prefill, each unless the machine lacks a rate of it, which `not_predicted` is told."""
    found: list[Breakdown | None] = []
    for name, phase in (("decode", decode_breakdown), ("prefill", prefill_breakdown)):
        try:
            found.append(phase(case, roofs))
        except MissingRate as wrong:
            found.append(None)
            not_predicted[name] = wrong.message
    return found[0], found[1]


def decode_breakdown(case: Case, roofs: Roofs) -> Breakdown:
    """One decode step after `ctx_tokens` cached tokens; under speculation a draft and a verify step, on average."""
    return decode_breakdown_of(case, roofs, case.question.ctx_tokens, case.question.batch)


def decode_breakdown_of(case: Case, roofs: Roofs, kv_tokens: int, batch: int) -> Breakdown:
    """The same for `batch` sequences of `kv_tokens` cached tokens each."""
    speculation, split = case.speculation, roofs.profile.stages(case.tp)
    step = Step(kv_tokens=kv_tokens, q_tokens=1, batch=batch)
    if speculation is None:
        return Breakdown().run(lower.decode_program(case, step, split), roofs)
    whole = Breakdown().run(lower.draft_program(case, speculation, step, lower.last_device(split)), roofs)
    for kind in speculation.steps:
        verify = replace(step, q_tokens=kind.query_tokens)
        whole.add(Breakdown().run(lower.decode_program(case, verify, split), roofs), times=kind.share)
    return whole


def tokens_per_step(case: Case) -> float:
    """Tokens that a decode step yields over all sequences."""
    return case.question.batch * (case.speculation.accepted if case.speculation else 1.0)


def _first_token(case: Case, roofs: Roofs, decode: Breakdown | None, prefill: Breakdown) -> Breakdown | None:
    """A prefill and the first decode step, or the last token's logits where prefill covers the whole prompt.

    None where the machine lacks a rate of either, which decode's reason names.
    """
    if not case.rules.unprefilled_tokens:
        try:
            split = roofs.profile.stages(case.tp)
            decode = Breakdown().run(lower.head_program(case, case.question.batch, split), roofs)
        except MissingRate:
            return None
    return Breakdown().add(decode).add(prefill) if decode is not None else None


def prefill_breakdown(case: Case, roofs: Roofs) -> Breakdown:
    """A prefill of `ctx_tokens` prompt tokens, from the chunks that its shape needs."""
    prompt = case.question.ctx_tokens
    chunks: dict[int, Breakdown] = {}
    fetches: dict[int, Breakdown] = {}  # by new tokens: what is fetched does not depend on the position

    def seconds(index: int) -> float:
        if index not in chunks:
            chunk = chunk_at(case, prompt, index)
            if chunk.q_tokens not in fetches:
                fetches[chunk.q_tokens] = Breakdown().run(lower.prefetch_program(case, chunk), roofs)
            chunks[index] = chunk_breakdown(case, chunk, roofs, fetch=fetches[chunk.q_tokens])
        return chunks[index].seconds

    weights: Weights = sample(case, prompt, seconds)
    whole = Breakdown().run(lower.load_program(case), roofs)
    for index, times in sorted(weights.items()):
        seconds(index)
        whole.add(chunks[index], times)
    return whole


def chunk_breakdown(case: Case, chunk: Step, roofs: Roofs, *, fetch: Breakdown | None = None) -> Breakdown:
    """One prefill chunk; of what is `fetch`ed beside it (n-gram rows unless given), only what sticks out is added."""
    if fetch is None:
        fetch = Breakdown().run(lower.prefetch_program(case, chunk), roofs)
    split = roofs.profile.stages(case.tp)
    work = Breakdown().run(lower.prefill_program(case, chunk, split), roofs)
    if case.speculation is not None:
        work.run(lower.draft_prefill_program(case, case.speculation, chunk, lower.last_device(split)), roofs)
    if fetch.seconds <= work.seconds:
        return work
    return work.add(fetch, times=1 - work.seconds / fetch.seconds)


def _phase(breakdown: Breakdown, roofs: Roofs, *, tokens: float) -> Phase:
    seconds, tokens_per_s = _seconds(breakdown, roofs), NOTHING
    if seconds.value:
        tokens_per_s = Quantity(tokens / seconds.value, tokens / seconds.high, tokens / seconds.low)
    return Phase(
        seconds=seconds,
        tokens_per_s=tokens_per_s,
        floor_s=breakdown.floor_s(),
        naive_s=breakdown.naive_s(),
        bound=breakdown.bound(),
        parts=breakdown.parts(),
        link_bytes=round(breakdown.link_bytes),
        link_write_bytes=round(breakdown.link_write_bytes),
        busy_s={engine.value: busy for engine, busy in sorted(breakdown.busy_s().items())},
    )


def _seconds(breakdown: Breakdown, roofs: Roofs) -> Quantity:
    """Log-normal interval from the spread of every rate, never below the physical floor."""
    value = breakdown.seconds
    if value == 0:
        return NOTHING
    factor = math.exp(Z90 * breakdown.spread_s(roofs) / value)
    return Quantity(value, max(value / factor, min(breakdown.floor_s(), value)), value * factor)
