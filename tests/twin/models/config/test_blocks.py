"""Layers put together: kinds with names, in their order; and ways to scale positions."""

from typing import Any

import pytest

from tests.twin.models.config.sums import row, spec_of
from twin.errors import BadFile
from twin.models.config.blocks import ROPE_KINDS, stacked
from twin.models.mixers import Attention, ShortConvolution
from twin.models.spec import FeedForward, Layer

FULL = Attention(query_heads=4, kv_heads=2, head_dim=8)
SLIDING = Attention(query_heads=4, kv_heads=2, head_dim=8, window=16)
WIDE = Attention(query_heads=8, kv_heads=2, head_dim=8)
MLP, MOE = FeedForward(intermediate=32), FeedForward(intermediate=32, experts=4, active=2)


def layer(mixer: Any, feed: FeedForward | None = MLP) -> Layer:
    return Layer(mixers=(mixer,) if mixer else (), feed_forward=feed)


@pytest.mark.parametrize(
    ("layers", "names", "order"),
    [
        ([layer(FULL)] * 3, ["full"], (("full", 3),)),
        ([layer(SLIDING), layer(FULL)] * 2, ["sliding", "full"], (("sliding", 1), ("full", 1))),
        ([layer(FULL), layer(FULL, MOE)], ["full_dense", "full_moe"], (("full_dense", 1), ("full_moe", 1))),
        ([layer(FULL), layer(WIDE)], ["full", "full_2"], (("full", 1), ("full_2", 1))),
        ([layer(FULL), layer(None), layer(FULL, None)], ["full", "dense", "full_2"], None),
        ([layer(ShortConvolution(channels=8, conv_kernel=3))], ["short_convolution"], None),
        ([layer(None, None)], ["empty"], None),
    ],
)
def test_kinds_have_names_that_tell_them_apart(layers: list[Layer], names: list[str], order: Any) -> None:
    kinds, runs = stacked(layers)
    assert list(kinds) == names
    assert [kinds[name] for name in kinds] == list(dict.fromkeys(layers))
    assert order is None or runs == order


@pytest.mark.parametrize("kind", sorted(ROPE_KINDS))
def test_a_known_way_to_scale_positions_changes_nothing(kind: str) -> None:
    plain = spec_of(row("LlamaForCausalLM"))
    for table in ({"rope_scaling": {"type": kind, "factor": 2.0}}, {"rope_parameters": {"rope_type": kind}}):
        assert spec_of(row("LlamaForCausalLM"), **table) == plain


def test_positions_may_be_scaled_by_kind_of_layer() -> None:
    by_kind = {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "spiral"}}
    with pytest.raises(BadFile, match=r"rope_parameters\.sliding_attention\.rope_type: is 'spiral'"):
        spec_of(row("Olmo3ForCausalLM"), rope_parameters=by_kind)
