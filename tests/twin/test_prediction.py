"""Answers on a machine of 1 GB/s and 1 TFLOP/s, and the laws that every answer obeys."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from tests.laws.asked import phases
from tests.worlds import machine
from twin.ask.question import Question
from twin.prediction import Z90, Prediction, predict

GATHER = "gather_host/exllamav3/fp16"


def big(**parts: Any) -> HardwareProfile:
    return machine(**({"vram_bytes": 2**40, "host_bytes": 2**45} | parts))


def ask(ctx_tokens: int, profile: HardwareProfile | None = None, **asked: Any) -> Prediction:
    return predict(Question(ctx_tokens=ctx_tokens, **asked), profile or big())


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


def test_a_memory_twice_as_fast_halves_a_step_that_only_reads_it() -> None:
    read = big().gpu.vram_read
    quick = replace(read, rate=replace(read.rate, value=2e9), datasheet=replace(read.datasheet, value=4e9))
    fast = replace(big(), gpu=replace(big().gpu, vram_read=quick))
    step, half = (phases(ask(5000, profile, layout="vram"))[0].seconds.value for profile in (big(), fast))
    assert half == pytest.approx(step / 2)


def test_without_spread_an_interval_is_a_point_and_with_one_it_is_log_normal() -> None:
    exact, _ = phases(ask(1000, layout="vram"))
    assert exact.seconds.low == exact.seconds.high == exact.seconds.value
    whole = big()
    read = whole.gpu.vram_read
    vague = replace(whole, gpu=replace(whole.gpu, vram_read=replace(read, rate=replace(read.rate, spread=0.1))))
    step = phases(ask(1000, vague, layout="vram"))[0].seconds
    assert step.high / step.value == pytest.approx(math.exp(0.1 * Z90))
    assert step.value / step.low == pytest.approx(math.exp(0.1 * Z90))
