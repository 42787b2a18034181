"""Laws of a pool of blocks: nothing is lost between device and blocks, and the longest context is exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.laws.pooled import POOL_FORMATS, pool_questions
from tests.twin.memory.pool_worlds import RTX3090, pool_of
from tests.worlds import LAWS
from twin.ask.question import Question
from twin.ask.resolve import resolve, settled
from twin.memory.block_pool import block_plan
from twin.memory.plan import plan_memory

VRAM_BYTES = RTX3090.gpu.vram.value
BOUNDED = [name for name in POOL_FORMATS if not name.startswith(("kvarn", "turboquant"))]
"""Formats without scratch that grows with the longest request, beyond what the model takes by itself."""


@settings(LAWS, max_examples=100)
@given(pool_questions())
def test_parts_and_pages_of_what_fits_are_no_more_than_the_device_has(question: Question) -> None:
    """The longest context has blocks for every sequence of the batch beside the null block; a block more it has not."""
    asked = plan_memory(*settled(question, RTX3090))
    low, longest, high = (asked.max_ctx_tokens(sigmas=sigmas) for sigmas in (-1.0, 0.0, 1.0))
    assert low <= longest <= high
    plan = plan_memory(*settled(replace(question, ctx_tokens=longest or question.ctx_tokens), RTX3090))
    found, device = pool_of(plan), plan.memories[0]
    usable = found.blocks - 1
    assert sum(pool.capacity_bytes for pool in plan.devices()) == pytest.approx(VRAM_BYTES)
    if longest:
        blocks = device.page_bytes["kv cache"] * plan.pages + device.fixed.get("state and windows", 0.0)
        assert blocks + device.fixed["null block"] <= found.pool_bytes + 1
        assert question.batch * found.plan.blocks_per_request(longest) <= usable
    assert 0 <= found.pool_bytes - found.blocks * found.plan.block_bytes < found.plan.block_bytes
    windows = any(group.kind == "sliding" for group in found.plan.groups)
    far = max(longest, 20_000) if windows else longest  # windows count full, which those of short requests are not
    if plan.limit().name == "gpu0" and far == longest:
        assert question.batch * found.plan.blocks_per_request(longest + plan.page_tokens) > usable


@LAWS
@given(pool_questions(formats=BOUNDED, pool_bytes=None), st.sampled_from((0.01, 0.05)))
def test_a_larger_share_of_the_device_holds_no_fewer_tokens(question: Question, more: float) -> None:
    less, greater = (
        plan_memory(*settled(replace(question, utilisation=share), RTX3090)) for share in (0.9, 0.9 + more)
    )
    assert pool_of(greater).pool_bytes - pool_of(less).pool_bytes == pytest.approx(
        more * VRAM_BYTES if pool_of(less).pool_bytes else pool_of(greater).pool_bytes, abs=2
    )
    assert less.max_ctx_tokens() <= greater.max_ctx_tokens()


@LAWS
@given(pool_questions(), st.integers(0, 300_000), st.integers(0, 300_000))
def test_a_longer_cached_prefix_never_leaves_more_to_compute(question: Question, one: int, other: int) -> None:
    few, many = sorted((min(one, question.ctx_tokens), min(other, question.ctx_tokens)))
    asked_for = replace(question, prefix_caching=True)
    less, more = (resolve(replace(asked_for, cached_tokens=tokens)) for tokens in (few, many))
    assert 0 <= less.cached_tokens <= more.cached_tokens < max(1, question.ctx_tokens)
    assert more.cached_tokens <= many
    block = block_plan(more).block_tokens
    assert more.cached_tokens % block == 0
    assert many - more.cached_tokens <= (2 if question.speculation else 1) * block
