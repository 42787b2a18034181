"""A workload on a case: the published runs of four long prompts, what cannot fit, and intervals in order."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import pool_machine
from twin.answers.service import Service, serve
from twin.ask.question import Question
from twin.errors import BadFile, BadValue, Impossible, MissingRate
from twin.prediction import predict
from twin.serving.records import RequestRecord
from twin.serving.requests import Lengths, Request, Workload

LONGEST = 32_768


def question(**asked: Any) -> Question:
    return Question(**{"ctx_tokens": LONGEST, "model": "qwen3.8-27b", "kv_dtype": "fp8"} | asked)


def work(count: int = 20, prompt: int = 300, output: int = 50, **more: Any) -> Workload:
    return Workload(count=count, prompt=Lengths(mean=prompt), output=Lengths(mean=output), **more)


def request(index: int, prompt: int, output: int, *, at: float = 0.0) -> Request:
    return Request(id=index, arrival_s=at, prompt_tokens=prompt, output_tokens=output)


def served(
    requests: Workload | Iterable[Request] | None = None, *, asked: Question | None = None, **more: Any
) -> Service:
    if requests is None:
        requests = work()
    read = requests.requests if isinstance(requests, Workload) else lambda: requests
    return serve(asked or question(), read, **more)


def four_long(kv_dtype: str, utilisation: float, longest: int) -> Service:
    """Four prompts of 60,000 tokens at once, 1,024 tokens each in return: the published run of that format."""
    asked = question(
        model="qwen3.8-27b-int8-mlp",
        kv_dtype=kv_dtype,
        utilisation=utilisation,
        ctx_tokens=longest,
        max_model_tokens=longest,
    )
    return served(work(4, 60_000, 1024), asked=asked)


def test_of_four_long_prompts_three_reside_in_fp8_as_published() -> None:
    service = four_long("fp8", 0.972, 150_000)
    assert service.result.resident_max == 3
    assert service.result.total_s == pytest.approx(256, rel=0.03)
    low, high = service.ends(lambda each: each.total_s)
    assert low < 256 < high


def test_of_four_long_prompts_all_reside_in_kvarn_as_published() -> None:
    service = four_long("kvarn_k4v2_g128", 0.93, 262_144)
    assert service.result.resident_max == 4
    assert service.result.total_s == pytest.approx(242, rel=0.03)
    low, high = service.ends(lambda each: each.total_s)
    assert low < 242 < high


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


def test_speculation_yields_its_tokens_a_step() -> None:
    plain = served([request(0, 1024, 400)]).result
    drafted = served([request(0, 1024, 400)], asked=question(speculation="mtp:3", accepted=2.0)).result
    prediction = predict(question(ctx_tokens=1224, max_model_tokens=LONGEST, speculation="mtp:3", accepted=2.0))
    assert prediction.decode is not None
    assert plain.steps - 1 == pytest.approx(2 * (drafted.steps - 1), abs=1)
    assert drafted.requests[0].tpot_s == pytest.approx(prediction.decode.seconds.value / 2, rel=0.01)


def test_the_ends_of_an_interval_are_in_order_around_the_figure() -> None:
    service = served()
    for figure in (
        lambda each: each.total_s,
        lambda each: each.output_tokens_per_s,
        lambda each: each.ttft_s.quantile(0.9),
        lambda each: each.itl_s.quantile(0.5),
    ):
        low, high = service.ends(figure)
        assert 0 < low < figure(service.result) < high


def test_all_steps_of_the_ends_are_as_much_shorter_as_longer() -> None:
    service = served()
    assert service.fast is not None
    assert service.slow is not None
    assert service.fast.total_s * service.slow.total_s == pytest.approx(service.result.total_s**2, rel=1e-6)


def test_without_intervals_a_figure_is_its_own_ends() -> None:
    service = served(intervals=False)
    assert service.fast is None
    assert service.slow is None
    assert service.ends(lambda each: each.total_s) == (service.result.total_s,) * 2


def test_the_same_workload_has_the_same_answer() -> None:
    one, other = served(work(50, rate_per_s=2.0, seed=4)), served(work(50, rate_per_s=2.0, seed=4))
    assert one.result.requests == other.result.requests
    assert (one.result.total_s, one.slow and one.slow.total_s) == (
        other.result.total_s,
        other.slow and other.slow.total_s,
    )


def test_requests_that_arrive_late_are_waited_for() -> None:
    result = served([request(0, 100, 5), request(1, 100, 5, at=1000.0)], intervals=False).result
    assert result.total_s > 1000
    assert result.resident_max == 1
    assert result.requests[1].queue_s == 0


def test_a_request_longer_than_the_pool_is_rejected_and_the_rest_goes_on() -> None:
    pool = served(intervals=False).kv_pool
    most = range(pool.blocks * pool.plan.block_tokens)
    longest = bisect_right(most, pool.blocks - 1, key=lambda tokens: pool.plan.blocks_per_request(tokens + 1))
    asked = question(ctx_tokens=2**20)
    result = served([request(0, 100, 10), request(1, longest, 2), request(2, 100, 10)], asked=asked).result
    assert [each.id for each in result.requests] == [0, 2]
    assert [(each.id, each.kind) for each in result.rejections] == [(1, "pool")]
    assert served([request(1, longest - 1, 2)], asked=asked, intervals=False).result.completed == 1


def test_a_request_longer_than_the_engine_was_told_is_rejected() -> None:
    result = served([request(0, LONGEST, 1), request(1, LONGEST - 1, 1)], intervals=False).result
    assert [(each.id, each.kind) for each in result.rejections] == [(0, "max_model_tokens")]
    assert result.completed == 1


@pytest.mark.parametrize("asked", [{"pool_bytes": 1}, {"utilisation": 0.1}], ids=["pool", "utilisation"])
def test_a_pool_without_a_block_is_answered_with_rejections(asked: dict[str, Any]) -> None:
    service = served(work(5), asked=question(**asked))
    assert service.kv_pool.blocks == 0
    assert service.result.completed == 0
    assert service.result.rejected == {"pool": 5}
    assert service.fast is None  # no step, no interval


def test_a_workload_of_nothing_ends_at_once() -> None:
    result = served([]).result
    assert (result.completed, result.total_s, result.rejected_count) == (0, 0.0, 0)


def test_a_small_pool_preempts_and_completes_all_the_same() -> None:
    block = served(intervals=False).kv_pool.plan.block_bytes
    result = served(work(12, 1500, 600), asked=question(pool_bytes=40 * block)).result
    assert result.preemptions > 0
    assert result.completed == 12
    assert result.pool_peak_blocks <= result.pool_blocks == 39


def test_fewer_sequences_at_once_take_longer() -> None:
    few, many = (served(asked=question(max_sequences=most), intervals=False).result for most in (1, 20))
    assert (few.resident_max, many.resident_max) == (1, 20)
    assert few.total_s > many.total_s


def test_a_shared_prefix_is_computed_once() -> None:
    workload = work(10, 300, 50, prefix_tokens=20_000)
    plain = served(workload, intervals=False).result
    cached = served(workload, asked=question(prefix_caching=True), intervals=False).result
    assert plain.cached_tokens == 0
    assert cached.cached_tokens > 0
    assert cached.total_s < plain.total_s


def test_the_scheduler_is_told_what_the_question_says() -> None:
    limits = served(asked=question(chunk_tokens=512, max_sequences=7), intervals=False).limits
    assert (limits.batched_tokens, limits.max_sequences, limits.max_model_tokens) == (512, 7, LONGEST)
    assert served(limits={"reserve_output": True}, intervals=False).limits.reserve_output


def test_watchers_see_the_plain_run_only() -> None:
    seen: list[RequestRecord] = []
    service = served(work(7), watch={"on_finish": seen.append})
    assert seen == list(service.result.requests)


def test_a_machine_may_be_handed_over() -> None:
    toy = replace(pool_machine(vram_bytes=10**11), name="mine")
    assert served(asked=question(kv_dtype="bf16"), profile=toy, intervals=False).machine.name == "mine"


@pytest.mark.parametrize(
    ("asked", "wrong", "says"),
    [
        ({"model": "qwen3.8-flash-next", "kv_dtype": None}, Impossible, "exllamav3 shares no pool of blocks"),
        ({"kv_dtype": "fp8_per_token_head"}, Impossible, "need SM 8.9 or newer"),
        ({"kv_dtype": "turboquant_3bit_nc"}, MissingRate, "has no rate for"),
        ({"chunk_tokens": 16, "speculation": "dflash2:16", "accepted": 2.0}, BadValue, "decodes 17 tokens a step"),
        ({"max_model_tokens": LONGEST - 1}, BadValue, "is above the longest request"),
        ({"utilisation": 1.5}, BadValue, "utilisation 1.5 is outside the range"),
        ({"speculation": "mtp:3", "accepted": 4.5}, BadValue, "outside the range of 1 to 4"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], wrong: type[Exception], says: str) -> None:
    with pytest.raises(wrong, match=says):
        served(asked=question(**asked))


def test_a_workload_that_breaks_off_is_not_answered() -> None:
    def broken() -> Iterable[Request]:
        yield request(0, 10, 10)
        raise BadFile("mine.jsonl:2: broken")

    with pytest.raises(BadFile, match=r"mine\.jsonl:2: broken"):
        serve(question(), broken)


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(BadValue, match="request 1 arrives at 0 s, after one at 1 s"):
        served([request(0, 10, 10, at=1.0), request(1, 10, 10)])
