"""Answers on a machine of 1 GB/s and 1 TFLOP/s."""

import math

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from hwprofiles.ladder import ANY, SCHEMA, Carried, Ladder, Typical, shipped_ladder
from tests.laws.asked import phases
from tests.worlds import kernel, learned, machine
from twin.ask.question import Question
from twin.cost.roofline import Roofs
from twin.errors import MissingRate
from twin.operations.ops import Op
from twin.prediction import Z90, Phase, predict, refuse_borrowed

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


BORROWED = "recurrent/exllamav3/fp16"
ASKED = Question(ctx_tokens=1000, layout="vram")


def lacking(key: str) -> HardwareProfile:
    return replace(BIG, kernels={name: own for name, own in BIG.kernels.items() if name != key})


def test_kernels_stand_on_the_rung_that_their_rates_are_from() -> None:
    whole, poor = predict(ASKED, BIG), predict(ASKED, lacking(BORROWED))
    assert set(whole.standing()) == {"measured"}
    assert not whole.rungs
    (rung,) = {name for name, keys in poor.standing().items() if BORROWED in keys}
    assert rung == poor.rung_of(f"{BORROWED}#efficiency") != "measured"
    assert {*whole.standing()["measured"]} - {*poor.standing()["measured"]} == {BORROWED}
    assert poor.rung_of("vram") == "measured"


def test_no_kernel_stands_on_two_rungs() -> None:
    """Of one that several machines tell of, share and roof are off together."""
    asked = Question(ctx_tokens=2048, model="llama-3.1-8b", weights="q4_k_m", hw="rtx4060ti-16gb", engine="llama.cpp")
    prediction = predict(asked)
    keys = [key for own in prediction.standing().values() for key in own]
    assert any("with its roof" in name for name in prediction.sources)
    assert len(keys) == len(set(keys))


def test_a_strict_question_is_answered_from_measured_rates_and_refused_by_others() -> None:
    strict = replace(ASKED, strict=True)
    assert predict(strict, BIG).decode == predict(ASKED, BIG).decode
    with pytest.raises(MissingRate, match=rf"^not measured on toy: {BORROWED} \(\w+\)$") as refused:
        predict(strict, lacking(BORROWED))
    assert "--strict" in refused.value.hint


def test_a_strict_question_that_does_not_fit_is_answered() -> None:
    answer = predict(replace(ASKED, strict=True), replace(lacking(BORROWED), gpu=machine(vram_bytes=2**29).gpu))
    assert not answer.fits


def test_a_refusal_names_every_borrowed_kernel_with_its_rung() -> None:
    shipped, own = shipped_ladder(), kernel(latency_s=1.0)
    there = Ladder(
        schema=SCHEMA, carried={"linear/b/bf16": {ANY: Carried(kernel=own, machines=("there",))}},
        typical={"append": Typical(plain=own)}, whole=learned(0.0),
        carried_spreads=shipped.carried_spreads, typical_spreads=shipped.typical_spreads,
    )  # fmt: skip
    roofs = Roofs(BIG, strict=False, ladder=there)
    refuse_borrowed(roofs)
    for key in ("linear/b/bf16", "append/a/bf16", BORROWED):
        roofs.cost(Op("x", 0, kernel=key, vram_bytes=1.0))
    with pytest.raises(
        MissingRate, match=r"^not measured on toy: append/a/bf16 \(typical\), linear/b/bf16 \(carried\)$"
    ):
        refuse_borrowed(roofs)
