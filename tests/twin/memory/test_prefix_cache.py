"""What a prefix cache does to a prompt: chunks of whole blocks, and the tokens that are found in it."""

from typing import Any

import pytest

from tests.twin.memory.pool_worlds import FAST, LLAMA, asked
from twin.cost.prefill import chunk_at, chunk_count, prefilled_tokens
from twin.memory.block_pool import block_plan

HUGE = {
    "model": FAST,
    "kv_dtype": "kvarn_k4v2_g128",
    "speculation": "dflash2:7",
    "accepted": 2.0,
    "prefix_caching": True,
}


@pytest.mark.parametrize(
    ("block_tokens", "question", "chunk"),
    [
        (832, {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3"}, 1664),
        (432, {"model": FAST, "kv_dtype": "bf16", "speculation": "mtp:4"}, 1728),
        (448, {"model": FAST, "kv_dtype": "bf16", "speculation": "dflash2:7"}, 1792),
        (480, {"model": FAST, "kv_dtype": "bf16", "speculation": "dflash2:15"}, 1920),
        (864, {"model": FAST, "kv_dtype": "int8_per_token_head", "speculation": "dflash2:7"}, 1728),
        (944, {"model": FAST, "kv_dtype": "int8_per_token_head", "speculation": "dflash2:15"}, 1888),
        (2048, {"model": FAST, "kv_dtype": "kvarn_k4v2_g128", "speculation": "mtp:3"}, 2048),
        (800, {"kv_dtype": "fp8"}, 1600),
    ],
)
def test_with_prefix_caching_a_chunk_is_the_whole_blocks_of_a_step(
    block_tokens: int, question: dict[str, Any], chunk: int
) -> None:
    drafting = {"accepted": 1.0} if "speculation" in question else {}
    with_cache, without = (asked(**question, **drafting, prefix_caching=flag) for flag in (True, False))
    assert block_plan(with_cache).block_tokens == block_tokens
    assert (with_cache.chunk_tokens, without.chunk_tokens) == (chunk, 2048)
    assert asked(**question, **drafting, prefix_caching=True, chunk_tokens=512).chunk_tokens == 512


def test_a_block_longer_than_a_step_is_a_chunk_of_its_own() -> None:
    case = asked(245_760, **HUGE)
    assert block_plan(case).block_tokens == case.chunk_tokens == 2176


CACHED: list[tuple[int, dict[str, Any], int, int]] = [
    (112_655, {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3"}, 832, 1167),
    (112_655, {"model": FAST, "kv_dtype": "int8_per_token_head", "speculation": "dflash2:15"}, 944, 1263),
    (96_370, {"model": FAST, "kv_dtype": "int8_per_token_head", "speculation": "dflash2:7"}, 864, 1330),
    (105_274, {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3"}, 832, 1274),
    (112_655, {"kv_dtype": "fp8"}, 800, 655),
    (112_000, {"kv_dtype": "fp8"}, 800, 800),
    (112_001, {"kv_dtype": "fp8"}, 800, 1),
    (799, {"kv_dtype": "fp8"}, 800, 799),
    (832 * 3, {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3"}, 832, 832),
    (900, {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3"}, 832, 900),
]
"""A prompt of which all was seen before: its length, the question, tokens of a block, tokens computed again."""


@pytest.mark.parametrize(("prompt", "question", "block", "again"), CACHED)
def test_of_a_prompt_seen_before_all_but_its_last_blocks_is_found(
    prompt: int, question: dict[str, Any], block: int, again: int
) -> None:
    """Hit = floor(n / B) B, a block less under speculation, and at least a token is computed: 2.4 and 6.1 s of it."""
    drafting = {"accepted": 1.0} if "speculation" in question else {}
    case = asked(prompt, prefix_caching=True, cached_tokens=prompt, **question, **drafting)
    assert block_plan(case).block_tokens == block
    assert prompt - case.cached_tokens == again == prefilled_tokens(case, prompt)
    assert case.cached_tokens % block == 0
    first = chunk_at(case, prompt, 0)
    assert (first.kv_tokens, first.q_tokens) == (case.cached_tokens, min(again, case.chunk_tokens))


@pytest.mark.parametrize(
    ("cached", "drafted", "hit"),
    [
        (0, False, 0),
        (799, False, 0),
        (800, False, 800),
        (99_999, False, 99_200),
        (0, True, 0),
        (1663, True, 0),
        (1664, True, 832),
        (99_999, True, 99_008),
    ],
)
def test_of_a_prompt_that_begins_like_another_one_state_is_usable(cached: int, drafted: bool, hit: int) -> None:
    """At the last whole block of what was seen, or one earlier: the drafter needs the block before (gotcha 49)."""
    drafting = {"model": FAST, "speculation": "mtp:3", "accepted": 1.0} if drafted else {}
    case = asked(150_000, kv_dtype="fp8", prefix_caching=True, cached_tokens=cached, **drafting)
    assert case.cached_tokens == hit


def test_the_first_turn_of_a_document_fills_whole_chunks_up_to_its_state() -> None:
    """67 chunks of 1,664 tokens end where the state of 112,655 tokens is kept."""
    case = asked(112_655, model=FAST, kv_dtype="fp8", speculation="mtp:3", accepted=1.0, prefix_caching=True)
    assert case.cached_tokens == 0
    assert 67 * case.chunk_tokens == 111_488
    assert chunk_count(case, 112_655) == 68


@pytest.mark.parametrize(("cached", "hit"), [(0, 0), (15, 0), (16, 16), (999, 992), (1000, 992)])
def test_attention_alone_is_found_block_by_block_but_for_the_last_token(cached: int, hit: int) -> None:
    case = asked(1000, model=LLAMA, prefix_caching=True, cached_tokens=cached)
    assert (case.cached_tokens, case.chunk_tokens) == (hit, 2048)
    whole = asked(992, model=LLAMA, prefix_caching=True, cached_tokens=992)
    assert whole.cached_tokens == 976
