"""A model's shape: order of layers, derived sizes, and what a shape may not be."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.worlds import model
from twin.models import ModelSpec, load_model, model_names
from twin.models.mixers import Attention, Mamba2, Mixer
from twin.models.spec import Drafter, FeedForward, Layer, Stored, Weights


def test_kinds_follow_each_other_in_order_and_begin_again() -> None:
    assert model(layers=4, every=2).layer_kinds == ("recurrent", "attention") * 2
    assert model(layers=5, every=3).layer_kinds == ("recurrent", "recurrent", "attention", "recurrent", "recurrent")
    assert set(model(layers=3, every=1).layer_kinds) == {"attention"}
    assert model(layers=5, every=3).kind_counts == {"recurrent": 4, "attention": 1}


HEADS = Attention(query_heads=4, kv_heads=2, head_dim=8)


def of(*mixers: Mixer, **changes: Any) -> ModelSpec:
    """The toy model with one kind of layer for each mixer."""
    kinds = {
        str(at): Layer(mixers=(mixer,), feed_forward=FeedForward(intermediate=16)) for at, mixer in enumerate(mixers)
    }
    spec = model(layers=len(mixers), every=1, sparse=False)
    return replace(spec, kinds=kinds, order=tuple((kind, 1) for kind in kinds), **changes)


def test_the_attention_that_sees_furthest_is_asked_about_formats_and_layers_that_share_a_cache_keep_none() -> None:
    window, local, shared = replace(HEADS, window=64), replace(HEADS, local_chunk=128), replace(HEADS, shares_kv=True)
    spec = of(window, local, HEADS, shared)
    assert spec.attention == HEADS
    assert spec.caches == {window: 1, local: 1, HEADS: 1}
    assert of(window, local).attention == local
    mamba = Mamba2(heads=2, head_dim=4, groups=1, state=8, conv_kernel=4)
    alone = of(mamba)
    assert (alone.attention, alone.caches, alone.states) == (None, {}, {mamba: 1})


def test_parameters_and_bytes_go_by_part() -> None:
    """Hidden 8, 32 words: a router and 4 experts of 3 x 8 x 16, a head that is the embedding, norms in 16 bits."""
    moe = FeedForward(experts=4, active=2, intermediate=16, shared_intermediate=8)
    layer = Layer(mixers=(replace(HEADS, vectors=5),), feed_forward=moe, vectors=16)
    weights = Weights(
        format="w4a16", bits=4, parts={"router": Stored(format="bf16", bits=16)}, part_bytes={"experts": 1000}
    )
    spec = replace(
        model(layers=1, every=1), kinds={"moe": layer}, order=(("moe", 1),), tied=True, vectors=8, weights=weights
    )
    attention, always = 8 * 32 + 8 * 32 + 32 * 8, 3 * 8 * 8
    assert spec.parameters == {
        "embedding": 256, "head": 0, "vectors": 8 + 16 + 5, "attention": attention, "router": 32,
        "experts": 4 * 384, "feed_forward": always,
    }  # fmt: skip
    assert spec.active_parameters == 256 + 29 + attention + 32 + 2 * 384 + always
    assert spec.weight_bytes == {
        "embedding": 128, "vectors": 58, "attention": attention / 2, "router": 64, "experts": 1000, "feed_forward": 96,
    }  # fmt: skip


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": "twin.model/3"}, "schema must be 'twin.model/2'"),
    ({"layers": 0}, r"\$\.layers"),
    ({"hidden": 2.5}, r"\$\.hidden"),
    ({"vocab": 2**24 + 1}, r"<= 16777216 - at `\$\.vocab`"),
    ({"colour": "red"}, "unknown field `colour`"),
    ({"order": []}, "order is empty"),
    ({"order": [["dense", 1]]}, "order names 'dense', which is none of kinds"),
    ({"order": [["attention", 9]]}, "order never comes to 'recurrent' within 4 layers"),
    ({"kinds": {"attention": {"mixers": [{"kind": "mlp"}]}}}, "Invalid value 'mlp'"),
]

WRONG_MIXERS: list[tuple[dict[str, Any], str]] = [
    ({"query_heads": 4098}, r"<= 4096 - at `\$\.kinds.*\.mixers.*\.query_heads`"),
    ({"query_heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
    ({"window": 8, "local_chunk": 8}, "a window or local chunks, not both"),
    ({"indexer": {"query_heads": 2, "head_dim": 4, "budget": 18, "ratio": 4}}, "18 is not a multiple of ratio 4"),
    ({"indexer": {"query_heads": 2, "head_dim": 4, "budget": 2**30, "ratio": 2**20}}, r"<= 65536 - at"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_a_wrong_shape_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(msgspec.to_builtins(model(ngram=True)) | change, ModelSpec)


@pytest.mark.parametrize(("change", "message"), WRONG_MIXERS, ids=[str(row[0]) for row in WRONG_MIXERS])
def test_a_wrong_mixer_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    data = msgspec.to_builtins(model())
    data["kinds"]["attention"]["mixers"][0].update(change)
    with pytest.raises(ValueError, match=message):
        msgspec.convert(data, ModelSpec)


DRAFTER: dict[str, Any] = {
    "name": "toy", "kind": "sequential", "summary": "a drafter for sums on paper", "layers": 1, "query_heads": 4,
    "kv_heads": 2, "head_dim": 8, "window": 0, "parameters": 100, "weight_bytes": 50, "head_bytes": 20,
    "own_head": True, "max_tokens": 4, "default_tokens": 2,
}  # fmt: skip

WRONG_DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"query_heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
    ({"default_tokens": 5}, "default_tokens 5 is more than max_tokens 4"),
    ({"lookup_accepts": 1.0}, "lookup_accepts must be above block_accepts"),
    ({"block_accepts": 3.0, "lookup_accepts": 2.5}, "lookup_accepts must be above block_accepts"),
    ({"kind": "tree"}, r"\$\.kind"),
    ({"layers": 0}, r"\$\.layers"),
    ({"max_tokens": 65}, r"\$\.max_tokens"),
    ({"own_head": 1}, r"\$\.own_head"),
    ({"parameters": 10**400}, r"\$\.parameters"),
    ({"speed": 1}, "unknown field `speed`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_DRAFTERS, ids=[str(row[0]) for row in WRONG_DRAFTERS])
def test_a_wrong_drafter_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(DRAFTER | change, Drafter)


@pytest.mark.parametrize("name", model_names())
def test_shipped_drafters_have_names_of_their_own_and_draft_what_their_block_holds(name: str) -> None:
    drafters = load_model(name).drafters
    assert len({drafter.name for drafter in drafters}) == len(drafters)
    for drafter in drafters:
        if drafter.kind == "block":
            assert drafter.default_tokens == drafter.block_tokens - 1  # an anchor and what it proposes
            assert drafter.block_accepts <= drafter.block_tokens
        assert drafter.lookup_accepts <= drafter.max_tokens + 1


def test_the_layer_of_mtp_is_an_attention_layer_and_a_projection_of_two_hidden_states() -> None:
    """2 x 5120 -> 5120, attention as in the model, its feed-forward: 424.7M, a byte each in the base checkpoint."""
    spec = load_model("qwen3.8-27b")
    joined, mixer, feed = 2 * 5120 * 5120, 5120 * (2 * 6144 + 2 * 1024) + 6144 * 5120, 3 * 5120 * 17_408
    assert spec.drafters[0].parameters == joined + mixer + feed == 424_673_280
    assert spec.drafters[0].weight_bytes == pytest.approx(424_673_280, rel=1e-3)


def test_a_block_drafter_reads_the_head_of_its_model_and_mtp_one_of_40960_rows() -> None:
    base, fast = load_model("qwen3.8-27b"), load_model("qwen3.8-27b-fast")
    for spec in (base, fast):
        bits = spec.part_bits["head"]
        mtp, dflash = spec.drafters
        assert dflash.head_bytes == pytest.approx(5120 * 248_320 * bits / 8, rel=0.01)
        assert mtp.head_bytes == pytest.approx(5120 * 40_960 * bits / 8, rel=0.01)
