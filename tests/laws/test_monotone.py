"""More work never takes less time; two effects are physics, not errors, and no example is drawn that meets them.

- Below the sparse threshold everything is read, above it the best 512 blocks of 4 tokens and the open block. That grows
  by a token at each step, then closes and competes like the others: decode time is a saw of four teeth over a rising
  line, monotone on contexts of the same remainder. Across the threshold a step may get faster by the three tokens that
  it no longer reads, but never faster than a dense step over as many tokens as the selection holds.
- A kernel whose efficiency grows with its size may do more work in less time. Laws about size are drawn on machines
  whose kernels are equally efficient at every size.
"""

from itertools import pairwise
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from tests.laws.asked import ROUNDING, SAMPLING, answered, decode_s, no_less, phases, prefill_s
from tests.laws.drawn import LONG_TOKENS, THRESHOLD, contexts, machines, questions
from tests.worlds import LAWS
from twin.ask.question import LANES, MAX_BATCH, Question
from twin.prediction import predict

MANY = settings(LAWS, max_examples=150)
FLAT = machines(flat=True, roomy=True)
RATIO = 4


@MANY
@given(questions(longest=LONG_TOKENS), FLAT, contexts(longest=LONG_TOKENS), st.sampled_from((decode_s, prefill_s)))
def test_a_longer_context_takes_longer_on_either_side_of_the_sparse_threshold(
    question: Question, machine: HardwareProfile, more: int, seconds: Any
) -> None:
    """The last token of a prompt belongs to the first decode step."""
    left = THRESHOLD - question.ctx_tokens + (1 if seconds is prefill_s else -1)
    grid = RATIO if seconds is decode_s else 1
    more = min(more, left) if left >= 0 else grid * more
    assume(more > 0)
    longer = replace(question, ctx_tokens=question.ctx_tokens + more)
    assert no_less(seconds(longer, machine), seconds(question, machine), within=SAMPLING if grid == 1 else ROUNDING)


@LAWS
@given(questions(longest=LONG_TOKENS), FLAT)
def test_a_sparse_step_is_no_faster_than_a_dense_one_over_its_budget(
    question: Question, machine: HardwareProfile
) -> None:
    assume(question.ctx_tokens >= THRESHOLD)
    budget = replace(question, ctx_tokens=2047)
    assert no_less(decode_s(question, machine), decode_s(budget, machine))


@settings(LAWS, max_examples=100)
@given(questions(longest=LONG_TOKENS), machines(), contexts(longest=LONG_TOKENS), st.integers(1, 100))
def test_a_longer_context_or_a_larger_batch_takes_no_less_of_any_memory_but_staging(
    question: Question, machine: HardwareProfile, more: int, sequences: int
) -> None:
    short = predict(question, machine).memory
    long = predict(replace(question, ctx_tokens=question.ctx_tokens + more), machine).memory
    for before, after in zip(short.memories, long.memories, strict=True):
        assert after.used_bytes(long.pages) >= before.used_bytes(short.pages)
    assert short.max_ctx_tokens() == long.max_ctx_tokens()
    assert short.fits or not long.fits
    larger = replace(question, batch=question.batch + sequences)
    if larger.batch > MAX_BATCH or question.prefill == "staged":
        return
    many = predict(larger, machine).memory
    for before, after in zip(short.memories, many.memories, strict=True):
        staging = before.fixed.get("staging", 0.0) - after.fixed.get("staging", 0.0)
        assert no_less(after.used_bytes(many.pages), before.used_bytes(short.pages) - staging)
    if question.layout == "vram" or question.batch > 1:
        assert many.max_ctx_tokens() <= short.max_ctx_tokens()


@MANY
@given(questions(longest=LONG_TOKENS), FLAT, st.integers(1, 100))
def test_a_larger_batch_takes_longer(question: Question, machine: HardwareProfile, more: int) -> None:
    larger = replace(question, batch=question.batch + more)
    assume(larger.batch <= MAX_BATCH)
    assert no_less(decode_s(larger, machine), decode_s(question, machine))
    if question.layout == "vram" or question.batch > 1:  # one offloaded sequence is staged, several are not
        assert no_less(prefill_s(larger, machine), prefill_s(question, machine), within=SAMPLING)


@LAWS
@given(questions(longest=LONG_TOKENS), machines(roomy=True))
def test_fewer_lanes_are_never_faster(question: Question, machine: HardwareProfile) -> None:
    asked = [phases(answered(replace(question, lanes=lanes), machine)) for lanes in sorted(LANES, reverse=True)]
    for (decode, prefill), (narrow_decode, narrow_prefill) in pairwise(asked):
        assert no_less(narrow_decode.seconds.value, decode.seconds.value)
        assert no_less(narrow_prefill.seconds.value, prefill.seconds.value, within=SAMPLING)
