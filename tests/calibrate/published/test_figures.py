"""Figures of memory and time by hand arithmetic: values, intervals, naive estimates, and where there is no answer."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.published.estimates import Asked, Estimate, Load, NoAnswer, answer, count, drop, of_part, within_spread
from calibrate.published.figures import FIGURES
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.rates import Curve, Rate
from tests.laws.drawn import with_memory
from twin.ask.question import Question
from twin.cost import roofline
from twin.errors import BadValue, Impossible
from twin.prediction import Z90
from twin.units import KIB, MINUTE, MS, TIB

BLOG = load_profile("3x-rtx3090")
VLLM = with_memory(load_profile("rtx3090"), TIB)
INT8_BYTES, LAYERS, QUERY_WIDTH = 4 * 2 * (256 + 4), 16, 24 * 256
TRITON = "attend_decode/triton/int8_per_token_head"
DRAFTED: dict[str, Any] = {"model": "qwen3.8-27b-fast", "kv_dtype": "int8_per_token_head", "pool_bytes": 12 * 2**30}
"""Qwen3.8-27B with drafters, and a pool that holds any context asked of here."""


def drafted(ctx_tokens: int, **fields: Any) -> Question:
    return Question(ctx_tokens=ctx_tokens, **(DRAFTED | fields))


def figure(name: str, about: Question, *, profile: HardwareProfile | None = None) -> Estimate:
    """On the machine of a model with drafters, or on the other."""
    own = VLLM if about.model == DRAFTED["model"] else BLOG
    return FIGURES[name].estimate(Asked(question=about, profile=profile or own))


def ends(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


# The shape of an estimate.


def test_a_count_claims_no_interval_a_spread_is_a_factor_and_a_unit_changes_every_number() -> None:
    counted, spread = count(7), within_spread(10.0, 0.1)
    assert (*ends(counted), counted.naive) == (7, 7, 7, None)
    assert spread.high / spread.value == pytest.approx(spread.value / spread.low) == pytest.approx(math.exp(0.1 * Z90))
    percent = Estimate(value=0.1, low=0.05, high=0.2, naive=0.3).converted(lambda share: 100 * share)
    assert (*ends(percent), percent.naive) == pytest.approx((10, 5, 20, 30))


def test_a_part_hangs_on_its_own_rates_and_one_that_is_not_there_is_no_answer() -> None:
    found = answer(Question(ctx_tokens=1_000_000), BLOG)
    gather = of_part(found.decode, "kv_gather", found.prediction.sources, unit=MS, naive=1.0)
    assert gather.high / gather.value == pytest.approx(math.exp(Z90 * BLOG.gpu.h2d.rate.spread))
    with pytest.raises(NoAnswer, match="no part 'pooled'"):
        of_part(found.decode, "pooled", found.prediction.sources, unit=MS, naive=1.0)


@pytest.mark.parametrize(
    ("operation", "lacking"), [("attend_sparse/", ("prefill", "ttft_s")), ("linear/", ("decode", "prefill", "ttft_s"))]
)
def test_a_phase_without_a_rate_is_no_answer_and_the_other_still_is_one(
    operation: str, lacking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no other machine has it either."""
    monkeypatch.setattr(roofline, "borrowed", lambda *_: None)
    kernels = {key: kernel for key, kernel in BLOG.kernels.items() if not key.startswith(operation)}
    found = answer(Question(ctx_tokens=4096), replace(BLOG, kernels=kernels))
    for phase in lacking:
        with pytest.raises(NoAnswer, match=f"no rate for {operation}"):
            getattr(found, phase)
    assert "decode" in lacking or found.decode.seconds.value > 0


def test_what_two_steps_share_cancels_in_their_drop() -> None:
    short, long = (answer(Question(ctx_tokens=ctx), BLOG) for ctx in (2048, 1_048_320))
    lost, nothing = drop(long, short), drop(short, short)
    assert lost.low < lost.value < lost.high
    assert (1 - lost.low) / (1 - lost.value) < long.decode.seconds.high / long.decode.seconds.value
    assert (*ends(nothing), nothing.naive) == (0, 0, 0, 0)
    with pytest.raises(NoAnswer, match="against"):
        figure("decode_drop", Question(ctx_tokens=2048))


# Memory.


def test_the_longest_context_is_below_what_weights_leave_and_answers_what_does_not_fit() -> None:
    asked, large = Question(ctx_tokens=1, layout="vram"), Question(ctx_tokens=5_000_000)
    weights = sum(pool.fixed["weights"] for pool in Asked(question=asked, profile=BLOG).memory.devices())
    longest = figure("max_context", asked)
    assert longest.naive == pytest.approx((3 * BLOG.gpu.vram.value - weights) / (27.75 * KIB))
    assert longest.low < longest.value < longest.high < longest.naive
    assert figure("context_that_fits", large).value == figure("max_context", Question(ctx_tokens=1)).value
    assert figure("staging_that_fits", large).value == 0


