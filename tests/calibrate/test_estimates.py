"""Intervals and naive estimates, checked by hand arithmetic."""

import math

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.estimates import Asked, Estimate, Load, NoAnswer, answer, count, drop, of_part, scaled, within_spread
from calibrate.figures import FIGURES
from hwprofiles import HardwareProfile, load_profile
from twin.ask.question import Question
from twin.prediction import Z90
from twin.units import GIB, KIB, MS

PROFILE = load_profile("3x-rtx3090")


def asked(question: Question, *, against: Question | None = None, profile: HardwareProfile = PROFILE) -> Asked:
    return Asked(question=question, against=against, profile=profile)


def figure(name: str, question: Question, *, against: Question | None = None) -> Estimate:
    return FIGURES[name].estimate(asked(question, against=against))


def test_a_count_claims_no_interval() -> None:
    counted = count(7)
    assert counted.low == counted.value == counted.high
    assert counted.naive is None


def test_a_spread_is_a_factor_to_either_side() -> None:
    spread = within_spread(10.0, 0.1)
    assert spread.high / spread.value == pytest.approx(spread.value / spread.low) == pytest.approx(math.exp(0.1 * Z90))


def test_a_unit_changes_every_number_of_an_estimate() -> None:
    percent = scaled(Estimate(value=0.1, low=0.05, high=0.2, naive=0.3), 100)
    assert (percent.value, percent.low, percent.high, percent.naive) == pytest.approx((10, 5, 20, 30))


def test_a_part_hangs_on_its_own_rates() -> None:
    found = answer(Question(ctx_tokens=1_000_000), PROFILE)
    gather = of_part(found.decode, "kv_gather", found.prediction.sources, unit=MS, naive=1.0)
    assert gather.high / gather.value == pytest.approx(math.exp(Z90 * PROFILE.gpu.h2d.rate.spread))


def test_a_part_that_is_not_there_is_no_answer() -> None:
    found = answer(Question(ctx_tokens=2048), PROFILE)
    with pytest.raises(NoAnswer, match="pooled_scan"):
        of_part(found.decode, "pooled_scan", found.prediction.sources, unit=MS, naive=1.0)


def test_a_context_that_does_not_fit_is_no_answer() -> None:
    with pytest.raises(NoAnswer, match=r"300,000 tokens do not fit: needs .* of VRAM"):
        _ = answer(Question(ctx_tokens=300_000, layout="vram"), PROFILE).decode


def without(operation: str) -> HardwareProfile:
    """The machine without its kernels of one operation."""
    kernels = {key: kernel for key, kernel in PROFILE.kernels.items() if not key.startswith(f"{operation}/")}
    return replace(PROFILE, kernels=kernels)


def test_a_phase_without_a_rate_is_no_answer_and_the_other_still_is_one() -> None:
    found = answer(Question(ctx_tokens=4096), without("attend_sparse"))
    assert found.decode.seconds.value > 0
    for phase in ("prefill", "ttft_s"):
        with pytest.raises(NoAnswer, match="no rate for attend_sparse/exllamav3/fp16"):
            getattr(found, phase)


def test_no_phase_with_a_rate_is_no_answer_either() -> None:
    found = answer(Question(ctx_tokens=4096), without("linear"))
    for phase in ("decode", "prefill", "ttft_s"):
        with pytest.raises(NoAnswer, match="no rate for linear/exllamav3/exl3"):
            getattr(found, phase)


def test_an_answer_gives_the_phases_of_its_prediction() -> None:
    found = answer(Question(ctx_tokens=4096), PROFILE)
    assert (found.decode, found.prefill) == (found.prediction.decode, found.prediction.prefill)
    assert found.ttft_s == found.prediction.ttft_s


def test_a_drop_to_the_same_is_nothing_without_doubt() -> None:
    same = answer(Question(ctx_tokens=4096), PROFILE)
    nothing = drop(same, same)
    assert nothing.value == nothing.low == nothing.high == nothing.naive == 0


def test_errors_that_two_steps_share_cancel_in_their_drop() -> None:
    short, long = (answer(Question(ctx_tokens=ctx), PROFILE) for ctx in (2048, 1_048_320))
    lost = drop(long, short)
    alone = long.decode.seconds
    assert lost.low < lost.value < lost.high
    assert (1 - lost.low) / (1 - lost.value) < alone.high / alone.value


def test_a_drop_needs_two_questions() -> None:
    with pytest.raises(NoAnswer, match="against"):
        figure("decode_drop", Question(ctx_tokens=2048))


def test_the_naive_transfer_is_bytes_over_the_datasheet() -> None:
    tokens = 2048 + 1  # the budget and an open block of one token
    naive_s = tokens * 2 * 2 * 256 * 2 * 12 / 31.5e9
    assert figure("decode_gather", Question(ctx_tokens=1_048_320)).naive == pytest.approx(naive_s / MS)


def test_the_naive_scan_takes_the_memory_that_the_keys_are_in() -> None:
    scanned = 250_000 * 128 * 2 * 12
    question = Question(ctx_tokens=1_000_000)
    assert figure("pooled_scan", question).naive == pytest.approx(scanned / 936.2e9 / MS)
    on_host = replace(question, pooled="host")
    assert figure("pooled_scan", on_host).naive == pytest.approx(scanned / 31.5e9 / MS)


def test_the_naive_context_is_what_weights_leave() -> None:
    question = Question(ctx_tokens=1, layout="vram")
    weights = sum(pool.fixed["weights"] for pool in asked(question).memory.devices())
    expected = (3 * PROFILE.gpu.vram.value - weights) / (27.75 * KIB)
    longest = figure("max_context", question)
    assert longest.naive == pytest.approx(expected)
    assert longest.low < longest.value < longest.high < expected


def test_a_context_that_does_not_fit_is_answered_by_the_longest_that_does() -> None:
    limit = figure("max_context", Question(ctx_tokens=1)).value
    assert figure("context_that_fits", Question(ctx_tokens=5_000_000)).value == limit


def test_staging_that_does_not_fit_is_none() -> None:
    assert figure("staging_that_fits", Question(ctx_tokens=5_000_000)).value == 0


@pytest.mark.parametrize("requests", [0, 10**6 + 1])
def test_a_load_is_of_some_requests(requests: int) -> None:
    with pytest.raises(msgspec.ValidationError, match="requests"):
        msgspec.convert({"requests": requests, "prompt_tokens": 1, "output_tokens": 1}, Load)


def test_what_vram_is_left_is_told_in_bytes_and_in_tokens() -> None:
    question = Question(ctx_tokens=3_145_728)
    left, tokens = figure("vram_left", question), figure("tokens_of_vram_left", question)
    assert tokens.value * 0.75 * KIB == pytest.approx(left.value * GIB)
    assert (tokens.low, tokens.high) == pytest.approx((left.low * GIB / 768, left.high * GIB / 768))
