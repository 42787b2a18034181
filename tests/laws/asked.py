"""Asking without fuss: predictions that fit, or the example is passed over."""

from hypothesis import assume

from hwprofiles import HardwareProfile
from twin.ask.question import Question
from twin.errors import TwinError
from twin.prediction import Phase, Prediction, predict


def answered(question: Question, machine: HardwareProfile) -> Prediction:
    """A prediction that fits."""
    try:
        prediction = predict(question, machine)
    except TwinError:
        prediction = None
    assume(prediction is not None and prediction.fits)
    assert prediction is not None
    return prediction


def phases(prediction: Prediction) -> tuple[Phase, Phase]:
    """Decode and prefill of a prediction that fits."""
    assert prediction.decode is not None
    assert prediction.prefill is not None
    return prediction.decode, prediction.prefill


def decode_s(question: Question, machine: HardwareProfile) -> float:
    return phases(answered(question, machine))[0].seconds.value


def prefill_s(question: Question, machine: HardwareProfile) -> float:
    return phases(answered(question, machine))[1].seconds.value


ROUNDING = 1e-9
SAMPLING = 1e-3
"""A prefill is summed from few of its chunks, to within this share."""


def no_less(after: float, before: float, *, within: float = ROUNDING) -> bool:
    return after >= before * (1 - within)
