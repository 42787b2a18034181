"""Asking without fuss: predictions that fit, or the example is passed over."""

from collections.abc import Callable
from functools import partial

from hypothesis import assume, reject

from hwprofiles import HardwareProfile
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import TwinError
from twin.memory.plan import plan_memory
from twin.prediction import Phase, Prediction, decode_breakdown, predict, prefill_breakdown


def answered(question: Question, machine: HardwareProfile) -> Prediction:
    """A prediction that fits."""
    try:
        prediction = predict(question, machine)
    except TwinError:
        reject()
    assume(prediction.fits)
    return prediction


def seconds(question: Question, machine: HardwareProfile, phase: Callable[[Case, Roofs], Breakdown]) -> float:
    """Of one phase of a prediction that fits, without the work of the other."""
    try:
        case, there = settled(question, machine)
        assume(plan_memory(case, there).fits)
        return phase(case, Roofs(there, strict=False)).seconds
    except TwinError:
        reject()


decode_s = partial(seconds, phase=decode_breakdown)
prefill_s = partial(seconds, phase=prefill_breakdown)


def phases(prediction: Prediction) -> tuple[Phase, Phase]:
    """Decode and prefill of a prediction that fits."""
    assert prediction.decode is not None
    assert prediction.prefill is not None
    return prediction.decode, prediction.prefill


def first_s(prediction: Prediction) -> float:
    """Seconds to the first token."""
    assert prediction.ttft_s is not None
    return prediction.ttft_s.value


ROUNDING = 1e-9
SAMPLING = 1e-3
"""A prefill is summed from few of its chunks, to within this share."""


def no_less(after: float, before: float, *, within: float = ROUNDING) -> bool:
    return after >= before * (1 - within)
