"""A served workload is that of its steps, each of its parts; four long prompts are served as published."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import load_profile
from tests.twin.memory.pool_worlds import BLOCK, HOST_S, MODELS, dense, drafted, pool_machine, pooled
from tests.twin.serving.worlds import request
from tests.worlds import LAWS
from twin.answers.service import CaseCosts, CasePool, Service, serve
from twin.ask.question import Question
from twin.ask.resolve import resolve, settled
from twin.cost.roofline import Roofs
from twin.errors import BadValue, Impossible, MissingRate
from twin.memory.block_pool import plan_pool
from twin.operations.lower import head_program
from twin.operations.ops import Step
from twin.prediction import chunk_breakdown, decode_breakdown_of, predict
from twin.serving.metrics import RequestRecord
from twin.serving.requests import Lengths, Request, Workload

EXACT = 1e-9
TOY = Roofs(pool_machine())
FLAT = pooled(spec=dense(layers=2, every=1))
"""Two attention layers of 576 B of weights, 64 B a cached token; a head of 256 B and 128 B of logits."""
US = 1e-6

ASKED = {
    "bf16": {"model": "qwen3.8-27b"},
    "fp8": {"model": "qwen3.8-27b", "kv_dtype": "fp8"},
    "int8 products": {"model": "qwen3.8-27b-int8-mlp", "kv_dtype": "kvarn_k4v2_g128"},
    "triton": {"model": "qwen3.8-27b", "kv_dtype": "int4_per_token_head"},
    "llama": {"model": "llama-3.1-8b", "hw": "h200"},
    "mtp": {"model": "qwen3.8-27b", "kv_dtype": "fp8", "speculation": "mtp:3", "accepted": 2.5},
    "dflash2": {"model": "qwen3.8-27b", "kv_dtype": "fp8", "speculation": "dflash2:7", "accepted": 3.0},
    "dflash2 and lookup": {"model": "qwen3.8-27b", "kv_dtype": "bf16", "speculation": "dflash2:15", "accepted": 6.0},
}

CASES = {name: settled(Question(ctx_tokens=1024, **asked), None)[0] for name, asked in ASKED.items()}  # type: ignore[arg-type]
COSTS = {name: CaseCosts(case, Roofs(load_profile(case.hw), strict=False)) for name, case in CASES.items()}
NAMES = st.sampled_from(list(COSTS))


def test_steps_by_hand() -> None:
    """Of 3 sequences of 10 tokens: weights twice, head, 3 rows of logits, 11 tokens of 64 B read 3 times in 2 layers.

    Chunks share weights and head with them; each has a row of logits and its own attention.
    """
    costs = CaseCosts(FLAT, TOY)
    decoding, chunk, shared = 2 * 3 * 11 * 0.064, 2 * (16 * 0.128 + 48 * 0.064), 2 * 0.576 + 0.256 + HOST_S / US
    seconds, token_s = costs.decode(3, 30)
    assert seconds == pytest.approx((shared + 3 * 0.128 + decoding) * US, rel=EXACT)
    assert token_s == pytest.approx(2 * 0.064 * US, rel=EXACT)
    beside = shared + (3 + 1) * 0.128 + decoding + chunk
    assert costs.mixed(3, 30, [(32, 16)]) == pytest.approx(beside * US, rel=EXACT)
    two = shared + 2 * 0.128 + chunk + 2 * (8 * 0.128 + 8 * 0.064)
    assert costs.mixed(0, 0, [(32, 16), (0, 8)]) == pytest.approx(two * US, rel=EXACT)
    # 2 drafts and 1 certain token for each of 4 sequences: 12 rows of logits beside the chunk's one
    verifying = CaseCosts(pooled(spec=FLAT.model, speculation=drafted(tokens=2)), TOY)
    chunk_s = verifying.mixed(0, 0, [(0, 1)]) - (shared + 0.128) * US
    beside_s = verifying.mixed(4, 100, [(0, 1)]) - verifying.decode(4, 100)[0]
    assert beside_s == pytest.approx(chunk_s + 0.128 * US, rel=1e-6)
    sparse = resolve(Question(ctx_tokens=1024))
    with pytest.raises(Impossible, match="reads its whole cache, not for"):
        CaseCosts(sparse, Roofs(load_profile(sparse.hw)))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("sequences", [1, 3, 64])
def test_a_decode_step_is_that_of_a_prediction_at_any_context(name: str, sequences: int) -> None:
    """From a drafter's window on: a window that is not yet full is charged as full."""
    costs = COSTS[name]
    window = costs.case.speculation.drafter.window if costs.case.speculation else 0
    for past in (0, 1, 100, 2048, 4095, 4096, 60_000, 262_144):
        seconds, _ = costs.decode(sequences, past * sequences)
        told = decode_breakdown_of(costs.case, costs.roofs, past, sequences).seconds
        if past >= window:
            assert seconds == pytest.approx(told, rel=EXACT)
        else:
            assert told <= seconds <= told * 1.01


