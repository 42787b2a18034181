"""Times to the first token, times a token, and one layer's attention: as predicted, in the unit that was published."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.estimates import Answer, Asked, Estimate, NoAnswer, answer
from calibrate.figures import FIGURES
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.rates import Curve, Rate
from tests.laws.drawn import with_memory
from twin.ask.question import Question
from twin.prediction import Z90
from twin.units import MINUTE, MS, TIB

PROFILE = with_memory(load_profile("rtx3090"), TIB)
INT8_BYTES, LAYERS, QUERY_WIDTH = 4 * 2 * (256 + 4), 16, 24 * 256
DRAFTED: dict[str, Any] = {"model": "qwen3.8-27b-fast", "kv_dtype": "int8_per_token_head", "pool_bytes": 12 * 2**30}
"""Qwen3.8-27B with drafters, and a pool that holds any context asked of here."""


def question(ctx_tokens: int, **fields: Any) -> Question:
    return Question(ctx_tokens=ctx_tokens, **(DRAFTED | fields))


def figure(name: str, about: Question, *, profile: HardwareProfile = PROFILE) -> Estimate:
    return FIGURES[name].estimate(Asked(question=about, against=None, profile=profile))


def predicted(about: Question) -> Answer:
    return answer(about, PROFILE)


def test_the_time_to_the_first_token_is_the_prediction_s() -> None:
    about = question(16_000)
    found = predicted(about)
    ttft = figure("ttft", about)
    assert (ttft.value, ttft.low, ttft.high) == found.ttft_s
    assert ttft.naive == found.prefill.naive_s


def test_it_is_prefill_and_logits_where_prefill_covers_the_prompt() -> None:
    about = question(16_000)
    found = predicted(about)
    logits_s = figure("ttft", about).value - found.prefill.seconds.value
    assert 0 < logits_s < 0.2 * found.decode.seconds.value


def test_it_is_prefill_and_a_step_where_prefill_stops_short() -> None:
    about, profile = Question(ctx_tokens=16_000), load_profile("3x-rtx3090")
    found = answer(about, profile)
    ttft = figure("ttft", about, profile=profile)
    assert ttft.value == pytest.approx(found.prefill.seconds.value + found.decode.seconds.value)


def test_minutes_and_seconds_to_a_context_are_the_same_time() -> None:
    about = question(16_000)
    seconds, minutes = figure("ttft", about), figure("time_to_context", about)
    assert (minutes.value, minutes.low, minutes.high) == pytest.approx(
        (seconds.value / MINUTE, seconds.low / MINUTE, seconds.high / MINUTE)
    )


def test_what_the_prefix_cache_holds_is_not_computed_again() -> None:
    cached = {"prefix_caching": True}
    cold = figure("ttft", question(50_000, **cached)).value
    half, all_ = (figure("ttft", question(50_000, cached_tokens=tokens, **cached)).value for tokens in (25_000, 50_000))
    assert 0 < all_ < 0.05 * cold
    assert all_ < half < cold


def test_a_time_a_token_is_one_over_the_speed() -> None:
    about = question(16_000, speculation="mtp:3", accepted=2.5)
    time, speed = figure("time_per_token", about), figure("decode", about)
    assert time.value * speed.value == pytest.approx(1 / MS)
    assert time.low * speed.high == pytest.approx(1 / MS)
    assert time.high * speed.low == pytest.approx(1 / MS)
    assert time.low < time.value < time.high
    assert time.naive is None


def test_without_drafts_a_token_takes_a_step() -> None:
    about = question(16_000)
    time, step = figure("time_per_token", about), figure("decode_step", about)
    assert (time.value, time.low, time.high) == pytest.approx((step.value, step.low, step.high))


@pytest.mark.parametrize("accepted", [1.0, 2.0, 4.0])
def test_with_drafts_it_takes_a_step_over_what_that_yields(accepted: float) -> None:
    about = question(16_000, speculation="mtp:3", accepted=accepted)
    assert figure("time_per_token", about).value == pytest.approx(figure("decode_step", about).value / accepted)


def attention(rows: int) -> tuple[Estimate, float, Rate, Curve]:
    """The figure for `rows` query tokens on Triton's kernel, seconds of its slower roof, that roof, the efficiency."""
    drafts: dict[str, Any] = {"speculation": f"mtp:{rows - 1}", "accepted": 1.0} if rows > 1 else {}
    found = figure("attention_per_layer", question(131_072, backend="triton", **drafts))
    tokens, gpu = 131_072 + rows, PROFILE.gpu
    roofs = [
        (tokens * INT8_BYTES / gpu.vram_read.rate.value, gpu.vram_read.rate),
        (4 * QUERY_WIDTH * rows * tokens / gpu.tensor["bf16"].rate.value, gpu.tensor["bf16"].rate),
    ]
    curve = PROFILE.kernels["attend_decode/triton/int8_per_token_head"].efficiency
    assert curve is not None
    return found, *max(roofs, key=lambda roof: roof[0]), curve


@pytest.mark.parametrize(("rows", "unit"), [(1, "B/s"), (2, "B/s"), (8, "FLOP/s")])
def test_attention_of_a_layer_is_its_slower_roof_at_the_kernel_s_share(rows: int, unit: str) -> None:
    found, seconds, roof, curve = attention(rows)
    assert roof.unit == unit
    assert found.value == pytest.approx(seconds / curve(rows) / MS)
    assert found.naive == pytest.approx(131_072 * INT8_BYTES / PROFILE.gpu.vram_read.datasheet.value / MS)


@pytest.mark.parametrize("rows", [1, 8])
def test_attention_s_interval_is_that_of_its_two_rates(rows: int) -> None:
    found, _, roof, curve = attention(rows)
    factor = math.exp(Z90 * math.hypot(curve.spread, roof.spread))
    assert found.high / found.value == pytest.approx(factor) == pytest.approx(found.value / found.low)


@pytest.mark.parametrize("drafts", ["dflash2:7", "mtp:7"])
def test_whose_drafts_are_verified_makes_no_difference(drafts: str) -> None:
    about = question(131_072, backend="triton", speculation=drafts, accepted=1.0)
    assert figure("attention_per_layer", about) == attention(8)[0]


def test_attention_of_all_layers_is_the_step_s_part() -> None:
    about = question(60_000)
    parts = {part.name: part.seconds for part in predicted(about).decode.parts}
    assert figure("attention_per_layer", about).value * LAYERS * MS == pytest.approx(parts["attention"])


def test_the_drafter_s_own_attention_is_not_the_model_s() -> None:
    """A prediction layer reads the whole context too, and a window some of it; neither is in the model's part."""
    plain = figure("attention_per_layer", question(60_000, backend="triton")).value
    one = replace(question(60_000, backend="triton"), speculation="mtp:1", accepted=1.0)
    rates = PROFILE.kernels["attend_decode/triton/int8_per_token_head"].efficiency
    assert rates is not None
    assert figure("attention_per_layer", one).value == pytest.approx(plain * 60_002 / 60_001 * rates(1) / rates(2))


def test_a_model_that_selects_has_no_such_attention() -> None:
    with pytest.raises(NoAnswer, match="attention"):
        figure("attention_per_layer", Question(ctx_tokens=100_000), profile=load_profile("3x-rtx3090"))


@pytest.mark.parametrize("name", ["ttft", "time_per_token", "decode", "prefill"])
def test_a_context_that_does_not_fit_has_no_time(name: str) -> None:
    with pytest.raises(NoAnswer, match=r"200,000 tokens do not fit: needs .* of VRAM"):
        figure(name, question(200_000, pool_bytes=2**30))
