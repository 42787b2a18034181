"""A rank's share of a model: what is divided adds up to the whole, what is not lies on every rank."""

from typing import get_args

import pytest
from msgspec.structs import replace

from tests.worlds import model as toy
from twin.models import load_model, model_names
from twin.models.mixers import Attention, GatedDeltaNet, LatentAttention, Mamba2
from twin.models.sharded import sharded, staged
from twin.models.spec import Drafter, FeedForward, ModelSpec, Part

WHOLE_PARTS: tuple[Part, ...] = ("router", "vectors")


def shares() -> list[tuple[str, int]]:
    """Every shipped model with the numbers of ranks that can share it."""
    found = []
    for name in model_names():
        for ranks in (2, 3, 4, 8):
            try:
                sharded(load_model(name), ranks)
            except ValueError:
                continue
            found.append((name, ranks))
    return found


@pytest.mark.parametrize(("name", "ranks"), shares())
def test_ranks_together_hold_the_model_and_little_more(name: str, ranks: int) -> None:
    whole, rank = load_model(name), sharded(load_model(name), ranks)
    for part in get_args(Part):
        one, all_of_it = rank.parameters.get(part, 0), whole.parameters.get(part, 0)
        if part in WHOLE_PARTS:
            assert one == all_of_it
        else:
            assert all_of_it <= ranks * one <= ranks * all_of_it
    assert ranks * sum(rank.weight_bytes.values()) < 1.03 * sum(whole.weight_bytes.values())


def test_one_rank_has_the_model_itself() -> None:
    whole = toy()
    assert sharded(whole, 1) is whole


@pytest.mark.parametrize(("ranks", "query_heads", "kv_heads"), [(2, 12, 2), (4, 6, 1), (8, 3, 1)])
def test_kv_heads_are_divided_down_to_one_and_then_kept_by_several(ranks: int, query_heads: int, kv_heads: int) -> None:
    """24 query and 4 KV heads: at 8 ranks the group keeps twice the cache."""
    attention = sharded(load_model("qwen3.8-27b"), ranks).attention
    assert isinstance(attention, Attention)
    assert (attention.query_heads, attention.kv_heads, attention.head_dim) == (query_heads, kv_heads, 256)


def test_a_latent_cache_is_whole_on_every_rank_and_states_are_divided() -> None:
    latent = sharded(load_model("deepseek-v3.2"), 8).attention
    assert isinstance(latent, LatentAttention)
    assert (latent.query_heads, latent.kv_rank, latent.rope_dim) == (16, 512, 64)
    assert latent.indexer == load_model("deepseek-v3.2").indexer
    (state,) = sharded(load_model("qwen3.8-27b"), 4).states
    assert isinstance(state, GatedDeltaNet)
    assert (state.key_heads, state.value_heads) == (4, 12)
    grouped = Mamba2(heads=16, head_dim=8, groups=2, state=4, conv_kernel=4)
    kinds = {"one": replace(toy(every=1).kinds["attention"], mixers=(grouped,))}
    (shared,) = sharded(replace(toy(every=1), kinds=kinds, order=(("one", 1),)), 8).states
    assert isinstance(shared, Mamba2)
    assert (shared.heads, shared.groups) == (2, 1)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [(3, "3 ranks do not share 4 KV heads"), (5, "5 ranks do not share 24 query heads"),
     (6, "6 ranks cannot keep 4 KV heads equally often")],
)  # fmt: skip
def test_heads_that_ranks_cannot_share_are_refused_in_a_line(ranks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sharded(load_model("qwen3.8-27b"), ranks)


def test_experts_are_divided_each_and_a_dense_width_has_to_be_even() -> None:
    whole = load_model("qwen3-30b-a3b")
    (feed,) = {kind.feed_forward for kind in sharded(whole, 4).kinds.values()}
    assert feed is not None
    assert (feed.experts, feed.active, feed.intermediate) == (128, 8, 192)
    odd = toy()
    kinds = {name: replace(kind, feed_forward=FeedForward(intermediate=15)) for name, kind in odd.kinds.items()}
    with pytest.raises(ValueError, match="2 ranks do not share 15 intermediates"):
        sharded(replace(odd, kinds=kinds, drafters=()), 2)


def test_exact_bytes_of_a_checkpoint_are_divided_with_their_elements() -> None:
    whole = toy(every=1)
    exact = replace(whole, weights=replace(whole.weights, part_bytes={"attention": 999}))
    rank = sharded(exact, 2)
    assert 2 * rank.weight_bytes["attention"] >= exact.weight_bytes["attention"] == 999
    assert rank.part_bits["attention"] == pytest.approx(exact.part_bits["attention"])


def test_a_drafter_is_divided_like_its_model() -> None:
    drafter = next(each for each in load_model("qwen3.8-27b-fast").drafters if each.kind == "sequential")
    (half,) = (each for each in sharded(load_model("qwen3.8-27b-fast"), 2).drafters if each.name == drafter.name)
    assert isinstance(half, Drafter)
    assert half.query_heads == drafter.query_heads / 2
    assert half.weight_bytes == pytest.approx(drafter.weight_bytes / 2, abs=1)


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1)])
def test_stages_have_all_layers_between_them(cuts: tuple[int, ...]) -> None:
    whole: ModelSpec = toy()
    stages = [staged(whole, sum(cuts[:index]), size) for index, size in enumerate(cuts)]
    assert tuple(kind for stage in stages for kind in stage.layer_kinds) == whole.layer_kinds
    attention = sum(stage.parameters["attention"] for stage in stages)
    assert attention == whole.parameters["attention"]
