"""Numbers and words of a question: inside their range nothing is said, outside it one line is."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.profile import FULL_LANES
from tests.worlds import LAWS
from twin.ask.question import CHOICES, LANES, MAX_BATCH, Question, check_numbers
from twin.errors import EXIT_BAD_INPUT, BadValue
from twin.units import MAX_TOKENS

TOKENS_RANGE = "is outside the range of 1 to 2,147,483,647 tokens"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ctx_tokens": 0}, f"context 0 {TOKENS_RANGE}"),
    ({"ctx_tokens": -1}, f"context -1 {TOKENS_RANGE}"),
    ({"ctx_tokens": 2**31}, f"context 2147483648 {TOKENS_RANGE}"),
    ({"ctx_tokens": True}, f"context True {TOKENS_RANGE}"),
    ({"ctx_tokens": 2.0}, f"context 2.0 {TOKENS_RANGE}"),
    ({"batch": 0}, "batch 0 is outside the range of 1 to 4,096 sequences"),
    ({"batch": MAX_BATCH + 1}, "batch 4097 is outside the range of 1 to 4,096 sequences"),
    ({"batch": True}, "batch True is outside the range of 1 to 4,096 sequences"),
    ({"cached_tokens": -1}, "cached prefix -1 is outside the range of 0 to 1,000 tokens"),
    ({"cached_tokens": 1001}, "cached prefix 1001 is outside the range of 0 to 1,000 tokens"),
    ({"cached_tokens": 0.5}, "cached prefix 0.5 is outside the range of 0 to 1,000 tokens"),
    ({"chunk_tokens": 0}, f"chunk 0 {TOKENS_RANGE}"),
    ({"chunk_tokens": 2**31}, f"chunk 2147483648 {TOKENS_RANGE}"),
    ({"max_model_tokens": 0}, f"longest request 0 {TOKENS_RANGE}"),
    ({"max_model_tokens": 1.5}, f"longest request 1.5 {TOKENS_RANGE}"),
    ({"max_sequences": 0}, "most sequences 0 is outside the range of 1 to 4,096 sequences"),
    ({"max_sequences": 4097}, "most sequences 4097 is outside the range of 1 to 4,096 sequences"),
    ({"lanes": 3}, "3 PCIe lanes"),
    ({"lanes": 32}, "32 PCIe lanes"),
    ({"lanes": True}, "True PCIe lanes"),
    ({"utilisation": 0.0}, "utilisation 0 is outside the range above 0 and up to 1"),
    ({"utilisation": -0.5}, "utilisation -0.5 is outside the range above 0 and up to 1"),
    ({"utilisation": 1.001}, "utilisation 1.001 is outside the range above 0 and up to 1"),
    ({"utilisation": math.nan}, "utilisation nan is outside the range above 0 and up to 1"),
    ({"utilisation": math.inf}, "utilisation inf is outside the range above 0 and up to 1"),
    ({"accepted": math.nan}, "accepted tokens nan is not a number"),
    ({"accepted": math.inf}, "accepted tokens inf is not a number"),
    ({"accepted": -math.inf}, "accepted tokens -inf is not a number"),
    ({"prefill": "fast"}, "prefill 'fast' is not known"),
    ({"copies": "both"}, "copies 'both' is not known"),
    ({"pooled": "disk"}, "pooled 'disk' is not known"),
    ({"ngram": "vram"}, "ngram 'vram' is not known"),
    ({"host_pages": "2MiB"}, "host pages '2MiB' is not known"),
    ({"state_dtype": "bf16"}, "state dtype 'bf16' is not known"),
]


def ask(**asked: Any) -> Question:
    return Question(**({"ctx_tokens": 1000} | asked))


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_is_out_of_range_is_refused_in_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue) as refused:
        check_numbers(ask(**asked))
    assert str(refused.value) == message
    assert "\n" not in refused.value.hint
    assert refused.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("field", CHOICES)
def test_a_word_that_is_not_known_is_answered_with_those_that_are(field: str) -> None:
    with pytest.raises(BadValue) as refused:
        check_numbers(ask(**{field: "?"}))
    assert refused.value.hint == f"one of {', '.join(CHOICES[field])}"


def test_lanes_that_are_not_known_are_answered_with_those_that_are() -> None:
    with pytest.raises(BadValue) as refused:
        check_numbers(ask(lanes=1))
    assert refused.value.hint == "one of 16, 8, 4"


@pytest.mark.parametrize(("field", "word"), [(field, word) for field, words in CHOICES.items() for word in words])
def test_every_known_word_is_taken(field: str, word: str) -> None:
    check_numbers(ask(**{field: word}))


@pytest.mark.parametrize("field", CHOICES)
def test_a_question_has_a_field_for_every_choice_and_asks_for_none_of_them(field: str) -> None:
    assert getattr(ask(), field) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"ctx_tokens": 1},
        {"ctx_tokens": MAX_TOKENS, "max_model_tokens": MAX_TOKENS, "chunk_tokens": MAX_TOKENS},
        {"batch": MAX_BATCH, "max_sequences": MAX_BATCH},
        {"batch": 1, "max_sequences": 1, "chunk_tokens": 1, "max_model_tokens": 1},
        {"cached_tokens": 0},
        {"cached_tokens": 1000},
        {"utilisation": 1.0},
        {"utilisation": 1e-9},
        {"accepted": 0.0},  # what a drafter may yield is checked where the drafter is known
        *({"lanes": lanes} for lanes in LANES),
    ],
)
def test_the_ends_of_every_range_are_inside(asked: dict[str, Any]) -> None:
    check_numbers(ask(**asked))


def test_by_default_only_a_context_is_asked_about() -> None:
    """Every other field is what the engine, the model or nobody says."""
    silent = {"hw", "engine", "layout", "kv_dtype", "chunk_tokens", "staging_bytes", "backend", "speculation"}
    silent |= {"accepted", "task", "utilisation", "pool_bytes", "max_model_tokens", "max_sequences", *CHOICES}
    plain = msgspec.structs.asdict(ask())
    assert {plain[field] for field in silent} == {None}
    assert (plain["lanes"], plain["batch"], plain["cached_tokens"]) == (FULL_LANES, 1, 0)
    assert [plain[flag] for flag in ("patched", "promotes_windows", "async_scheduling")] == [True] * 3
    assert [plain[flag] for flag in ("what_if", "prefix_caching", "cold_start")] == [False] * 3


def test_a_question_looks_nothing_up() -> None:
    check_numbers(ask(model="nobody's", hw="nowhere", engine="none", layout="?", kv_dtype="fp61", task="any"))


@LAWS
@given(st.integers(-(2**40), 2**40))
def test_a_context_is_taken_exactly_inside_its_range(ctx_tokens: int) -> None:
    try:
        check_numbers(Question(ctx_tokens=ctx_tokens))
    except BadValue:
        assert not 1 <= ctx_tokens <= MAX_TOKENS
    else:
        assert 1 <= ctx_tokens <= MAX_TOKENS


@LAWS
@given(st.floats())
def test_a_utilisation_is_a_share_that_is_not_nothing(share: float) -> None:
    try:
        check_numbers(ask(utilisation=share))
    except BadValue:
        assert not 0 < share <= 1
    else:
        assert 0 < share <= 1
