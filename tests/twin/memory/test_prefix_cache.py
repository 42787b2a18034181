"""What a prefix cache does to a prompt: chunks of whole blocks, and the tokens that are found in it."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import FAST, LLAMA, RTX3090, asked
from twin.ask.question import Question
from twin.cost.prefill import chunk_at, prefilled_tokens
from twin.errors import Impossible
from twin.memory.block_pool import block_plan
from twin.memory.plan import plan_memory
from twin.prediction import predict
from twin.units import GIB, KIB, MIB

MTP = {"model": FAST, "kv_dtype": "fp8", "speculation": "mtp:3", "accepted": 1.0}
DFLASH = {"model": FAST, "kv_dtype": "int8_per_token_head", "speculation": "dflash2:7", "accepted": 1.0}
FP8 = {"kv_dtype": "fp8"}


@pytest.mark.parametrize(
    ("block_tokens", "question", "chunk"),
    [
        (832, MTP, 1664),
        (432, MTP | {"kv_dtype": "bf16", "speculation": "mtp:4"}, 1728),
        (864, DFLASH, 1728),
        (944, DFLASH | {"speculation": "dflash2:15"}, 1888),
        (2048, MTP | {"kv_dtype": "kvarn_k4v2_g128"}, 2048),
        (2176, DFLASH | {"kv_dtype": "kvarn_k4v2_g128"}, 2176),  # longer than a step: a chunk of its own
        (800, FP8, 1600),
    ],
)
def test_with_prefix_caching_a_chunk_is_the_whole_blocks_of_a_step(
    block_tokens: int, question: dict[str, Any], chunk: int
) -> None:
    with_cache, without = (asked(**question, prefix_caching=flag) for flag in (True, False))
    assert block_plan(with_cache).block_tokens == block_tokens
    assert (with_cache.chunk_tokens, without.chunk_tokens) == (chunk, 2048)
    assert asked(**question, prefix_caching=True, chunk_tokens=512).chunk_tokens == 512


CACHED: list[tuple[int, dict[str, Any], int, int]] = [
    (112_655, MTP, 832, 1167), (112_655, DFLASH | {"speculation": "dflash2:15"}, 944, 1263),
    (96_370, DFLASH, 864, 1330), (105_274, MTP, 832, 1274), (112_655, FP8, 800, 655), (112_000, FP8, 800, 800),
    (112_001, FP8, 800, 1), (799, FP8, 800, 799), (832 * 3, MTP, 832, 832), (900, MTP, 832, 900),
]  # fmt: skip
"""A prompt of which all was seen before: its length, the question, tokens of a block, tokens computed again."""


@pytest.mark.parametrize(("prompt", "question", "block", "again"), CACHED)
def test_of_a_prompt_seen_before_all_but_its_last_blocks_is_found(
    prompt: int, question: dict[str, Any], block: int, again: int
) -> None:
    """Hit = floor(n / B) B, a block less under speculation, and at least a token is computed: 2.4 and 6.1 s of it."""
    case = asked(prompt, prefix_caching=True, cached_tokens=prompt, **question)
    assert block_plan(case).block_tokens == block
    assert prompt - case.cached_tokens == again == prefilled_tokens(case, prompt)
    assert case.cached_tokens % block == 0
    first = chunk_at(case, prompt, 0)
    assert (first.kv_tokens, first.q_tokens) == (case.cached_tokens, min(again, case.chunk_tokens))


@pytest.mark.parametrize(
    ("cached", "question", "hit"),
    [(0, FP8, 0), (799, FP8, 0), (800, FP8, 800), (99_999, FP8, 99_200),
     (0, MTP, 0), (1663, MTP, 0), (1664, MTP, 832), (99_999, MTP, 99_008)],
)  # fmt: skip
def test_of_a_prompt_that_begins_like_another_one_state_is_usable(
    cached: int, question: dict[str, Any], hit: int
) -> None:
    """At the last whole block of what was seen, or one earlier: the drafter needs the block before (gotcha 49)."""
    assert asked(150_000, prefix_caching=True, cached_tokens=cached, **question).cached_tokens == hit


@pytest.mark.parametrize(("cached", "hit"), [(0, 0), (15, 0), (16, 16), (999, 992), (1000, 992)])
def test_attention_alone_is_found_block_by_block_but_for_the_last_token(cached: int, hit: int) -> None:
    case = asked(1000, model=LLAMA, prefix_caching=True, cached_tokens=cached)
    assert (case.cached_tokens, case.chunk_tokens) == (hit, 2048)
    whole = asked(992, model=LLAMA, prefix_caching=True, cached_tokens=992)
    assert whole.cached_tokens == 976


def test_a_prefix_on_the_host_is_copied_page_by_page_before_the_rest_is_computed() -> None:
    """10,010 tokens of 36 layers of 4 KiB: 1.37 GiB at the link's rate in runs of 64 KiB, 33.4 ms in a public log."""
    question = Question(ctx_tokens=10_016, model="qwen3-8b", engine="vllm", hw="h200", prefix_caching=True)
    there = replace(question, cached_tokens=10_010)
    near, far = predict(there), predict(replace(there, cached_in="host"))
    assert near.ttft_s is not None
    assert near.prefill is not None
    assert far.ttft_s is not None
    assert far.prefill is not None
    size = 10_000 * 36 * 4096  # whole blocks
    assert far.prefill.link_bytes - near.prefill.link_bytes == size
    link = far.machine.gpu.h2d
    copied_s = size / (link.rate.value * link.run_length(64 * KIB)) + 36 * link.latency.value
    assert far.ttft_s.value - near.ttft_s.value == pytest.approx(copied_s, rel=0.01)
    assert copied_s == pytest.approx(33.4e-3, rel=0.15)
    host = {pool.name: pool for pool in far.memory.memories}["host"]
    assert host.fixed["offloaded cache"] == size
    assert far.decode == near.decode


def test_blocks_on_the_host_take_its_memory_and_page_tables_of_the_device() -> None:
    """8 bytes for 4 KiB of it, outside the engine's share."""
    plain, kept = (
        plan_memory(asked(model=LLAMA, kv_dtype="fp8", offload_bytes=size), RTX3090) for size in (None, 16 * GIB)
    )
    outside, host = kept.memories[1:]
    assert outside.fixed["page tables"] == 32 * MIB
    assert host.fixed["offloaded cache"] == 16 * GIB
    assert host.free_bytes() == plain.memories[2].free_bytes() - 16 * GIB
    assert kept.memories[0] == plain.memories[0]
    assert "page tables" not in plain.memories[1].fixed


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"model": LLAMA, "cached_in": "host"}, "--cached-in means nothing without cached tokens"),
        ({"cached_in": "host", "cached_tokens": 800, "prefix_caching": True}, "without recurrent states"),
        ({"offload_bytes": GIB}, "a cache on the host is modelled without recurrent states, which qwen3.8-27b"),
    ],
)
def test_what_the_host_cannot_keep_is_refused(question: dict[str, Any], says: str) -> None:
    with pytest.raises(Impossible, match=says):
        asked(**question)
