"""Answers on a machine of 1 GB/s and 1 TFLOP/s."""

import math

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from tests.laws.asked import phases
from tests.worlds import machine
from twin.ask.question import Question
from twin.prediction import Z90, Phase, predict

BIG = machine(vram_bytes=2**40, host_bytes=2**45)


def decode_of(profile: HardwareProfile) -> Phase:
    return phases(predict(Question(ctx_tokens=1000, layout="vram"), profile))[0]


def test_a_decode_step_in_vram_by_hand() -> None:
    """6.0B active parameters at 4.05 bits, 36 states read and written, 1,001 tokens in 12 layers, at 1 GB/s."""
    weights = 5_997_690_880 * 4.05 / 8
    states = 36 * 2 * 1_634_304
    planes = 12 * 1001 * 2048
    decode = decode_of(BIG)
    assert decode.seconds.value == pytest.approx((weights + states + planes) / 1e9, rel=1e-9)
    assert decode.tokens_per_s.value == 1 / decode.seconds.value
    assert decode.bound == "VRAM bandwidth"
    assert decode.link_bytes == 0


def test_without_spread_an_interval_is_a_point_and_with_one_it_is_log_normal() -> None:
    exact = decode_of(BIG)
    assert exact.seconds.low == exact.seconds.high == exact.seconds.value
    read = BIG.gpu.vram_read
    vague = replace(BIG, gpu=replace(BIG.gpu, vram_read=replace(read, rate=replace(read.rate, spread=0.1))))
    step = decode_of(vague).seconds
    assert step.high / step.value == pytest.approx(math.exp(0.1 * Z90))
    assert step.value / step.low == pytest.approx(math.exp(0.1 * Z90))
