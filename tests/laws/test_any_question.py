"""What must hold for every question on every machine: only refusals, sane numbers, never faster than physics."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from tests.laws import floors, pooled
from tests.laws.asked import ROUNDING, SAMPLING, answered, decode_s, no_less, phases, prefill_s
from tests.laws.drawn import machines, numbers_in, questions, rate_paths, slower, with_spreads
from tests.twin.memory.pool_worlds import RTX3090
from tests.worlds import LAWS
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.errors import TwinError
from twin.memory.plan import MemoryPlan, plan_memory
from twin.prediction import Quantity, predict
from twin.render.as_json import prediction_json
from twin.units import GIB, MAX_TOKENS

MANY = settings(LAWS, max_examples=120)
ANYWHERE = pooled.anywhere()
Asked = tuple[Question, HardwareProfile]


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
@given(ANYWHERE)
def test_parts_add_up_and_values_lie_inside_their_intervals(asked: Asked) -> None:
    prediction = answered(*asked)
    assert prediction == predict(*asked)  # the same question has the same answer
    decode, prefill = phases(prediction)
    for phase in (decode, prefill):
        assert sum(part.seconds for part in phase.parts) == pytest.approx(phase.seconds.value, rel=ROUNDING)
        assert all(0 <= part.sol_s <= part.seconds * (1 + ROUNDING) for part in phase.parts)
        assert phase.floor_s <= phase.naive_s * (1 + ROUNDING)
        assert phase.floor_s <= phase.seconds.low * (1 + ROUNDING)
        for quantity in (phase.seconds, phase.tokens_per_s):
            assert quantity.low <= quantity.value <= quantity.high
        if prediction.case.layout.name == "vram":
            assert phase.link_bytes == phase.link_write_bytes == 0
    first = prediction.ttft_s
    assert first is not None
    assert first.low <= first.value <= first.high
    if prediction.case.rules.unprefilled_tokens:
        assert first.value == pytest.approx(decode.seconds.value + prefill.seconds.value, rel=ROUNDING)
    else:
        assert first.value >= prefill.seconds.value
    used = {rate for phase in (decode, prefill) for part in phase.parts for rate in part.rates}
    assert used == prediction.sources.keys()


@settings(LAWS, max_examples=240)
@given(ANYWHERE)
def test_no_prediction_is_faster_than_datasheet_peaks_allow(asked: Asked) -> None:
    prediction = answered(*asked)
    decode, prefill = phases(prediction)
    for bound_s in (decode.seconds.low, decode.floor_s):
        assert bound_s >= floors.decode_floor_s(prediction) * (1 - ROUNDING)
    for bound_s in (prefill.seconds.low, prefill.floor_s):
        assert bound_s >= floors.prefill_floor_s(prediction) * (1 - SAMPLING)


@MANY
@given(ANYWHERE, st.floats(1.01, 10))
def test_wider_spreads_widen_every_interval_and_without_any_it_is_a_point(asked: Asked, factor: float) -> None:
    """What is borrowed from other machines keeps a spread of its own."""
    question, machine = asked
    none, sure, unsure = (answered(question, with_spreads(machine, times)) for times in (0.0, 1.0, factor))
    for point, before, after in zip(*map(phases, (none, sure, unsure)), strict=True):
        assert none.rungs or wide(point.seconds) <= ROUNDING * point.seconds.value
        assert after.seconds.value == before.seconds.value
        assert after.seconds.low <= before.seconds.low <= before.seconds.high <= after.seconds.high
        assert wide(after.tokens_per_s) >= wide(before.tokens_per_s)
    assert sure.memory.max_ctx_tokens() == unsure.memory.max_ctx_tokens()


@MANY
@given(ANYWHERE, st.floats(0, 1), st.sampled_from((0.5, 0.9, 0.999)))
def test_a_slower_rate_never_makes_a_prediction_faster(asked: Asked, which: float, share: float) -> None:
    question, machine = asked
    paths = rate_paths(machine)
    hampered = slower(machine, paths[round(which * (len(paths) - 1))], share)
    assert no_less(decode_s(question, hampered), decode_s(question, machine))
    assert no_less(prefill_s(question, hampered), prefill_s(question, machine), within=SAMPLING)


POOLED = st.tuples(
    pooled.pool_questions() | pooled.pool_questions(pool_bytes=3 * GIB) | pooled.pool_questions(pool_bytes=30 * GIB),
    st.just(RTX3090),
)


@settings(LAWS, max_examples=240)
@given(st.tuples(questions(), machines()) | POOLED, st.integers(1, MAX_TOKENS))
def test_the_longest_context_fits_and_one_token_more_does_not_whatever_was_asked(asked: Asked, other: int) -> None:
    """Buffers are sized for the longest request, which is the one asked about unless the engine is told another."""
    question, machine = asked

    def planned(**changes: Any) -> MemoryPlan:
        return plan_memory(*settled(replace(question, **changes), machine))

    plan = planned()
    longest = plan.max_ctx_tokens()
    assert plan.fits == (longest >= question.ctx_tokens) == (not plan.shortage())
    if longest:
        there = planned(ctx_tokens=longest)
        assert there.fits
        for memory in there.memories:
            assert memory.used_bytes(there.pages) <= memory.capacity_bytes * (1 + 1e-12)
    if longest < MAX_TOKENS:
        assert not planned(ctx_tokens=longest + 1).fits
    elsewhere = planned(ctx_tokens=other)
    for sigmas in (-1.6, 0.0, 1.6):
        assert elsewhere.max_ctx_tokens(sigmas=sigmas) == plan.max_ctx_tokens(sigmas=sigmas)
    assert elsewhere.limit().name == plan.limit().name
