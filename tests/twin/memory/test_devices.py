"""Memory of devices that share a model: ranks are alike, stages have their own layers, heads kept twice take twice."""

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from twin.ask.question import Question
from twin.ask.resolve import settled
from twin.errors import Impossible
from twin.memory.block_pool import pool_stages
from twin.memory.plan import MemoryPlan, plan_memory


def planned(model: str, *, engine: str = "vllm", **asked: object) -> MemoryPlan:
    named = {"ctx_tokens": 8192, "hw": "h200"} | asked
    return plan_memory(*settled(Question(model=model, engine=engine, **named), None))  # type: ignore[arg-type]


def used(plan: MemoryPlan, part: str) -> list[float]:
    """Of each device that holds cache."""
    return [each.parts(plan.pages).get(part, 0.0) for each in plan.devices() if "outside" not in each.name]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_are_alike_and_together_hold_what_one_device_does(tp: int) -> None:
    """8 KV heads: up to 8 ranks the cache is only divided."""
    one, ranks = planned("llama-3.1-70b"), planned("llama-3.1-70b", tp=tp)
    for part in ("weights", "embedding", "kv cache"):
        assert len(set(used(ranks, part))) == 1
        assert sum(used(ranks, part)) == pytest.approx(sum(used(one, part)), rel=1e-3)
    assert ranks.token_bytes == one.token_bytes
    names = [memory.name for memory in ranks.memories]
    assert names[:3] == ["gpu0", "gpu0 outside the engine's share", "gpu1"]
    assert len(names) == 2 * tp + 1


def test_heads_that_two_ranks_keep_take_twice_the_cache() -> None:
    """2 KV heads on 4 ranks: a head each, not none."""
    two, four = (planned("qwen3.5-35b-a3b", tp=tp, weights="awq") for tp in (2, 4))
    assert four.token_bytes.vram_bytes == 2 * two.token_bytes.vram_bytes
    latent = [planned("deepseek-v3.2", tp=tp).token_bytes.vram_bytes for tp in (8, 16)]
    assert latent[1] == 2 * latent[0]  # a compressed vector is whole on every rank


def test_a_pool_is_a_ranks_and_holds_the_same_tokens_on_each() -> None:
    pools = {tp: planned("llama-3.1-8b", tp=tp, pool_bytes=2**34).kv_pool for tp in (1, 2)}
    one, two = pools[1], pools[2]
    assert one is not None
    assert two is not None
    assert two.printed_tokens == pytest.approx(2 * one.printed_tokens, rel=1e-3)
    assert two.plan.block_bytes * 2 == one.plan.block_bytes


def test_each_stage_pays_for_its_own_layers() -> None:
    """48 layers of 4 KV heads in 16 bits: 98,304 B a token over all stages, 49,152 of one of two."""
    plan = planned("qwen3-30b-a3b", pp=2, ctx_tokens=16_000)
    assert used(plan, "kv cache") == [49_152 * 16_000] * 2
    whole, stages = planned("llama-3.1-8b"), planned("llama-3.1-8b", pp=3)
    assert sum(used(stages, "weights")) == pytest.approx(sum(used(whole, "weights")))
    assert [bool(size) for size in used(stages, "embedding")] == [True, False, False]
    cases = pool_stages(whole.case, 3)
    assert [each.model.layers for each in cases] == [11, 11, 10]  # the last, which has the head, has the fewest
    tied = pool_stages(planned("llama-3.2-1b").case, 2)
    assert [each.ends for each in tied] == [(True, False), (False, True)]


def test_stages_and_ranks_together_are_devices_in_order() -> None:
    plan = planned("llama-3.1-70b", tp=2, pp=2)
    weights = used(plan, "weights")
    assert weights[0] == weights[1] < weights[2] == weights[3]
    assert plan.machine.gpu_count == 4


def test_more_stages_than_layers_and_drafts_over_stages_are_refused() -> None:
    with pytest.raises(Impossible, match="16 layers, fewer than 17 stages"):
        planned("llama-3.2-1b", pp=17)
    with pytest.raises(Impossible, match="speculation is modelled on one stage"):
        planned("qwen3.8-27b", pp=2, speculation="mtp:3", accepted=3.0)


def test_an_engine_without_a_pool_divides_layers_too() -> None:
    asked = {"engine": "exllamav3", "hw": "rtx3090", "weights": "4.0bpw", "layout": "vram"}
    one, two = planned("qwen3.8-27b", **asked), planned("qwen3.8-27b", tp=2, **asked)
    assert sum(used(two, "weights")) == pytest.approx(sum(used(one, "weights")), rel=1e-3)
    assert used(two, "kv cache")[0] == used(two, "kv cache")[1] == sum(used(one, "kv cache")) / 2
    assert [memory.used_bytes(two.pages) for memory in two.host()] == pytest.approx(
        [memory.used_bytes(one.pages) for memory in one.host()], rel=1e-4
    )


def test_a_plan_of_devices_asks_again_about_other_contexts() -> None:
    plan = planned("llama-3.1-70b", tp=2)
    longest = plan.max_ctx_tokens()
    assert planned("llama-3.1-70b", tp=2, ctx_tokens=longest).fits
    assert not planned("llama-3.1-70b", tp=2, ctx_tokens=longest + 17).fits
    crowded = replace(load_profile("h200"), gpu_count=2)
    assert plan_memory(plan.case, crowded).max_ctx_tokens() == longest
