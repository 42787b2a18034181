"""Figures of a block pool, by hand: Qwen3.8-27B has 16 attention layers of 4 x 256 and 48 recurrent ones."""

from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.published.estimates import Asked, Estimate, NoAnswer
from calibrate.published.figures import FIGURES
from hwprofiles import HardwareProfile, load_profile
from twin.ask.question import Question
from twin.errors import Impossible

PROFILE = load_profile("rtx3090")
LAYERS = 16
FP8_BYTES, INT8_BYTES = 4 * 2 * 256, 4 * 2 * (256 + 4)
FP8_BLOCK = 800
"""Tokens whose page of attention covers a state of 48 x 128 x 128 x 2 + 3 x 10,240 x 2 bytes, in steps of 16."""

FP8_BLOCK_BYTES = FP8_BLOCK * FP8_BYTES * LAYERS
STATES = 3
"""48 recurrent layers in groups of 16, a block each, whatever the context."""

HUNDRED = 100 * FP8_BLOCK_BYTES


def asked(ctx_tokens: int = 1, *, profile: HardwareProfile = PROFILE, **fields: Any) -> Asked:
    named = {"model": "qwen3.8-27b", "kv_dtype": "fp8"}
    return Asked(question=Question(ctx_tokens=ctx_tokens, **(named | fields)), against=None, profile=profile)


def figure(name: str, ctx_tokens: int = 1, **fields: Any) -> Estimate:
    return FIGURES[name].estimate(asked(ctx_tokens, **fields))


def counted(name: str, ctx_tokens: int = 1, **fields: Any) -> float:
    """The figure, which claims no interval and has no usual estimate."""
    found = figure(name, ctx_tokens, **fields)
    assert found.low == found.value == found.high
    assert found.naive is None
    return found.value


def test_a_pinned_pool_prints_its_share_of_the_longest_request_whatever_the_context() -> None:
    room = HUNDRED + FP8_BLOCK_BYTES - 1
    pool = figure("kv_pool", 80_000, pool_bytes=room)
    assert pool.low == pool.value == pool.high == 100 * 80_000 // (100 + STATES)
    assert pool.naive == pytest.approx(room / (LAYERS * FP8_BYTES))
    assert figure("kv_pool", 10, pool_bytes=room, max_model_tokens=80_000).value == pool.value
    assert figure("kv_pool", 10, pool_bytes=room, max_model_tokens=160_000).value > pool.value


def test_a_pool_that_utilisation_leaves_has_an_interval_of_whole_blocks_below_the_naive_one() -> None:
    question = asked(80_000, utilisation=0.9)
    pool, plan = FIGURES["kv_pool"].estimate(question), question.memory
    assert plan.kv_pool is not None
    assert pool.value == plan.kv_pool.printed_tokens
    assert pool.low < pool.value < pool.high < pool.naive
    per_block = 80_000 / (100 + STATES)
    for end in (pool.low, pool.value, pool.high):  # whole ones, printed as whole tokens
        assert abs(end / per_block - round(end / per_block)) < 1 / per_block
    weights = plan.devices()[0].fixed["weights"] + plan.devices()[0].fixed["embedding"]
    assert pool.naive == pytest.approx((0.9 * PROFILE.gpu.vram.value - weights) / (LAYERS * FP8_BYTES))


def test_concurrency_is_the_pool_over_the_longest_request_and_both_are_nothing_on_a_machine_too_small() -> None:
    found = counted("concurrency", 10, pool_bytes=2 * HUNDRED, max_model_tokens=80_000)
    assert found == pytest.approx(200 / (100 + STATES), rel=1e-4)  # printed tokens are whole ones
    loose = figure("concurrency", 80_000)
    assert loose.low < loose.value < loose.high
    vram = replace(PROFILE.gpu.vram, value=PROFILE.gpu.vram.value / 2)
    small = replace(PROFILE, gpu=replace(PROFILE.gpu, vram=vram))
    for name in ("kv_pool", "concurrency"):
        nothing = figure(name, 80_000, profile=small)
        assert (nothing.low, nothing.value, nothing.high) == (0, 0, 0)
    assert figure("runs_out_of_memory", 80_000, profile=small).value == 1


TURBO: dict[str, Any] = {"kv_dtype": "turboquant_4bit_nc"}
"""Decodes the whole prefix outside the engine's share: a smaller share leaves more room for that."""


@pytest.mark.parametrize(
    ("ctx_tokens", "fields", "short"),
    [
        *((tokens, {"pool_bytes": HUNDRED + (STATES + 1) * FP8_BLOCK_BYTES}, short)  # and the null block
          for tokens, short in ((79_200, 0), (80_000, 0), (80_001, 1))),
        (2048, TURBO | {"utilisation": 0.9, "max_model_tokens": 131_072}, 0),
        (32_768, TURBO | {"utilisation": 0.972, "max_model_tokens": 131_072}, 1),
        (32_768, TURBO | {"utilisation": 0.8, "max_model_tokens": 131_072}, 0),
        (32_768, {"utilisation": 0.972, "max_model_tokens": 131_072}, 0),
    ],
)  # fmt: skip
def test_out_of_memory_is_where_blocks_or_scratch_end(ctx_tokens: int, fields: dict[str, Any], short: int) -> None:
    assert counted("runs_out_of_memory", ctx_tokens, **fields) == short


def test_a_format_starts_where_its_kernels_do_and_windows_or_a_pool_that_are_not_there_have_no_figures() -> None:
    for machine, kv_dtype, does in (
        ("rtx3090", "fp8_per_token_head", 0), ("rtx3090", "fp8", 1), ("h200", "fp8_per_token_head", 1),
    ):  # fmt: skip
        assert counted("starts", kv_dtype=kv_dtype, profile=load_profile(machine)) == does
    assert figure("window_blocks").value == 0
    for name in ("window_page_use", "window_block_tokens"):
        with pytest.raises(NoAnswer, match="sliding window"):
            figure(name)
    bare = Asked(question=Question(ctx_tokens=1), against=None, profile=load_profile("3x-rtx3090"))
    for name in ("kv_pool", "block_tokens", "page", "kv_memory", "concurrency"):
        with pytest.raises(Impossible, match="no pool of blocks"):
            FIGURES[name].estimate(bare)
