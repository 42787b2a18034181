"""Answers on a machine of 1 GB/s and 1 TFLOP/s, and the laws that every answer obeys."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.worlds import LAWS, kernel, link, machine
from twin.ask.question import Question
from twin.prediction import Z90, Phase, Prediction, predict

GATHER = "gather_host/exllamav3/fp16"
LAYOUT = st.sampled_from(["vram", "offload"])
CONTEXT = st.integers(min_value=1, max_value=100_000)


def big(**parts: Any) -> HardwareProfile:
    return machine(**({"vram_bytes": 2**40, "host_bytes": 2**45} | parts))


def ask(ctx_tokens: int, profile: HardwareProfile | None = None, **asked: Any) -> Prediction:
    return predict(Question(ctx_tokens=ctx_tokens, **asked), profile or big())


def phases(answer: Prediction) -> tuple[Phase, Phase]:
    assert answer.decode is not None
    assert answer.prefill is not None
    return answer.decode, answer.prefill


def seconds(answer: Prediction) -> tuple[float, float]:
    decode, prefill = phases(answer)
    return decode.seconds.value, prefill.seconds.value


def test_a_decode_step_in_vram_by_hand() -> None:
    """6.0B active parameters at 4.05 bits, 36 states read and written, 1,001 tokens in 12 layers, at 1 GB/s."""
    weights = 5_997_690_880 * 4.05 / 8
    states = 36 * 2 * 1_634_304
    planes = 12 * 1001 * 2048
    decode, _ = phases(ask(1000, layout="vram"))
    assert decode.seconds.value == pytest.approx((weights + states + planes) / 1e9, rel=1e-9)
    assert decode.tokens_per_s.value == 1 / decode.seconds.value
    assert decode.bound == "VRAM bandwidth"
    assert decode.link_bytes == 0


def test_offload_moves_the_planes_of_a_decode_step_to_the_link() -> None:
    """48 MiB over 12 gathers at half a GB/s, each after 2 ms, in place of 48 MiB at 1 GB/s."""
    slow = big(h2d=link(bytes_per_s=5e8), kernels={GATHER: kernel(latency_s=2e-3)})
    vram, offload = (phases(ask(1_000_000, slow, layout=layout))[0] for layout in ("vram", "offload"))
    tokens = 2048 + 1_000_001 % 4
    moved = 12 * tokens * 2048
    assert offload.link_bytes == moved
    assert offload.link_write_bytes == 12 * 2304
    assert offload.seconds.value - vram.seconds.value == pytest.approx(moved / 1e9 + 12 * 2e-3, rel=1e-6)


@settings(LAWS, max_examples=20)
@given(LAYOUT, CONTEXT, st.integers(min_value=1, max_value=32))
def test_a_larger_batch_takes_longer_a_step_and_gives_more_tokens_a_second(layout: str, ctx: int, batch: int) -> None:
    one, more = (phases(ask(ctx, layout=layout, batch=size))[0] for size in (batch, batch + 1))
    assert one.seconds.value <= more.seconds.value * (1 + 1e-9)
    assert one.tokens_per_s.value <= more.tokens_per_s.value * (1 + 1e-9)


def test_a_memory_twice_as_fast_halves_a_step_that_only_reads_it() -> None:
    read = big().gpu.vram_read
    quick = replace(
        read, rate=replace(read.rate, value=2 * read.rate.value), datasheet=replace(read.datasheet, value=4e9)
    )
    fast = replace(big(), gpu=replace(big().gpu, vram_read=quick))
    step, half = (seconds(ask(5000, profile, layout="vram"))[0] for profile in (big(), fast))
    assert half == pytest.approx(step / 2)


@pytest.mark.parametrize("lanes", [8, 4])
def test_fewer_lanes_stretch_the_gather_in_proportion(lanes: int) -> None:
    parts = [{part.name: part.seconds for part in phases(ask(100_000, lanes=asked))[0].parts} for asked in (16, lanes)]
    assert parts[1]["kv_gather"] == pytest.approx(parts[0]["kv_gather"] * 16 / lanes)
    assert parts[1]["weights"] == parts[0]["weights"]


def test_without_spread_an_interval_is_a_point_and_with_one_it_is_log_normal() -> None:
    exact, _ = phases(ask(1000, layout="vram"))
    assert exact.seconds.low == exact.seconds.high == exact.seconds.value
    whole = big()
    read = whole.gpu.vram_read
    vague = replace(whole, gpu=replace(whole.gpu, vram_read=replace(read, rate=replace(read.rate, spread=0.1))))
    step = phases(ask(1000, vague, layout="vram"))[0].seconds
    assert step.high / step.value == pytest.approx(math.exp(0.1 * Z90))
    assert step.value / step.low == pytest.approx(math.exp(0.1 * Z90))


def test_what_does_not_fit_is_an_answer_without_speeds() -> None:
    answer = predict(Question(ctx_tokens=1_048_576, layout="vram"))
    assert not answer.fits
    assert (answer.decode, answer.prefill, answer.ttft_s, answer.sources) == (None, None, None, {})
    assert answer.memory.shortage()


def test_the_machine_that_the_question_names_is_the_default() -> None:
    question = Question(ctx_tokens=4096, hw="3x-rtx3090")
    assert predict(question) == predict(question, load_profile("3x-rtx3090"))


def test_a_prompt_of_one_token_has_no_prefill() -> None:
    decode, prefill = phases(ask(1))
    assert prefill.seconds.value == prefill.tokens_per_s.value == 0
    assert prefill.bound == "nothing"
    assert decode.seconds.value > 0


def test_a_slow_link_with_fewer_lanes_is_answered() -> None:
    blog = load_profile("3x-rtx3090")
    slow = replace(blog, gpu=replace(blog.gpu, h2d=replace(blog.gpu.h2d, rate=replace(blog.gpu.h2d.rate, value=1e8))))
    whole, narrow = (seconds(predict(Question(ctx_tokens=100_000, lanes=width), slow))[0] for width in (16, 4))
    assert narrow > whole