def test_a_window_that_is_not_full_is_charged_as_full() -> None:
    """16 tokens in 2 layers of 2 x 16 elements of 2 B, a pass: 16 x 128 B more than after no token at all."""
    case = pooled(speculation=drafted(BLOCK, tokens=3))
    costs = CaseCosts(case, TOY)
    more_s = costs.decode(1, 0)[0] - decode_breakdown_of(case, TOY, 0, 1).seconds
    assert more_s == pytest.approx(BLOCK.window * 2 * 64 / 1e9, rel=EXACT)


@LAWS
@given(NAMES, st.integers(1, 64), st.integers(0, 10**6))
def test_a_step_without_chunks_is_affine_in_the_cached_tokens(name: str, sequences: int, ctx_tokens: int) -> None:
    costs = COSTS[name]
    base_s, token_s = costs.decode(sequences, 0)
    seconds = pytest.approx(base_s + token_s * ctx_tokens, rel=EXACT)
    assert token_s > 0
    assert costs.decode(sequences, ctx_tokens) == (seconds, token_s)
    assert costs.mixed(sequences, ctx_tokens, []) == seconds


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("past", "rows"), [(0, 1), (0, 2048), (10_000, 300), (100_000, 2048)])
def test_a_chunk_alone_is_that_of_a_prediction_and_its_logits(name: str, past: int, rows: int) -> None:
    costs = COSTS[name]
    case, roofs = costs.case, costs.roofs
    alone = chunk_breakdown(case, Step(kv_tokens=past, q_tokens=rows), roofs).run(head_program(case, 1, 1), roofs)
    assert costs.mixed(0, 0, [(past, rows)]) == pytest.approx(alone.seconds, rel=EXACT)


def ordered(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=2, max_size=2).map(sorted)


@LAWS
@given(name=NAMES, sequences=ordered(1, 64), ctx=ordered(0, 10**6), chunk=ordered(1, 2048))
def test_more_sequences_cached_tokens_or_rows_never_cost_less(
    name: str, sequences: list[int], ctx: list[int], chunk: list[int]
) -> None:
    costs, less = COSTS[name], sequences[0]
    assert costs.decode(less, ctx[0])[0] <= costs.decode(less, ctx[1])[0]
    assert costs.decode(less, ctx[0])[0] <= costs.decode(sequences[1], ctx[0])[0] * (1 + EXACT)
    few, many = ([(1000, rows)] for rows in chunk)
    near, far = ([(past, 100)] for past in ctx)
    assert costs.mixed(less, ctx[0], few) <= costs.mixed(less, ctx[0], many) * (1 + EXACT)
    assert costs.mixed(less, ctx[0], near) <= costs.mixed(less, ctx[0], far)


@LAWS
@given(name=NAMES, sequences=st.integers(1, 64), rows=st.integers(1, 2048))
def test_a_mixed_step_costs_more_than_a_part_and_hardly_more_than_both(name: str, sequences: int, rows: int) -> None:
    """To 1 %: the efficiency of products is a curve over tokens, while what they compute grows by tiles of 16."""
    costs = COSTS[name]
    ctx_tokens = 2048 * sequences
    decode_s, chunk_s = costs.decode(sequences, ctx_tokens)[0], costs.mixed(0, 0, [(0, rows)])
    both_s = costs.mixed(sequences, ctx_tokens, [(0, rows)])
    assert max(decode_s, chunk_s) <= both_s * 1.01
    assert both_s <= (decode_s + chunk_s) * 1.01


KINDS = ("gemma-4-31b-nvfp4", "llama-4-scout", "deepseek-v3.2", "jamba-v0.1", "mistral-7b-v0.1", "mamba-codestral-7b")


@pytest.mark.parametrize("name", [*ASKED, *KINDS])
def test_a_sequence_holds_the_blocks_that_the_engine_plans_for_it_of_all_but_one(name: str) -> None:
    """One block is nobody's; more tokens never take fewer, and only states take any for none."""
    asked = ASKED.get(name) or {"model": str(MODELS / f"{name}.json"), "pool_bytes": 2**30}
    case = resolve(Question(ctx_tokens=262_144, **asked))  # type: ignore[arg-type]
    kv_pool = plan_pool(case, load_profile(case.hw))[0]
    pool = CasePool(kv_pool)
    for tokens in range(1, 20_000, 7):
        assert pool.blocks_for(tokens) == kv_pool.plan.blocks_per_request(tokens), tokens
        assert pool.blocks_for(tokens - 1) <= pool.blocks_for(tokens)
    assert (pool.blocks_for(0) > 0) == bool(case.model.states)
    assert pool.blocks == max(0, kv_pool.blocks - 1)
    nothing = plan_pool(replace(case, question=replace(case.question, pool_bytes=1)), load_profile(case.hw))[0]
    assert CasePool(nothing).blocks == 0