def staged(ctx_tokens: int = 60_000, **question: Any) -> tuple[float, float]:
    """Ratios with the probe of the loader and without."""
    found = figure("staged_ratio", Question(ctx_tokens=ctx_tokens, **question))
    return found.value, found.also["without_probe_ratio"]


def test_a_ratio_of_staged_chunks_by_hand_as_published_and_none_where_nothing_is_staged() -> None:
    # of 4096 tokens 2048 are dense, then come 2048 over 16 pages of 256
    assert staged(4097)[1] == pytest.approx(2_048 * 2_080 / (16 * 256))
    published = staged()
    assert published == pytest.approx((103.04, 127.02), abs=0.005)
    assert staged(staging_bytes=2**25) == staged(staging_bytes=2**27) == published
    assert staged(chunk_tokens=4096)[0] == pytest.approx(177, abs=0.5)
    for question in ({"layout": "vram"}, {"prefill": "naive"}, {"ctx_tokens": 2_048}):
        with pytest.raises(BadValue, match="is staged"):
            staged(**question)


# Times of one question.


def test_the_time_to_the_first_token_is_the_prediction_s_and_no_longer_for_what_is_cached() -> None:
    about = drafted(16_000)
    found, ttft, minutes = answer(about, VLLM), figure("ttft", about), figure("time_to_context", about)
    assert ends(ttft) == found.ttft_s
    assert ttft.naive == found.prefill.naive_s
    assert ends(minutes) == pytest.approx([end / MINUTE for end in ends(ttft)])
    logits_s = ttft.value - found.prefill.seconds.value  # prefill covers the prompt
    assert 0 < logits_s < 0.2 * found.decode.seconds.value
    short = answer(Question(ctx_tokens=16_000), BLOG)  # there prefill stops short: a step comes after it
    ttft = figure("ttft", Question(ctx_tokens=16_000))
    assert ttft.value == pytest.approx(short.prefill.seconds.value + short.decode.seconds.value)
    cold, half, all_ = (
        figure("ttft", drafted(50_000, prefix_caching=True, **cached)).value
        for cached in ({}, {"cached_tokens": 25_000}, {"cached_tokens": 50_000})
    )
    assert 0 < all_ < 0.05 * cold
    assert all_ < half < cold


@pytest.mark.parametrize("accepted", [None, 1.0, 2.5, 4.0])
def test_a_time_a_token_is_a_step_over_what_that_yields(accepted: float | None) -> None:
    about = drafted(16_000, **({"speculation": "mtp:3", "accepted": accepted} if accepted else {}))
    time, speed, step = (figure(name, about) for name in ("time_per_token", "decode", "decode_step"))
    assert ends(time) == pytest.approx([end / (accepted or 1) for end in ends(step)])
    assert (time.value * speed.value, time.low * speed.high, time.high * speed.low) == pytest.approx([1 / MS] * 3)
    assert time.low < time.value < time.high
    assert time.naive is None


def attention(rows: int) -> tuple[Estimate, float, Rate, Curve]:
    """The figure for `rows` query tokens on Triton's kernel, seconds of its slower roof, that roof, the efficiency."""
    drafts: dict[str, Any] = {"speculation": f"mtp:{rows - 1}", "accepted": 1.0} if rows > 1 else {}
    found = figure("attention_per_layer", drafted(131_072, backend="triton", **drafts))
    tokens, gpu = 131_072 + rows, VLLM.gpu
    roofs = [
        (tokens * INT8_BYTES / gpu.vram_read.rate.value, gpu.vram_read.rate),
        (4 * QUERY_WIDTH * rows * tokens / gpu.tensor["bf16"].rate.value, gpu.tensor["bf16"].rate),
    ]
    curve = VLLM.kernels[TRITON].efficiency
    assert curve is not None
    return found, *max(roofs, key=lambda roof: roof[0]), curve


@pytest.mark.parametrize(("rows", "unit"), [(1, "B/s"), (2, "B/s"), (8, "FLOP/s")])
def test_attention_of_a_layer_is_its_slower_roof_at_the_kernel_s_share(rows: int, unit: str) -> None:
    found, seconds, roof, curve = attention(rows)
    assert roof.unit == unit
    assert found.value == pytest.approx(seconds / curve(rows) / MS)
    assert found.naive == pytest.approx(131_072 * INT8_BYTES / VLLM.gpu.vram_read.datasheet.value / MS)
    factor = math.exp(Z90 * math.hypot(curve.spread, roof.spread))
    assert found.high / found.value == pytest.approx(factor) == pytest.approx(found.value / found.low)


