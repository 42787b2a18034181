"""What must hold for every question on every machine: only refusals, sane numbers, never faster than physics."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles import HardwareProfile
from tests.laws.asked import answered, phases
from tests.laws.drawn import machines, numbers_in, questions, with_spreads
from tests.laws.floors import decode_floor_s, prefill_floor_s
from tests.worlds import LAWS
from twin.ask.question import Question
from twin.errors import TwinError
from twin.prediction import Quantity, predict
from twin.render.as_json import prediction_json

MANY = settings(LAWS, max_examples=120)
ROUNDING = 1e-9
SAMPLING = 1e-3
"""A prefill is summed from few of its chunks, to within this share."""


def wide(quantity: Quantity) -> float:
    return quantity.high - quantity.low


@MANY
@given(questions(), machines())
def test_a_question_is_answered_or_refused_and_every_number_is_finite_and_not_negative(
    question: Question, machine: HardwareProfile
) -> None:
    try:
        prediction = predict(question, machine)
    except TwinError:
        return
    document = json.loads(json.dumps(prediction_json(prediction), allow_nan=False))
    for path, number in numbers_in(document):
        assert math.isfinite(number), path
        assert number >= 0, path


@MANY
@given(questions(), machines(roomy=True))
def test_parts_add_up_and_values_lie_inside_their_intervals(question: Question, machine: HardwareProfile) -> None:
    prediction = answered(question, machine)
    decode, prefill = phases(prediction)
    for phase in (decode, prefill):
        assert sum(part.seconds for part in phase.parts) == pytest.approx(phase.seconds.value, rel=ROUNDING)
        assert phase.floor_s <= phase.naive_s * (1 + ROUNDING)
        assert phase.floor_s <= phase.seconds.low * (1 + ROUNDING)
        for quantity in (phase.seconds, phase.tokens_per_s):
            assert quantity.low <= quantity.value <= quantity.high
    first = prediction.ttft_s
    assert first is not None
    assert first.low <= first.value <= first.high
    assert first.value == pytest.approx(decode.seconds.value + prefill.seconds.value, rel=ROUNDING)


@MANY
@given(questions(), machines(roomy=True))
def test_no_prediction_is_faster_than_datasheet_peaks_allow(question: Question, machine: HardwareProfile) -> None:
    prediction = answered(question, machine)
    decode, prefill = phases(prediction)
    for bound_s in (decode.seconds.low, decode.floor_s):
        assert bound_s >= decode_floor_s(prediction) * (1 - ROUNDING)
    for bound_s in (prefill.seconds.low, prefill.floor_s):
        assert bound_s >= prefill_floor_s(prediction) * (1 - SAMPLING)


@LAWS
@given(questions(), machines())
def test_the_same_question_has_the_same_answer(question: Question, machine: HardwareProfile) -> None:
    try:
        answers = [json.dumps(prediction_json(predict(question, machine))) for _ in range(2)]
    except TwinError:
        return
    assert answers[0] == answers[1]


@LAWS
@given(questions(), machines(roomy=True), st.floats(1.01, 10))
def test_wider_spreads_widen_every_interval(question: Question, machine: HardwareProfile, factor: float) -> None:
    sure, unsure = answered(question, machine), answered(question, with_spreads(machine, factor))
    for before, after in zip(phases(sure), phases(unsure), strict=True):
        assert after.seconds.value == before.seconds.value
        assert after.seconds.high >= before.seconds.high
        assert after.seconds.low <= before.seconds.low
        assert wide(after.tokens_per_s) >= wide(before.tokens_per_s)
    assert sure.memory.max_ctx_tokens() == unsure.memory.max_ctx_tokens()


@LAWS
@given(questions(), machines(roomy=True))
def test_without_spreads_an_interval_is_a_point(question: Question, machine: HardwareProfile) -> None:
    for phase in phases(answered(question, with_spreads(machine, 0.0))):
        assert wide(phase.seconds) <= ROUNDING * phase.seconds.value


@MANY
@given(questions(), machines())
def test_the_longest_context_fits_and_one_token_more_does_not(question: Question, machine: HardwareProfile) -> None:
    try:
        plan = predict(question, machine).memory
    except TwinError:
        return
    longest = plan.max_ctx_tokens()
    page = plan.page_tokens
    assert longest % page == 0
    pages = longest // page
    if longest:
        assert all(pool.used_bytes(pages) <= pool.capacity_bytes * (1 + 1e-12) for pool in plan.memories)
    if longest + page <= 2**31:
        assert any(pool.used_bytes(pages + 1) > pool.capacity_bytes for pool in plan.memories)
    assert plan.fits == (plan.pages * page <= longest) or longest + page > 2**31
