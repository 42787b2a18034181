"""Answers on a machine of 1 GB/s and 1 TFLOP/s, and the laws that every answer obeys."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.worlds import LAWS, at_its_roof, kernel, link, machine
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


@pytest.mark.parametrize("ctx_tokens", [1, 2050, 2051, 100_000, 1_000_000])
def test_offload_over_a_link_as_fast_as_the_memory_decodes_as_vram_does(ctx_tokens: int) -> None:
    quick = link(latency_s=1e-8)
    fast = big(h2d=quick, d2h=quick, kernels={GATHER: at_its_roof(GATHER)})
    vram, offload = (seconds(ask(ctx_tokens, fast, layout=layout))[0] for layout in ("vram", "offload"))
    assert offload == pytest.approx(vram, rel=1e-6)


@settings(LAWS, max_examples=20)
@given(LAYOUT, CONTEXT, CONTEXT)
def test_a_longer_prompt_takes_longer(layout: str, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert seconds(ask(short, layout=layout))[1] <= seconds(ask(long, layout=layout))[1] * (1 + 1e-9)


@settings(LAWS, max_examples=20)
@given(LAYOUT, st.integers(min_value=0, max_value=500), st.integers(min_value=0, max_value=500))
def test_a_step_over_a_longer_context_takes_longer(layout: str, one: int, other: int) -> None:
    """Above the threshold and at the same place in a block: below it a step reads the whole cache, tails differ."""
    short, long = sorted((one, other))
    steps = [seconds(ask(2055 + 400 * blocks, layout=layout))[0] for blocks in (short, long)]
    assert steps[0] <= steps[1] * (1 + 1e-9)


@settings(LAWS, max_examples=20)
@given(LAYOUT, CONTEXT, st.integers(min_value=1, max_value=32))
def test_a_larger_batch_takes_longer_a_step_and_gives_more_tokens_a_second(layout: str, ctx: int, batch: int) -> None:
    one, more = (phases(ask(ctx, layout=layout, batch=size))[0] for size in (batch, batch + 1))
    assert one.seconds.value <= more.seconds.value * (1 + 1e-9)
    assert one.tokens_per_s.value <= more.tokens_per_s.value * (1 + 1e-9)


def slowed(name: str, factor: float) -> HardwareProfile:
    """The toy machine with one rate `factor` times as slow."""
    whole = big()
    gpu = whole.gpu
    if name == "vram":
        read = replace(gpu.vram_read, rate=replace(gpu.vram_read.rate, value=gpu.vram_read.rate.value / factor))
        return replace(whole, gpu=replace(gpu, vram_read=read))
    if name == "tensor":
        fp16 = gpu.tensor["fp16"]
        return replace(
            whole, gpu=replace(gpu, tensor={"fp16": replace(fp16, rate=replace(fp16.rate, value=1e12 / factor))})
        )
    if name == "latency":
        return replace(whole, gpu=replace(gpu, h2d=link(latency_s=1e-3 * factor)))
    return replace(whole, gpu=replace(gpu, **{name: link(bytes_per_s=1e9 / factor)}))


@pytest.mark.parametrize("name", ["tensor", "h2d", "d2h", "latency"])
@pytest.mark.parametrize("asked", [{"layout": "vram"}, {}, {"copies": "overlapped"}, {"prefill": "naive"}])
@pytest.mark.parametrize("ctx_tokens", [1000, 30_000])
def test_a_slower_rate_makes_nothing_faster(name: str, asked: dict[str, str], ctx_tokens: int) -> None:
    fast, slow = seconds(ask(ctx_tokens, **asked)), seconds(ask(ctx_tokens, slowed(name, 3), **asked))
    assert all(after >= before * (1 - 1e-9) for before, after in zip(fast, slow, strict=True))


def test_a_memory_twice_as_fast_halves_a_step_that_only_reads_it() -> None:
    step, fast = (seconds(ask(5000, profile, layout="vram"))[0] for profile in (big(), slowed("vram", 0.5)))
    assert fast == pytest.approx(step / 2)


@pytest.mark.parametrize("lanes", [8, 4])
def test_fewer_lanes_stretch_the_gather_in_proportion(lanes: int) -> None:
    parts = [{part.name: part.seconds for part in phases(ask(100_000, lanes=asked))[0].parts} for asked in (16, lanes)]
    assert parts[1]["kv_gather"] == pytest.approx(parts[0]["kv_gather"] * 16 / lanes)
    assert parts[1]["weights"] == parts[0]["weights"]


ASKED = [
    {"layout": "vram"},
    {"layout": "vram", "batch": 4},
    {},
    {"batch": 4},
    {"copies": "overlapped"},
    {"prefill": "naive"},
    {"pooled": "host"},
    {"ngram": "ram"},
    {"lanes": 4},
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("ctx_tokens", [2, 2051, 60_000, 239_000])
def test_every_answer_on_the_blogs_machine_holds_together(asked: dict[str, Any], ctx_tokens: int) -> None:
    """Parts add up, nothing beats the floor, intervals hold their value, and the same question has the same answer."""
    if asked.get("layout") == "vram":
        ctx_tokens = min(ctx_tokens, 60_000 // asked.get("batch", 1))
    question = Question(ctx_tokens=ctx_tokens, **asked)
    answer = predict(question)
    for phase in phases(answer):
        assert sum(part.seconds for part in phase.parts) == pytest.approx(phase.seconds.value)
        assert all(0 <= part.sol_s <= part.seconds * (1 + 1e-9) for part in phase.parts)
        assert phase.floor_s <= phase.seconds.low <= phase.seconds.value <= phase.seconds.high
        assert phase.tokens_per_s.low <= phase.tokens_per_s.value <= phase.tokens_per_s.high
        assert phase.floor_s <= phase.naive_s
    assert answer.ttft_s is not None
    assert answer.ttft_s.value == pytest.approx(sum(seconds(answer)))
    assert {rate for phase in phases(answer) for part in phase.parts for rate in part.rates} == answer.sources.keys()
    assert predict(question) == answer


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


@pytest.mark.parametrize("lanes", [8, 4])
def test_a_slow_link_with_fewer_lanes_is_answered(lanes: int) -> None:
    blog = load_profile("3x-rtx3090")
    slow = replace(blog, gpu=replace(blog.gpu, h2d=replace(blog.gpu.h2d, rate=replace(blog.gpu.h2d.rate, value=1e8))))
    whole, narrow = (predict(Question(ctx_tokens=100_000, lanes=width), slow) for width in (16, lanes))
    assert whole.decode is not None
    assert narrow.decode is not None
    assert narrow.decode.seconds.value > whole.decode.seconds.value