def test_attention_of_all_layers_is_the_step_s_part_whosever_drafts_are_verified() -> None:
    """A prediction layer reads the whole context too, and a window some of it; neither is in the model's part."""
    parts = {part.name: part.seconds for part in answer(drafted(60_000), VLLM).decode.parts}
    assert figure("attention_per_layer", drafted(60_000)).value * LAYERS * MS == pytest.approx(parts["attention"])
    about = drafted(131_072, backend="triton", speculation="dflash2:7", accepted=1.0)
    assert figure("attention_per_layer", about) == attention(8)[0]
    with pytest.raises(NoAnswer, match="attention"):
        figure("attention_per_layer", Question(ctx_tokens=100_000))  # this model selects


# Many requests at once: one alone is a prediction's prefill and steps; more share the pool.

SERVED = ("total_time", "throughput", "inter_token", "residents")
INT8_MLP: dict[str, Any] = {"model": "qwen3.8-27b-int8-mlp", "kv_dtype": "fp8"}
ONE = load_profile("rtx3090")
BLOCK_BYTES = 800 * 2048 * 16
"""800 tokens in 16 layers, 2,048 bytes each: a page covers a state of 48 x 128 x 128 x 2 + 3 x 10,240 x 2 bytes."""
BLOCKS = 2 + 3
"""Of a request of 801 to 1,600 tokens: two of attention, three of recurrent state."""


def load(output: int = 11, *, prompt: int = 1000, requests: int = 1) -> Load:
    return Load(requests=requests, prompt_tokens=prompt, output_tokens=output)


def served(
    name: str, workload: Load | None, *, intervals: bool = True, ctx_tokens: int = 1000, **fields: Any
) -> Estimate:
    about = Question(ctx_tokens=ctx_tokens, **(INT8_MLP | fields))
    return FIGURES[name].estimate(Asked(question=about, profile=ONE, workload=workload, intervals=intervals))


def steps_s(first: int, steps: int, **fields: Any) -> list[float]:
    """Seconds of decode steps from `first` cached tokens on."""
    questions = [Question(ctx_tokens=ctx, **(INT8_MLP | fields)) for ctx in range(first, first + steps)]
    return [answer(question, ONE).decode.seconds.value for question in questions]


def test_one_token_takes_the_time_to_the_first_and_every_further_one_a_decode_step() -> None:
    first, all_ = (served("total_time", load(output)).value for output in (1, 11))
    assert first == pytest.approx(answer(Question(ctx_tokens=1000, **INT8_MLP), ONE).ttft_s.value, rel=1e-9)
    assert all_ - first == pytest.approx(sum(steps_s(1000, 10)), rel=1e-9)
    assert served("throughput", load(11)).value == pytest.approx(11 / all_)
    between = served("inter_token", load(11)).value
    assert between == pytest.approx(steps_s(1005, 1)[0] / MS, rel=0.005)  # a quantile is within half a per cent


@pytest.mark.parametrize(("blocks", "requests", "at_once"), [(2, 4, 2), (3, 4, 3), (9, 4, 4), (9, 1, 1)])
def test_as_many_stay_as_their_blocks_leave_room(blocks: int, requests: int, at_once: int) -> None:
    room = (1 + blocks * BLOCKS) * BLOCK_BYTES
    found = served("residents", load(100, requests=requests), pool_bytes=room)
    assert ends(found) == (at_once,) * 3
    assert found.naive is None
    if at_once == blocks > 1:  # a block less is a request less
        assert served("residents", load(100, requests=requests), pool_bytes=room - 1).value == at_once - 1


@pytest.mark.parametrize("name", SERVED[:3])
def test_a_time_has_an_interval_only_where_one_is_wanted(name: str) -> None:
    found, plain = (served(name, load(11, requests=2), intervals=wanted) for wanted in (True, False))
    assert found.low < found.value < found.high
    assert ends(plain) == (found.value,) * 3
    other = served(name, load(11, requests=2), ctx_tokens=77)
    assert other == found  # the workload says how long prompts are, and the question does not
    if name == "total_time":  # a longer one is a lower throughput
        rate = served("throughput", load(11, requests=2))
        assert found.low * rate.high == pytest.approx(found.high * rate.low) == pytest.approx(22)


@pytest.mark.parametrize("name", SERVED)
def test_no_workload_and_a_request_that_can_never_run_are_no_answer(name: str) -> None:
    for workload, fields, says in (
        (None, {}, "needs a workload"),
        (load(100), {"pool_bytes": BLOCKS * BLOCK_BYTES}, rf"needs {BLOCKS} blocks, the pool has {BLOCKS - 1}"),
        (load(100), {"max_model_tokens": 1050}, r"1,100|1100"),
        *([(load(1), {}, "one token")] if name == "inter_token" else []),
    ):
        with pytest.raises(NoAnswer, match=says):
            served(name, workload, **fields)


