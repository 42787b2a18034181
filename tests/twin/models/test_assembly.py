"""Layers put together: kinds with names, in their order; and the line that sums a model up."""

from typing import Any

import pytest

from tests.twin.models.config.sums import row, spec_of
from twin.models.assembly import stacked
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


@pytest.mark.parametrize(
    ("architecture", "changes", "line"),
    [
        ("LlamaForCausalLM", {}, "98.5K dense, full attention"),
        ("MixtralForCausalLM", {}, "272K with 152K active, 4 experts, full attention"),
        (
            "Cohere2ForCausalLM",
            {},
            "93.5K dense, 4 layers of sliding window of 64 tokens, 1 layer of full attention",
        ),
    ],
)
def test_a_model_is_said_in_one_line(architecture: str, changes: dict[str, object], line: str) -> None:
    assert spec_of(row(architecture), **changes).summary == line
