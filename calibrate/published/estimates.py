"""What a published row is compared with: a predicted value, its 90 % interval and the usual estimate beside it."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from hwprofiles import HardwareProfile
from hwprofiles.rates import Provenance
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import machine_of, on_machine, resolve
from twin.errors import TwinError
from twin.memory.plan import MemoryPlan, plan_memory
from twin.prediction import Z90, Phase, Prediction, Quantity, predict

_Part = TypeVar("_Part")


class NoAnswer(TwinError):
    """The twin says that what somebody ran does not fit: a wrong answer, shown as a row outside its tolerance."""


class Load(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that all arrive at once, alike."""

    requests: Annotated[int, Meta(ge=1, le=10**6)]
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**31)]
    output_tokens: Annotated[int, Meta(ge=1, le=2**31)]


class Asked(Struct, frozen=True, kw_only=True):
    """A figure's question, what it is set against (a drop needs two), the workload of a served one, the machine."""

    question: Question
    profile: HardwareProfile
    against: Question | None = None
    workload: Load | None = None
    intervals: bool = True
    """Whether an interval that costs simulations of its own is wanted."""

    @property
    def case(self) -> Case:
        """The question with names resolved."""
        return on_machine(resolve(self.question), self.profile)

    @property
    def machine(self) -> HardwareProfile:
        """The machine as the question has it: so many of its device, on such a link."""
        return machine_of(self.case, self.profile)

    @property
    def memory(self) -> MemoryPlan:
        """The question's memory, whether it fits or not."""
        case = self.case
        return plan_memory(case, machine_of(case, self.profile))

    @property
    def answer(self) -> "Answer":
        """The twin's prediction of times."""
        return answer(self.question, self.profile)


class Estimate(Struct, frozen=True, kw_only=True):
    """A prediction in the unit of its figure."""

    value: float
    low: float
    high: float
    """Equal to `low` and `value` where the figure is a count: it has no interval."""
    naive: float | None = None
    """The usual estimate; None where there is none."""
    also: dict[str, float] = field(default_factory=dict)
    """What else the twin says here, by a name that ends in its unit."""

    def converted(self, convert: Callable[[float], float], *, also: Mapping[str, float] | None = None) -> "Estimate":
        """The same in another unit; `convert` keeps the order of numbers."""
        naive = None if self.naive is None else convert(self.naive)
        value, low, high = map(convert, (self.value, self.low, self.high))
        return Estimate(value=value, low=low, high=high, naive=naive, also=dict(also or self.also))


class Answer(Struct, frozen=True, kw_only=True):
    """A prediction whose phases are asked for one by one: NoAnswer where the twin has none."""

    prediction: Prediction

    @property
    def decode(self) -> Phase:
        """The decode step."""
        return self._there(self.prediction.decode)

    @property
    def prefill(self) -> Phase:
        """The prefill."""
        return self._there(self.prediction.prefill)

    @property
    def ttft_s(self) -> Quantity:
        """Time to the first token."""
        return self._there(self.prediction.ttft_s)

    def _there(self, part: _Part | None) -> _Part:
        if part is not None:
            return part
        ctx_tokens, memory = self.prediction.case.question.ctx_tokens, self.prediction.memory
        if not self.prediction.fits:
            raise NoAnswer(f"{ctx_tokens:,} tokens do not fit: {memory.shortage()}")
        raise NoAnswer("; ".join(self.prediction.missing))


def answer(question: Question, profile: HardwareProfile) -> Answer:
    """The twin's prediction of times."""
    return Answer(prediction=predict(question, profile))


def count(value: float, *, also: Mapping[str, float] | None = None) -> Estimate:
    """A figure that follows from shapes alone: no rate, no interval, and nobody estimates it otherwise."""
    return Estimate(value=value, low=value, high=value, also=dict(also or {}))


def within_spread(value: float, spread: float, *, naive: float | None = None) -> Estimate:
    """A value whose logarithm is off by `spread` (one standard deviation)."""
    factor = math.exp(Z90 * spread)
    return Estimate(value=value, low=value / factor, high=value * factor, naive=naive)


def of_part(
    phase: Phase, name: str, sources: Mapping[str, Provenance], *, unit: float, naive: float | None
) -> Estimate:
    """One part of a phase: its rates err independently, as in a whole phase. NoAnswer where the phase lacks it."""
    part = next((part for part in phase.parts if part.name == name), None)
    if part is None or not part.seconds:
        raise NoAnswer(f"the prediction has no part {name!r}")
    spread = math.sqrt(sum(sources[rate].spread ** 2 for rate in part.rates))
    return within_spread(part.seconds / unit, spread, naive=naive)


def drop(slower: Answer, faster: Answer) -> Estimate:
    """Share of its speed that decode loses from `faster` to `slower`, as a part of one.

    The two hang on the same rates, so most of an error cancels: only the difference of their shares of time counts.
    """
    ratio = faster.decode.seconds.value / slower.decode.seconds.value
    sources = {**slower.prediction.sources, **faster.prediction.sources}
    before, after = _time_shares(faster.decode), _time_shares(slower.decode)
    moved = {rate: before.get(rate, 0.0) - after.get(rate, 0.0) for rate in before.keys() | after.keys()}
    factor = math.exp(Z90 * math.sqrt(sum((share * sources[rate].spread) ** 2 for rate, share in moved.items())))
    naive = 1 - faster.decode.naive_s / slower.decode.naive_s
    return Estimate(value=1 - ratio, low=1 - ratio * factor, high=1 - ratio / factor, naive=naive)


def _time_shares(phase: Phase) -> dict[str, float]:
    """Share of a phase's time that hangs on each rate; parts that need two rates count for both."""
    shares: dict[str, float] = {}
    for part in phase.parts:
        for rate in part.rates:
            shares[rate] = shares.get(rate, 0.0) + part.seconds / phase.seconds.value
    return shares
