"""The engine against itself step by step, against the slow way, and against laws that hold whatever it does."""

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from tests.twin.serving import worlds
from tests.twin.serving.reference import SlowEngine
from tests.twin.serving.worlds import Affine, PagedPool, request, serve
from tests.worlds import LAWS
from twin.serving.blocks import BlockPool
from twin.serving.engine import Engine, simulate_serving
from twin.serving.metrics import Histogram, RequestRecord, ServingResult, Steps
from twin.serving.requests import Lengths, Limits, Request, Workload
from twin.serving.scheduler import Scheduler

EXACT = 1e-9
MANY = settings(LAWS, max_examples=250)


def close(value: float) -> object:
    return pytest.approx(value, rel=EXACT, abs=EXACT)


def assert_alike(one: Histogram, other: Histogram) -> None:
    assert one.count == other.count
    assert one.total == close(other.total)
    if one.count:
        assert (one.least, one.most) == (close(other.least), close(other.most))
    assert list(one.buckets().values()) == list(other.buckets().values())


def assert_same(one: ServingResult, other: ServingResult) -> None:
    for name in ("steps", "completed", "output_tokens", "preemptions", "recomputed_tokens", "cached_tokens"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("resident_max", "pool_peak_blocks", "rejected"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("total_s", "busy_s", "resident_mean"):
        assert getattr(one, name) == close(getattr(other, name)), name
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
        assert_alike(getattr(one, name), getattr(other, name))
    assert [level for _, level in one.timeline] == [close(level) for _, level in other.timeline]
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert (mine.id, mine.preemptions, mine.cached_tokens) == (theirs.id, theirs.preemptions, theirs.cached_tokens)
        assert (mine.queue_s, mine.ttft_s, mine.e2e_s) == tuple(
            map(close, (theirs.queue_s, theirs.ttft_s, theirs.e2e_s))
        )


@MANY
@given(worlds.workloads(prefixes=True), worlds.costs(), worlds.pools(), worlds.limits())
def test_a_jump_is_the_same_as_its_steps(
    requests: list[Request], costs: Affine, pool: BlockPool, limits: Limits
) -> None:
    jumped, stepped = (simulate_serving(requests, costs, pool, limits, jump=jump) for jump in (True, False))
    assert_same(jumped, stepped)


@MANY
@given(worlds.workloads(), worlds.costs(), worlds.pools(), worlds.limits())
def test_the_fast_way_is_the_slow_way(requests: list[Request], costs: Affine, pool: BlockPool, limits: Limits) -> None:
    fast, slow = simulate_serving(requests, costs, pool, limits), SlowEngine(requests, costs, pool, limits).run()
    assert fast.steps == slow.steps
    assert fast.total_s == close(slow.now)
    assert (fast.preemptions, fast.recomputed_tokens) == (slow.preemptions, slow.recomputed)
    assert (fast.resident_max, fast.pool_peak_blocks) == (slow.most_running, slow.peak)
    assert fast.resident_mean * fast.total_s == close(slow.area)
    assert (fast.itl_s.count, fast.itl_s.total) == (len(slow.gaps), close(sum(slow.gaps)))
    found = [(each.id, each.queue_s, each.ttft_s, each.e2e_s, each.preemptions) for each in fast.requests]
    expected = [tuple(map(close, each)) for each in slow.finished]
    assert found == expected


@MANY
@given(worlds.workloads(prefixes=True), worlds.costs(), worlds.pools(), worlds.limits())
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    requests: list[Request], costs: Affine, pool: BlockPool, limits: Limits
) -> None:
    result = ServingResult(limits=limits, pool_blocks=pool.blocks)
    scheduler = Scheduler(requests, pool, limits, result)
    Engine(scheduler, costs, result).run()
    assert result.completed + result.rejected_count == len(requests)
    tokens = {each.id: each.output_tokens for each in requests}
    assert result.output_tokens == sum(tokens[each.id] for each in result.requests)
    if not limits.speculative:
        assert result.itl_s.count == result.output_tokens - result.completed
    ledger = scheduler.ledger
    assert (ledger.in_use, scheduler.decoding, scheduler.ctx_units, scheduler.running) == (0, 0, 0, {})
    assert ledger.idle_blocks == sum(ledger.idle.values()) <= ledger.total
    assert result.pool_peak_blocks <= pool.blocks


@LAWS
@given(worlds.workloads(), worlds.costs(), worlds.limits())
def test_slower_steps_end_later_when_all_requests_are_there(
    requests: list[Request], costs: Affine, limits: Limits
) -> None:
    there = [replace(each, arrival_s=0.0) for each in requests]
    more = {"sequence_s": costs.sequence_s + 0.1, "row_s": costs.row_s + 0.1}
    slower = replace(costs, fixed_s=2 * costs.fixed_s, token_s=2 * costs.token_s, **more)
    fast, slow = (simulate_serving(there, each, worlds.PLENTY, limits) for each in (costs, slower))
    assert slow.total_s > fast.total_s
    pairs = zip(fast.requests, slow.requests, strict=True)
    assert all(later.e2e_s >= sooner.e2e_s and later.ttft_s >= sooner.ttft_s for sooner, later in pairs)


@pytest.mark.parametrize("reserve_prompt", [True, False])
@pytest.mark.parametrize("speculative", [0, 3])
def test_a_jump_is_the_same_as_its_steps_in_a_crowd(*, reserve_prompt: bool, speculative: int) -> None:
    shape = Lengths(mean=40, distribution="exponential")
    crowd = Workload(count=400, rate_per_s=5.0, prompt=shape, output=shape, prefix_tokens=30, seed=2)
    asked: dict[str, Any] = {"reserve_prompt": reserve_prompt, "speculative": speculative, "batched_tokens": 64}
    costs = Affine(fixed_s=0.02, sequence_s=1e-4, token_s=1e-6, row_s=1e-4)
    pool = PagedPool(blocks=90, block_tokens=4)
    runs = [
        serve(crowd.requests(), costs=costs, pool=pool, jump=jump, tokens_per_step=1 + speculative / 2, **asked)
        for jump in (True, False)
    ]
    assert runs[0].preemptions > 20
    assert_same(*runs)


def test_an_eviction_can_let_in_who_waits_for_a_long_prefix() -> None:
    pool = PagedPool(blocks=6, block_tokens=4)
    requests = [request(0, 13, 1, prefix=12), request(1, 4, 20, at=50.0), request(2, 13, 1, at=60.0, prefix=12)]
    asked: dict[str, Any] = {"pool": pool, "batched_tokens": 8, "reserve_prompt": False}
    runs = [serve(requests, jump=jump, **asked) for jump in (True, False)]
    assert_same(*runs)
    # With its prefix it needs 4 blocks of the 3 that 1 leaves; once 1 has evicted the prefix, 2 for a first chunk.
    late = next(each for each in runs[0].requests if each.id == 2)
    assert (late.cached_tokens, late.queue_s) == (0, 3.0)


def test_callbacks_get_every_record_all_the_time_and_now_and_then_the_progress() -> None:
    records: list[RequestRecord] = []
    steps: list[Steps] = []
    told: list[int] = []
    calls = {"on_finish": records.append, "on_steps": steps.append, "progress": lambda ended, _: told.append(ended)}
    result = serve([request(index, 1, 2, at=10.0 * index) for index in range(5000)], calls=calls)
    assert (len(records), len(result.requests)) == (5000, 1000)
    assert records[:1000] == result.requests
    assert sum(each.end_s - each.start_s for each in steps) == close(result.busy_s)
    assert sum(each.steps for each in steps) == result.steps
    assert all(each.start_s >= before.end_s for before, each in pairwise(steps))
    assert len(told) == 2
    assert told[0] < told[1] <= 5000


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Affine(fixed_s=float("nan")), "takes nan s"),
        (Affine(fixed_s=9.0, token_s=-0.1), r"adds -0\.1 s to a step of 1 sequences"),
        (Affine(fixed_s=-1.0, row_s=1.0), r"takes -1\.0 s"),
    ],
)
def test_costs_that_are_no_time_are_a_bug(costs: Affine, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        serve([request(0, 3, 3)], costs=costs)


SHORT, LONG = 2_000, 10_000
FEW_BYTES = 100_000
"""Room for buckets that only a longer run fills; 13 bytes for each further request are more."""
COSTS = Affine(fixed_s=6e-3, sequence_s=2e-5, token_s=1e-7, row_s=3e-5, pair_s=1e-9)
POOL = PagedPool(blocks=6_000, block_tokens=16)


def peak_bytes(count: int, rate_per_s: float | None) -> int:
    """Largest traced size while so many requests are served."""
    prompt, output = (Lengths(mean=mean, distribution="exponential") for mean in (512, 256))
    chat = Workload(count=count, rate_per_s=rate_per_s, prompt=prompt, output=output, prefix_tokens=64)
    tracemalloc.start()
    result = serve(chat.requests(), costs=COSTS, pool=POOL)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.completed == count
    return peak


@pytest.mark.parametrize("rate_per_s", [10.0, None], ids=["at ten a second", "in a queue"])
def test_memory_does_not_grow_with_the_number_of_requests(rate_per_s: float | None) -> None:
    assert peak_bytes(LONG, rate_per_s) < peak_bytes(SHORT, rate_per_s) + FEW_BYTES
