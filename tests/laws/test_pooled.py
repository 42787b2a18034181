"""Laws of dense models on an engine with a pool of blocks: more work takes no less time, and drafting pays its way."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.laws.asked import ROUNDING, SAMPLING, answered, decode_s, first_s, no_less, phases, prefill_s
from tests.laws.pooled import DENSE, DRAFTERS, FLAT, H200, LONGEST, RTX3090, dense_questions, hybrid_questions
from tests.worlds import LAWS, step
from twin.ask.question import Question
from twin.ask.resolve import resolve, settled
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.operations.lower import decode_program
from twin.prediction import decode_breakdown_of

FEW = settings(LAWS, max_examples=40)
WHOLE_TILE = 16
"""Query tokens of one tile: up to it products cost the same."""


@LAWS
@given(hybrid_questions(drafters=DRAFTERS), st.floats(0, 1))
def test_a_higher_acceptance_gives_more_tokens_a_second(question: Question, share: float) -> None:
    assert question.speculation is not None
    assert question.accepted is not None
    most = 1 + int(question.speculation.split(":")[1])
    better = replace(question, accepted=question.accepted + share * (most - question.accepted))
    before, after = (phases(answered(each, RTX3090))[0] for each in (question, better))
    assert no_less(after.tokens_per_s.value, before.tokens_per_s.value)


@LAWS
@given(hybrid_questions(drafters=(None,)), st.integers(1, 64), st.integers(1, 64), st.sampled_from(["flat", "shipped"]))
def test_a_step_of_more_query_tokens_takes_longer(question: Question, one: int, other: int, machine: str) -> None:
    """With kernels of one efficiency always; with the shipped curves up to a tile of rows, where products pay."""
    if machine == "shipped":
        assume(max(one, other) * question.batch <= WHOLE_TILE)
    case, roofs = resolve(question), Roofs(FLAT if machine == "flat" else RTX3090)
    steps = [step(question.ctx_tokens, rows, batch=question.batch) for rows in sorted((one, other))]
    few, many = (Breakdown().run(decode_program(case, each, 1), roofs).seconds for each in steps)
    assert no_less(many, few)


@FEW
@given(hybrid_questions(), st.integers(1, LONGEST), st.integers(1, 100))
def test_a_longer_context_or_a_larger_batch_takes_longer(question: Question, more: int, sequences: int) -> None:
    question = replace(question, cached_tokens=0)
    longer = replace(question, ctx_tokens=question.ctx_tokens + more)
    larger = replace(question, batch=question.batch + sequences)
    assert no_less(decode_s(longer, FLAT), decode_s(question, FLAT))
    assert no_less(prefill_s(longer, FLAT), prefill_s(question, FLAT), within=SAMPLING)
    assert no_less(decode_s(larger, FLAT), decode_s(question, FLAT))


AS_MEASURED = 0.01
"""Products of one and of two tokens on the H200: the calibrated points themselves fall by 0.7 %."""
SIZES = st.integers(1, 80) | st.integers(1, 5000)


@LAWS
@given(hybrid_questions(drafters=(None,)) | dense_questions(), SIZES, SIZES)
def test_a_larger_batch_never_takes_less_time_on_a_shipped_machine(question: Question, one: int, other: int) -> None:
    """Its kernels grow more efficient with their size: interpolated between tiles, a fuller one took less time."""
    machine, within = (H200, AS_MEASURED) if question.model == DENSE else (RTX3090, ROUNDING)
    (case, there), batches = settled(question, machine), sorted((min(one, 1000), min(other, 1000)))
    roofs = Roofs(there, strict=False)
    few, many = (decode_breakdown_of(case, roofs, question.ctx_tokens, batch).seconds for batch in batches)
    assert no_less(many, few, within=within)


@LAWS
@given(hybrid_questions(drafters=(None,), batch=1) | dense_questions(batch=1), SIZES, SIZES)
def test_a_longer_prompt_never_takes_less_time_on_a_shipped_machine(question: Question, one: int, other: int) -> None:
    machine, within = (H200, AS_MEASURED) if question.model == DENSE else (RTX3090, ROUNDING)
    asked = replace(question, cached_tokens=0, prefix_caching=False)
    short, long = (answered(replace(asked, ctx_tokens=tokens), machine) for tokens in sorted((one, other)))
    assert no_less(first_s(long), first_s(short), within=within)
    for after, before in zip(phases(long), phases(short), strict=True):
        assert no_less(after.seconds.value, before.seconds.value, within=within)


@FEW
@given(hybrid_questions(prefix_caching=True), st.integers(0, LONGEST), st.integers(0, LONGEST))
def test_the_first_token_comes_no_later_the_more_of_the_prompt_is_cached(
    question: Question, one: int, other: int
) -> None:
    """Decoding does not notice."""
    tokens = sorted(min(each, question.ctx_tokens) for each in (one, other))
    cold, warm = (answered(replace(question, cached_tokens=cached), FLAT) for cached in tokens)
    assert no_less(first_s(cold), first_s(warm), within=SAMPLING)
    assert phases(cold)[0].seconds == phases(warm)[0].seconds