LONGEST = 32_768


def question(**asked: Any) -> Question:
    return Question(**{"ctx_tokens": LONGEST, "model": "qwen3.8-27b", "kv_dtype": "fp8"} | asked)


def work(count: int = 20, prompt: int = 300, output: int = 50, **more: Any) -> Workload:
    return Workload(count=count, prompt=Lengths(mean=prompt), output=Lengths(mean=output), **more)


def served(
    requests: Workload | Iterable[Request] | None = None, *, asked: Question | None = None, **more: Any
) -> Service:
    if requests is None:
        requests = work()
    read = requests.requests if isinstance(requests, Workload) else lambda: requests
    return serve(asked or question(), read, **more)


@pytest.mark.parametrize(
    ("kv_dtype", "utilisation", "longest", "resident", "published_s"),
    [("fp8", 0.972, 150_000, 3, 256), ("kvarn_k4v2_g128", 0.93, 262_144, 4, 242)],
)
def test_four_long_prompts_reside_and_take_as_long_as_published(
    kv_dtype: str, utilisation: float, longest: int, resident: int, published_s: float
) -> None:
    """60,000 tokens at once, 1,024 tokens each in return."""
    asked = {"model": "qwen3.8-27b-int8-mlp", "kv_dtype": kv_dtype, "utilisation": utilisation}
    lengths = {"ctx_tokens": longest, "max_model_tokens": longest, "max_sequences": 64, "graph_tokens": 64}
    service = served(work(4, 60_000, 1024), asked=question(**asked, **lengths))
    assert service.result.resident_max == resident
    assert service.result.total_s == pytest.approx(published_s, rel=0.03)
    low, high = service.ends(lambda each: each.total_s)
    assert low < published_s < high
    assert low * high == pytest.approx(service.result.total_s**2, rel=1e-6)  # as much shorter as longer


def test_a_single_request_takes_its_prefill_and_its_steps() -> None:
    """The same seconds as a prediction's: the first token after the prompt, then 40 steps over a growing cache."""
    service = served([request(0, 8192, 41)])
    prediction = predict(question(ctx_tokens=8192, max_model_tokens=LONGEST))
    record = service.result.requests[0]
    assert prediction.ttft_s is not None
    assert prediction.decode is not None
    assert record.ttft_s == pytest.approx(prediction.ttft_s.value, rel=0.01)  # each of its 4 chunks has logits here
    assert record.tpot_s == pytest.approx(prediction.decode.seconds.value, rel=0.001)
    assert service.result.total_s == pytest.approx(record.ttft_s + 40 * record.tpot_s, rel=1e-9)


def test_a_request_longer_than_the_pool_is_rejected_and_the_rest_goes_on() -> None:
    pool = served(intervals=False).kv_pool
    longest = bisect_right(range(2**20), pool.blocks - 1, key=pool.plan.blocks_per_request) - 1
    asked = question(ctx_tokens=2**20)
    result = served([request(0, 100, 10), request(1, longest, 2), request(2, 100, 10)], asked=asked).result
    assert [each.id for each in result.requests] == [0, 2]
    assert [(each.id, each.kind) for each in result.rejections] == [(1, "pool")]
    assert served([request(1, longest - 1, 2)], asked=asked, intervals=False).result.completed == 1


def test_the_scheduler_is_told_what_the_question_says_and_watchers_see_the_plain_run_only() -> None:
    seen: list[RequestRecord] = []
    service = served(asked=question(chunk_tokens=512, max_sequences=7), watch={"on_finish": seen.append})
    limits = service.result.limits
    assert (limits.batched_tokens, limits.max_sequences, limits.max_model_tokens) == (512, 7, LONGEST)
    assert seen == list(service.result.requests)


@pytest.mark.parametrize(
    ("asked", "wrong", "says"),
    [
        ({"model": "qwen3.8-flash-next", "kv_dtype": None}, Impossible, "exllamav3 shares no pool of blocks"),
        ({"kv_dtype": "turboquant_3bit_nc", "strict": True}, MissingRate, "not measured on rtx3090: .*turboquant"),
        ({"chunk_tokens": 16, "speculation": "dflash2:16", "accepted": 2.0}, BadValue, "decodes 17 tokens a step"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], wrong: type[Exception], says: str) -> None:
    with pytest.raises(wrong, match=says):
        served(asked=question(**asked))
