"""Numbers and words of a question: inside their range nothing is said, outside it one line is."""

import math
from typing import Any

import pytest

from twin.ask.question import CHOICES, LANES, MAX_BATCH, Question, check_numbers
from twin.errors import EXIT_BAD_INPUT, BadValue
from twin.units import MAX_TOKENS

TOKENS_RANGE = "is outside the range of 1 to 2,147,483,647 tokens"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ctx_tokens": 2**31}, f"context 2147483648 {TOKENS_RANGE}"),
    ({"ctx_tokens": True}, f"context True {TOKENS_RANGE}"),
    ({"ctx_tokens": 2.0}, f"context 2.0 {TOKENS_RANGE}"),
    ({"cached_tokens": -1}, "cached prefix -1 is outside the range of 0 to 1,000 tokens"),
    ({"cached_tokens": 1001}, "cached prefix 1001 is outside the range of 0 to 1,000 tokens"),
    ({"chunk_tokens": 2**31}, f"chunk 2147483648 {TOKENS_RANGE}"),
    ({"max_model_tokens": 0}, f"longest request 0 {TOKENS_RANGE}"),
    ({"max_model_tokens": 1.5}, f"longest request 1.5 {TOKENS_RANGE}"),
    ({"lanes": 3}, "3 PCIe lanes"),
    ({"lanes": True}, "True PCIe lanes"),
    ({"gpus": 0}, "number of devices 0 is outside the range of 1 to 1,024 devices"),
    ({"gpus": 2.0}, "number of devices 2.0 is outside the range of 1 to 1,024 devices"),
    ({"pcie_generation": 7}, "PCIe generation 7 is outside the range of 1 to 6"),
    ({"ram_bytes": 0}, "host memory 0 is outside the range of 1 to 1,125,899,906,842,624 bytes"),
    ({"vram_free_bytes": -1}, "free VRAM -1 is outside the range of 1 to 1,125,899,906,842,624 bytes"),
    ({"utilisation": 1.001}, "utilisation 1.001 is outside the range above 0 and up to 1"),
    ({"utilisation": math.inf}, "utilisation inf is outside the range above 0 and up to 1"),
    ({"accepted": math.inf}, "accepted tokens inf is not a number"),
    *(({field: "?"}, f"{field.replace('_', ' ')} '?' is not known") for field in CHOICES),
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


INSIDE: list[dict[str, Any]] = [
    {"ctx_tokens": MAX_TOKENS, "max_model_tokens": MAX_TOKENS, "chunk_tokens": MAX_TOKENS},
    {"batch": MAX_BATCH, "max_sequences": MAX_BATCH, "cached_tokens": 0, "utilisation": 1e-9},
    dict.fromkeys(("ctx_tokens", "batch", "max_sequences", "chunk_tokens", "max_model_tokens"), 1),
    {"cached_tokens": 1000, "utilisation": 1.0},
    {"accepted": 0.0},  # what a drafter may yield is checked where the drafter is known
    *({"lanes": lanes} for lanes in LANES),
    {"gpus": 1024, "pcie_generation": 6, "ram_bytes": 2**50, "vram_free_bytes": 1},
    *({field: word} for field, words in CHOICES.items() for word in words),
]


@pytest.mark.parametrize("asked", INSIDE)
def test_the_ends_of_every_range_are_inside(asked: dict[str, Any]) -> None:
    check_numbers(ask(**asked))