# A block pool, by hand: Qwen3.8-27B has 16 attention layers of 4 x 256 and 48 recurrent ones.

FP8_BYTES, HUNDRED = 4 * 2 * 256, 100 * BLOCK_BYTES
STATES = 3
"""48 recurrent layers in groups of 16, a block each, whatever the context."""


def pooled(ctx_tokens: int = 1, *, profile: HardwareProfile = ONE, **fields: Any) -> Asked:
    named = {"model": "qwen3.8-27b", "kv_dtype": "fp8"}
    return Asked(question=Question(ctx_tokens=ctx_tokens, **(named | fields)), profile=profile)


def pool_figure(name: str, ctx_tokens: int = 1, **fields: Any) -> Estimate:
    return FIGURES[name].estimate(pooled(ctx_tokens, **fields))


def counted(name: str, ctx_tokens: int = 1, **fields: Any) -> float:
    """The figure, which claims no interval and has no usual estimate."""
    found = pool_figure(name, ctx_tokens, **fields)
    assert found.low == found.value == found.high
    assert found.naive is None
    return found.value


def test_a_pinned_pool_prints_its_share_of_the_longest_request_whatever_the_context() -> None:
    room = HUNDRED + BLOCK_BYTES - 1
    pool = pool_figure("kv_pool", 80_000, pool_bytes=room)
    assert pool.low == pool.value == pool.high == 100 * 80_000 // (100 + STATES)
    assert pool.naive == pytest.approx(room / (LAYERS * FP8_BYTES))
    assert pool_figure("kv_pool", 10, pool_bytes=room, max_model_tokens=80_000).value == pool.value
    assert pool_figure("kv_pool", 10, pool_bytes=room, max_model_tokens=160_000).value > pool.value


def test_a_pool_that_utilisation_leaves_has_an_interval_of_whole_blocks_below_the_naive_one() -> None:
    question = pooled(80_000, utilisation=0.9)
    pool, plan = FIGURES["kv_pool"].estimate(question), question.memory
    assert plan.kv_pool is not None
    assert pool.value == plan.kv_pool.printed_tokens
    assert pool.low < pool.value < pool.high < pool.naive
    per_block = 80_000 / (100 + STATES)
    for end in (pool.low, pool.value, pool.high):  # whole ones, printed as whole tokens
        assert abs(end / per_block - round(end / per_block)) < 1 / per_block
    weights = plan.devices()[0].fixed["weights"] + plan.devices()[0].fixed["embedding"]
    assert pool.naive == pytest.approx((0.9 * ONE.gpu.vram.value - weights) / (LAYERS * FP8_BYTES))


def test_concurrency_is_the_pool_over_the_longest_request_and_both_are_nothing_on_a_machine_too_small() -> None:
    found = counted("concurrency", 10, pool_bytes=2 * HUNDRED, max_model_tokens=80_000)
    assert found == pytest.approx(200 / (100 + STATES), rel=1e-4)  # printed tokens are whole ones
    loose = pool_figure("concurrency", 80_000)
    assert loose.low < loose.value < loose.high
    vram = replace(ONE.gpu.vram, value=ONE.gpu.vram.value / 2)
    small = replace(ONE, gpu=replace(ONE.gpu, vram=vram))
    for name in ("kv_pool", "concurrency"):
        nothing = pool_figure(name, 80_000, profile=small)
        assert (nothing.low, nothing.value, nothing.high) == (0, 0, 0)
    assert pool_figure("runs_out_of_memory", 80_000, profile=small).value == 1


TURBO: dict[str, Any] = {"kv_dtype": "turboquant_4bit_nc"}
"""Decodes the whole prefix outside the engine's share: a smaller share leaves more room for that."""


@pytest.mark.parametrize(
    ("ctx_tokens", "fields", "short"),
    [
        *((tokens, {"pool_bytes": HUNDRED + (STATES + 1) * BLOCK_BYTES}, short)  # and the null block
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
    assert pool_figure("window_blocks").value == 0
    for name in ("window_page_use", "window_block_tokens"):
        with pytest.raises(NoAnswer, match="sliding window"):
            pool_figure(name)
    bare = Asked(question=Question(ctx_tokens=1), profile=load_profile("3x-rtx3090"))
    for name in ("kv_pool", "block_tokens", "page", "kv_memory", "concurrency"):
        with pytest.raises(Impossible, match="no pool of blocks"):
            FIGURES[name].estimate(bare)
